"""DP-FedPAQ's answer: the best point and the points that it was compared with, as text and as diagrams."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from flower_dp.planning.dp_fedpaq_bound import METHOD, Problem
from flower_dp.planning.planner import Panel
from flower_dp.planning.problem import Floats, ProblemError


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A feasible point of whole numbers that was compared."""

    name: str
    num_local_steps: int
    cohort_size: int
    quantization_levels: int
    num_rounds: int
    bits_used: float
    bound: float
    """Theorem 1."""
    scaled_bound: float
    """Theorem 1 with the noise term over mu^2; see `Problem.scaled_bound`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The feasible point of whole numbers with the least bound, and the reasons; without `best` no point is feasible."""

    problem: Problem
    best: Candidate | None
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]

    @property
    def infeasible(self) -> str | None:
        """Why the budget is not enough, with the smallest one that is."""
        if self.best is not None:
            return None
        least = self.problem.smallest_bits_budget()
        return f"bits_budget={self.problem.bits_budget:.15g}: nothing is feasible; the smallest feasible bits_budget is {least}"

    def to_dict(self) -> dict[str, object]:
        """Return the answer as plain values that JSON can hold; null where nothing is feasible."""
        best = self.best
        return {
            "method": METHOD,
            "num_local_steps": best and best.num_local_steps,
            "cohort_size": best and best.cohort_size,
            "quantization_levels": best and best.quantization_levels,
            "num_rounds": best and best.num_rounds,
            "bits_used": best and best.bits_used,
            "bound": best and best.bound,
            "smallest_bits_budget": self.problem.smallest_bits_budget(),
            "bound_parts": best and self.problem.parts(best.num_local_steps, best.cohort_size, best.quantization_levels),
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "reasons": list(self.reasons),
        }

    def lines(self) -> list[str]:
        """Return the answer for a reader, without the reasons."""
        problem, best = self.problem, self.best
        head = f"{METHOD}, {problem.num_clients} clients, {problem.num_iterations} iterations, {problem.bits_budget:.6g} bits"
        if best is None:
            return [head, "", "  infeasible", f"  smallest_bits_budget  {problem.smallest_bits_budget()}"]
        lines = [
            head,
            "",
            f"  num_local_steps      {best.num_local_steps}",
            f"  cohort_size          {best.cohort_size}",
            f"  quantization_levels  {best.quantization_levels}",
            f"  num_rounds           {best.num_rounds}",
            f"  bits_used            {best.bits_used:.6g}",
            f"  bound                {best.bound:.6g}  (expected squared distance to the optimum)",
            "",
            "Compared",
        ]
        width = max(len(candidate.name) for candidate in self.candidates)
        for point in self.candidates:
            where = f"E={point.num_local_steps} M={point.cohort_size} s={point.quantization_levels} K={point.num_rounds}"
            lines.append(f"  {point.name:<{width}}  {where}  bound {point.bound:.6g}  bits {point.bits_used:.6g}")
        return lines

    def panels(self) -> list[Panel]:
        """Return the bound over E, over s at the best E, and over M there, the rest chosen as well as the budget allows.

        Raises:
            ProblemError: if nothing is feasible.
        """
        best = self.best
        if best is None:
            raise ProblemError("plot", f"plot: there is nothing to draw; {self.infeasible}")
        free = replace(self.problem, num_local_steps=None)
        steps, levels = free.local_steps(), self.problem.max_quantization_levels
        at = f"at E = {best.num_local_steps}"
        return [
            Panel(
                title="DP-FedPAQ, best M and s",
                variable="local steps E",
                first=steps[0],
                last=max(min(steps[-1], max(4 * best.num_local_steps, 20)), best.num_local_steps),
                curves={"Theorem 1": _by_steps(free)},
                optimum=(best.num_local_steps, best.bound),
            ),
            Panel(
                title=f"{at}, best M",
                variable="quantization levels s",
                last=min(levels, max(4 * best.quantization_levels, 20)),
                curves={"Theorem 1": _by(best.num_local_steps, lambda s: replace(self.problem, quantization_levels=s))},
                optimum=(best.quantization_levels, best.bound),
            ),
            Panel(
                title=f"{at}, best s",
                variable="cohort size M",
                last=self.problem.num_clients,
                curves={"Theorem 1": _by(best.num_local_steps, lambda m: replace(self.problem, cohort_size=m))},
                optimum=(best.cohort_size, best.bound),
            ),
        ]


def _by_steps(problem: Problem) -> Callable[[Floats], Floats]:
    return lambda steps: np.asarray([_least(problem, int(one)) for one in steps])


def _by(steps: int, fixed: Callable[[int], Problem]) -> Callable[[Floats], Floats]:
    return lambda values: np.asarray([_least(fixed(int(value)), steps) for value in values])


def _least(problem: Problem, steps: int) -> float:
    levels, cohort = problem.cohorts(problem.num_rounds(steps))
    return float(np.min(problem.bound(steps, cohort, levels))) if len(levels) else float("nan")
