"""Local placement: what the rules of all methods have in common in which every message is private on its own."""

from dataclasses import dataclass
from typing import Any

from flower_dp.core.stored import stored
from flower_dp.privacy.charges import Charge
from flower_dp.strategies.local_evaluation import OwnEvaluation
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.books import BooksState, ClientBooks
from flower_dp.strategies.releases.round import Round


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalState:
    """What a run of a method with local placement has released.

    Attributes:
        books: replies of every client.
        own: what the method keeps besides; None for nothing.
    """

    books: BooksState
    own: Any = None


class LocalRules:
    """A ledger of every client, and a stop where all budgets are spent.

    Attributes:
        own: what the method keeps from round to round: a value that can be stored.

    Args:
        title: the method's name for people.
        books: terms and ledgers of every client.
    """

    stock_refusal = "stock clients add no noise of their own; use flower_dp.clients.LocalDPClient"
    own: Any = None

    def __init__(self, title: str, books: ClientBooks) -> None:
        self.title, self.books, self.training = title, books, books.training
        self.num_clients, self.delta = books.num_clients, books.delta
        self.clip_norm = books.training.clip_norm
        self.cohort_size = books.training.sampling.largest_cohort(books.num_clients)
        self.evaluation: OwnEvaluation | None = None

    @property
    def state(self) -> LocalState:
        """All that these rules need to go on."""
        return LocalState(books=self.books.state, own=self.own)

    @state.setter
    def state(self, state: LocalState) -> None:
        self.books.state, self.own = state.books, state.own

    def evaluate(self, plan: PrivateEvaluation | LocalEvaluation) -> None:
        """Make private evaluation a second release of this method's rounds."""
        self.evaluation = OwnEvaluation.of(plan, self.books, self.title)

    def plan(self, num_rounds: int) -> None:
        """Remember the number of rounds, which may determine how often a client replies, and its noise."""
        self.books.plan(num_rounds)

    def open(self, names: tuple[str, ...]) -> None:
        """Open a ledger for every client, on its own terms."""
        self.books.open(names)

    def why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return that every budget is spent, if so."""
        return self.books.why_stop()

    def unfinished(self, charge: Charge) -> None:
        """Count nothing: the charge has all that a round that was not finished may have released."""

    def numbers(self, now: Round) -> dict[str, float]:
        """Return further public numbers of the last round: none."""
        return {}

    @property
    def epsilon(self) -> float:
        """An upper bound of the largest cost of a client."""
        return self.books.epsilon
