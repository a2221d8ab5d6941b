"""Codecs that send coordinates of a vector: all; those of a mask that both sides know; selected ones with their indices."""

import math
import zlib
from typing import Any

import numpy as np

from flower_dp.core import checks
from flower_dp.core.compression.payload import Codec, Payload, check_array, check_values, to_numpy
from flower_dp.core.vectors import Array


def dense(vector: Array, width: int | None = None) -> Payload:
    """Encode every coordinate in `width` bytes; None: 4 bytes each if float32 holds all of them exactly, else 8."""
    return Payload(arrays=(to_numpy(vector, width),), header={"encoding": "dense", "length": int(vector.shape[0])})


def _read_dense(payload: Payload, length: int, mask: np.ndarray | None) -> np.ndarray:
    (values,) = payload.arrays
    check_values(values, length)
    return values


def random_mask(length: int, keep_ratio: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the shared mask of rand-k: sorted indices of the coordinates that all clients keep this round."""
    return np.sort(rng.choice(length, num_kept(keep_ratio, length), replace=False))


def rand_k(vector: Array, mask: np.ndarray, width: int | None = None) -> Payload:
    """Encode the coordinates of a mask that both sides know, in `width` bytes a value; None: as `dense`.

    The mask is independent of private data, so clip and noise may apply to the kept coordinates alone. Source: Fed-SMP. The
    header carries a checksum of the mask: two versions of NumPy may draw different masks from one seed.
    """
    header: dict[str, str | int | float] = {"encoding": "rand-k", "length": int(vector.shape[0]), "mask": _checksum(mask)}
    return Payload(arrays=(to_numpy(vector, width)[mask],), header=header)


def _checksum(mask: np.ndarray) -> int:
    """Return a checksum of a mask, the same on every machine."""
    return zlib.crc32(mask.astype("<i8").tobytes())


def _read_masked(payload: Payload, length: int, mask: np.ndarray | None) -> np.ndarray:
    if mask is None:
        raise ValueError("payload encoding='rand-k': no mask is shared with this sender")
    (values,) = payload.arrays
    check_values(values, mask.size)
    checksum = payload.header.get("mask")
    if type(checksum) is not int or checksum != _checksum(mask):
        raise ValueError("payload mask is not the one of this round")
    vector = np.zeros(length, values.dtype)
    vector[mask] = values
    return vector


def num_kept(keep_ratio: float, length: int) -> int:
    """Return how many of `length` coordinates a keep ratio in (0, 1] keeps: at least one, rounded up."""
    # Less 1e-9, or the rounding of 0.55 x 100 = 55.00000000000001 would keep 56.
    return max(1, math.ceil(checks.number("keep_ratio", keep_ratio, above=0, at_most=1) * length - 1e-9))


def top_k(vector: Array, keep_ratio: float) -> Payload:
    """Encode the coordinates of largest magnitude, `num_kept(keep_ratio, d)` of them.

    4 bytes a value, plus the smaller of d/8 bytes (a bit a coordinate) and 2 or 4 bytes an index. Only for vectors that already
    carry dense noise. Source: DP-FedSAM (Shi et al. 2023), eq. 12.
    """
    values = to_numpy(vector)
    return _sparse(values, top_k_indices(values, num_kept(keep_ratio, values.size)))


def smallest(vector: Array) -> Payload:
    """Encode a vector without loss: by its nonzero coordinates if that is smaller, else dense."""
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


def _read_sparse(payload: Payload, length: int, mask: np.ndarray | None) -> np.ndarray:
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


CODECS = (
    Codec(name="dense", num_arrays=1, read=_read_dense),
    Codec(name="top-k", num_arrays=2, read=_read_sparse),
    Codec(name="rand-k", num_arrays=1, keys=("mask",), read=_read_masked),
)
