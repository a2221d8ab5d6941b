"""Closed forms of the cost of Gaussian releases with different noise."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy import optimize, stats


def gaussian_epsilon(multipliers: Sequence[float], relation: str, delta: float) -> float:
    """The exact epsilon of plain releases with these noise multipliers (Balle and Wang 2018, Theorem 8): their mus add up in squares."""
    if not multipliers:
        return 0.0
    return _epsilon((2 if relation == "replace-one" else 1) * math.hypot(*(1 / one for one in multipliers)), delta)


@lru_cache(maxsize=512)
def _epsilon(mu: float, delta: float) -> float:
    def excess(epsilon: float) -> float:
        first, second = stats.norm.logcdf(mu / 2 - epsilon / mu), stats.norm.logcdf(-mu / 2 - epsilon / mu)
        return math.exp(first) - math.exp(epsilon + second) - delta

    return 0.0 if excess(0.0) <= 0 else float(optimize.brentq(excess, 0.0, mu**2 / 2 + 20 * mu + 1, xtol=1e-13))


def assert_std(noise: np.ndarray, std: float, false_alarm: float = 1e-6) -> None:
    """Gaussian noise has this std (chi-square, exact), and a scale 5 % off is noticed: that takes 20,000 draws."""
    low, high = stats.chi2.interval(1 - false_alarm, noise.size)
    squares = np.sum(np.square(noise.astype(np.float64))) / std**2
    assert [low < squares * wrong**2 < high for wrong in (0.95, 1.0, 1.05)] == [False, True, False]
