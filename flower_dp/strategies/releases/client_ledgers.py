"""Local DP: every client adds its full noise under its own terms, and has its own charges."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from flower_dp.core import checks, dp_events
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.charges import History
from flower_dp.privacy.client_terms import ClientTerms, per_client, values_in
from flower_dp.privacy.events import Relation, UnsupportedEventError
from flower_dp.privacy.worst_client import MaxClientEpsilon

AGGREGATIONS = ("data-size", "uniform")
PerClient = Sequence[float] | Mapping[str, float]
# Grid of the accountant for a statement; a coarser one would overstate a small epsilon.
_GRID = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """The public facts about one client: the fields of `Population`."""

    num_records: int
    num_replies: int
    epsilon: float
    batch_size: int


_FACTS = tuple(field.name for field in fields(ClientFacts))
TermsOf = Callable[[ClientFacts], ClientTerms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """The clients of a method with local noise, and the public facts about them.

    Give each fact as one number for all clients, a sequence in the order of their names, or a mapping by name.

    Attributes:
        num_clients: number of clients.
        num_records: public data sizes, in records; None: the batch sizes.
        num_replies: maximum replies of a client; None: as many as the method needs.
        epsilon: epsilon budgets; math.inf: no noise.
        batch_size: records in a mini-batch.
        aggregation: `data-size`: clients are weighted by their public data sizes; `uniform`: equally.

    Raises:
        ValueError: if a value is invalid; the message names field and value.
    """

    num_clients: int
    num_records: int | PerClient | None
    num_replies: int | PerClient | None = None
    epsilon: float | PerClient = math.inf
    batch_size: int | PerClient = 1
    aggregation: str = "uniform"

    def __post_init__(self) -> None:
        checks.integer("num_clients", self.num_clients, at_least=1)
        checks.one_of("aggregation", self.aggregation, AGGREGATIONS)
        for field in _FACTS:
            value = getattr(self, field)
            if isinstance(value, Sequence | Mapping) and not isinstance(value, str) and len(value) != self.num_clients:
                raise ValueError(f"{field}: has {len(value)} values: must have one for each of the {self.num_clients} clients")
            for number in [] if value is None or field == "epsilon" else values_in(value):
                checks.integer(field, number, at_least=1)

    def members(self, names: Sequence[str]) -> dict[str, ClientFacts]:
        """Return the facts about every client of these names.

        Raises:
            ValueError: if names or their number don't fit.
        """
        known = self if self.num_records is not None else replace(self, num_records=self.batch_size)
        facts = {field: per_client(field, getattr(known, field), names) for field in _FACTS}
        return {name: ClientFacts(**{field: values[name] for field, values in facts.items()}) for name in names}


class ClientLedgers:
    """The terms of clients that add their full noise, each under its own budget, and the costs of their charges.

    Each client keeps an account and refuses to exceed it. The server computes the statement and skips clients by its
    own charges; these do not protect the client. The server weights replies with public numbers only.

    A client that sends updates without noise, or without clipping, can't be distinguished from an honest one, since the server
    does not know the distribution of honest messages. It gives up its own privacy. The largest norm of an honest reply bounds how
    far it can move the model.

    Attributes:
        terms: terms of every client, by name; empty before they are known.
        num_records: public data size of every client, by name.
        planned_rounds: number of rounds of the run; None if not set.

    Args:
        population: the clients and their public facts.
        relation: neighboring relation of the charges.
        delta: the delta at which epsilon is stated, in [0, 1).
        terms_of: function from the facts about a client to its terms.
        most_replies: function from the number of rounds to the maximum replies of one client, if the population has no number.
    """

    def __init__(
        self,
        population: Population,
        *,
        relation: Relation,
        delta: float,
        terms_of: TermsOf,
        most_replies: Callable[[int], int] | None = None,
    ) -> None:
        self.population = population
        self.relation = accounting.parse_relation(relation)
        self.delta = checks.number("delta", delta, at_least=0, below=1)
        self._terms_of, self._most_replies = terms_of, most_replies
        self.terms: Mapping[str, ClientTerms] = {}
        self.num_records: Mapping[str, int] = {}
        self.planned_rounds: int | None = None
        self._all_records = 0
        self._costs: dict[tuple[str, ...], PrivacyCost] = {}
        self._worst: MaxClientEpsilon | None = None

    def with_clients(self, names: tuple[str, ...], num_rounds: int | None) -> ClientLedgers:
        """Return the ledgers of a run of these clients, with the terms of each. Without names they are not known yet.

        Raises:
            RuntimeError: if the number of replies is not known.
        """
        books = copy.copy(self)
        books.planned_rounds, books._costs, books._worst = num_rounds, {}, None
        members = replace(self.population, num_replies=books._num_replies()).members(names) if names else {}
        books.num_records = {name: member.num_records for name, member in members.items()}
        books._all_records = sum(books.num_records.values())
        books.terms = {name: self._terms_of(member) for name, member in members.items()}
        return books

    def _num_replies(self) -> Any:
        """Return the maximum replies of the clients: the population's numbers, or the number that the planned rounds need."""
        if self.population.num_replies is not None:
            return self.population.num_replies
        if self.planned_rounds is None or self._most_replies is None:
            raise RuntimeError(
                "num_replies: the number of rounds is not known yet; call start() or plan(num_rounds), or pass num_replies"
            )
        return max(1, self._most_replies(self.planned_rounds))

    def share(self, name: str) -> float:
        """Return a client's public share of the average over all clients."""
        if self.population.aggregation == "uniform":
            return 1 / self.population.num_clients
        return self.num_records[name] / self._all_records

    # The cost

    def cost(self, ledger: History) -> PrivacyCost:
        """Return the cost of a ledger; equal ledgers are computed once."""
        key = (ledger.relation, *ledger.lines())
        if key not in self._costs:
            self._costs[key] = accounting.epsilon(ledger.event, delta=self.delta, relation=ledger.relation, grid=_GRID)
        return self._costs[key]

    def total(self, ledger: History, evaluated: History) -> PrivacyCost:
        """Return the joint cost of a client's charges, for example for training, and of its private evaluations.

        It is the lower of two proved upper bounds. The sum always holds: (e1, delta) and (e2, 0) compose to (e1 + e2, delta).
        """
        training = self.cost(ledger)
        if not evaluated.num_charges:
            return training
        key = (ledger.relation, *ledger.lines(), "evaluation", *evaluated.lines())
        if key not in self._costs:
            self._costs[key] = self._together(training, ledger, evaluated)
        return self._costs[key]

    def _together(self, training: PrivacyCost, ledger: History, evaluated: History) -> PrivacyCost:
        total = PrivacyCost(
            epsilon=training.epsilon + evaluated.cost(0.0).epsilon,
            delta=training.delta,
            relation=training.relation,
            accountant=f"{training.accountant} + pure",
        )
        try:
            whole = dp_events.ComposedDpEvent([ledger.event, evaluated.event])
            exact = accounting.epsilon(whole, delta=self.delta, relation=self.relation, grid=_GRID)
        except UnsupportedEventError:
            return total
        return min(exact, total, key=lambda cost: cost.epsilon)

    def worst(self, replies: Mapping[str, int], pure: Mapping[str, float]) -> float:
        """Return an upper bound of the largest cost of a client, quick to compute.

        Args:
            replies: number of training charges, by client.
            pure: epsilon of private evaluations, by client.
        """
        if not self.terms:
            return 0.0
        if self._worst is None:
            self._worst = MaxClientEpsilon(self.terms, relation=self.relation, delta=self.delta)
        return self._worst.epsilon(replies, pure)
