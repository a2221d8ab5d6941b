"""Conversion between named arrays and one flat vector: the only code that knows shapes.

Arrays may be NumPy arrays or torch tensors on any device; a `Layout` made from one kind also takes the other.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

# Any array of an array-API library: a NumPy array, a torch tensor.
Array = Any

_FLOATS = ("float16", "bfloat16", "float32", "float64")
# The vector itself is float32.
_LARGEST = {
    "float16": 65504.0,
    "bfloat16": 255 * 2.0**120,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float64": (2 - 2.0**-23) * 2.0**127,
}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names, shapes and dtypes of a model's trainable arrays, in the order of the flat vector.

    The vector is float32 of length `size`; 0-d arrays take one entry, empty arrays none.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.vectors import Layout
        >>> model = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
        >>> layout = Layout.of(model)
        >>> vector = layout.flatten(model)
        >>> vector.shape, layout.unflatten(vector)["weight"].shape
        ((8,), (2, 3))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> "Layout":
        """Return the layout of named arrays.

        Raises:
            ValueError: if an array is not floating point, or holds batch statistics, which training changes but clipping
                and noise must not touch; the message names the layer and what to use instead.
        """
        if not arrays:
            raise ValueError("arrays: the model has no arrays")
        for name, array in arrays.items():
            dtype = _dtype_name(array)
            if name.rsplit(".", 1)[-1] in _STATISTICS:
                layer = name.rpartition(".")[0] or name
                problem = "holds batch statistics that depend on private data and can't be made private"
                raise ValueError(f"layer {layer!r}: {name!r} {problem}; use GroupNorm (or LayerNorm) instead of BatchNorm")
            if dtype not in _FLOATS:
                floats = f"only floating-point arrays ({', '.join(_FLOATS)}) can be trained with differential privacy"
                raise ValueError(f"array {name!r} has dtype {dtype}: {floats}; leave buffers out")
        return cls(
            names=tuple(arrays),
            shapes=tuple(tuple(int(n) for n in array.shape) for array in arrays.values()),
            dtypes=tuple(_dtype_name(array) for array in arrays.values()),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each array."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Length of the flat vector."""
        return sum(self.sizes)

    def flatten(self, arrays: Mapping[str, Array]) -> Array:
        """Return the arrays as one new float32 vector, in this layout's order.

        Raises:
            ValueError: if names or shapes differ from the layout, or an array is not floating point.
        """
        if set(arrays) != set(self.names):
            missing, extra = sorted(set(self.names) - set(arrays)), sorted(set(arrays) - set(self.names))
            raise ValueError(f"arrays: names differ from the model's (missing {missing}, unknown {extra})")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(arrays[name].shape) != shape:
                raise ValueError(f"array {name!r} has shape {tuple(arrays[name].shape)}: the model's is {shape}")
            if _dtype_name(arrays[name]) not in _FLOATS:
                raise ValueError(f"array {name!r} has dtype {_dtype_name(arrays[name])}: must be one of {', '.join(_FLOATS)}")
        xp = array_namespace(*arrays.values())
        parts = [xp.astype(xp.reshape(arrays[name], (-1,)), xp.float32, copy=False) for name in self.names]
        return xp.concat(parts)

    def unflatten(self, vector: Array, *, copy: bool = True) -> dict[str, Array]:
        """Return the named arrays of a vector, each in its own shape and dtype: new arrays, or views if no copy is needed.

        Raises:
            ValueError: if the vector's shape is not (size,).
        """
        if tuple(vector.shape) != (self.size,):
            raise ValueError(f"vector has shape {tuple(vector.shape)}: the model's is ({self.size},)")
        xp, arrays = array_namespace(vector), {}
        for name, shape, dtype, part in self._parts(vector):
            arrays[name] = xp.astype(xp.reshape(part, shape), getattr(xp, dtype), copy=copy)
        return arrays

    def _parts(self, vector: Array) -> Iterator[tuple[str, tuple[int, ...], str, Array]]:
        """Yield name, shape and dtype of every array, and its part of a vector."""
        start = 0
        for name, shape, dtype, size in zip(self.names, self.shapes, self.dtypes, self.sizes, strict=True):
            yield name, shape, dtype, vector[start : start + size]
            start += size

    def overflows(self, vector: Array) -> tuple[str, ...]:
        """Return the names of arrays whose entries, taken from a vector, are NaN or beyond the range of the array's own dtype."""
        xp, names = array_namespace(vector), []
        for name, shape, dtype, part in self._parts(vector):
            if 0 not in shape and not bool((xp.min(part) >= -_LARGEST[dtype]) & (xp.max(part) <= _LARGEST[dtype])):
                names.append(name)
        return tuple(names)


def _dtype_name(array: Array) -> str:
    """Return `float32` for NumPy's and for torch's float32."""
    return str(array.dtype).rpartition(".")[2]
