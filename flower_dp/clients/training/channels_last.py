"""The layout in memory in which convolutions on a processor take less time: the channels of a pixel side by side."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flower_dp.clients.training.devices import is_accelerator
from flower_dp.clients.training.training_rng import IsolatedRng

# Inputs and targets of a batch -> the gradient of its loss, in the shapes of the parameters.
Gradients = Callable[[Tensor, Tensor], list[Tensor]]
# The largest distance between the gradients in both layouts, relative to the norm.
_TOLERANCE = 1e-3


class Convolutions:
    """The 2-d convolutions of a model, and the kinds of records for which another layout changes no more than last bits.

    A model may fail in the other layout (`outputs.view(n, -1)`), and dropout draws in the order of memory. So both layouts are
    tried on synthetic records: the model, the loss, and shapes and types of records decide, and no value of a record.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        usable = torch.backends.mkldnn.is_available() and not is_accelerator(device)  # type: ignore[no-untyped-call]
        self._layers = [layer for layer in module.modules() if usable and isinstance(layer, nn.Conv2d)]
        self._device, self._known = device, dict[object, bool]()

    def kind_of(self, inputs: Any, targets: Tensor) -> object:
        """Return shapes and types of the records in a batch, as a key; None if there is no layout to choose."""
        if not self._layers or not isinstance(inputs, Tensor):
            return None
        return inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype

    def suit(self, inputs: Any, targets: Tensor, gradients: Gradients, *, key: object) -> bool:
        """Return whether channels last gives the same gradients for records of this kind, cached by a key of `gradients`."""
        kind = self.kind_of(inputs, targets)
        if kind is not None and (key, kind) not in self._known:
            self._known[key, kind] = self._tried(inputs, targets, gradients)
        return kind is not None and self._known[key, kind]

    @contextmanager
    def channels_last(self) -> Iterator[None]:
        """Enter the context in which the convolutions take their inputs, and so make their outputs, with channels last."""
        handles = [layer.register_forward_pre_hook(_turned) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _tried(self, inputs: Tensor, targets: Tensor, gradients: Gradients) -> bool:
        made_up = torch.rand(2, *inputs.shape[1:], generator=torch.Generator().manual_seed(0)).to(inputs.dtype)
        labels, draws = targets.new_zeros(2, *targets.shape[1:]), IsolatedRng.of_data_sets(self._device)
        try:
            with draws:
                draws.restart(0)
                usual = gradients(made_up, labels)
                draws.restart(0)
                with self.channels_last():
                    turned = gradients(made_up, labels)
        except Exception:
            return False
        norms = (torch._foreach_norm(rows) for rows in (torch._foreach_sub(usual, turned), usual))
        distance, length = (float(torch.stack(rows).norm()) for rows in norms)
        return distance <= _TOLERANCE * length


def _turned(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not arguments or not isinstance(arguments[0], Tensor) or arguments[0].ndim != 4:
        return None
    return arguments[0].to(memory_format=torch.channels_last), *arguments[1:]
