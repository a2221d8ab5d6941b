"""Terms: one client's own promise, the release of one reply and how many replies it will ever send.

For methods whose every message is private on its own. The server derives a client's terms from what was agreed, and charges a
ledger by them; the client derives its terms from its own budget, data size and number of replies, and works by nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dp_accounting import DpEvent, GaussianDpEvent

from flower_dp import accounting, checks
from flower_dp.events import Relation
from flower_dp.mechanisms import Gaussian, Laplace, Mechanism
from flower_dp.planning.fedsgd_dpc import laplace_scale
from flower_dp.planning.nbafl import uplink_noise_std
from flower_dp.release import Release
from flower_dp.sampling import FullSampling, PoissonSampling, Sampler

MECHANISMS = ("laplace", "gaussian")
_SEEN_BY = "the server, and everyone who sees a client's messages or any model made from them"
# Laplace noise is that much larger than its budget asks, so that a sum of float64 shares never exceeds the budget.
_ROUNDING = 2.0**-40


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What leaves with one reply of a client, and how many replies there may ever be."""

    release: Release
    num_replies: int

    def __post_init__(self) -> None:
        checks.integer("num_replies", self.num_replies, at_least=1)

    @property
    def event(self) -> DpEvent:
        """What one reply costs."""
        return self.release.event(1)

    @property
    def kind(self) -> str:
        """All but the noise multiplier, as one line; different terms have different lines."""
        release = self.release
        return (
            f"{self.num_replies} replies, {type(release.mechanism).__name__}, clip_norm={release.clip_norm!r}, {release.unit}, "
            f"{release.relation}, {release.sampler!r} of {release.num_clients}"
        )

    @property
    def text(self) -> str:
        """The terms as one line; different terms have different lines."""
        return f"{self.kind}, noise_multiplier={self.release.mechanism.noise_multiplier!r}"


@lru_cache(maxsize=4096)
def gradient_terms(
    *,
    mechanism: str,
    clip_norm: float,
    epsilon: float,
    delta: float,
    num_replies: int,
    num_records: int,
    sampling_rate: float = 1.0,
    relation: Relation = "replace-one",
) -> Terms:
    """Return the terms of FedSGD-DPC: each reply is a noised mean of per-record clipped gradients.

    All `num_replies` replies together are (epsilon, delta)-differentially private for each record. The release is the *sum* of
    clipped gradients; divided by its `expected_cohort`, num_records x sampling_rate, a public number, it is the mean.

    Args:
        mechanism: `laplace` (L1 clip norm, all records, delta 0) or `gaussian` (L2 clip norm, every record with probability
            `sampling_rate`), noise of the least scale that numerical composition proves to be enough.
        clip_norm: bound on the norm of one record's gradient.
        epsilon: budget of all replies, > 0; math.inf means no noise, and no privacy.
        delta: 0 for Laplace; in (0, 1) for Gaussian.
        num_replies: the most replies that the client will send.
        num_records: the client's public data size.
        sampling_rate: part of the records in a batch, in expectation.
        relation: neighbouring relation; replace-one in the paper.

    Raises:
        ValueError: for a value out of range, naming it.
    """
    checks.one_of("mechanism", mechanism, MECHANISMS)
    budget = _budget(epsilon)
    checks.integer("num_replies", num_replies, at_least=1)
    if mechanism == "laplace":
        if delta != 0:
            raise ValueError(f"delta={delta!r}: Laplace noise gives pure differential privacy; must be 0")
        if sampling_rate != 1:
            raise ValueError(f"sampling_rate={sampling_rate!r}: must be 1 for mechanism='laplace', which uses all records")
    else:
        checks.number("delta", delta, above=0, below=1)
        checks.number("sampling_rate", sampling_rate, above=0, at_most=1)
    noise: Mechanism
    if mechanism == "laplace":
        noise = Laplace(noise_multiplier=_laplace_multiplier(budget, num_replies, relation))
    else:
        noise = Gaussian(noise_multiplier=_gaussian_multiplier(budget, delta, num_replies, float(sampling_rate), relation))
    sampler: Sampler = FullSampling() if sampling_rate == 1 else PoissonSampling(sampling_rate=sampling_rate)
    release = Release(
        what="the noised mean of per-record clipped gradients, in every reply",
        seen_by=_SEEN_BY,
        unit="record",
        relation=relation,
        clip_norm=clip_norm,
        mechanism=noise,
        sampler=sampler,
        num_clients=checks.integer("num_records", num_records, at_least=1),
    )
    return Terms(release=release, num_replies=num_replies)


@lru_cache(maxsize=4096)
def weights_terms(
    *, clip_norm: float, epsilon: float, delta: float, uplink_exposures: int, min_records: int, num_replies: int
) -> Terms:
    """Return the terms of NbAFL: each reply is the client's whole weights, clipped to L2 norm `clip_norm`, with noise.

    The noise has the paper's std for (epsilon, delta) over `uplink_exposures` replies of clients with at least `min_records`
    records, which rests on the paper's assumption of a sensitivity 2 C / m. The release itself knows nothing of that assumption:
    clipped weights lie in a ball of radius C, so that all of a client's records together move them by at most 2 C.

    Raises:
        ValueError: for a value out of range, naming it.
    """
    checks.number("clip_norm", clip_norm, above=0)
    std = 0.0
    if math.isfinite(_budget(epsilon)):
        std = uplink_noise_std(
            uplink_exposures=uplink_exposures, epsilon=epsilon, delta=delta, clip_norm=clip_norm, min_records=min_records
        )
    release = Release(
        what="the client's clipped weights with noise, in every reply",
        seen_by=_SEEN_BY,
        unit="client",
        relation="replace-one",
        clip_norm=clip_norm,
        mechanism=Gaussian(noise_multiplier=std / clip_norm),
        sampler=FullSampling(),
        num_clients=1,
    )
    return Terms(release=release, num_replies=num_replies)


def value_of(field: str, value: Any, name: str) -> Any:
    """Return one client's value: of a mapping by client name, or the one value for all.

    Raises:
        ValueError: if a mapping lacks the client.
    """
    if not isinstance(value, Mapping):
        return value
    if name not in value:
        raise ValueError(f"{field}: has no value for client {name!r}; has {', '.join(sorted(value))}")
    return value[name]


def per_client(field: str, value: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return every client's value: of a mapping by name, of a sequence in the order of the names, or the one value for all.

    Raises:
        ValueError: if names or length don't fit.
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


def _budget(epsilon: float) -> float:
    return math.inf if epsilon == math.inf else checks.number("epsilon", epsilon, above=0)


def _laplace_multiplier(epsilon: float, num_replies: int, relation: Relation) -> float:
    if math.isinf(epsilon):
        return 0.0
    # Of a sum (over one record) clipped to 1, under replace-one; the paper's Theorem 1.
    scale = laplace_scale(1.0, 1, epsilon, num_replies) * (1 + _ROUNDING)
    return scale if accounting.relation_of(relation) == "replace-one" else scale / 2


@lru_cache(maxsize=1024)
def _gaussian_multiplier(epsilon: float, delta: float, num_replies: int, sampling_rate: float, relation: Relation) -> float:
    if math.isinf(epsilon):
        return 0.0
    sampler = PoissonSampling(sampling_rate=sampling_rate)
    return accounting.calibrate(
        lambda multiplier: accounting.repeated(sampler.event(GaussianDpEvent(multiplier), 1, 1), num_replies),
        epsilon=epsilon,
        delta=delta,
        relation=relation,
    )
