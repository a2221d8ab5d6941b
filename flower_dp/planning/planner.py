"""The shared parts of the planners: a problem that is read key by key, and a plan as text, as JSON and as diagrams."""

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

# A scan over cohort sizes or rounds holds a few float64 arrays of this length.
LARGEST_COUNT = 10**6
# A note of `from_data`.
PILOTS_CLIP_NORM = "clip_norm is the largest norm of a record's gradient in the pilot: usually far too much"


class ProblemError(BadValue):
    """A problem that can't be planned for. `field` is the key at fault; the message is one line that names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, " ".join(message.split()))


def read_problem(path: Path | str) -> dict[str, object]:
    """Return the top-level table of a problem file in TOML.

    Raises:
        ProblemError: if the file can't be read or is not TOML; the field is "problem".
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

    With `each` the value is one number a client, as a tuple; a single number stands for every client.
    """
    return _key(checks.integer, f"a whole number >= {at_least}", each, default, at_least=at_least, at_most=at_most)


def real(*, each: bool = False, default: Any = MISSING, **bounds: float | str) -> Any:
    """Define a key whose value is a finite number within bounds (`above`, `at_least`, `below`, `at_most`).

    A bound may be the name of an earlier key. With `each` the value is one number a client, as an array; a single number stands
    for every client.
    """
    return _key(checks.number, "a finite number", each, default, **bounds)


def word(*valid: str) -> Any:
    """Define a key whose value is one of some words."""
    return _key(checks.one_of, f"one of {', '.join(valid)}", each=False, default=MISSING, valid=valid)


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
        """Return a checked value; `earlier` has those of earlier keys."""
        bounds = {side: _limit(bound, earlier) for side, bound in self.bounds.items()}
        if not self.each:
            return self.check(name, value, **bounds)
        count = earlier["num_clients"]
        if not isinstance(value, list | tuple | np.ndarray):
            entries = [self.check(name, value, **bounds)] * count
        elif len(value) != count:
            raise BadValue(name, f"{name}: the list has length {len(value)}, num_clients={count} asks for length {count}")
        else:
            entries = [self.check(f"{name}[{index}]", entry, **bounds) for index, entry in enumerate(value)]
        return tuple(entries) if self.check is checks.integer else np.asarray(entries, dtype=np.float64)


def _limit(bound: Any, earlier: Mapping[str, Any]) -> Any:
    """Return a bound's value: a name is that of an earlier key, whose smallest value it is."""
    return np.min(earlier[bound]).item() if isinstance(bound, str) else bound


def keys_of(problem: type[Any]) -> tuple[str, ...]:
    """Return the keys of a problem."""
    return tuple(one.name for one in fields(problem))


class Problem:
    """A checked problem: a dataclass whose fields are its keys, each defined by `whole`, `real` or `word`."""

    __slots__ = ()
    METHOD: ClassVar[str]

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """Read and check a problem.

        Raises:
            ProblemError: naming the key that is unknown, missing or impossible.
        """
        keys: dict[str, _Key] = {one.name: one.metadata["key"] for one in fields(cls)}  # type: ignore[arg-type]
        for name in values:
            if name not in keys:
                close = difflib.get_close_matches(name.replace("-", "_"), keys, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"{cls.METHOD} knows {', '.join(keys)}"
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
        """Refuse what the keys' own bounds allow.

        Raises:
            BadValue: naming the key.
        """


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


def in_parts(parts: Mapping[str, float], bound: float) -> str:
    """Return the parts of a bound in percent, the largest first."""
    shares = sorted(((part / bound, name) for name, part in parts.items() if part > 0), reverse=True)
    return "parts of the bound: " + ", ".join(f"{name} {100 * share:.0f} %" for share, name in shares)


def no_promise(key: str, before: float, *, bound: str = "the bound", ranks: str = "it ranks the points") -> str:
    """Return the reason for a reader that a bound is not below what `key` says of the start of training."""
    what = f"{bound} is not below {key}={before:g}, the {key.removeprefix('initial_')} before training"
    return f"{what}: {ranks}, it does not promise that training helps"


class Panel(NamedTuple):
    """One diagram: the bound over a whole-numbered variable, and the optimum on it.

    A curve takes whole numbers as float64 [n] and returns the bound [n], NaN where there is none.
    """

    title: str
    variable: str
    curves: Mapping[str, Callable[[Floats], Floats]]
    last: int
    optimum: tuple[int, float] | None
    first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point that was compared; a subclass has its place, whose fields `LETTERS` has with the paper's letters, and its bound."""

    LETTERS: ClassVar[Mapping[str, str]] = {}
    name: str

    def at(self, between: str = ", ") -> str:
        """Return the place in the paper's letters."""
        return between.join(f"{letter}={_shown(getattr(self, name))}" for name, letter in self.LETTERS.items())

    def shown(self) -> str:
        """Return the point and its bound for a reader."""
        raise NotImplementedError


def last_shown(optimum: int, limit: float, least: int = 20) -> int:
    """Return where a diagram ends that shows an optimum: four times as far, if the variable goes there."""
    return max(int(min(limit, max(4 * optimum, least))), optimum)


class Row(NamedTuple):
    """One number of an answer: its key in JSON, its value, a note on it; `text` stands for the value where it is not empty."""

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
        problem: what was asked.
        head: the first line for a reader.
        best: the best point under the bound; None if nothing is feasible, or if a method has several bounds.
        rows: the numbers of the answer, for a reader and in JSON.
        details: what JSON has beside those.
        candidates: the points that were compared, the best among them.
        reasons: why the answer is what it is, in sentences.
        panels: what `plot` draws; nothing if there is no bound to draw.
        infeasible: why nothing is feasible, in one line that names the keys; None where there is an answer.
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
        """Return the answer as plain values that JSON can hold; null where nothing is feasible."""
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
    """What the clients' data say. NOT PRIVATE, unless the data are public."""

    constants: "Constants"
    num_records: tuple[int, ...]
    """The size of every client's data set: also of the clients that the constants were not computed from."""
    dimension: int
    """Number of parameters of the model that will be trained."""

    def sizes(self) -> dict[str, object]:
        """Return the keys that hold the numbers of clients, of their records and of parameters."""
        same = len(set(self.num_records)) == 1
        records = self.num_records[0] if same else list(self.num_records)
        return {"num_clients": len(self.num_records), "num_records": records, "dimension": self.dimension}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Keys of a problem, and notes on where they come from, in sentences."""

    values: Mapping[str, object]
    notes: tuple[str, ...] = ()


class Planner(Protocol):
    """One paper's planner. A module with these two names is one."""

    def plan(self, values: Mapping[str, object]) -> Plan[Any, Any]:
        """Return the best configuration for a problem.

        Raises:
            ProblemError: naming the key that is unknown, missing or impossible.
        """

    def from_data(self, data: Data, given: Mapping[str, object]) -> Inputs:
        """Return the keys that data determine. `given` are keys known already, from which some values follow."""
