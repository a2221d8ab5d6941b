"""Devices: where a model is trained, and what differs between a CPU and a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# In plain RuntimeErrors of torch: a GPU's libraries, or MPS, have no memory left. NVIDIA documents the states as allocations that
# have failed, of cuBLAS, cuSOLVER, cuSPARSE, cuFFT, and cuDNN up to 8 and from 9 on.
_NO_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: out of memory",
    "MPS backend out of memory",
)
# Devices without float64, in which norms, sums and noise must be computed.
_SINGLE_PRECISION = frozenset({"mps"})


class Generator(Protocol):
    """A process-wide generator of random numbers."""

    def get_state(self) -> Any:
        """Return the state."""

    def set_state(self, state: Any) -> Any:
        """Take over an earlier state."""

    def manual_seed(self, seed: int) -> Any:
        """Begin the sequence of a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Functions:
    """A generator by the functions of a device's module, for a backend that does not list its generators (MPS)."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    manual_seed: Callable[[int], Any]


def default_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device to train on: the one that is given, else the GPU if this process has one, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_accelerator(device: torch.device) -> bool:
    """Tell whether a device is not the CPU: operations are queued, and each read of a number waits for all of them."""
    return device.type != "cpu"


def exact_device(device: torch.device) -> torch.device:
    """Return where rows are clipped, noised and added up: the device itself, or the CPU for a device without float64."""
    return torch.device("cpu") if device.type in _SINGLE_PRECISION else device


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on an accelerator; 0 for one that does not say."""
    told = getattr(torch.get_device_module(device), "mem_get_info", None)
    return 0 if told is None else int(told(device)[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error of torch says that an accelerator has no memory left, which is no client's fault.

    Another state, such as CUDNN_STATUS_NOT_SUPPORTED, may have any reason, and is an error like any other.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(state in str(error) for state in _NO_MEMORY)


def release_memory(device: torch.device) -> None:
    """Give back what an accelerator's allocator keeps of memory that nobody uses."""
    if empty := getattr(torch.get_device_module(device), "empty_cache", None):
        empty()


def total_memory(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory; of one that does not say, 4 GiB."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return 2**32 if properties is None else int(properties(device).total_memory)


def default_generators(device: torch.device) -> list[Generator]:
    """Return torch's process-wide generators that work on a device may use: the CPU's, and the device's own.

    Raises:
        RuntimeError: if the device has a generator that can't be found: its draws would follow from no seed.
    """
    if not is_accelerator(device):
        return [torch.default_generator]
    module = torch.get_device_module(device)
    listed = getattr(module, "default_generators", None)
    if listed:
        index = module.current_device() if device.index is None else device.index
        return [torch.default_generator, listed[index]]
    if not hasattr(module, "get_rng_state"):
        raise RuntimeError(f"device {device}: its random generator can't be found")
    own = _Functions(get_state=module.get_rng_state, set_state=module.set_rng_state, manual_seed=module.manual_seed)
    return [torch.default_generator, own]


def select_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a tensor, on the tensor's device.

    Args:
        tensor: [n, ...], on any device.
        rows: int64, on any device.

    Raises:
        IndexError: for a row that the tensor does not have. (A GPU would be unusable for the process after such a lookup.)
    """
    if is_accelerator(tensor.device) and rows.numel():
        least, greatest = torch.aminmax(rows)
        if int(least) < 0 or int(greatest) >= len(tensor):
            raise IndexError("index out of range in self")
    return tensor.index_select(0, rows.to(tensor.device))


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Give the context in which all of a client's work is computed: on a GPU, deterministic convolutions without TF32.

    TF32 keeps 10 bits of a float32. torch allows it in convolutions by default and in matrix products on request. Here both take
    it on request only: `torch.set_float32_matmul_precision("high")`. Whoever has set it by torch's newer switches alone
    (`torch.backends.cudnn.conv.fp32_precision`) has what they say.
    """
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    try:
        allowed = cudnn.allow_tf32
    except RuntimeError:  # by the newer switches
        allowed = None
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        if allowed is not None:
            cudnn.allow_tf32 = _wants_tf32()
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        if allowed is not None:
            cudnn.allow_tf32 = allowed


def _wants_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set by torch's newer switch, `torch.backends.cuda.matmul.fp32_precision`
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
