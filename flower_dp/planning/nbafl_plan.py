"""NbAFL's answer: the noise, the best points of both bounds, in words and in diagrams."""

from dataclasses import asdict, dataclass

from flower_dp.planning.nbafl_bound import METHOD, Bounds, Problem
from flower_dp.planning.planner import Panel
from flower_dp.planning.problem import ProblemError


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The bound at one (K, T), or why there is none; `last_cohort_size` ends a run of cohort sizes without a bound."""

    name: str
    cohort_size: int
    num_rounds: int
    bound: float | None
    reason: str | None = None
    last_cohort_size: int | None = None

    @property
    def feasible(self) -> bool:
        """Tell whether the bound says anything here."""
        return self.bound is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The noise and, if the bound's constants are given, the best T for all clients and the best K for the given T."""

    problem: Problem
    uplink_noise_std: float
    downlink_noise_std: float
    bounds: Bounds | None
    best_num_rounds: Point | None
    best_cohort_size: Point | None
    candidates: tuple[Point, ...]
    reasons: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Tell whether there is an answer: always for the noise alone, else if either bound says anything anywhere."""
        return self.bounds is None or any(
            point is not None and point.feasible for point in (self.best_num_rounds, self.best_cohort_size)
        )

    @property
    def infeasible(self) -> str | None:
        """Why neither bound says anything anywhere."""
        if self.feasible:
            return None
        points = (("num_rounds", self.best_num_rounds), ("cohort_size", self.best_cohort_size))
        return "nothing is feasible: " + "; ".join(f"{key}: {point.reason}" for key, point in points if point is not None)

    def to_dict(self) -> dict[str, object]:
        """Return the answer as plain values that JSON can hold; what is infeasible has the bound null and a reason."""
        answer: dict[str, object] = {
            "method": METHOD,
            "uplink_noise_std": self.uplink_noise_std,
            "downlink_noise_std": self.downlink_noise_std,
        }
        if self.best_num_rounds is not None and self.best_cohort_size is not None:
            rounds, cohort = self.best_num_rounds, self.best_cohort_size
            answer |= {
                "best_num_rounds": rounds.num_rounds if rounds.feasible else None,
                "best_num_rounds_bound": rounds.bound,
                "best_cohort_size": cohort.cohort_size if cohort.feasible else None,
                "best_cohort_size_bound": cohort.bound,
                "candidates": [asdict(point) for point in self.candidates if point.feasible],
                "infeasible": [asdict(point) for point in self.candidates if not point.feasible],
            }
        return answer | {"reasons": list(self.reasons)}

    def lines(self) -> list[str]:
        """Return the answer for a reader, without the reasons."""
        problem = self.problem
        lines = [
            f"{METHOD}, {problem.cohort_size} of {problem.num_clients} clients, {problem.num_rounds} rounds",
            "",
            f"  uplink_noise_std    {self.uplink_noise_std:.6g}",
            f"  downlink_noise_std  {self.downlink_noise_std:.6g}",
        ]
        for name, point in (("best_num_rounds", self.best_num_rounds), ("best_cohort_size", self.best_cohort_size)):
            if point is None:
                continue
            where = point.num_rounds if name == "best_num_rounds" else point.cohort_size
            answer = "infeasible" if point.bound is None else f"{where}  (bound {point.bound:.6g})"
            lines.append(f"  {name:<18}  {answer}")
        if self.candidates:
            lines += ["", "Compared"]
        for point in self.candidates:
            until = f"..{point.last_cohort_size}" if point.last_cohort_size not in {None, point.cohort_size} else ""
            value = f"infeasible: {point.reason}" if point.bound is None else f"bound {point.bound:.6g}"
            lines.append(f"  {point.name:<23}  K={point.cohort_size}{until} T={point.num_rounds}  {value}")
        return lines

    def panels(self) -> list[Panel]:
        """Return Theorem 2 over the rounds, and Theorem 3 over the cohort size.

        Raises:
            ProblemError: if the problem gives none of the bound's constants.
        """
        bounds, best_t, best_k = self.bounds, self.best_num_rounds, self.best_cohort_size
        if bounds is None or best_t is None or best_k is None:
            raise ProblemError("plot", "plot: there is no bound to draw; the problem gives none of its constants")
        rounds = self.problem.num_rounds
        return [
            Panel(
                title="NbAFL, all clients",
                variable="rounds T",
                last=bounds.max_rounds if best_t.bound is None else min(bounds.max_rounds, max(4 * best_t.num_rounds, 10)),
                curves={"Theorem 2": bounds.all_clients},
                optimum=None if best_t.bound is None else (best_t.num_rounds, best_t.bound),
            ),
            Panel(
                title=f"NbAFL, K of {self.problem.num_clients} clients, T = {rounds}",
                variable="cohort size K",
                last=self.problem.num_clients,
                curves={"Theorem 3": lambda k: bounds.sampled_clients(k, rounds)},
                optimum=None if best_k.bound is None else (best_k.cohort_size, best_k.bound),
            ),
        ]
