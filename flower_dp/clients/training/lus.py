"""LUS: local update sparsification (Cheng et al. 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flower_dp.core import checks
from flower_dp.core.compression import num_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LUS:
    """A client keeps the largest coordinates of its own update, before the clip; the others become 0.

    The client's data choose these coordinates. So this is a part of training: the clip bounds what is left, and all coordinates
    get noise, those that were dropped as well. It saves no noise and no bytes; a shorter update is clipped less.

    Attributes:
        keep_ratio: part of the coordinates that is kept.

    Raises:
        ValueError: if it is not in (0, 1).

    Example:
        >>> import torch
        >>> from flower_dp.clients import LUS
        >>> LUS(keep_ratio=0.5)(torch.tensor([0.5, -3.0, 2.0, 0.1])).tolist()
        [0.0, -3.0, 2.0, 0.0]
    """

    keep_ratio: float

    def __post_init__(self) -> None:
        checks.number("keep_ratio", self.keep_ratio, above=0, below=1)

    def __call__(self, update: Tensor) -> Tensor:
        """Return a new vector [d] with the `num_kept(keep_ratio, d)` largest coordinates of an update, NaN among them."""
        largest = update.abs().topk(num_kept(self.keep_ratio, update.shape[0]), sorted=False).indices
        return torch.zeros_like(update).index_copy_(0, largest, update[largest])
