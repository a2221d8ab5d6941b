"""Parts of local training: regularizers (penalties on a client's weights), and LUS, local update sparsification."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flower_dp.core import checks
from flower_dp.core.compression import num_kept


class Regularizer(Protocol):
    """A hashable penalty in a client's objective: the batched engine keeps one program for every recipe."""

    def pull(self, weights: Tensor, start: Tensor) -> Tensor:
        """Return the gradient of the penalty, in the shape of the weights; it is added to the gradient of the loss.

        Args:
            weights: weights of one client [d], or of many [slots, d]. No row of the result may depend on another row.
            start: global model [d].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ProximalTerm:
    """The penalty (strength / 2) ||w - w_global||^2 (Li et al. 2020, FedProx; Wei et al. 2020, NbAFL).

    Attributes:
        strength: coefficient (papers: mu).

    Raises:
        ValueError: if it is not above 0.

    Example:
        >>> import torch
        >>> from flower_dp.clients import ProximalTerm
        >>> ProximalTerm(strength=0.5).pull(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])).tolist()
        [1.0, 0.0]
    """

    strength: float

    def __post_init__(self) -> None:
        checks.number("strength", self.strength, above=0)

    def pull(self, weights: Tensor, start: Tensor) -> Tensor:
        """Return strength (w - w_global)."""
        return (weights - start).mul_(self.strength)


@dataclass(frozen=True, slots=True, kw_only=True)
class BLUR:
    """The penalty (strength / 2) max(0, ||w - w_global|| - bound)^2: local training keeps updates near a bound on their norm.

    An update within the bound has no penalty. A longer one is pulled straight back to the global model, by strength times the
    part of its norm above the bound. The clip takes less from shorter updates, but the guarantee still rests on the clip.
    (Bounded local update regularization, Cheng et al. 2022.)

    Attributes:
        strength: coefficient (paper: lambda). strength x step size must stay well below 2, or training jumps over the bound.
        bound: L2 norm of an update up to which there is no penalty (paper: S), about as large as the clip norm.

    Raises:
        ValueError: if either is not above 0.

    Example:
        >>> import torch
        >>> from flower_dp.clients import BLUR
        >>> BLUR(strength=0.5, bound=2.5).pull(torch.tensor([[3.0, 4.0], [1.5, 2.0]]), torch.zeros(2)).tolist()
        [[0.75, 1.0], [0.0, 0.0]]
    """

    strength: float
    bound: float

    def __post_init__(self) -> None:
        checks.number("strength", self.strength, above=0)
        checks.number("bound", self.bound, above=0)

    def pull(self, weights: Tensor, start: Tensor) -> Tensor:
        """Return strength (1 - bound / ||w - w_global||) (w - w_global) beyond the bound, and 0 within it."""
        update = weights - start
        norm = torch.linalg.vector_norm(update, dim=-1, keepdim=True)
        # At norm 0 the clamp takes -inf to 0.
        return update.mul_((1 - self.bound / norm).clamp_(min=0).mul_(self.strength))


@dataclass(frozen=True, slots=True, kw_only=True)
class LUS:
    """Selection of the largest coordinates of a client's own update, before the clip; the others become 0 (Cheng et al. 2022).

    The client's data choose these coordinates. So the selection is a part of training: the clip bounds the sparse update, and all
    coordinates get noise, the dropped ones as well. It saves no noise and no bytes; a shorter update is clipped less.

    Attributes:
        keep_ratio: fraction of the coordinates that is kept, in (0, 1).

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
