"""Compression: a vector as a payload that is really that small, and the way back.

A payload is a few NumPy arrays and a small header. Decoding trusts neither: it checks every length, type and index against what
the receiver knows, and raises ValueError otherwise. Private vectors are compressed after dense noise only, or under a mask
that does not depend on private data: coordinates chosen from an un-noised vector would tell what the noise should hide.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_dp.core import checks
from flower_dp.core.vectors import Array

Header = dict[str, str | int | float]
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """An encoded vector: arrays that go on the wire and the header that says how to read them."""

    arrays: tuple[np.ndarray, ...]
    header: Header

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


def num_kept(keep_ratio: float, length: int) -> int:
    """Return how many of `length` coordinates a keep ratio in (0, 1] keeps: at least one, rounded up."""
    return max(1, math.ceil(checks.number("keep_ratio", keep_ratio, above=0, at_most=1) * length - 1e-9))


def dense(vector: Array) -> Payload:
    """Encode every coordinate: 4 bytes each where float32 holds all of them exactly, else 8."""
    return Payload(arrays=(_numpy(vector),), header={"encoding": "dense", "length": int(vector.shape[0])})


def top_k(vector: Array, keep_ratio: float) -> Payload:
    """Encode the coordinates of largest magnitude, `num_kept(keep_ratio, d)` of them.

    4 bytes a value, plus the smaller of d/8 bytes (a bit a coordinate) and 2 or 4 bytes an index. Only for vectors that already
    carry dense noise. Source: DP-FedSAM (Shi et al. 2023), eq. 12.
    """
    values = _numpy(vector)
    indices = top_k_indices(values, num_kept(keep_ratio, values.size))
    return _sparse(values, indices)


def smallest(vector: Array) -> Payload:
    """Encode a vector without loss: by its nonzero coordinates where that is smaller, else dense."""
    values = _numpy(vector)
    nonzero = np.flatnonzero(values)
    if 0 < nonzero.size < values.size // 2 and (sparse := _sparse(values, nonzero)).num_bytes < values.nbytes:
        return sparse
    return dense(values)


def top_k_indices(vector: np.ndarray, count: int) -> np.ndarray:
    """Return, in increasing order, the indices of the `count` entries of largest magnitude."""
    if count >= vector.size:
        return np.arange(vector.size)
    return np.sort(np.argpartition(np.abs(vector), vector.size - count)[vector.size - count :])


def random_mask(length: int, keep_ratio: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the shared mask of rand-k: sorted indices of the coordinates that everyone keeps this round."""
    return np.sort(rng.choice(length, num_kept(keep_ratio, length), replace=False))


def rand_k(vector: Array, mask: np.ndarray) -> Payload:
    """Encode the coordinates of a mask that both sides know: 4 bytes a value and nothing else.

    The mask is independent of private data, so clip and noise may live on the kept coordinates alone. Source: Fed-SMP.
    """
    return Payload(arrays=(_numpy(vector)[mask],), header={"encoding": "rand-k", "length": int(vector.shape[0])})


def decode(payload: Payload, length: int, *, mask: np.ndarray | None = None) -> np.ndarray:
    """Return the dense float32 or float64 vector [length] of a payload; coordinates that were not sent are 0.

    Raises:
        ValueError: if header or arrays are not exactly what an honest sender of a vector of this length makes.
    """
    header, arrays = payload.header, payload.arrays
    if header.get("length") != length:
        raise ValueError(f"payload length={header.get('length')!r}: the model has {length} parameters")
    encoding = checks.one_of("payload encoding", header.get("encoding"), ("dense", "top-k", "rand-k"))
    _check_count(arrays, 2 if encoding == "top-k" else 1, encoding)
    values = arrays[-1]
    if encoding == "dense":
        _check_values(values, length)
        return values
    if encoding == "rand-k":
        if mask is None:
            raise ValueError("payload encoding='rand-k': no mask is shared with this sender")
        indices = mask
    else:
        indices = _decode_indices(arrays[0], values, length)
    _check_values(values, indices.size)
    vector = np.zeros(length, values.dtype)
    vector[indices] = values
    return vector


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


def _decode_indices(coded: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    if coded.ndim != 1 or values.ndim != 1 or not 0 < values.size <= length:
        raise ValueError(f"payload has {values.size} values of shape {values.shape}: must be 1 to {length} in one dimension")
    if coded.dtype == np.uint8:
        _check_array("index bits", coded, np.dtype(np.uint8), (length + 7) // 8)
        indices = np.flatnonzero(np.unpackbits(coded, count=length))
        if coded.size and int(np.unpackbits(coded).sum()) != indices.size:
            raise ValueError("payload index bits are set beyond the model's length")
    else:
        _check_array("indices", coded, _index_dtype(length), values.size)
        indices = coded.astype(np.int64)
        if indices[-1] >= length or np.any(np.diff(indices) <= 0):
            raise ValueError(f"payload indices must increase and stay below {length}")
    return indices


def _check_count(arrays: tuple[np.ndarray, ...], count: int, encoding: str) -> None:
    if len(arrays) != count:
        raise ValueError(f"payload has {len(arrays)} arrays: encoding {encoding} has {count}")


def _check_array(name: str, array: np.ndarray, dtype: np.dtype[Any], length: int) -> None:
    if array.dtype != dtype or array.shape != (length,):
        raise ValueError(f"payload {name} are {array.dtype} of shape {array.shape}: must be {dtype} of shape ({length},)")


def _check_values(array: np.ndarray, length: int) -> None:
    _check_array("values", array, array.dtype if array.dtype in _FLOATS else _FLOATS[0], length)


def _index_dtype(length: int) -> np.dtype[Any]:
    return np.dtype(np.uint16) if length <= np.iinfo(np.uint16).max + 1 else np.dtype(np.uint32)


def _numpy(vector: Array) -> np.ndarray:
    """A NumPy view or copy, also of a torch tensor on another device: float32 where that is exact, else float64."""
    values = vector if isinstance(vector, np.ndarray) else np.asarray(vector.detach().to("cpu").numpy())
    if values.dtype != np.float64:
        return values.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values) else values
