"""BLUR: bounded local update regularisation (Cheng et al. 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flower_dp.core import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class BLUR:
    """The penalty (strength / 2) max(0, ||w - w_global|| - bound)^2: local training keeps updates near a bound on their norm.

    An update within the bound costs nothing. A longer one is pulled straight back to the global model, by strength times the part
    of its norm above the bound. The clip takes less from shorter updates; it stays what the guarantee rests on.

    Attributes:
        strength: coefficient (paper: lambda). strength x step size must stay well below 2, or training jumps over the bound.
        bound: L2 norm of an update up to which there is no penalty (paper: S); of the size of the clip norm.

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
