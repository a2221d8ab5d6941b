"""DP-PASGD's answer: the best point and the points that it was compared with, as text and as diagrams."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from flower_dp.core.words import delta_in_words, digits_in_words
from flower_dp.planning.dp_pasgd_bound import METHOD, Problem
from flower_dp.planning.planner import Panel
from flower_dp.planning.problem import Floats

# How many numbers of rounds a diagram tries for each tau.
_TRIED = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point of whole numbers, or the paper's relaxed point, that was compared; `feasible` tells whether it can be run."""

    name: str
    num_steps: float
    steps_per_round: float
    bound: float
    """Theorem 1."""
    mean_bound: float
    """What the paper's derivation does prove; see `Problem.mean_bound`."""
    cost: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The feasible point of whole numbers with the least bound, its noise, its cost, and the reasons."""

    problem: Problem
    num_rounds: int
    steps_per_round: int
    noise_std: tuple[float, ...]
    bound: float
    epsilon: float
    epsilon_tight: float
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]
    infeasible: ClassVar[None] = None
    """A problem in which nothing is feasible is refused when it is read."""

    @property
    def num_steps(self) -> int:
        """K = (rounds) tau."""
        return self.num_rounds * self.steps_per_round

    @property
    def cost(self) -> float:
        """The cost of the run for a device."""
        return self.problem.cost(self.num_rounds, self.num_steps)

    def to_dict(self) -> dict[str, object]:
        """Return the answer as plain values that JSON can hold; noise_std is a list if batch_size was one."""
        return {
            "method": METHOD,
            "num_steps": self.num_steps,
            "steps_per_round": self.steps_per_round,
            "num_rounds": self.num_rounds,
            "noise_std": self.noise_std[0] if self.problem.one_batch_size else list(self.noise_std),
            "bound": self.bound,
            "cost": self.cost,
            "epsilon": self.epsilon,
            "epsilon_tight": self.epsilon_tight,
            "bound_parts": self.problem.parts(self.num_steps, self.steps_per_round),
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "reasons": list(self.reasons),
        }

    def lines(self) -> list[str]:
        """Return the answer for a reader, without the reasons."""
        low, high = min(self.noise_std), max(self.noise_std)
        noise = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
        delta = delta_in_words(self.problem.delta)
        lines = [
            f"{METHOD}, {self.problem.num_clients} clients",
            "",
            f"  num_steps        {self.num_steps}",
            f"  steps_per_round  {self.steps_per_round}",
            f"  num_rounds       {self.num_rounds}",
            f"  noise_std        {noise}  (on every coordinate of a mini-batch gradient)",
            f"  bound            {self.bound:.6g}  (expected gap of the loss)",
            f"  cost             {self.cost:.6g}  (of {self.problem.max_cost:.6g})",
            f"  epsilon          {digits_in_words(self.epsilon, 6)}  (the paper's formula)",
            f"  epsilon_tight    {digits_in_words(self.epsilon_tight, 6)}  (exact composition, delta {delta})",
            "",
            "Compared",
        ]
        width = max(len(candidate.name) for candidate in self.candidates)
        for point in self.candidates:
            where = f"K={point.num_steps:.6g} tau={point.steps_per_round:.6g} bound {point.bound:.6g} cost {point.cost:.6g}"
            lines.append(f"  {point.name:<{width}}  {where}{'' if point.feasible else '  (infeasible)'}")
        return lines

    def panels(self) -> list[Panel]:
        """Return the bound over tau, with the best number of rounds for each, and over K, with the relaxed tau of eq. 22."""
        problem, tau = self.problem, self.steps_per_round
        reach = problem.most_steps_per_round()
        if problem.cost_per_step > 0:
            reach = min(reach, int((problem.max_cost - problem.cost_per_aggregation) / problem.cost_per_step))
        return [
            Panel(
                title="DP-PASGD, best number of rounds",
                variable="steps per round tau",
                last=max(min(reach, max(4 * tau, 20)), tau),
                curves={"feasible": _by_steps_per_round(problem, self.num_rounds)},
                optimum=(tau, self.bound),
            ),
            Panel(
                title="DP-PASGD, least tau that the costs allow",
                variable="steps K",
                last=max(min(problem.last_step(float("inf")), max(4 * self.num_steps, 20)), self.num_steps),
                curves={"relaxed": lambda steps: _relaxed(problem, steps)},
                optimum=(self.num_steps, self.bound),
            ),
        ]


def relaxed_steps_per_round(problem: Problem, num_steps: Floats) -> Floats:
    """Return tau* = c1 K / (C_th - c2 K) of eq. 22, at least 1; NaN where the step-size condition or the costs forbid it."""
    left = problem.max_cost - problem.cost_per_step * num_steps
    with np.errstate(divide="ignore", invalid="ignore"):
        tau = np.maximum(problem.cost_per_aggregation * num_steps / left, 1.0) if problem.cost_per_aggregation else 1 + 0 * left
        step = problem.learning_rate * problem.smoothness
        allowed = (left >= 0) & (tau <= num_steps) & (step + step * step * tau * (tau - 1) <= 1)
    return np.where(allowed, tau, np.nan)


def _relaxed(problem: Problem, num_steps: Floats) -> Floats:
    return problem.bound(num_steps, relaxed_steps_per_round(problem, num_steps))


def _by_steps_per_round(problem: Problem, best_num_rounds: int) -> Callable[[Floats], Floats]:
    def curve(steps_per_round: Floats) -> Floats:
        return np.asarray([_least(problem, int(tau), best_num_rounds) for tau in steps_per_round])

    return curve


def _least(problem: Problem, tau: int, best_num_rounds: int) -> float:
    """The least bound at this tau, of some numbers of rounds."""
    per_round = problem.cost(1, tau)
    most = problem.max_cost / per_round if per_round > 0 else np.inf
    tried = np.unique(np.geomspace(1, max(min(most, 10.0 * best_num_rounds), 1.0), _TRIED).round())
    rounds = [int(count) for count in {*tried, best_num_rounds} if problem.feasible(int(count), tau)]
    return float(np.min(problem.bound(np.asarray(rounds, dtype=np.float64) * tau, tau))) if rounds else float("nan")
