"""The local steps of a method in which server and clients both know them: how many, how large, how far they can go."""

import math
from dataclasses import dataclass

from flower_dp.core import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """Gradient steps w <- w - step_size (g + weight_decay w), the same for all clients.

    Attributes:
        num_local_steps: steps in a round.
        learning_rate: step size of round 1.
        learning_rate_decay: the step size shrinks by this part every round.
        weight_decay: L2 coefficient of the loss; at most 1 / learning_rate, so that it never makes weights longer.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.
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
        """Return a length that the movement of the weights in one round does not exceed.

        Args:
            server_round: 1, 2, ...
            start: norm of the weights before the round.
            gradient: norm of the longest gradient, without its noise.
            noise: norm of the noise of one step; that of independent ones adds up as their variances do.
        """
        steps = self.num_local_steps
        return self.step_size(server_round) * (steps * (gradient + self.weight_decay * start) + math.sqrt(steps) * noise)
