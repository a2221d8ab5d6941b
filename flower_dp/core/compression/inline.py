"""A short vector inside its header, for messages that carry no arrays."""

import base64
import binascii

import numpy as np

from flower_dp.core.compression.payload import Codec, Payload
from flower_dp.core.vectors import Array

# Longer vectors belong in arrays.
_LONGEST = 64


def inline(vector: Array) -> Payload:
    """Encode a vector of at most 64 coordinates, 8 bytes each, as text.

    Raises:
        ValueError: if it is longer.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.compression import decode, inline
        >>> decode(inline(np.array([0.1, -2.0])), 2).tolist()
        [0.1, -2.0]
    """
    values = np.asarray(vector if isinstance(vector, np.ndarray) else vector.detach().to("cpu").numpy(), dtype="<f8")
    if values.ndim != 1 or values.size > _LONGEST:
        raise ValueError(f"vector has shape {values.shape}: must have at most {_LONGEST} coordinates")
    text = base64.b64encode(values.tobytes()).decode("ascii")
    return Payload(arrays=(), header={"encoding": "inline", "length": values.size, "values": text})


def _read(payload: Payload, length: int, mask: np.ndarray | None) -> np.ndarray:
    text = payload.header.get("values")
    if length > _LONGEST or not isinstance(text, str) or len(text) != -(-8 * length // 3) * 4:
        raise ValueError(f"payload values: must be the text of {length} numbers, at most {_LONGEST}")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("payload values: are not base64") from None
    if len(data) != 8 * length:
        raise ValueError(f"payload values: have {len(data)} bytes, must have {8 * length}")
    return np.frombuffer(data, dtype="<f8").astype(np.float64)


CODEC = Codec(name="inline", num_arrays=0, keys=("values",), read=_read)
