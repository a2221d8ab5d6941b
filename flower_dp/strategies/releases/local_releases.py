"""Local releases: each client's request under its own terms, and its number of charges."""

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

# Request of a round -> client's name -> a norm that its honest row practically never exceeds, before its weight.
Longest = Callable[[RoundRequest], Callable[[str], float]]
# The method's own state and the length of a row -> the vectors that are sent with the model, by name.
VectorsOf = Callable[[Any, int], Mapping[str, np.ndarray]]


# Clients that `anyone_pays` looks at together: most often one of the first has budget left, and the rest need no look.
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReleases:
    """One reply per round of every client in the cohort, each with noise by the client's own terms.

    The server charges a client with each request. It skips a client whose budget is spent; the run continues with the others.
    The state of the release is the number of times that a drawn client was skipped.

    Attributes:
        name: name of the release on the wire: the method's, or that of private evaluations.
        clip_norm: clip norm of the releases.
        sampling: sampler of a round's cohort.
        relation: neighboring relation of the ledgers.
        weight_of: function that returns a client's public weight in the sum.
        longest: function that returns the largest norm of an honest row.
        vectors_of: function that returns the vectors that are sent with the model.
        metrics: bounds of the metrics of an evaluation; None in training.
        terms: terms of every client, by name; empty before they are known.
        fingerprint: digest of the terms, by which clients are charged.
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
    # The distinct events of a reply, and the index of each client's: a million clients have few distinct events.
    _events: tuple[dp_events.DpEvent, ...] = field(default=(), init=False, repr=False)
    _kinds: Mapping[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        events: dict[dp_events.DpEvent, int] = {}
        kinds = {name: events.setdefault(frozen(terms.event), len(events)) for name, terms in self.terms.items()}
        for field_name, value in {"fingerprint": _digest(self.terms), "_events": tuple(events), "_kinds": kinds}.items():
            object.__setattr__(self, field_name, value)

    @property
    def scope(self) -> CostScope:
        """The unit and relation under which its charges compose."""
        return CostScope(unit=next(iter(self.terms.values())).release.unit if self.terms else "record", relation=self.relation)

    def replies(self, charges: Charges, names: Sequence[str]) -> np.ndarray:
        """Return how many replies were charged to each of these clients."""
        return charges.counts(self.scope, self.name, names)

    def counts(self, charges: Charges) -> dict[str, int]:
        """Return how many replies were charged to every client."""
        return dict(zip(self.terms, self.replies(charges, tuple(self.terms)).tolist(), strict=True))

    def ledger(self, charges: Charges, name: str) -> History:
        """Return the charges of a client."""
        return charges.history(self.scope, name, release=self.name)

    def ledgers(self, charges: Charges) -> dict[str, History]:
        """Return the charges of every client, by name."""
        return {name: self.ledger(charges, name) for name in self.terms}

    def paying(self, charges: Charges, names: Sequence[str]) -> np.ndarray:
        """Return for each of these clients whether its budget covers one more reply."""
        most = np.asarray([self.terms[name].num_replies for name in names], np.float64)
        return self.replies(charges, names) < most

    def anyone_pays(self, charges: Charges) -> bool:
        """Return whether any client's budget covers one more reply."""
        names = tuple(self.terms)
        return any(self.paying(charges, names[start : start + _AT_ONCE]).any() for start in range(0, len(names), _AT_ONCE))

    # A round

    def cohort(self, state: RunState, names: tuple[str, ...], rng: Generator) -> tuple[np.ndarray, int]:
        """Return the indices of the drawn clients whose budget covers one more reply, and how many others were drawn so far."""
        # Index the fixed order by the number of charged rounds. Any other index could skip some clients for ever.
        chosen = self.sampling.sample(state.charges.number(self.name) + 1, len(names), rng)
        paying = chosen[self.paying(state.charges, [names[index] for index in chosen])]
        return paying, state.releases.get(self.name, 0) + len(chosen) - len(paying)

    def charge(self, charges: Charges, server_round: int, names: Sequence[str]) -> Charge:
        """Return the charge of one reply of each of these clients."""
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
        """Return the request to these clients: by the terms of each, with its weight in the sum.

        The number of each reply counts the charge of this request, which follows.
        """
        replies = self.replies(state.charges, names).tolist()
        requests = {
            name: LocalRequest(
                weight=self.weight_of(name),
                terms=self.terms[name].fingerprint,
                noise_multiplier=self.terms[name].release.mechanism.noise_multiplier,
                number=number + 1,
            )
            for name, number in zip(names, replies, strict=True)
        }
        # The promise is the least of all clients; each client compares its own request with its own terms.
        least = min((request.noise_multiplier for request in requests.values()), default=0.0)
        promise = Promise(clip_norm=self.clip_norm, noise_multiplier=least)
        ask = ReleaseRequest(
            promise=promise, placement="local", own=requests, metrics=self.metrics, vectors=self.vectors_of(state.own, size)
        )
        return ask, None, state.releases.get(self.name, 0)

    def limits(self, now: RoundRequest) -> ReplyLimits:
        """Return a bound on the norm of an honest sum of rows; the server does not clip rows that carry their own noise."""
        longest = self.longest(now)

        def honest_norm(names: Sequence[str]) -> float:
            return sum(now.ask.own[name].weight * longest(name) for name in names)

        return ReplyLimits(length=now.length, honest_norm=honest_norm)


def _digest(terms: Mapping[str, ClientTerms]) -> str:
    """Return a digest of the clients' names and terms."""
    digest = hashlib.sha256()
    for name, client in terms.items():
        # Six digits of the noise: a calibration on another machine may change the last ones.
        digest.update(f"{name!r}: {client.fingerprint}, {client.release.mechanism.noise_multiplier:.6g}\n".encode())
    return digest.hexdigest()
