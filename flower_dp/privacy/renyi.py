"""Epsilon from Renyi divergences, as dp-accounting computes and converts them.

For sampled Gaussian releases under replace-one the divergences are those of the dominating pairs (`flower_dp.privacy.poisson`,
`flower_dp.privacy.fixed_size`). The library has none for Poisson samples, and larger ones for samples of a fixed size. For
Poisson samples under add-or-remove-one, below order 2, the pair's are used, too: the library's may be 60 times too large there.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache

import dp_accounting as dp
import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, RdpAccountant, compute_epsilon

from flower_dp.privacy import fixed_size, poisson
from flower_dp.privacy.events import Leaves, Relation, scaled, unwrap_sampling

ORDERS = tuple(map(float, DEFAULT_RDP_ORDERS))
# Indices of the whole numbers in `ORDERS`.
_WHOLE = [place for place, order in enumerate(ORDERS) if order == int(order)]
# A search first tries one index in this many, then those between the neighbors of the best one.
_STEP = 4
# More than the error of the logarithm of a moment of a sampled release, (order - 1) x divergence, in float64: for
# logarithms below 1 as such, for others in parts of it.
_ROUNDING = 1e-12
_LIBRARY = {"add-or-remove-one": dp.NeighboringRelation.ADD_OR_REMOVE_ONE, "replace-one": dp.NeighboringRelation.REPLACE_ONE}


def epsilon_of(leaves: Leaves, delta: float, relation: Relation) -> float | None:
    """Return an upper bound of epsilon (conversion of Canonne et al. 2020), None if nothing bounds a release.

    Every order gives a bound. Computing all `ORDERS` is slow for sampled releases. So the search finds the best whole number, and
    then the best order between its whole neighbors. (The library's bounds at other orders may be far above those at the whole
    numbers around them.)
    """
    if not all(_is_bounded(leaf, relation) for leaf, _ in leaves):
        return None

    @cache
    def bound(place: int) -> float:
        total = sum(count * _divergence(leaf, relation, ORDERS[place]) for leaf, count in leaves)
        # The library would take NaN for no cost.
        return math.inf if math.isnan(total) else float(compute_epsilon([ORDERS[place]], [total], delta)[0])

    with without_warnings():
        near = _WHOLE.index(_lowest(bound, _WHOLE))
        first, last = _WHOLE[near - 1] if near else 0, _WHOLE[min(near + 1, len(_WHOLE) - 1)]
        return min(bound(0), bound(_WHOLE[near]), bound(_lowest(bound, range(first, last + 1))))


def curve_of(leaves: Leaves, relation: Relation) -> np.ndarray | None:
    """Return upper bounds of the Renyi divergences of a composition at `ORDERS`, or None if nothing bounds a release."""
    if not all(_is_bounded(leaf, relation) for leaf, _ in leaves):
        return None
    with without_warnings():
        return np.asarray([sum(count * _divergence(leaf, relation, order) for leaf, count in leaves) for order in ORDERS])


def divergence_of(leaf: dp.DpEvent, relation: Relation, order: float) -> float | None:
    """Return an upper bound of the Renyi divergence of one release at an order, or None if nothing bounds it."""
    if not _is_bounded(leaf, relation):
        return None
    with without_warnings():
        return _divergence(leaf, relation, order)


def _accountant(relation: Relation, orders: Sequence[float] = ORDERS) -> RdpAccountant:
    """Return the library's accountant, for events of `_library_event`."""
    return RdpAccountant(orders, neighboring_relation=_LIBRARY[relation])


def _library_event(leaf: dp.DpEvent, relation: Relation) -> dp.DpEvent | None:
    """Return a release as the library's accountant takes it, with noise scale / *sensitivity*; None if it takes none."""
    inner, rate = unwrap_sampling(leaf)
    if rate == 1:
        return scaled(inner, relation)
    fits = (
        relation == "add-or-remove-one" and isinstance(leaf, dp.PoissonSampledDpEvent) and isinstance(inner, dp.GaussianDpEvent)
    )
    return leaf if fits else None


def _lowest(bound: Callable[[int], float], places: Sequence[int]) -> int:
    """Return the index with the lowest bound, if bounds fall before it and rise after it."""
    some = range(0, len(places), _STEP)
    best = min(some, key=lambda number: bound(places[number]))
    return min(places[max(0, best - _STEP) : best + _STEP + 1], key=bound)


def _is_bounded(leaf: dp.DpEvent, relation: Relation) -> bool:
    return _library_event(leaf, relation) is not None or _is_replaced(leaf, relation)


def _is_replaced(leaf: dp.DpEvent, relation: Relation) -> bool:
    """Return whether a release is Gaussian and sampled, under replace-one."""
    inner, rate = unwrap_sampling(leaf)
    return rate < 1 and relation == "replace-one" and isinstance(inner, dp.GaussianDpEvent)


@lru_cache(maxsize=2**15)
def _divergence(leaf: dp.DpEvent, relation: Relation, order: float) -> float:
    """Return an upper bound of the Renyi divergence of one release that is bounded."""
    inner, rate = unwrap_sampling(leaf)
    if _is_replaced(leaf, relation):
        if isinstance(leaf, dp.PoissonSampledDpEvent):
            divergence = poisson.replaced_divergence(inner, rate, order)
        else:
            divergence = fixed_size.divergence(scaled(inner, relation), rate, order)
    else:
        divergence = float(_accountant(relation, [order]).compose(_library_event(leaf, relation)).rdp[0])
        if order < 2 and rate < 1 and isinstance(leaf, dp.PoissonSampledDpEvent):
            exact = poisson.removed_divergence(inner, rate, order)
            divergence = exact if math.isnan(divergence) else min(divergence, exact)
    # Rounding may leave 0 of a small divergence, which the conversion takes for no cost at all.
    return divergence if rate == 1 else divergence * (1 + _ROUNDING) + _ROUNDING / (order - 1)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the library's warnings about Renyi orders that it leaves out, which never lowers a bound.

    A warning, even one that is not shown, makes absl configure the root logger if that has no handler; every line of other
    loggers would then be shown twice. So the root logger gets a handler meanwhile.
    """
    logger, root, silent = logging.getLogger("absl"), logging.getLogger(), logging.NullHandler()

    def is_error(record: logging.LogRecord) -> bool:  # one function a call, so that the end of another call does not remove it
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)
    root.addHandler(silent)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        root.removeHandler(silent)
        logger.removeFilter(is_error)
