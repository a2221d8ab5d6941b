"""Vectors and payloads <-> Flower array records. Sizes are checked before any memory is taken."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord

from flower_dp.core.compression import Header, Payload
from flower_dp.core.vectors import Layout
from flower_dp.wire.structs import KEY

_NPY_HEADER_BYTES = 1024
# Bytes of an array of the server's own model.
_LARGEST_ARRAY = 2**40
# The one form in which NumPy writes an array of numbers (format 1.0). Nothing else is parsed: a forged header can make a general
# parser fail in many ways.
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)\{'descr': '(?P<dtype>[<>|][fiub][0-9]{1,2})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:[0-9]{1,18}, ?)*(?:[0-9]{1,18})?)\), \} *\n",
    re.DOTALL,
)
# Arrays in a payload: an honest one has fewer.
_MOST_PAYLOAD_ARRAYS = 4


def payload_of(record: ArrayRecord, header: Header, length: int) -> Payload:
    """Return the payload of a reply to a model of `length` parameters.

    Raises:
        ValueError: if an array is larger than an honest one can be, or differs from its own header.
    """
    if len(record) > _MOST_PAYLOAD_ARRAYS:
        raise ValueError(f"payload has {len(record)} arrays: at most {_MOST_PAYLOAD_ARRAYS}")
    return Payload(arrays=tuple(numpy_arrays(record, limit=8 * length).values()), header=header)


def with_vectors(arrays: ArrayRecord, vectors: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a model's record with the vectors of a request behind its arrays: a `NumPyClient` receives no other record.

    A record that already has them is returned unchanged, so that all messages of a round share one copy.
    """
    new = {f"{KEY}.{name}": vector for name, vector in vectors.items() if f"{KEY}.{name}" not in arrays}
    named = {name: FlowerArray(np.ascontiguousarray(vector)) for name, vector in new.items()}
    return ArrayRecord({**arrays, **named}) if named else arrays


def numpy_arrays(record: ArrayRecord, *, limit: int) -> dict[str, np.ndarray]:
    """Return a record's arrays as read-only NumPy views, at most `limit` bytes each.

    Raises:
        ValueError: if an array is larger, or is not a plain .npy array of exactly its header's size.
    """
    return {name: _numpy(name, array, limit) for name, array in record.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """The global model as it is sent: the trained arrays as one vector, and the frozen arrays, which nothing may change.

    Attributes:
        names: names of all arrays, in the order in which they are sent.
        layout: layout of the trained arrays.
        vector: values of the trained arrays [d], float32.
        frozen: frozen arrays, by name.

    Example:
        >>> import numpy as np
        >>> from flwr.app import Array, ArrayRecord
        >>> from flower_dp.wire import Model
        >>> record = ArrayRecord({"weight": Array(np.ones(2, np.float32)), "mask": Array(np.array([-np.inf, 0.0]))})
        >>> model = Model.of(record, frozen=["mask"])
        >>> model.vector.tolist(), model.frozen_positions
        ([1.0, 1.0], (1,))
    """

    names: tuple[str, ...]
    layout: Layout
    vector: np.ndarray
    frozen: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, record: ArrayRecord, *, frozen: Sequence[str] = ()) -> "Model":
        """Read this server's own model.

        Raises:
            ValueError: if a trained array can't be made private (see `Layout.of`), has dtype float16, or has entries that are
                not finite as float32; or if `frozen` has an unknown name.
        """
        arrays = numpy_arrays(record, limit=_LARGEST_ARRAY)
        if unknown := sorted(set(frozen) - set(arrays)):
            raise ValueError(f"frozen_arrays: the model has no array {unknown[0]!r}; it has {', '.join(arrays)}")
        trained = {name: array for name, array in arrays.items() if name not in frozen}
        layout = Layout.of(trained)
        for name, dtype in zip(layout.names, layout.dtypes, strict=True):
            if dtype == "float16":
                raise ValueError(
                    f"array {name!r} has dtype float16, whose rounding would swallow the steps of most rounds: start with "
                    "float32, for example ArrayRecord(model.float().state_dict())"
                )
        for name, array in trained.items():
            if not np.isfinite(array).all():
                raise ValueError(f"array {name!r} has NaN or infinite entries; if it is a constant, name it in frozen_arrays")
        with np.errstate(over="ignore"):
            vector = layout.flatten(trained)
        if not np.isfinite(vector).all():
            name = next(name for name, part in layout.unflatten(vector).items() if not np.isfinite(part).all())
            raise ValueError(f"array {name!r} has entries beyond the range of float32, in which models are trained")
        return cls(names=tuple(arrays), layout=layout, vector=vector, frozen={name: arrays[name] for name in frozen})

    @property
    def frozen_positions(self) -> tuple[int, ...]:
        """The positions of the frozen arrays among all arrays."""
        return tuple(position for position, name in enumerate(self.names) if name in self.frozen)

    @property
    def frozen_bytes(self) -> int:
        """The bytes of the frozen arrays, in double precision."""
        return sum(8 * array.size for array in self.frozen.values())

    def read(self, record: ArrayRecord) -> np.ndarray:
        """Return the trained arrays of a reply as one float32 vector: by name, or by position if the sender has no names.

        Raises:
            ValueError: if count, names or shapes are not this model's, or a frozen array was changed.
        """
        if len(record) != len(self.names):
            raise ValueError(f"model has {len(record)} arrays: must be {len(self.names)}")
        limit = max(8 * max(self.layout.size, 1), self.frozen_bytes)
        arrays = numpy_arrays(record, limit=limit)
        if set(arrays) != set(self.names) and all(name.isdigit() for name in arrays):
            arrays = dict(zip(self.names, arrays.values(), strict=True))
        for name, kept in self.frozen.items():
            if name not in arrays or not np.array_equal(arrays[name], kept, equal_nan=kept.dtype.kind == "f"):
                raise ValueError(f"array {name!r} was changed or left out, though frozen_arrays names it")
        with np.errstate(over="ignore"):  # `ReplyLimits` refuses infinite entries
            vector: np.ndarray = self.layout.flatten({name: array for name, array in arrays.items() if name not in self.frozen})
        return vector

    def record(self, vector: np.ndarray) -> ArrayRecord:
        """Return a vector and the frozen arrays as an array record with the model's own names, shapes and dtypes."""
        arrays = {**self.layout.unflatten(vector, copy=False), **self.frozen}
        return ArrayRecord({name: FlowerArray(np.asarray(arrays[name], order="C")) for name in self.names})


def _numpy(name: str, array: FlowerArray, limit: int) -> np.ndarray:
    if array.stype != "numpy.ndarray" or len(array.data) > limit + _NPY_HEADER_BYTES:
        raise ValueError(f"array {name!r} has {len(array.data)} bytes of {array.stype!r}: at most {limit} of numpy.ndarray")
    header = _NPY_HEADER.match(array.data[: _NPY_HEADER_BYTES + 10])
    if header is None:
        raise ValueError(f"array {name!r} is not a .npy array (format 1.0) of float, integer or bool dtype")
    dtype_name, fortran = header["dtype"].decode(), header["fortran"] == b"True"
    try:
        dtype = np.dtype(dtype_name)
    except TypeError:
        raise ValueError(f"array {name!r} has dtype {dtype_name!r}: this machine has no such dtype") from None
    shape = tuple(int(size) for size in header["shape"].split(b",") if size.strip())
    start = header.end()
    # Checked before any memory is taken: a forged header may claim any shape.
    if 10 + int.from_bytes(header["length"], "little") != start or math.prod(shape) * dtype.itemsize != len(array.data) - start:
        raise ValueError(f"array {name!r} has {len(array.data) - start} bytes: its header says {dtype} of shape {shape}")
    values = np.frombuffer(array.data, dtype=dtype, offset=start)
    return values.reshape(shape, order="F" if fortran else "C")
