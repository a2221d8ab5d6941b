"""From events to epsilon, and from epsilon to noise.

All results are upper bounds. If several bounds hold, the least one is returned, with the name of its accountant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from flower_dp.core import checks, dp_events
from flower_dp.privacy import events, pld
from flower_dp.privacy.events import RELATIONS, Leaves, Relation, UnsupportedEventError, flatten_event, unwrap_sampling

_SEARCH_GRID = 1e-3
# Part of a run's epsilon: progress on a grid of this size is right in its first four digits.
_PROGRESS_GRID = 3e-4
# An epsilon of at least this many steps of the grid has no visible error.
_FINE_ENOUGH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyCost:
    """(epsilon, delta)-differential privacy under a neighboring relation, and the accountant that proves it.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.privacy import accounting
        >>> cost = accounting.epsilon(GaussianDpEvent(noise_multiplier=4.0), delta=1e-5, relation="add-or-remove-one")
        >>> round(cost.epsilon, 3), cost.accountant
        (0.926, 'gaussian-exact')
    """

    epsilon: float
    delta: float
    relation: Relation
    accountant: str


def epsilon(event: dp_events.DpEvent, *, delta: float, relation: Relation, grid: float = pld.GRID) -> PrivacyCost:
    """Return the least epsilon that an accountant here proves for an event; infinite if there is no privacy.

    Accountants: `gaussian-exact` (Balle & Wang 2018), `pld` (privacy loss distributions, pessimistic), `rdp` (Renyi, with the
    conversion of Canonne et al. 2020), `pure` (basic composition of Laplace releases; the only one at delta = 0), `pure + ...`
    (`pure` for the Laplace releases, plus another accountant's epsilon of the rest).

    Sampling without replacement has a bound under replace-one only, with sensitivity 2 C, by Balle, Barthe & Gaboardi 2018,
    Theorem 9. Under replace-one `pld` and `rdp` account for sampled Gaussian noise by the pair that dominates it
    (`flower_dp.privacy.fixed_size`, `flower_dp.privacy.poisson`).

    Raises:
        ValueError: if delta is not in [0, 1), or the event has a parameter that is not a finite positive number.
        UnsupportedEventError: if nothing here bounds the event under this relation.
    """
    delta = checks.number("delta", delta, at_least=0, below=1)
    checks.one_of("relation", relation, RELATIONS)
    leaves = flatten_event(event)
    if any(isinstance(leaf, dp_events.NonPrivateDpEvent) for leaf, _ in leaves):
        return PrivacyCost(epsilon=math.inf, delta=delta, relation=relation, accountant="none")
    if not leaves:
        return PrivacyCost(epsilon=0.0, delta=delta, relation=relation, accountant="none")
    least = _least(tuple(leaves), delta, relation, grid)
    if least is None:
        raise UnsupportedEventError(f"event {event}: no accountant bounds it under relation={relation!r} at delta={delta:g}")
    value, name = least
    return PrivacyCost(epsilon=max(0.0, value), delta=delta, relation=relation, accountant=name)


def relies_on_secret_sampling(cost: PrivacyCost) -> bool:
    """Return whether a cost may be lower because units were sampled in secret; `gaussian-exact` assumes that all take part."""
    return not cost.accountant.startswith(("gaussian-exact", "none"))


def check(event: dp_events.DpEvent, *, relation: Relation) -> None:
    """Refuse an event that no accountant here bounds at any delta. Only the kinds of its releases are tried.

    Raises:
        ValueError: if the event has a parameter that is not a finite positive number.
        UnsupportedEventError: if nothing here bounds the event under this relation.
    """
    checks.one_of("relation", relation, RELATIONS)
    leaves = [leaf for leaf, _ in flatten_event(event)]
    if leaves and not any(isinstance(leaf, dp_events.NonPrivateDpEvent) for leaf in leaves):
        kinds = tuple((kind, 1) for kind in dict.fromkeys(map(events.probe_event, leaves)))
        # A probe of each kind; any delta will do, except that 0 allows only pure epsilon.
        if _least(kinds, 1e-5, relation, 1e-2) is None:
            raise UnsupportedEventError(f"event {event}: no accountant bounds it under relation={relation!r}")


def rdp_epsilon(event: dp_events.DpEvent, *, delta: float, relation: Relation) -> float | None:
    """Return the Renyi accountant's epsilon, or None if it has no bound for the event under this relation.

    The conversion is Theorem 2 of DP-FedSAM (Shi et al. 2023): the least over orders a of
    rdp(a) + log((a - 1) / a) - (log delta + log a) / (a - 1).
    """
    delta = checks.number("delta", delta, at_least=0, below=1)
    leaves = flatten_event(event)
    if any(isinstance(leaf, dp_events.NonPrivateDpEvent) for leaf, _ in leaves) or delta == 0:
        return None
    from flower_dp.privacy import renyi  # noqa: PLC0415  (slow to import)

    return renyi.epsilon_of(leaves, delta, parse_relation(relation))


def calibrate(
    make_event: Callable[[float], dp_events.DpEvent], *, epsilon: float, delta: float, relation: Relation, rtol: float = 1e-4
) -> float:
    """Return a noise multiplier that meets (epsilon, delta), at most about `rtol` above the least one and never below it.

    Args:
        make_event: the whole run's event for a noise multiplier.
        epsilon: target, finite and > 0.
        delta: target, in [0, 1).
        relation: neighboring relation.
        rtol: relative width of the last search interval.

    Raises:
        ValueError: if the target can't be met by any noise multiplier up to 1e6.
        UnsupportedEventError: as `epsilon`.
    """
    target = checks.number("epsilon", epsilon, above=0)

    # The root finder needs finite costs, and few steps if they are huge.
    cap = max(1e6, min(10 * target, 1e308))

    coarse = min(_SEARCH_GRID, max(10 * target * _SEARCH_GRID, pld.GRID * pld.FINEST))

    def excess(log_multiplier: float, grid: float = coarse) -> float:
        cost = _epsilon(make_event(math.exp(log_multiplier)), delta=delta, relation=relation, grid=grid)
        return min(cost.epsilon, cap) - target

    least = math.log(1e-4 if target <= 1e6 else 1 / events.LARGEST_MULTIPLIER)
    low, high = math.log(0.5), math.log(1.0)
    while excess(high) > 0:
        low, high = high, high + 1.0
        if high > math.log(1e6):
            raise ValueError(f"epsilon={target:g}: no noise multiplier up to 1e6 reaches it at delta={delta:g}")
    while excess(low) <= 0:
        low, high = low - 1.0, low
        if low < least:
            return math.exp(high)
    from scipy import optimize  # noqa: PLC0415  (slow to import)

    root = optimize.brentq(excess, low, high, xtol=rtol / 2)
    # The last search uses the grid of `epsilon`. On the coarser grid of the first search an event costs more: a long run so much
    # more that it would get twice the noise.
    final = partial(excess, grid=pld.GRID)
    if (spare := -final(root) / target) > rtol:
        below, step = root - spare, spare
        while below > least and final(below) <= 0:
            below, step = below - 2 * step, 2 * step
        if below > least:
            root = optimize.brentq(final, below, root, xtol=rtol / 2)
    step = rtol / 4
    while final(root) > 0:
        root, step = root + step, 2 * step
    return math.exp(root)


def max_repetitions(
    make_event: Callable[[int], dp_events.DpEvent], *, epsilon: float, delta: float, relation: Relation, limit: int
) -> int:
    """Return the largest n <= limit for which make_event(n) costs at most `epsilon`; make_event(n) must grow with n."""
    low, high = 0, limit + 1
    step = limit
    while high - low > 1:
        middle = step if low < step < high else (low + high) // 2
        fits = _epsilon(make_event(middle), delta=delta, relation=relation).epsilon <= epsilon
        low, high = (middle, high) if fits else (low, middle)
        step = 0
    return low


def epsilon_by_round(
    make_event: Callable[[int], dp_events.DpEvent], *, num_rounds: int, delta: float, relation: Relation, points: int = 40
) -> np.ndarray:
    """Return an upper bound of epsilon after 0, 1, ..., num_rounds rounds [num_rounds + 1], to show a run's progress.

    At most `points` rounds are computed, on a coarser grid of losses than `epsilon`. A round between them gets the value of the
    next computed round.
    """

    def cost(number: int, grid: float) -> float:
        return _epsilon(make_event(number), delta=delta, relation=relation, grid=grid).epsilon

    # The time that a round takes grows with its epsilon over the grid.
    last = cost(num_rounds, _SEARCH_GRID)
    grid = max(_SEARCH_GRID, _PROGRESS_GRID * last) if math.isfinite(last) else _SEARCH_GRID
    # Computed rounds are closer together at the start: each early round costs more than any later one.
    parts = np.linspace(0, 1, min(points, num_rounds) + 1) ** (1.5 if points < num_rounds else 1)
    computed = np.unique((num_rounds * parts).round().astype(int))
    # What bounds the whole run bounds every part of it.
    values = [*(min(cost(int(number), grid), last) for number in computed[:-1]), last]
    return np.asarray(values)[np.searchsorted(computed, np.arange(num_rounds + 1))]


def repeated(event: dp_events.DpEvent, count: int) -> dp_events.DpEvent:
    """Return `count` independent repetitions of an event as one event."""
    return dp_events.SelfComposedDpEvent(event, checks.integer("count", count, at_least=0))


def parse_relation(relation: str) -> Relation:
    """Return the relation, or raise ValueError naming the valid ones."""
    checks.one_of("relation", relation, RELATIONS)
    return "replace-one" if relation == "replace-one" else "add-or-remove-one"


_epsilon = epsilon


@lru_cache(maxsize=1024)  # a run's log, statement and plan need the same bounds
def _least(
    leaves: tuple[tuple[dp_events.DpEvent, int], ...], delta: float, relation: Relation, grid: float
) -> tuple[float, str] | None:
    """Return the least bound and its accountant, or None if no accountant has one."""
    bounds = [(value, name) for name, value in _bounds(list(leaves), delta, relation, grid) if not math.isnan(value)]
    return min(bounds, key=lambda bound: bound[0], default=None)


def _bounds(leaves: Leaves, delta: float, relation: Relation, grid: float) -> Iterator[tuple[str, float]]:
    """Yield every bound that holds, NaN if an accountant has none."""
    pure = _pure(leaves, relation)
    yield "pure", pure
    if delta == 0:
        return
    from flower_dp.privacy import renyi  # noqa: PLC0415  (slow to import)

    gaussian = _gaussian_exact(leaves, delta, relation)
    yield "gaussian-exact", gaussian
    if not math.isnan(gaussian) and all(unwrap_sampling(leaf)[1] == 1 for leaf, _ in leaves):
        return  # exact: no other bound is lower
    by_pld = math.nan
    if _of_fixed_size(leaves) and delta >= pld.SMALLEST_DELTA:
        # Renyi's bound of such samples is slow, and lower only if the grid's error counts.
        rough = pld.rough_epsilon_of(leaves, delta, relation, grid, ceiling=pure if math.isnan(gaussian) else gaussian)
        by_pld = pld.epsilon_of(leaves, delta, relation, grid, rough=rough)
        yield "pld", by_pld
        if _FINE_ENOUGH * grid <= by_pld < math.inf:
            return
    by_renyi = renyi.epsilon_of(leaves, delta, relation)
    yield "rdp", math.nan if by_renyi is None else by_renyi
    summed, name = _sum(leaves, delta, relation, grid)
    yield name, summed
    if delta >= pld.SMALLEST_DELTA and not math.isfinite(by_pld):
        finite = [bound for bound in (pure, gaussian, by_renyi, summed) if bound is not None and math.isfinite(bound)]
        yield "pld", pld.epsilon_of(leaves, delta, relation, grid, rough=min(finite, default=gaussian))


def _of_fixed_size(leaves: Leaves) -> bool:
    """Return whether every release is of a sample of a fixed size."""
    return all(
        isinstance(leaf, dp_events.SampledWithoutReplacementDpEvent) and unwrap_sampling(leaf)[1] < 1 for leaf, _ in leaves
    )


def _pure(leaves: Leaves, relation: Relation) -> float:
    """Return the sum of the pure epsilons of Laplace releases, each amplified by its sampling; NaN if one has none."""
    total = 0.0
    for leaf, count in leaves:
        inner, rate = unwrap_sampling(leaf)
        if not isinstance(inner, dp_events.LaplaceDpEvent):
            return math.nan
        base = 1 / inner.noise_multiplier
        if relation == "replace-one":
            # A replacement is a removal and an addition; Poisson amplification holds for each of these.
            poisson = isinstance(leaf, dp_events.PoissonSampledDpEvent)
            amplified = 2 * _amplified(base, rate) if poisson else _amplified(2 * base, rate)
        elif isinstance(leaf, dp_events.SampledWithoutReplacementDpEvent):
            return math.nan
        else:
            amplified = _amplified(base, rate)
        total += count * amplified
    return total


def _sum(leaves: Leaves, delta: float, relation: Relation, grid: float) -> tuple[float, str]:
    """Return the Laplace releases' pure epsilon plus the least epsilon of all others at delta; NaN without both."""
    laplace = [(leaf, count) for leaf, count in leaves if isinstance(unwrap_sampling(leaf)[0], dp_events.LaplaceDpEvent)]
    others = tuple(pair for pair in leaves if pair not in laplace)
    if not (laplace and others) or (rest := _least(others, delta, relation, grid)) is None:
        return math.nan, ""
    return _pure(laplace, relation) + max(0.0, rest[0]), f"pure + {rest[1]}"


def _amplified(pure: float, rate: float) -> float:
    """Return log(1 + q (e^eps - 1)), without overflow."""
    if rate == 1 or pure > 500:
        return pure
    return math.log1p(rate * math.expm1(pure))


def _gaussian_exact(leaves: Leaves, delta: float, relation: Relation) -> float:
    """Return the exact epsilon of Gaussian releases without sampling; with sampling, which never adds cost, an upper bound."""
    from dp_accounting import get_epsilon_gaussian  # noqa: PLC0415  (slow to import)

    from flower_dp.privacy import renyi  # noqa: PLC0415

    norms = []
    for leaf, count in leaves:
        inner, _ = unwrap_sampling(leaf)
        without = isinstance(leaf, dp_events.SampledWithoutReplacementDpEvent)
        if not isinstance(inner, dp_events.GaussianDpEvent) or (without and relation != "replace-one"):
            return math.nan
        norms.append(math.sqrt(count) / inner.noise_multiplier)
    multiplier = events.noise_over_sensitivity(1 / math.hypot(*norms), relation)
    # The root finder's answer may lie below the root by its tolerance.
    with renyi.without_warnings():
        return float(get_epsilon_gaussian(multiplier, delta, tol=1e-12)) * (1 + 1e-12) + 1e-11
