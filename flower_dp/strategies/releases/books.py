"""Local differential privacy: every client's message is private on its own, and every client has a ledger of its own."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_dp.core import checks
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.client_terms import Terms, per_client, values_in
from flower_dp.privacy.events import Relation
from flower_dp.privacy.ledger import Ledger
from flower_dp.privacy.worst_client import WorstClient
from flower_dp.strategies.releases.evaluation_books import EvaluationBooks
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.own_replies import ask_of
from flower_dp.strategies.rules import Round
from flower_dp.wire import Ask

AGGREGATIONS = ("data-size", "uniform")
PerClient = Sequence[float] | Mapping[str, float]
# The norm of a noise vector exceeds its bound with probability e^-60, which is 1e-26.
NOISE_DEVIATIONS = 60.0
# Grid of the accountant for a statement: a coarser one would overstate a small budget.
_GRID = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """The clients of a method with local noise, and the public facts about them.

    Attributes:
        num_clients: how many there are.
        num_records: public data sizes: one number, a sequence in the order of the clients' names, or a mapping by name.
        num_replies: the most replies of a client; one number, a sequence or a mapping; None: as many as the method needs.
        aggregation: `data-size`: clients are weighted by their public data sizes; `uniform`: equally.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.
    """

    num_clients: int
    num_records: int | PerClient
    num_replies: int | PerClient | None
    aggregation: str

    def __post_init__(self) -> None:
        checks.integer("num_clients", self.num_clients, at_least=1)
        checks.one_of("aggregation", self.aggregation, AGGREGATIONS)
        for size in values_in(self.num_records):
            checks.integer("num_records", size, at_least=1)
        for replies in [] if self.num_replies is None else values_in(self.num_replies):
            checks.integer("num_replies", replies, at_least=1)
        for field, value in (("num_records", self.num_records), ("num_replies", self.num_replies)):
            check_count(field, value, self.num_clients)


class ClientBooks:
    """Terms and ledgers of clients who add their own noise in full, each under its own budget, for one run.

    The server charges a client's ledger when it asks the client. It no longer asks a client that has sent as many replies as its
    budget covers; the others go on. The client keeps its own account, and refuses replies that the account does not cover. The
    statement is computed from the server's ledgers; they do not protect the client. Replies are weighted with public numbers
    only.

    A client that sends updates without noise, or without clipping, can't be distinguished from an honest one, since the server
    does not know the distribution of honest messages. It gives up its own privacy. How far it can move the model is bounded by
    the largest norm of an honest reply.

    Args:
        population: who the clients are.
        relation: neighbouring relation of the ledgers.
        delta: the delta at which epsilon is stated, in [0, 1).
    """

    def __init__(self, population: Population, *, relation: Relation, delta: float) -> None:
        self.population = population
        self.relation = accounting.relation_of(relation)
        self.delta = checks.number("delta", delta, at_least=0, below=1)
        self.evaluations: EvaluationBooks | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.num_rounds = 0
        self.num_unasked = 0
        self.terms: dict[str, Terms] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.num_records: dict[str, int] = {}
        self._all_records = 0
        if self.evaluations is not None:
            self.evaluations.begin()
        self._costs: dict[tuple[str, ...], Cost] = {}
        self._worst: WorstClient | None = None

    def open(self, names: tuple[str, ...], most_replies: int | None, terms_of: Callable[[str, int, int], Terms]) -> None:
        """Open a ledger for every client, with its terms.

        Args:
            names: of all clients.
            most_replies: the most replies of one client, if the population has no number; None if not known.
            terms_of: name, data size, number of replies -> the client's terms.

        Raises:
            RuntimeError: if the number of replies is not known.
        """
        replies: Any = self.population.num_replies
        if replies is None:
            if most_replies is None:
                raise RuntimeError(
                    "num_replies: the number of rounds is not known yet; call start() or plan(num_rounds), or name num_replies"
                )
            replies = max(1, most_replies)
        self.num_records = per_client("num_records", self.population.num_records, names)
        self._all_records = sum(self.num_records.values())
        each = per_client("num_replies", replies, names)
        self.terms = {name: terms_of(name, self.num_records[name], each[name]) for name in names}
        self.ledgers = {name: Ledger(owner=name, relation=self.relation) for name in names}
        if self.evaluations is not None:
            self.evaluations.open(self.terms)

    def can_pay(self, name: str) -> bool:
        """Return whether a client's budget covers one more reply."""
        return self.ledgers[name].num_charges < self.terms[name].num_replies

    def why_stop(self) -> str | None:
        """Return that every budget is spent, if so; else None."""
        return None if any(self.can_pay(name) for name in self.ledgers) else "every client's budget is spent"

    def with_budget(self, chosen: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """Return the indices of the drawn clients whose budget covers one more reply; count the others."""
        paying = np.asarray([index for index in chosen if self.can_pay(names[index])], dtype=chosen.dtype)
        self.num_unasked += len(chosen) - len(paying)
        return paying

    def charge(self, names: tuple[str, ...]) -> None:
        """Charge one reply to each client."""
        self.num_rounds += 1
        for name in names:
            self.ledgers[name].charge(self.terms[name].event)

    def share(self, name: str) -> float:
        """Return a client's public share of the average over all clients."""
        if self.population.aggregation == "uniform":
            return 1 / self.population.num_clients
        return self.num_records[name] / self._all_records

    def ask(self, names: Iterable[str], *, clip_norm: float, weight_of: Callable[[str], float]) -> Ask:
        """Return what is asked of clients: by their own terms, and with the weight of each in the sum."""
        return ask_of({name: self.terms[name] for name in names}, clip_norm=clip_norm, weight_of=weight_of)

    def limits(self, now: Round) -> Limits:
        """Return a bound on the norm of an honest sum of rows; the server does not clip rows that carry their own noise."""
        size = now.layout.size

        def honest_norm(names: Sequence[str]) -> float:
            total = 0.0
            for name in names:
                release = self.terms[name].release
                # Laplace vectors are up to twice as long as Gaussian ones, and spread more.
                noise = release.noise_scale * (2 * math.sqrt(size) + NOISE_DEVIATIONS)
                whole = release.unit == "client"
                contributions = 1.0 if whole else self.num_records[name]
                row = (contributions * release.clip_norm + noise) / (1.0 if whole else release.expected_cohort)
                total += now.ask.own[name].weight * row
            return total

        return Limits(length=size, honest_norm=honest_norm)

    def cost(self, ledger: Ledger) -> Cost:
        """Return the cost of a ledger; equal ledgers are accounted once."""
        key = (ledger.relation, *ledger.lines())
        if key not in self._costs:
            self._costs[key] = accounting.epsilon(ledger.event, delta=self.delta, relation=ledger.relation, grid=_GRID)
        return self._costs[key]

    def total(self, name: str, ledger: Ledger) -> Cost:
        """Return the cost of one of a client's ledgers and of its private evaluations together."""
        training = self.cost(ledger)
        if self.evaluations is None or not self.evaluations.ledgers[name].num_charges:
            return training
        key = (ledger.relation, *ledger.lines(), "evaluation", *self.evaluations.ledgers[name].lines())
        if key not in self._costs:
            self._costs[key] = self.evaluations.together(name, training, ledger.event, grid=_GRID)
        return self._costs[key]

    @property
    def epsilon(self) -> float:
        """An upper bound of the largest cost of a client, over all replies and evaluations so far, quick to compute."""
        if not self.terms:
            return 0.0
        if self._worst is None:
            self._worst = WorstClient(self.terms, relation=self.relation, delta=self.delta)
        evaluated = {} if self.evaluations is None else self.evaluations.pure_epsilons()
        return self._worst.epsilon({name: ledger.num_charges for name, ledger in self.ledgers.items()}, evaluated)


def check_count(field: str, value: Any, num_clients: int) -> None:
    """Refuse a sequence or mapping that doesn't have one value a client."""
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str) and len(value) != num_clients:
        raise ValueError(f"{field}: has {len(value)} values: must have one for each of the {num_clients} clients")
