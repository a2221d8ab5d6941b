"""A vector that the server sends with the model and computes from the messages (SCAFFOLD's c)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from flower_dp.core.stored import stored
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


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlState:
    """A control variate, and what is known of the clients' own ones.

    Attributes:
        vector: c [d], float64; empty before the first round.
        replied: names of the clients that have replied.
        restarts: how often a client came back without its own vector, by name.
    """

    vector: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float64))
    replied: tuple[str, ...] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)


class Control(Protocol):
    """A vector that the server sends with the model and computes from the messages (SCAFFOLD's c).

    Attributes:
        state: the vector, and what is known of the clients' own ones.
    """

    state: ControlState

    def vector(self, size: int) -> np.ndarray:
        """Return the vector that is sent with a model of `size` parameters [d], float32."""

    def learn(self, collected: Collected, *, divisor: float, num_clients: int, honest: Honest) -> None:
        """Update the vector by the messages of a round; an update is `divisor` = E eta times a mean gradient."""

    def longest(self, sum_norm: float, size: int, *, honest: Honest) -> float:
        """Return the largest norm of a mean gradient and its correction, given that of the noised gradient."""

    @property
    def incidents(self) -> tuple[str, ...]:
        """What happened to the clients' own vectors, in words."""
