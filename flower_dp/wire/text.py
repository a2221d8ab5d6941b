"""The JSON text inside a message: read with a limit, and with exactly the keys that it must have."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# The key of ours in a config record, and the name of our record in query messages and replies.
KEY = "flower-dp"
# The key beside it under which a server names the frozen base of its model, by its SHA-256.
BASE = "flower-dp-base"
PROTOCOL = 4


def load(text: str, most: int) -> dict[str, Any]:
    """Return the table in a text of at most so many characters, without its protocol.

    Raises:
        ValueError: if it is longer, is no JSON table, or is of another protocol.
    """
    if len(text) > most:
        raise ValueError(f"{KEY!r} text has {len(text)} characters: at most {most}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{KEY!r} text is not JSON") from None
    if not isinstance(data, dict) or data.get("protocol") != PROTOCOL:
        raise ValueError(f"{KEY!r} text is not of protocol {PROTOCOL}: server and client need the same release of flower-dp")
    del data["protocol"]
    return data


def check_keys(what: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check that a table has these keys and no others.

    Raises:
        ValueError: that names what is unknown and what is missing.
    """
    if set(table) != set(names):
        unknown, missing = sorted(set(table) - set(names))[:8], sorted(set(names) - set(table))
        raise ValueError(f"{what}: unknown keys {unknown}, missing {missing}; must have {', '.join(names)}")


def scalar(value: Any) -> Any:
    """A NumPy scalar as the Python number that JSON knows."""
    return value.item()
