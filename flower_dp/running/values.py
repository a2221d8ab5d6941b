"""Values of settings from a command line or a TOML file, and suggestions for unknown keys."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_dp.core import checks

Value = bool | int | float | str
_TYPES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
# How alike two names must be, from 0 to 1, for one to be suggested for the other.
_ALIKE = 0.6
_MAX_SUGGESTED = 5
# The end of an error about an unknown setting that resembles none.
SETTINGS_PAGE = (
    "the page Settings of the documentation lists all (in a checkout: pyproject.toml), `flower-dp presets` the presets"
)
# Of keys whose values are paths.
_PATHS = ("-dir", "-ledger")


def from_toml(key: str, value: Any, default: Value, base: Path) -> Value:
    """Return a value in the type of the setting's default; a relative path starts at `base`.

    Raises:
        ValueError: if the value has another type.
    """
    wanted = type(default)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise checks.bad(key, value, _TYPES[wanted])
    return _absolute(key, value, base)


def from_text(key: str, text: str, default: Value) -> Value:
    """Return a value from the command line in the type of the setting's default; a string needs no quotes.

    Raises:
        ValueError: if the value has another type.
    """
    wanted = type(default)
    if wanted is str:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return _absolute(key, text[1:-1] if quoted else text, Path.cwd())
    try:
        if wanted is bool:
            return {"true": True, "false": False}[text.lower()]
        return int(text) if wanted is int else float(text)
    except (KeyError, ValueError):
        raise ValueError(f"{key}={text}: must be {_TYPES[wanted]}") from None


def suggestions(key: str, known: Mapping[str, Any], method: str) -> list[str]:
    """Return the settings, at most `_MAX_SUGGESTED`, that end in an unknown key, or else the one that is most like it.

    Settings of the chosen method and common ones come before those of other tables.

    Args:
        key: the unknown key.
        known: all settings by key; those of tables have a prefix.
        method: method of the run, whose table has its name; "" if there are no methods.

    Example:
        >>> from flower_dp.running.values import suggestions
        >>> known = dict.fromkeys(["num-rounds", "dp-fedavg.target-epsilon", "dp-fedavg.clip-norm", "nbafl.epsilon"])
        >>> [suggestions(key, known, "dp-fedavg") for key in ("epsilon", "nbafl.clip", "foo")]
        [['dp-fedavg.target-epsilon'], ['dp-fedavg.clip-norm'], []]
    """
    table, _, name = key.rpartition(".")
    tables = {one.rpartition(".")[0] for one in known if one.endswith(f".{name}")}
    if table and (like := difflib.get_close_matches(table, tables, n=1, cutoff=_ALIKE)):
        return [f"{like[0]}.{name}"]
    readable = [one for one in known if "." not in one or (method and one.startswith(f"{method}."))]
    if f"{method}.{name}" in known:
        return [f"{method}.{name}"]
    for ending, keys in ((key, readable), (key, known), (name, readable), (name, known)):
        if ends := [one for one in keys if one.endswith((f".{ending}", f"-{ending}"))]:
            return ends[:_MAX_SUGGESTED]
    for keys in (readable, known):
        by_name = {one.rpartition(".")[2]: one for one in keys}
        if close := difflib.get_close_matches(name, by_name, n=1, cutoff=_ALIKE):
            return [by_name[close[0]]]
    return []


def suggestion_for(key: str, known: Mapping[str, Any], method: str, *, otherwise: str) -> str:
    """Return the end of an error about an unknown key: its suggestions, or else where the settings are listed."""
    *first, last = suggestions(key, known, method) or [""]
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if last else otherwise


def _absolute(key: str, value: Value, base: Path) -> Value:
    # The app runs in another working directory, where a relative path would be wrong.
    if not isinstance(value, str) or not key.endswith(_PATHS):
        return value
    # A prefix before a colon names the source of the folder's content; a single letter is a drive.
    prefix = match.group() if (match := re.match("[a-z]{2,}:", value)) else ""
    folder = value.removeprefix(prefix)
    return prefix + str(base / Path(folder).expanduser()) if folder else value
