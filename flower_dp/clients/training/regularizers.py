"""Regularisers: penalties on a client's weights, as parts of local training, by their gradients."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flower_dp.core import checks


class Regularizer(Protocol):
    """A penalty in a client's objective. It is hashable: the batched engine keeps one program for every recipe."""

    def pull(self, weights: Tensor, start: Tensor) -> Tensor:
        """Return the gradient of the penalty, in the shape of the weights; it is added to the gradient of the loss.

        Args:
            weights: of one client [d], or of many [slots, d]. No row of the result depends on another row.
            start: the global model [d].
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
