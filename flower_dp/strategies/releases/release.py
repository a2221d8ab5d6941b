"""The protocol of a release (cohort, charge, request, limits), and its request in one round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """The request of a release in one round: its cohort, model and terms.

    Attributes:
        server_round: number of the round, from 1.
        method: name of the release on the wire.
        ask: the request; the limits of the replies follow from it alone.
        length: length of a client's row.
        model: the model that was sent.
        asked: the cohort, by node.
        begun: data of the release for this round in this process alone, such as noise that was drawn ahead.
        bytes_down: bytes of arrays and text sent to nodes.
        started: start of the round, on the monotonic clock, in seconds.
        stock: whether the nodes are stock clients.
    """

    server_round: int
    method: str
    ask: ReleaseRequest
    length: int
    model: Model
    asked: dict[int, tuple[str, ...]]
    begun: Any = field(default=None, repr=False)
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
        """The clients of the cohort."""
        return tuple(name for names in self.asked.values() for name in names)

    @property
    def cohort_size(self) -> int:
        """The number of clients in the cohort."""
        return sum(len(names) for names in self.asked.values())


class Release(Protocol):
    """One noised quantity that crosses a boundary in a round. It is immutable: methods take the run's state and return the next.

    Attributes:
        name: name of the release on the wire: the method's, or that of private evaluations.
        sampling: sampler of a round's cohort.
        cohort_is_secret: whether the epsilon holds only if nobody knows who takes part in a round.
        accepts_new_clients: whether more clients than the accounting's number may take part.
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
        """Return the indices of the next cohort, the drawn clients whose budget covers it, and the release's next state."""

    def charge(self, charges: Charges, server_round: int, names: Sequence[str]) -> Charge:
        """Return the charge of this release's next round for this cohort; it follows from the charges so far."""

    def ask(self, state: RunState, size: int, names: Sequence[str], rng: Generator) -> tuple[ReleaseRequest, Any, Any]:
        """Return the request to these clients, data for the round in this process alone, and the next state.

        Args:
            state: state of the run, before the charge.
            size: length of a client's update, or of its metrics.
            names: names of the clients.
            rng: new generator for noise that is drawn before the replies.
        """

    def limits(self, now: RoundRequest) -> ReplyLimits:
        """Return the limits that the server enforces on the replies; they follow from the request and its model."""
