"""DP-FedPAQ: the best number of local steps, clients and quantization levels under a budget of bits.

Mohammadi, Bai, Fan, Song, Yi, Liu: Differential Privacy Meets Federated Learning under Communication Constraints. In each of K
rounds M of N clients take E steps, add Gaussian noise to their update and send it quantized (QSGD with s levels). The unit
of privacy is one record. Local DP: every message carries its client's full noise. The paper's epsilon and delta are of one round.

The bound is Theorem 1 (eq. 19) with eq. 12, on the expected squared distance to the optimum after T iterations.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from flower_dp.core import checks, compression
from flower_dp.core.checks import BadValue
from flower_dp.core.compression.qsgd import MOST_LEVELS
from flower_dp.planning import planner
from flower_dp.planning.planner import Data, Floats, Inputs, Panel, Row, finite, in_parts, real, share_above, whole
from flower_dp.privacy import accounting
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, expected_replies, update_terms

Bound = Callable[[float | Floats, float | Floats, float | Floats], Floats]
# Up to this s the 2 s + 1 values of a coordinate fit into 16 bits; QSGD supports no more.
MAX_LEVELS = MOST_LEVELS
_NORM_BITS = 32
# With more different numbers of records than this, the plan leaves the run's epsilon to `flower-dp epsilon`.
_MOST_SIZES = 4
# With more parameters, the plan makes no trial message to measure its size.
_MOST_PARAMETERS = 10**7
# The keys that errors name if the terms of the bound overflow, in the order of the terms.
_KEYS_OF_TERMS = ("initial_distance", "gradient_bound", "gradient_variance", "heterogeneity", "heterogeneity", "epsilon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(planner.Problem):
    """A checked problem. Comments on the fields give the paper's letters."""

    METHOD: ClassVar[str] = "dp-fedpaq"

    num_clients: int = whole()  # N
    num_iterations: int = whole()  # T
    bits_budget: float = real(above=0)  # B, of all uplink messages
    dimension: int = whole(at_most=10**15)  # d
    num_records: tuple[int, ...] = whole(at_most=10**12, each=True)  # n_i
    batch_size: int = whole(at_most="num_records")  # b
    epsilon: Floats = real(above=0, each=True)  # epsilon_i, a round
    delta: float = real(above=0, below=1)  # a round
    strong_convexity: float = real(above=0)  # mu
    smoothness: float = real(at_least="strong_convexity")  # L
    gradient_bound: float = real(above=0)  # G
    gradient_variance: float = real(at_least=0)  # sigma^2, of a batch of one
    heterogeneity: float = real(at_least=0)  # lambda
    initial_distance: float = real(at_least=0)  # D_0, squared
    num_local_steps: int | None = whole(at_most=10**15, default=None)  # E, if fixed; see `check`
    cohort_size: int | None = whole(at_most="num_clients", default=None)  # M, if fixed
    max_quantization_levels: int = whole(at_most=MAX_LEVELS, default=MAX_LEVELS)
    quantization_levels: int | None = whole(at_most="max_quantization_levels", default=None)  # s, if fixed

    def check(self) -> None:
        """Refuse numbers of local steps that the noise formula or the data forbid, and a bound that overflows."""
        if self.num_local_steps is not None:
            checks.integer("num_local_steps", self.num_local_steps, at_least=1, at_most=self._most_local_steps())
        least, most = self._least_local_steps(), self.num_local_steps or self._most_local_steps()
        if least > most:
            needs = "the noise formula needs delta <= E b / n_i, the part of a client's records that a round draws"
            allows = f"that is num_local_steps >= {least}, and the problem allows {most}"
            raise BadValue("delta", f"delta={self.delta!r}: {needs}; {allows}")
        with np.errstate(all="ignore"):
            cube = np.float64(self.strong_convexity) ** 3
            finite("strong_convexity", float(self.smoothness / cube), "smoothness / strong_convexity^3")
            for key, (name, term) in zip(_KEYS_OF_TERMS, self._terms(most, 1, 1).items(), strict=True):
                finite(key, float(term), f"the term of the {name}")

    def local_steps(self) -> range:
        """Return the E that the data and the noise formula allow: E <= T, and delta n_i <= E b <= n_i for every client."""
        if self.num_local_steps is not None:
            return range(self.num_local_steps, self.num_local_steps + 1)
        return range(self._least_local_steps(), self._most_local_steps() + 1)

    def num_rounds(self, num_local_steps: int) -> int:
        """Return K = floor(T / E)."""
        return self.num_iterations // num_local_steps

    def message_bits(self, levels: float | Floats) -> Floats:
        """Return beta = d log2(2 s + 1) + 32, the bits of a message with s levels, elementwise."""
        return np.asarray(self.dimension * np.log2(2 * np.asarray(levels, dtype=np.float64) + 1) + _NORM_BITS)

    def bits_used(self, num_rounds: int, cohort_size: float | Floats, levels: float | Floats) -> Floats:
        """Return K M beta (eq. 12), elementwise."""
        return np.asarray(num_rounds * np.asarray(cohort_size, dtype=np.float64) * self.message_bits(levels))

    def cohorts(self, num_rounds: int) -> tuple[Floats, Floats]:
        """Return the levels s that the budget allows, with the largest cohort at each: a larger cohort lowers the bound."""
        fixed = self.quantization_levels
        levels = np.arange(1.0, self.max_quantization_levels + 1) if fixed is None else np.asarray([float(fixed)])
        with np.errstate(over="ignore"):
            cohort = np.minimum(np.floor(self.bits_budget / (num_rounds * self.message_bits(levels))), self.num_clients)
            # Float rounding may make the cohort one too large or too small.
            cohort -= self.bits_used(num_rounds, cohort, levels) > self.bits_budget
            more = np.minimum(cohort + 1, self.num_clients)
            cohort = np.where(self.bits_used(num_rounds, more, levels) <= self.bits_budget, more, cohort)
        allowed = cohort >= (self.cohort_size or 1)
        return levels[allowed], cohort[allowed] if self.cohort_size is None else np.full(allowed.sum(), float(self.cohort_size))

    def smallest_bits_budget(self) -> int:
        """Return the least whole bits_budget with a feasible point: that of the fewest rounds, clients and levels."""
        rounds = self.num_rounds(self.local_steps()[-1])
        return math.ceil(self.bits_used(rounds, self.cohort_size or 1, self.quantization_levels or 1))

    def variance(self, levels: float | Floats) -> Floats:
        """Return q = min(d / s^2, sqrt(d) / s) of QSGD, E||Q(x) - x||^2 <= q ||x||^2, elementwise."""
        s = np.asarray(levels, dtype=np.float64)
        return np.minimum(self.dimension / s**2, math.sqrt(self.dimension) / s)

    def bound(self, steps: float | Floats, cohort: float | Floats, levels: float | Floats) -> Floats:
        """Return Theorem 1's bound (eq. 19) at (E, M, s), elementwise."""
        return np.asarray(sum(self._terms(steps, cohort, levels).values()))

    def scaled_bound(self, steps: float | Floats, cohort: float | Floats, levels: float | Floats) -> Floats:
        """Return the bound with the noise term over mu^2, elementwise.

        Distances don't change if the loss is multiplied by a number. All terms of eq. 19 have this property except the noise
        term: it lacks the factor 1/mu^2 of its step size.
        """
        terms = self._terms(steps, cohort, levels)
        return np.asarray(sum(terms.values()) + terms["noise"] * (self.strong_convexity**-2 - 1))

    def parts(self, steps: int, cohort: int, levels: int) -> dict[str, float]:
        """Return the named terms whose sum is the bound."""
        return {name: float(term) for name, term in self._terms(steps, cohort, levels).items()}

    def _terms(self, steps: float | Floats, cohort: float | Floats, levels: float | Floats) -> dict[str, Floats]:
        e, m = np.asarray(steps, dtype=np.float64), np.asarray(cohort, dtype=np.float64)
        q, t, n, b = self.variance(levels), self.num_iterations, self.num_clients, self.batch_size
        mu, square, spread = self.strong_convexity, np.float64(self.gradient_bound) ** 2, np.float64(self.heterogeneity) ** 2
        drift = 128 * math.e * spread / m * (e - 1) + 128 * square * (e - 1) ** 2
        return {
            "start": 16 * e**2 / t**2 * self.initial_distance,
            "quantization": 16 / mu**2 * (2 / m + 1 / n) * q * square * e / t,
            "batch sampling": 16 / mu**2 * self.gradient_variance / b * (4 * math.e / m + 1 / n) / t,
            "heterogeneity": 48 * self.smoothness * spread / (mu**3 * t) + 0 * m,
            "local drift": drift / (mu**2 * t),
            "noise": 4096 * self.dimension * square * b**2 * (1 + q) * self._noise(e) * e**3 / (m * t),
        }

    def _noise(self, steps: Floats) -> Floats:
        """Return the mean over clients of ln(1.25 E b / (n_i delta)) / (n_i epsilon_i)^2."""
        records = np.asarray(self.num_records, dtype=np.float64)
        weights = (records * self.epsilon) ** -2.0
        logs = np.log(1.25 * steps * self.batch_size / self.delta)
        return np.asarray(logs * np.mean(weights) - np.mean(weights * np.log(records)))

    def _most_local_steps(self) -> int:
        return min(self.num_iterations, min(self.num_records) // self.batch_size)

    def _least_local_steps(self) -> int:
        """Return the least E with delta / gamma <= 1, gamma = E b / n_i: above 1 the formula's delta is not a probability."""
        return max(math.ceil(self.delta * max(self.num_records) / self.batch_size), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(planner.Candidate):
    """A compared point: feasible whole numbers."""

    LETTERS: ClassVar[Mapping[str, str]] = {"num_local_steps": "E", "cohort_size": "M", "quantization_levels": "s"}
    num_local_steps: int
    cohort_size: int
    quantization_levels: int
    num_rounds: int
    bits_used: float
    bound: float
    """Theorem 1."""
    scaled_bound: float
    """Theorem 1 with the noise term over mu^2; see `Problem.scaled_bound`."""

    def shown(self) -> str:
        """Return the point and its bound for a reader."""
        return f"{self.at(' ')} K={self.num_rounds}  bound {self.bound:.6g}  bits {self.bits_used:.6g}"


def _run(problem: Problem, point: Candidate) -> dict[str, Any]:
    """Return a feasible point as a run of the app: the theorem's step size, the paper's noise, the cost and the bits sent.

    eta_k = 4 / (mu (k E + 4 E)) is a step size of 1 / (mu E) that is half as large after 4 E local steps. A record's gradient is
    clipped to G. If clients have different epsilons, all get the least.

    In the result, `settings` are of the app; the preset or the user gives data, model and output. `num_replies` is the maximum
    per client. `epsilon` is proved for all these replies together, for the client that they cost most; None if clients have too
    many different sizes. `bits_sent` is the size of all uplink messages if updates are Gaussian noise; None if there are too many
    parameters to try.
    """
    e, m, s, clients = point.num_local_steps, point.cohort_size, point.quantization_levels, problem.num_clients
    epsilon, delta, everyone = float(np.min(problem.epsilon)), problem.delta, m == clients
    steps = FedPAQSteps(
        learning_rate=1 / (problem.strong_convexity * e),
        num_local_steps=e,
        batch_size=problem.batch_size,
        clip_norm=problem.gradient_bound,
        sensitivity="per-step",
        decay_iterations=4.0 * e,
    )
    fields = ("clip_norm", "num_local_steps", "sensitivity", "update_clip_norm", "smoothness", "decay_iterations")
    own: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "calibration": "paper"}
    own |= {name.replace("_", "-"): getattr(steps, name) or 0.0 for name in fields}
    own |= {"quantization-levels": s, "num-replies": 0}
    settings = {
        "method": problem.METHOD,
        "num-clients": clients,
        "num-rounds": point.num_rounds,
        "sampling": "full" if everyone else "fixed-size",
        "cohort-size": 0 if everyone else m,
        "batch-size": problem.batch_size,
        "learning-rate": steps.learning_rate,
        **{f"{problem.METHOD}.{key}": value for key, value in own.items()},
    }
    written = {key: f"{value:.12g}" if isinstance(value, float) else str(value) for key, value in settings.items()}
    replies = expected_replies(point.num_rounds, m, clients, at_random=True)
    costs, messages, sent = [], 8 * point.num_rounds * m, None
    if problem.dimension <= _MOST_PARAMETERS:
        rng = np.random.default_rng(0)
        sent = messages * compression.qsgd(rng.standard_normal(problem.dimension), s, rng).num_bytes
    sizes = sorted(set(problem.num_records))
    for size in sizes if len(sizes) <= _MOST_SIZES else ():
        budget: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "num_replies": replies, "calibration": "paper"}
        terms = update_terms(steps=steps, num_records=size, **budget)
        event = accounting.repeated(terms.event, replies)
        costs.append(accounting.epsilon(event, delta=delta, relation=terms.release.relation).epsilon)
    return {
        "settings": settings,
        "num_replies": replies,
        "epsilon": max(costs, default=None),
        "delta": delta,
        "bits_sent": sent,
        "most_bits_sent": messages * compression.qsgd_bytes(problem.dimension, s),
        "command": " ".join(["flower-dp run PRESET", *(f"--set {key}={value}" for key, value in written.items())]),
    }


def _run_lines(run: Mapping[str, Any]) -> list[str]:
    proved = "not computed for so many sizes of clients; flower-dp epsilon computes it"
    if run["epsilon"] is not None:
        number = f"{run['epsilon']:.6g}" if math.isfinite(run["epsilon"]) else "infinite"
        proved = f"{number}  (proved, {run['num_replies']} replies of a client together, delta {run['delta']:g})"
    sent = "" if run["bits_sent"] is None else f"{run['bits_sent']:.6g} if updates are Gaussian noise, "
    bits = f"{sent}at most {run['most_bits_sent']:.6g}"
    return ["To run it", f"  {run['command']}", f"  epsilon    {proved}", f"  bits sent  {bits}"]


class Plan(planner.Plan[Problem, Candidate]):
    """The planner's answer, with the best point as a run of the app."""

    __slots__ = ()

    def to_dict(self) -> dict[str, object]:
        """Return the answer as plain values for JSON; null if nothing is feasible."""
        run = self.best and _run(self.problem, self.best)
        if run and not math.isfinite(run["epsilon"] or 0):
            run["epsilon"] = None
        return super().to_dict() | {"run": run}

    def lines(self) -> list[str]:
        """Return the answer for a reader, without the reasons."""
        if self.best is None:
            return [self.head, "", "  infeasible", f"  smallest_bits_budget  {self.problem.smallest_bits_budget()}"]
        return [*super().lines(), "", *_run_lines(_run(self.problem, self.best))]


def plan(values: Mapping[str, object]) -> Plan:
    """Return the best point for a problem (a mapping with the fields of `Problem` as keys).

    The point has the least Theorem 1 bound of all feasible whole E, M and s; of equals, it uses the fewest bits. Feasible
    means E <= T, M <= N, s <= max_quantization_levels, delta n_i <= E b <= n_i for every client, and at most bits_budget bits:
    floor(T/E) M (d log2(2s+1) + 32). Values that the problem fixes stay fixed.

    Raises:
        ProblemError: naming the key that is unknown, missing or out of range.
    """
    problem = Problem.from_mapping(values)
    budget, smallest = problem.bits_budget, problem.smallest_bits_budget()
    best = _best(problem, "best", problem.bound)
    candidates = () if best is None else (best, *_others(problem))
    names = ("num_local_steps", "cohort_size", "quantization_levels", "num_rounds", "bits_used", "bound")
    notes = {"bound": "expected squared distance to the optimum"}
    answer = Plan(
        problem=problem,
        head=f"{problem.METHOD}, {problem.num_clients} clients, {problem.num_iterations} iterations, {budget:.6g} bits",
        best=best,
        rows=tuple(Row(name, best and getattr(best, name), notes.get(name, "")) for name in names),
        details={
            "smallest_bits_budget": smallest,
            "bound_parts": best and problem.parts(best.num_local_steps, best.cohort_size, best.quantization_levels),
        },
        candidates=candidates,
        reasons=(),
    )
    if best is None:
        where = f"E={problem.local_steps()[-1]}, M={problem.cohort_size or 1}, s={problem.quantization_levels or 1}"
        return replace(
            answer,
            reasons=(f"every point needs at least {smallest} bits, which are those of {where}",),
            infeasible=f"bits_budget={budget:.15g}: nothing is feasible; the smallest feasible bits_budget is {smallest}",
        )
    return replace(answer, reasons=tuple(_reasons(problem, *candidates)), panels=_panels(problem, best))


def from_data(data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys that the clients' data determine: all but bits_budget, num_iterations, batch_size, epsilon and delta."""
    constants = data.constants
    values = data.sizes() | constants.named("strong_convexity", "smoothness", "gradient_bound", "initial_distance")
    values |= {"gradient_variance": max(constants.gradient_variance), "heterogeneity": constants.gradient_dissimilarity}
    notes = ["heterogeneity is the largest root mean square distance of the clients' gradients from their mean, in the pilot"]
    if "gradient_bound" not in given:
        wanted = "if records are clipped, give the clip norm, which the bound's noise term needs"
        notes.append(f"gradient_bound is a root mean square; {wanted}")
    return Inputs(values=values, notes=tuple(notes))


def _others(problem: Problem) -> list[Candidate]:
    """Return the best points under the bound with 1/mu^2, without a choice of s, and without local steps."""
    others = [_best(problem, "best with 1/mu^2 in the noise term", problem.scaled_bound)]
    if problem.quantization_levels is None:
        ternary = replace(problem, quantization_levels=1)
        others.append(_best(ternary, "best with s = 1", ternary.bound))
    if problem.num_local_steps is None and problem.local_steps()[0] == 1:
        single = replace(problem, num_local_steps=1)
        others.append(_best(single, "best with E = 1", single.bound))
    return [other for other in others if other is not None]


def _best(problem: Problem, name: str, bound: Bound) -> Candidate | None:
    """Return the feasible point of least bound, or None.

    For each E, the search tries all s with the largest cohort that the budget then allows. It skips an E only if a lower bound,
    with the best cohort and the best s that the budget allows separately, is not below the best point so far.
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
    best: tuple[float, float, int, int, int] | None = None
    for index in np.argsort(hopes, kind="stable"):
        # The factor covers rounding, which may put a lower bound slightly above the value that it bounds.
        if best is not None and hopes[index] * (1 - 1e-12) > best[0]:
            break
        levels, cohort = problem.cohorts(int(rounds[index]))
        bounds, bits = bound(steps[index], cohort, levels), problem.bits_used(int(rounds[index]), cohort, levels)
        first = np.lexsort((bits, bounds))[0]
        point = (float(bounds[first]), float(bits[first]), int(steps[index]), int(cohort[first]), int(levels[first]))
        best = point if best is None else min(best, point)
    if best is None:
        return None
    _, bits_used, e, m, s = best
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


def _reasons(problem: Problem, best: Candidate, *others: Candidate) -> list[str]:
    reasons = [f"{best.at()} has the least bound, {best.bound:.4g}"]
    worse = [other for other in others[1:] if other.at() != best.at() and best.bound > 0]
    reasons += [f"{other.name}: {other.at()} with {other.bound:.4g}, {share_above(other.bound, best.bound)}" for other in worse]
    parts = problem.parts(best.num_local_steps, best.cohort_size, best.quantization_levels)
    reasons.append(in_parts(parts, best.bound))
    run = best.num_rounds * best.num_local_steps
    if run < problem.num_iterations:
        rounds = f"{best.num_rounds} rounds of {best.num_local_steps} steps"
        reasons.append(f"{rounds} are {run} iterations; the bound counts {problem.num_iterations}")
    if problem.strong_convexity != 1:
        least = f"least at {others[0].at()} with {others[0].scaled_bound:.4g}"
        lacks = "the noise term of Theorem 1 lacks a factor 1/mu^2"
        reasons.append(f"{lacks}; with it the bound is {best.scaled_bound:.4g} here, and {least}")
    q = float(problem.variance(best.quantization_levels))
    if q > 1:
        reasons.append(f"QSGD has q = {q:.4g} at s={best.quantization_levels}; Assumption 4 is stated for q in [0, 1]")
    rate = best.num_local_steps * problem.batch_size / max(problem.num_records)
    ratio = float(np.max(problem.epsilon)) / (2 * rate)
    if ratio > 1:
        formula = f"the classical Gaussian formula at epsilon / (2 gamma) = {ratio:.4g} > 1"
        reasons.append(f"the paper's noise takes {formula}, where it is not proved")
    if best.num_rounds > 1:
        several = f"a client takes part in up to {best.num_rounds}, and the paper does not compose them"
        reasons.append(f"epsilon and delta are those of one round; {several}")
    if best.bound >= problem.initial_distance:
        reasons.append(planner.no_promise("initial_distance", problem.initial_distance))
    return reasons


def _panels(problem: Problem, best: Candidate) -> tuple[Panel, ...]:
    """Return the bound over E, over s at the best E, and over M at the best E, each with the best other values."""
    e, s, m, free = best.num_local_steps, best.quantization_levels, best.cohort_size, replace(problem, num_local_steps=None)
    steps = free.local_steps()
    last_steps, last_levels = planner.last_shown(e, steps[-1]), planner.last_shown(s, problem.max_quantization_levels)

    def curve(at: Callable[[int], tuple[Problem, int]]) -> Mapping[str, Callable[[Floats], Floats]]:
        return {"Theorem 1": lambda values: np.asarray([_least(*at(int(value))) for value in values])}

    by_steps = curve(lambda value: (free, value))
    by_levels = curve(lambda value: (replace(problem, quantization_levels=value), e))
    by_cohort = curve(lambda value: (replace(problem, cohort_size=value), e))
    return (
        Panel("DP-FedPAQ, best M and s", "local steps E", by_steps, last_steps, (e, best.bound), steps[0]),
        Panel(f"at E = {e}, best M", "quantization levels s", by_levels, last_levels, (s, best.bound)),
        Panel(f"at E = {e}, best s", "cohort size M", by_cohort, problem.num_clients, (m, best.bound)),
    )


def _least(problem: Problem, steps: int) -> float:
    levels, cohort = problem.cohorts(problem.num_rounds(steps))
    return float(np.min(problem.bound(steps, cohort, levels))) if len(levels) else float("nan")
