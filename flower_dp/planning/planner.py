"""Shared parts of the planners: problems that are read key by key, and plans as text, JSON and diagrams."""

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from flower_dp.core import checks
from flower_dp.core.checks import BadValue

if TYPE_CHECKING:
    from flower_dp.planning.constants import Constants

Floats = NDArray[np.float64]
P = TypeVar("P", bound="Problem")
C = TypeVar("C", bound="Candidate")

# A scan over cohort sizes or rounds keeps a few float64 arrays of this length in memory.
LARGEST_COUNT = 10**6
# A note that several planners' `from_data` return.
PILOTS_CLIP_NORM = "clip_norm is the largest norm of a record's gradient in the pilot: usually far too much"


class ProblemError(BadValue):
    """An invalid problem. `field` is the key at fault; the message is one line that begins with the key."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, " ".join(message.split()))


def read_problem(path: Path | str) -> dict[str, object]:
    """Return the top-level table of a problem file in TOML.

    Raises:
        ProblemError: if the file can't be read or is not TOML; its field is "problem".
    """
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ProblemError("problem", f"problem={str(path)!r}: can't be read: {error.strerror or error}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise ProblemError("problem", f"problem={str(path)!r}: is not a TOML file: {error}") from error


def whole(*, at_least: int = 1, at_most: int | str = LARGEST_COUNT, each: bool = False, default: Any = MISSING) -> Any:
    """Define a key whose value is a whole number within bounds; a bound may be the name of an earlier key.

    With `each` the value is one number per client, as a tuple; a single number stands for every client.
    """
    return _key(checks.integer, f"a whole number >= {at_least}", each, default, at_least=at_least, at_most=at_most)


def real(*, each: bool = False, default: Any = MISSING, **bounds: float | str) -> Any:
    """Define a key whose value is a finite number within bounds (`above`, `at_least`, `below`, `at_most`).

    A bound may be the name of an earlier key. With `each` the value is one number per client, as an array; a single number stands
    for every client.
    """
    return _key(checks.number, "a finite number", each, default, **bounds)


def word(*valid: str, default: Any = MISSING) -> Any:
    """Define a key whose value is one of some words."""
    return _key(checks.one_of, f"one of {', '.join(valid)}", each=False, default=default, valid=valid)


def _key(check: Callable[..., Any], wanted: str, each: bool, default: Any, **bounds: Any) -> Any:
    return field(default=default, metadata={"key": _Key(check=check, wanted=wanted, each=each, default=default, bounds=bounds)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    check: Callable[..., Any]
    wanted: str
    each: bool
    default: Any
    bounds: Mapping[str, Any]

    def read(self, name: str, value: object, earlier: Mapping[str, Any]) -> Any:
        """Return a checked value; `earlier` has the values of earlier keys."""
        bounds = {side: _limit(bound, earlier) for side, bound in self.bounds.items()}
        if not self.each:
            return self.check(name, value, **bounds)
        count = earlier["num_clients"]
        if not isinstance(value, list | tuple | np.ndarray):
            entries = [self.check(name, value, **bounds)] * count
        elif len(value) != count:
            raise BadValue(name, f"{name}: the list has length {len(value)}, num_clients={count} needs length {count}")
        else:
            entries = [self.check(f"{name}[{index}]", entry, **bounds) for index, entry in enumerate(value)]
        return tuple(entries) if self.check is checks.integer else np.asarray(entries, dtype=np.float64)


def _limit(bound: Any, earlier: Mapping[str, Any]) -> Any:
    """Return a bound as a number; a name stands for the smallest value of that earlier key."""
    return np.min(earlier[bound]).item() if isinstance(bound, str) else bound


def keys_of(problem: type[Any]) -> tuple[str, ...]:
    """Return the keys of a problem."""
    return tuple(key.name for key in fields(problem))


class Problem:
    """A checked problem: a dataclass whose fields are its keys, each defined by `whole`, `real` or `word`."""

    __slots__ = ()
    METHOD: ClassVar[str]

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """Read and check a problem.

        Raises:
            ProblemError: naming the key that is unknown, missing or out of range.
        """
        keys: dict[str, _Key] = {key.name: key.metadata["key"] for key in fields(cls)}  # type: ignore[arg-type]
        for name in values:
            if name not in keys:
                close = difflib.get_close_matches(name.replace("-", "_"), keys, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else "docs/planning.md lists its keys"
                raise ProblemError(name, f"{name}: unknown key for {cls.METHOD}; {hint}")
        read: dict[str, Any] = {}
        try:
            for name, key in keys.items():
                if name not in values and key.default is MISSING:
                    several = f", or a list of {read['num_clients']}" if key.each else ""
                    raise BadValue(name, f"{name}: missing; {cls.METHOD} needs {key.wanted}{several}")
                read[name] = key.read(name, values[name], read) if name in values else key.default
            problem = cls(**read)
            problem.check()
        except BadValue as error:
            raise ProblemError(error.field.partition("[")[0], str(error)) from error
        return problem

    def check(self) -> None:
        """Refuse invalid combinations of values that are valid alone.

        Raises:
            BadValue: naming the key.
        """


def finite(key: str, value: float, what: str) -> float:
    """Return `value` if it is finite.

    Raises:
        ProblemError: naming the key, if the arithmetic of `what` leaves the range of float64.
    """
    if not math.isfinite(value):
        raise ProblemError(key, f"{key}: {what} leaves the range of floating-point numbers; rescale the problem")
    return value


def share_above(bound: float, least: float) -> str:
    """Return the excess of a bound over the least one, as text in percent: "1.9 % more", "113 % more"."""
    percent = 100 * (bound / least - 1)
    return f"{percent:.0f} % more" if percent >= 10 else f"{percent:.2g} % more"


def in_parts(parts: Mapping[str, float], bound: float) -> str:
    """Return the parts of a bound in percent, the largest first."""
    shares = sorted(((part / bound, name) for name, part in parts.items() if part > 0), reverse=True)
    return "parts of the bound: " + ", ".join(f"{name} {100 * share:.0f} %" for share, name in shares)


def no_promise(key: str, before: float, *, bound: str = "the bound", ranks: str = "it ranks the points") -> str:
    """Return the text that a bound is not below the value of `key`, which describes the start of training."""
    what = f"{bound} is not below {key}={before:g}, the {key.removeprefix('initial_')} before training"
    return f"{what}: {ranks}, it does not promise that training helps"


class Panel(NamedTuple):
    """One diagram: the bound over a whole-numbered variable, with the optimum.

    A curve is a function from whole numbers, as float64 [n], to bounds [n]; NaN stands for no bound.
    """

    title: str
    variable: str
    curves: Mapping[str, Callable[[Floats], Floats]]
    last: int
    optimum: tuple[int, float] | None
    first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A compared point. A subclass adds its bound and its coordinates; `LETTERS` gives the paper's letters of these fields."""

    LETTERS: ClassVar[Mapping[str, str]] = {}
    name: str

    def at(self, between: str = ", ") -> str:
        """Return the coordinates in the paper's letters."""
        return between.join(f"{letter}={_shown(getattr(self, name))}" for name, letter in self.LETTERS.items())

    def shown(self) -> str:
        """Return the point and its bound for a reader."""
        raise NotImplementedError


def last_shown(optimum: int, limit: float, least: int = 20) -> int:
    """Return the end of a diagram's axis: four times the optimum, if the variable's range allows it."""
    return max(int(min(limit, max(4 * optimum, least))), optimum)


class Row(NamedTuple):
    """One number of an answer: its key in JSON, its value and a note; a text that is not empty is shown instead of the value."""

    name: str
    value: object
    note: str = ""
    text: str = ""

    def shown(self) -> str:
        """Return the value for a reader, a float with six digits."""
        text = self.text or _shown(self.value)
        return f"{text}  ({self.note})" if self.note else text


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[P, C]):
    """The answer of a planner.

    Attributes:
        problem: the problem that was solved.
        head: first line for a reader.
        best: best point under the bound; None if nothing is feasible, or if a method has several bounds.
        rows: numbers of the answer, for a reader and in JSON.
        details: further entries of the JSON answer.
        candidates: compared points, including the best one.
        reasons: reasons for the answer, in sentences.
        panels: diagrams for `plot`; empty if there is no bound to draw.
        infeasible: reason that nothing is feasible, in one line that names the keys; None if there is an answer.
    """

    problem: P
    head: str
    rows: tuple[Row, ...]
    details: Mapping[str, object] = field(default_factory=dict)
    candidates: tuple[C, ...]
    reasons: tuple[str, ...]
    best: C | None = None
    panels: tuple[Panel, ...] = ()
    infeasible: str | None = None

    def __getitem__(self, name: str) -> Any:
        """Return one of the answer's numbers."""
        return {row.name: row.value for row in self.rows}[name]

    def to_dict(self) -> dict[str, object]:
        """Return the answer as plain values for JSON; null if nothing is feasible."""
        numbers = {row.name: row.value for row in self.rows}
        points = {"candidates": [asdict(point) for point in self.candidates]}
        return {"method": self.problem.METHOD, **numbers, **points, **self.details, "reasons": list(self.reasons)}

    def lines(self) -> list[str]:
        """Return the answer for a reader, without the reasons."""
        width = max(len(row.name) for row in self.rows)
        lines = [self.head, "", *(f"  {row.name:<{width}}  {row.shown()}" for row in self.rows)]
        if self.candidates:
            width = max(len(point.name) for point in self.candidates)
            lines += ["", "Compared", *(f"  {point.name:<{width}}  {point.shown()}" for point in self.candidates)]
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Facts of the clients' data. NOT PRIVATE, unless the data are public."""

    constants: "Constants"
    num_records: tuple[int, ...]
    """Number of records of every client, including clients that the constants were not computed from."""
    dimension: int
    """Number of parameters of the model to be trained."""

    def sizes(self) -> dict[str, object]:
        """Return the keys for the numbers of clients, of their records and of parameters."""
        same = len(set(self.num_records)) == 1
        records = self.num_records[0] if same else list(self.num_records)
        return {"num_clients": len(self.num_records), "num_records": records, "dimension": self.dimension}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Keys of a problem, and notes on their sources, in sentences."""

    values: Mapping[str, object]
    notes: tuple[str, ...] = ()


class Planner(Protocol):
    """One paper's planner: a module with these two functions."""

    def plan(self, values: Mapping[str, object]) -> Plan[Any, Any]:
        """Return the best configuration for a problem.

        Raises:
            ProblemError: naming the key that is unknown, missing or out of range.
        """

    def from_data(self, data: Data, given: Mapping[str, object]) -> Inputs:
        """Return the keys that data determine. Some values depend on `given`, the keys that are already known."""
