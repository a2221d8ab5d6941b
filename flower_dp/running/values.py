"""Values of settings from a command line or a TOML file, and suggestions for unknown keys."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_dp.core import checks

Value = bool | int | float | str
_TYPES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
# The least similarity of a suggested name, in [0, 1] (`difflib`).
_ALIKE = 0.6
# Ends of keys whose values are paths.
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


def suggested(key: str, known: Mapping[str, Any], method: str) -> str:
    """Return the setting that the user probably meant, of the chosen method or a common one; "" if none is similar.

    Args:
        key: unknown key.
        known: all settings by key; those of tables have a prefix.
        method: method of the run, whose table has its name; "" if there are no methods.

    Example:
        >>> from flower_dp.running.values import suggested
        >>> known = dict.fromkeys(["num-rounds", "dp-fedavg.target-epsilon", "dp-fedavg.clip-norm", "nbafl.epsilon"])
        >>> suggested("epsilon", known, "dp-fedavg"), suggested("nbafl.clip", known, "dp-fedavg")
        ('dp-fedavg.target-epsilon', 'dp-fedavg.clip-norm')
    """
    name = key.rpartition(".")[2]
    of_method = {other.removeprefix(f"{method}."): other for other in known if method and other.startswith(f"{method}.")}
    common = {other: other for other in known if "." not in other}
    of_others = {other.rpartition(".")[2]: other for other in known}
    for names, cutoff in ((of_method, 1.0), (common | of_method, _ALIKE), (of_others, _ALIKE)):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[close[0]]
    return ""


def _absolute(key: str, value: Value, base: Path) -> Value:
    # The app runs in another working directory, where a relative path would be wrong.
    if not isinstance(value, str) or not key.endswith(_PATHS):
        return value
    # A prefix before a colon names the source of the folder's content; a single letter is a drive.
    prefix = match.group() if (match := re.match("[a-z]{2,}:", value)) else ""
    folder = value.removeprefix(prefix)
    return prefix + str(base / Path(folder).expanduser()) if folder else value
