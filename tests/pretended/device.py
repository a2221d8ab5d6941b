"""A pretend accelerator for machines without one: tensors that say they are on `pretend:0`, and are computed on the CPU.

What raises on a GPU raises here: an operation that mixes devices, a generator of another device, `numpy()`. Everything else gives
the bits of the CPU. What it does not see: kernels whose bits vary, TF32, memory, and what needs `torch.cuda` itself.

It is built on torch's Python backend for PrivateUse1, which torch calls experimental.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

_aten = torch.ops.aten
NAME = "pretend"
# These take an index, or copy, from the CPU, as on a GPU.
_MAY_MIX = {_aten.index.Tensor, _aten.index_put_.default, _aten.copy_.default, _aten._to_copy.default}


# Generators on the pretend device, by the address under which an operation receives them again; it must stay theirs.
_generators: dict[int, torch.Generator] = {}


class Generator(torch.Generator):
    """A generator on the device that it is asked for: `torch.Generator` in tests that draw on the pretend device."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        pretends = torch.device(device).type == NAME
        made = super().__new__(cls, "cpu" if pretends else device)
        if pretends:
            _generators[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE if self._cdata in _generators else super().device


class _Module(_DummyBackendModule):
    """What `torch.get_device_module` returns, with what `torch.cuda` has and this package reads."""

    default_generators: tuple[torch.Generator, ...] = ()

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 2**32, 2**32

    def get_device_properties(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**32)


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
DEVICE = torch.device(NAME, 0)
_Module.default_generators = (Generator(NAME),)


class Pretend(torch.Tensor):
    """A tensor on the pretend device; `inner` is the one that computes.

    Attributes:
        float64: whether the device has float64; Apple's GPUs have not.
        counted: operations that were executed so far, by name; `to the CPU` counts copies from the device.
    """

    float64: ClassVar[bool] = True
    counted: ClassVar[Counter[str]] = Counter()
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Pretend":
        if inner.dtype == torch.float64 and not cls.float64:
            raise TypeError("the pretend device has no float64")
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride(), storage_offset=inner.storage_offset(), device=DEVICE
        )
        made.inner = inner
        return made

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: "Pretend") -> None:  # `parameter.data = vector[a:b]` shares memory
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        Pretend.counted["to the CPU"] += 1
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:
        return Pretend(self.inner.new_tensor(data, **options))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = Pretend(self.inner.detach().clone())
        is_parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = made = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretend({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, dict(kwargs or {}))


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, Pretend)]
    target = kwargs.get("device")
    stays = bool(ours) if target is None else torch.device(target).type == NAME
    if ours and func not in _MAY_MIX and any(tensor.ndim for tensor in tensors if not isinstance(tensor, Pretend)):
        raise RuntimeError(f"Expected all tensors to be on the same device, in {func}")
    for leaf in leaves:
        if isinstance(leaf, torch._C.Generator) and (leaf._cdata in _generators) != stays:
            raise RuntimeError(f"Expected a generator of the tensor's device, in {func}")
    _count(func, ours, stays=stays)
    written = kwargs.get("out", args[0] if args else None)
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    if stays and _draws(func) and kwargs.get("generator") is None:
        kwargs["generator"] = _Module.default_generators[0]  # as on a GPU, and not the CPU's
    try:
        made = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    except IndexError as error:
        if ours:
            raise RuntimeError("device-side assert triggered: a GPU is unusable for the process from here on") from error
        raise
    returns = func._schema.returns
    if returns and returns[0].alias_info is not None and returns[0].alias_info.is_write:
        return written
    return tree_map(_wrapped, made) if stays else made


def _count(func: Any, ours: list[Any], *, stays: bool) -> None:
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    leaves = (ours and not stays) or func is _aten._local_scalar_dense.default
    if func is _aten.copy_.default:
        leaves = len(ours) == 1
    Pretend.counted["to the CPU" if leaves else "views" if is_view else func._schema.name.partition("::")[2]] += 1


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and any(one.name == "generator" for one in func._schema.arguments)


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, Pretend) else leaf


def _wrapped(leaf: Any) -> Any:
    return Pretend(leaf) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Pretend) else leaf


_everything = torch.library.Library("_", "IMPL")
_everything.fallback(lambda func, *args, **kwargs: _computed(func, args, kwargs), "PrivateUse1")
_makers = torch.library.Library("aten", "IMPL")
for _name, _maker in (("empty.memory_format", _aten.empty.memory_format), ("empty_strided", _aten.empty_strided.default)):
    _makers.impl(
        _name, lambda *args, _maker=_maker, **kwargs: Pretend(_maker(*args, **kwargs | {"device": "cpu"})), "PrivateUse1"
    )
