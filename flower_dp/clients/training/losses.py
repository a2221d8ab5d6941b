"""Losses that are safe for invalid labels: cross-entropy, and the hinge loss."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

# Model outputs, targets -> the mean loss of a batch; under per-record clipping, of a batch of one record.
Loss = Callable[[Tensor, Tensor], Tensor]

# The class that torch's cross-entropy leaves out.
IGNORED = -100


def checked(loss: Loss) -> Loss:
    """Return `cross_entropy` instead of torch's, and any other loss unchanged."""
    return cross_entropy if loss is nn.functional.cross_entropy else loss


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the targets that are classes; without any, 0 with a gradient of zero.

    A target outside [0, classes) is left out of the mean, as torch leaves out its ignore index. Torch would raise an error for it
    on a CPU, and make a GPU unusable for the process. If all targets are classes, value and gradient are torch's, to the bit.
    Targets that are probabilities go to torch unchecked.

    Args:
        outputs: logits [batch, classes, ...].
        targets: class indices [batch, ...], int64, or probabilities.
    """
    counted = _known(outputs, targets)
    if counted is None:
        return nn.functional.cross_entropy(outputs, targets)
    some = counted.any()
    # If no target counts, give all of them a class: the mean over no targets would be NaN, and so would its gradient.
    safe = targets.where(counted, IGNORED).where(some, 0)
    return nn.functional.cross_entropy(outputs, safe).where(some, 0.0)


def record_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of one record; NaN with a gradient of zero if any target is neither a class nor ignored.

    Otherwise it equals torch's, up to the last bits. Vectorized over records, torch's own imports SymPy, which takes 0.4 s.
    """
    known = _known(outputs, targets)
    if known is None or outputs.ndim < 2 or targets.shape != outputs[:, 0].shape:
        return nn.functional.cross_entropy(outputs, targets)
    whole = (known | (targets == IGNORED)).all()
    # A record that is not whole has class 0 everywhere: a gradient through NaN would be NaN.
    losses = class_losses(outputs, targets.where(known & whole, 0))
    counted = known | ~whole
    return (losses.where(counted, 0.0).sum() / counted.sum()).where(whole, math.nan)


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean hinge loss max(0, 1 - y f) of a linear SVM; at 1 = y f its gradient is zero.

    A target that is neither -1 nor +1 counts as a loss of 0 with a gradient of zero. The loss has no L2 term: use `weight_decay`
    of `Training`, which does not depend on records and so needs neither clip nor noise.

    Args:
        outputs: f, one number per record [batch, 1].
        targets: y [batch], of any dtype.
    """
    known = (targets == 1) | (targets == -1)
    losses = nn.functional.relu(1 - targets * outputs.reshape(targets.shape))
    return losses.where(known, 0.0).mean()


def class_losses(outputs: Tensor, classes: Tensor) -> Tensor:
    """Return the cross-entropy of every target [batch, ...]; each must be a class."""
    return -nn.functional.log_softmax(outputs, dim=1).gather(1, classes.unsqueeze(1)).squeeze(1)


def known_classes(targets: Tensor, num_classes: int) -> Tensor:
    """Return a mask of the targets that are classes."""
    return (targets >= 0) & (targets < num_classes)


def _known(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return a mask of the targets that are classes; None if the targets are not class indices."""
    return known_classes(targets, outputs.shape[1 if outputs.ndim > 1 else 0]) if targets.dtype == torch.int64 else None
