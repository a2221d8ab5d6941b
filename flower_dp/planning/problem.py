"""A planning problem: a table of named numbers, read from TOML and checked key by key."""

import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flower_dp.core import checks

Floats = NDArray[np.float64]
T = TypeVar("T")

# A scan over cohort sizes or rounds holds a few float64 arrays of this length.
LARGEST_COUNT = 10**6


class ProblemError(ValueError):
    """A problem that can't be planned for. `key` is the key at fault; the message is one line that names it."""

    def __init__(self, key: str, message: str) -> None:
        self.key = key
        super().__init__(" ".join(message.split()))


def read_problem(path: Path | str) -> dict[str, object]:
    """Return the top-level table of a problem file in TOML.

    Raises:
        ProblemError: if the file can't be read or is not TOML; the key is "problem".
    """
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ProblemError("problem", f"problem={str(path)!r}: can't be read: {error.strerror or error}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise ProblemError("problem", f"problem={str(path)!r}: is not a TOML file: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Takes checked values out of a problem; every refusal is a `ProblemError` that names the key."""

    values: Mapping[str, object]
    method: str

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Refuse keys that the method does not know, with the closest one that it knows."""
        names = list(known)
        for key in self.values:
            if key in names:
                continue
            close = difflib.get_close_matches(key.replace("-", "_"), names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"{self.method} knows {', '.join(names)}"
            raise ProblemError(key, f"{key}: unknown key for {self.method}; {hint}")

    def has(self, key: str) -> bool:
        """Tell whether the problem gives the key."""
        return key in self.values

    def word(self, key: str, valid: tuple[str, ...]) -> str:
        """Return one of the valid words."""
        return self._checked(key, lambda name, value: checks.one_of(name, value, valid), f"one of {', '.join(valid)}")

    def integer(self, key: str, *, at_least: int = 1, at_most: int = LARGEST_COUNT) -> int:
        """Return a whole number within the bounds."""
        return self._checked(
            key,
            lambda name, value: checks.integer(name, value, at_least=at_least, at_most=at_most),
            f"a whole number >= {at_least}",
        )

    def optional_integer(self, key: str, *, at_most: int = LARGEST_COUNT) -> int | None:
        """Return a whole number from 1 to a bound, or None where the problem does not give the key."""
        return self.integer(key, at_most=at_most) if self.has(key) else None

    def number(
        self,
        key: str,
        *,
        above: float | None = None,
        at_least: float | None = None,
        below: float | None = None,
        at_most: float | None = None,
    ) -> float:
        """Return a finite number within the bounds."""

        def check(name: str, value: object) -> float:
            return checks.number(name, value, above=above, at_least=at_least, below=below, at_most=at_most)

        return self._checked(key, check, "a finite number")

    def per_client(
        self,
        key: str,
        num_clients: int,
        *,
        above: float | None = None,
        at_least: float | None = None,
        below: float | None = None,
    ) -> Floats:
        """Return one finite number a client; a single number stands for every client."""

        def check(name: str, value: object) -> float:
            return checks.number(name, value, above=above, at_least=at_least, below=below)

        return np.asarray(self._spread(key, num_clients, check, "a finite number"), dtype=np.float64)

    def per_client_integer(self, key: str, num_clients: int) -> tuple[int, ...]:
        """Return one whole number a client, from 1 to 10^12; a single number stands for every client."""

        def check(name: str, value: object) -> int:
            return checks.integer(name, value, at_least=1, at_most=10**12)

        return tuple(self._spread(key, num_clients, check, "a whole number >= 1"))

    def _spread(self, key: str, num_clients: int, check: Callable[[str, object], T], wanted: str) -> list[T]:
        value = self.values.get(key)
        if not isinstance(value, list | tuple | np.ndarray):
            return [self._checked(key, check, f"{wanted}, or a list of {num_clients}")] * num_clients
        if len(value) != num_clients:
            raise ProblemError(
                key, f"{key}: the list has length {len(value)}, num_clients={num_clients} asks for length {num_clients}"
            )
        return [_caught(key, check, f"{key}[{index}]", entry) for index, entry in enumerate(value)]

    def _checked(self, key: str, check: Callable[[str, object], T], wanted: str) -> T:
        if key not in self.values:
            raise ProblemError(key, f"{key}: missing; {self.method} needs {wanted}")
        return _caught(key, check, key, self.values[key])


def _caught(key: str, check: Callable[[str, object], T], name: str, value: object) -> T:
    try:
        return check(name, value)
    except ValueError as error:
        raise ProblemError(key, str(error)) from error
    except OverflowError as error:  # an integer beyond float64's range
        raise ProblemError(key, f"{name}: too large a number") from error


def keys_of(problem: type[Any]) -> tuple[str, ...]:
    """Return the keys of a problem: the names of its fields."""
    return tuple(field.name for field in fields(problem))


def finite(key: str, value: float, what: str) -> float:
    """Return `value` if it is finite.

    Raises:
        ProblemError: naming the key, if the arithmetic behind `what` has left the range of float64.
    """
    if not math.isfinite(value):
        raise ProblemError(key, f"{key}: {what} leaves the range of floating-point numbers; rescale the problem")
    return value


def share_above(bound: float, least: float) -> str:
    """Return by how much a bound is above the least one, in percent: "1.9 % more", "113 % more"."""
    percent = 100 * (bound / least - 1)
    return f"{percent:.0f} % more" if percent >= 10 else f"{percent:.2g} % more"
