"""DP-PASGD's problem and its convergence bound as a function of the number of steps K and the steps per round tau.

Hu, Guo, Ratazzi, Gong: Differentially Private Federated Learning for Resource-Constrained Internet of Things, Theorem 1 and
Section 7. The bound is on the expected gap E[L(theta*) - L*] of the best iterate theta*.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flower_dp.planning.problem import Floats, ProblemError, Reader, finite, keys_of
from flower_dp.privacy.dp_pasgd import zcdp_budget

METHOD = "dp-pasgd"
# No search goes further.
MOST_STEPS = 10**7
_NEVER_ENDING = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A checked problem. Comments on the fields give the paper's letters."""

    cost_per_aggregation: float  # c_1
    cost_per_step: float  # c_2
    max_cost: float  # C_th
    epsilon: float  # epsilon_th
    delta: float
    learning_rate: float  # eta
    strong_convexity: float  # lambda
    smoothness: float  # L
    initial_gap: float  # alpha
    gradient_variance: float  # xi^2
    dimension: int  # d
    batch_size: tuple[int, ...]  # X_m
    one_batch_size: bool  # given as a number, not as a list
    clip_norm: float  # G
    num_clients: int  # M

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "Problem":
        """Read and check a problem.

        Raises:
            ProblemError: naming the key that is unknown, missing or impossible.
        """
        read = Reader(values=values, method=METHOD)
        read.refuse_unknown(key for key in keys_of(cls) if key != "one_batch_size")
        num_clients, smoothness = read.integer("num_clients"), read.number("smoothness", above=0)
        problem = cls(
            cost_per_aggregation=read.number("cost_per_aggregation", at_least=0),
            cost_per_step=read.number("cost_per_step", at_least=0),
            max_cost=read.number("max_cost", above=0),
            epsilon=read.number("epsilon", above=0),
            delta=read.number("delta", above=0, below=1),
            learning_rate=read.number("learning_rate", above=0),
            # A smooth function satisfies Assumption 2, the Polyak-Lojasiewicz condition, for no lambda above L.
            strong_convexity=read.number("strong_convexity", above=0, at_most=smoothness),
            smoothness=smoothness,
            initial_gap=read.number("initial_gap", at_least=0),
            gradient_variance=read.number("gradient_variance", at_least=0),
            dimension=read.integer("dimension", at_most=10**15),
            batch_size=read.per_client_integer("batch_size", num_clients),
            one_batch_size=not isinstance(values["batch_size"], list | tuple | np.ndarray),
            clip_norm=read.number("clip_norm", above=0),
            num_clients=num_clients,
        )
        if not problem.step_size_holds(1):
            least = f"learning_rate * smoothness <= 1, which is learning_rate <= {1 / smoothness:.6g}"
            raise ProblemError("learning_rate", f"learning_rate={problem.learning_rate!r}: the bound needs {least}")
        least_cost = problem.cost(1, 1)
        if least_cost > problem.max_cost:
            one = f"one round of one step, cost_per_aggregation + cost_per_step = {least_cost:.6g}"
            raise ProblemError("max_cost", f"max_cost={problem.max_cost!r}: must pay for {one}")
        try:
            zcdp_budget(epsilon=problem.epsilon, delta=problem.delta)
        except ValueError as error:
            raise ProblemError("epsilon", str(error)) from error
        with np.errstate(all="ignore"):
            finite("epsilon", float(problem.floor(1, 1)), "the noise term of the bound")
            finite("initial_gap", float(problem.mean_bound(1, 1)), "the bound")
        return problem

    def cost(self, num_rounds: int, num_steps: int) -> float:
        """Return c1 K/tau + c2 K, a device's cost of K steps in K/tau rounds (eq. 8)."""
        return self.cost_per_aggregation * num_rounds + self.cost_per_step * num_steps

    def step_size_holds(self, steps_per_round: int) -> bool:
        """Tell whether eta L + eta^2 L^2 tau (tau - 1) <= 1, the condition of Theorem 1."""
        step = self.learning_rate * self.smoothness
        return step + step * step * steps_per_round * (steps_per_round - 1) <= 1

    def most_steps_per_round(self) -> int:
        """Return the largest tau for which the step-size condition holds."""
        step = self.learning_rate * self.smoothness
        if step < 1 / _NEVER_ENDING:
            return _NEVER_ENDING
        most = max(int((1 + math.sqrt(1 + 4 * (1 - step) / step**2)) / 2), 1)
        while not self.step_size_holds(most):
            most -= 1
        while self.step_size_holds(most + 1):
            most += 1
        return most

    def feasible(self, num_rounds: int, steps_per_round: int) -> bool:
        """Tell whether a point of whole numbers keeps the budget of costs and the step-size condition."""
        return self.step_size_holds(steps_per_round) and self.cost(num_rounds, num_rounds * steps_per_round) <= self.max_cost

    def noise_variance(self) -> float:
        """Return (d/M) sum_m sigma_m^2 of a single step; of K steps it is K times that (eq. 23, with the right sign)."""
        rho = zcdp_budget(epsilon=self.epsilon, delta=self.delta)
        mean = float(np.mean(np.asarray(self.batch_size, dtype=np.float64) ** -2.0))
        return self.dimension * 2 * (self.clip_norm * self.clip_norm) * mean / rho

    def floor(self, num_steps: float | Floats, steps_per_round: float | Floats) -> Floats:
        """Return B of eq. 13, elementwise: the part from the variance of batches and noise, which no training removes."""
        steps = np.asarray(num_steps, dtype=np.float64)
        return np.asarray(self._spread(steps_per_round) * (self.gradient_variance + self.noise_variance() * steps))

    def bound(self, num_steps: float | Floats, steps_per_round: float | Floats) -> Floats:
        """Return F = (1 - eta lambda)^K (alpha - B)/K + B of Theorem 1 (eq. 12), elementwise."""
        left, floor = self._left(num_steps), self.floor(num_steps, steps_per_round)
        return np.asarray(left * self.initial_gap + (1 - left) * floor)

    def mean_bound(self, num_steps: float | Floats, steps_per_round: float | Floats) -> Floats:
        """Return B + (1 - eta lambda) alpha / (eta lambda K), elementwise: what eqs. 17 and 20 do prove.

        It bounds the mean gap of the K iterates, and with it the gap of the best one. Theorem 1 applies eq. 17 K times, but its
        two sides average over different iterates, k = 1..K and k = 0..K-1; solved for the mean it gives this.
        """
        rate = self.learning_rate * self.strong_convexity
        steps = np.asarray(num_steps, dtype=np.float64)
        return np.asarray(self.floor(steps, steps_per_round) + (1 - rate) * self.initial_gap / (rate * steps))

    def parts(self, num_steps: int, steps_per_round: int) -> dict[str, float]:
        """Return the named terms whose sum is the bound."""
        left, spread = float(self._left(num_steps)), float(self._spread(steps_per_round))
        return {
            "start": left * self.initial_gap,
            "batch sampling": (1 - left) * spread * self.gradient_variance,
            "noise": (1 - left) * spread * self.noise_variance() * num_steps,
        }

    def last_step(self, value: float) -> int:
        """Return a K beyond which both bounds exceed `value` for every tau, at most the K that the costs allow.

        Both are at least (1 - (1 - eta lambda)^K / K) B(K, 1), which grows with K.
        """
        per_step = self.cost_per_aggregation / self.most_steps_per_round() + self.cost_per_step
        low, high = 1, int(min(self.max_cost / per_step + 1, _NEVER_ENDING)) if per_step > 0 else _NEVER_ENDING
        while low < high:
            middle = (low + high + 1) // 2
            grown = float((1 - self._left(middle)) * self.floor(middle, 1)) <= value
            low, high = (middle, high) if grown else (low, middle - 1)
        return low

    def least_steps_per_round(self, num_steps: Floats) -> Floats:
        """Return, elementwise, a whole tau below which K steps cost too much; infinity where every tau does.

        It is tau* of eq. 22 with a whole number of rounds.
        """
        left = (self.max_cost - self.cost_per_step * num_steps) * (1 + 1e-9)
        with np.errstate(divide="ignore", invalid="ignore"):
            rounds = np.floor(left / self.cost_per_aggregation + 1e-9) if self.cost_per_aggregation > 0 else num_steps
            least = np.ceil(num_steps / np.minimum(rounds, num_steps))
        return np.where((left >= 0) & (rounds >= 1) & (least <= self.most_steps_per_round()), least, np.inf)

    def _left(self, num_steps: float | Floats) -> Floats:
        """The part (1 - eta lambda)^K / K of the initial gap that the bound leaves."""
        steps = np.asarray(num_steps, dtype=np.float64)
        return np.asarray((1 - self.learning_rate * self.strong_convexity) ** steps / steps)

    def _spread(self, steps_per_round: float | Floats) -> Floats:
        """The factor of the variances in eq. 13: it grows with tau."""
        step = self.learning_rate * self.smoothness
        more = np.asarray(steps_per_round, dtype=np.float64) - 1
        return np.asarray((step / self.num_clients + step * step * more) / (2 * self.strong_convexity))
