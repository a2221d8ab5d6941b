"""Lower bounds on epsilon from trials: some trials choose a test, the others count its errors.

The choice covers the statistic, its direction, its threshold and the weight of its false positives. It uses other trials than the
count of errors, so it takes no part of the confidence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from flower_dp.audit.tradeoffs import Estimator
from flower_dp.core import checks

# A statistic's values without the unit and with it.
Scores = tuple[np.ndarray, np.ndarray]
# Maximum number of thresholds to try; the values of more trials are thinned out.
_MAX_THRESHOLDS = 2000
# The part of the error probability for the interval of the rate of false positives, and the number of the interval's cells.
_NUISANCE_PART, _CELLS = 0.05, 100
# Probability of a binomial distribution's tails, left out of the sums and added to the result, so that the bound holds.
_LEFT_OUT = 1e-12
# Relative margin for rounding.
_MARGIN = 1e-12
_SLOPES = (1e-6, 1e6)
_BISECTIONS, _MAX_STRENGTH = 40, 512.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The errors of the chosen test on the trials that did not choose it.

    Attributes:
        statistic: name of the chosen statistic.
        threshold: value above which the test says "present".
        falling: whether the statistic's sign is reversed, so that the test says "present" below the threshold.
        slope: number of false negatives that one false positive counts for.
        trials: number of trials without the unit, and of trials with it.
        false_positives: number of trials without the unit for which the test says "present".
        false_negatives: number of trials with the unit for which the test does not say "present".
    """

    statistic: str
    threshold: float
    falling: bool
    slope: float
    trials: int
    false_positives: int
    false_negatives: int


def p_values(errors: Errors, estimator: Estimator, *, miss: float) -> Callable[[float], float]:
    """Return a function of a strength: a bound on the probability of so few errors with a mechanism at most this strong.

    Let the false positives A and the false negatives B be binomial with the rates x and y, where y >= f(x), the curve of the
    strength. P[slope A + B <= slope a + b] grows as x or y falls, so it is largest on the curve. The rate x is unknown: the
    largest probability over a confidence interval of x, plus the probability that the interval misses x, is a valid p-value
    (Berger and Boos 1994). The interval is cut into cells [x0, x1], in each of which the probability is at most that with the
    rates x0 and f(x1). It grows with the strength, since the test was fixed before the errors were counted.

    Args:
        errors: counted errors.
        estimator: kind of mechanism.
        miss: error probability of the audit; a twentieth of it is that of the interval.
    """
    n, wrong, missed, slope = errors.trials, errors.false_positives, errors.false_negatives, errors.slope
    half = _NUISANCE_PART * miss / 2
    lowest = 1 - float(rate_bound(n - wrong, n, half))
    highest = float(rate_bound(wrong, n, half))
    rates = np.linspace(lowest, highest, _CELLS + 1)
    counts = np.arange(stats.binom.ppf(_LEFT_OUT, n, lowest), stats.binom.isf(_LEFT_OUT, n, highest) + 1)
    # Maximum number of false negatives; the margin makes the event larger, never smaller.
    allowed = np.floor(missed + slope * (wrong - counts) + _MARGIN * (1 + slope * n))
    counts, allowed = counts[allowed >= 0], np.minimum(allowed[allowed >= 0], n)
    weights = stats.binom.pmf(counts, n, rates[:-1, None])

    def p_value(strength: float) -> float:
        below = np.clip(estimator.curve(strength, rates[1:]), 0.0, 1.0)[:, None]
        largest = float((weights * special.bdtr(allowed, n, below)).sum(axis=1).max())
        return min(1.0, largest + 2 * half + 2 * _LEFT_OUT)

    return p_value


def lower_bound(errors: Errors, estimator: Estimator, *, confidence: float) -> float:
    """Return the strength below which the errors refute every mechanism, with this confidence; 0 if they prove nothing."""
    p_value = p_values(errors, estimator, miss=1 - confidence)
    return largest_refuted(lambda strength: p_value(strength) <= 1 - confidence)


def largest_refuted(is_refuted: Callable[[float], bool]) -> float:
    """Return the largest refuted number; 0 if none is. If a number is refuted, all below must be refuted too."""
    low, high = 0.0, 1.0
    if not is_refuted(low):
        return low
    while high < _MAX_STRENGTH and is_refuted(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def rate_bound(errors: np.ndarray | int, trials: int, miss: float) -> np.ndarray:
    """Return the upper Clopper-Pearson bound of a rate, which is below the true rate with probability at most `miss`."""
    counts = np.asarray(errors, np.float64)
    bounds: np.ndarray = np.where(counts < trials, stats.beta.isf(miss, counts + 1, np.maximum(trials - counts, 1)), 1.0)
    return bounds


def errors_of(scores: Mapping[str, Scores], estimator: Estimator, *, confidence: float, held_out: float = 0.25) -> Errors:
    """Return the errors of the best test.

    Args:
        scores: values [n] without the unit and [n] with it, for each statistic, of the same trials in the same order.
        estimator: estimator that defines the best test.
        confidence: confidence of the bound that these errors will give, in (0, 1).
        held_out: part of the trials, the first ones, that chooses statistic, direction, threshold and slope.

    Raises:
        ValueError: for a confidence outside (0, 1), or fewer than 20 trials.

    Example:
        >>> import numpy as np
        >>> from flower_dp.audit.estimate import errors_of, lower_bound
        >>> from flower_dp.audit.tradeoffs import GaussianTradeoff
        >>> rng = np.random.default_rng(0)
        >>> scores = {"sum": (rng.normal(0, 1, 4000), rng.normal(2, 1, 4000))}
        >>> estimator = GaussianTradeoff(delta=1e-5)
        >>> errors = errors_of(scores, estimator, confidence=0.99)
        >>> 1.8 < lower_bound(errors, estimator, confidence=0.99) < 2.0
        True
    """
    checks.number("confidence", confidence, above=0, below=1)
    num = min(min(map(len, pair)) for pair in scores.values())
    checks.integer("trials", num, at_least=20)
    first = max(10, int(held_out * num))
    miss = (1 - confidence) / 2  # of each rate: cautious thresholds, since few trials easily miss a rare error
    best: tuple[tuple[float, float], str, bool, float, float] | None = None
    for name, pair in scores.items():
        for falling in (False, True):
            absent, present = ((-values if falling else values)[:first] for values in pair)
            candidate = _best(absent, present, estimator, miss)
            if best is None or candidate[0] > best[0]:
                best = (candidate[0], name, falling, *candidate[1:])
    assert best is not None  # noqa: S101 (there is a statistic)
    _, name, falling, threshold, slope = best
    absent, present = ((-values if falling else values)[first:num] for values in scores[name])
    return Errors(
        statistic=name,
        threshold=-threshold if falling else threshold,
        falling=falling,
        slope=slope,
        trials=num - first,
        false_positives=int(np.sum(absent > threshold)),
        false_negatives=int(np.sum(present <= threshold)),
    )


def _best(absent: np.ndarray, present: np.ndarray, estimator: Estimator, miss: float) -> tuple[tuple[float, float], float, float]:
    """Return the best threshold between the values: its rank, the threshold itself, and the curve's slope there."""
    places = np.unique(np.concatenate([absent, present]))
    if len(places) == 1:
        return (-np.inf, -2.0), float(places[0]), 1.0
    between = (places[:-1] + places[1:]) / 2
    between = between[np.linspace(0, len(between) - 1, min(len(between), _MAX_THRESHOLDS)).astype(int)]
    wrong = len(absent) - np.searchsorted(np.sort(absent), between, side="right")
    missed = np.searchsorted(np.sort(present), between, side="right")
    x, y = rate_bound(wrong, len(absent), miss), rate_bound(missed, len(present), miss)
    strengths = estimator.strength(x, y)
    # Some estimators have a largest strength; among tests that reach it, the one with the fewest errors is best.
    best = int(np.lexsort((-(x + y), strengths))[-1])
    strength = float(strengths[best])
    return (strength, -float(x[best] + y[best])), float(between[best]), _slope(estimator, strength, float(x[best]))


def _slope(estimator: Estimator, strength: float, rate: float) -> float:
    """Return the steepness of the curve's fall at a rate of false positives: a line of this slope separates curves best there."""
    near = np.array([0.99, 1.01]) * min(rate, 0.99)
    higher, lower = estimator.curve(max(strength, 0.0), near)
    return float(np.clip((higher - lower) / (near[1] - near[0]), *_SLOPES))
