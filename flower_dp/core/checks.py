"""Checks of configuration values: every error names the field, the value and the valid range."""

import json
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Longest name of a client, a method or a metric, in characters.
MOST_NAME = 200
# Longest id of a run, in characters.
MOST_ID = 64
# Largest count of a ledger; a float64 holds every whole number up to it.
MOST_COUNT = 2**53
_Bound = float | None


class SettingsError(ValueError):
    """The errors of some settings, one a line. Nothing was started or charged.

    Attributes:
        errors: the single errors, if they are known.
    """

    errors: tuple[ValueError, ...] = ()


class BadValue(ValueError):  # noqa: N818 - raised by the name of what is bad
    """An invalid value. `field` names it, as the message does."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)

    def __reduce__(self) -> tuple[type["BadValue"], tuple[str, str]]:
        """Pickle the error with both arguments: a worker process sends errors to its parent."""
        return type(self), (self.field, str(self))


def bad(field: str, value: object, wanted: str) -> BadValue:
    """Return an error for the caller to raise: the field's value must be what is wanted.

    Example:
        >>> from flower_dp.core.checks import bad
        >>> bad("delta", 2.0, "a finite number < 1")
        BadValue('delta=2.0: must be a finite number < 1')
    """
    return refusal(field, value, f"must be {wanted}")


def refusal(field: str, value: object, why: str) -> BadValue:
    """Return an error for the caller to raise: the field's value is refused, with the reason."""
    return BadValue(field, f"{field}={_shown(value)}: {why}")


class ErrorCollector:
    r"""The errors of some settings, collected so that the user sees all of them at once.

    Example:
        >>> from flower_dp.core.checks import ErrorCollector, integer, number
        >>> collector = ErrorCollector()
        >>> with collector.collect_errors():
        ...     integer("num-rounds", -1, at_least=0)
        >>> with collector.collect_errors():
        ...     number("delta", 2.0, below=1)
        >>> [str(error) for error in collector.errors]
        ['num-rounds=-1: must be a whole number >= 0', 'delta=2.0: must be a finite number < 1']
    """

    def __init__(self) -> None:
        self.errors: list[ValueError] = []

    @contextmanager
    def collect_errors(self) -> Iterator[None]:
        """Collect the ValueError that ends the block, if any; of a `SettingsError`, all its errors."""
        try:
            yield
        except ValueError as error:
            self.errors += getattr(error, "errors", ()) or [error]

    def raise_if_any(self) -> None:
        """Raise the collected errors.

        Raises:
            SettingsError: if there are any; each line once.
        """
        if self.errors:
            lines = [line for error in self.errors for line in str(error).splitlines()]
            refused = SettingsError("\n".join(dict.fromkeys(lines)))
            refused.errors = tuple(self.errors)
            raise refused


def number(
    name: str, value: Any, *, above: _Bound = None, at_least: _Bound = None, below: _Bound = None, at_most: _Bound = None
) -> float:
    """Return `value` as a plain Python float if it is a finite real number within the bounds. Booleans are refused.

    Raises:
        BadValue: naming the field, the value and the valid range.
    """
    sides = ((">", above, operator.gt), (">=", at_least, operator.ge), ("<", below, operator.lt), ("<=", at_most, operator.le))
    bounds = [(sign, bound, keeps) for sign, bound, keeps in sides if bound is not None]
    try:
        plain = not _is_bool(value) and not isinstance(value, str) and hasattr(value, "__float__")
        result = float(value) if plain else math.nan
    except (OverflowError, TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result) or not all(keeps(result, bound) for _, bound, keeps in bounds):
        wanted = " and ".join(f"{sign} {bound:g}" for sign, bound, _ in bounds)
        raise bad(name, value, f"a finite number {wanted}".rstrip())
    return result


def _is_bool(value: Any) -> bool:
    """Return whether a value is a Python boolean, or one or more booleans of NumPy or torch."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).rpartition(".")[2] == "bool"


def integer(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """Return `value` as an int if it is a whole number within the bounds.

    Raises:
        BadValue: naming the field, the value and the valid range.
    """
    bounds = [f"{sign} {bound}" for sign, bound in ((">=", at_least), ("<=", at_most)) if bound is not None]
    wanted = "a whole number" + (" " + " and ".join(bounds) if bounds else "")
    if _is_bool(value) or not hasattr(value, "__index__"):
        raise bad(name, value, wanted)
    result = int(value)
    if (at_least is not None and result < at_least) or (at_most is not None and result > at_most):
        raise bad(name, value, wanted)
    return result


def one_of(name: str, value: Any, valid: tuple[str, ...]) -> str:
    """Return `value` if it is one of the valid words.

    Raises:
        BadValue: naming the field, the value and the valid words.
    """
    if value not in valid:
        raise bad(name, value, f"one of {', '.join(valid)}" if len(valid) > 1 else valid[0])
    return str(value)


def flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False. Other types are refused: in Python a text such as "no" counts as true.

    Raises:
        BadValue: naming the field and the value.
    """
    if not isinstance(value, bool):
        raise bad(name, value, "True or False")
    return value


def line(name: str, value: Any, *, most: int = MOST_NAME) -> str:
    """Return `value` if it is one line of text: not empty, printable, at most `most` characters.

    A name with a line end could forge lines of a statement or of a log.

    Raises:
        BadValue: naming the field and the value.
    """
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > most:
        raise bad(name, value, f"one line of printable characters, at least 1 and at most {most}")
    return value


def json_object(name: str, content: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a file, or in one line of a file.

    Raises:
        BadValue: naming the file, if it holds anything else.
    """
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise BadValue(name, f"{name}: must be a JSON object")
    return table


def one_line(text: str, *, most: int) -> str:
    r"""Return a text from outside as one printable line of at most `most` characters, for logs and statements.

    Example:
        >>> from flower_dp.core.checks import one_line
        >>> one_line("failed\nEPSILON: 0.1", most=100)
        'failed EPSILON: 0.1'
    """
    return "".join(character if character.isprintable() else " " for character in text[:most])


def _shown(value: Any) -> str:
    """Return the value's repr, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of some thousands of digits
        return f"{type(value).__name__} of some thousands of digits"
    return text if len(text) <= 100 else f"{text[:40]}...{text[-40:]}"
