"""How error rates of a test become a lower bound of epsilon: the trade-off curves of kinds of mechanisms.

A trade-off curve gives the least rate of false negatives for every rate of false positives. Curves of one kind are ordered by a
number, the strength, that grows with epsilon.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import optimize, special, stats

from flower_dp.core import dp_events
from flower_dp.privacy import accounting

# Of the sampled Gaussian: the effects mu that are told apart, and the thresholds of its tests.
_MUS = np.linspace(0.02, 12.0, 600)
_THRESHOLDS = np.linspace(-9.0, 21.0, 3001)
_ABOVE = special.ndtr(-_THRESHOLDS)


class Estimator(Protocol):
    """How error rates become a lower bound of epsilon.

    Attributes:
        name: of the estimator, for people.
    """

    name: str

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return the least false negative rates at these false positive rates; they fall as strength or rates grow."""

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return a number that grows with the epsilon that rates no higher than these prove; -inf where they prove nothing."""

    def epsilon(self, strength: float) -> float:
        """Return that epsilon; 0 for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HockeyStick:
    """The bound that holds for every mechanism: e^epsilon >= (1 - FNR - delta) / FPR, and with the two rates exchanged.

    From the definition of (epsilon, delta), for the event that a test says "present" and for its complement (Kairouz, Oh and
    Viswanath 2015, Theorem 2.1). It can't show more than log(trials / log(1 / (1 - confidence))): beyond that no error is seen.

    Attributes:
        delta: of the epsilon that is bounded.
    """

    delta: float

    name = "any mechanism"

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return the larger of 1 - delta - e^epsilon FPR and e^-epsilon (1 - delta - FPR), or 0."""
        one = 1 - self.delta - math.exp(min(strength, 700.0)) * false_positive
        other = math.exp(-strength) * (1 - self.delta - false_positive)
        return np.asarray(np.maximum(0.0, np.maximum(one, other)))

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return epsilon."""
        best = np.maximum((1 - false_negative - self.delta) / false_positive, (1 - false_positive - self.delta) / false_negative)
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

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return Phi(Phi^-1(1 - FPR) - mu)."""
        return np.asarray(stats.norm.cdf(stats.norm.isf(false_positive) - strength))

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return mu."""
        return np.asarray(stats.norm.isf(false_positive) - stats.norm.ppf(false_negative))

    def epsilon(self, strength: float) -> float:
        """Return the epsilon of mu."""
        if strength <= 0:
            return 0.0
        event = dp_events.GaussianDpEvent(1 / float(strength))
        return accounting.epsilon(event, delta=self.delta, relation="add-or-remove-one").epsilon


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGaussianTradeoff:
    """The bound for one Gaussian release on a sample that the unit is in with probability q.

    Without the unit N(0, 1) is released, and with it (1 - q) N(0, 1) + q N(mu, 1): under add-or-remove-one where the unit is left
    out, and under replace-one where all others in the sample contribute what the other unit does. Under `replaced` the unit has
    another value in the neighboring input, and both are mixtures: (1 - q) N(0, 1) + q N(-+mu / 2, 1).

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

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return the least false negative rates, a little below the curve."""
        absent, present = self._above(strength)
        # Between two points of a convex curve the straight line is above it.
        return np.asarray(np.maximum(0.0, np.interp(false_positive, absent[::-1], 1 - present[::-1]) - 1e-4))

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return mu."""
        wrong, missed = np.atleast_1d(false_positive), np.atleast_1d(false_negative)
        found = np.zeros(wrong.shape)
        for mu in _MUS:
            found = np.where(self.curve(float(mu), wrong) > missed, mu, found)
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
        far = mu / 2 if self.replaced else mu
        present = (1 - self.rate) * _ABOVE + self.rate * special.ndtr(far - _THRESHOLDS)
        if not self.replaced:
            return _ABOVE, present
        return (1 - self.rate) * _ABOVE + self.rate * special.ndtr(-far - _THRESHOLDS), present


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

    def curve(self, strength: float, false_positive: np.ndarray) -> np.ndarray:
        """Return the three parts."""
        least, rates = math.exp(-strength), np.asarray(false_positive, np.float64)
        middle = least / (4 * np.maximum(rates, 1e-300))
        return np.asarray(np.where(rates < least / 2, 1 - rates / least, np.where(rates <= 0.5, middle, least * (1 - rates))))

    def strength(self, false_positive: np.ndarray, false_negative: np.ndarray) -> np.ndarray:
        """Return epsilon."""
        middle = -np.log(4 * false_positive * false_negative)
        first = np.log(np.maximum(1 - false_negative, 1e-300) / false_positive)
        last = np.log(np.maximum(1 - false_positive, 1e-300) / false_negative)
        return np.asarray(np.where(false_negative > 0.5, first, np.where(false_positive > 0.5, last, middle)))

    def epsilon(self, strength: float) -> float:
        """Return it, 0 where nothing is proved."""
        return max(0.0, float(strength))
