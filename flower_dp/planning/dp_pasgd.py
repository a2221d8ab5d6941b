"""DP-PASGD: the best number of steps, steps per round and noise, under a resource limit and a privacy budget.

Hu, Guo, Ratazzi, Gong: Differentially Private Federated Learning for Resource-Constrained Internet of Things. All M devices take
part in every round: tau steps w <- theta - eta (g + b) on mini-batches, with noise b in each step, then a plain mean. The unit
of privacy is one record, replaced by another. Local DP: every message carries its device's full noise.

The bound is Theorem 1 with Section 7, on the expected gap E[L(theta*) - L*] of the best iterate theta*.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from flower_dp.core import dp_events
from flower_dp.core.checks import BadValue
from flower_dp.core.formatting import format_delta, format_rounded_up
from flower_dp.planning import planner
from flower_dp.planning.planner import Data, Floats, Inputs, Panel, ProblemError, Row, finite, in_parts, real, whole
from flower_dp.privacy import accounting
from flower_dp.privacy.dp_pasgd import noise_std, paper_epsilon, proved_epsilon, zcdp_budget

Bound = Callable[[float | Floats, float | Floats], Floats]
Place = tuple[int, int]  # rounds, steps per round
# The largest number of steps that is searched.
MOST_STEPS = 10**7
# Stands for "no limit" on a number of steps.
_NEVER_ENDING = 10**12
# Numbers of steps that are evaluated at once, which limits memory.
_CHUNK = 10**6
# Numbers of rounds that a diagram tries for each tau.
_TRIED = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(planner.Problem):
    """A checked problem. Comments on the fields give the paper's letters."""

    METHOD: ClassVar[str] = "dp-pasgd"

    num_clients: int = whole()  # M
    cost_per_aggregation: float = real(at_least=0)  # c_1
    cost_per_step: float = real(at_least=0)  # c_2
    max_resource_cost: float = real(above=0)  # C_th
    epsilon: float = real(above=0)  # epsilon_th
    delta: float = real(above=0, below=1)
    learning_rate: float = real(above=0)  # eta
    smoothness: float = real(above=0)  # L
    # A smooth function satisfies Assumption 2, the Polyak-Lojasiewicz condition, for no lambda above L.
    strong_convexity: float = real(above=0, at_most="smoothness")  # lambda
    initial_gap: float = real(at_least=0)  # alpha
    gradient_variance: float = real(at_least=0)  # xi^2
    dimension: int = whole(at_most=10**15)  # d
    batch_size: tuple[int, ...] = whole(at_most=10**12, each=True)  # X_m
    clip_norm: float = real(above=0)  # G

    def check(self) -> None:
        """Refuse a problem without a feasible point, or whose bound overflows."""
        if not self.step_size_holds(1):
            least = f"learning_rate * smoothness <= 1, which is learning_rate <= {1 / self.smoothness:.6g}"
            raise BadValue("learning_rate", f"learning_rate={self.learning_rate!r}: the bound needs {least}")
        least_cost = self.cost(1, 1)
        if least_cost > self.max_resource_cost:
            first = f"one round of one step, cost_per_aggregation + cost_per_step = {least_cost:.6g}"
            raise BadValue("max_resource_cost", f"max_resource_cost={self.max_resource_cost!r}: must pay for {first}")
        try:
            zcdp_budget(epsilon=self.epsilon, delta=self.delta)
        except ValueError as error:
            raise BadValue("epsilon", str(error)) from error
        with np.errstate(all="ignore"):
            finite("epsilon", float(self.floor(1, 1)), "the noise term of the bound")
            finite("initial_gap", float(self.mean_bound(1, 1)), "the bound")

    def cost(self, num_rounds: float, num_steps: float) -> float:
        """Return c1 K/tau + c2 K, a device's cost of K steps in K/tau rounds (eq. 8)."""
        return self.cost_per_aggregation * num_rounds + self.cost_per_step * num_steps

    def step_size_holds(self, steps_per_round: int) -> bool:
        """Return whether eta L + eta^2 L^2 tau (tau - 1) <= 1, the condition of Theorem 1."""
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
        """Return whether a point of whole numbers meets the resource limit and the step-size condition."""
        return (
            self.step_size_holds(steps_per_round)
            and self.cost(num_rounds, num_rounds * steps_per_round) <= self.max_resource_cost
        )

    def noise_variance(self) -> float:
        """Return (d/M) sum_m sigma_m^2 of a single step; K steps have K times that (eq. 23, with the right sign)."""
        rho = zcdp_budget(epsilon=self.epsilon, delta=self.delta)
        mean = float(np.mean(np.asarray(self.batch_size, dtype=np.float64) ** -2.0))
        return self.dimension * 2 * (self.clip_norm * self.clip_norm) * mean / rho

    def floor(self, num_steps: float | Floats, steps_per_round: float | Floats) -> Floats:
        """Return B of eq. 13, elementwise: the part of the bound from batch and noise variance, which no training removes."""
        steps = np.asarray(num_steps, dtype=np.float64)
        return np.asarray(self._spread(steps_per_round) * (self.gradient_variance + self.noise_variance() * steps))

    def bound(self, num_steps: float | Floats, steps_per_round: float | Floats) -> Floats:
        """Return F = (1 - eta lambda)^K (alpha - B)/K + B of Theorem 1 (eq. 12), elementwise."""
        left, floor = self._left(num_steps), self.floor(num_steps, steps_per_round)
        return np.asarray(left * self.initial_gap + (1 - left) * floor)

    def mean_bound(self, num_steps: float | Floats, steps_per_round: float | Floats) -> Floats:
        """Return B + (1 - eta lambda) alpha / (eta lambda K), elementwise: the bound that eqs. 17 and 20 do prove.

        It bounds the mean gap of the K iterates, and so the gap of the best one. Theorem 1 applies eq. 17 K times, but the two
        sides of eq. 17 average over different iterates, k = 1..K and k = 0..K-1. Eq. 17 solved for the mean gives this bound.
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

        Both bounds are at least (1 - (1 - eta lambda)^K / K) B(K, 1), which grows with K.
        """
        per_step = self.cost_per_aggregation / self.most_steps_per_round() + self.cost_per_step
        low, high = 1, int(min(self.max_resource_cost / per_step + 1, _NEVER_ENDING)) if per_step > 0 else _NEVER_ENDING
        while low < high:
            middle = (low + high + 1) // 2
            grown = float((1 - self._left(middle)) * self.floor(middle, 1)) <= value
            low, high = (middle, high) if grown else (low, middle - 1)
        return low

    def least_steps_per_round(self, num_steps: Floats) -> Floats:
        """Return, elementwise, a lower bound on the whole tau with which the costs allow K steps; infinity if none does.

        This is tau* of eq. 22 with a whole number of rounds.
        """
        left = (self.max_resource_cost - self.cost_per_step * num_steps) * (1 + 1e-9)
        with np.errstate(divide="ignore", invalid="ignore"):
            rounds = np.floor(left / self.cost_per_aggregation + 1e-9) if self.cost_per_aggregation > 0 else num_steps
            least = np.ceil(num_steps / np.minimum(rounds, num_steps))
        return np.where((left >= 0) & (rounds >= 1) & (least <= self.most_steps_per_round()), least, np.inf)

    def _left(self, num_steps: float | Floats) -> Floats:
        """Return (1 - eta lambda)^K / K, the fraction of the initial gap that remains in the bound."""
        steps = np.asarray(num_steps, dtype=np.float64)
        return np.asarray((1 - self.learning_rate * self.strong_convexity) ** steps / steps)

    def _spread(self, steps_per_round: float | Floats) -> Floats:
        """Return the factor of the variances in eq. 13, which grows with tau."""
        step = self.learning_rate * self.smoothness
        more = np.asarray(steps_per_round, dtype=np.float64) - 1
        return np.asarray((step / self.num_clients + step * step * more) / (2 * self.strong_convexity))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(planner.Candidate):
    """A compared point: whole numbers, or the paper's relaxed point. `feasible` is whether a run can have it."""

    LETTERS: ClassVar[Mapping[str, str]] = {"num_steps": "K", "steps_per_round": "tau"}
    num_steps: float
    steps_per_round: float
    bound: float
    """Theorem 1."""
    mean_bound: float
    """The bound that the paper's derivation does prove; see `Problem.mean_bound`."""
    cost: float
    feasible: bool

    def shown(self) -> str:
        """Return the point and its bound for a reader."""
        point = f"{self.at(' ')} bound {self.bound:.6g} cost {self.cost:.6g}"
        return point if self.feasible else f"{point}  (infeasible)"


def plan(values: Mapping[str, object]) -> planner.Plan[Problem, Candidate]:
    """Return the best point for a problem (a mapping with the fields of `Problem` as keys).

    The point has the least Theorem 1 bound of all whole numbers of rounds and tau that cost at most max_resource_cost and meet
    the step-size condition; of equals, it has the fewest steps. Every device's noise is that of eq. 9 for its batch size and
    epsilon, computed for the whole number K. noise_std is a list if batch_size is a list.

    Raises:
        ProblemError: naming the key that is unknown, missing or out of range.
    """
    problem = Problem.from_mapping(values)
    rounds, tau = _best(problem, problem.bound)
    costs: dict[str, Any] = {"delta": problem.delta, "num_steps": rounds * tau, "clip_norm": problem.clip_norm}
    noise = {size: noise_std(epsilon=problem.epsilon, batch_size=size, **costs) for size in set(problem.batch_size)}
    low, high = (finite("epsilon", std, "noise_std") for std in (min(noise.values()), max(noise.values())))
    # Every device has the same noise multiplier up to rounding; the least one gives the largest epsilon.
    size = min(noise, key=lambda batch_size: noise[batch_size] * batch_size)
    tight = proved_epsilon(noise_std=noise[size], batch_size=size, **costs)
    paper = max(paper_epsilon(noise_std=std, batch_size=size, **costs) for size, std in noise.items())
    each, stds = [noise[size] for size in problem.batch_size], f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
    several = isinstance(values["batch_size"], list | tuple | np.ndarray)
    candidates = _candidates(problem, (rounds, tau))
    best = candidates[0]
    with_delta = f"exact composition, delta {format_delta(problem.delta)}"
    return planner.Plan(
        problem=problem,
        head=f"{problem.METHOD}, {problem.num_clients} clients",
        best=best,
        rows=(
            Row("num_steps", rounds * tau),
            Row("steps_per_round", tau),
            Row("num_rounds", rounds),
            Row("noise_std", each if several else each[0], "on every coordinate of a mini-batch gradient", stds),
            Row("bound", best.bound, "expected gap of the loss"),
            Row("cost", best.cost, f"of {problem.max_resource_cost:.6g}"),
            Row("epsilon", paper, "the paper's formula", format_rounded_up(paper, 6)),
            Row("epsilon_proved", tight, with_delta, format_rounded_up(tight, 6)),
        ),
        details={"bound_parts": problem.parts(rounds * tau, tau)},
        candidates=candidates,
        reasons=tuple(_reasons(problem, candidates)),
        panels=_panels(problem, rounds, tau, best.bound),
    )


def from_data(data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys that the clients' data determine; gradient_variance only if `given` has a batch_size.

    xi^2 of Assumption 4 is the largest mean squared distance of a device's mini-batch gradient from the gradient of the mean
    loss. It is the variance of the device's records over its batch size, plus the squared distance of its own mean.
    """
    constants = data.constants
    values = constants.named("strong_convexity", "smoothness", "initial_gap") | {"clip_norm": constants.l2_norm}
    values |= {"num_clients": len(data.num_records), "dimension": data.dimension}
    notes = [] if "clip_norm" in given else [planner.PILOTS_CLIP_NORM]
    sizes = given.get("batch_size")
    smallest = min(sizes, default=0) if isinstance(sizes, list) else sizes
    if isinstance(smallest, int) and smallest >= 1:
        variance = max(constants.gradient_variance) / smallest + constants.gradient_distance**2
        values["gradient_variance"] = variance
        notes.append(
            f"gradient_variance is for a batch of {smallest} records, and includes the differences between devices' data"
        )
    else:
        notes.append("gradient_variance depends on batch_size, which the problem does not give")
    return Inputs(values=values, notes=tuple(notes))


def _best(problem: Problem, bound: Bound) -> Place:
    """Return the feasible point of least bound. Both bounds grow with tau, so each K has its least feasible tau."""
    best = _start(problem, bound)
    least = float(bound(best[0] * best[1], best[1]))
    last = problem.last_step(least)
    if last > MOST_STEPS:
        allows = f"costs and noise allow {last:.3g} steps; at most {MOST_STEPS:.0e} can be searched, so lower the limit"
        raise ProblemError("max_resource_cost", f"max_resource_cost={problem.max_resource_cost!r}: {allows}")
    for first in range(1, last + 1, _CHUNK):
        steps = np.arange(first, min(first + _CHUNK, last + 1), dtype=np.float64)
        tau = problem.least_steps_per_round(steps)
        with np.errstate(invalid="ignore"):
            value = np.where(np.isfinite(tau), bound(steps, np.where(np.isfinite(tau), tau, 1.0)), np.inf)
        order = np.flatnonzero(value <= least)
        for index in order[np.argsort(value[order], kind="stable")]:
            if value[index] > least:
                break
            point = _point(problem, int(steps[index]), int(tau[index]))
            if point is None:
                continue
            bound_here = float(bound(steps[index], point[1]))
            if (bound_here, steps[index]) < (least, best[0] * best[1]):
                best, least = point, bound_here
    return best


def _start(problem: Problem, bound: Bound) -> Place:
    """Return a good feasible point to start the search with."""
    points = []
    for tau in _spaced(problem.most_steps_per_round()):
        per_round = problem.cost(1, tau)
        most = problem.max_resource_cost / per_round if per_round > 0 else float(MOST_STEPS)
        points += [(rounds, tau) for rounds in _spaced(int(min(most, MOST_STEPS))) if problem.feasible(rounds, tau)]
    values = bound(np.asarray([rounds * tau for rounds, tau in points]), np.asarray([tau for _, tau in points]))
    return points[int(np.argmin(values))]


def _spaced(last: int) -> list[int]:
    """Return some whole numbers in 1..last, about evenly spaced in the logarithm."""
    return sorted({int(value) for value in np.geomspace(1, max(last, 1), 60)} | set(range(1, min(last, 20) + 1)))


def _point(problem: Problem, num_steps: int, least: int) -> Place | None:
    """Return the point of this K with the least feasible tau, or None."""
    small = np.arange(1, math.isqrt(num_steps) + 1)
    small = small[num_steps % small == 0]
    for tau in np.union1d(small, num_steps // small):
        if tau >= least and problem.feasible(num_steps // int(tau), int(tau)):
            return num_steps // int(tau), int(tau)
    return None


def _candidates(problem: Problem, best: Place) -> tuple[Candidate, ...]:
    """Return the best point, DP-SGD (tau = 1), the best point under the proved bound, and the paper's relaxed point."""
    corrected = _best(problem, problem.mean_bound)
    candidates = [
        _candidate(problem, "best", math.prod(best), best[1]),
        _candidate(problem, "best with tau = 1", _rounds_at_one(problem), 1),
        _candidate(problem, "best for the mean of the iterates", math.prod(corrected), corrected[1]),
    ]
    steps = np.arange(1.0, max(4 * math.prod(best), 1000) + 1)
    tau = _relaxed_steps_per_round(problem, steps)
    if np.isfinite(tau).any():
        index = int(np.nanargmin(problem.bound(steps, tau)))
        candidates.append(_candidate(problem, "the paper's relaxation", float(steps[index]), float(tau[index])))
    return tuple(candidates)


def _rounds_at_one(problem: Problem) -> int:
    per_round = problem.cost(1, 1)
    most = int(
        min(problem.max_resource_cost / per_round if per_round > 0 else MOST_STEPS, problem.last_step(math.inf), MOST_STEPS)
    )
    rounds = np.arange(1.0, max(most, 1) + 1)
    kept = rounds[problem.cost_per_aggregation * rounds + problem.cost_per_step * rounds <= problem.max_resource_cost]
    return int(kept[np.argmin(problem.bound(kept, 1.0))])


def _candidate(problem: Problem, name: str, num_steps: float, tau: float) -> Candidate:
    rounds = num_steps / tau
    return Candidate(
        name=name,
        num_steps=num_steps,
        steps_per_round=tau,
        bound=float(problem.bound(num_steps, tau)),
        mean_bound=float(problem.mean_bound(num_steps, tau)),
        cost=problem.cost(rounds, num_steps),
        feasible=float(tau).is_integer() and num_steps % tau == 0 and problem.feasible(int(rounds), int(tau)),
    )


def _reasons(problem: Problem, candidates: tuple[Candidate, ...]) -> list[str]:
    best, alone, corrected = candidates[:3]
    reasons = []
    if best.steps_per_round == 1:
        costs = "the costs allow a round for each of these steps, and every larger tau raises the bound"
        reasons.append(f"tau = 1, which is DP-SGD: {costs}")
    else:
        other = f"with tau = 1 the costs allow no better than {alone.at()} with {alone.bound:.4g}"
        reasons.append(f"{best.at()} has the least bound, {best.bound:.4g}; {other}")
    reasons.append(in_parts(problem.parts(int(best.num_steps), int(best.steps_per_round)), best.bound))
    falls = "in Theorem 1 the term of the initial gap falls like (1 - eta lambda)^K / K, which its proof does not give"
    proved = f"the proved bound, B + (1 - eta lambda) alpha / (eta lambda K), is {best.mean_bound:.4g} here"
    reasons.append(f"{falls}; {proved} and least at {corrected.at()} with {corrected.mean_bound:.4g}")
    if best.mean_bound >= problem.initial_gap:
        words = {"bound": "the proved bound", "ranks": "the bound ranks the points"}
        reasons.append(planner.no_promise("initial_gap", problem.initial_gap, **words))
    relaxed = candidates[-1]
    if relaxed.name != corrected.name and not relaxed.feasible:
        why = "which may cost too much, and tau may not divide K; here whole numbers were compared"
        reasons.append(f"the paper rounds {relaxed.at()} to the nearest whole numbers, {why}")
    wrong = "eq. 23 as printed has a wrong sign and far too little noise; noise_std solves eq. 9"
    reasons.append(wrong + _needed(problem.epsilon, problem.delta))
    if len(set(problem.batch_size)) > 1:
        reasons.append("every device has the noise of its own batch size; the bound takes the mean of their variances")
    return reasons


@lru_cache(maxsize=64)
def _needed(epsilon: float, delta: float) -> str:
    """Return text that says how much less noise exact composition needs: the same fraction for any number of steps."""
    try:
        needed = accounting.calibrate(dp_events.GaussianDpEvent, epsilon=epsilon, delta=delta, relation="replace-one")
    except ValueError:  # out of the accountant's reach
        return ""
    less = 1 - needed / math.sqrt(2 / zcdp_budget(epsilon=epsilon, delta=delta))
    return f"; exact composition needs {100 * less:.0f} % less noise for the same epsilon" if less > 0 else ""


def _panels(problem: Problem, rounds: int, tau: int, bound: float) -> tuple[Panel, Panel]:
    """Return the bound over tau, with the best number of rounds for each, and over K, with the relaxed tau of eq. 22."""
    reach, steps = problem.most_steps_per_round(), rounds * tau
    if problem.cost_per_step > 0:
        reach = min(reach, int((problem.max_resource_cost - problem.cost_per_aggregation) / problem.cost_per_step))
    last_tau, last_steps = planner.last_shown(tau, reach), planner.last_shown(steps, problem.last_step(math.inf))

    def by_tau(taus: Floats) -> Floats:
        return np.asarray([_least(problem, int(value), rounds) for value in taus])

    def by_steps(numbers: Floats) -> Floats:
        return problem.bound(numbers, _relaxed_steps_per_round(problem, numbers))

    return (
        Panel("DP-PASGD, best number of rounds", "steps per round tau", {"feasible": by_tau}, last_tau, (tau, bound)),
        Panel("DP-PASGD, least tau that the costs allow", "steps K", {"relaxed": by_steps}, last_steps, (steps, bound)),
    )


def _relaxed_steps_per_round(problem: Problem, num_steps: Floats) -> Floats:
    """Return tau* = c1 K / (C_th - c2 K) of eq. 22, at least 1; NaN if the step-size condition or the costs forbid it."""
    left = problem.max_resource_cost - problem.cost_per_step * num_steps
    with np.errstate(divide="ignore", invalid="ignore"):
        tau = np.maximum(problem.cost_per_aggregation * num_steps / left, 1.0) if problem.cost_per_aggregation else 1 + 0 * left
        step = problem.learning_rate * problem.smoothness
        allowed = (left >= 0) & (tau <= num_steps) & (step + step * step * tau * (tau - 1) <= 1)
    return np.where(allowed, tau, np.nan)


def _least(problem: Problem, tau: int, best_num_rounds: int) -> float:
    """Return the least bound at this tau over some numbers of rounds."""
    per_round = problem.cost(1, tau)
    most = problem.max_resource_cost / per_round if per_round > 0 else np.inf
    tried = np.unique(np.geomspace(1, max(min(most, 10.0 * best_num_rounds), 1.0), _TRIED).round())
    rounds = [int(count) for count in {*tried, best_num_rounds} if problem.feasible(int(count), tau)]
    return float(np.min(problem.bound(np.asarray(rounds, dtype=np.float64) * tau, tau))) if rounds else float("nan")
