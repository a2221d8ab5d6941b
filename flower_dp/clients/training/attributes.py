"""Contents of a model besides trained values: plain attributes of its layers, and frozen tensors with their hash."""

import hashlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Attributes of `nn.Module` itself, such as its hooks and its mode; buffers are restored with their values.
_OTHERS = frozenset(vars(nn.Module())) - {"_parameters", "_modules"}
_CONTAINERS = (list, tuple, set, frozenset, deque)
_TABLES = (dict, OrderedDict, defaultdict)


class Attributes:
    """The attributes of all layers of a model, as they were when this was made.

    Tensors and arrays are copied, and so are lists, tables and sets of them; parameters and all other objects are kept as they
    are. So a count, a list of past inputs or a tensor outside the buffers can be restored, but not the contents of an object of
    another class: `flower_dp.clients.training.record_isolation` finds out whether anything is left.
    """

    def __init__(self, module: nn.Module) -> None:
        self._of = [
            (layer, {name: _copy(value) for name, value in vars(layer).items() if name not in _OTHERS})
            for layer in module.modules()
        ]

    def restore(self) -> None:
        """Restore every layer's attributes, and remove those that are new."""
        for layer, saved in self._of:
            present = vars(layer)
            for name in present.keys() - saved.keys() - _OTHERS:
                del present[name]
            for name, value in saved.items():
                if isinstance(value, _TABLES) and type(present.get(name)) is type(value):
                    present[name].clear()  # the same object, which others may hold
                    present[name].update(_copy(value))
                else:
                    present[name] = _copy(value)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards restore the mode of each layer.

    One call of `module.train()` would also put layers that the user keeps in evaluation mode, such as a frozen part with dropout,
    into training mode.
    """
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, was in modes:
            layer.training = was


def _copy(value: Any) -> Any:
    """Return a copy of tensors and containers; anything else as it is."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad) if value.is_leaf else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in _CONTAINERS:
        copied = [_copy(item) for item in value]
        return deque(copied, value.maxlen) if isinstance(value, deque) else type(value)(copied)
    if type(value) in _TABLES:
        table = {name: _copy(item) for name, item in value.items()}
        return defaultdict(value.default_factory, table) if isinstance(value, defaultdict) else type(value)(table)
    return value


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sums of tensors' bits, in words of 8 bytes, which show changes that torch does not count, as those of `.data`.

    The sums are on the tensors' device, so that one read compares two fingerprints.
    """
    sums = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()
        octets = flat.view(torch.uint8)
        whole = len(octets) // 8 * 8
        sums += [octets[:whole].view(torch.int64).sum(), octets[whole:].sum()]
    return torch.stack(sums) if sums else torch.zeros(0)


def base_hash(module: nn.Module) -> str:
    """Return the SHA-256 of a module's frozen base: names, shapes and values of frozen parameters and of buffers.

    The hash is the same on every device and in every precision that holds the values: floats count as float32. Only tensors in
    the state_dict count.

    Args:
        module: model on any device.

    Returns:
        64 hexadecimal digits; "" if no parameter is frozen.

    Example:
        >>> import torch
        >>> from flower_dp.clients.training.attributes import base_hash
        >>> model = torch.nn.Linear(3, 2)
        >>> base_hash(model), len(base_hash(model.requires_grad_(False)))
        ('', 64)
    """
    if all(parameter.requires_grad for parameter in module.parameters()):
        return ""
    rest = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and not tensor.requires_grad
    }
    digest = hashlib.sha256()
    for name, tensor in sorted(rest.items()):
        values = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype).contiguous()
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
