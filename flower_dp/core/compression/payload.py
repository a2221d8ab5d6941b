"""The payload that all codecs share, and checks that trust neither its header nor its arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_dp.core.vectors import Array

Header = dict[str, str | int | float]
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """An encoded vector: its arrays, and the header that says how to read them.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.compression import Payload, decode
        >>> payload = Payload(arrays=(np.ones(2, np.float32),), header={"encoding": "dense", "length": 2})
        >>> payload.num_bytes, decode(payload, 2).tolist()
        (8, [1.0, 1.0])
    """

    arrays: tuple[np.ndarray, ...]
    header: Header

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A reader of payloads of one encoding.

    Attributes:
        name: the header's `encoding`.
        num_arrays: number of arrays of a payload.
        keys: header keys besides `encoding` and `length`; `read` checks their values.
        read: payload, length and the mask that both sides know (None without one) -> the vector [length], float32 or float64.
            It trusts nothing, and raises ValueError for a payload that no honest sender makes.

    Example:
        >>> from flower_dp.core.compression import CODECS
        >>> CODECS["rand-k"].num_arrays
        1
    """

    name: str
    num_arrays: int
    keys: tuple[str, ...] = ()
    read: Callable[[Payload, int, np.ndarray | None], np.ndarray]


def check_array(name: str, array: np.ndarray, dtype: np.dtype[Any], length: int) -> None:
    """Refuse an array of another dtype or shape."""
    if array.dtype != dtype or array.shape != (length,):
        raise ValueError(f"payload {name} are {array.dtype} of shape {array.shape}: must be {dtype} of shape ({length},)")


def check_values(array: np.ndarray, length: int) -> None:
    """Refuse an array that is not one vector of float32 or float64 values."""
    check_array("values", array, array.dtype if array.dtype in _FLOATS else _FLOATS[0], length)


def to_numpy(vector: Array, width: int | None = None) -> np.ndarray:
    """Return a NumPy view or copy, also of a torch tensor on another device.

    Args:
        vector: the values.
        width: bytes of a value; None: 4 if that is exact, else 8, so that the size reveals something of the values.
    """
    values = vector if isinstance(vector, np.ndarray) else np.asarray(vector.detach().to("cpu").numpy())
    if width is not None:
        return values.astype(np.float32 if width == 4 else np.float64, copy=False)
    if values.dtype != np.float64:
        return values.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values) else values
