"""A vector that the server sends with the model and computes from the messages (SCAFFOLD's c)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flower_dp.strategies.releases.replies import Collected


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """Bounds of what honest clients make, each exceeded with a probability below 1e-20: norms of noised mean gradients.

    Attributes:
        single: of any one client's.
        mean: of the mean over all clients, in which their independent noises partly cancel.
    """

    single: float
    mean: float


class Control(Protocol):
    """A vector that the server sends with the model and computes from the messages (SCAFFOLD's c)."""

    def begin(self) -> None:
        """Forget the last run."""

    def vector(self, size: int) -> np.ndarray:
        """Return the vector that is sent with a model of `size` parameters [d], float32."""

    def learn(self, collected: Collected, *, divisor: float, num_clients: int, honest: Honest) -> None:
        """Update the vector by the messages of a round; an update is `divisor` = E eta times a mean gradient."""

    def longest(self, sum_norm: float, *, honest: Honest) -> float:
        """Return the largest norm of a mean gradient and its correction, given that of the noised gradient."""

    @property
    def incidents(self) -> tuple[str, ...]:
        """What happened to the clients' own vectors, in words."""
