"""DP-PASGD's noise (Hu et al.): the paper's formulas for the noise of every local step, and exact composition.

The unit of privacy is one record, replaced by another; every message is private on its own.
"""

import math

from dp_accounting import GaussianDpEvent

from flower_dp.core import checks
from flower_dp.privacy import accounting


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


def tight_epsilon(*, noise_std: float, delta: float, num_steps: int, clip_norm: float, batch_size: int) -> float:
    """Return the epsilon of K steps by exact composition of their Gaussian releases, under replace-one.

    Each step releases a mean over X_m records of gradients clipped to G, with noise sigma_m: noise multiplier sigma_m X_m / G of
    the sum, whose sensitivity is 2 G. Which records a batch holds is taken as known: sampling is not counted.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    event = accounting.repeated(GaussianDpEvent(noise_std * batch_size / clip_norm), num_steps)
    return accounting.epsilon(event, delta=delta, relation="replace-one").epsilon


def _log_inverse(delta: float) -> float:
    return -math.log(checks.number("delta", delta, above=0, below=1))


def _std_of_step(clip_norm: float, batch_size: int) -> float:
    return checks.number("clip_norm", clip_norm, above=0) / checks.integer("batch_size", batch_size, at_least=1)


def _steps(num_steps: int) -> int:
    return checks.integer("num_steps", num_steps, at_least=1)
