"""FedSGD-DPC's answer: the best point and the points that it was compared with, as text and as diagrams."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

from flower_dp.core import checks
from flower_dp.planning.fedsgd_dpc_bound import METHOD, Problem
from flower_dp.planning.planner import Panel


def num_replies(num_clients: int, cohort_size: int, num_rounds: int) -> int:
    """Return the most replies that round robin asks of one client: ceil(b T / N)."""
    checks.integer("num_clients", num_clients, at_least=1)
    checks.integer("cohort_size", cohort_size, at_least=1, at_most=num_clients)
    checks.integer("num_rounds", num_rounds, at_least=0)
    return -(-cohort_size * num_rounds // num_clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point of whole numbers that was compared, and the continuous point that it rounds, if any."""

    name: str
    cohort_size: int
    num_rounds: int
    bound: float
    continuous_cohort_size: float | None = None
    continuous_num_rounds: float | None = None
    continuous_bound: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best point of whole numbers under the bound, the points that it was compared with, and the reasons.

    `num_rounds` and `cohort_size` are not the rounded continuous optimum but the whole numbers of least bound. The candidates
    have the continuous values too, for a comparison with the paper, whose Table I rounds b* up.
    """

    problem: Problem
    best: Candidate
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]
    infeasible: ClassVar[None] = None
    """A FedSGD-DPC problem always has an optimum."""

    def continuous_optimum(self) -> dict[str, float] | None:
        """Return the least of the candidates' continuous points, or None where nothing was rounded."""
        points = [
            {"cohort_size": point.continuous_cohort_size, "num_rounds": point.continuous_num_rounds, "bound": bound}
            for point in self.candidates
            if (bound := point.continuous_bound) is not None
            and point.continuous_cohort_size is not None
            and point.continuous_num_rounds is not None
        ]
        return min(points, key=lambda point: point["bound"]) if points else None

    def to_dict(self) -> dict[str, object]:
        """Return the answer as plain values that JSON can hold."""
        return {
            "method": METHOD,
            "mechanism": self.problem.mechanism,
            "num_rounds": self.best.num_rounds,
            "cohort_size": self.best.cohort_size,
            "bound": self.best.bound,
            "continuous_optimum": self.continuous_optimum(),
            "num_replies": num_replies(self.problem.num_clients, self.best.cohort_size, self.best.num_rounds),
            "bound_parts": self.problem.parts(self.best.num_rounds, self.best.cohort_size),
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "reasons": list(self.reasons),
        }

    def lines(self) -> list[str]:
        """Return the answer for a reader, without the reasons."""
        problem, best = self.problem, self.best
        replies = num_replies(problem.num_clients, best.cohort_size, best.num_rounds)
        lines = [
            f"{METHOD}, {problem.mechanism} mechanism, {problem.num_clients} clients",
            "",
            f"  num_rounds   {best.num_rounds}",
            f"  cohort_size  {best.cohort_size}",
            f"  bound        {best.bound:.6g}  (expected squared distance to the optimum)",
            f"  num_replies  {replies}  (at most, of each client)",
            "",
            "Compared",
        ]
        width = max(len(candidate.name) for candidate in self.candidates)
        for candidate in self.candidates:
            line = f"  {candidate.name:<{width}}  b={candidate.cohort_size} T={candidate.num_rounds} bound {candidate.bound:.6g}"
            if candidate.continuous_bound is not None:
                where = f"b={candidate.continuous_cohort_size:.6g} T={candidate.continuous_num_rounds:.6g}"
                line += f"  (continuous: {where} bound {candidate.continuous_bound:.6g})"
            lines.append(line)
        return lines

    def panels(self) -> list[Panel]:
        """Return the bound over the rounds, and over the cohort size at the best number of rounds."""
        best, problem, bound = self.best, self.problem, self.problem.bound()
        cohorts = sorted({1, problem.num_clients, best.cohort_size})
        rounds = max([best.num_rounds, *(point.num_rounds for point in self.candidates if point.num_rounds)])
        last = min(max(2 * rounds, 10), problem.max_rounds or 10**15)
        by_rounds = Panel(
            title=f"FedSGD-DPC, {problem.mechanism}",
            variable="rounds T",
            first=0,
            last=last,
            curves={f"b = {b}": partial(bound.value, cohort_size=b) for b in cohorts},
            optimum=(best.num_rounds, best.bound),
        )
        if best.num_rounds == 0:
            return [by_rounds]
        by_cohort = Panel(
            title=f"at T = {best.num_rounds}",
            variable="cohort size b",
            last=problem.num_clients,
            curves={f"T = {best.num_rounds}": partial(bound.value, best.num_rounds)},
            optimum=(best.cohort_size, best.bound),
        )
        return [by_rounds, by_cohort]
