"""Every coordinate."""

import numpy as np

from flower_dp.core.compression.payload import Codec, Payload, check_values, to_numpy
from flower_dp.core.vectors import Array


def dense(vector: Array, width: int | None = None) -> Payload:
    """Encode every coordinate in `width` bytes; None: 4 bytes each where float32 holds all of them exactly, else 8."""
    return Payload(arrays=(to_numpy(vector, width),), header={"encoding": "dense", "length": int(vector.shape[0])})


def _read(payload: Payload, length: int, mask: np.ndarray | None) -> np.ndarray:
    (values,) = payload.arrays
    check_values(values, length)
    return values


CODEC = Codec(name="dense", num_arrays=1, read=_read)
