"""Vectors and payloads <-> Flower array records. Sizes are checked before any memory is taken."""

import math
import re

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord

from flower_dp.core.compression import Header, Payload
from flower_dp.core.vectors import Layout

_NPY_HEADER_BYTES = 1024
# The one form in which NumPy writes an array of numbers (format 1.0). Nothing else is parsed: a general parser of headers can be
# made to fail in many ways by a forged one.
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)\{'descr': '(?P<dtype>[<>|][fiub][0-9]{1,2})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:[0-9]{1,18}, ?)*(?:[0-9]{1,18})?)\), \} *\n",
    re.DOTALL,
)
# Arrays in a payload: an honest one has fewer.
_MOST_PAYLOAD_ARRAYS = 4


def payload_of(record: ArrayRecord, header: Header, length: int) -> Payload:
    """Return the payload of a reply, none of it larger than an honest one of `length` parameters can be.

    Raises:
        ValueError: if an array is oversized or not what its own header says.
    """
    if len(record) > _MOST_PAYLOAD_ARRAYS:
        raise ValueError(f"payload has {len(record)} arrays: at most {_MOST_PAYLOAD_ARRAYS}")
    return Payload(arrays=tuple(numpy_arrays(record, limit=8 * length).values()), header=header)


def numpy_arrays(record: ArrayRecord, *, limit: int) -> dict[str, np.ndarray]:
    """Return a record's arrays as read-only NumPy views, at most `limit` bytes each.

    Raises:
        ValueError: if an array is larger, or is not a plain .npy array of exactly the size that its header says.
    """
    return {name: _numpy(name, array, limit) for name, array in record.items()}


def model_vector(record: ArrayRecord, layout: Layout) -> np.ndarray:
    """Return a model's arrays as one float32 vector: by name, or by position where the sender has no names.

    Raises:
        ValueError: if count, names or shapes are not the layout's.
    """
    if len(record) != len(layout.names):
        raise ValueError(f"model has {len(record)} arrays: must be {len(layout.names)}")
    arrays = numpy_arrays(record, limit=8 * max(layout.size, 1))
    if set(arrays) != set(layout.names) and len(arrays) == len(layout.names) and all(name.isdigit() for name in arrays):
        arrays = dict(zip(layout.names, arrays.values(), strict=True))
    with np.errstate(over="ignore"):  # infinite entries are refused by whoever adds them up
        vector: np.ndarray = layout.flatten(arrays)
    return vector


def model_record(vector: np.ndarray, layout: Layout) -> ArrayRecord:
    """Return a vector as a model's array record, under the model's own names, shapes and dtypes."""
    return ArrayRecord({name: FlowerArray(np.asarray(array, order="C")) for name, array in layout.unflatten(vector).items()})


def _numpy(name: str, array: FlowerArray, limit: int) -> np.ndarray:
    if array.stype != "numpy.ndarray" or len(array.data) > limit + _NPY_HEADER_BYTES:
        raise ValueError(f"array {name!r} has {len(array.data)} bytes of {array.stype!r}: at most {limit} of numpy.ndarray")
    header = _NPY_HEADER.match(array.data[: _NPY_HEADER_BYTES + 10])
    if header is None:
        raise ValueError(f"array {name!r} is not a .npy array (format 1.0) of float, integer or bool dtype")
    dtype, fortran = np.dtype(header["dtype"].decode()), header["fortran"] == b"True"
    shape = tuple(int(size) for size in header["shape"].split(b",") if size.strip())
    start = header.end()
    # Checked before any memory is taken: a forged header may claim any shape.
    if 10 + int.from_bytes(header["length"], "little") != start or math.prod(shape) * dtype.itemsize != len(array.data) - start:
        raise ValueError(f"array {name!r} says {dtype} of shape {shape}, and has {len(array.data) - start} bytes")
    values = np.frombuffer(array.data, dtype=dtype, offset=start)
    return values.reshape(shape, order="F" if fortran else "C")
