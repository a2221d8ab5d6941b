"""Replies that are private one by one: what is asked of every client by its own terms, and how often each was charged."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flower_dp.core import dp_events
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import Sampler
from flower_dp.privacy.charges import Charge, Charges, CostScope, History, frozen
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.events import Relation
from flower_dp.strategies.releases.limits import ReplyLimits
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import LocalRequest, Promise, ReleaseRequest

# What was asked in a round -> a client's name -> a norm that its honest row all but never exceeds, before its weight.
Longest = Callable[[RoundRequest], Callable[[str], float]]
# What the method keeps, and the length of a row -> the vectors that are sent with the model, by their names.
VectorsOf = Callable[[Any, int], Mapping[str, np.ndarray]]


# Clients that are looked at together: most often the first of them pay.
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReleases:
    """One reply a round of every client that is asked, each with noise by the client's own terms.

    The server charges a client when it asks the client. It no longer asks a client that has sent as many replies as its budget
    covers; the others go on. Its state is how often a drawn client was not asked, since its budget was spent.

    Attributes:
        name: of the release on the wire: the method's, or that of private evaluations.
        clip_norm: of the releases.
        sampling: who takes part in a round.
        relation: neighboring relation of the ledgers.
        weight_of: what a client's row counts in the sum.
        longest: how long an honest row is at most.
        vectors_of: the vectors that are sent with the model.
        metrics: of an evaluation; None in training.
        terms: of every client, by its name; empty before they are known.
        fingerprint: a digest of the terms, by which clients are charged.
    """

    name: str
    clip_norm: float
    sampling: Sampler
    relation: Relation
    weight_of: Callable[[str], float]
    longest: Longest
    vectors_of: VectorsOf = lambda own, length: {}
    metrics: MetricBounds | None = None
    terms: Mapping[str, ClientTerms] = field(default_factory=dict)
    cohort_is_secret: bool = False
    accepts_new_clients: bool = False
    fingerprint: str = field(default="", init=False, repr=False)
    # The different events of a reply, and the place of each client's.
    _events: tuple[dp_events.DpEvent, ...] = field(default=(), init=False, repr=False)
    _kinds: Mapping[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        events: dict[dp_events.DpEvent, int] = {}
        kinds = {name: events.setdefault(frozen(own.event), len(events)) for name, own in self.terms.items()}
        for field_name, value in {"fingerprint": _digest(self.terms), "_events": tuple(events), "_kinds": kinds}.items():
            object.__setattr__(self, field_name, value)

    @property
    def scope(self) -> CostScope:
        """What its charges add up for."""
        return CostScope(unit=next(iter(self.terms.values())).release.unit if self.terms else "record", relation=self.relation)

    def replies(self, charges: Charges, names: Sequence[str]) -> np.ndarray:
        """Return how many replies were charged to each of these clients."""
        return charges.counts(self.scope, self.name, names)

    def counts(self, charges: Charges) -> dict[str, int]:
        """Return how many replies were charged to every client."""
        return dict(zip(self.terms, self.replies(charges, tuple(self.terms)).tolist(), strict=True))

    def ledger(self, charges: Charges, name: str) -> History:
        """Return what was charged to a client."""
        return charges.history(self.scope, name, release=self.name)

    def ledgers(self, charges: Charges) -> dict[str, History]:
        """Return what was charged to every client."""
        return {name: self.ledger(charges, name) for name in self.terms}

    def paying(self, charges: Charges, names: Sequence[str]) -> np.ndarray:
        """Return of each of these clients whether its budget covers one more reply."""
        most = np.asarray([self.terms[name].num_replies for name in names], np.float64)
        return self.replies(charges, names) < most

    def anyone_pays(self, charges: Charges) -> bool:
        """Return whether any client's budget covers one more reply."""
        names = tuple(self.terms)
        return any(self.paying(charges, names[start : start + _AT_ONCE]).any() for start in range(0, len(names), _AT_ONCE))

    # A round

    def cohort(self, state: RunState, names: tuple[str, ...], rng: Generator) -> tuple[np.ndarray, int]:
        """Return the indices of the drawn clients whose budget covers one more reply, and how many others were drawn so far.

        Whose turn it is follows from the number of rounds that were charged: by another number some clients might never have one.
        """
        chosen = self.sampling.sample(state.charges.number(self.name) + 1, len(names), rng)
        paying = chosen[self.paying(state.charges, [names[index] for index in chosen])]
        return paying, state.releases.get(self.name, 0) + len(chosen) - len(paying)

    def charge(self, charges: Charges, server_round: int, names: Sequence[str]) -> Charge:
        """Return what one reply of each of these clients costs it."""
        kinds, which = np.unique(np.asarray([self._kinds[name] for name in names], np.int64), return_inverse=True)
        return Charge(
            owners=tuple(names),
            events=tuple(self._events[kind] for kind in kinds.tolist()),
            which=tuple(which.tolist()),
            release=self.name,
            number=charges.number(self.name) + 1,
            server_round=server_round,
            fingerprint=self.fingerprint,
            scope=self.scope,
        )

    def ask(self, state: RunState, size: int, names: Sequence[str], rng: Generator) -> tuple[ReleaseRequest, Any, int]:
        """Return what is asked of clients: by their own terms, and with the weight of each in the sum.

        It is for their next charge: the number of the reply counts it already.
        """
        replies = self.replies(state.charges, names).tolist()
        own = {
            name: LocalRequest(
                weight=self.weight_of(name),
                terms=self.terms[name].fingerprint,
                noise_multiplier=self.terms[name].release.mechanism.noise_multiplier,
                number=number + 1,
            )
            for name, number in zip(names, replies, strict=True)
        }
        # Of all of them together; every client compares what is asked of it alone with its own terms.
        least = min((one.noise_multiplier for one in own.values()), default=0.0)
        promise = Promise(clip_norm=self.clip_norm, noise_multiplier=least)
        ask = ReleaseRequest(
            promise=promise, placement="local", own=own, metrics=self.metrics, vectors=self.vectors_of(state.own, size)
        )
        return ask, None, state.releases.get(self.name, 0)

    def limits(self, now: RoundRequest) -> ReplyLimits:
        """Return a bound on the norm of an honest sum of rows; the server does not clip rows that carry their own noise."""
        longest = self.longest(now)

        def honest_norm(names: Sequence[str]) -> float:
            return sum(now.ask.own[name].weight * longest(name) for name in names)

        return ReplyLimits(length=now.length, honest_norm=honest_norm)


def _digest(terms: Mapping[str, ClientTerms]) -> str:
    """Return a digest of the clients' names and terms; noise is compared to six digits, for a calibration may change its last."""
    digest = hashlib.sha256()
    for name, own in terms.items():
        digest.update(f"{name!r}: {own.fingerprint}, {own.release.mechanism.noise_multiplier:.6g}\n".encode())
    return digest.hexdigest()
