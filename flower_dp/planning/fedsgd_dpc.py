"""FedSGD-DPC: the number of rounds and of clients in a round for which the convergence bound is least.

Zhou, Liu, Fu, Wu, Li, Yu: Optimizing the Numbers of Queries and Replies in Federated Learning with Differential
Privacy.

The unit of privacy is one record, every message is private on its own (local DP). In each of T rounds b of N clients
reply, round robin, so a client replies bT/N times and its noise is calibrated to all of its replies together.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flower_dp.planning.fedsgd_dpc_bound import LONGEST, METHOD, GaussianBound, LaplaceBound, Problem
from flower_dp.planning.fedsgd_dpc_plan import Candidate, Plan, num_replies
from flower_dp.planning.planner import Data, Inputs
from flower_dp.planning.problem import Floats, ProblemError, finite, share_above

__all__ = ["METHOD", "Candidate", "Plan", "from_data", "num_replies", "plan"]

_ANYWHERE = "whole numbers"


def plan(values: Mapping[str, object]) -> Plan:
    """Return the best number of rounds and cohort size for a problem (its keys are the fields of `fedsgd_dpc_bound.Problem`).

    Laplace: where both are free, the continuous candidates are b = 1 and b = N with their T*, T = 0, and T = max_rounds
    with its b* where max_rounds cuts. The answer is the best point of whole numbers anywhere: one of these, rounded, or
    a point in between where T* is so small that rounding it costs more than another b. Gaussian: b = N and
    T = max_rounds if more rounds lower the bound, else T = 0. What the problem fixes (cohort_size, num_rounds) stays
    fixed; if it fixes both, the bound is only evaluated.

    Raises:
        ProblemError: naming the key that is unknown, missing or impossible.
    """
    problem = Problem.from_mapping(values)
    bound = problem.bound()
    if problem.cohort_size is not None and problem.num_rounds is not None:
        candidates = [_candidate(bound, "as given", problem.cohort_size, problem.num_rounds)]
    elif isinstance(bound, GaussianBound):
        candidates = _gaussian_candidates(problem, bound)
    elif problem.num_rounds is not None:
        candidates = _cohorts_at(bound, problem.num_rounds, problem.num_clients, "fixed T")
    else:
        candidates = _laplace_candidates(problem, bound)
    # Of equals the first.
    best = min(candidates, key=lambda candidate: candidate.bound)
    for candidate in candidates:
        finite("epsilon", candidate.bound, "the bound")
    return Plan(
        problem=problem,
        best=best,
        candidates=tuple(candidates),
        reasons=tuple(_reasons(problem, bound, best, candidates)),
    )


def from_data(data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys that the clients' data determine, for the Laplace mechanism unless `given` names the Gaussian."""
    gaussian = given.get("mechanism") == "gaussian"
    values = data.constants.fedsgd_dpc(mechanism="gaussian" if gaussian else "laplace", optima="joint")
    sizes = data.num_records
    values |= {
        "num_clients": len(sizes),
        "num_records": sizes[0] if len(set(sizes)) == 1 else list(sizes),
        "dimension": data.dimension,
    }
    if gaussian and len(data.constants.gradient_variance) < len(sizes):
        values["gradient_variance"] = max(data.constants.gradient_variance)
    notes = ["heterogeneity and initial_distance are as the bound defines them, from the joint optimum"]
    if "clip_norm" not in given:
        notes.append("clip_norm is the largest norm of a record's gradient in the pilot: usually far too much")
    return Inputs(values=values, notes=tuple(notes))


def _candidate(bound: LaplaceBound | GaussianBound, name: str, cohort_size: int, num_rounds: int) -> Candidate:
    with np.errstate(over="ignore"):
        value = float(bound.value(num_rounds, cohort_size))
    return Candidate(name=name, cohort_size=cohort_size, num_rounds=num_rounds, bound=value)


def _with_continuous(bound: LaplaceBound, candidate: Candidate, cohort_size: float, num_rounds: float) -> Candidate:
    value = float(bound.value(num_rounds, cohort_size))
    return replace(candidate, continuous_cohort_size=cohort_size, continuous_num_rounds=num_rounds, continuous_bound=value)


def _gaussian_candidates(problem: Problem, bound: GaussianBound) -> list[Candidate]:
    cohorts = [problem.num_clients, 1] if problem.cohort_size is None else [problem.cohort_size]
    rounds = problem.num_rounds or problem.max_rounds or 0
    candidates = [_candidate(bound, f"b = {cohort}, T = {rounds}", cohort, rounds) for cohort in cohorts]
    if problem.num_rounds is None:
        # First, to win a tie: T = max_rounds must lower the bound.
        candidates.insert(0, _candidate(bound, "T = 0", cohorts[0], 0))
    return candidates


def _laplace_candidates(problem: Problem, bound: LaplaceBound) -> list[Candidate]:
    cap, num_clients = problem.max_rounds, problem.num_clients
    cohorts = [1, num_clients] if problem.cohort_size is None else [problem.cohort_size]
    candidates = []
    for cohort in cohorts:
        whole = _rounds_at(bound, np.asarray([float(cohort)]), cap)
        continuous = min(float(bound.best_num_rounds(cohort)), math.inf if cap is None else cap)
        candidates.append(_with_continuous(bound, replace(whole, name=f"b = {cohort}"), cohort, continuous))
    candidates.append(_candidate(bound, "T = 0", cohorts[-1], 0))
    if problem.cohort_size is None:
        if cap is not None and float(bound.best_num_rounds(1)) > cap:
            candidates += _cohorts_at(bound, cap, num_clients, "T = max_rounds")
        anywhere = _rounds_at(bound, np.arange(1.0, num_clients + 1), cap)
        if anywhere.bound < min(candidate.bound for candidate in candidates):
            candidates.append(anywhere)
    return candidates


def _rounds_at(bound: LaplaceBound, cohorts: Floats, cap: int | None) -> Candidate:
    """Return the best point of these cohort sizes and whole T >= 1: U is convex in T, so T* lies next to it."""
    best = np.minimum(bound.best_num_rounds(cohorts), math.inf if cap is None else cap)
    if not np.all(best <= LONGEST):
        raise ProblemError(
            "max_rounds",
            "max_rounds: missing; the noise is so small that the best number of rounds has no limit",
        )
    rounds = np.maximum(np.concatenate([np.floor(best), np.ceil(best)]), 1.0)
    sizes = np.concatenate([cohorts, cohorts])
    with np.errstate(over="ignore"):
        values = bound.value(rounds, sizes)
    index = int(np.argmin(values))
    return _candidate(bound, _ANYWHERE, int(sizes[index]), int(rounds[index]))


def _cohorts_at(bound: LaplaceBound, num_rounds: int, num_clients: int, name: str) -> list[Candidate]:
    continuous = bound.best_cohort_size(num_rounds, num_clients)
    whole = sorted({math.floor(continuous), math.ceil(continuous)})
    points = [_candidate(bound, f"{name}, b = {cohort}", cohort, num_rounds) for cohort in whole]
    return [_with_continuous(bound, point, continuous, num_rounds) for point in points]


def _reasons(problem: Problem, bound: LaplaceBound | GaussianBound, best: Candidate, candidates: list[Candidate]) -> list[str]:
    reasons = []
    others = [other for other in candidates if (other.cohort_size, other.num_rounds) != (best.cohort_size, best.num_rounds)]
    if others:
        second = min(others, key=lambda candidate: candidate.bound)
        reasons.append(
            f"{_point(best)} has the least bound, {best.bound:.4g}; next comes {_point(second)} with {second.bound:.4g}"
            + (f", {share_above(second.bound, best.bound)}" if best.bound > 0 else "")
        )
    if best.name == _ANYWHERE:
        reasons.append("T* at b = 1 and b = N is so far from a whole number that another cohort size does better")
    if isinstance(bound, GaussianBound) and problem.num_rounds is None:
        sign = "> 0: every round lowers the bound, so T = max_rounds" if best.num_rounds else "<= 0: every round raises the bound"
        reasons.append(f"E1/b + E2 = {bound.sampling_term / best.cohort_size + bound.fixed_term:.4g} {sign}")
    elif best.num_rounds == problem.max_rounds and isinstance(bound, LaplaceBound) and problem.num_rounds is None:
        free = bound.best_num_rounds(best.cohort_size)
        reasons.append(f"max_rounds={problem.max_rounds} limits T: at this b the bound falls until T = {float(free):.6g}")
    if best.num_rounds == 0:
        reasons.append("no training at all: by the bound, the noise of one round costs more than the round gains")
    parts = problem.parts(best.num_rounds, best.cohort_size)
    if best.bound > 0:
        shares = sorted(((part / best.bound, name) for name, part in parts.items() if part > 0), reverse=True)
        reasons.append("parts of the bound: " + ", ".join(f"{name} {100 * share:.0f} %" for share, name in shares))
    replies = num_replies(problem.num_clients, best.cohort_size, best.num_rounds)
    expected = best.cohort_size * best.num_rounds / problem.num_clients
    if replies != expected:
        reasons.append(f"the bound takes {expected:.6g} replies of a client; the noise must be calibrated to the most, {replies}")
    if best.bound >= problem.initial_distance:
        reasons.append(
            f"the bound is not below initial_distance={problem.initial_distance:g}, the distance before training:"
            " it ranks the candidates, it does not promise that training helps"
        )
    if len(set(problem.num_records)) > 1:
        reasons.append("the paper's analysis assumes that all clients have equally many records; here they have not")
    unused = [
        key for key in ("delta", "sampling_rate", "gradient_variance", "noise_constant") if getattr(problem, key) is not None
    ]
    if problem.mechanism == "laplace" and unused:
        reasons.append(f"not used by the Laplace mechanism: {', '.join(unused)}")
    return reasons


def _point(candidate: Candidate) -> str:
    return f"b={candidate.cohort_size}, T={candidate.num_rounds}"
