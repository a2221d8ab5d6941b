"""What a planner is: a module that reads a problem and answers with a plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flower_dp.planning.problem import Floats

if TYPE_CHECKING:
    from flower_dp.planning.constants import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram: the bound over a whole-numbered variable, and the optimum on it.

    A curve takes whole numbers as float64 [n] and returns the bound [n], NaN where there is none.
    """

    title: str
    variable: str
    last: int
    curves: Mapping[str, Callable[[Floats], Floats]]
    optimum: tuple[int, float] | None
    first: int = 1


class Plan(Protocol):
    """The answer of a planner."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the answer is what it is, in sentences."""

    @property
    def infeasible(self) -> str | None:
        """Why nothing is feasible, in one line that names the keys; None where there is an answer."""

    def to_dict(self) -> dict[str, object]:
        """Return the answer as plain values that JSON can hold."""

    def lines(self) -> list[str]:
        """Return the answer for a reader, without the reasons."""

    def panels(self) -> list[Panel]:
        """Return what `plot` draws.

        Raises:
            ProblemError: if there is no bound to draw.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What the clients' data say. NOT PRIVATE, unless the data are public."""

    constants: "Constants"
    num_records: tuple[int, ...]
    """The size of every client's data set: also of the clients that the constants were not computed from."""
    dimension: int
    """Number of parameters of the model that will be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Keys of a problem, and notes on where they come from, in sentences."""

    values: Mapping[str, object]
    notes: tuple[str, ...] = field(default=())


class Planner(Protocol):
    """One paper's planner. A module with these three names is one."""

    METHOD: str

    def plan(self, values: Mapping[str, object]) -> Plan:
        """Return the best configuration for a problem.

        Raises:
            ProblemError: naming the key that is unknown, missing or impossible.
        """

    def from_data(self, data: Data, given: Mapping[str, object]) -> Inputs:
        """Return the keys that data determine. `given` are keys known already, from which some values follow."""
