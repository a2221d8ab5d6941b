"""Frozen values as named arrays and JSON: what is needed to store a state, read it back, and compare two."""

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# Dataclasses that may be stored, by name.
_KINDS: dict[str, type] = {}

# The first line of a file: what it is, and the number of its format.
_MAGIC, FORMAT = b"flower-dp state ", 1
_LONGEST_LINE = 80
_TEXT = "text"


def stored(kind: type[T]) -> type[T]:
    """Mark a frozen dataclass as one that can be stored; two of them are equal if all their fields are, arrays included.

    Raises:
        ValueError: if it is no dataclass, or another one of its name is marked already.

    Example:
        >>> from dataclasses import dataclass
        >>> import numpy as np
        >>> from flower_dp.core.stored import from_stored, stored, to_stored
        >>> @stored
        ... @dataclass(frozen=True, slots=True, kw_only=True, eq=False)
        ... class Clip:
        ...     norm: float
        ...     past: np.ndarray
        >>> arrays, text = to_stored(Clip(norm=0.5, past=np.zeros(2)))
        >>> text
        '{"Clip": {"norm": 0.5, "past": {"array": "past"}}}'
        >>> from_stored(arrays, text) == Clip(norm=0.5, past=np.zeros(2))
        True
    """
    known = _KINDS.get(kind.__name__, kind)
    # The same class again, from a cell of a notebook that is run twice, takes the place of the first.
    if not is_dataclass(kind) or (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"{kind.__name__}: must be a dataclass of a name that no other stored one has")
    _KINDS[kind.__name__] = kind
    setattr(kind, "__eq__", _equal)  # noqa: B010
    setattr(kind, "__hash__", None)  # noqa: B010
    return kind


def to_stored(value: Any) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays of a value, by their path in it, and all else as JSON.

    Raises:
        ValueError: for a part that is none of: a stored dataclass, array, mapping with text or integer keys, list, tuple, number,
            text, truth value, None.
    """
    arrays: dict[str, np.ndarray] = {}
    return arrays, json.dumps(_put(value, "", arrays))


def from_stored(arrays: Mapping[str, np.ndarray], text: str) -> Any:
    """Return the value that `to_stored` has stored.

    Raises:
        ValueError: if the text is malformed, names a dataclass that is not known, or an array that is not there.
    """
    try:
        return _get(json.loads(text), arrays)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"stored state: malformed: {error!r}") from error


def packed(value: Any) -> bytes:
    """Return a value as the content of a file: a line with the number of the format, one with a SHA-256, and NumPy's npz.

    Raises:
        ValueError: as `to_stored`.

    Example:
        >>> from flower_dp.core.stored import packed, unpacked
        >>> unpacked(packed({"rounds": 3}))
        {'rounds': 3}
    """
    arrays, text = to_stored(value)
    names = json.dumps([text, list(arrays)]).encode()
    body = io.BytesIO()
    numbered = {str(place): array for place, array in enumerate(arrays.values())}
    np.savez(body, allow_pickle=False, **{_TEXT: np.frombuffer(names, np.uint8)}, **numbered)
    content = body.getvalue()
    return b"%s%d\n%s\n%s" % (_MAGIC, FORMAT, hashlib.sha256(content).hexdigest().encode(), content)


def unpacked(content: bytes) -> Any:
    """Return the value of such a file.

    Raises:
        ValueError: if it is another file, of a newer format, cut off, or changed.
    """
    first, _, rest = content.partition(b"\n")
    number = first.removeprefix(_MAGIC)
    if not first.startswith(_MAGIC) or len(first) > _LONGEST_LINE or not number.isdigit():
        raise ValueError("is no state of flower-dp")
    if int(number) != FORMAT:
        raise ValueError(f"has format {int(number)}; this version of flower-dp reads format {FORMAT}")
    said, _, body = rest.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != said:
        raise ValueError("is damaged: its SHA-256 is not the one in it")
    with np.load(io.BytesIO(body), allow_pickle=False) as found:
        text, names = json.loads(found[_TEXT].tobytes())
        return from_stored({name: found[str(place)] for place, name in enumerate(names)}, text)


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911
    """Return whether two values are equal, arrays included."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if is_dataclass(one):
        return all(same(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _equal(self: Any, other: Any) -> bool:
    return same(self, other)


def _put(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return {"array": path}
    if is_dataclass(value) and _KINDS.get(type(value).__name__) is type(value):
        return {
            type(value).__name__: {
                part.name: _put(getattr(value, part.name), _in(path, part.name), arrays) for part in fields(value)
            }
        }
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {"table": [[key, _put(one, _in(path, key), arrays)] for key, one in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_put(one, _in(path, place), arrays) for place, one in enumerate(value)]}
    if isinstance(value, list):
        return [_put(one, _in(path, place), arrays) for place, one in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(f"{path}={value!r}: a {type(value).__name__} can't be stored")


def _get(node: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(node, list):
        return [_get(one, arrays) for one in node]
    if not isinstance(node, dict):
        return node
    ((kind, what),) = node.items()
    if kind == "array":
        return arrays[what]
    if kind == "table":
        return {key: _get(one, arrays) for key, one in what}
    if kind == "tuple":
        return tuple(_get(one, arrays) for one in what)
    return _KINDS[kind](**{name: _get(one, arrays) for name, one in what.items()})


def _in(path: str, name: object) -> str:
    return f"{path}/{name}" if path else str(name)
