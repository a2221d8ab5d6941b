"""Lower bounds of epsilon from trials: a threshold is chosen on some trials, and its error rates are bounded on the others.

Two bounds of error rates hold together with the audit's confidence: the confidence is split in halves, one for the rate of false
positives and one for that of false negatives (Clopper and Pearson 1934, one-sided, so exact for any number of trials). The
threshold, the direction and the statistic are chosen on other trials than these rates, so they take no part of the confidence.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from dp_accounting import GaussianDpEvent
from scipy import optimize, stats

from flower_dp.core import checks
from flower_dp.privacy import accounting

# A statistic's values without the unit and with it.
Scores = tuple[np.ndarray, np.ndarray]
# Thresholds that are tried; the values of more trials are thinned out to so many.
_MOST_THRESHOLDS = 2000
# Of the sampled Gaussian: the effects mu that are told apart, and the thresholds of its tests.
_MUS = np.linspace(0.02, 12.0, 600)
_THRESHOLDS = np.linspace(-9.0, 21.0, 3001)


class Estimator(Protocol):
    """How error rates become a lower bound of epsilon.

    Attributes:
        name: of the estimator, for people.
    """

    name: str

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return a number that grows with the epsilon that rates no higher than these prove; -inf where they prove nothing."""

    def epsilon(self, strength: float) -> float:
        """Return that epsilon; 0 for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HockeyStick:
    """The bound that holds for every mechanism: e^epsilon >= (1 - FNR - delta) / FPR, and with the two rates exchanged.

    From the definition of (epsilon, delta), for the event that a test says "present" and for its complement (Kairouz, Oh and
    Viswanath 2015, Theorem 2.1). It can't show more than log(trials / log(2 / (1 - confidence))): beyond that no error is seen.

    Attributes:
        delta: of the epsilon that is bounded.
    """

    delta: float

    name = "Clopper-Pearson"

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return epsilon."""
        best = np.maximum(
            (1 - false_negative - self.delta) / false_positive,
            (1 - false_positive - self.delta) / false_negative,
        )
        return np.asarray(np.log(np.maximum(best, 1e-300)))

    def epsilon(self, strength: float) -> float:
        """Return it, 0 where nothing is proved."""
        return max(0.0, float(strength))


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianTradeoff:
    """The bound for a mechanism whose trade-off curve is that of N(0, 1) and N(mu, 1) (Nasr et al. 2023, Section 4).

    The curve is FNR = Phi(Phi^-1(1 - FPR) - mu), so one pair of rates gives mu >= Phi^-1(1 - FPR) - Phi^-1(FNR), and mu gives the
    epsilon of every delta. It holds for Gaussian releases in which every unit takes part, and any number of them together. It
    does not for amplified ones (`SampledGaussianTradeoff`), nor for Laplace noise (`LaplaceTradeoff`).

    Whatever the mechanism is: rates below the *claimed* curve refute the claim.

    Attributes:
        delta: of the epsilon that is bounded.
    """

    delta: float

    name = "Gaussian trade-off"

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return mu."""
        return np.asarray(stats.norm.isf(false_positive) - stats.norm.ppf(false_negative))

    def epsilon(self, strength: float) -> float:
        """Return the epsilon of mu."""
        if strength <= 0:
            return 0.0
        event = GaussianDpEvent(1 / float(strength))
        return accounting.epsilon(event, delta=self.delta, relation="add-or-remove-one").epsilon


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGaussianTradeoff:
    """The bound for one Gaussian release on a sample that the unit is in with probability q.

    Without the unit N(0, 1) is released, and with it (1 - q) N(0, 1) + q N(mu, 1): under add-or-remove-one where the unit is left
    out, and under replace-one where all others in the sample contribute what the other unit does. Under `replaced` the unit has
    another value in the neighbouring input, and both are mixtures: (1 - q) N(0, 1) + q N(-+mu / 2, 1).

    The likelihood ratio grows with what is released, so the best tests are thresholds t, whose error rates are sums of normal
    distribution functions. mu is the least for which no threshold has both rates below the bounds; its epsilon is where
    max over t of P(> t) - e^epsilon Q(> t), in both directions, falls to delta. Both are taken from grids that err to the safe
    side: a smaller mu, and a maximum over fewer t. The library's accountants are not asked, so their errors would be found.

    Attributes:
        delta: of the epsilon that is bounded.
        rate: q, in (0, 1).
        replaced: see above.
    """

    delta: float
    rate: float
    replaced: bool = False

    name = "sampled-Gaussian trade-off"

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return mu."""
        wrong, missed = np.atleast_1d(false_positive), np.atleast_1d(false_negative)
        found = np.zeros(wrong.shape)
        for mu in _MUS:
            absent, present = self._above(mu)
            # A little below the curve: between two points of a convex curve the straight line is above it.
            least = np.interp(wrong, absent[::-1], 1 - present[::-1]) - 1e-4
            found = np.where(least > missed, mu, found)
        return np.asarray(found.reshape(np.shape(false_positive)))

    def epsilon(self, strength: float) -> float:
        """Return the epsilon of mu."""
        if strength <= 0:
            return 0.0
        absent, present = self._above(float(strength))

        def excess(epsilon: float) -> float:
            one = np.max(present - math.exp(epsilon) * absent)
            other = np.max((1 - absent) - math.exp(epsilon) * (1 - present))
            return float(max(one, other)) - self.delta

        return 0.0 if excess(0.0) <= 0 else float(optimize.brentq(excess, 0.0, 600.0))

    def _above(self, mu: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities to be above every threshold, without the unit and with it."""
        plain, far = stats.norm.sf(_THRESHOLDS), mu / 2 if self.replaced else mu
        present = (1 - self.rate) * plain + self.rate * stats.norm.sf(_THRESHOLDS - far)
        if not self.replaced:
            return plain, present
        return (1 - self.rate) * plain + self.rate * stats.norm.sf(_THRESHOLDS + far), present


@dataclass(frozen=True, slots=True, kw_only=True)
class LaplaceTradeoff:
    """The bound for one Laplace release with the whole change of the unit on one coordinate, at delta = 0.

    Laplace(0, 1) and Laplace(epsilon, 1) have the trade-off curve (Dong, Roth and Su 2022, Proposition A.6; T is the likelihood
    ratio test, which is a threshold)

        FNR = 1 - e^epsilon FPR                 for FPR < e^-epsilon / 2,
        FNR = e^-epsilon / (4 FPR)              for e^-epsilon / 2 <= FPR <= 1 / 2,
        FNR = e^-epsilon (1 - FPR)              for FPR > 1 / 2.

    Each part falls as epsilon grows, so a pair of rates gives the least epsilon whose curve is not above it:
    log((1 - FNR) / FPR), -log(4 FPR FNR), log((1 - FPR) / FNR). The middle one holds where both rates are at most 1/2; where FNR
    is above, the first part is the one that reaches it, and where FPR is above, the last.
    """

    name = "Laplace trade-off"

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return epsilon."""
        middle = -np.log(4 * false_positive * false_negative)
        first = np.log(np.maximum(1 - false_negative, 1e-300) / false_positive)
        last = np.log(np.maximum(1 - false_positive, 1e-300) / false_negative)
        return np.asarray(np.where(false_negative > 0.5, first, np.where(false_positive > 0.5, last, middle)))

    def epsilon(self, strength: float) -> float:
        """Return it, 0 where nothing is proved."""
        return max(0.0, float(strength))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The errors of the chosen test on the trials that did not choose it.

    Attributes:
        statistic: the statistic that was chosen.
        threshold: "present" is said above it.
        falling: whether the statistic was taken with the other sign, so that "present" is said below.
        trials: without the unit, and as many with it.
        false_positives: trials without the unit of which the test says "present".
        false_negatives: trials with the unit of which it does not.
        false_positive_rate: upper confidence bound.
        false_negative_rate: upper confidence bound; both hold with the audit's confidence.
    """

    statistic: str
    threshold: float
    falling: bool
    trials: int
    false_positives: int
    false_negatives: int
    false_positive_rate: float
    false_negative_rate: float


def rate_bound(errors: np.ndarray | int, trials: int, miss: float) -> np.ndarray:
    """Return the upper Clopper-Pearson bound of a rate; it is below the true rate with probability at most `miss`."""
    counts = np.asarray(errors, np.float64)
    bounds: np.ndarray = np.where(counts < trials, stats.beta.isf(miss, counts + 1, np.maximum(trials - counts, 1)), 1.0)
    return bounds


def rates(scores: Mapping[str, Scores], estimator: Estimator, *, confidence: float, held_out: float = 0.25) -> Rates:
    """Return the error rates of the best test.

    Args:
        scores: of each statistic: its values [n] without the unit and [n] with it, of the same trials in the same order.
        estimator: what "best" means.
        confidence: that both bounds hold.
        held_out: part of the trials, the first, on which statistic, direction and threshold are chosen.

    Raises:
        ValueError: for a confidence outside (0, 1), or fewer than 20 trials.

    Example:
        >>> import numpy as np
        >>> from flower_dp.audit.estimate import GaussianTradeoff, rates
        >>> rng = np.random.default_rng(0)
        >>> scores = {"sum": (rng.normal(0, 1, 4000), rng.normal(2, 1, 4000))}
        >>> estimator = GaussianTradeoff(delta=1e-5)
        >>> found = rates(scores, estimator, confidence=0.99)
        >>> mu = estimator.strength(found.false_positive_rate, found.false_negative_rate)
        >>> bool(1.7 < mu < 2.0)
        True
    """
    checks.number("confidence", confidence, above=0, below=1)
    num = min(min(map(len, pair)) for pair in scores.values())
    checks.integer("trials", num, at_least=20)
    first = max(10, int(held_out * num))
    miss = (1 - confidence) / 2
    best: tuple[float, str, bool, float] | None = None
    for name, pair in scores.items():
        for falling in (False, True):
            absent, present = ((-one if falling else one)[:first] for one in pair)
            strength, threshold = _best(absent, present, estimator, miss)
            if best is None or strength > best[0]:
                best = (strength, name, falling, threshold)
    assert best is not None  # noqa: S101 (there is a statistic)
    _, name, falling, threshold = best
    absent, present = ((-one if falling else one)[first:num] for one in scores[name])
    wrong, missed = int(np.sum(absent > threshold)), int(np.sum(present <= threshold))
    return Rates(
        statistic=name,
        threshold=-threshold if falling else threshold,
        falling=falling,
        trials=num - first,
        false_positives=wrong,
        false_negatives=missed,
        false_positive_rate=float(rate_bound(wrong, num - first, miss)),
        false_negative_rate=float(rate_bound(missed, num - first, miss)),
    )


def _best(absent: np.ndarray, present: np.ndarray, estimator: Estimator, miss: float) -> tuple[float, float]:
    """Return the largest strength of any threshold between the values, and that threshold."""
    places = np.unique(np.concatenate([absent, present]))
    if len(places) == 1:
        return -np.inf, float(places[0])
    between = (places[:-1] + places[1:]) / 2
    between = between[np.linspace(0, len(between) - 1, min(len(between), _MOST_THRESHOLDS)).astype(int)]
    wrong = len(absent) - np.searchsorted(np.sort(absent), between, side="right")
    missed = np.searchsorted(np.sort(present), between, side="right")
    strengths = estimator.strength(rate_bound(wrong, len(absent), miss), rate_bound(missed, len(present), miss))
    place = int(np.argmax(strengths))
    return float(strengths[place]), float(between[place])
