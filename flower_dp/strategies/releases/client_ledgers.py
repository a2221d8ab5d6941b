"""Local differential privacy: every client's message is private on its own, and every client has terms of its own."""

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
# Grid of the accountant for a statement: a coarser one would overstate a small budget.
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

    Of a fact there is one number for all clients, a sequence in the order of the clients' names, or a mapping by name.

    Attributes:
        num_clients: how many there are.
        num_records: public data sizes; None: those of the batches.
        num_replies: maximum replies of a client; None: as many as the method needs.
        epsilon: budgets.
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
            for one in [] if value is None or field == "epsilon" else values_in(value):
                checks.integer(field, one, at_least=1)

    def members(self, names: Sequence[str]) -> dict[str, ClientFacts]:
        """Return the facts about every client of these names.

        Raises:
            ValueError: if names or their number don't fit.
        """
        known = self if self.num_records is not None else replace(self, num_records=self.batch_size)
        facts = {field: per_client(field, getattr(known, field), names) for field in _FACTS}
        return {name: ClientFacts(**{field: values[name] for field, values in facts.items()}) for name in names}


class ClientLedgers:
    """Terms of clients who add their own noise in full, each under its own budget, and what their charges cost them.

    The client keeps its own account, and refuses replies that the account does not cover. The statement is computed from the
    server's charges; they do not protect the client. Replies are weighted with public numbers only.

    A client that sends updates without noise, or without clipping, can't be distinguished from an honest one, since the server
    does not know the distribution of honest messages. It gives up its own privacy. How far it can move the model is bounded by
    the largest norm of an honest reply.

    Attributes:
        terms: of every client, by its name; empty before they are known.
        num_records: the public data size of every client.
        planned_rounds: of the run; None if nobody has said.

    Args:
        population: who the clients are.
        relation: neighboring relation of the charges.
        delta: the delta at which epsilon is stated, in [0, 1).
        terms_of: the facts about a client -> its terms.
        most_replies: number of rounds -> the most replies of one client, where the population has no number.
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
        """Return the books of a run of these clients: each has its terms. Without names they are not known yet.

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
        """Return the most replies of the clients: what the population says, or what the planned rounds need."""
        if self.population.num_replies is not None:
            return self.population.num_replies
        if self.planned_rounds is None or self._most_replies is None:
            raise RuntimeError(
                "num_replies: the number of rounds is not known yet; call start() or plan(num_rounds), or name num_replies"
            )
        return max(1, self._most_replies(self.planned_rounds))

    def share(self, name: str) -> float:
        """Return a client's public share of the average over all clients."""
        if self.population.aggregation == "uniform":
            return 1 / self.population.num_clients
        return self.num_records[name] / self._all_records

    # The cost

    def cost(self, ledger: History) -> PrivacyCost:
        """Return the cost of a ledger; equal ledgers are accounted once."""
        key = (ledger.relation, *ledger.lines())
        if key not in self._costs:
            self._costs[key] = accounting.epsilon(ledger.event, delta=self.delta, relation=ledger.relation, grid=_GRID)
        return self._costs[key]

    def total(self, ledger: History, evaluated: History) -> PrivacyCost:
        """Return the cost of what a client was charged, for example for training, and of its private evaluations together.

        It is the least bound that can be proved. The sum always holds: (e1, delta) and (e2, 0) compose to (e1 + e2, delta).
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
            replies: how often each client was charged for training.
            pure: what its private evaluations have cost each client.
        """
        if not self.terms:
            return 0.0
        if self._worst is None:
            self._worst = MaxClientEpsilon(self.terms, relation=self.relation, delta=self.delta)
        return self._worst.epsilon(replies, pure)
