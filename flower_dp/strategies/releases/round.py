"""What a release has asked in one round, and what the strategy knows of any release."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flower_dp.core.noise import Generator
from flower_dp.core.sampling import Sampler
from flower_dp.core.vectors import Layout
from flower_dp.privacy.charges import Charge
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.replies import Collected
from flower_dp.wire import Ask, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a release has asked in the current round: of whom, and with which model.

    Attributes:
        server_round: 1, 2, ...
        method: the name of the release on the wire.
        ask: what was asked; the limits of the replies follow from it alone.
        length: of a client's row.
        model: the model that was sent.
        asked: the clients that were asked, by node.
        bytes_down: bytes of arrays and text sent to nodes.
        started: when.
        stock: whether the nodes are stock clients.
    """

    server_round: int
    method: str
    ask: Ask
    length: int
    model: Model
    asked: dict[int, tuple[str, ...]]
    bytes_down: int = 0
    started: float = 0.0
    stock: bool = False

    @property
    def layout(self) -> Layout:
        """The layout of the arrays that are trained."""
        return self.model.layout

    @property
    def vector(self) -> np.ndarray:
        """The model that was sent [d], float32."""
        return self.model.vector

    @property
    def cohort(self) -> tuple[str, ...]:
        """The clients that were asked."""
        return tuple(name for names in self.asked.values() for name in names)

    @property
    def cohort_size(self) -> int:
        """How many clients were asked."""
        return sum(len(names) for names in self.asked.values())


class RoundRelease(Protocol):
    """One release of a round, as the strategy runs it: it draws and charges, asks, and bounds the replies.

    Attributes:
        name: of the release on the wire: the method's, or that of private evaluations.
        sampling: who takes part in a round.
        num_charged: how often it was charged in this run.
        secret_cohort: whether the epsilon holds only if nobody knows who takes part in a round.
        open_population: whether more clients than are accounted for may take part.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def sampling(self) -> Sampler: ...  # noqa: D102
    @property
    def num_charged(self) -> int: ...  # noqa: D102
    @property
    def secret_cohort(self) -> bool: ...  # noqa: D102
    @property
    def open_population(self) -> bool: ...  # noqa: D102

    def row_length(self, size: int) -> int:
        """Return the length of a client's row, given that of the model."""

    def cohort(self, names: tuple[str, ...], rng: Generator) -> np.ndarray:
        """Return the indices of the clients that are asked next: those drawn whose budget covers it."""

    def next_charge(self, names: Sequence[str], server_round: int = 0) -> Charge:
        """Return what the next round of this release costs if this cohort is asked; nothing changes."""

    def take(self, charge: Charge) -> None:
        """Charge the release, before any message is sent.

        Raises:
            ValueError: if it is not the next charge of this release.
        """

    def ask(self, length: int, names: Sequence[str]) -> Ask:
        """Return what is asked of these clients, of rows [length]; it is kept with the round."""

    def limits(self, now: Round) -> Limits:
        """Return the limits that the server enforces on the replies: they follow from what was asked, and with which model."""

    def bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return how many bytes of arrays one client sends, as far as public numbers or private messages determine it."""
