"""A privacy filter: a budget that holds even if earlier results decide what is released next.

The epsilon of a composition holds for releases that are known beforehand. A filter adds up Renyi divergences at one order, fixed
in advance, and stops before their sum exceeds a bound. All releases together are then (epsilon, delta)-private, even if earlier
releases chose mechanism, noise and sampling of each one (Feldman & Zrnic 2021, who count for one unit alone, too).
"""

import math
from functools import lru_cache

from flower_dp.core import checks, dp_events
from flower_dp.privacy import accounting, renyi
from flower_dp.privacy.events import Relation, UnsupportedEventError, flatten_event, unwrap_sampling

# Far more than the rounding of a sum of millions of divergences, in parts of it.
_ROUNDING = 1e-9


def order_for(
    epsilon: float, delta: float, event: dp_events.DpEvent | None = None, *, relation: Relation = "add-or-remove-one"
) -> float:
    """Return the order at which a budget allows the most repetitions of an event.

    A filter holds at any order, if it is fixed before the first charge: what is charged may then differ from this event.

    Args:
        epsilon: epsilon of the budget.
        delta: delta of the budget.
        event: event that will be charged, as far as it is known; None for Gaussian releases without sampling. Orders above 2
            are then whole numbers, at which the library's divergences of sampled releases are lowest.
        relation: neighboring relation of the event.

    Raises:
        ValueError: if the budget is too small for any release at any order.
        UnsupportedEventError: if no accountant here bounds the event.

    Example:
        >>> from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
        >>> from flower_dp.privacy import renyi_filter
        >>> charged = SampledWithoutReplacementDpEvent(1000, 100, GaussianDpEvent(2.0))
        >>> renyi_filter.order_for(8.0, 1e-5), renyi_filter.order_for(8.0, 1e-5, charged, relation="replace-one")
        (4.0, 3.3)
    """
    if event is None:
        costs = {order: order for order in renyi.ORDERS if order < 2 or order == int(order)}
    else:
        costs = {order: divergence(event, order, relation) for order in renyi.ORDERS}
    best = max(costs, key=lambda order: allowance(epsilon, delta, order) / costs[order])
    if allowance(epsilon, delta, best) <= 0:
        raise ValueError(f"epsilon={epsilon:g}: is too small for a fully adaptive budget at delta={delta:g}: nothing would fit")
    return best


def allowance(epsilon: float, delta: float, order: float) -> float:
    """Return the Renyi divergence that gives epsilon at delta (conversion of Canonne et al. 2020); 0 or less if none does."""
    return epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)


def num_affordable(
    before: dp_events.DpEvent, event: dp_events.DpEvent, *, allowed: float, order: float, relation: Relation
) -> int:
    """Return how many more of an event fit into an `allowance` at an order, after the earlier charges."""
    each, spent = (divergence(some, order, relation) * (1 + _ROUNDING) for some in (event, before))
    rest = allowed - spent
    return min(math.floor(rest / each), checks.MOST_COUNT) if rest >= each else 0


def divergence(event: dp_events.DpEvent, order: float, relation: Relation) -> float:
    """Return a bound on the Renyi divergence of an event; infinite if there is no privacy.

    Raises:
        UnsupportedEventError: if nothing here bounds it.
    """
    return math.fsum(count * _of_leaf(leaf, order, relation) for leaf, count in flatten_event(event))


@lru_cache(maxsize=2**12)
def _of_leaf(leaf: dp_events.DpEvent, order: float, relation: Relation) -> float:
    if isinstance(leaf, dp_events.NonPrivateDpEvent):
        return math.inf
    bounds = [renyi.divergence_of(leaf, relation, order)]
    inner, rate = unwrap_sampling(leaf)
    if isinstance(inner, dp_events.LaplaceDpEvent):
        try:
            pure = accounting.epsilon(leaf, delta=0, relation=relation).epsilon
        except UnsupportedEventError:
            pure = math.nan
        # Bun & Steinke 2016, Proposition 3.3.
        bounds += [pure, order * pure**2 / 2]
    if rate < 1 and (relation == "replace-one" or isinstance(leaf, dp_events.PoissonSampledDpEvent)):
        # Sampling never adds cost: both neighbors are mixtures with the same weights of the possible samples.
        bounds.append(renyi.divergence_of(inner, relation, order))
    # NaN, or a bound that rounding has made 0, bounds nothing.
    valid = [bound for bound in bounds if bound is not None and bound > 0]
    if not valid:
        raise UnsupportedEventError(f"event {leaf}: has no bound under relation={relation!r} in a fully adaptive budget")
    return min(valid)
