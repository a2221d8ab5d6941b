"""NbAFL: the noise of uplink and downlink, and the number of rounds and the cohort size with the least bounds.

Wei, Li, Ding, Ma, Yang, Farokhi, Jin, Quek, Poor: Federated Learning with Differential Privacy: Algorithms and
Performance Analysis, IEEE TIFS 2020. The unit of privacy is one record, under the paper's assumption that a client's
weights are the mean of the optima of its single records (eq. 4). Eavesdroppers see L uploads of a client and all T
broadcasts. These are the paper's formulas, not proofs: from clipped weights alone a sensitivity of 2 C follows, not
2 C / m, and the Gaussian formula holds for epsilon < 1 per exposure.

The bounds are Theorem 2 (all clients) and Theorem 3 (K of N), on the expected excess loss after T rounds. Both are defined
only for a range of their constants: outside it the functions return NaN, and `..._reason` returns the reason.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from flower_dp.core import checks
from flower_dp.planning import planner
from flower_dp.planning.planner import Data, Floats, Inputs, Panel, ProblemError, Row, finite, keys_of, real, whole
from flower_dp.privacy import nbafl as paper

_OF_THE_UPLINK = ("uplink_exposures", "epsilon", "delta", "clip_norm", "min_records")


def best_proximal(*, smoothness: float, dissimilarity: float) -> float:
    """Return the proximal coefficient mu that minimizes P of Theorem 2: rho (B^2 + 2B), with P = 1 - l/mu there.

    lambda_2 = -1/mu + rho B (1 + B/2)/mu^2 is a parabola in 1/mu, whose minimum is at this mu. For P < 1, mu must exceed half of
    it.
    """
    rho, b = checks.number("smoothness", smoothness, above=0), checks.number("dissimilarity", dissimilarity, at_least=1)
    return rho * (b**2 + 2 * b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(planner.Problem):
    """A checked problem of the noise alone. Comments on the fields give the paper's letters."""

    METHOD: ClassVar[str] = "nbafl"

    num_clients: int = whole()  # N
    cohort_size: int = whole(at_most="num_clients")  # K
    num_rounds: int = whole()  # T
    uplink_exposures: int = whole(at_most="num_rounds")  # L
    epsilon: float = real(above=0)
    delta: float = real(above=0, below=1)
    clip_norm: float = real(above=0)  # C
    min_records: int = whole(at_most=10**12)  # m


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds(Problem):
    """A problem with the constants of its bounds on E[F(w(T))] - F*: Theorem 2 for all clients, Theorem 3 for K of N."""

    smoothness: float = real(above=0)  # rho
    lipschitz: float = real(above=0)  # beta
    # A rho-smooth function satisfies the Polyak-Lojasiewicz condition for no l above rho, and by Jensen's
    # inequality no average of squared gradients is below the square of the average: B >= 1.
    pl_constant: float = real(above=0, at_most="smoothness")  # l
    proximal: float = real(above=0)  # mu
    dissimilarity: float = real(at_least=1)  # B
    initial_gap: float = real(at_least=0)  # Theta
    max_rounds: int = whole()

    def contraction(self) -> float:
        """Return P = 1 + 2 l lambda_2 of Theorem 2."""
        mu, rho, b = self.proximal, self.smoothness, self.dissimilarity
        return 1 + 2 * self.pl_constant * (-1 / mu + rho * b / mu**2 + rho * b**2 / (2 * mu**2))

    def cohort_contraction(self, cohort_size: int | Floats) -> Floats:
        """Return Q of Theorem 3, elementwise."""
        mu, rho, b = self.proximal, self.smoothness, self.dissimilarity
        k = np.asarray(cohort_size, dtype=np.float64)
        inner = rho * b**2 / 2 + rho * b + rho * b**2 / k + 2 * rho * b**2 / np.sqrt(k) + mu * b / np.sqrt(k) - mu
        return np.asarray(1 + 2 * self.pl_constant / mu**2 * inner)

    def all_clients(self, num_rounds: int | Floats) -> Floats:
        """Return Theorem 2's bound at T, elementwise; NaN if P is outside (0, 1)."""
        rounds, p = np.asarray(num_rounds, dtype=np.float64), self.contraction()
        if not 0 < p < 1:
            return np.full(rounds.shape, np.nan)
        mu, rho, b = self.proximal, self.smoothness, self.dissimilarity
        noise, n, epsilon = self._noise(), self.num_clients, self.epsilon
        kappa_1 = (1 / mu + rho * b / mu) * self.lipschitz * noise / (1 - p) * math.sqrt(2 / (n * math.pi))
        kappa_0 = rho / 2 * noise**2 / ((1 - p) * n)
        with np.errstate(over="ignore", invalid="ignore"):
            price = kappa_1 * rounds / epsilon + kappa_0 * (rounds / epsilon) ** 2
            return np.asarray(p**rounds * self.initial_gap - np.expm1(rounds * math.log(p)) * price)

    def sampled_clients(self, cohort_size: int | Floats) -> Floats:
        """Return Theorem 3's bound at K, elementwise; NaN if the logarithm is undefined or Q is outside (0, 1)."""
        k, q, t = np.asarray(cohort_size, dtype=np.float64), self.cohort_contraction(cohort_size), self.num_rounds
        mu, rho, b, n = self.proximal, self.smoothness, self.dissimilarity, self.num_clients
        alpha_0 = 2 * rho * k / n + rho
        alpha_1 = 1 + 2 * rho * b / mu + 2 * rho * b * np.sqrt(k) / (mu * n)
        with np.errstate(all="ignore"):
            noise = self._noise() / (-k * paper.sampled_log(n, k, t, self.epsilon))
            price = noise * alpha_1 * self.lipschitz * math.sqrt(2 / math.pi) + noise**2 * alpha_0
            bound = q**t * self.initial_gap + (1 - q**t) / (1 - q) * price
        return np.asarray(np.where((q > 0) & (q < 1), bound, np.nan))

    def all_clients_reason(self) -> str:
        """Return the reason that Theorem 2 gives no bound."""
        least = best_proximal(smoothness=self.smoothness, dissimilarity=self.dissimilarity) / 2
        return _vacuous("P", self.contraction(), f"P < 1 needs proximal > rho B (1 + B/2) = {least:.6g}")

    def sampled_clients_reason(self, cohort_size: int) -> str:
        """Return the reason that Theorem 3 gives no bound at K."""
        n, t, argument = self.num_clients, self.num_rounds, _log_argument(self, cohort_size)
        if argument <= 0 and cohort_size < n:
            least = n * -math.expm1(-self.epsilon / t)
            formula = f"log argument 1 - N/K + (N/K) e^(-epsilon/T) = {argument:.4g} <= 0"
            return f"{formula} (T={t} and this epsilon need K > {least:.6g})"
        root, rho, b = math.sqrt(cohort_size), self.smoothness, self.dissimilarity
        hint = f"Q < 1 needs K > B^2 = {b**2:.6g}"
        if root > b:
            least = rho * (b**2 / 2 + b + b**2 / cohort_size + 2 * b**2 / root) / (1 - b / root)
            hint = f"Q < 1 needs proximal > {least:.6g} at this K"
        return _vacuous("Q", float(self.cohort_contraction(cohort_size)), hint)

    def _noise(self) -> float:
        """Return c C / m."""
        return paper.gaussian_c(self.delta) * self.clip_norm / self.min_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(planner.Candidate):
    """The bound at one (K, T), or the reason that it has none; `last_cohort_size` ends a range of cohort sizes without one."""

    cohort_size: int
    num_rounds: int
    bound: float | None
    reason: str | None = None
    last_cohort_size: int | None = None

    @property
    def feasible(self) -> bool:
        """Whether the bound exists at this point."""
        return self.bound is not None

    def shown(self) -> str:
        """Return the point and its bound for a reader."""
        until = f"..{self.last_cohort_size}" if self.last_cohort_size not in {None, self.cohort_size} else ""
        value = f"infeasible: {self.reason}" if self.bound is None else f"bound {self.bound:.6g}"
        return f"K={self.cohort_size}{until} T={self.num_rounds}  {value}"


def plan(values: Mapping[str, object]) -> planner.Plan[Problem, Point]:
    """Return a problem's noise, and the optima of the bounds if the problem gives their constants.

    best_num_rounds is the smallest T in 1..max_rounds with the least Theorem 2 bound, if all clients take part. best_cohort_size
    is the smallest K in 1..N with the least Theorem 3 bound at the given T. The planner evaluates every point. The theorems
    disagree at K = N, so do not compare their bounds with each other. These two points are the first candidates.

    Raises:
        ProblemError: naming the key that is unknown, missing or out of range.
    """
    problem = (Problem if set(values) <= set(keys_of(Problem)) else Bounds).from_mapping(values)
    noise = {key: getattr(problem, key) for key in keys_of(Problem)}
    downlink = paper.downlink_noise_std(**noise)
    uplink = paper.uplink_noise_std(**{key: noise[key] for key in _OF_THE_UPLINK})
    bounds = problem if isinstance(problem, Bounds) else None
    try:
        candidates = _candidates(bounds) if bounds is not None else ()
    except (OverflowError, ZeroDivisionError) as error:
        why = "the bound leaves the range of floating-point numbers; rescale the problem"
        raise ProblemError("proximal", f"proximal={values['proximal']!r}: {why}") from error
    rows = [
        Row("uplink_noise_std", finite("epsilon", uplink, "uplink_noise_std")),
        Row("downlink_noise_std", finite("epsilon", downlink, "downlink_noise_std")),
    ]
    infeasible, details = None, {}
    if bounds is not None:
        by_rounds, by_cohort = candidates[:2]
        places = {"best_num_rounds": (by_rounds, by_rounds.num_rounds), "best_cohort_size": (by_cohort, by_cohort.cohort_size)}
        for name, (point, place) in places.items():
            rows.append(Row(name, place, f"bound {point.bound:.6g}") if point.feasible else Row(name, None, text="infeasible"))
        details = {
            "best_num_rounds_bound": by_rounds.bound,
            "best_cohort_size_bound": by_cohort.bound,
            "candidates": [asdict(point) for point in candidates if point.feasible],
            "infeasible": [asdict(point) for point in candidates if not point.feasible],
        }
        if not by_rounds.feasible and not by_cohort.feasible:
            infeasible = f"nothing is feasible: num_rounds: {by_rounds.reason}; cohort_size: {by_cohort.reason}"
    return planner.Plan(
        problem=problem,
        head=f"{problem.METHOD}, {problem.cohort_size} of {problem.num_clients} clients, {problem.num_rounds} rounds",
        rows=tuple(rows),
        details=details,
        candidates=candidates,
        reasons=(*_reasons_for_noise(problem), *(_reasons_for_optima(bounds, candidates) if bounds is not None else ())),
        panels=_panels(bounds, *candidates[:2]) if bounds is not None else (),
        infeasible=infeasible,
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


def _candidates(bounds: Bounds) -> tuple[Point, ...]:
    """Return the best T, the best K, both bounds at the given point, then the ranges of K without a bound."""
    n, k, t = bounds.num_clients, bounds.cohort_size, bounds.num_rounds
    by_cohort = bounds.sampled_clients(np.arange(1.0, n + 1))
    return (
        _all_clients(bounds, "all clients, best T", _least(bounds.all_clients(np.arange(1.0, bounds.max_rounds + 1)), t)),
        _sampled(bounds, "K of N, best K", _least(by_cohort, k)),
        _all_clients(bounds, "all clients, T as given", t),
        _sampled(bounds, "K and T as given", k),
        *_runs(bounds, by_cohort),
    )


def _all_clients(bounds: Bounds, name: str, num_rounds: int) -> Point:
    value = float(bounds.all_clients(num_rounds))
    bound, reason = (value, None) if math.isfinite(value) else (None, bounds.all_clients_reason())
    return Point(name=name, cohort_size=bounds.num_clients, num_rounds=num_rounds, bound=bound, reason=reason)


def _sampled(bounds: Bounds, name: str, cohort_size: int) -> Point:
    value = float(bounds.sampled_clients(cohort_size))
    bound, reason = (value, None) if math.isfinite(value) else (None, bounds.sampled_clients_reason(cohort_size))
    return Point(name=name, cohort_size=cohort_size, num_rounds=bounds.num_rounds, bound=bound, reason=reason)


def _least(values: Floats, given: int) -> int:
    """Return the index of the least finite value, counted from one; `given` if no value is finite."""
    finite_values = np.where(np.isfinite(values), values, np.inf)
    return int(np.argmin(finite_values)) + 1 if np.isfinite(finite_values).any() else given


def _runs(bounds: Bounds, by_cohort: Floats) -> list[Point]:
    """Return one point for each range of cohort sizes without a bound, with the reason at its largest size."""
    gone = np.concatenate([[False], ~np.isfinite(by_cohort), [False]])
    starts, ends = np.flatnonzero(gone[1:] & ~gone[:-1]) + 1, np.flatnonzero(gone[:-1] & ~gone[1:])
    return [
        Point(
            name="no bound for these K",
            cohort_size=int(start),
            last_cohort_size=int(end),
            num_rounds=bounds.num_rounds,
            bound=None,
            reason=f"at K={end}: {bounds.sampled_clients_reason(int(end))}",
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def _panels(bounds: Bounds, best_t: Point, best_k: Point) -> tuple[Panel, Panel]:
    """Return Theorem 2 over the rounds, and Theorem 3 over the cohort size."""
    n, most, t = bounds.num_clients, bounds.max_rounds, best_t.num_rounds
    last = most if best_t.bound is None else planner.last_shown(t, most, 10)
    by_rounds = None if best_t.bound is None else (t, best_t.bound)
    by_cohort = None if best_k.bound is None else (best_k.cohort_size, best_k.bound)
    of_cohorts = f"NbAFL, K of {n} clients, T = {bounds.num_rounds}"
    return (
        Panel("NbAFL, all clients", "rounds T", {"Theorem 2": bounds.all_clients}, last, by_rounds),
        Panel(of_cohorts, "cohort size K", {"Theorem 3": bounds.sampled_clients}, n, by_cohort),
    )


def _reasons_for_noise(problem: Problem) -> list[str]:
    n, k, t, exposures = problem.num_clients, problem.cohort_size, problem.num_rounds, problem.uplink_exposures
    quiet = paper.rounds_without_downlink_noise(n, k, exposures, problem.epsilon)
    what = "L sqrt(N)" if k == n else "epsilon/gamma"
    more = "more than" if t > quiet else "not more than"
    needed = "the server adds downlink noise" if t > quiet else "the uplink noise covers the broadcasts and the server adds none"
    reasons = [f"T={t} is {more} {what} = {quiet:.4g}: {needed}"]
    argument = _log_argument(problem, k)
    if argument <= 0 and k < n:
        alone = "by the paper, sampling alone gives this epsilon, with no noise at all"
        only = "that holds in one direction of the privacy loss only, so do not rely on downlink_noise_std = 0"
        reasons.append(f"the log argument of b and of Theorem 3 is {argument:.4g} <= 0: {alone}; {only}")
    if (ratio := problem.epsilon / exposures) >= 1:
        why = "the classical Gaussian formula is not proved there"
        proof = "so this is the paper's noise and not a proof of the paper's privacy"
        reasons.append(f"epsilon/uplink_exposures = {ratio:.4g} >= 1: {why}, {proof}")
    return reasons


def _reasons_for_optima(bounds: Bounds, candidates: tuple[Point, ...]) -> list[str]:
    best_t, best_k, given_t, given_k = candidates[:4]
    n, k, t, reasons = bounds.num_clients, bounds.cohort_size, bounds.num_rounds, []
    if best_t.bound is not None and given_t.bound is not None:
        limit = " = max_rounds, the bound still falls there" if best_t.num_rounds == bounds.max_rounds > 1 else ""
        given = f"T={t} as given has {given_t.bound:.4g} (P = {bounds.contraction():.4g})"
        reasons.append(f"all clients: T={best_t.num_rounds}{limit}, bound {best_t.bound:.4g}; {given}")
        start = bounds.initial_gap * bounds.contraction() ** best_t.num_rounds
        rest = f"{start:.4g} of the bound is the rest of the initial gap, {best_t.bound - start:.4g} comes from noise"
        reasons.append(f"at T={best_t.num_rounds}, {rest}")
    if best_k.bound is not None:
        given = f"has {given_k.bound:.4g}" if given_k.bound is not None else "has no bound"
        least = best_k.cohort_size
        reasons.append(f"K of N at T={t}: K={least}, bound {best_k.bound:.4g}; K={k} as given {given}")
        if 1 < least < n and _log_argument(bounds, least - 1) <= 0:
            zero = "and the paper's noise goes to 0 there: this optimum may be an artifact of the formula"
            reasons.append(f"K={least} is the least K whose logarithm is defined, {zero}")
    return reasons


def _log_argument(problem: Problem, cohort_size: int) -> float:
    n, t, epsilon = problem.num_clients, problem.num_rounds, problem.epsilon
    return paper.log_argument(num_clients=n, cohort_size=cohort_size, num_rounds=t, epsilon=epsilon)


def _vacuous(letter: str, value: float, hint: str) -> str:
    if 0 < value < 1:
        return "the bound leaves the range of floating-point numbers"
    return f"{letter} = {value:.6g} is outside (0, 1), so there is no bound; {hint}"
