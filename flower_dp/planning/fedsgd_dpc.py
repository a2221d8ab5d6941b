"""FedSGD-DPC: the number of rounds and of clients per round with the least convergence bound.

Zhou, Liu, Fu, Wu, Li, Yu: Optimizing the Numbers of Queries and Replies in Federated Learning with Differential
Privacy.

The unit of privacy is one record. Local DP: every message carries its client's full noise. In each of T rounds b of N clients
reply, round robin, so a client replies bT/N times. Its noise is calibrated to all of its replies together. The bounds, Sections
V-B (Laplace) and VI-B (Gaussian), are on the expected squared distance to the optimum after T rounds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from flower_dp.core import checks
from flower_dp.core.checks import BadValue
from flower_dp.planning import planner
from flower_dp.planning.planner import Floats, Panel, ProblemError, Row, finite, in_parts, real, share_above, whole

# Beyond this many rounds a float64 no longer counts exactly, and no one trains that long.
LONGEST = 10**15
_ANYWHERE = "whole numbers"
_GAUSSIAN = ("delta", "sampling_rate", "gradient_variance", "noise_constant")
# The keys that errors name if the terms of the bound overflow, in the order of the terms.
_KEYS_OF_TERMS = ("initial_distance", "heterogeneity", "gradient_bound", "gradient_variance", "epsilon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """U(T, b) = (C1/b + C2 b T^2 + C3) / (T + gamma) + E3.

    Laplace (Section V-B): E3 = 0; convex in T and in b, but not jointly. Gaussian (Section VI-B): C2 = 0, and the paper's E1 and
    E2 are C1 and C3; monotone in T, falling with b.
    """

    shift: float
    """gamma = 2 smoothness / strong_convexity."""
    sampling_term: float
    """C1: its part of the bound falls with the cohort. Gaussian: E1 = (8 G^2/mu^2) N/(N - 1); the paper prints mu_2 for mu^2."""
    noise_term: float
    """C2: its part of the bound grows with the cohort and with T^2."""
    fixed_term: float
    """C3: start and heterogeneity, less the part of C1 that a full cohort does not have. Gaussian, E2: also mini-batch variance,
    less the part that E3 counts in excess."""
    noise_floor: float
    """E3: the limit of the bound as T grows."""

    def value(self, num_rounds: float | Floats, cohort_size: float | Floats) -> Floats:
        """Return U(T, b), elementwise."""
        rounds, cohort = np.asarray(num_rounds, dtype=np.float64), np.asarray(cohort_size, dtype=np.float64)
        total = self.sampling_term / cohort + self.noise_term * cohort * rounds**2 + self.fixed_term
        return np.asarray(total / (rounds + self.shift) + self.noise_floor)

    def best_num_rounds(self, cohort_size: float | Floats) -> Floats:
        """Return the continuous T* = sqrt(gamma^2 + (C1/b + C3)/(C2 b)) - gamma for fixed b (eq. 6), elementwise."""
        cohort = np.asarray(cohort_size, dtype=np.float64)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            # On paper C1/b + C3 >= gamma Y0 >= 0; float rounding may put it slightly below zero at b = N.
            gain = np.maximum(self.sampling_term / cohort + self.fixed_term, 0.0)
            ratio = np.where(gain > 0, gain / (self.noise_term * cohort), 0.0)
            # Equals sqrt(gamma^2 + ratio) - gamma, without its cancellation.
            best = ratio / (np.sqrt(self.shift**2 + ratio) + self.shift)
        return np.where(np.isfinite(ratio), best, np.inf)

    def best_cohort_size(self, num_rounds: float, num_clients: int) -> float:
        """Return the continuous b* = sqrt(C1/C2) / T for fixed T, clamped to [1, N]."""
        if num_rounds == 0 or self.noise_term == 0:
            return float(num_clients)
        return min(max(math.sqrt(self.sampling_term / self.noise_term) / num_rounds, 1.0), float(num_clients))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(planner.Problem):
    """A checked problem. Comments on the fields give the paper's letters."""

    METHOD: ClassVar[str] = "fedsgd-dpc"

    mechanism: str = planner.word("laplace", "gaussian")
    # The bound divides by N - 1.
    num_clients: int = whole(at_least=2)  # N
    num_records: tuple[int, ...] = whole(at_most=10**12, each=True)  # d_i
    dimension: int = whole(at_most=LONGEST)  # p
    clip_norm: float = real(above=0)  # xi_1 (L1) or xi_2 (L2)
    epsilon: Floats = real(above=0, each=True)  # epsilon_i
    strong_convexity: float = real(above=0)  # mu
    smoothness: float = real(at_least="strong_convexity")  # lambda
    gradient_bound: float = real(at_least=0)  # G
    heterogeneity: float = real(at_least=0)  # Gamma
    initial_distance: float = real(at_least=0)  # Y_0, squared
    cohort_size: int | None = whole(at_most="num_clients", default=None)  # b
    num_rounds: int | None = whole(at_most=LONGEST, default=None)  # T
    max_rounds: int | None = whole(at_most=LONGEST, default=None)
    # Only the Gaussian mechanism needs these keys; they are checked for the Laplace mechanism too.
    delta: Floats | None = real(above=0, below=1, each=True, default=None)  # delta_i
    sampling_rate: float | None = real(above=0, at_most=1, default=None)  # q
    gradient_variance: Floats | None = real(at_least=0, each=True, default=None)  # Lambda_i^2
    noise_constant: float | None = real(above=0, default=None)  # c_2

    def check(self) -> None:
        """Refuse a problem without a best number of rounds, or whose bound overflows."""
        if self.max_rounds is not None and self.num_rounds is not None and self.num_rounds > self.max_rounds:
            raise checks.bad("num_rounds", self.num_rounds, f"<= max_rounds={self.max_rounds}")
        if self.mechanism == "gaussian":
            if self.num_rounds is None and self.max_rounds is None:
                why = "the Gaussian bound has no best number of rounds; give max_rounds or num_rounds"
                raise BadValue("max_rounds", f"max_rounds: missing; {why}")
            for key in _GAUSSIAN:
                if getattr(self, key) is None:
                    raise BadValue(key, f"{key}: missing; the Gaussian mechanism needs it")
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            try:
                finite("strong_convexity", self.shift, "smoothness / strong_convexity")
                for key, (name, term) in zip(_KEYS_OF_TERMS, self._terms().items(), strict=True):
                    finite(key, term, f"the term of the {name}")
            except (OverflowError, ZeroDivisionError) as error:
                why = "the bound leaves the range of floating-point numbers; rescale it"
                raise BadValue("strong_convexity", f"strong_convexity: {why}") from error

    @property
    def shift(self) -> float:
        """The gamma of Theorem 3, 2 lambda / mu."""
        return 2 * self.smoothness / self.strong_convexity

    def bound(self) -> Bound:
        """Return the bound U(T, b) with its constants collected as in Section V-B or VI-B."""
        laplace, n = self.mechanism == "laplace", self.num_clients
        start, heterogeneity, spread, batches, noise = self._terms().values()
        fixed = start + heterogeneity + batches - spread / (n - 1)
        return Bound(
            shift=self.shift,
            sampling_term=spread * n / (n - 1),
            noise_term=noise if laplace else 0.0,
            fixed_term=fixed if laplace else fixed - self.shift * noise,
            noise_floor=0.0 if laplace else noise,
        )

    def parts(self, num_rounds: int, cohort_size: int) -> dict[str, float]:
        """Return the named terms whose sum is the bound at (T, b), in the order of Theorems 3 and 4."""
        n, terms = self.num_clients, self._terms()
        terms["client sampling"] *= (n - cohort_size) / (cohort_size * (n - 1))
        terms["noise"] *= cohort_size * num_rounds**2 if self.mechanism == "laplace" else num_rounds
        return {name: part / (num_rounds + self.shift) for name, part in terms.items()}

    def _terms(self) -> dict[str, float]:
        """Return the terms by name, each without its factor of T and b: noise is C2 (Laplace) or E3 (Gaussian)."""
        mu = self.strong_convexity
        unit = self.dimension * (self.clip_norm / (mu * sum(self.num_records))) ** 2
        batches, noise = 0.0, 32 * unit * float(np.sum(self.epsilon**-2.0)) / self.num_clients
        if self.mechanism == "gaussian":  # `check` has refused missing keys
            delta, rate, variance, constant = (getattr(self, key) for key in _GAUSSIAN)
            records = np.asarray(self.num_records, dtype=np.float64)
            batches = 4 * float(np.sum(records * variance)) / (rate * (mu * float(np.sum(records))) ** 2)
            noise = 4 * constant**2 * unit * float(np.sum(-np.log(delta) * self.epsilon**-2.0))
        return {
            "start": self.shift * self.initial_distance,
            "heterogeneity": 8 * self.smoothness * self.heterogeneity / mu**2,
            "client sampling": 8 * (self.gradient_bound / mu) ** 2,
            "batch sampling": batches,
            "noise": noise,
        }


def num_replies(num_clients: int, cohort_size: int, num_rounds: int) -> int:
    """Return the maximum number of replies of one client under round robin: ceil(b T / N)."""
    return -(-cohort_size * num_rounds // num_clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(planner.Candidate):
    """A compared point of whole numbers, and the continuous point that it rounds, if any."""

    LETTERS: ClassVar[Mapping[str, str]] = {"cohort_size": "b", "num_rounds": "T"}
    cohort_size: int
    num_rounds: int
    bound: float
    continuous_cohort_size: float | None = None
    continuous_num_rounds: float | None = None
    continuous_bound: float | None = None

    def shown(self) -> str:
        """Return the point and its bound for a reader."""
        point = f"{self.at(' ')} bound {self.bound:.6g}"
        if self.continuous_bound is None:
            return point
        where = f"b={self.continuous_cohort_size:.6g} T={self.continuous_num_rounds:.6g}"
        return f"{point}  (continuous: {where} bound {self.continuous_bound:.6g})"


def plan(values: Mapping[str, object]) -> planner.Plan[Problem, Candidate]:
    """Return the best number of rounds and cohort size for a problem (its keys are the fields of `Problem`).

    Laplace, if both are free: the continuous candidates are b = 1 and b = N with their T*, and T = 0. If max_rounds limits T*,
    T = max_rounds with its b* is one too. The answer is the best point of whole numbers anywhere: a rounded candidate, or a point
    in between, if T* is so small that rounding it costs more than another b.

    Gaussian: b = N, and T = max_rounds if more rounds lower the bound, else T = 0.

    Values that the problem fixes (cohort_size, num_rounds) stay fixed; if it fixes both, the bound is only evaluated.

    Raises:
        ProblemError: naming the key that is unknown, missing or out of range.
    """
    problem = Problem.from_mapping(values)
    bound = problem.bound()
    if problem.cohort_size is not None and problem.num_rounds is not None:
        candidates = [_candidate(bound, "as given", problem.cohort_size, problem.num_rounds)]
    elif problem.mechanism == "gaussian":
        candidates = _gaussian_candidates(problem, bound)
    elif problem.num_rounds is not None:
        candidates = _cohorts_at(bound, problem.num_rounds, problem.num_clients, "fixed T")
    else:
        candidates = _laplace_candidates(problem, bound)
    # `min` returns the first of equal candidates.
    best = min(candidates, key=lambda candidate: candidate.bound)
    for candidate in candidates:
        finite("epsilon", candidate.bound, "the bound")
    replies = num_replies(problem.num_clients, best.cohort_size, best.num_rounds)
    return planner.Plan(
        problem=problem,
        head=f"{problem.METHOD}, {problem.mechanism} mechanism, {problem.num_clients} clients",
        best=best,
        rows=(
            Row("num_rounds", best.num_rounds),
            Row("cohort_size", best.cohort_size),
            Row("bound", best.bound, "expected squared distance to the optimum"),
            Row("num_replies", replies, "at most, of each client"),
        ),
        details={
            "mechanism": problem.mechanism,
            "continuous_optimum": _continuous_optimum(candidates),
            "bound_parts": problem.parts(best.num_rounds, best.cohort_size),
        },
        candidates=tuple(candidates),
        reasons=tuple(_reasons(problem, bound, best, candidates)),
        panels=_panels(problem, bound, best, candidates),
    )


def from_data(data: planner.Data, given: Mapping[str, object]) -> planner.Inputs:
    """Return the keys that the clients' data determine, for the Laplace mechanism unless `given` names the Gaussian."""
    gaussian = given.get("mechanism") == "gaussian"
    values = data.constants.fedsgd_dpc(gaussian=gaussian) | data.sizes()
    if gaussian and len(data.constants.gradient_variance) < len(data.num_records):
        values["gradient_variance"] = max(data.constants.gradient_variance)
    notes = ["heterogeneity and initial_distance are as the bound defines them, from the joint optimum"]
    if "clip_norm" not in given:
        notes.append(planner.PILOTS_CLIP_NORM)
    return planner.Inputs(values=values, notes=tuple(notes))


def _continuous_optimum(candidates: list[Candidate]) -> dict[str, float | None] | None:
    """Return the candidates' continuous point of least bound, or None if nothing was rounded.

    The paper's Table I rounds b* up; this planner's answer has the whole numbers of least bound.
    """
    points = [(point.continuous_bound, point) for point in candidates if point.continuous_bound is not None]
    if not points:
        return None
    bound, least = min(points, key=lambda point: point[0])
    return {"cohort_size": least.continuous_cohort_size, "num_rounds": least.continuous_num_rounds, "bound": bound}


def _candidate(bound: Bound, name: str, cohort_size: int, num_rounds: int) -> Candidate:
    with np.errstate(over="ignore"):
        value = float(bound.value(num_rounds, cohort_size))
    return Candidate(name=name, cohort_size=cohort_size, num_rounds=num_rounds, bound=value)


def _with_continuous(bound: Bound, candidate: Candidate, cohort_size: float, num_rounds: float) -> Candidate:
    value = float(bound.value(num_rounds, cohort_size))
    return replace(candidate, continuous_cohort_size=cohort_size, continuous_num_rounds=num_rounds, continuous_bound=value)


def _gaussian_candidates(problem: Problem, bound: Bound) -> list[Candidate]:
    cohorts = [problem.num_clients, 1] if problem.cohort_size is None else [problem.cohort_size]
    rounds = problem.num_rounds or problem.max_rounds or 0
    candidates = [_candidate(bound, f"b = {cohort}, T = {rounds}", cohort, rounds) for cohort in cohorts]
    if problem.num_rounds is None:
        # T = 0 comes first and so wins a tie: T = max_rounds must lower the bound.
        candidates.insert(0, _candidate(bound, "T = 0", cohorts[0], 0))
    return candidates


def _laplace_candidates(problem: Problem, bound: Bound) -> list[Candidate]:
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


def _rounds_at(bound: Bound, cohorts: Floats, cap: int | None) -> Candidate:
    """Return the best point of these cohort sizes and whole T >= 1: U is convex in T, so T is T* rounded down or up."""
    best = np.minimum(bound.best_num_rounds(cohorts), math.inf if cap is None else cap)
    if not np.all(best <= LONGEST):
        raise ProblemError("max_rounds", "max_rounds: missing; the noise is so small that the best number of rounds is unlimited")
    rounds = np.maximum(np.concatenate([np.floor(best), np.ceil(best)]), 1.0)
    sizes = np.concatenate([cohorts, cohorts])
    with np.errstate(over="ignore"):
        values = bound.value(rounds, sizes)
    index = int(np.argmin(values))
    return _candidate(bound, _ANYWHERE, int(sizes[index]), int(rounds[index]))


def _cohorts_at(bound: Bound, num_rounds: int, num_clients: int, name: str) -> list[Candidate]:
    continuous = bound.best_cohort_size(num_rounds, num_clients)
    whole = sorted({math.floor(continuous), math.ceil(continuous)})
    points = [_candidate(bound, f"{name}, b = {cohort}", cohort, num_rounds) for cohort in whole]
    return [_with_continuous(bound, point, continuous, num_rounds) for point in points]


def _reasons(problem: Problem, bound: Bound, best: Candidate, candidates: list[Candidate]) -> list[str]:
    reasons = []
    if others := [other for other in candidates if other.at() != best.at()]:
        second = min(others, key=lambda candidate: candidate.bound)
        more = f", {share_above(second.bound, best.bound)}" if best.bound > 0 else ""
        least = f"{best.at()} has the least bound, {best.bound:.4g}"
        reasons.append(f"{least}; next comes {second.at()} with {second.bound:.4g}{more}")
    if best.name == _ANYWHERE:
        reasons.append("T* at b = 1 and b = N is so far from a whole number that another cohort size does better")
    if problem.mechanism == "gaussian" and problem.num_rounds is None:
        sign = "> 0: every round lowers the bound, so T = max_rounds" if best.num_rounds else "<= 0: every round raises the bound"
        reasons.append(f"E1/b + E2 = {bound.sampling_term / best.cohort_size + bound.fixed_term:.4g} {sign}")
    elif best.num_rounds == problem.max_rounds and problem.mechanism == "laplace" and problem.num_rounds is None:
        free = bound.best_num_rounds(best.cohort_size)
        reasons.append(f"max_rounds={problem.max_rounds} limits T: at this b the bound falls until T = {float(free):.6g}")
    if best.num_rounds == 0:
        reasons.append("no training at all: by the bound, the noise of one round costs more than the round gains")
    if best.bound > 0:
        reasons.append(in_parts(problem.parts(best.num_rounds, best.cohort_size), best.bound))
    replies = num_replies(problem.num_clients, best.cohort_size, best.num_rounds)
    expected = best.cohort_size * best.num_rounds / problem.num_clients
    if replies != expected:
        reasons.append(f"the bound takes {expected:.6g} replies of a client; the noise must be calibrated to the most, {replies}")
    if best.bound >= problem.initial_distance:
        ranks = "it ranks the candidates"
        reasons.append(planner.no_promise("initial_distance", problem.initial_distance, ranks=ranks))
    if len(set(problem.num_records)) > 1:
        reasons.append("the paper's analysis assumes that all clients have equally many records; here they have not")
    unused = [key for key in _GAUSSIAN if getattr(problem, key) is not None]
    if problem.mechanism == "laplace" and unused:
        reasons.append(f"not used by the Laplace mechanism: {', '.join(unused)}")
    return reasons


def _panels(problem: Problem, bound: Bound, best: Candidate, candidates: list[Candidate]) -> tuple[Panel, ...]:
    """Return the bound over the rounds, and over the cohort size at the best number of rounds."""
    rounds = max(point.num_rounds for point in candidates)
    last = min(max(2 * rounds, 10), problem.max_rounds or LONGEST)
    by_rounds = {f"b = {b}": partial(bound.value, cohort_size=b) for b in sorted({1, problem.num_clients, best.cohort_size})}
    panels = [Panel(f"FedSGD-DPC, {problem.mechanism}", "rounds T", by_rounds, last, (best.num_rounds, best.bound), first=0)]
    if best.num_rounds:
        at = f"T = {best.num_rounds}"
        curve, optimum = {at: partial(bound.value, best.num_rounds)}, (best.cohort_size, best.bound)
        panels.append(Panel(f"at {at}", "cohort size b", curve, problem.num_clients, optimum))
    return tuple(panels)
