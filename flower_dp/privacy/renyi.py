"""Epsilon from Renyi divergences, as dp-accounting computes and converts them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting as dp
import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, RdpAccountant, compute_epsilon

from flower_dp.privacy.events import Leaves, Relation, inner_of, scaled

ORDERS = np.asarray(DEFAULT_RDP_ORDERS, dtype=float)
# More than the error of the library's logarithm of a moment of a sampled release, (order - 1) x divergence, in float64: for
# logarithms below 1 as such, for others in parts of it.
_ROUNDING = 1e-12
# Divergences of a sample of fixed size with this noise multiplier are far below `_ROUNDING`.
_MOST_NOISE = 1e8
_LIBRARY = {
    "add-or-remove-one": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}


def epsilon_of(leaves: Leaves, delta: float, relation: Relation) -> float | None:
    """Return an upper bound of epsilon (conversion of Canonne et al. 2020), None where the library has none."""
    curve = curve_of(leaves, relation)
    if curve is None:
        return None
    with without_warnings():
        return float(compute_epsilon(ORDERS, curve, delta)[0])


def curve_of(leaves: Leaves, relation: Relation) -> np.ndarray | None:
    """Return the Renyi divergences of a composition at `ORDERS`, or None where the library has none."""
    curves = [_leaf_curve(leaf, relation) for leaf, _ in leaves]
    if any(one is None for one in curves):
        return None
    parts = (count * one for (_, count), one in zip(leaves, curves, strict=True) if one is not None)
    return sum(parts, start=np.zeros_like(ORDERS))


def accountant(relation: Relation) -> RdpAccountant:
    """Return the library's accountant, for events of `library_event`."""
    return RdpAccountant(ORDERS, neighboring_relation=_LIBRARY[relation])


def library_event(leaf: dp.DpEvent, relation: Relation) -> dp.DpEvent | None:
    """Return one release as the library's accountant takes it, or None: it wants noise scale / *sensitivity*."""
    inner, rate = inner_of(leaf)
    if isinstance(leaf, dp.PoissonSampledDpEvent) and rate < 1:
        return None if relation == "replace-one" or not isinstance(inner, dp.GaussianDpEvent) else leaf
    if isinstance(leaf, dp.SampledWithoutReplacementDpEvent) and rate < 1:
        # The sensitivity of a replacement is 2 C.
        if relation != "replace-one" or not isinstance(inner, dp.GaussianDpEvent):
            return None
        # With more noise the library's logarithms end in an error; less noise than there is stays a valid bound.
        less = dp.GaussianDpEvent(min(inner.noise_multiplier, _MOST_NOISE))
        return dp.SampledWithoutReplacementDpEvent(leaf.source_dataset_size, leaf.sample_size, scaled(less, relation))
    return scaled(inner, relation)


@lru_cache(maxsize=1024)
def _leaf_curve(leaf: dp.DpEvent, relation: Relation) -> np.ndarray | None:
    """Return the Renyi divergences of one release, or None."""
    event = library_event(leaf, relation)
    if event is None:
        return None
    with without_warnings():
        curve: np.ndarray = accountant(relation).compose(event).rdp
    # What is left of a small divergence may be 0, which the conversion takes for no cost at all.
    return curve if inner_of(leaf)[1] == 1 else curve * (1 + _ROUNDING) + _ROUNDING / (ORDERS - 1)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the library's warnings about Renyi orders that it leaves out: leaving one out never lowers a bound.

    A warning, even one that is not shown, makes absl configure the root logger if that has no handler; every line of other
    loggers would then be shown twice. So the root logger gets a handler meanwhile.
    """
    logger, root, silent = logging.getLogger("absl"), logging.getLogger(), logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.ERROR)
    root.addHandler(silent)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        root.removeHandler(silent)
        logger.setLevel(level)
