"""A release of a round, as a run has it drawn, charged, asked and limited; and what it has asked in one round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flower_dp.core.noise import Generator
from flower_dp.core.sampling import Sampler
from flower_dp.core.vectors import Layout
from flower_dp.privacy.charges import Charge, Charges
from flower_dp.strategies.releases.limits import ReplyLimits
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import Model, ReleaseRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRequest:
    """What a release has asked in the current round: of whom, and with which model.

    Attributes:
        server_round: 1, 2, ...
        method: the name of the release on the wire.
        ask: what was asked; the limits of the replies follow from it alone.
        length: of a client's row.
        model: the model that was sent.
        asked: the clients that were asked, by node.
        begun: what the release keeps for this round in this process alone, such as noise that was drawn ahead.
        bytes_down: bytes of arrays and text sent to nodes.
        started: when.
        stock: whether the nodes are stock clients.
    """

    server_round: int
    method: str
    ask: ReleaseRequest
    length: int
    model: Model
    asked: dict[int, tuple[str, ...]]
    begun: Any = None
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


class Release(Protocol):
    """One noisy thing that crosses a boundary in a round. It is frozen: the state of the run goes in, its next one comes out.

    Attributes:
        name: of the release on the wire: the method's, or that of private evaluations.
        sampling: who takes part in a round.
        cohort_is_secret: whether the epsilon holds only if nobody knows who takes part in a round.
        accepts_new_clients: whether more clients than are accounted for may take part.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def sampling(self) -> Sampler: ...  # noqa: D102
    @property
    def cohort_is_secret(self) -> bool: ...  # noqa: D102
    @property
    def accepts_new_clients(self) -> bool: ...  # noqa: D102

    def cohort(self, state: RunState, names: tuple[str, ...], rng: Generator) -> tuple[np.ndarray, Any]:
        """Return the indices of the clients that are asked next, those drawn whose budget covers it, and its next state."""

    def charge(self, charges: Charges, server_round: int, names: Sequence[str]) -> Charge:
        """Return what the next round of this release costs if this cohort is asked: it follows from what was charged."""

    def ask(self, state: RunState, size: int, names: Sequence[str], rng: Generator) -> tuple[ReleaseRequest, Any, Any]:
        """Return what is asked of these clients, what is kept for the round in this process alone, and the next state.

        Args:
            state: of the run, before the charge.
            size: of a client's update, or of its metrics.
            names: of the clients.
            rng: fresh, for noise that is drawn before the replies.
        """

    def limits(self, now: RoundRequest) -> ReplyLimits:
        """Return the limits that the server enforces on the replies: they follow from what was asked, and with which model."""
