"""NbAFL: the noise of uplink and downlink, and the number of rounds and the cohort size for which its bounds are least.

Wei, Li, Ding, Ma, Yang, Farokhi, Jin, Quek, Poor: Federated Learning with Differential Privacy: Algorithms and
Performance Analysis, IEEE TIFS 2020. The unit of privacy is one record, under the paper's assumption that a client's
weights are the mean of the optima of its single records (eq. 4); eavesdroppers see L uploads of a client and all T
broadcasts. These are the paper's formulas, not proofs: from clipped weights alone a sensitivity of 2 C follows, not 2 C
/ m, and the Gaussian formula holds for epsilon < 1 per exposure.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from flower_dp.planning.nbafl_bound import (
    BOUND_KEYS,
    METHOD,
    Bounds,
    Problem,
    best_proximal,
    read_bounds,
    read_problem,
)
from flower_dp.planning.nbafl_plan import Plan, Point
from flower_dp.planning.planner import Data, Inputs
from flower_dp.planning.problem import Floats, ProblemError, Reader, finite, keys_of
from flower_dp.privacy.nbafl import downlink_noise_std, log_argument, rounds_without_downlink_noise, uplink_noise_std

__all__ = ["METHOD", "Plan", "Point", "from_data", "plan"]


def plan(values: Mapping[str, object]) -> Plan:
    """Return a problem's noise, and the optima of the bounds if the problem gives their constants.

    best_num_rounds is the least T of least Theorem 2 bound in 1..max_rounds with all clients taking part;
    best_cohort_size is the least K of least Theorem 3 bound in 1..N for the given T; both are found by evaluating every
    point. The theorems do not agree at K = N, so their bounds are not to be compared with each other.

    Raises:
        ProblemError: naming the key that is unknown, missing or impossible.
    """
    read = Reader(values=values, method=METHOD)
    read.refuse_unknown((*keys_of(Problem), *BOUND_KEYS))
    problem = read_problem(read)
    uplink = uplink_noise_std(
        uplink_exposures=problem.uplink_exposures,
        epsilon=problem.epsilon,
        delta=problem.delta,
        clip_norm=problem.clip_norm,
        min_records=problem.min_records,
    )
    downlink = downlink_noise_std(**asdict(problem))
    bounds = read_bounds(read, problem) if any(read.has(key) for key in BOUND_KEYS) else None
    try:
        candidates = _candidates(bounds, problem) if bounds is not None else ()
    except (OverflowError, ZeroDivisionError) as error:
        why = "the bound leaves the range of floating-point numbers; rescale the problem"
        raise ProblemError("proximal", f"proximal={values['proximal']!r}: {why}") from error
    best_num_rounds, best_cohort_size = candidates[:2] if candidates else (None, None)
    return Plan(
        problem=problem,
        uplink_noise_std=finite("epsilon", uplink, "uplink_noise_std"),
        downlink_noise_std=finite("epsilon", downlink, "downlink_noise_std"),
        bounds=bounds,
        best_num_rounds=best_num_rounds,
        best_cohort_size=best_cohort_size,
        candidates=candidates,
        reasons=tuple(_reasons(problem, bounds, candidates)),
    )


def from_data(data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys that the clients' data determine, and a proximal coefficient if `given` has none."""
    sizes = data.num_records
    values = data.constants.nbafl() | {"num_clients": len(sizes), "min_records": min(sizes)}
    notes = []
    rounds = given.get("num_rounds")
    if isinstance(rounds, int) and "max_rounds" not in given:
        values["max_rounds"] = 10 * rounds
        notes.append(f"max_rounds={10 * rounds} is ten times num_rounds")
    if "proximal" not in given:
        known: dict[str, Any] = {**values, **given}
        best = best_proximal(smoothness=known["smoothness"], dissimilarity=known["dissimilarity"])
        values["proximal"] = best
        notes.append(f"proximal={best:g} makes the bound's contraction factor P least; the bound needs more than {best / 2:g}")
    return Inputs(values=values, notes=tuple(notes))


def _candidates(bounds: Bounds, problem: Problem) -> tuple[Point, ...]:
    """Return the best T, the best K, both bounds at the given point, then the runs of K without a bound."""
    n, t = problem.num_clients, problem.num_rounds
    by_rounds = bounds.all_clients(np.arange(1.0, bounds.max_rounds + 1))
    by_cohort = bounds.sampled_clients(np.arange(1.0, n + 1), t)
    best_t, best_k = _least(by_rounds), _least(by_cohort)
    points = [
        _all_clients(bounds, "all clients, best T", t if best_t is None else best_t),
        _sampled(bounds, "K of N, best K", problem.cohort_size if best_k is None else best_k, t),
        _all_clients(bounds, "all clients, T as given", t),
        _sampled(bounds, "K and T as given", problem.cohort_size, t),
    ]
    return (*points, *_runs(bounds, by_cohort, t))


def _all_clients(bounds: Bounds, name: str, num_rounds: int) -> Point:
    value = float(bounds.all_clients(num_rounds))
    bound, reason = (value, None) if math.isfinite(value) else (None, bounds.why_not_all())
    return Point(name=name, cohort_size=bounds.problem.num_clients, num_rounds=num_rounds, bound=bound, reason=reason)


def _sampled(bounds: Bounds, name: str, cohort_size: int, num_rounds: int) -> Point:
    value = float(bounds.sampled_clients(cohort_size, num_rounds))
    bound, reason = (value, None) if math.isfinite(value) else (None, bounds.why_not_sampled(cohort_size, num_rounds))
    return Point(name=name, cohort_size=cohort_size, num_rounds=num_rounds, bound=bound, reason=reason)


def _least(values: Floats) -> int | None:
    """Return the place, counted from one, of the least finite value."""
    found = np.where(np.isfinite(values), values, np.inf)
    return int(np.argmin(found)) + 1 if np.isfinite(found).any() else None


def _runs(bounds: Bounds, by_cohort: Floats, num_rounds: int) -> list[Point]:
    """Return one point for each run of neighbouring cohort sizes that have no bound, with the reason at its largest."""
    gone = np.concatenate([[False], ~np.isfinite(by_cohort), [False]])
    starts, ends = np.flatnonzero(gone[1:] & ~gone[:-1]) + 1, np.flatnonzero(gone[:-1] & ~gone[1:])
    return [
        Point(
            name="no bound for these K",
            cohort_size=int(start),
            last_cohort_size=int(end),
            num_rounds=num_rounds,
            bound=None,
            reason=f"at K={end}: {bounds.why_not_sampled(int(end), num_rounds)}",
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def _reasons(problem: Problem, bounds: Bounds | None, candidates: tuple[Point, ...]) -> list[str]:
    n, k, t, exposures = problem.num_clients, problem.cohort_size, problem.num_rounds, problem.uplink_exposures
    quiet = rounds_without_downlink_noise(n, k, exposures, problem.epsilon)
    what = "L sqrt(N)" if k == n else "epsilon/gamma"
    more = "more than" if t > quiet else "not more than"
    needed = "the server adds downlink noise" if t > quiet else "the uplink noise covers the broadcasts and the server adds none"
    reasons = [f"T={t} is {more} {what} = {quiet:.4g}: {needed}"]
    argument = log_argument(num_clients=n, cohort_size=k, num_rounds=t, epsilon=problem.epsilon)
    if argument <= 0 and k < n:
        reasons.append(
            f"the log argument of b and of Theorem 3 is {argument:.4g} <= 0: by the paper, sampling alone gives this"
            " epsilon, with no noise at all; that holds in one direction of the privacy loss only, so do not rely on"
            " downlink_noise_std = 0"
        )
    if problem.epsilon / exposures >= 1:
        reasons.append(
            f"epsilon/uplink_exposures = {problem.epsilon / exposures:.4g} >= 1: the classical Gaussian formula is not"
            " proved there, so this is the paper's noise and not a proof of the paper's privacy"
        )
    if bounds is None:
        return reasons
    best_t, best_k, given_t, given_k = candidates[:4]
    if best_t.bound is not None and given_t.bound is not None:
        limit = " = max_rounds, the bound still falls there" if best_t.num_rounds == bounds.max_rounds > 1 else ""
        reasons.append(
            f"all clients: T={best_t.num_rounds}{limit}, bound {best_t.bound:.4g};"
            f" T={t} as given has {given_t.bound:.4g} (P = {bounds.contraction():.4g})"
        )
        start = bounds.initial_gap * bounds.contraction() ** best_t.num_rounds
        reasons.append(
            f"at T={best_t.num_rounds}, {start:.4g} of the bound is the rest of the initial gap,"
            f" {best_t.bound - start:.4g} comes from noise"
        )
    if best_k.bound is not None:
        given = f"has {given_k.bound:.4g}" if given_k.bound is not None else "has no bound"
        reasons.append(f"K of N at T={t}: K={best_k.cohort_size}, bound {best_k.bound:.4g}; K={k} as given {given}")
        least = best_k.cohort_size
        if 1 < least < n and log_argument(num_clients=n, cohort_size=least - 1, num_rounds=t, epsilon=problem.epsilon) <= 0:
            reasons.append(
                f"K={least} is the least K whose logarithm is defined, and the paper's noise goes to 0 there: this optimum may be"
                " an artefact of the formula"
            )
    return reasons
