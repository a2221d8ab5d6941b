"""Texts that cross the wire: each holds one closed, typed struct, and is read within a size limit."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from flower_dp.core import checks

# This package's key in a config record, and the name of its record in query messages and replies.
KEY = "flower-dp"
# The key of the SHA-256 of the model's frozen base, beside `KEY`.
BASE = "flower-dp-base"
# The key of a whole node's refusal.
REFUSED = "flower-dp-refused"
PROTOCOL = 5
# Characters of an error, which may quote a forged text.
_MOST_ERROR = 500


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A value that crosses the wire, or a part of one.

    The decoder refuses unknown and missing keys, values of another type, and numbers out of range. `__post_init__` runs at
    construction and at decoding, so a peer can send nothing that a constructor refuses. A field at its default is not sent.
    """


P = TypeVar("P", bound=Part)


class _Protocol(msgspec.Struct):
    # A struct's tag would be optional; this field is required. Other keys are skipped, whatever they hold.
    protocol: Literal[5]


def write(value: Part) -> str:
    """Return the text of a struct."""
    return f'{{"protocol":{PROTOCOL},' + msgspec.json.encode(value, enc_hook=_plain).decode()[1:]


def read(kind: type[P], text: str, *, most: int) -> P:
    """Read a struct from a text of at most `most` characters.

    Raises:
        ValueError: naming the place, if the text is longer, is not of this protocol, or is not such a struct.
    """
    if len(text) > most:
        raise ValueError(f"{KEY!r} text has {len(text)} characters: at most {most}")
    try:
        sent = _decoder(kind).decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        _check_protocol(text)
        place = str(error).replace("`$.", "`").replace("`", "")
        raise ValueError(checks.one_line(f"{kind.__name__.strip('_').lower()}: {place}", most=_MOST_ERROR)) from None
    return kind(**{name: getattr(sent, name) for name in kind.__struct_fields__})


def _check_protocol(text: str) -> None:
    try:
        msgspec.json.decode(text, type=_Protocol)
    except msgspec.ValidationError:
        remedy = "server and client need the same release of flower-dp"
        raise ValueError(f"{KEY!r} text is not of protocol {PROTOCOL}: {remedy}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise ValueError(f"{KEY!r} text is not JSON") from None


@cache
def _decoder(kind: type[Part]) -> msgspec.json.Decoder[Any]:
    sent = msgspec.defstruct(
        kind.__name__, [("protocol", Literal[PROTOCOL])], bases=(kind,), frozen=True, kw_only=True, forbid_unknown_fields=True
    )
    return msgspec.json.Decoder(sent)


def _plain(value: Any) -> Any:
    """Return the JSON form of a NumPy value, or of a mapping that is not a dict."""
    if isinstance(value, np.ndarray):
        return None  # it is sent as an array; the text has its name
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r}: a {type(value).__name__} can't be sent")
