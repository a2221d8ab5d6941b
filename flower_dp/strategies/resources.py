"""Resources: the cost of rounds to a device in communication and computation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flower_dp.core import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceBudget:
    """The resource costs of a device, in any unit, and their limit (Hu et al., eq. 8: c1, c2 and C_th).

    Attributes:
        cost_per_aggregation: of a round's messages.
        cost_per_step: of a local step.
        max_cost: of a device in a run; None: no limit.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.

    Example:
        >>> from flower_dp.strategies.resources import ResourceBudget
        >>> ResourceBudget(cost_per_aggregation=100, cost_per_step=1, max_cost=1000).cost(num_rounds=9, num_steps=90)
        990.0
    """

    cost_per_aggregation: float = 0.0
    cost_per_step: float = 0.0
    max_cost: float | None = None

    def __post_init__(self) -> None:
        checks.number("cost_per_aggregation", self.cost_per_aggregation, at_least=0)
        checks.number("cost_per_step", self.cost_per_step, at_least=0)
        if self.max_cost is not None:
            checks.number("max_cost", self.max_cost, above=0)
            if not self.has_costs:
                raise ValueError(f"max_cost={self.max_cost:g}: needs cost_per_aggregation or cost_per_step above 0")

    @property
    def has_costs(self) -> bool:
        """Whether a cost is above 0."""
        return bool(self.cost_per_aggregation or self.cost_per_step)

    def cost(self, *, num_rounds: int, num_steps: int) -> float:
        """Return the cost of these rounds and steps to a device, bit for bit the planner's sum."""
        return float(self.cost_per_aggregation * num_rounds + self.cost_per_step * num_steps)

    def allows(self, *, num_rounds: int, num_steps: int) -> bool:
        """Return whether the cost of these rounds and steps is within the budget."""
        return self.max_cost is None or self.cost(num_rounds=num_rounds, num_steps=num_steps) <= self.max_cost


class Resources:
    """The resources that a run's devices have spent.

    A device is charged when it is asked, whether or not its reply arrives.

    Args:
        budget: costs and limit.
        num_local_steps: steps of a round.
        replies_of: returns in how many rounds every device was asked.

    Raises:
        ValueError: if the budget is too small for one round.
    """

    def __init__(self, budget: ResourceBudget, *, num_local_steps: int, replies_of: Callable[[], Mapping[str, int]]) -> None:
        self.budget = budget
        self.num_local_steps = num_local_steps
        if not budget.allows(num_rounds=1, num_steps=num_local_steps):
            raise ValueError(f"max_cost={budget.max_cost}: must pay for one round, which costs a device {self._of(1):g}")
        self._replies_of = replies_of

    @property
    def costs(self) -> dict[str, float]:
        """The resources that every device has spent."""
        return {name: self._of(rounds) for name, rounds in self._replies_of().items()}

    @property
    def largest(self) -> float:
        """The largest resource cost of a device."""
        return self._of(self._most)

    @property
    def _most(self) -> int:
        return max(self._replies_of().values(), default=0)

    def why_stop(self) -> str | None:
        """Return that one more round would exceed the budget of a device, if so; else None."""
        most = self._most
        if self.budget.allows(num_rounds=most + 1, num_steps=(most + 1) * self.num_local_steps):
            return None
        return (
            f"the resource budget is spent: a device has spent {self._of(most):g}, and one more round would make that "
            f"{self._of(most + 1):g}{self._limit}"
        )

    def line(self) -> str:
        """Return what was spent, in words."""
        most = self._most
        return (
            f"resources: a device spent at most {self.largest:g}{self._limit}, for {most} aggregations at "
            f"{self.budget.cost_per_aggregation:g} and {most * self.num_local_steps} local steps at {self.budget.cost_per_step:g}"
        )

    @property
    def _limit(self) -> str:
        return "" if self.budget.max_cost is None else f" of max_cost={self.budget.max_cost:g}"

    def _of(self, rounds: int) -> float:
        return self.budget.cost(num_rounds=rounds, num_steps=rounds * self.num_local_steps)
