"""A loss of single records, found out on outputs and targets that nobody has: whether it is what the loss of a batch is made of.

The mean over a batch may divide by something that targets decide, as `CrossEntropyLoss(weight=...)` divides by the weights of the
targets' classes. Of a single record that takes the record's own weight out again, and nobody would notice.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from flower_dp.clients.reasons import LOSS_OF_WEIGHTS, LOSS_SHAPE, LOSS_UNEVEN, UnfitLossError
from flower_dp.clients.training.devices import is_accelerator
from flower_dp.clients.training.findings import findings_of
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.recipe import FlatModel

# Made-up records, of as many classes, and the largest relative difference between two sums of their losses.
_MOST = 64
_TOLERANCE = 1e-4


class RecordLoss:
    """A loss, to be called with outputs and target of one record [1, ...] each, also within `torch.func.vmap`.

    Args:
        model: the model, whose weights the loss must not use.
        loss: model outputs, targets -> loss.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss.

        Raises:
            UnfitLossError: if it is not one number.
        """
        value = self._loss(outputs, target)
        if value.ndim:
            raise UnfitLossError(LOSS_SHAPE)
        self._seen.add((outputs.shape[1:], outputs.dtype, target.shape[1:], target.dtype))
        return value

    def check(self) -> None:
        """Check the loss on made-up outputs and targets of the shapes and types that it was called with.

        Raises:
            UnfitLossError: if the loss of a batch is neither the mean nor the sum of the losses of its records, or it uses the
                model's weights.
        """
        findings = findings_of(self._model)
        for seen in self._seen:
            key = ("record loss", self._loss, *seen)
            if key not in findings:
                try:
                    findings[key] = self._why_not(*seen)
                except Exception:  # nobody knows which targets it takes
                    findings[key] = None
            if findings[key] is not None:
                raise UnfitLossError(findings[key])

    def _why_not(self, output: torch.Size, output_type: torch.dtype, target: torch.Size, target_type: torch.dtype) -> str | None:
        device = self._model.device
        classes = output[0] if output else 2
        if classes == 1 and not is_accelerator(device):  # whose process would not survive a class that there is not
            classes = 2
        count = min(_MOST, max(2, classes))
        number = torch.arange(count)
        outputs = _waves(count, output).to(device, output_type)
        if target_type.is_floating_point:
            targets = _waves(count, target).abs().to(device, target_type)
        else:  # all targets of a record are of one class: some losses leave out a class
            chosen = (number * classes // count).view(-1, *[1] * len(target)).expand(count, *target)
            targets = chosen.to(device, target_type)
        with torch.no_grad(), _Uses([self._model.vector, *self._model.parameters]) as uses:
            each = torch.stack([self._loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(count)])
            finite = each.isfinite()
            each = each[finite]
            whole = self._loss(outputs[finite], targets[finite])
        if uses.found:
            return LOSS_OF_WEIGHTS
        # A loss that was written for one record may look at the first one alone.
        size = float(each.abs().mean())
        wanted = ((each.mean(), size), (each.sum(), size * len(each)), (each[0], size))
        return None if any(abs(float(whole - one)) <= _TOLERANCE * scale for one, scale in wanted) else LOSS_UNEVEN


def _waves(count: int, shape: torch.Size) -> Tensor:
    """Return numbers in [-1, 1] that differ from each other."""
    return torch.cos(1.7 * torch.arange(1.0, count * shape.numel() + 1)).view(count, *shape)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that notes whether an operation takes one of some tensors.

    Attributes:
        found: whether one did.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors, self.found = WeakTensorKeyDictionary(dict.fromkeys(tensors, True)), False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to import its compiler for this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Execute an operation."""
        given = [one for one in tree_leaves((args, dict(kwargs or {}))) if isinstance(one, Tensor)]
        self.found |= any(one in self._tensors for one in given)
        return func(*args, **dict(kwargs or {}))
