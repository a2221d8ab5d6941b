"""Compression of vectors into small payloads, and back.

A payload is a few NumPy arrays and a small header. Decoding trusts neither: it checks every length, type and index against what
the receiver knows, and raises ValueError otherwise. Private vectors are compressed after dense noise only, or under a mask that
does not depend on private data: coordinates chosen from a vector without noise would reveal private data.

A codec is an encoder, a `Codec` that reads it, and its place in `CODECS`.
"""

import numpy as np

from flower_dp.core import checks
from flower_dp.core.compression import coordinates
from flower_dp.core.compression import inline as _inline
from flower_dp.core.compression import qsgd as _qsgd
from flower_dp.core.compression.payload import Header as Header
from flower_dp.core.compression.payload import Payload as Payload

dense, inline = coordinates.dense, _inline.inline
rand_k, random_mask = coordinates.rand_k, coordinates.random_mask
top_k, top_k_bytes, top_k_indices = coordinates.top_k, coordinates.top_k_bytes, coordinates.top_k_indices
qsgd = _qsgd.qsgd
check_levels, qsgd_bytes, MOST_LEVELS = _qsgd.check_levels, _qsgd.qsgd_bytes, _qsgd.MOST_LEVELS
qsgd_norm_ratio, qsgd_variance = _qsgd.qsgd_norm_ratio, _qsgd.qsgd_variance
num_kept, smallest = coordinates.num_kept, coordinates.smallest

# Every codec, by the header's `encoding`.
CODECS = {codec.name: codec for codec in (*coordinates.CODECS, _inline.CODEC, _qsgd.CODEC)}


def decode(payload: Payload, length: int, *, mask: np.ndarray | None = None) -> np.ndarray:
    """Return the dense float32 or float64 vector [length] of a payload; coordinates that were not sent are 0.

    Raises:
        ValueError: if header or arrays are not exactly what an honest sender of a vector of this length makes.
    """
    header, arrays = payload.header, payload.arrays
    if header.get("length") != length:
        raise ValueError(f"payload length={header.get('length')!r}: the model has {length} parameters")
    codec = CODECS[checks.one_of("payload encoding", header.get("encoding"), tuple(CODECS))]
    if len(arrays) != codec.num_arrays:
        raise ValueError(f"payload has {len(arrays)} arrays: encoding {codec.name} has {codec.num_arrays}")
    if unknown := set(header) - {"encoding", "length", *codec.keys}:
        raise ValueError(f"payload header has keys that encoding {codec.name} does not have: {sorted(unknown, key=str)[:4]}")
    return codec.read(payload, length, mask)
