"""Devices: the device on which a model is trained, and differences between a CPU and a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

# Texts in plain RuntimeErrors of torch if a GPU's libraries, or MPS, have no memory left. NVIDIA documents the states as failed
# allocations of cuBLAS, cuSOLVER, cuSPARSE, cuFFT, and cuDNN up to 8 and from 9 on.
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


def default_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device to train on: `device` if given, else the GPU if this process has one, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_accelerator(device: torch.device) -> bool:
    """Tell whether a device is not the CPU. On such a device operations are queued, and each read of a number waits for them."""
    return device.type != "cpu"


def exact_device(device: torch.device) -> torch.device:
    """Return the device on which rows are clipped, noised and added up: the CPU for a device without float64, else the device."""
    return torch.device("cpu") if device.type in _SINGLE_PRECISION else device


def free_memory(device: torch.device) -> int:
    """Return the free bytes of an accelerator's memory; 0 if the number is not known."""
    info = getattr(torch.get_device_module(device), "mem_get_info", None)
    return 0 if info is None else int(info(device)[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error of torch says that an accelerator has no memory left, which is not a client's fault.

    Another state, such as CUDNN_STATUS_NOT_SUPPORTED, may have any reason, and is an error like any other.
    """
    by_text = isinstance(error, RuntimeError) and any(state in str(error) for state in _NO_MEMORY)
    return by_text or isinstance(error, torch.OutOfMemoryError)


def release_memory(device: torch.device) -> None:
    """Release the unused memory that an accelerator's allocator keeps."""
    if empty := getattr(torch.get_device_module(device), "empty_cache", None):
        empty()


def total_memory(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory; 4 GiB if the number is not known."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return 2**32 if properties is None else int(properties(device).total_memory)


def select_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a tensor, on the tensor's device.

    Args:
        tensor: tensor [n, ...], on any device.
        rows: indices of rows, int64, on any device.

    Raises:
        IndexError: for a row outside the tensor. (Such a lookup would make a GPU unusable for the process.)
    """
    if is_accelerator(tensor.device) and rows.numel():
        least, greatest = torch.aminmax(rows)
        if int(least) < 0 or int(greatest) >= len(tensor):
            raise IndexError("index out of range in self")
    return tensor.index_select(0, rows.to(tensor.device))


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Enter the context in which all of a client's work is computed: on a GPU, deterministic convolutions without TF32.

    TF32 keeps 10 bits of a float32. torch allows it in convolutions by default and in matrix products on request. Here both use
    it on request only: `torch.set_float32_matmul_precision("high")`. torch's newer switches
    (`torch.backends.cudnn.conv.fp32_precision`) take precedence if the user has set them.
    """
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    before = {"deterministic": cudnn.deterministic, "benchmark": cudnn.benchmark}
    inside = {"deterministic": True, "benchmark": False}
    with suppress(RuntimeError):  # torch refuses to read the old switch after a use of the newer ones
        before["allow_tf32"] = cudnn.allow_tf32
        inside["allow_tf32"] = _wants_tf32()
    try:
        for name, value in inside.items():
            setattr(cudnn, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)


def _wants_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set by torch's newer switch, `torch.backends.cuda.matmul.fp32_precision`
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
