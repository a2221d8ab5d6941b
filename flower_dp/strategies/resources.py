"""Resources: the cost of rounds to a device in communication and computation."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources that a run's devices spend.

    A device is charged when it is asked, whether or not its reply arrives.

    Attributes:
        budget: costs and limit.
        num_local_steps: steps of a round.

    Raises:
        ValueError: if the budget is too small for one round.
    """

    budget: ResourceBudget
    num_local_steps: int

    def __post_init__(self) -> None:
        if not self.budget.allows(num_rounds=1, num_steps=self.num_local_steps):
            raise ValueError(f"max_cost={self.budget.max_cost}: must pay for one round, which costs a device {self.cost(1):g}")

    def cost(self, rounds: int) -> float:
        """Return what so many rounds cost a device."""
        return self.budget.cost(num_rounds=rounds, num_steps=rounds * self.num_local_steps)

    def why_stop(self, most: int) -> str | None:
        """Return that one more round would exceed the budget of a device that was asked in so many, if so; else None."""
        if self.budget.allows(num_rounds=most + 1, num_steps=(most + 1) * self.num_local_steps):
            return None
        return (
            f"the resource budget is spent: a device has spent {self.cost(most):g}, and one more round would make that "
            f"{self.cost(most + 1):g}{self._limit}"
        )

    def line(self, most: int) -> str:
        """Return what was spent by a device that was asked in so many rounds, in words."""
        return (
            f"resources: a device spent at most {self.cost(most):g}{self._limit}, for {most} aggregations at "
            f"{self.budget.cost_per_aggregation:g} and {most * self.num_local_steps} local steps at {self.budget.cost_per_step:g}"
        )

    @property
    def _limit(self) -> str:
        return "" if self.budget.max_cost is None else f" of max_cost={self.budget.max_cost:g}"
