"""DP-PASGD's noise (Hu et al.): the paper's formulas for the noise of every local step, exact composition, a client's terms.

The unit of privacy is one record, replaced by another, under local DP: the client adds the full noise to every message.
"""

from __future__ import annotations

import math
from functools import lru_cache

from flower_dp.core import checks, dp_events
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.client_terms import ClientTerms, budget, least_gaussian_multiplier, own_release
from flower_dp.privacy.mechanisms import Gaussian

BATCH_SAMPLINGS = ("fixed-size", "poisson")
CALIBRATIONS = ("exact", "zcdp")


def noise_std(*, epsilon: float, delta: float, num_steps: int, clip_norm: float, batch_size: int) -> float:
    """Return sigma_m, the noise on every coordinate of a mini-batch gradient, for K steps of (epsilon, delta) in all.

    It is G sqrt(2 K) / (X_m sqrt(rho)) with sqrt(rho) = sqrt(ell + epsilon) - sqrt(ell), ell = log(1/delta): eq. 9 = epsilon
    solved for sigma_m. The paper's solution, eqs. 23 and 25, has a plus in rho = epsilon + 2 ell - 2 sqrt(ell^2 + epsilon ell)
    where the minus belongs; that noise would be far too small, and there is no option for it.

    `clip_norm` (G) bounds the L2 norm of one record's gradient, so that replacing a record moves the mean over `batch_size` (X_m)
    by at most 2 G / X_m.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    target = checks.number("epsilon", epsilon, above=0)
    std = _std_of_step(clip_norm, batch_size) * math.sqrt(2 * _steps(num_steps) / zcdp_budget(epsilon=target, delta=delta))

    def spent(std: float) -> float:
        return paper_epsilon(noise_std=std, delta=delta, num_steps=num_steps, clip_norm=clip_norm, batch_size=batch_size)

    # Rounding may leave the answer a little above the budget.
    while 0 < std < math.inf and spent(std) > target:
        std *= 1 + 2.0**-51
    return std


def paper_epsilon(*, noise_std: float, delta: float, num_steps: int, clip_norm: float, batch_size: int) -> float:
    """Return the epsilon of K steps by eq. 9: rho + 2 sqrt(rho log(1/delta)), rho = 2 K G^2 / (X_m^2 sigma_m^2).

    It is a valid bound, from zero-concentrated differential privacy; exact composition of Gaussians proves less.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    ratio = _std_of_step(clip_norm, batch_size) / checks.number("noise_std", noise_std, above=0)
    rho = 2 * _steps(num_steps) * ratio * ratio
    return rho + 2 * math.sqrt(rho * _log_inverse(delta))


def zcdp_budget(*, epsilon: float, delta: float) -> float:
    """Return rho, the zero-concentrated differential privacy that eq. 9 turns into (epsilon, delta).

    Raises:
        ValueError: naming the argument that is out of range; epsilon also if rho is too small for a float64.
    """
    ell, target = _log_inverse(delta), checks.number("epsilon", epsilon, above=0)
    # sqrt(ell + epsilon) - sqrt(ell), without the cancellation.
    root = target / (math.sqrt(ell + target) + math.sqrt(ell))
    if root * root == 0:
        raise ValueError(f"epsilon={epsilon!r}: is too small for the range of floating-point numbers")
    return root * root


def proved_epsilon(*, noise_std: float, delta: float, num_steps: int, clip_norm: float, batch_size: int) -> float:
    """Return the epsilon of K steps by exact composition of their Gaussian releases, under replace-one.

    Each step releases a mean over X_m records of gradients clipped to G, with noise sigma_m: noise multiplier sigma_m X_m / G of
    the sum, whose sensitivity is 2 G. The records of a batch are taken as known: no amplification by sampling is claimed.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    event = accounting.repeated(dp_events.GaussianDpEvent(noise_std * batch_size / clip_norm), num_steps)
    return accounting.epsilon(event, delta=delta, relation="replace-one").epsilon


@lru_cache(maxsize=4096)
def step_terms(
    *,
    epsilon: float,
    delta: float,
    num_steps: int,
    num_local_steps: int,
    clip_norm: float,
    batch_size: int,
    num_records: int,
    batch_sampling: str = "fixed-size",
    calibration: str = "exact",
) -> ClientTerms:
    """Return the terms of one device: a reply is made of `num_local_steps` noised sums of clipped gradients.

    All `num_steps` (K) steps together are (epsilon, delta)-differentially private for each record, replaced by another. A step
    releases the *sum* over its batch; divided by `expected_cohort_size`, the batch size, it is the mean of the paper.

    Args:
        epsilon: budget of all steps, > 0; math.inf means no noise, and no privacy.
        delta: in (0, 1).
        num_steps: number of steps that the noise is made for, a multiple of `num_local_steps`.
        num_local_steps: number of steps in a reply (tau).
        clip_norm: L2 bound on the gradient of one record (G).
        batch_size: number of records in a batch (X_m), under Poisson sampling in expectation.
        num_records: the device's public data size, at least `batch_size`.
        batch_sampling: `fixed-size`: accounted as if the replaced record were in every batch, as in the paper; `poisson`: every
            record independently with probability batch_size / num_records, secretly, accounted with its amplification.
        calibration: `exact`: the least noise that numerical composition proves enough; `zcdp`: the paper's, by `noise_std`.

    Raises:
        ValueError: for a value out of range, naming it.
    """
    checks.one_of("batch_sampling", batch_sampling, BATCH_SAMPLINGS)
    checks.one_of("calibration", calibration, CALIBRATIONS)
    checks.number("delta", delta, above=0, below=1)
    tau, total = checks.integer("num_local_steps", num_local_steps, at_least=1), _steps(num_steps)
    if total % tau:
        nearest = f"{total - total % tau} or {total - total % tau + tau}" if total > tau else f"{tau}"
        raise ValueError(f"num_steps={total}: must be a multiple of num_local_steps={tau}, for example {nearest}")
    checks.integer("batch_size", batch_size, at_least=1)
    if checks.integer("num_records", num_records, at_least=1) < batch_size:
        raise ValueError(f"batch_size={batch_size}: must be at most the number of records, {num_records}")
    poisson = batch_sampling == "poisson" and batch_size < num_records
    sampler: FullSampling | PoissonSampling
    sampler = PoissonSampling(sampling_rate=batch_size / num_records) if poisson else FullSampling()
    if calibration == "zcdp":
        if batch_sampling == "poisson":
            raise ValueError("calibration='zcdp': must be 'exact' with batch_sampling='poisson'; eq. 9 has no amplification")
        # The multiplier of a sum (over a batch of one record) clipped to 1.
        private = not math.isinf(budget(epsilon))
        multiplier = noise_std(epsilon=epsilon, delta=delta, num_steps=total, clip_norm=1.0, batch_size=1) if private else 0.0
    else:
        multiplier = least_gaussian_multiplier(
            sampler, epsilon=budget(epsilon), delta=delta, num_releases=total, relation="replace-one"
        )
    description = "the noised mean of per-record clipped gradients of a mini-batch, in every local step"
    # Of a batch of fixed size all records take part.
    units = num_records if poisson else batch_size
    release = own_release(description, Gaussian(noise_multiplier=multiplier), sampler, clip_norm=clip_norm, num_units=units)
    return ClientTerms(release=release, num_replies=total // tau, num_releases=tau, num_records=num_records, epsilon=epsilon)


def _log_inverse(delta: float) -> float:
    return -math.log(checks.number("delta", delta, above=0, below=1))


def _std_of_step(clip_norm: float, batch_size: int) -> float:
    return checks.number("clip_norm", clip_norm, above=0) / checks.integer("batch_size", batch_size, at_least=1)


def _steps(num_steps: int) -> int:
    return checks.integer("num_steps", num_steps, at_least=1)
