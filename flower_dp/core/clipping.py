"""Clipping: the norm bound that all sensitivities rest on.

Results are float32. Their norm is at most the bound exactly, not up to rounding: norms are computed in float64, and a vector that
must shrink is scaled a little below the bound, by more than the cast to float32 can add back. Vectors [d] are clipped whole,
matrices [clients x d] row by row; NumPy arrays and torch tensors alike.
"""

from collections.abc import Callable

import numpy as np
from array_api_compat import array_namespace, is_torch_array

from flower_dp.core import checks
from flower_dp.core.vectors import Array

# Rounding the factor and the product to float32 changes an entry by at most a factor 1 + 2**-23 or so; norms are summed
# in float64.
_MARGIN = 2.0**-22
# Norms in [_SAFE, 1/_SAFE] come from squares well inside float64's range.
_SAFE = 1e-100
# Entries of a row that are converted to float64 at a time: 256 KiB, so that the copy stays in the cache.
_BLOCK = 2**15
NOT_FINITE = "update has NaN or infinite entries: it can't be clipped"
# Smaller factors lose precision as float32 numbers: those rows are scaled in float64.
_SMALLEST_FACTOR = 1e-30
# Below this the rounding of subnormal float32 entries could exceed the margin.
_SMALLEST_BOUND = 1e-30
# Results are float32: a bound beyond its range has the same effect as this one.
_LARGEST_BOUND = 2.0**127


class NotFiniteError(ValueError):
    """Raised for a vector with NaN or infinite entries, which has no norm to clip by."""


def l2_norms(rows: Array) -> Array:
    """Return the L2 norm of a vector, or of every row of a matrix, in float64, without overflow or underflow."""
    xp = array_namespace(rows)
    if rows.ndim > 1 and is_torch_array(rows) and rows.device.type != "cpu":
        rows = _aligned(rows)
    if is_torch_array(rows):
        norms = xp.linalg.vector_norm(rows, axis=-1, dtype=xp.float64)  # entry by entry, without a copy
    else:
        starts = range(0, max(1, rows.shape[-1]), _BLOCK)
        with np.errstate(over="ignore"):  # overflowing norms are computed again below
            blocks = [xp.linalg.vector_norm(xp.astype(rows[..., i : i + _BLOCK], xp.float64), axis=-1) for i in starts]
            norms = xp.linalg.vector_norm(xp.stack(blocks, axis=-1), axis=-1)
    if rows.ndim == 1 and _SAFE < float(norms) < 1 / _SAFE:
        return norms
    safe = (norms > _SAFE) & (norms < 1 / _SAFE)
    if bool(xp.all(safe)):
        return norms
    wide = xp.astype(rows, xp.float64)
    # Zeros, entries whose squares leave float64's range, NaN and infinity: divide by the largest entry first.
    largest = xp.max(xp.abs(wide), axis=-1) if wide.shape[-1] else norms
    unit = xp.where((largest > 0) & xp.isfinite(largest), largest, xp.ones_like(largest))
    scaled = wide / unit[..., None]
    # Only these rows: the last bits of a norm must not depend on other rows.
    return xp.where(safe, norms, unit * xp.sqrt(xp.sum(scaled * scaled, axis=-1)))


def _aligned(rows: Array) -> Array:
    """Return rows [n, d] in float64 with zeros behind them, so that each begins at a multiple of 128 bytes.

    On a GPU a row's address fixes the order of its sum, and so the last bits of its norm. They must not depend on the row's place
    among the rows of other clients.
    """
    length = rows.shape[-1]
    wide = rows.new_zeros((*rows.shape[:-1], length + -length % 16), dtype=array_namespace(rows).float64)
    wide[..., :length] = rows
    return wide


def l1_norms(rows: Array) -> Array:
    """Return the L1 norm of a vector, or of every row of a matrix, in float64."""
    xp = array_namespace(rows)
    return xp.sum(xp.abs(xp.astype(rows, xp.float64)), axis=-1)


def clip_l2(rows: Array, clip_norm: float) -> Array:
    """Return float32 rows scaled down, if needed, to an L2 norm of at most `clip_norm`.

    Raises:
        ValueError: if `clip_norm` is not a finite number >= 1e-30, or an entry is NaN or infinite.
    """
    return _clip(rows, _bound(clip_norm), l2_norms)


def clip_l1(rows: Array, clip_norm: float) -> Array:
    """Return float32 rows scaled down, if needed, to an L1 norm of at most `clip_norm`.

    Raises:
        ValueError: if `clip_norm` is not a finite number >= 1e-30, or an entry is NaN or infinite.
    """
    return _clip(rows, _bound(clip_norm), l1_norms)


def indicator(updates: Array, clip_norm: float, scale: float) -> Array:
    """Return scale / 2 for an update whose L2 norm is at most `clip_norm`, else -scale / 2.

    It takes one update [d], or several [n, d]. The result is float64, and a little nearer to 0: by more than a cast to
    float32 can add back.
    """
    norms = l2_norms(updates)
    xp, value = array_namespace(norms), 0.5 * scale * (1 - _MARGIN)
    return xp.where(norms <= clip_norm, xp.full_like(norms, value), xp.full_like(norms, -value))


def _bound(clip_norm: float) -> float:
    """Return the checked clip norm, less the margin."""
    return min(checks.number("clip_norm", clip_norm, above=0, at_least=_SMALLEST_BOUND), _LARGEST_BOUND) * (1 - _MARGIN)


def _clip(rows: Array, bound: float, norms_of: Callable[[Array], Array]) -> Array:
    xp = array_namespace(rows)
    norms = norms_of(rows)
    if (
        rows.ndim == 1
        and rows.dtype == xp.float32
        and bound * _SMALLEST_FACTOR < (norm := float(norms)) < bound / _SMALLEST_FACTOR
    ):
        # One vector is the common case, and Python's own numbers are faster than arrays without dimensions.
        return xp.astype(rows, xp.float32, copy=True) if norm <= bound else rows * (bound / norm)
    if not bool(xp.all(xp.isfinite(norms))):
        raise NotFiniteError(NOT_FINITE)
    if bool(xp.all(norms <= bound)):
        return xp.astype(rows, xp.float32, copy=True)
    factors = xp.where(norms > bound, bound / xp.where(norms > 0, norms, xp.ones_like(norms)), xp.ones_like(norms))
    wide, narrow = factors <= _SMALLEST_FACTOR, rows.dtype == xp.float32
    if narrow and not bool(xp.any(wide)):
        return rows * xp.astype(factors, xp.float32)[..., None]
    shrunk = xp.astype(xp.astype(rows, xp.float64) * factors[..., None], xp.float32)
    # Row by row: one that needs float64 must not change how others are rounded.
    return xp.where(wide[..., None], shrunk, rows * xp.astype(factors, xp.float32)[..., None]) if narrow else shrunk
