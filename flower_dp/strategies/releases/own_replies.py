"""Replies that are private one by one: what is asked of every client by its own terms, and how often each was charged."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flower_dp.core import dp
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import Sampler
from flower_dp.core.stored import stored
from flower_dp.privacy.charges import Charge, History, Scope, frozen
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.events import Relation
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.wire import Ask, OwnAsk, Promise

# The release, and what it has asked in a round -> a client's name -> a norm that its honest row all but never exceeds, before its
# weight. It is given the release, since a copy of a strategy has another.
Longest = Callable[["OwnReplies", Round], Callable[[str], float]]
# The length of a row -> the vectors that are sent with the model, by their names.
VectorsOf = Callable[[int], Mapping[str, np.ndarray]]


def no_vectors(length: int) -> dict[str, np.ndarray]:
    """Return that no vector is sent with the model."""
    return {}


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplyState:
    """How often the clients of a run were charged.

    Attributes:
        replies: charged to each client, in the order of their names.
        num_rounds: rounds that were charged.
        num_unasked: times that a drawn client was not asked, since its budget was spent.
        kind: a digest of the terms of all clients, by which they were charged.
    """

    replies: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_rounds: int = 0
    num_unasked: int = 0
    kind: str = ""


@dataclass(slots=True, kw_only=True)
class OwnReplies:
    """One reply a round of every client that is asked, each with noise by the client's own terms.

    The server charges a client's ledger when it asks the client. It no longer asks a client that has sent as many replies as its
    budget covers; the others go on. Only `terms`, which are set when the clients are known, and `state` change in a run.

    Attributes:
        name: of the release on the wire: the method's, or that of private evaluations.
        clip_norm: of the releases.
        sampling: who takes part in a round.
        relation: neighbouring relation of the ledgers.
        weight_of: what a client's row counts in the sum.
        longest: how long an honest row is at most.
        vectors_of: the vectors that are sent with the model.
        metrics: of an evaluation; None in training.
        terms: of every client, by its name.
        state: what was charged so far.
    """

    name: str
    clip_norm: float
    sampling: Sampler
    relation: Relation
    weight_of: Callable[[str], float]
    longest: Longest
    vectors_of: VectorsOf = no_vectors
    metrics: MetricBounds | None = None
    terms: Mapping[str, Terms] = field(default_factory=dict)
    state: ReplyState = field(default_factory=ReplyState)
    secret_cohort: bool = False
    open_population: bool = False
    _places: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    # The different events of a reply, and the place of each client's.
    _events: tuple[dp.DpEvent, ...] = field(default=(), init=False, repr=False)
    _kinds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), init=False, repr=False)

    def open(self, terms: Mapping[str, Terms]) -> None:
        """Open a ledger for every client, on its terms."""
        self.terms = terms
        self.state = ReplyState(replies=np.zeros(len(terms), np.int64), kind=_digest(terms))
        kinds: dict[dp.DpEvent, int] = {}
        numbers = [kinds.setdefault(frozen(own.event), len(kinds)) for own in terms.values()]
        self._events, self._kinds = tuple(kinds), np.asarray(numbers, np.int64)
        self._places = {name: place for place, name in enumerate(terms)}

    def go_on(self, state: ReplyState | None) -> None:
        """Go on from an earlier state of these clients, whose ledgers are open; None: from none.

        Raises:
            ValueError: if the clients were charged by other terms: their charges would get another cost.
        """
        if state is None:
            return
        if state.num_rounds and state.kind != self.state.kind:
            raise ValueError(f"state: clients were charged for {self.name} by other terms than those of this strategy")
        self.state = state

    @property
    def num_charged(self) -> int:
        """How many rounds were charged."""
        return self.state.num_rounds

    def replies(self, name: str) -> int:
        """Return how many replies were charged to a client."""
        return int(self.state.replies[self._places[name]])

    @property
    def counts(self) -> dict[str, int]:
        """How many replies were charged to every client."""
        return dict(zip(self.terms, self.state.replies.tolist(), strict=True))

    @property
    def ledgers(self) -> dict[str, History]:
        """What was charged to every client."""
        return {name: self.ledger(name) for name in self.terms}

    def ledger(self, name: str) -> History:
        """Return what was charged to a client."""
        place = self._places[name]
        return History(relation=self.relation, counts={self._events[self._kinds[place]]: int(self.state.replies[place])})

    def can_pay(self, name: str) -> bool:
        """Return whether a client's budget covers one more reply."""
        return self.replies(name) < self.terms[name].num_replies

    # A round

    def row_length(self, size: int) -> int:
        """Return the length of a client's row: that of the model."""
        return size

    def cohort(self, names: tuple[str, ...], rng: Generator) -> np.ndarray:
        """Return the indices of the drawn clients whose budget covers one more reply; count the others.

        Whose turn it is follows from the number of rounds that were charged: by another number some clients might never have one.
        """
        chosen = self.sampling.choose(self.num_charged + 1, len(names), rng)
        paying = np.asarray([index for index in chosen if self.can_pay(names[index])], dtype=chosen.dtype)
        self.state = replace(self.state, num_unasked=self.state.num_unasked + len(chosen) - len(paying))
        return paying

    def next_charge(self, names: Sequence[str], server_round: int = 0) -> Charge:
        """Return what one reply of each of these clients costs it."""
        kinds, which = np.unique(self._kinds[np.asarray([self._places[name] for name in names], np.int64)], return_inverse=True)
        return Charge(
            owners=tuple(names),
            events=tuple(self._events[kind] for kind in kinds.tolist()),
            which=tuple(which.tolist()),
            release=self.name,
            number=self.num_charged + 1,
            server_round=server_round or self.num_charged + 1,
            kind=self.state.kind,
            scope=Scope(unit=next(iter(self.terms.values())).release.unit, relation=self.relation),
        )

    def take(self, charge: Charge) -> None:
        """Charge one reply to each client."""
        charge.check_next(release=self.name, num_charged=self.num_charged, kind=self.state.kind)
        replies = self.state.replies.copy()
        np.add.at(replies, [self._places[name] for name in charge.owners], 1)
        self.state = replace(self.state, replies=replies, num_rounds=charge.number)

    def ask(self, length: int, names: Sequence[str]) -> Ask:
        """Return what is asked of clients: by their own terms, and with the weight of each in the sum.

        It is for their next charge: the number of the reply counts it already.
        """
        own = {
            name: OwnAsk(
                weight=self.weight_of(name),
                terms=terms.kind,
                noise_multiplier=terms.release.mechanism.noise_multiplier,
                number=self.replies(name) + 1,
            )
            for name, terms in ((name, self.terms[name]) for name in names)
        }
        # Of all of them together; every client compares what is asked of it alone with its own terms.
        least = min((one.noise_multiplier for one in own.values()), default=0.0)
        promise = Promise(clip_norm=self.clip_norm, noise_multiplier=least)
        vectors = self.vectors_of(length)
        return Ask(promise=promise, placement="local", own=own, metrics=self.metrics, vectors=vectors)

    def limits(self, now: Round) -> Limits:
        """Return a bound on the norm of an honest sum of rows; the server does not clip rows that carry their own noise."""
        longest = self.longest(self, now)

        def honest_norm(names: Sequence[str]) -> float:
            return sum(now.ask.own[name].weight * longest(name) for name in names)

        return Limits(length=now.length, honest_norm=honest_norm)

    def bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return the mean size of a client's own message; it reveals nothing, since messages are private."""
        return collected.payload_bytes / len(collected.clients) if collected.clients else 0.0


def _digest(terms: Mapping[str, Terms]) -> str:
    """Return a digest of the clients' names and terms; noise is compared to six digits, for a calibration may change its last."""
    digest = hashlib.sha256()
    for name, own in terms.items():
        digest.update(f"{name!r}: {own.kind}, {own.release.mechanism.noise_multiplier:.6g}\n".encode())
    return digest.hexdigest()
