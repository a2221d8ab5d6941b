"""Rand-k: the coordinates of a mask that both sides know, without their indices."""

import zlib

import numpy as np

from flower_dp.core.compression.payload import Codec, Payload, check_values, to_numpy
from flower_dp.core.compression.top_k import num_kept
from flower_dp.core.vectors import Array


def random_mask(length: int, keep_ratio: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the shared mask of rand-k: sorted indices of the coordinates that everyone keeps this round."""
    return np.sort(rng.choice(length, num_kept(keep_ratio, length), replace=False))


def rand_k(vector: Array, mask: np.ndarray, width: int | None = None) -> Payload:
    """Encode the coordinates of a mask that both sides know, in `width` bytes a value; None: as `dense`.

    The mask is independent of private data, so clip and noise may apply to the kept coordinates alone. Source: Fed-SMP. The
    header carries a checksum of the mask: two versions of NumPy may draw different masks from one seed.
    """
    header: dict[str, str | int | float] = {"encoding": "rand-k", "length": int(vector.shape[0]), "mask": checksum(mask)}
    return Payload(arrays=(to_numpy(vector, width)[mask],), header=header)


def checksum(mask: np.ndarray) -> int:
    """Return a checksum of a mask, the same on every machine."""
    return zlib.crc32(mask.astype("<i8").tobytes())


def _read(payload: Payload, length: int, mask: np.ndarray | None) -> np.ndarray:
    if mask is None:
        raise ValueError("payload encoding='rand-k': no mask is shared with this sender")
    (values,) = payload.arrays
    check_values(values, mask.size)
    seen = payload.header.get("mask")
    if type(seen) is not int or seen != checksum(mask):
        raise ValueError("payload mask is not the one of this round")
    vector = np.zeros(length, values.dtype)
    vector[mask] = values
    return vector


CODEC = Codec(name="rand-k", num_arrays=1, keys=("mask",), read=_read)
