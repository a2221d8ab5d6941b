"""Closed forms of Gaussian releases (Balle and Wang 2018, Theorem 8), a second time; SciPy is imported where it is needed."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """The delta of a release with this noise std / sensitivity."""
    from scipy import stats

    half = 1 / (2 * multiplier)
    first, second = (stats.norm.logcdf(sign * half - epsilon * multiplier) for sign in (1, -1))
    return math.exp(first) - math.exp(epsilon + second)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy import optimize

    return float(optimize.brentq(function, low, high, xtol=1e-13))


@lru_cache(maxsize=256)
def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The least noise std / sensitivity that gives (epsilon, delta)."""
    return _root(lambda multiplier: gaussian_delta(multiplier, epsilon) - delta, 0.1, 1000)


def gaussian_epsilon(multipliers: Sequence[float], relation: str, delta: float) -> float:
    """The exact epsilon of plain releases with these noise multipliers: their mus add up in squares."""
    if not multipliers:
        return 0.0
    return _epsilon((2 if relation == "replace-one" else 1) * math.hypot(*(1 / one for one in multipliers)), delta)


@lru_cache(maxsize=512)
def _epsilon(mu: float, delta: float) -> float:
    if gaussian_delta(1 / mu, 0.0) <= delta:
        return 0.0
    return _root(lambda epsilon: gaussian_delta(1 / mu, epsilon) - delta, 0.0, mu**2 / 2 + 20 * mu + 1)


def assert_std(noise: "np.ndarray", std: float, false_alarm: float = 1e-6) -> None:
    """Gaussian noise has this std (chi-square, exact), and a scale 5 % off is noticed: that takes 20,000 draws."""
    from scipy import stats

    low, high = stats.chi2.interval(1 - false_alarm, noise.size)
    squares = np.sum(np.square(noise.astype(np.float64))) / std**2
    assert [low < squares * wrong**2 < high for wrong in (0.95, 1.0, 1.05)] == [False, True, False]
