"""Frozen values as bytes: store a state, read it back, compare two."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

# Serializable classes by name: the class, its function to parts, and its function from parts.
_KINDS: dict[str, tuple[type, Callable[[Any], Mapping[str, Any]], Callable[[Mapping[str, Any]], Any]]] = {}

# The first line of a file: its kind, and the number of its format.
_MAGIC, FORMAT = b"flower-dp state ", 3
_LONGEST_LINE = 80
# Limit of whole numbers: msgpack has 64 bits.
_MOST_INT = 2**63


def serializable(kind: type[T]) -> type[T]:
    """Mark a frozen dataclass as serializable. Two of its values are equal if all their fields are, arrays included.

    Raises:
        ValueError: if it is not a dataclass, or another class of its name is registered.

    Example:
        >>> from dataclasses import dataclass
        >>> import numpy as np
        >>> from flower_dp.core.serialization import dump_bytes, load_bytes, serializable
        >>> @serializable
        ... @dataclass(frozen=True, slots=True, kw_only=True, eq=False)
        ... class Clip:
        ...     norm: float
        ...     past: np.ndarray
        >>> load_bytes(dump_bytes(Clip(norm=0.5, past=np.zeros(2)))) == Clip(norm=0.5, past=np.zeros(2))
        True
    """
    register_serializable(kind)
    setattr(kind, "__eq__", same)  # noqa: B010
    setattr(kind, "__hash__", None)  # noqa: B010
    return kind


def register_serializable(
    kind: type[T],
    parts: Callable[[T], Mapping[str, Any]] | None = None,
    of_parts: Callable[[Mapping[str, Any]], T] | None = None,
) -> None:
    """Register a class as serializable: by the fields of a dataclass, or by functions to parts and from parts.

    Raises:
        ValueError: if it is not a dataclass and has no such functions, or another class of its name is registered.
    """
    known, *_ = _KINDS.get(kind.__name__, (kind,))
    # A class of a notebook's cell that is run twice replaces itself.
    if (not is_dataclass(kind) and parts is None) or (known.__module__, known.__qualname__) != (
        kind.__module__,
        kind.__qualname__,
    ):
        raise ValueError(f"{kind.__name__}: must be a dataclass, and no other serializable class may have its name")
    _KINDS[kind.__name__] = kind, parts or parts_of, of_parts or (lambda values: kind(**values))


def parts_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass."""
    return {part.name: getattr(value, part.name) for part in fields(value)}


def dump_bytes(value: Any) -> bytes:
    """Return a value as the content of a file: a line with the format's number, one with a SHA-256, and msgpack.

    Raises:
        ValueError: for a part that is none of: serializable value, array, mapping with text or integer keys, list, tuple, number,
            text, truth value, None.

    Example:
        >>> from flower_dp.core.serialization import dump_bytes, load_bytes
        >>> load_bytes(dump_bytes({"rounds": 3}))
        {'rounds': 3}
    """
    body = msgspec.msgpack.encode(_put(value, "state"))
    return b"%s%d\n%s\n%s" % (_MAGIC, FORMAT, hashlib.sha256(body).hexdigest().encode(), body)


def load_bytes(content: bytes) -> Any:
    """Return the value in the content of a file.

    Raises:
        ValueError: if it is another kind of file, has another format, is cut off or changed, or has an unknown class.
    """
    first, _, rest = content.partition(b"\n")
    number = first.removeprefix(_MAGIC)
    if not first.startswith(_MAGIC) or len(first) > _LONGEST_LINE or not number.isdigit():
        raise ValueError("is not a state of flower-dp")
    if int(number) != FORMAT:
        raise ValueError(f"has format {int(number)}; this version of flower-dp reads format {FORMAT}")
    stored, _, body = rest.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != stored:
        raise ValueError("is damaged: its SHA-256 is not the one in it")
    try:
        return _get(msgspec.msgpack.decode(body))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is malformed: {error!r}") from error


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911
    """Return whether two values are equal, arrays included."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if is_dataclass(one):
        parts = parts_of if (kind := _kind_of(one)) is None else kind[1]
        return same(parts(one), parts(other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _kind_of(value: Any) -> Any:
    """Return the entry of a value's class in `_KINDS`; None if the class is not serializable."""
    kind = _KINDS.get(type(value).__name__)
    return kind if kind is not None and kind[0] is type(value) else None


def _put(value: Any, path: str) -> Any:
    """Return a value as msgpack takes it; the first item of a list says what it stands for (list, tuple, array, dataclass)."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
        return [None, value.dtype.str, value.shape, value.tobytes()]
    if (kind := _kind_of(value)) is not None:
        return [kind[0].__name__, {name: _put(part, f"{path}/{name}") for name, part in kind[1](value).items()}]
    if isinstance(value, list | tuple):
        return [isinstance(value, tuple), *(_put(item, f"{path}/{index}") for index, item in enumerate(value))]
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: _put(item, f"{path}/{key}") for key, item in value.items()}
    if value is None or type(value) in (bool, float, str) or (type(value) is int and abs(value) < _MOST_INT):
        return value
    raise ValueError(f"{path}={value!r}: a {type(value).__name__} can't be stored")


def _get(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _get(item) for key, item in node.items()}
    if not isinstance(node, list):
        return node
    kind, *parts = node
    if kind is None:
        dtype, shape, content = parts
        return np.frombuffer(content, dtype).reshape(shape).copy()
    if isinstance(kind, str):
        return _KINDS[kind][2](_get(*parts))
    return tuple(map(_get, parts)) if kind else list(map(_get, parts))
