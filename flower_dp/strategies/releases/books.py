"""Local differential privacy: every client's message is private on its own, and every client has a ledger of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from flower_dp.core import checks, dp
from flower_dp.core.sampling import Sampler
from flower_dp.core.stored import stored
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.charges import History
from flower_dp.privacy.client_terms import Terms, per_client, values_in
from flower_dp.privacy.events import Relation, UnsupportedEventError
from flower_dp.privacy.worst_client import WorstClient
from flower_dp.strategies.releases.own_replies import Longest, OwnReplies, ReplyState, VectorsOf, no_vectors
from flower_dp.strategies.releases.round import Round

AGGREGATIONS = ("data-size", "uniform")
PerClient = Sequence[float] | Mapping[str, float]
# The norm of a noise vector exceeds its bound with probability e^-60, which is 1e-26.
NOISE_DEVIATIONS = 60.0
# Grid of the accountant for a statement: a coarser one would overstate a small budget.
_GRID = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The public facts about one client: the fields of `Population`."""

    num_records: int
    num_replies: int
    epsilon: float
    batch_size: int


_FACTS = tuple(field.name for field in fields(Member))
TermsOf = Callable[[Member], Terms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """The clients of a method with local noise, and the public facts about them.

    Of a fact there is one number for all clients, a sequence in the order of the clients' names, or a mapping by name.

    Attributes:
        num_clients: how many there are.
        num_records: public data sizes; None: those of the batches.
        num_replies: the most replies of a client; None: as many as the method needs.
        epsilon: budgets.
        batch_size: records in a mini-batch.
        aggregation: `data-size`: clients are weighted by their public data sizes; `uniform`: equally.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.
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

    def members(self, names: Sequence[str]) -> dict[str, Member]:
        """Return the facts about every client of these names.

        Raises:
            ValueError: if names or their number don't fit.
        """
        known = self if self.num_records is not None else replace(self, num_records=self.batch_size)
        facts = {field: per_client(field, getattr(known, field), names) for field in _FACTS}
        return {name: Member(**{field: values[name] for field, values in facts.items()}) for name in names}


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BooksState:
    """Who takes part in a run, for how many rounds, and what each client was charged.

    Attributes:
        planned_rounds: of the run; None if nobody has said.
        names: of all clients, in the order of the charges; empty before they are known.
        training: charged for training.
        evaluation: charged for private evaluations; None without them.
    """

    planned_rounds: int | None = None
    names: tuple[str, ...] = ()
    training: ReplyState
    evaluation: ReplyState | None = None


class ClientBooks:
    """Terms and ledgers of clients who add their own noise in full, each under its own budget, for one run.

    The client keeps its own account, and refuses replies that the account does not cover. The statement is computed from the
    server's ledgers; they do not protect the client. Replies are weighted with public numbers only.

    A client that sends updates without noise, or without clipping, can't be distinguished from an honest one, since the server
    does not know the distribution of honest messages. It gives up its own privacy. How far it can move the model is bounded by
    the largest norm of an honest reply.

    Attributes:
        training: the release of training.
        evaluation: the release of private evaluations; None without them.
        planned_rounds: of the run; None if nobody has said.

    Args:
        population: who the clients are.
        name: of the method on the wire.
        sampling: who takes part in a round.
        clip_norm: of the releases.
        relation: neighbouring relation of the ledgers.
        delta: the delta at which epsilon is stated, in [0, 1).
        terms_of: the facts about a client -> its terms.
        most_replies: number of rounds -> the most replies of one client, where the population has no number.
        weight_of: what a client's row counts in the sum; None: its share.
        longest: see `OwnReplies`; None: clip norm and noise of a mean of contributions.
        vectors_of: see `OwnReplies`.
    """

    def __init__(
        self,
        population: Population,
        *,
        name: str,
        sampling: Sampler,
        clip_norm: float,
        relation: Relation,
        delta: float,
        terms_of: TermsOf,
        most_replies: Callable[[int], int] | None = None,
        weight_of: Callable[[str], float] | None = None,
        longest: Longest | None = None,
        vectors_of: VectorsOf = no_vectors,
    ) -> None:
        self.population = population
        sampling.expected_cohort(population.num_clients)
        self.relation = accounting.relation_of(relation)
        self.delta = checks.number("delta", delta, at_least=0, below=1)
        self._terms_of, self._most_replies = terms_of, most_replies
        self.training = OwnReplies(
            name=name,
            clip_norm=clip_norm,
            sampling=sampling,
            relation=self.relation,
            weight_of=weight_of or self.share,
            longest=longest or self._longest,
            vectors_of=vectors_of,
        )
        self.evaluation: OwnReplies | None = None
        self._evaluated_terms: Callable[[str, Terms], Terms] | None = None
        self.planned_rounds: int | None = None
        self.num_records: dict[str, int] = {}
        self._all_records = 0
        self._costs: dict[tuple[str, ...], Cost] = {}
        self._worst: WorstClient | None = None

    @property
    def state(self) -> BooksState:
        """All that these books need to go on."""
        return BooksState(
            planned_rounds=self.planned_rounds,
            names=tuple(self.terms),
            training=self.training.state,
            evaluation=None if self.evaluation is None else self.evaluation.state,
        )

    @state.setter
    def state(self, state: BooksState) -> None:
        self.planned_rounds = state.planned_rounds
        self._open(state.names)
        if not state.names:
            return
        self.training.go_on(state.training)
        if self.evaluation is not None:
            self.evaluation.go_on(state.evaluation)
        elif state.evaluation is not None and state.evaluation.num_rounds:
            raise ValueError("state: private evaluations were charged, and this strategy has none; give the same evaluation=...")

    def evaluate(self, evaluation: OwnReplies, terms_of: Callable[[str, Terms], Terms]) -> None:
        """Charge private evaluations too: `terms_of` returns a client's terms, from its name and its terms of training."""
        self.evaluation, self._evaluated_terms = evaluation, terms_of

    def plan(self, num_rounds: int) -> None:
        """Remember the number of rounds, which may determine how often a client replies, and its noise."""
        self.planned_rounds = num_rounds

    def open(self, names: tuple[str, ...]) -> None:
        """Open a ledger for every client, with its terms; in a run that goes on they are open.

        Raises:
            ValueError: if a run goes on with a client that it did not begin with.
            RuntimeError: if the number of replies is not known.
        """
        if not self.terms:
            self._open(names)
        elif new := sorted(set(names) - set(self.terms)):
            raise ValueError(
                f"clients: {new[0]!r} was not there when this run began; this method has terms for those of its start"
            )

    def _open(self, names: tuple[str, ...]) -> None:
        self.training.open({})
        if self.evaluation is not None:
            self.evaluation.open({})
        self._costs, self._worst = {}, None
        if not names:
            return
        members = replace(self.population, num_replies=self._num_replies()).members(names)
        self.num_records = {name: member.num_records for name, member in members.items()}
        self._all_records = sum(self.num_records.values())
        self.training.open({name: self._terms_of(member) for name, member in members.items()})
        if self.evaluation is not None and self._evaluated_terms is not None:
            self.evaluation.open({name: self._evaluated_terms(name, terms) for name, terms in self.terms.items()})

    def _num_replies(self) -> Any:
        """Return the most replies of the clients: what the population says, or what the planned rounds need."""
        if self.population.num_replies is not None:
            return self.population.num_replies
        if self.planned_rounds is None or self._most_replies is None:
            raise RuntimeError(
                "num_replies: the number of rounds is not known yet; call start() or plan(num_rounds), or name num_replies"
            )
        return max(1, self._most_replies(self.planned_rounds))

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return self.population.num_clients

    @property
    def terms(self) -> Mapping[str, Terms]:
        """The terms of every client."""
        return self.training.terms

    @property
    def ledgers(self) -> dict[str, History]:
        """The ledger of every client's training."""
        return self.training.ledgers

    @property
    def num_rounds(self) -> int:
        """How many rounds were charged."""
        return self.training.num_charged

    @property
    def num_unasked(self) -> int:
        """How often a drawn client was not asked, since its budget was spent."""
        return self.training.state.num_unasked

    def why_stop(self) -> str | None:
        """Return that every budget is spent, if so; else None."""
        return None if any(map(self.training.can_pay, self.terms)) else "every client's budget is spent"

    def share(self, name: str) -> float:
        """Return a client's public share of the average over all clients."""
        if self.population.aggregation == "uniform":
            return 1 / self.population.num_clients
        return self.num_records[name] / self._all_records

    def _longest(self, release: OwnReplies, now: Round) -> Callable[[str], float]:
        """Return how long a client's mean of clipped contributions, with its noise, is at most."""

        def longest(name: str) -> float:
            own = release.terms[name].release
            # Laplace vectors are up to twice as long as Gaussian ones, and spread more.
            noise = own.noise_scale * (2 * math.sqrt(now.length) + NOISE_DEVIATIONS)
            whole = own.unit == "client"
            contributions = 1.0 if whole else self.num_records[name]
            return (contributions * own.clip_norm + noise) / (1.0 if whole else own.expected_cohort)

        return longest

    # The cost

    def cost(self, ledger: History) -> Cost:
        """Return the cost of a ledger; equal ledgers are accounted once."""
        key = (ledger.relation, *ledger.lines())
        if key not in self._costs:
            self._costs[key] = accounting.epsilon(ledger.event, delta=self.delta, relation=ledger.relation, grid=_GRID)
        return self._costs[key]

    def total(self, name: str, ledger: History) -> Cost:
        """Return the cost of one of a client's ledgers and of its private evaluations together.

        It is the least bound that can be proved. The sum always holds: (e1, delta) and (e2, 0) compose to (e1 + e2, delta).
        """
        training = self.cost(ledger)
        if self.evaluation is None or not self.evaluation.replies(name):
            return training
        evaluated = self.evaluation.ledger(name)
        key = (ledger.relation, *ledger.lines(), "evaluation", *evaluated.lines())
        if key not in self._costs:
            self._costs[key] = self._together(training, ledger, evaluated)
        return self._costs[key]

    def _together(self, training: Cost, ledger: History, evaluated: History) -> Cost:
        total = Cost(
            epsilon=training.epsilon + evaluated.cost(0.0).epsilon,
            delta=training.delta,
            relation=training.relation,
            accountant=f"{training.accountant} + pure",
        )
        try:
            whole = dp.ComposedDpEvent([ledger.event, evaluated.event])
            exact = accounting.epsilon(whole, delta=self.delta, relation=self.relation, grid=_GRID)
        except UnsupportedEventError:
            return total
        return min(exact, total, key=lambda cost: cost.epsilon)

    @property
    def epsilon(self) -> float:
        """An upper bound of the largest cost of a client, over all replies and evaluations so far, quick to compute."""
        if not self.terms:
            return 0.0
        if self._worst is None:
            self._worst = WorstClient(self.terms, relation=self.relation, delta=self.delta)
        return self._worst.epsilon(self.training.counts, {} if self.evaluation is None else _pure_epsilons(self.evaluation))


def _pure_epsilons(evaluation: OwnReplies) -> dict[str, float]:
    """Return an upper bound of what evaluations cost every client that was charged: their number times the cost of one."""
    terms, counts = evaluation.terms, evaluation.counts
    return {name: count * _pure(terms[name].event, evaluation.relation) for name, count in counts.items() if count}


@lru_cache(maxsize=1024)
def _pure(event: dp.DpEvent, relation: Relation) -> float:
    # As a float the product may be below the sum by its last bits.
    return accounting.epsilon(event, delta=0.0, relation=relation).epsilon * (1 + 2**-40)
