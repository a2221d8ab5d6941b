"""Values of settings, as a command line or a TOML file gives them, and what is suggested for a key that does not exist."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_dp.core import checks

Value = bool | int | float | str
_TYPES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
# How alike two names must be for one to be suggested as what was meant.
_ALIKE = 0.6
# Of keys whose values are paths.
_PATHS = ("-dir", "-ledger")


def from_toml(key: str, value: Any, default: Value, base: Path) -> Value:
    """Return a value in the type of the setting's default; a relative path starts at `base`.

    Raises:
        ValueError: it is of another type.
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
        ValueError: it is of another type.
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
    """Return the setting that was probably meant: one of the chosen method, or a common one; "" if none is like it.

    Args:
        key: a key that does not exist.
        known: all settings by key; those of tables have a prefix.
        method: the run's method, whose table has its name; "" where there are no methods.

    Example:
        >>> from flower_dp.running.values import suggested
        >>> known = dict.fromkeys(["num-rounds", "dp-fedavg.target-epsilon", "dp-fedavg.clip-norm", "nbafl.epsilon"])
        >>> suggested("epsilon", known, "dp-fedavg"), suggested("nbafl.clip", known, "dp-fedavg")
        ('dp-fedavg.target-epsilon', 'dp-fedavg.clip-norm')
    """
    name = key.rpartition(".")[2]
    of_method = {one.removeprefix(f"{method}."): one for one in known if method and one.startswith(f"{method}.")}
    common = {one: one for one in known if "." not in one}
    of_others = {one.rpartition(".")[2]: one for one in known}
    for names, cutoff in ((of_method, 1.0), (common | of_method, _ALIKE), (of_others, _ALIKE)):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[close[0]]
    return ""


def _absolute(key: str, value: Value, base: Path) -> Value:
    # The app runs in another working directory, where a relative path would be wrong.
    if not isinstance(value, str) or not key.endswith(_PATHS):
        return value
    # A prefix before a colon says how the folder is to be filled; a single letter is a drive.
    how = prefix.group() if (prefix := re.match("[a-z]{2,}:", value)) else ""
    folder = value.removeprefix(how)
    return how + str(base / Path(folder).expanduser()) if folder else value
