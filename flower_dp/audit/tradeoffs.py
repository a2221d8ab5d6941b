"""Lower bounds on epsilon from a test's error rates: the trade-off curves of kinds of mechanisms.

A trade-off curve gives the smallest rate of false negatives for every rate of false positives. A number, the strength, orders the
curves of one kind; it grows with epsilon.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import optimize, special, stats

from flower_dp.core import dp_events
from flower_dp.privacy import accounting

# The sampled Gaussian's grid of effects mu, and the thresholds of its tests.
_MUS = np.linspace(0.02, 12.0, 600)
_THRESHOLDS = np.linspace(-9.0, 21.0, 3001)
_ABOVE = special.ndtr(-_THRESHOLDS)


class Estimator(Protocol):
    """An estimator that turns error rates into a lower bound on epsilon.

    Attributes:
        name: name of the estimator, for people.
    """

    name: str

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return the smallest false negative rates at these false positive rates; they fall as strength or rates grow."""

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return the strength that rates no higher than these prove, which grows with epsilon; -inf if they prove nothing."""

    def epsilon(self, strength: float) -> float:
        """Return the epsilon of a strength; 0 if the strength proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HockeyStick:
    """The bound that holds for every mechanism: e^epsilon >= (1 - FNR - delta) / FPR, and with the two rates exchanged.

    From the definition of (epsilon, delta), for the event that a test says "present" and for its complement (Kairouz, Oh and
    Viswanath 2015, Theorem 2.1). It can't show more than log(trials / log(1 / (1 - confidence))): beyond that no error is seen.

    Attributes:
        delta: delta of the bounded epsilon.
    """

    delta: float

    name = "any mechanism"

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return the larger of 1 - delta - e^epsilon FPR and e^-epsilon (1 - delta - FPR), or 0."""
        first = 1 - self.delta - math.exp(min(strength, 700.0)) * false_positive
        second = math.exp(-strength) * (1 - self.delta - false_positive)
        return np.asarray(np.maximum(0.0, np.maximum(first, second)))

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return the epsilon that the rates prove."""
        best = np.maximum((1 - false_negative - self.delta) / false_positive, (1 - false_positive - self.delta) / false_negative)
        return np.asarray(np.log(np.maximum(best, 1e-300)))

    def epsilon(self, strength: float) -> float:
        """Return the strength as epsilon; 0 if nothing is proved."""
        return max(0.0, float(strength))


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianTradeoff:
    """The bound for a mechanism whose trade-off curve is that of N(0, 1) and N(mu, 1) (Nasr et al. 2023, Section 4).

    The curve is FNR = Phi(Phi^-1(1 - FPR) - mu). So one pair of rates gives mu >= Phi^-1(1 - FPR) - Phi^-1(FNR). The mu gives the
    epsilon of every delta. The bound holds for Gaussian releases in which every unit takes part, and any number of them together.
    It does not hold for amplified releases (`SampledGaussianTradeoff`), nor for Laplace noise (`LaplaceTradeoff`).

    Whatever the mechanism is, rates below the *claimed* curve refute the claim.

    Attributes:
        delta: delta of the bounded epsilon.
    """

    delta: float

    name = "Gaussian trade-off"

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return Phi(Phi^-1(1 - FPR) - mu)."""
        return np.asarray(stats.norm.cdf(stats.norm.isf(false_positive) - strength))

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return the mu that the rates prove."""
        return np.asarray(stats.norm.isf(false_positive) - stats.norm.ppf(false_negative))

    def epsilon(self, strength: float) -> float:
        """Return the epsilon of mu."""
        if strength <= 0:
            return 0.0
        event = dp_events.GaussianDpEvent(1 / float(strength))
        return accounting.epsilon(event, delta=self.delta, relation="add-or-remove-one").epsilon


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGaussianTradeoff:
    """The bound for one Gaussian release on a sample that contains the unit with probability q.

    Without the unit the release is N(0, 1); with it, (1 - q) N(0, 1) + q N(mu, 1). This covers add-or-remove-one, where the unit
    is left out, and replace-one, if all others in the sample contribute what the other unit contributes. Under `replaced` the
    unit has another value in the neighboring input, and both releases are mixtures: (1 - q) N(0, 1) + q N(-+mu / 2, 1).

    The likelihood ratio grows with the released value, so the best tests are thresholds t. Their error rates are sums of normal
    distribution functions. mu is the smallest one for which no threshold has both rates below the bounds. At its epsilon, the
    maximum over t of P(> t) - e^epsilon Q(> t), in both directions, falls to delta. Both come from grids that err on the safe
    side: a smaller mu, and a maximum over fewer t. The library's accountants take no part, so that their errors would be found.

    Attributes:
        delta: delta of the bounded epsilon.
        rate: sampling rate q, in (0, 1).
        replaced: whether the unit has another value in the neighboring input, see above.
    """

    delta: float
    rate: float
    replaced: bool = False

    name = "sampled-Gaussian trade-off"

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return the smallest false negative rates, a little below the curve."""
        absent, present = self._above(strength)
        # A convex curve lies below the line between two of its points; the margin makes up for that.
        return np.asarray(np.maximum(0.0, np.interp(false_positive, absent[::-1], 1 - present[::-1]) - 1e-4))

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return the mu that the rates prove."""
        wrong, missed = np.atleast_1d(false_positive), np.atleast_1d(false_negative)
        largest = np.zeros(wrong.shape)
        for mu in _MUS:
            largest = np.where(self.curve(float(mu), wrong) > missed, mu, largest)
        return np.asarray(largest.reshape(np.shape(false_positive)))

    def epsilon(self, strength: float) -> float:
        """Return the epsilon of mu."""
        if strength <= 0:
            return 0.0
        absent, present = self._above(float(strength))

        def excess(epsilon: float) -> float:
            above = np.max(present - math.exp(epsilon) * absent)
            below = np.max((1 - absent) - math.exp(epsilon) * (1 - present))
            return float(max(above, below)) - self.delta

        return 0.0 if excess(0.0) <= 0 else float(optimize.brentq(excess, 0.0, 600.0))

    def _above(self, mu: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities of a release above every threshold, without the unit and with it."""
        far = mu / 2 if self.replaced else mu
        present = (1 - self.rate) * _ABOVE + self.rate * special.ndtr(far - _THRESHOLDS)
        if not self.replaced:
            return _ABOVE, present
        return (1 - self.rate) * _ABOVE + self.rate * special.ndtr(-far - _THRESHOLDS), present


@dataclass(frozen=True, slots=True, kw_only=True)
class LaplaceTradeoff:
    """The bound for one Laplace release with the whole change of the unit on one coordinate, at delta = 0.

    Laplace(0, 1) and Laplace(epsilon, 1) have this trade-off curve (Dong, Roth and Su 2022, Proposition A.6; the likelihood ratio
    test is a threshold):

        FNR = 1 - e^epsilon FPR                 for FPR < e^-epsilon / 2;

        FNR = e^-epsilon / (4 FPR)              for e^-epsilon / 2 <= FPR <= 1 / 2;

        FNR = e^-epsilon (1 - FPR)              for FPR > 1 / 2.

    Each part falls as epsilon grows, so a pair of rates gives the smallest epsilon whose curve is not above the pair:
    log((1 - FNR) / FPR), -log(4 FPR FNR) or log((1 - FPR) / FNR). The second one holds if both rates are at most 1/2. If FNR is
    larger, the first part reaches the pair; if FPR is larger, the last part does.
    """

    name = "Laplace trade-off"

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return the smallest false negative rates, in three parts."""
        least, rates = math.exp(-strength), np.asarray(false_positive, np.float64)
        middle = least / (4 * np.maximum(rates, 1e-300))
        return np.asarray(np.where(rates < least / 2, 1 - rates / least, np.where(rates <= 0.5, middle, least * (1 - rates))))

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return the epsilon that the rates prove."""
        middle = -np.log(4 * false_positive * false_negative)
        first = np.log(np.maximum(1 - false_negative, 1e-300) / false_positive)
        last = np.log(np.maximum(1 - false_positive, 1e-300) / false_negative)
        return np.asarray(np.where(false_negative > 0.5, first, np.where(false_positive > 0.5, last, middle)))

    def epsilon(self, strength: float) -> float:
        """Return the strength as epsilon; 0 if nothing is proved."""
        return max(0.0, float(strength))
