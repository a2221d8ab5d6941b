"""Top-k: selected coordinates with their indices, those of largest magnitude or those that are not 0."""

import math
from typing import Any

import numpy as np

from flower_dp.core import checks
from flower_dp.core.compression.dense import dense
from flower_dp.core.compression.payload import Codec, Payload, check_array, check_values, to_numpy
from flower_dp.core.vectors import Array


def num_kept(keep_ratio: float, length: int) -> int:
    """Return how many of `length` coordinates a keep ratio in (0, 1] keeps: at least one, rounded up."""
    return max(1, math.ceil(checks.number("keep_ratio", keep_ratio, above=0, at_most=1) * length - 1e-9))


def top_k(vector: Array, keep_ratio: float) -> Payload:
    """Encode the coordinates of largest magnitude, `num_kept(keep_ratio, d)` of them.

    4 bytes a value, plus the smaller of d/8 bytes (a bit a coordinate) and 2 or 4 bytes an index. Only for vectors that already
    carry dense noise. Source: DP-FedSAM (Shi et al. 2023), eq. 12.
    """
    values = to_numpy(vector)
    return _sparse(values, top_k_indices(values, num_kept(keep_ratio, values.size)))


def smallest(vector: Array) -> Payload:
    """Encode a vector without loss: by its nonzero coordinates where that is smaller, else dense."""
    values = to_numpy(vector)
    nonzero = np.flatnonzero(values)
    if 0 < nonzero.size < values.size // 2 and (sparse := _sparse(values, nonzero)).num_bytes < values.nbytes:
        return sparse
    return dense(values)


def top_k_bytes(length: int, kept: int, width: int) -> int:
    """Return how many bytes `kept` of `length` coordinates take, `width` bytes a value and their indices."""
    return kept * width + min((length + 7) // 8, kept * _index_dtype(length).itemsize)


def top_k_indices(vector: np.ndarray, count: int) -> np.ndarray:
    """Return, in increasing order, the indices of the `count` entries of largest magnitude."""
    if count >= vector.size:
        return np.arange(vector.size)
    return np.sort(np.argpartition(np.abs(vector), vector.size - count)[vector.size - count :])


def _sparse(vector: np.ndarray, indices: np.ndarray) -> Payload:
    """Encode chosen coordinates with whichever index form is smaller."""
    listed = indices.astype(_index_dtype(vector.size))
    bits = np.zeros(vector.size, bool)
    bits[indices] = True
    packed = np.packbits(bits)
    return Payload(
        arrays=(packed if packed.nbytes < listed.nbytes else listed, vector[indices]),
        header={"encoding": "top-k", "length": vector.size},
    )


def _read(payload: Payload, length: int, mask: np.ndarray | None) -> np.ndarray:
    coded, values = payload.arrays
    indices = _read_indices(coded, values, length)
    check_values(values, indices.size)
    vector = np.zeros(length, values.dtype)
    vector[indices] = values
    return vector


def _read_indices(coded: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    if coded.ndim != 1 or values.ndim != 1 or not 0 < values.size <= length:
        raise ValueError(f"payload has {values.size} values of shape {values.shape}: must be 1 to {length} in one dimension")
    if coded.dtype == np.uint8:
        check_array("index bits", coded, np.dtype(np.uint8), (length + 7) // 8)
        indices = np.flatnonzero(np.unpackbits(coded, count=length))
        if coded.size and int(np.unpackbits(coded).sum()) != indices.size:
            raise ValueError("payload index bits are set beyond the model's length")
    else:
        check_array("indices", coded, _index_dtype(length), values.size)
        indices = coded.astype(np.int64)
        if indices[-1] >= length or np.any(np.diff(indices) <= 0):
            raise ValueError(f"payload indices must increase and stay below {length}")
    return indices


def _index_dtype(length: int) -> np.dtype[Any]:
    return np.dtype(np.uint16) if length <= np.iinfo(np.uint16).max + 1 else np.dtype(np.uint32)


CODEC = Codec(name="top-k", num_arrays=2, read=_read)
