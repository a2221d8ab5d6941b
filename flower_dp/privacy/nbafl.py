"""NbAFL's noise (Wei et al. 2020): the paper's formulas for uplink and downlink, and the terms of one client.

The formulas are the paper's, not proofs: from clipped weights alone a sensitivity of 2 C follows, not 2 C / m, and the Gaussian
formula holds for epsilon < 1 per exposure.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flower_dp.core import checks
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.client_terms import ClientTerms, budget, least_gaussian_multiplier, own_release
from flower_dp.privacy.mechanisms import Gaussian

Floats = NDArray[np.float64]


def uplink_noise_std(*, uplink_exposures: int, epsilon: float, delta: float, clip_norm: float, min_records: int) -> float:
    """Return sigma_U, the noise on every coordinate of an upload (Section III-A).

    sigma_U = c L (2C/m) / epsilon, with c = sqrt(2 ln(1.25/delta)).

    `clip_norm` (C) bounds the L2 norm of a client's weights. `min_records` (m) is the size of the smallest local data set.
    `uplink_exposures` (L) counts the uploads of a client that an eavesdropper sees.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    exposures = checks.integer("uplink_exposures", uplink_exposures, at_least=1)
    return exposures * _unit_std(epsilon=epsilon, delta=delta, clip_norm=clip_norm, min_records=min_records)


def downlink_noise_std(
    *,
    num_clients: int,
    cohort_size: int,
    num_rounds: int,
    uplink_exposures: int,
    epsilon: float,
    delta: float,
    clip_norm: float,
    min_records: int,
) -> float:
    """Return sigma_D, the noise that the server adds before it broadcasts (Theorem 1; Lemma 4 for K < N).

    All clients: (2cC/(mN epsilon)) sqrt(T^2 - L^2 N) if T > L sqrt(N), else 0.
    K of N: (2cC/(mK epsilon)) sqrt(T^2/b^2 - L^2 K) if T > epsilon/gamma, else 0.

    This is defined everywhere: gamma's logarithm has an argument above 1 - K/N, and if T > epsilon/gamma that of b
    has one above e^(-epsilon/(L sqrt(K))). If b is not defined (few rounds, large epsilon), T is below epsilon/gamma,
    and Lemma 4 needs no noise on the downlink.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    checks.integer("num_clients", num_clients, at_least=1)
    checks.integer("cohort_size", cohort_size, at_least=1, at_most=num_clients)
    checks.integer("num_rounds", num_rounds, at_least=1)
    checks.integer("uplink_exposures", uplink_exposures, at_least=1, at_most=num_rounds)
    unit = _unit_std(epsilon=epsilon, delta=delta, clip_norm=clip_norm, min_records=min_records)
    if cohort_size == num_clients:
        excess = float(num_rounds**2 - uplink_exposures**2 * num_clients)
    elif num_rounds <= rounds_without_downlink_noise(num_clients, cohort_size, uplink_exposures, epsilon):
        excess = 0.0
    else:
        # T/b = epsilon / (the epsilon that the sampled broadcast may cost in each round)
        effective = epsilon / -float(sampled_log(num_clients, cohort_size, num_rounds, epsilon))
        excess = effective * effective - uplink_exposures**2 * cohort_size
    return unit / cohort_size * math.sqrt(max(excess, 0.0))


@lru_cache(maxsize=4096)
def weights_terms(
    *,
    clip_norm: float,
    epsilon: float | None = None,
    paper_epsilon: float | None = None,
    delta: float,
    uplink_exposures: int | None = None,
    min_records: int,
    num_replies: int | None = None,
) -> ClientTerms:
    """Return the terms of NbAFL: each reply is the client's whole weights, clipped to L2 norm `clip_norm`, with noise.

    With `epsilon` the noise is the least with which all `num_replies` replies together cost at most (epsilon, delta). That is
    proved for any training: clipped weights lie in a ball of radius C, so all of a client's records together move them by at most
    2 C. With `paper_epsilon` the noise has the paper's std for (paper_epsilon, delta) over `uplink_exposures` replies of clients
    with at least `min_records` records. That std rests on the paper's assumption of a sensitivity 2 C / m. For the same number
    this noise is many times smaller; the statement says what it proves.

    Raises:
        ValueError: for a value out of range, or one that is missing or out of place, naming it.
    """
    checks.number("clip_norm", clip_norm, above=0)
    checks.number("delta", delta, above=0, below=1)
    check_epsilons(epsilon, paper_epsilon)
    if paper_epsilon is not None:
        if uplink_exposures is None:
            raise ValueError(
                f"uplink_exposures: is missing; paper_epsilon={paper_epsilon:g} is made for so many replies of a client"
            )
        checks.integer("uplink_exposures", uplink_exposures, at_least=1)
        replies, std = uplink_exposures if num_replies is None else num_replies, 0.0
        if math.isfinite(budget(paper_epsilon, "paper_epsilon")):
            unit = _unit_std(epsilon=paper_epsilon, delta=delta, clip_norm=clip_norm, min_records=min_records)
            std = uplink_exposures * unit
    else:
        if uplink_exposures is not None:
            reason = f"is read with paper_epsilon only; epsilon={epsilon} covers all replies"
            raise checks.refusal("uplink_exposures", uplink_exposures, reason)
        if num_replies is None:
            raise ValueError(f"num_replies: is missing; the noise of epsilon={epsilon} is made for so many replies of a client")
        replies = checks.integer("num_replies", num_replies, at_least=1)
        most = budget(math.inf if epsilon is None else epsilon)
        std = clip_norm * least_gaussian_multiplier(
            FullSampling(), epsilon=most, delta=delta, num_releases=replies, relation="replace-one"
        )
    description, mechanism = "the client's clipped weights with noise, in every reply", Gaussian(noise_multiplier=std / clip_norm)
    release = own_release(description, mechanism, FullSampling(), clip_norm=clip_norm, num_units=1, unit="client")
    return ClientTerms(release=release, num_replies=replies, epsilon=math.inf if epsilon is None else epsilon)


def check_epsilons(epsilon: object, paper_epsilon: object) -> None:
    """Refuse both epsilons or none.

    Raises:
        ValueError: naming both.
    """
    if (epsilon is None) == (paper_epsilon is None):
        both = "neither is given" if epsilon is None else "both are given"
        raise ValueError(f"epsilon={epsilon}, paper_epsilon={paper_epsilon}: {both}; must be exactly one")


def gaussian_c(delta: float) -> float:
    """Return c = sqrt(2 ln(1.25/delta)) of the classical Gaussian mechanism (for epsilon < 1; Section II-C)."""
    return math.sqrt(2 * math.log(1.25 / checks.number("delta", delta, above=0, below=1)))


def log_argument(*, num_clients: int, cohort_size: int, num_rounds: int, epsilon: float) -> float:
    """Return 1 - N/K + (N/K) e^(-epsilon/T), of which Lemma 4 (b) and Theorem 3 take the logarithm."""
    return 1 + num_clients / cohort_size * math.expm1(-epsilon / num_rounds)


def sampled_log(num_clients: int, cohort_size: float | Floats, num_rounds: int, epsilon: float) -> Floats:
    """Return ln(1 - N/K + (N/K) e^(-epsilon/T)), elementwise; -infinity or NaN if it is not defined."""
    ratio = num_clients / np.asarray(cohort_size, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log1p(ratio * math.expm1(-epsilon / num_rounds))
    # At K = N it is -epsilon/T, also where e^(-epsilon/T) is no longer a number above zero.
    return np.asarray(np.where(ratio == 1, -epsilon / num_rounds, logs))


def _unit_std(*, epsilon: float, delta: float, clip_norm: float, min_records: int) -> float:
    sensitivity = 2 * checks.number("clip_norm", clip_norm, above=0) / checks.integer("min_records", min_records, at_least=1)
    return gaussian_c(delta) * sensitivity / checks.number("epsilon", epsilon, above=0)


def rounds_without_downlink_noise(num_clients: int, cohort_size: int, uplink_exposures: int, epsilon: float) -> float:
    """Return the number of rounds up to which the paper adds no downlink noise: L sqrt(N), or epsilon/gamma for K < N."""
    if cohort_size == num_clients:
        return uplink_exposures * math.sqrt(num_clients)
    share = math.expm1(-epsilon / (uplink_exposures * math.sqrt(cohort_size)))
    return epsilon / -math.log1p(cohort_size / num_clients * share)
