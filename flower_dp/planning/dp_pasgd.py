"""DP-PASGD: the best number of steps, of steps in a round, and the noise, under budgets of costs and of privacy.

Hu, Guo, Ratazzi, Gong: Differentially Private Federated Learning for Resource-Constrained Internet of Things. All M devices take
part in every round: tau steps w <- theta - eta (g + b) on mini-batches, with noise b in each step, then a plain mean. The unit
of privacy is one record, replaced by another; every message is private on its own (local DP).
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from flower_dp.core import dp
from flower_dp.planning.dp_pasgd_bound import METHOD, MOST_STEPS, Problem
from flower_dp.planning.dp_pasgd_plan import Candidate, Plan, relaxed_steps_per_round
from flower_dp.planning.planner import Data, Inputs
from flower_dp.planning.problem import Floats, ProblemError, finite
from flower_dp.privacy import accounting
from flower_dp.privacy.dp_pasgd import noise_std, paper_epsilon, tight_epsilon, zcdp_budget

__all__ = ["METHOD", "Candidate", "Plan", "from_data", "plan"]

Bound = Callable[[float | Floats, float | Floats], Floats]
Point = tuple[int, int]  # rounds, steps per round
_CHUNK = 10**6


def plan(values: Mapping[str, object]) -> Plan:
    """Return the best point for a problem (a mapping with the fields of `dp_pasgd_bound.Problem` as keys).

    The point has the least Theorem 1 bound of all whole numbers of rounds and tau whose cost is at most max_cost and for
    which the step-size condition holds; of equals, the one with the fewest steps. Every device's noise is that of eq. 9 for its
    batch size and epsilon, computed for the whole number K.

    Raises:
        ProblemError: naming the key that is unknown, missing or impossible.
    """
    problem = Problem.from_mapping(values)
    rounds, tau = _best(problem, problem.bound)
    noise = {size: _noise(problem, rounds * tau, size) for size in set(problem.batch_size)}
    costs: dict[str, Any] = {"delta": problem.delta, "num_steps": rounds * tau, "clip_norm": problem.clip_norm}
    # Every device has the same noise multiplier, but for rounding.
    size = min(noise, key=lambda one: noise[one] * one)
    candidates = _candidates(problem, (rounds, tau))
    return Plan(
        problem=problem,
        num_rounds=rounds,
        steps_per_round=tau,
        noise_std=tuple(noise[size] for size in problem.batch_size),
        bound=float(problem.bound(rounds * tau, tau)),
        epsilon=max(paper_epsilon(noise_std=std, batch_size=size, **costs) for size, std in noise.items()),
        epsilon_tight=tight_epsilon(noise_std=noise[size], batch_size=size, **costs),
        candidates=candidates,
        reasons=tuple(_reasons(problem, candidates)),
    )


def from_data(data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys that the clients' data determine; gradient_variance only if `given` has a batch_size.

    xi^2 of Assumption 4 is the largest mean squared distance of a device's mini-batch gradient from the gradient of the mean
    loss: the variance of its records over its batch size, and the squared distance of its own mean.
    """
    constants = data.constants
    values: dict[str, object] = {
        "num_clients": len(data.num_records),
        "dimension": data.dimension,
        "strong_convexity": constants.strong_convexity,
        "smoothness": constants.smoothness,
        "initial_gap": constants.initial_gap,
        "clip_norm": constants.l2_norm,
    }
    notes = []
    if "clip_norm" not in given:
        notes.append("clip_norm is the largest norm of a record's gradient in the pilot: usually far too much")
    sizes = given.get("batch_size")
    smallest = min(sizes, default=0) if isinstance(sizes, list) else sizes
    if isinstance(smallest, int) and smallest >= 1:
        variance = max(constants.gradient_variance) / smallest + constants.gradient_distance**2
        values["gradient_variance"] = variance
        notes.append(f"gradient_variance is that of a batch of {smallest} records, and of devices whose data differ")
    else:
        notes.append("gradient_variance depends on batch_size, which the problem does not give")
    return Inputs(values=values, notes=tuple(notes))


def _noise(problem: Problem, num_steps: int, batch_size: int) -> float:
    std = noise_std(
        epsilon=problem.epsilon,
        delta=problem.delta,
        num_steps=num_steps,
        clip_norm=problem.clip_norm,
        batch_size=batch_size,
    )
    return finite("epsilon", std, "noise_std")


def _best(problem: Problem, bound: Bound) -> Point:
    """Return the feasible point of least bound. Both bounds grow with tau, so the best tau for a K is the least feasible one."""
    best = _start(problem, bound)
    least = float(bound(best[0] * best[1], best[1]))
    last = problem.last_step(least)
    if last > MOST_STEPS:
        raise ProblemError(
            "max_cost",
            f"max_cost={problem.max_cost!r}: allows {last:.3g} steps, and neither costs nor noise rule them out;"
            f" at most {MOST_STEPS:.0e} can be searched",
        )
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
            found = float(bound(steps[index], point[1]))
            if (found, steps[index]) < (least, best[0] * best[1]):
                best, least = point, found
    return best


def _start(problem: Problem, bound: Bound) -> Point:
    """Return a good feasible point, with which the search compares others."""
    found = []
    for tau in _spaced(problem.most_steps_per_round()):
        per_round = problem.cost(1, tau)
        most = problem.max_cost / per_round if per_round > 0 else float(MOST_STEPS)
        found += [(rounds, tau) for rounds in _spaced(int(min(most, MOST_STEPS))) if problem.feasible(rounds, tau)]
    values = bound(np.asarray([rounds * tau for rounds, tau in found]), np.asarray([tau for _, tau in found]))
    return found[int(np.argmin(values))]


def _spaced(last: int) -> list[int]:
    """Return some whole numbers in 1..last, about evenly spaced in their logarithms."""
    return sorted({int(value) for value in np.geomspace(1, max(last, 1), 60)} | set(range(1, min(last, 20) + 1)))


def _point(problem: Problem, num_steps: int, least: int) -> Point | None:
    """Return the point of this K with the least feasible tau, or None."""
    small = np.arange(1, math.isqrt(num_steps) + 1)
    small = small[num_steps % small == 0]
    for tau in np.union1d(small, num_steps // small):
        if tau >= least and problem.feasible(num_steps // int(tau), int(tau)):
            return num_steps // int(tau), int(tau)
    return None


def _candidates(problem: Problem, best: Point) -> tuple[Candidate, ...]:
    """Return the best point, DP-SGD (tau = 1), the best point under the bound that is proved, and the paper's relaxed point."""
    corrected = _best(problem, problem.mean_bound)
    found = [
        _candidate(problem, "best", *best),
        _candidate(problem, "best with tau = 1", _rounds_at_one(problem), 1),
        _candidate(problem, "best for the mean of the iterates", *corrected),
    ]
    steps = np.arange(1.0, max(4 * best[0] * best[1], 1000) + 1)
    tau = relaxed_steps_per_round(problem, steps)
    if np.isfinite(tau).any():
        index = int(np.nanargmin(problem.bound(steps, tau)))
        k, t = float(steps[index]), float(tau[index])
        found.append(
            Candidate(
                name="the paper's relaxation",
                num_steps=k,
                steps_per_round=t,
                bound=float(problem.bound(k, t)),
                mean_bound=float(problem.mean_bound(k, t)),
                cost=problem.cost_per_aggregation * k / t + problem.cost_per_step * k,
                feasible=t.is_integer() and k % t == 0 and problem.feasible(int(k / t), int(t)),
            )
        )
    return tuple(found)


def _rounds_at_one(problem: Problem) -> int:
    per_round = problem.cost(1, 1)
    most = int(min(problem.max_cost / per_round if per_round > 0 else MOST_STEPS, problem.last_step(math.inf), MOST_STEPS))
    rounds = np.arange(1.0, max(most, 1) + 1)
    kept = rounds[problem.cost_per_aggregation * rounds + problem.cost_per_step * rounds <= problem.max_cost]
    return int(kept[np.argmin(problem.bound(kept, 1.0))])


def _candidate(problem: Problem, name: str, num_rounds: int, tau: int) -> Candidate:
    steps = num_rounds * tau
    return Candidate(
        name=name,
        num_steps=steps,
        steps_per_round=tau,
        bound=float(problem.bound(steps, tau)),
        mean_bound=float(problem.mean_bound(steps, tau)),
        cost=problem.cost(num_rounds, steps),
        feasible=problem.feasible(num_rounds, tau),
    )


def _reasons(problem: Problem, candidates: tuple[Candidate, ...]) -> list[str]:
    best, alone, corrected = candidates[:3]
    reasons = []
    if best.steps_per_round == 1:
        reasons.append(
            "tau = 1, which is DP-SGD: the costs allow a round for each of these steps, and every larger tau raises the bound"
        )
    else:
        reasons.append(
            f"{_at(best)} has the least bound, {best.bound:.4g}; with tau = 1 the costs allow no better than"
            f" {_at(alone)} with {alone.bound:.4g}"
        )
    parts = problem.parts(int(best.num_steps), int(best.steps_per_round))
    shares = sorted(((part / best.bound, name) for name, part in parts.items() if part > 0), reverse=True)
    reasons.append("parts of the bound: " + ", ".join(f"{name} {100 * share:.0f} %" for share, name in shares))
    reasons.append(
        "in Theorem 1 the term of the initial gap falls like (1 - eta lambda)^K / K, which its proof does not give;"
        f" the proved bound, B + (1 - eta lambda) alpha / (eta lambda K), is {best.mean_bound:.4g} here"
        f" and least at {_at(corrected)} with {corrected.mean_bound:.4g}"
    )
    if best.mean_bound >= problem.initial_gap:
        reasons.append(
            f"the proved bound is not below initial_gap={problem.initial_gap:g}, the gap before training:"
            " the bound ranks the points, it does not promise that training helps"
        )
    relaxed = candidates[-1]
    if relaxed.name != corrected.name and not relaxed.feasible:
        reasons.append(
            f"the paper rounds K={relaxed.num_steps:.6g}, tau={relaxed.steps_per_round:.6g} to the nearest whole numbers,"
            " which may cost too much, and tau may not divide K; here whole numbers were compared"
        )
    reasons.append(
        "eq. 23 as printed has a wrong sign and far too little noise; noise_std solves eq. 9"
        + _needed(problem.epsilon, problem.delta)
    )
    if len(set(problem.batch_size)) > 1:
        reasons.append("every device has the noise of its own batch size; the bound takes the mean of their variances")
    return reasons


@lru_cache(maxsize=64)
def _needed(epsilon: float, delta: float) -> str:
    """Return how much less noise exact composition needs: the same fraction for any number of steps."""
    try:
        needed = accounting.calibrate(dp.GaussianDpEvent, epsilon=epsilon, delta=delta, relation="replace-one")
    except ValueError:  # out of the accountant's reach
        return ""
    planned = math.sqrt(2 / zcdp_budget(epsilon=epsilon, delta=delta))
    return (
        f"; exact composition needs {100 * (1 - needed / planned):.0f} % less noise for the same epsilon"
        if needed < planned
        else ""
    )


def _at(point: Candidate) -> str:
    return f"K={point.num_steps:.6g}, tau={point.steps_per_round:.6g}"
