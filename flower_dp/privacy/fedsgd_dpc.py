"""FedSGD-DPC's noise (Zhou et al.): the paper's formulas, and the terms of one client.

The unit of privacy is one record, under local DP: the client adds the full noise to every message.
"""

import math
from functools import lru_cache
from typing import Any

from flower_dp.core import checks
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.client_terms import ClientTerms, budget, least_gaussian_multiplier, own_release
from flower_dp.privacy.events import Relation
from flower_dp.privacy.mechanisms import Gaussian, Laplace, Mechanism

MECHANISMS = ("laplace", "gaussian")
# Laplace noise is larger by this factor than the budget needs, so that a sum of epsilons in float64 never exceeds the budget.
_ROUNDING = 2.0**-40


def laplace_scale(clip_norm: float, num_records: int, epsilon: float, num_replies: int) -> float:
    """Return the Laplace scale per coordinate that makes all replies of a client epsilon-DP (Theorem 1).

    A reply is the mean over `num_records` of gradients clipped to an L1 norm of `clip_norm`; replacing one record moves
    it by at most 2 clip_norm / num_records in L1 norm. Pure epsilons add up, so the scale is 2 clip_norm num_replies /
    (num_records epsilon). `num_replies` is a whole number, the most that the client will send: the paper's expected
    bT/N would overspend.

    Raises:
        ValueError: naming the argument that is not a positive (whole) number.
    """
    return 2 * _positive("clip_norm", clip_norm) * _count(num_replies) / (_records(num_records) * _positive("epsilon", epsilon))


def gaussian_noise_variance(
    clip_norm: float, num_records: int, epsilon: float, num_replies: int, *, delta: float, noise_constant: float
) -> float:
    """Return the paper's variance per coordinate of Gaussian noise for all replies of a client (Theorem 2, eq. 5).

    It is c2^2 C^2 R log(1/delta) / (n^2 epsilon^2) for R replies over n records clipped to an L2 norm of C. The paper
    takes c2 (`noise_constant`) from Abadi et al. 2016, where it exists but has no value, and the formula holds for
    epsilon < c1 q^2 T with another constant without a value: this is the paper's number, not a proof of privacy.
    Calibrate numerically for that.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    log_delta = -math.log(checks.number("delta", delta, above=0, below=1))
    scale = _positive("noise_constant", noise_constant) * _positive("clip_norm", clip_norm)
    std_of_one = scale / (_records(num_records) * _positive("epsilon", epsilon))
    return std_of_one * std_of_one * _count(num_replies) * log_delta


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
) -> ClientTerms:
    """Return the terms of FedSGD-DPC: each reply is a noised mean of per-record clipped gradients.

    All `num_replies` replies together are (epsilon, delta)-differentially private for each record. The release is the *sum* of
    clipped gradients; divided by its `expected_cohort_size`, num_records x sampling_rate, a public number, it is the mean.

    Args:
        mechanism: `laplace` (L1 clip norm, all records, delta 0) or `gaussian` (L2 clip norm, every record with probability
            `sampling_rate`), noise of the least scale that numerical composition proves to be enough.
        clip_norm: bound on the norm of one record's gradient.
        epsilon: budget of all replies, > 0; math.inf means no noise, and no privacy.
        delta: 0 for Laplace; in (0, 1) for Gaussian.
        num_replies: largest number of replies that the client will send.
        num_records: the client's public data size.
        sampling_rate: part of the records in a batch, in expectation.
        relation: neighboring relation; replace-one in the paper.

    Raises:
        ValueError: for a value out of range, naming it.
    """
    checks.one_of("mechanism", mechanism, MECHANISMS)
    epsilon = budget(epsilon)
    checks.integer("num_replies", num_replies, at_least=1)
    if mechanism == "laplace":
        if delta != 0:
            raise checks.refusal("delta", delta, "Laplace noise gives pure differential privacy; must be 0")
        if sampling_rate != 1:
            raise checks.bad("sampling_rate", sampling_rate, "1 for mechanism='laplace', which uses all records")
    else:
        checks.number("delta", delta, above=0, below=1)
        checks.number("sampling_rate", sampling_rate, above=0, at_most=1)
    sampler = FullSampling() if sampling_rate == 1 else PoissonSampling(sampling_rate=sampling_rate)
    noise: Mechanism
    if mechanism == "laplace":
        noise = Laplace(noise_multiplier=_laplace_multiplier(epsilon, num_replies, relation))
    else:
        all_replies: dict[str, Any] = {"delta": delta, "num_releases": num_replies, "relation": relation}
        noise = Gaussian(noise_multiplier=least_gaussian_multiplier(sampler, epsilon=epsilon, **all_replies))
    description, size = "the noised mean of per-record clipped gradients, in every reply", _records(num_records)
    release = own_release(description, noise, sampler, clip_norm=clip_norm, num_units=size, relation=relation)
    return ClientTerms(release=release, num_replies=num_replies, epsilon=epsilon)


def _laplace_multiplier(epsilon: float, num_replies: int, relation: Relation) -> float:
    if math.isinf(epsilon):
        return 0.0
    # The scale for a sum (over one record) clipped to 1, under replace-one; the paper's Theorem 1.
    scale = laplace_scale(1.0, 1, epsilon, num_replies) * (1 + _ROUNDING)
    return scale if accounting.parse_relation(relation) == "replace-one" else scale / 2


def _positive(name: str, value: float) -> float:
    return checks.number(name, value, above=0)


def _count(value: int) -> int:
    return checks.integer("num_replies", value, at_least=1)


def _records(value: int) -> int:
    return checks.integer("num_records", value, at_least=1)
