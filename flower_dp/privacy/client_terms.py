"""Terms: the release in each reply of one client, and the largest number of replies that it will ever send.

For methods with local DP: the client adds the full noise to every message. The server derives a client's terms from its own
settings, and charges a ledger by them. The client derives its terms from its own budget, data size and number of replies, and
uses no values of the server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from flower_dp.core import checks, dp_events
from flower_dp.core.sampling import Sampler
from flower_dp.privacy import accounting
from flower_dp.privacy.events import Relation
from flower_dp.privacy.mechanisms import Mechanism
from flower_dp.privacy.release import Release

# Largest relative difference from the noise of the terms that opened an account. Noise that is calibrated anew may be up to 1e-4
# larger than before (`accounting.calibrate`); a difference far above that is another budget.
_LESS_NOISE, _MORE_NOISE = 1e-9, 1e-3
_NOISE = ", noise_multiplier="

_SEEN_BY = "the server, and everyone who sees a client's messages or a model made from them"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargeRefusal:
    """The reason why a client can't be charged for another reply.

    Attributes:
        public: text for the server, without the client's own terms, which may reveal how many records it has.
        own: text for the device's own log.
        repeated: whether the account has a reply of this number already.
    """

    public: str
    own: str
    repeated: bool = False


class ReplyTerms(Protocol):
    """The terms by which an account is charged for a client's replies."""

    @property
    def release(self) -> Release:
        """One release, for its unit and relation."""

    @property
    def text(self) -> str:
        """Terms as one line, which begins with the largest number of replies; different terms have different lines."""

    def event_of(self, number: int) -> dp_events.DpEvent:
        """Return the event of reply `number` of an account, from 1."""

    def refusal_reason(self, replies: int, opened: str | None) -> ChargeRefusal | None:
        """Return the reason why a client can't be charged for another reply: see `ClientTerms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTerms:
    """The release in one reply of a client, and the largest number of replies.

    Attributes:
        release: one release.
        num_replies: largest number of replies that the client will ever send.
        num_releases: number of releases in one reply, for example one for each local step, each with its own noise.
        num_records: the client's public data size, if a release draws from fewer records than it has, such as a batch of fixed
            size; None for the number that the release draws from.
        epsilon: upper bound of the epsilon of all `num_replies` replies together, at the delta that their noise was made for;
            infinite if no bound is proved.
    """

    release: Release
    num_replies: int
    num_releases: int = 1
    num_records: int | None = None
    epsilon: float = math.inf

    def __post_init__(self) -> None:
        checks.integer("num_replies", self.num_replies, at_least=1)
        checks.integer("num_releases", self.num_releases, at_least=1)
        budget(self.epsilon)

    @property
    def event(self) -> dp_events.DpEvent:
        """Event of one reply."""
        event = self.release.event(1)
        return event if self.num_releases == 1 else accounting.repeated(event, self.num_releases)

    def event_of(self, number: int) -> dp_events.DpEvent:
        """Return the event of reply `number` of an account; all replies cost the same."""
        return self.event

    @property
    def fingerprint(self) -> str:
        """Terms without the noise multiplier, as one line; different terms have different lines."""
        release = self.release
        each = "" if self.num_releases == 1 else f" of {self.num_releases} releases"
        noise = f"{type(release.mechanism).__name__}, clip_norm={float(release.clip_norm)!r}"
        units = f"{release.unit}, {release.relation}, {release.sampler!r} of {release.num_units}"
        return f"{self.num_replies} replies{each}, {noise}, {units}"

    @property
    def text(self) -> str:
        """Terms as one line; different terms have different lines."""
        return f"{self.fingerprint}{_NOISE}{float(self.release.mechanism.noise_multiplier)!r}"

    def refusal_reason(self, replies: int, opened: str | None) -> ChargeRefusal | None:
        """Return the reason why a client can't be charged for another reply; None if it can.

        An account stays valid if only the noise differs from the terms that opened it, and by little. It may be less by at most
        1e-9 of it, for the last digits of a calibration with another release of a library. Replies of both noises together then
        cost at most what the terms allowed that opened the account. The noise may be larger by at most 1e-3 of it. A larger noise
        is another, smaller budget, and replies with the noise of the larger budget do not fit into it.

        Args:
            replies: number of replies that the client was charged for.
            opened: `text` of the terms that opened its account, which can't change; None if there is none yet.
        """
        if opened is not None and not self._goes_on(opened):
            public = "its account was opened on other terms"
            return ChargeRefusal(public=public, own=f"{public} ({opened}), not {self.text}; for new terms create a new ledger")
        if replies >= self.num_replies:
            public = f"its budget is spent: num_replies={self.num_replies}, all of them sent"
            return ChargeRefusal(public=public, own=public)
        return None

    def _goes_on(self, opened: str) -> bool:
        kind, _, noise = opened.rpartition(_NOISE)
        now = float(self.release.mechanism.noise_multiplier)
        try:
            before = float(noise)
        except ValueError:  # a damaged account refuses its own client alone, not the node's others
            return False
        return kind == self.fingerprint and before * (1 - _LESS_NOISE) <= now <= before * (1 + _MORE_NOISE)


def num_replies_of(text: str) -> int:
    """Return the largest number of replies that terms allow, from the terms as one line, `ClientTerms.text`.

    Raises:
        ValueError: if the line has no such number.
    """
    return checks.integer("num_replies", int(text.partition(" ")[0]), at_least=1)


def value_of(field: str, value: Any, name: str) -> Any:
    """Return one client's value, from a mapping by client name or from one value for all.

    Raises:
        ValueError: if a mapping lacks the client.
    """
    if not isinstance(value, Mapping):
        return value
    if name not in value:
        raise ValueError(f"{field}: has no value for client {name!r}; has {', '.join(sorted(value))}")
    return value[name]


def per_client(field: str, value: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return every client's value, from a mapping by name, a sequence in the order of the names, or one value for all.

    Raises:
        ValueError: if the names or the length differ.
    """
    if isinstance(value, Mapping):
        if set(value) != set(names):
            missing, unknown = sorted(set(names) - set(value)), sorted(set(value) - set(names))
            raise ValueError(f"{field}: must have one value a client (missing {missing}, unknown {unknown})")
        return {name: value[name] for name in names}
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != len(names):
            raise ValueError(f"{field}: has {len(value)} values: must have one for each of the {len(names)} clients")
        return dict(zip(names, value, strict=True))
    return dict.fromkeys(names, value)


def values_in(value: Any) -> list[Any]:
    """Return all values of a mapping, a sequence or one value."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def budget(epsilon: float, field: str = "epsilon") -> float:
    """Return a checked budget; infinity stands for no noise.

    Raises:
        ValueError: if it is not above 0.
    """
    return math.inf if epsilon == math.inf else checks.number(field, epsilon, above=0)


def own_release(what: str, mechanism: Mechanism, sampler: Sampler, *, clip_norm: float, num_units: int, **words: Any) -> Release:
    """Return the release of one client under local DP; by default the unit is a record, under replace-one.

    Args:
        what: released quantity, as text.
        mechanism: noise of the release.
        sampler: rule that selects the client's units.
        clip_norm: bound on the norm of one unit's contribution.
        num_units: number of units the sampler draws from.
        words: unit and relation, if they differ from the defaults.
    """
    shared = {"visible_to": _SEEN_BY, "unit": "record", "relation": "replace-one", "mechanism": mechanism, "sampler": sampler}
    return Release(**shared | words, description=what, clip_norm=clip_norm, num_units=num_units)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def least_gaussian_multiplier(
    sampler: Sampler, *, epsilon: float, delta: float, num_releases: int, relation: Relation, num_units: int = 1
) -> float:
    """Return the least noise multiplier of Gaussian releases that numerical composition proves enough; 0 for an infinite budget.

    Args:
        sampler: rule that selects the units of a release.
        epsilon: budget of all releases together.
        delta: in (0, 1).
        num_releases: number of releases.
        relation: neighboring relation.
        num_units: number of units the sampler draws from, if it affects the cost of a release.

    Raises:
        ValueError: if no noise meets the budget.
    """
    if math.isinf(epsilon):
        return 0.0

    def event(multiplier: float) -> dp_events.DpEvent:
        return accounting.repeated(sampler.event(dp_events.GaussianDpEvent(multiplier), 1, num_units), num_releases)

    return accounting.calibrate(event, epsilon=epsilon, delta=delta, relation=relation)
