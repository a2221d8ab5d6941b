"""DP-FedPAQ: the best number of local steps, clients and quantization levels under a budget of bits.

Mohammadi, Bai, Fan, Song, Yi, Liu: Differential Privacy Meets Federated Learning under Communication Constraints. In each of K
rounds M of N clients take E steps, add Gaussian noise to their update and send it quantised (QSGD with s levels). The unit
of privacy is one record; every message is private on its own (local DP). The paper's epsilon and delta are of one round.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from flower_dp.planning.dp_fedpaq_bound import METHOD, Problem
from flower_dp.planning.dp_fedpaq_plan import Candidate, Plan
from flower_dp.planning.planner import Data, Inputs
from flower_dp.planning.problem import Floats, share_above

__all__ = ["METHOD", "Candidate", "Plan", "from_data", "plan"]

Bound = Callable[[float | Floats, float | Floats, float | Floats], Floats]


def plan(values: Mapping[str, object]) -> Plan:
    """Return the best point for a problem (a mapping with the fields of `dp_fedpaq_bound.Problem` as keys).

    The point has the least Theorem 1 bound of all whole E, M and s with floor(T/E) M (d log2(2s+1) + 32) <= bits_budget, E <= T,
    M <= N, s <= max_quantization_levels, and delta n_i <= E b <= n_i for every client; of equals, the one with the fewest bits.
    Values that the problem fixes stay fixed.

    Raises:
        ProblemError: naming the key that is unknown, missing or impossible.
    """
    problem = Problem.from_mapping(values)
    best = _best(problem, "best", problem.bound)
    if best is None:
        where = f"E={problem.local_steps()[-1]}, M={problem.cohort_size or 1}, s={problem.quantization_levels or 1}"
        reason = f"{problem.smallest_bits_budget()} bits are the least that any point needs, and that is {where}"
        return Plan(problem=problem, best=None, candidates=(), reasons=(reason,))
    others = [_best(problem, "best with 1/mu^2 in the noise term", problem.scaled_bound)]
    if problem.quantization_levels is None:
        one = replace(problem, quantization_levels=1)
        others.append(_best(one, "best with s = 1", one.bound))
    if problem.num_local_steps is None and problem.local_steps()[0] == 1:
        one = replace(problem, num_local_steps=1)
        others.append(_best(one, "best with E = 1", one.bound))
    candidates = (best, *(other for other in others if other is not None))
    return Plan(problem=problem, best=best, candidates=candidates, reasons=tuple(_reasons(problem, candidates)))


def from_data(data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys that the clients' data determine: not the budget, the iterations, batch_size, epsilon and delta."""
    constants, sizes = data.constants, data.num_records
    values = {
        "num_clients": len(sizes),
        "num_records": sizes[0] if len(set(sizes)) == 1 else list(sizes),
        "dimension": data.dimension,
        "strong_convexity": constants.strong_convexity,
        "smoothness": constants.smoothness,
        "gradient_bound": constants.gradient_bound,
        "gradient_variance": max(constants.gradient_variance),
        "heterogeneity": constants.gradient_dissimilarity,
        "initial_distance": constants.initial_distance,
    }
    notes = ["heterogeneity is the largest root mean square distance of the clients' gradients from their mean, in the pilot"]
    if "gradient_bound" not in given:
        notes.append(
            "gradient_bound is a root mean square; where records are clipped, the bound's noise term wants the clip norm"
        )
    return Inputs(values=values, notes=tuple(notes))


def _best(problem: Problem, name: str, bound: Bound) -> Candidate | None:
    """Return the feasible point of least bound, or None.

    For each E, all s are tried with the largest cohort that the budget then allows. An E is left out only if a lower bound, with
    the best cohort and the best s that the budget allows separately, is not below the best point found.
    """
    steps = np.asarray(problem.local_steps(), dtype=np.float64)
    rounds = problem.num_iterations // steps
    most, finest = np.zeros_like(steps), np.zeros_like(steps)
    for count in np.unique(rounds):
        levels, cohort = problem.cohorts(int(count))
        if len(levels):
            same = rounds == count
            most[same], finest[same] = cohort[0], levels[-1]
    kept = most > 0
    steps, rounds, hopes = steps[kept], rounds[kept], bound(steps[kept], most[kept], finest[kept])
    found: tuple[float, float, int, int, int] | None = None
    for index in np.argsort(hopes, kind="stable"):
        # Rounding may put a lower bound a little above the value that it bounds.
        if found is not None and hopes[index] * (1 - 1e-12) > found[0]:
            break
        levels, cohort = problem.cohorts(int(rounds[index]))
        bounds, bits = bound(steps[index], cohort, levels), problem.bits_used(int(rounds[index]), cohort, levels)
        place = np.lexsort((bits, bounds))[0]
        point = (float(bounds[place]), float(bits[place]), int(steps[index]), int(cohort[place]), int(levels[place]))
        found = point if found is None else min(found, point)
    if found is None:
        return None
    _, bits_used, e, m, s = found
    return Candidate(
        name=name,
        num_local_steps=e,
        cohort_size=m,
        quantization_levels=s,
        num_rounds=problem.num_rounds(e),
        bits_used=bits_used,
        bound=float(problem.bound(e, m, s)),
        scaled_bound=float(problem.scaled_bound(e, m, s)),
    )


def _reasons(problem: Problem, candidates: tuple[Candidate, ...]) -> list[str]:
    best, *others = candidates
    reasons = [f"{_at(best)} has the least bound, {best.bound:.4g}"]
    reasons += [
        f"{other.name}: {_at(other)} with {other.bound:.4g}, {share_above(other.bound, best.bound)}"
        for other in others[1:]
        if _at(other) != _at(best) and best.bound > 0
    ]
    parts = problem.parts(best.num_local_steps, best.cohort_size, best.quantization_levels)
    shares = sorted(((part / best.bound, name) for name, part in parts.items() if part > 0), reverse=True)
    reasons.append("parts of the bound: " + ", ".join(f"{name} {100 * share:.0f} %" for share, name in shares))
    run = best.num_rounds * best.num_local_steps
    if run < problem.num_iterations:
        reasons.append(
            f"{best.num_rounds} rounds of {best.num_local_steps} steps are {run} iterations;"
            f" the bound counts {problem.num_iterations}"
        )
    if problem.strong_convexity != 1:
        scaled = others[0]
        reasons.append(
            f"the noise term of Theorem 1 lacks a factor 1/mu^2; with it the bound is {best.scaled_bound:.4g} here,"
            f" and least at {_at(scaled)} with {scaled.scaled_bound:.4g}"
        )
    q = float(problem.variance(best.quantization_levels))
    if q > 1:
        reasons.append(f"QSGD has q = {q:.4g} at s={best.quantization_levels}; Assumption 4 is stated for q in [0, 1]")
    rate = best.num_local_steps * problem.batch_size / max(problem.num_records)
    ratio = float(np.max(problem.epsilon)) / (2 * rate)
    if ratio > 1:
        reasons.append(
            f"the paper's noise takes the classical Gaussian formula at epsilon / (2 gamma) = {ratio:.4g} > 1,"
            " where it is not proved"
        )
    if best.num_rounds > 1:
        reasons.append(
            f"epsilon and delta are those of one round; a client takes part in up to {best.num_rounds},"
            " and the paper does not compose them"
        )
    if best.bound >= problem.initial_distance:
        reasons.append(
            f"the bound is not below initial_distance={problem.initial_distance:g}, the distance before training:"
            " it ranks the points, it does not promise that training helps"
        )
    return reasons


def _at(point: Candidate) -> str:
    return f"E={point.num_local_steps}, M={point.cohort_size}, s={point.quantization_levels}"
