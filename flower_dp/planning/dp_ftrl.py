"""DP-FTRL: the minimum separation, the matrix and the noise of a run, beside independent noise with and without sampling.

Sources: Kairouz et al. 2021 (DP-FTRL), Choquette-Choo et al. 2023 (minimum separation), McMahan, Xu & Zhang 2024 (BLT). The unit
of privacy is one client.

There is no convergence bound here. The planner compares the error of the noise alone, which is exact. It is the root mean square
(RMSE) of the noise on one coordinate of the sums of all updates up to each round. A model is the initial model plus such a sum
over the cohort size.
"""

import bisect
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flower_dp.core import dp_events
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.strategy_matrix import BLTMatrix, ParticipationSchema, TreeMatrix
from flower_dp.planning import planner
from flower_dp.planning.correlated_noise import error, noise_named
from flower_dp.planning.planner import Data, Floats, Inputs, Panel, ProblemError, Row, real, whole, word
from flower_dp.privacy import accounting, planned_run
from flower_dp.privacy.events import RELATIONS

_KINDS = ("blt", "bisr", "banded", "tree")
_INDEPENDENT, _POISSON, _FIXED, _FULL = "independent", "Poisson sampling", "fixed-size sampling", "all clients"
_MAX_BANDS = 64
# The chosen separation fills at least this part of the places that cohorts fill without separation.
_FILLED = 0.95
# Below this fill, the RMSE of the mean is misleading.
_SHORT = 0.9
# Points of a diagram: an optimization of the matrix takes about a second.
_NUM_POINTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(planner.Problem):
    """A checked problem. Comments on the fields give the letters."""

    METHOD: ClassVar[str] = "dp-ftrl"

    num_rounds: int = whole(at_most=10**4)  # n
    num_clients: int = whole(at_most=10**9)  # N
    cohort_size: int = whole(at_most="num_clients")  # m
    epsilon: float = real(above=0)
    delta: float = real(above=0, below=1)
    online_fraction: float = real(above=0, at_most=1, default=1.0)  # p
    min_separation: int = whole(at_least=0, at_most="num_rounds", default=0)  # b
    max_participations: int = whole(at_least=0, default=0)  # k
    relation: str = word(*RELATIONS, default=RELATIONS[0])
    noise: str = word(*_KINDS, default=_KINDS[0])

    @property
    def longest(self) -> int:
        """The largest separation with which cohorts can be full, at most the number of rounds."""
        return min(self.num_clients // self.cohort_size, self.num_rounds)

    def sampling(self, separation: int) -> MinimumSeparationSampling:
        """Return the sampling with this separation."""
        size, most = self.cohort_size, self.max_participations or None
        return MinimumSeparationSampling(cohort_size=size, min_separation=separation, max_participations=most)

    def schema(self, separation: int) -> ParticipationSchema:
        """Return the participations that noise is made for with this separation."""
        rounds, most = self.num_rounds, self.sampling(separation).participations(self.num_rounds)
        return ParticipationSchema(num_rounds=rounds, min_separation=separation, max_participations=most)

    def fill(self, separation: int) -> float:
        """Return the expected ratio of a cohort's size to `cohort_size` with this separation."""
        return expected_fill(self.sampling(separation), self.num_rounds, self.num_clients, self.online_fraction)

    def best_separation(self) -> int:
        """Return the largest separation up to `longest` that fills 95 % of the places that cohorts fill without separation."""
        enough = _FILLED * self.fill(1)
        return bisect.bisect_left(range(1, self.longest + 1), True, key=lambda separation: self.fill(separation) < enough)

    def matrix(self, kind: str, schema: ParticipationSchema) -> Any:
        """Return the matrix of a kind of noise, of the default size."""
        bands = min(schema.min_separation, _MAX_BANDS) if kind == "banded" else 0
        return noise_named(kind, bands=bands).matrix(schema)


@lru_cache(maxsize=256)
def expected_fill(sampling: MinimumSeparationSampling, num_rounds: int, num_clients: int, online_fraction: float) -> float:
    """Return the expected ratio of a cohort's size to `cohort_size`, as a mean over rounds: one simulation with a fixed seed.

    Each client is connected with the same probability, independently of other clients and of other rounds. Clients with equally
    many participations are then exchangeable. The simulation keeps only their numbers, whose law is that of `sampling.choose`.
    """
    separation, most = sampling.min_separation, sampling.participations(num_rounds)
    # If only the separation limits participations, their numbers decide who takes part, but not how many do.
    is_limited = most < -(-num_rounds // separation)
    free = np.zeros(most if is_limited else 1, dtype=np.int64)  # clients that may take part, by number of participations
    free[0], num_filled, rng = num_clients, 0, np.random.default_rng(0)
    cohorts: deque[NDArray[np.int64]] = deque()
    for _ in range(num_rounds):
        if len(cohorts) == separation:
            back = cohorts.popleft()
            free[is_limited:] += back[: len(back) - is_limited]
        chosen = np.diff(np.minimum(np.cumsum(rng.binomial(free, online_fraction)), sampling.cohort_size), prepend=0)
        free -= chosen
        cohorts.append(chosen)
        num_filled += int(chosen.sum())
    return num_filled / (num_rounds * sampling.cohort_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(planner.Candidate):
    """A compared kind of noise, at the problem's epsilon and delta.

    Attributes:
        relation: neighboring relation of epsilon.
        cohort_size: number of updates in a sum, the denominator of the mean.
        noise_multiplier: std over the clip norm, of a row of Z or of the independent noise of one round.
        rmse_of_sums: root mean squared error of the prefix sums, for one coordinate, in clip norms.
        rmse_of_mean: the same over the cohort size.
    """

    relation: str
    cohort_size: int
    noise_multiplier: float
    rmse_of_sums: float
    rmse_of_mean: float

    def shown(self) -> str:
        """Return the point and its errors for a reader."""
        errors = f"RMSE {self.rmse_of_sums:.6g} of sums, {self.rmse_of_mean:.6g} of the mean"
        return f"noise multiplier {self.noise_multiplier:.6g}  {errors}  ({self.relation})"


def plan(values: Mapping[str, object]) -> planner.Plan[Problem, Point]:
    """Return the separation, the matrix and the noise for a problem (its keys are the fields of `Problem`).

    Unless the problem fixes the separation, it is the largest, up to N / m, that fills 95 % of the places that cohorts fill
    without one. The first candidate is the answer. All candidates have the problem's epsilon and delta.

    Raises:
        ProblemError: naming the key that is unknown, missing or out of range.
    """
    problem = Problem.from_mapping(values)
    schema = problem.schema(problem.min_separation or problem.best_separation())
    matrix = problem.matrix(problem.noise, schema)
    try:
        points = _points(problem, schema)
    except ValueError as cause:
        raise ProblemError("epsilon", str(cause)) from cause
    best, sensitivity = points[problem.noise], matrix.sensitivity(schema)
    return planner.Plan(
        problem=problem,
        head=f"{problem.METHOD}, {problem.cohort_size} of {problem.num_clients} clients, {problem.num_rounds} rounds",
        best=best,
        rows=(
            Row("noise", problem.noise, _size(matrix, problem.num_rounds)[1]),
            Row("min_separation", schema.min_separation),
            Row("max_participations", schema.max_participations, "of one client"),
            Row("expected_fill", problem.fill(schema.min_separation), "mean size of a cohort over cohort_size"),
            Row("sensitivity", sensitivity, "of the run, in clip norms"),
            Row("noise_multiplier", best.noise_multiplier, "std of a row of Z over the clip norm"),
            Row("rmse_of_sums", best.rmse_of_sums, "of the prefix sums, for one coordinate, in clip norms"),
            Row("rmse_of_mean", best.rmse_of_mean, "the same over cohort_size: the noise in a model"),
        ),
        details={key: getattr(problem, key) for key in ("epsilon", "delta", "relation")} | {"matrix": asdict(matrix)},
        candidates=tuple(points.values()),
        reasons=tuple(_reasons(problem, schema, points)),
        panels=(_panel(problem, schema, points, best.noise_multiplier / sensitivity),),
    )


def from_data(data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the number of clients: the noise depends on nothing else of their data."""
    return Inputs(values={"num_clients": len(data.num_records)})


def _points(problem: Problem, schema: ParticipationSchema) -> dict[str, Point]:
    """Return the answer, the other kinds of correlated noise, independent noise, and DP-FedAvg with three samplings."""
    size, clients, rounds, points = problem.cohort_size, problem.num_clients, problem.num_rounds, {}
    target: dict[str, Any] = {key: getattr(problem, key) for key in ("epsilon", "delta", "relation")}
    for kind in sorted(_KINDS, key=lambda kind: kind != problem.noise):
        matrix = problem.matrix(kind, schema)
        multiplier = accounting.calibrate(partial(_event, matrix.sensitivity(schema)), **target)
        points[kind] = _point(kind, problem.relation, size, multiplier, matrix.prefix_error(rounds))
    schedules = {
        _INDEPENDENT: _schedule(problem, "full", num_rounds=schema.max_participations),
        _POISSON: _schedule(problem, "poisson", sampling_rate=size / clients),
        _FIXED: _schedule(problem, "fixed-size", cohort_size=size, num_clients=clients),
        _FULL: _schedule(problem, "full"),
    }
    for name, run in schedules.items():
        multiplier, divisor = run.calibrate(problem.epsilon), clients if name == _FULL else size
        points[name] = _point(name, run.relation, divisor, multiplier, math.sqrt((rounds + 1) / 2))
    return points


def _point(name: str, relation: str, size: int, multiplier: float, prefix_error: float) -> Point:
    rmse = multiplier * prefix_error
    errors = {"rmse_of_sums": rmse, "rmse_of_mean": rmse / size}
    return Point(name=name, relation=relation, cohort_size=size, noise_multiplier=multiplier, **errors)


def _event(sensitivity: float, multiplier: float) -> dp_events.DpEvent:
    """Return the event of a whole run with correlated noise."""
    return dp_events.GaussianDpEvent(multiplier / sensitivity)


def _schedule(problem: Problem, sampling: str, **options: Any) -> planned_run.ReleaseSchedule:
    """Return a run of DP-FedAvg; fixed-size sampling is accounted under replace-one alone."""
    words: dict[str, Any] = {"sampling_rate": None, "cohort_size": None, "num_clients": None, "num_rounds": problem.num_rounds}
    words["relation"] = "replace-one" if sampling == "fixed-size" else problem.relation
    return planned_run.from_options(**words | options, mechanism="gaussian", sampling=sampling, delta=problem.delta)


def _size(matrix: Any, num_rounds: int) -> tuple[int, str]:
    """Return the number of vectors of noise that the server keeps, each as large as the model, and the parameters as text."""
    if isinstance(matrix, BLTMatrix):
        return len(matrix.decays), ", ".join(f"{name} {np.round(values, 3).tolist()}" for name, values in asdict(matrix).items())
    if isinstance(matrix, TreeMatrix):
        return num_rounds.bit_length(), "of partial sums"
    return len(matrix.bands) - 1, f"{len(matrix.bands)} bands"


def _reasons(problem: Problem, schema: ParticipationSchema, points: Mapping[str, Point]) -> list[str]:
    best, noise, b = points[problem.noise], problem.noise, schema.min_separation
    times = {name: f"{point.rmse_of_sums / best.rmse_of_sums:.3g} times the RMSE of {noise}" for name, point in points.items()}
    other = problem.best_separation() if problem.min_separation else problem.longest
    filled = (f"min_separation={each} fills {100 * problem.fill(each):.3g} % of a cohort" for each in dict.fromkeys((b, other)))
    once, meaning = f"{-(-problem.num_rounds // b)} = ceil({problem.num_rounds} / {b})", "its epsilon is for replace-one"
    limit = f", max_participations={problem.max_participations} is a limit" if problem.max_participations else ""
    if (fill := problem.fill(b)) < _SHORT:
        limit += f"; {100 * (1 - fill):.0f} % of the places are empty, and the RMSE of the mean is that of full cohorts"
    reasons = [
        f"with {100 * problem.online_fraction:.3g} % of clients online, {'; '.join(filled)}",
        f"the separation allows {once} participations of a client" + limit,
        f"independent noise with the same separation has {times[_INDEPENDENT]}",
    ]
    if (least := min(_KINDS, key=lambda kind: points[kind].rmse_of_sums)) != noise:
        kept = (str(_size(problem.matrix(kind, schema), problem.num_rounds)[0]) for kind in (least, noise))
        reasons.append(f"{least} has {times[least]}; the server keeps {' instead of '.join(kept)} vectors as large as the model")
    needs = "it needs a secret cohort, sampled independently, with every sampled client connected"
    take = "it only then" if points[_POISSON].rmse_of_sums < best.rmse_of_sums else f"{noise}, which needs none of these"
    mean = f"{points[_FULL].rmse_of_mean / best.rmse_of_mean:.3g} times that of {noise}"
    return [
        *reasons,
        f"Poisson sampling has {times[_POISSON]}; {needs}; take {take}",
        f"fixed-size sampling has {times[_FIXED]}, and needs a secret cohort too; {meaning}",
        f"the RMSE of the mean of all {problem.num_clients} clients in every round, without sampling, is {mean}",
        "the whole run is charged before its first round: an early end saves no epsilon",
        f"to run it: {_command(problem, schema)}",
    ]


def _command(problem: Problem, schema: ParticipationSchema) -> str:
    """Return the command of the run; it rests on the app's defaults for all other settings."""
    values: dict[str, Any] = {"method": problem.METHOD, "sampling": "minimum-separation"}
    values |= {key: getattr(problem, key) for key in ("num_clients", "num_rounds", "cohort_size")}
    values |= {key: getattr(schema, key) for key in ("min_separation", "max_participations")}
    values |= {f"dp-ftrl.{key}": getattr(problem, key) for key in ("epsilon", "delta", "relation", "noise")}
    if problem.noise == "banded":
        values["dp-ftrl.bands"] = len(problem.matrix("banded", schema).bands)
    return " ".join(["flower-dp run PRESET", *(f"--set {key.replace('_', '-')}={value}" for key, value in values.items())])


def _panel(problem: Problem, schema: ParticipationSchema, points: Mapping[str, Point], multiplier: float) -> Panel:
    """Return the RMSE over the separation; `multiplier` is that of the one event of the whole run."""
    b, scale = schema.min_separation, multiplier * math.sqrt((problem.num_rounds + 1) / 2)
    best, poisson, first = points[problem.noise].rmse_of_sums, points[_POISSON].rmse_of_sums, max(1, b // 8)
    last = max(b, problem.longest)
    separations = np.union1d(np.geomspace(first, last, _NUM_POINTS).round(), [b])

    @lru_cache(maxsize=1)
    def errors() -> Floats:
        schemas = [problem.schema(int(separation)) for separation in separations]
        return np.array([multiplier * error(problem.matrix(problem.noise, each), each) for each in schemas])

    curves: dict[str, Callable[[Floats], Floats]] = {
        f"{problem.noise} ({len(separations)} points)": lambda x: np.asarray(np.interp(x, separations, errors())),
        "independent noise": lambda x: scale * np.sqrt([problem.schema(int(each)).max_participations for each in x]),
        "Poisson sampling": lambda x: np.full(x.shape, poisson),
    }
    return Panel(f"DP-FTRL, RMSE at epsilon {problem.epsilon:g}", "minimum separation b", curves, last, (b, best), first)
