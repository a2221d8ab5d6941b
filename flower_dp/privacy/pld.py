"""Epsilon from privacy loss distributions, on grids chosen by the size of the losses."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from flower_dp.core import dp_events
from flower_dp.privacy.events import Leaves, Relation, scaled, unwrap_sampling

# A finer grid than this changes no epsilon above 0.1 in its first four digits; a coarser one is still an upper bound.
GRID = 1e-4
# Smaller epsilons use a finer grid, down to this part of `GRID`, unless the caller chose a coarser one.
FINEST = 0.1
# Beyond this exp(grid) is near the end of float64's range.
_LARGEST_GRID = 100.0
# Beyond this even that grid has too many points; other accountants bound such an epsilon, which protects nobody anyway.
_LARGEST_SIZE = 1e8
# Beyond this the library's probabilities of Laplace noise leave float64's range. The pure epsilon is as good there.
_LARGEST_LAPLACE_LOSS = 700.0
# Below this the rounding of the Fourier transforms inside a composition is no longer far smaller than delta.
SMALLEST_DELTA = 1e-9
# Reserved for that rounding, which may be in the unsafe direction; in a long composition it grows with the number of releases.
_ROUNDING = 1e-12
# Largest part of delta for rounding; the grid of a longer composition errs by far more, in the safe direction.
_MOST_ROUNDING = 0.1
# Longer runs are composed in two stages: the library's tail bounds are too wide for many releases with few possible losses.
_LONG_RUN = 200_000
_STAGE = 1_000
# Largest number of refinements of a grid.
_REFINEMENTS = 8
# Points of a composition: a finer grid takes too long, if epsilon is far below most losses.
_MOST_POINTS = 200_000
# Coarse, and so cheap: its answer says how fine the next one must be.
_FIRST_GRID = 1e-3
# Points of one release on that grid.
_FIRST_POINTS = 200_000
# A composition's losses are mostly below its epsilon at this part of delta, but at no less than this delta.
_FAR, _LEAST_FAR = 1e-4, 1e-7
# Each release adds the variance of about one grid to the losses: a grid of this part of epsilon / sqrt(releases) adds little.
_OF_A_RELEASE = 0.03
# More than a sum of `_MOST_POINTS` probabilities loses to rounding, in parts of it.
_SUMMED = 1e-10


def epsilon_of(leaves: Leaves, delta: float, relation: Relation, grid: float, rough: float) -> float:
    """Return an upper bound of epsilon at delta >= `SMALLEST_DELTA`, NaN if the library has none.

    Args:
        leaves: flattened releases.
        delta: the delta of the guarantee, in (0, 1).
        relation: neighboring relation.
        grid: distance of neighboring losses; a small epsilon uses finer grids.
        rough: another upper bound, NaN if there is none.
    """
    # Every grid gives a valid upper bound, so their minimum is one, too. Some 10^5 points are enough for huge losses; small ones
    # need finer grids. The rough bound may be far too large, so each answer says how fine the next grid must be. The search stops
    # if the next grid can't matter: it is not less than half as wide.
    if rough > _LARGEST_SIZE:
        return math.nan
    coarse = max(grid, _FIRST_GRID, max(_largest_loss(leaf, relation) for leaf, _ in leaves) / _FIRST_POINTS)
    coarse = min(max(coarse, 1e-5 * rough) if math.isfinite(rough) else coarse, _LARGEST_GRID)
    number = sum(count for _, count in leaves)
    best = math.nan
    for _ in range(_REFINEMENTS):
        try:
            total = _composed(leaves, relation, coarse)
            if total is None:
                return math.nan
            value = _epsilon(total, leaves, delta)
            best = value if math.isnan(best) else min(best, value)
            if not 0 < best < math.inf:
                break
            part = min(1e-3, _OF_A_RELEASE / math.sqrt(number))
            small = grid if grid > GRID else min(grid, max(part * best, FINEST * GRID))
            fine = max(1e-5 * best, small)
            if coarse > 2 * fine:
                far = total.get_epsilon_for_delta(max(_FAR * delta, _LEAST_FAR))
                fine = max(fine, far / _MOST_POINTS) if math.isfinite(far) else fine
        except ArithmeticError:  # a loss that no float holds
            break
        if not coarse > 2 * fine:
            break
        coarse = fine
    return best


def rough_epsilon_of(leaves: Leaves, delta: float, relation: Relation, grid: float, ceiling: float) -> float:
    """Return an upper bound of epsilon on a grid of some 10^4 points, for `epsilon_of`; `ceiling` if that is as good.

    Args:
        leaves: flattened releases.
        delta: the delta of the guarantee, in (0, 1).
        relation: neighboring relation.
        grid: least distance of neighboring losses.
        ceiling: another upper bound.
    """
    if not grid < 1e-5 * ceiling <= 1e-5 * _LARGEST_SIZE:  # `epsilon_of` would take its grid in any case, or none
        return ceiling
    try:
        value = on_grid(leaves, delta, relation, min(max(grid, 1e-4 * ceiling), _LARGEST_GRID))
    except ArithmeticError:  # a loss that no float holds
        return ceiling
    return min(value, ceiling) if math.isfinite(value) else ceiling


def on_grid(leaves: Leaves, delta: float, relation: Relation, grid: float) -> float:
    """Return the upper bound that one grid gives."""
    total = _composed(leaves, relation, grid)
    return math.nan if total is None else _epsilon(total, leaves, delta)


def _epsilon(total: Any, leaves: Leaves, delta: float) -> float:
    """Return an upper bound of epsilon from the distribution of a composition's losses."""
    from flower_dp.privacy import fixed_size  # noqa: PLC0415  (slow to import)

    # Distributions made here, of sampled releases, already contain `fixed_size.ROUNDING`, each as an infinite loss. Those of the
    # library have none, and Poisson-sampled Laplace noise is the library's.
    plain = sum(
        count
        for leaf, count in leaves
        if unwrap_sampling(leaf)[1] == 1 or isinstance(unwrap_sampling(leaf)[0], dp_events.LaplaceDpEvent)
    )
    left = delta - _ROUNDING - min(plain * fixed_size.ROUNDING, delta * _MOST_ROUNDING)
    value = float(total.get_epsilon_for_delta(left))
    # The library adds up losses and probabilities one by one, so its answer may be too small. Raise it to the first value that
    # its profile, whose sum is more exact, confirms.
    step = 1e-10 * max(1.0, value)
    while value < math.inf and total.get_delta_for_epsilon(value) > left * (1 - _SUMMED):
        value, step = value + step, 4 * step
    return value


def _composed(leaves: Leaves, relation: Relation, grid: float) -> Any:
    """Return the distribution of a composition's losses, or None if the library has none."""
    total = None
    for leaf, count in leaves:
        part = _leaf_pld(leaf, relation, grid)
        if part is None:
            return None
        part = _self_composed(part, count)
        total = part if total is None else total.compose(part)
    return total


def _largest_loss(leaf: dp_events.DpEvent, relation: Relation) -> float:
    """Return about the largest loss of one release."""
    from flower_dp.privacy import fixed_size  # noqa: PLC0415  (slow to import)

    inner, rate = unwrap_sampling(leaf)
    return fixed_size.largest_loss(scaled(inner, relation), rate)


def _self_composed(one: Any, count: int) -> Any:
    if count < _LONG_RUN:
        return one.self_compose(count) if count > 1 else one
    stages, rest = divmod(count, _STAGE)
    total = one.self_compose(_STAGE).self_compose(stages)
    return total.compose(_self_composed(one, rest)) if rest else total


@lru_cache(maxsize=16)
def _leaf_pld(leaf: dp_events.DpEvent, relation: Relation, grid: float) -> Any:
    """Return the privacy loss distribution of one release, or None if the library has none."""
    from dp_accounting.pld import privacy_loss_distribution  # noqa: PLC0415  (slow to import)

    from flower_dp.privacy import fixed_size, poisson  # noqa: PLC0415  (slow to import)

    inner, rate = unwrap_sampling(leaf)
    if rate == 1:
        # Without sampling a replacement is a shift by 2 C: half the multiplier under add-or-remove-one, for Laplace as well.
        inner, relation = scaled(inner, relation), "add-or-remove-one"
    elif isinstance(leaf, dp_events.SampledWithoutReplacementDpEvent):
        # Add-or-remove-one changes the number of units, and so the law of the sample itself.
        return fixed_size.distribution(scaled(inner, relation), rate, grid) if relation == "replace-one" else None
    if isinstance(inner, dp_events.GaussianDpEvent):
        if rate < 1:
            return poisson.distribution(inner, rate, grid, relation)
        fixed_size.num_points(inner, rate, grid)
        return privacy_loss_distribution.from_gaussian_mechanism(inner.noise_multiplier, value_discretization_interval=grid)
    if relation == "replace-one":
        return None
    fixed_size.num_points(inner, rate, grid)
    if 1 / inner.noise_multiplier > _LARGEST_LAPLACE_LOSS:
        raise OverflowError(f"{inner}: its losses are too large")
    return privacy_loss_distribution.from_laplace_mechanism(
        inner.noise_multiplier, value_discretization_interval=grid, sampling_prob=rate
    )
