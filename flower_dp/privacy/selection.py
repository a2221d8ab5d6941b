"""The cost of releasing the best of K private runs, if K is random and secret (Papernot & Steinke 2022).

K is drawn first. Each of K independent runs then draws one of the candidate settings, uniformly or by another fixed law, and is
run with fresh noise. Only the run with the best score is released: neither the other runs, nor their scores, nor K. The score is
a function of what the run itself releases, and of public data. Then a pure epsilon grows to at most 2 + shape times that of one
run, however many runs and candidates there are. No such bound holds for a fixed number of runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, NonPrivateDpEvent, SelfComposedDpEvent
from scipy import optimize

from flower_dp.core import checks
from flower_dp.privacy import accounting, pld, renyi
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.events import Leaves, Relation, flatten_event

MOST_RUNS = 10_000
_LARGEST_SHAPE = 100.0
# More than the rounding in this module, relative to epsilon.
_ROUNDING = 1e-9
# Least divergence of one run; float64 may lose too much of a smaller one.
_SMALLEST_DIVERGENCE = 2.0**-40
# Any pair on the curve of one run gives a bound; the search for the best pair takes a coarser grid than the bound itself.
_SEARCH_GRID = 1e-3
_SMALLEST_DELTA, _LARGEST_DELTA = 1e-8, 0.999
_SEARCH_STEPS = 24
# Points of the curve of one run, for a bound that adds mean x delta to epsilon, and the added costs between which they lie.
_POINTS, _LARGEST_COST, _SMALLEST_COST = 32, 100.0, 1e-3
_LARGEST_EPSILON = 600.0


class RunCountLaw(Protocol):
    """The law of K, the number of runs.

    Attributes:
        mean: expected number of runs, at least 1.
        shape: shape parameter, as dp-accounting defines it; infinite for a Poisson law.
    """

    @property
    def mean(self) -> float: ...  # noqa: D102
    @property
    def shape(self) -> float: ...  # noqa: D102

    def sample(self, rng: np.random.Generator) -> int:
        """Draw K; `rng` is a fresh generator of secret choices (`flower_dp.core.noise.noise_generator`)."""

    def added(self, epsilon: float, delta: float) -> float:
        """Return what choosing adds to epsilon, if one run is (epsilon, delta)-differentially private."""

    def added_divergence(self, orders: np.ndarray, curve: np.ndarray, delta_at: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return what choosing adds to the Renyi divergences of one run, apart from log(mean) / (order - 1).

        Args:
            orders: orders of the divergences, above 1 [k].
            curve: divergences of one run at these orders [k].
            delta_at: function that returns deltas [k] at which one run has epsilons [k].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeBinomialRunCount:
    """K >= 1 with P(K = k) proportional to (1 - gamma)^k binom(k + shape - 1, k) (Definition 1; shape is eta there).

    Attributes:
        mean: expected number of runs, in [1, 10000]; gamma follows from it.
        shape: shape parameter, in [0, 100]; 0 is the logarithmic law, 1 the geometric one. A small one costs least, and spreads K
            most.

    Raises:
        ValueError: for a value out of range, naming it.

    Example:
        >>> from flower_dp.privacy.selection import NegativeBinomialRunCount
        >>> NegativeBinomialRunCount(mean=10).gamma
        0.1
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        checks.number("mean", self.mean, at_least=1, at_most=MOST_RUNS)
        checks.number("shape", self.shape, at_least=0, at_most=_LARGEST_SHAPE)

    @property
    def gamma(self) -> float:
        """Parameter gamma in (0, 1] that gives the mean."""
        return _gamma(self.mean, self.shape)

    def sample(self, rng: np.random.Generator) -> int:
        """Draw K, by inversion."""
        gamma = self.gamma
        left, probability, number = rng.random(), self.mean * gamma ** (self.shape + 1), 1
        # By rounding, all probabilities together may be less than the number drawn: stop once the rest is negligible.
        while left >= probability and (number < self.mean or probability > 1e-20):
            left -= probability
            probability *= (1 - gamma) * (number + self.shape) / (number + 1)
            number += 1
        return number

    def added(self, epsilon: float, delta: float) -> float:
        """Return (1 + shape) log(e^epsilon + delta (1 - gamma) / gamma)."""
        gamma = self.gamma
        more = math.log(delta * (1 - gamma) / gamma) if delta and gamma < 1 else -math.inf
        return (1 + self.shape) * float(np.logaddexp(epsilon, more))

    def added_divergence(self, orders: np.ndarray, curve: np.ndarray, delta_at: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return (1 + shape) ((1 - 1/b) r(b) + log(1 / gamma) / b) with the best order b, at every order [k] (Theorem 2)."""
        least = (1 + self.shape) * np.min((1 - 1 / orders) * curve - math.log(self.gamma) / orders)
        return np.full_like(orders, least)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonRunCount:
    """A Poisson law of K: the most concentrated one, for runs whose own epsilon is small. With K = 0 nothing is released.

    Attributes:
        mean: expected number of runs, in [1, 10000].

    Raises:
        ValueError: for a value out of range, naming it.

    Example:
        >>> from flower_dp.privacy.selection import PoissonRunCount
        >>> round(PoissonRunCount(mean=10).added(0.1, 0.0), 2)
        1.05
    """

    shape: ClassVar[float] = math.inf
    mean: float

    def __post_init__(self) -> None:
        checks.number("mean", self.mean, at_least=1, at_most=MOST_RUNS)

    def sample(self, rng: np.random.Generator) -> int:
        """Draw K, which may be 0."""
        return int(rng.poisson(self.mean))

    def added(self, epsilon: float, delta: float) -> float:
        """Return mean (e^epsilon - 1 + delta)."""
        return self.mean * (math.expm1(epsilon) + delta) if epsilon < 700 else math.inf

    def added_divergence(self, orders: np.ndarray, curve: np.ndarray, delta_at: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return mean delta [k], if one run has epsilon log(1 + 1 / (order - 1)) at that delta (Theorem 6)."""
        return self.mean * delta_at(np.log1p(1 / (orders - 1)))


def number_of_runs(mean: float, shape: float) -> RunCountLaw:
    """Return the law of K with a mean and a shape; an infinite shape is a Poisson law, as in dp-accounting.

    Raises:
        ValueError: for a value out of range, naming it.
    """
    return PoissonRunCount(mean=mean) if shape == math.inf else NegativeBinomialRunCount(mean=mean, shape=shape)


def epsilon(runs: Sequence[DpEvent], number: RunCountLaw, *, delta: float, relation: Relation) -> PrivacyCost:
    """Return the cost of the best of K runs, against those who see the chosen run and nothing of the others.

    Accountants: `selection-profile`, from the epsilons of one run at all deltas (Koskela, Redberg & Wang 2024; proof in
    `docs/choosing-parameters.md`), of every event that `accounting` bounds; `selection-rdp`, Theorems 2 and 6 of
    Papernot & Steinke 2022, of events with a Renyi bound. The smaller one is returned.

    Args:
        runs: event of a whole run for each candidate, with all releases that its score is made of; at least one. All protect the
            same unit.
        number: law of K.
        delta: the delta at which epsilon holds, in [0, 1).
        relation: neighboring relation.

    Raises:
        ValueError: if there is no candidate, or a value is out of range.
        UnsupportedEventError: if nothing here bounds an event under this relation at a delta as small as delta / mean.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.privacy import selection
        >>> best_of = selection.NegativeBinomialRunCount(mean=10, shape=1)
        >>> cost = selection.epsilon([GaussianDpEvent(4.0)], best_of, delta=1e-5, relation="add-or-remove-one")
        >>> round(cost.epsilon, 2), cost.accountant
        (1.86, 'selection-profile')
    """
    delta = checks.number("delta", delta, at_least=0, below=1)
    candidates = _candidates(runs)
    if any(isinstance(leaf, NonPrivateDpEvent) for leaves in candidates for leaf, _ in leaves):
        return PrivacyCost(epsilon=math.inf, delta=delta, relation=relation, accountant="none")
    if not any(candidates):
        return PrivacyCost(epsilon=0.0, delta=delta, relation=relation, accountant="none")
    bounds = {"selection-profile": _profile(candidates, number, delta, relation)}
    if (by_renyi := rdp_epsilon(runs, number, delta=delta, relation=relation)) is not None:
        bounds["selection-rdp"] = by_renyi
    name = min(bounds, key=lambda accountant: bounds[accountant])
    return PrivacyCost(epsilon=bounds[name] * (1 + _ROUNDING), delta=delta, relation=relation, accountant=name)


def rdp_epsilon(runs: Sequence[DpEvent], number: RunCountLaw, *, delta: float, relation: Relation) -> float | None:
    """Return the bound by Renyi divergences (Theorems 2 and 6), or None if there is none.

    A run with a random candidate has at most the largest of the candidates' Renyi divergences, order by order.
    """
    candidates = _candidates(runs)
    curves = [curve for leaves in candidates if (curve := renyi.curve_of(leaves, relation)) is not None]
    if delta == 0 or len(curves) < len(candidates):
        return None
    curve, orders = np.max(curves, axis=0), np.asarray(renyi.ORDERS)
    if not np.all(curve > _SMALLEST_DIVERGENCE):
        return None

    def delta_at(epsilons: np.ndarray) -> np.ndarray:
        deltas = np.geomspace(min(_LARGEST_DELTA, _LARGEST_COST / number.mean), _SMALLEST_COST / number.mean, _POINTS)
        return _delta_at(candidates, relation, epsilons, deltas)

    chosen = curve + number.added_divergence(orders, curve, delta_at) + math.log(number.mean) / (orders - 1)
    # Conversion of Canonne et al. 2020.
    epsilons = chosen + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(np.min(epsilons)))


def _one_run(candidates: Sequence[Leaves], delta: float, relation: Relation, grid: float = pld.GRID) -> float:
    """Return the epsilon of a run with a random candidate: its delta is at most the largest of theirs, epsilon by epsilon."""
    return max(accounting.epsilon(_event(leaves), delta=delta, relation=relation, grid=grid).epsilon for leaves in candidates)


def _delta_at(candidates: Sequence[Leaves], relation: Relation, epsilons: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """Return deltas [k] at which a run with a random candidate has epsilons [k]: lines between points of its curve.

    The least delta is convex in e^epsilon, so that it is nowhere above these lines. Beyond the last point it is no larger.

    Args:
        candidates: candidates of the run.
        relation: neighboring relation.
        epsilons: values at least 0 [k].
        deltas: deltas of the points, falling.
    """
    curve = np.maximum.accumulate([_one_run(candidates, float(delta), relation, _SEARCH_GRID) for delta in deltas])
    kept = curve < _LARGEST_EPSILON
    points = np.exp(curve[kept])
    if not len(points):
        return np.ones_like(epsilons)
    interpolated: np.ndarray = np.interp(np.exp(epsilons), points, deltas[kept], left=1.0)
    return interpolated


def _profile(candidates: Sequence[Leaves], number: RunCountLaw, delta: float, relation: Relation) -> float:
    """Return the bound from the epsilons of one run: its epsilon at delta / mean, and what choosing adds."""

    def added(log_delta: float) -> float:
        at = math.exp(log_delta)
        return number.added(_one_run(candidates, at, relation, _SEARCH_GRID), at)

    at = delta / number.mean
    released = _one_run(candidates, at, relation)
    best = optimize.minimize_scalar(
        added,
        bounds=(math.log(_SMALLEST_DELTA), math.log(_LARGEST_DELTA)),
        method="bounded",
        options={"maxiter": _SEARCH_STEPS, "xatol": 0.05},
    )
    return released + min(number.added(released, at), float(best.fun))


@lru_cache(maxsize=64)
def _gamma(mean: float, shape: float) -> float:
    if shape == 1:
        return 1 / mean

    def excess(log_inverse: float) -> float:
        falling = -math.expm1(-shape * log_inverse) / shape if shape else log_inverse
        return math.log(math.expm1(log_inverse) / falling) - math.log(mean)

    # The mean is at least 1 / sqrt(gamma).
    low, high = 1e-9, 2 * math.log(mean)
    return math.exp(-optimize.brentq(excess, low, high, xtol=1e-15)) if high > low and excess(low) < 0 else 1.0


def _candidates(runs: Sequence[DpEvent]) -> list[Leaves]:
    """Return the distinct candidates' releases."""
    if not runs:
        raise ValueError("runs: must have at least one candidate")
    return [list(leaves) for leaves in dict.fromkeys(tuple(flatten_event(event)) for event in runs)]


def _event(leaves: Leaves) -> DpEvent:
    return ComposedDpEvent([SelfComposedDpEvent(leaf, count) for leaf, count in leaves])
