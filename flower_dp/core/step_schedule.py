"""Local steps that server and clients both know: their number, their size, and a bound on the change of the weights."""

import math
from dataclasses import dataclass

from flower_dp.core import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """Gradient steps w <- w - step_size (g + weight_decay w), the same for all clients.

    Attributes:
        num_local_steps: steps in a round.
        learning_rate: step size of round 1.
        learning_rate_decay: part by which the step size shrinks every round, in [0, 1).
        weight_decay: L2 coefficient of the loss; at most 1 / learning_rate, so that it never makes weights longer.

    Raises:
        ValueError: for an invalid value, naming field and value.
    """

    num_local_steps: int
    learning_rate: float
    learning_rate_decay: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("num_local_steps", self.num_local_steps, at_least=1)
        rate = checks.number("learning_rate", self.learning_rate, above=0)
        checks.number("learning_rate_decay", self.learning_rate_decay, at_least=0, below=1)
        checks.number("weight_decay", self.weight_decay, at_least=0, at_most=1 / rate)

    def step_size(self, server_round: int) -> float:
        """Return the step size of round 1, 2, ..."""
        return self.learning_rate * float((1 - self.learning_rate_decay) ** (server_round - 1))

    def longest(self, server_round: int, *, start: float, gradient: float, noise: float) -> float:
        """Return an upper bound on the L2 norm of the change of the weights in one round.

        Args:
            server_round: 1, 2, ...
            start: norm of the weights before the round.
            gradient: norm of the longest gradient, without its noise.
            noise: norm of the noise of one step; for independent steps the squares of the norms add up.
        """
        steps = self.num_local_steps
        return self.step_size(server_round) * (steps * (gradient + self.weight_decay * start) + math.sqrt(steps) * noise)

    def noise_std(self, server_round: int, *, noise: float) -> float:
        """Return the std of the noise on the change of a weight in one round, if every gradient has its own noise.

        Weight decay shrinks the noise of a step in every later step of the round.

        Args:
            server_round: 1, 2, ...
            noise: std of the noise on the gradient of one step.
        """
        size = self.step_size(server_round)
        kept = 1 - size * self.weight_decay
        return size * noise * math.sqrt(sum(kept ** (2 * step) for step in range(self.num_local_steps)))
