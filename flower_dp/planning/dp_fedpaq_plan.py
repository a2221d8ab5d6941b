"""DP-FedPAQ's answer: the best point and the points that it was compared with, as text and as diagrams."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from flower_dp.core import compression
from flower_dp.planning.dp_fedpaq_bound import METHOD, Problem
from flower_dp.planning.planner import Panel
from flower_dp.planning.problem import Floats, ProblemError
from flower_dp.privacy import accounting
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, expected_replies, update_terms

# Of clients with different numbers of records so many are accounted; beyond it the run's epsilon is left to `flower-dp epsilon`.
_MOST_SIZES = 4
# Of a model whose message is made for its size.
_MOST_PARAMETERS = 10**7


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
class PlannedRun:
    """A candidate as a run of the app: the theorem's step size, the paper's noise, and what it costs and sends.

    Attributes:
        settings: of the app, by key; data, model and output are left to the preset or the user.
        num_replies: the most of a client.
        epsilon: proved for all replies of the client whom it costs most, at `delta`; None: clients are of too many sizes.
        delta: of the problem.
        bits_sent: of all uplink messages, as long as that of Gaussian noise; None: too many parameters to try.
        most_bits_sent: of all uplink messages at most.
    """

    settings: dict[str, object]
    num_replies: int
    epsilon: float | None
    delta: float
    bits_sent: int | None
    most_bits_sent: int

    @property
    def command(self) -> str:
        """The command that makes the run, with a preset to be named."""
        return " ".join(["flower-dp run PRESET", *(f"--set {key}={_written(value)}" for key, value in self.settings.items())])

    @classmethod
    def of(cls, problem: Problem, point: Candidate) -> "PlannedRun":
        """Return the run of a feasible point.

        eta_k = 4 / (mu (k E + 4 E)) is a step size of 1 / (mu E), half as large after 4 E local steps. A record's gradient is
        clipped to G. Where clients have different epsilons, the least is that of all.
        """
        steps = FedPAQSteps(
            learning_rate=1 / (problem.strong_convexity * point.num_local_steps),
            num_local_steps=point.num_local_steps,
            batch_size=problem.batch_size,
            clip_norm=problem.gradient_bound,
            sensitivity="per-step",
            decay_iterations=4.0 * point.num_local_steps,
        )
        epsilon, clients = float(np.min(problem.epsilon)), problem.num_clients
        everyone = point.cohort_size == clients
        settings: dict[str, object] = {
            "method": METHOD,
            "num-clients": clients,
            "num-rounds": point.num_rounds,
            "sampling": "full" if everyone else "fixed-size",
            "cohort-size": 0 if everyone else point.cohort_size,
            "batch-size": problem.batch_size,
            "learning-rate": steps.learning_rate,
            f"{METHOD}.epsilon": epsilon,
            f"{METHOD}.delta": problem.delta,
            f"{METHOD}.calibration": "paper",
            f"{METHOD}.clip-norm": steps.clip_norm,
            f"{METHOD}.num-local-steps": point.num_local_steps,
            f"{METHOD}.sensitivity": steps.sensitivity,
            f"{METHOD}.update-clip-norm": 0.0,
            f"{METHOD}.smoothness": 0.0,
            f"{METHOD}.decay-iterations": steps.decay_iterations,
            f"{METHOD}.quantization-levels": point.quantization_levels,
            f"{METHOD}.num-replies": 0,
        }
        replies = expected_replies(point.num_rounds, point.cohort_size, clients, at_random=True)
        messages = point.num_rounds * point.cohort_size
        sizes, costs = sorted(set(problem.num_records)), []
        for size in sizes if len(sizes) <= _MOST_SIZES else ():
            terms = update_terms(
                steps=steps, epsilon=epsilon, delta=problem.delta, num_replies=replies, num_records=size, calibration="paper"
            )
            event = accounting.repeated(terms.event, replies)
            costs.append(accounting.epsilon(event, delta=problem.delta, relation=terms.release.relation).epsilon)
        return cls(
            settings=settings,
            num_replies=replies,
            epsilon=max(costs, default=None),
            delta=problem.delta,
            bits_sent=_as_noise(problem.dimension, point.quantization_levels, messages),
            most_bits_sent=8 * messages * compression.qsgd_bytes(problem.dimension, point.quantization_levels),
        )

    def lines(self) -> list[str]:
        """Return it for a reader."""
        proved = "of too many sizes of clients; flower-dp epsilon says it"
        if self.epsilon is not None:
            number = f"{self.epsilon:.6g}" if math.isfinite(self.epsilon) else "infinite"
            proved = f"{number}  (proved, {self.num_replies} replies of a client together, delta {self.delta:g})"
        sent = "" if self.bits_sent is None else f"{self.bits_sent:.6g} if updates are Gaussian noise, "
        return [
            "To run it",
            f"  {self.command}",
            f"  epsilon    {proved}",
            f"  bits sent  {sent}at most {self.most_bits_sent:.6g}",
        ]


def _as_noise(dimension: int, levels: int, messages: int) -> int | None:
    if dimension > _MOST_PARAMETERS:
        return None
    rng = np.random.default_rng(0)
    return 8 * messages * compression.qsgd(rng.standard_normal(dimension), levels, rng).num_bytes


def _written(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


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
            "run": best and _json(PlannedRun.of(self.problem, best)),
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
        return [*lines, "", *PlannedRun.of(problem, best).lines()]

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


def _json(run: PlannedRun) -> dict[str, object]:
    epsilon = run.epsilon if run.epsilon is not None and math.isfinite(run.epsilon) else None
    return asdict(run) | {"epsilon": epsilon, "command": run.command}


def _by_steps(problem: Problem) -> Callable[[Floats], Floats]:
    return lambda steps: np.asarray([_least(problem, int(one)) for one in steps])


def _by(steps: int, fixed: Callable[[int], Problem]) -> Callable[[Floats], Floats]:
    return lambda values: np.asarray([_least(fixed(int(value)), steps) for value in values])


def _least(problem: Problem, steps: int) -> float:
    levels, cohort = problem.cohorts(problem.num_rounds(steps))
    return float(np.min(problem.bound(steps, cohort, levels))) if len(levels) else float("nan")
