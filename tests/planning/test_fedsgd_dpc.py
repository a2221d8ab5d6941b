import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import least_squares, minimize_scalar

from flower_dp.planning import ProblemError
from flower_dp.planning.fedsgd_dpc import num_replies, plan
from flower_dp.privacy.fedsgd_dpc import gaussian_noise_variance, laplace_scale
from tests.planning.problems import LAPLACE


def printed_bound(problem: dict[str, Any], num_rounds: float, cohort_size: float) -> float:
    """Theorem 3 (Laplace) and Theorem 4 (Gaussian) as printed, with omega_0 and omega_1; not the regrouped C and E."""
    n = problem["num_clients"]
    mu, lam, g = problem["strong_convexity"], problem["smoothness"], problem["gradient_bound"]
    records = np.broadcast_to(np.asarray(problem["num_records"], float), n)
    epsilons = np.broadcast_to(np.asarray(problem["epsilon"], float), n)
    total, gamma = records.sum(), 2 * lam / mu
    omega_0 = 2 * (n - cohort_size) / (n - 1) * g**2 / cohort_size + 2 * lam * problem["heterogeneity"]
    size = problem["dimension"] * num_rounds * problem["clip_norm"] ** 2 / total**2
    if problem["mechanism"] == "laplace":
        omega_1 = 32 * size * cohort_size * num_rounds / n * sum(1 / e**2 for e in epsilons)
    else:
        deltas = np.broadcast_to(np.asarray(problem["delta"], float), n)
        variances = np.broadcast_to(np.asarray(problem["gradient_variance"], float), n)
        omega_0 += sum(r / (problem["sampling_rate"] * total**2) * v for r, v in zip(records, variances, strict=True))
        logs = sum(math.log(1 / d) / e**2 for d, e in zip(deltas, epsilons, strict=True))
        omega_1 = 4 * problem["noise_constant"] ** 2 * size * logs
    return ((4 / mu**2 * omega_0 + gamma * problem["initial_distance"]) + omega_1 / mu**2) / (num_rounds + gamma)


def random_problem(rng: np.random.Generator, mechanism: str) -> dict[str, Any]:
    n = int(rng.integers(2, 9))
    mu = float(rng.uniform(0.3, 2))
    problem: dict[str, Any] = {
        "mechanism": mechanism,
        "num_clients": n,
        "num_records": [int(r) for r in rng.integers(20, 200, n)] if rng.random() < 0.5 else 100,
        "dimension": int(rng.integers(1, 50)),
        "clip_norm": float(rng.uniform(0.5, 3)),
        "epsilon": [float(e) for e in np.exp(rng.uniform(-1, 2, n))]
        if rng.random() < 0.5
        else float(np.exp(rng.uniform(-2, 1.5))),
        "strong_convexity": mu,
        "smoothness": mu * float(rng.uniform(1, 4)),
        "gradient_bound": float(np.exp(rng.uniform(-4, 1))),
        "heterogeneity": float(rng.choice([0.0, 0.05, 0.3])),
        "initial_distance": float(rng.choice([0.0, 0.02, 0.5, 3.0])),
    }
    if mechanism == "gaussian":
        problem |= {
            "delta": [float(d) for d in 10 ** rng.uniform(-6, -2, n)] if rng.random() < 0.5 else 1e-4,
            "sampling_rate": float(rng.uniform(0.05, 1)),
            "gradient_variance": [float(v) for v in rng.uniform(0, 1, n)],
            "noise_constant": float(rng.uniform(0.5, 2)),
            "max_rounds": int(rng.integers(1, 60)),
        }
    return problem


def exhaustive(problem: dict[str, Any], rounds: range, cohorts: range) -> float:
    return min(printed_bound(problem, t, b) for t in rounds for b in cohorts)


class TestNoise:
    def test_laplace_scale_by_hand(self):
        # MNIST in the paper: 10 clients of 6000 records; b = 1, T = 244 ask at most 25 replies of one. 2 * 300 * 25 / (6000 * 5)
        assert num_replies(10, 1, 244) == 25
        assert laplace_scale(300.0, 6000, 5.0, 25) == pytest.approx(0.5, rel=1e-15)

    def test_laplace_scale_spends_epsilon_exactly(self):
        # Pure DP: a reply costs (L1 sensitivity)/(scale); all replies together must cost epsilon.
        scale = laplace_scale(3.0, 50, 0.7, 9)
        assert 9 * (2 * 3.0 / 50) / scale == pytest.approx(0.7, rel=1e-12)
        # Ten times the budget, a tenth of the noise.
        assert laplace_scale(3.0, 50, 7.0, 9) == pytest.approx(scale / 10, rel=1e-12)

    def test_gaussian_variance_by_hand(self):
        # (1.5 * 10 / (6000 * 0.5))^2 * 100 * ln(1e5) = 2.5e-5 * 100 * 11.512925
        variance = gaussian_noise_variance(10.0, 6000, 0.5, 100, delta=1e-5, noise_constant=1.5)
        assert variance == pytest.approx(0.0287823137, rel=1e-8)

    @pytest.mark.parametrize(("cohort_size", "num_rounds", "replies"), [(10, 7, 7), (1, 50, 5), (1, 51, 6), (3, 7, 3), (1, 0, 0)])
    def test_replies_are_rounded_up(self, cohort_size, num_rounds, replies):
        assert num_replies(10, cohort_size, num_rounds) == replies


class TestBound:
    @pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
    def test_is_the_papers_theorem(self, mechanism):
        rng = np.random.default_rng(1)
        for _ in range(50):
            problem = random_problem(rng, mechanism)
            cohort, rounds = int(rng.integers(1, problem["num_clients"] + 1)), int(rng.integers(1, 50))
            problem.pop("max_rounds", None)
            answer = plan(problem | {"cohort_size": cohort, "num_rounds": rounds})
            expected = printed_bound(problem, rounds, cohort)
            assert (answer.best.cohort_size, answer.best.num_rounds) == (cohort, rounds)
            assert answer.best.bound == pytest.approx(expected, rel=1e-9)
            assert sum(answer.problem.parts(rounds, cohort).values()) == pytest.approx(expected, rel=1e-9)

    def test_slopes_vanish_at_the_closed_forms(self):
        rng = np.random.default_rng(2)
        inside = 0
        for _ in range(50):
            problem = random_problem(rng, "laplace")
            bound, n = plan(problem).problem.bound(), problem["num_clients"]
            for b in (1, n):
                best = float(bound.best_num_rounds(b))
                found = minimize_scalar(
                    lambda t, b=b, problem=problem: printed_bound(problem, t, b),
                    bounds=(0, 4 * best + 1),
                    method="bounded",
                    options={"xatol": 1e-9},
                )
                assert best == pytest.approx(found.x, rel=1e-3, abs=1e-3)
                if best > 0.1:
                    # dU/dT = 0, by central differences; |U| / T is the scale of a slope that is not zero.
                    step = 1e-3 * best
                    slope = (printed_bound(problem, best + step, b) - printed_bound(problem, best - step, b)) / (2 * step)
                    assert abs(slope) < 1e-4 * printed_bound(problem, best, b) / best
            rounds = int(rng.integers(1, 30))
            best = bound.best_cohort_size(rounds, n)
            inside += 1 < best < n
            found = minimize_scalar(
                lambda b, t=rounds, problem=problem: printed_bound(problem, t, b),
                bounds=(1, n),
                method="bounded",
                options={"xatol": 1e-9},
            )
            assert best == pytest.approx(found.x, rel=2e-3, abs=2e-3)
        assert inside >= 5


class TestLaplaceOptimum:
    @pytest.mark.slow
    def test_is_the_best_of_all_whole_numbers(self):
        rng = np.random.default_rng(3)
        winners, checked = set(), 0
        for _ in range(150):
            problem = random_problem(rng, "laplace")
            n, answer = problem["num_clients"], plan(problem)
            # U is convex in T, so beyond twice the largest T* nothing is smaller.
            horizon = 2 * max([5, *(candidate.num_rounds for candidate in answer.candidates)])
            if horizon > 100:
                continue
            assert answer.best.bound == pytest.approx(exhaustive(problem, range(horizon + 1), range(1, n + 1)), rel=1e-9)
            assert answer.best.bound == pytest.approx(
                printed_bound(problem, answer.best.num_rounds, answer.best.cohort_size), rel=1e-9
            )
            assert all(candidate.bound >= answer.best.bound for candidate in answer.candidates)
            checked += 1
            names = {1: "one", n: "all"}
            winners.add("none" if answer.best.num_rounds == 0 else names.get(answer.best.cohort_size, "between"))
        # The sample has every kind of winner, so no branch is untested.
        assert winners == {"one", "all", "none", "between"}
        assert checked > 60

    @pytest.mark.parametrize("fixed", ["cohort_size", "num_rounds", "max_rounds"])
    def test_under_what_is_fixed(self, fixed):
        rng = np.random.default_rng(4)
        for _ in range(80):
            problem = random_problem(rng, "laplace")
            n = problem["num_clients"]
            value = int(rng.integers(1, n + 1)) if fixed == "cohort_size" else int(rng.integers(1, 15))
            answer = plan(problem | {fixed: value})
            horizon = 2 * max([5, *(candidate.num_rounds for candidate in answer.candidates)])
            if horizon > 400:
                continue
            cohorts = range(value, value + 1) if fixed == "cohort_size" else range(1, n + 1)
            rounds = {"cohort_size": range(horizon + 1), "num_rounds": range(value, value + 1), "max_rounds": range(value + 1)}[
                fixed
            ]
            assert answer.best.bound == pytest.approx(exhaustive(problem, rounds, cohorts), rel=1e-9)
            assert answer.best.cohort_size in cohorts
            assert answer.best.num_rounds in rounds

    def test_candidates_are_the_papers(self):
        answer = plan(LAPLACE)
        by_name = {candidate.name: candidate for candidate in answer.candidates}
        assert list(by_name)[:3] == ["b = 1", "b = 10", "T = 0"]
        assert by_name["T = 0"].num_rounds == 0
        optimum = answer.details["continuous_optimum"]
        assert optimum is not None
        assert optimum["bound"] <= answer.best.bound
        assert optimum["bound"] == pytest.approx(printed_bound(LAPLACE, optimum["num_rounds"], optimum["cohort_size"]), rel=1e-9)

    def test_a_cap_that_cuts_may_put_the_optimum_between(self):
        # Without the cap b = 1 and many rounds are best; with few rounds a larger cohort makes up for them.
        problem = LAPLACE | {"epsilon": 20.0, "gradient_bound": 3.0}
        free = plan(problem).best
        assert (free.cohort_size, free.num_rounds) == (1, 82)
        problem["max_rounds"] = 20
        answer = plan(problem)
        assert answer.best.bound == pytest.approx(exhaustive(problem, range(21), range(1, 11)), rel=1e-9)
        assert 1 < answer.best.cohort_size < 10
        assert any("max_rounds=20 limits T" in reason for reason in answer.reasons)

    def test_no_noise_to_speak_of_needs_a_cap(self):
        with pytest.raises(ProblemError, match=r"^max_rounds: missing") as caught:
            plan(LAPLACE | {"epsilon": 1e20})
        assert caught.value.field == "max_rounds"
        assert plan(LAPLACE | {"epsilon": 1e20, "max_rounds": 10**6}).best.num_rounds == 10**6

    def test_nothing_is_gained_without_distance_heterogeneity_or_variance(self):
        answer = plan(LAPLACE | {"initial_distance": 0.0, "heterogeneity": 0.0, "gradient_bound": 0.0})
        assert (answer.best.num_rounds, answer.best.bound) == (0, 0.0)
        assert any("no training" in reason for reason in answer.reasons)


class TestGaussianOptimum:
    @pytest.mark.slow
    def test_is_the_best_of_all_whole_numbers(self):
        rng = np.random.default_rng(5)
        winners = set()
        for _ in range(30):
            problem = random_problem(rng, "gaussian")
            n, cap, answer = problem["num_clients"], problem["max_rounds"], plan(problem)
            assert answer.best.bound == pytest.approx(exhaustive(problem, range(cap + 1), range(1, n + 1)), rel=1e-9)
            assert answer.best.num_rounds in {0, cap}
            assert answer.best.cohort_size == n
            winners.add(answer.best.num_rounds > 0)
            fixed = plan(problem | {"cohort_size": 1})
            assert fixed.best.bound == pytest.approx(exhaustive(problem, range(cap + 1), range(1, 2)), rel=1e-9)
            rounds = plan(problem | {"num_rounds": 1})
            assert rounds.best.bound == pytest.approx(exhaustive(problem, range(1, 2), range(1, n + 1)), rel=1e-9)
        assert winners == {True, False}


# Table I: T* for fixed b, and b* for T = 50, at epsilon 1, 5, 10; N = 10.
TABLE = {
    "MNIST": {"T5": (5, 32, 67), "T10": (2, 20, 42), "b": (1, 3, 5), "T1": (22, 121, 244)},
    "FEMNIST": {"T5": (2, 22, 48), "T10": (1, 14, 31), "b": (1, 2, 3), "T1": (11, 70, 145)},
}
EPSILONS = (1.0, 5.0, 10.0)
ENTRIES = [(row, column) for row in ("T1", "T5", "T10", "b") for column in range(3)]
# Each half determines the three constants: it has several b and several epsilons.
HALVES = [
    [("T1", 0), ("T1", 2), ("T5", 1), ("T10", 0), ("T10", 2), ("b", 1)],
    [("T1", 1), ("T5", 0), ("T5", 2), ("T10", 1), ("b", 0), ("b", 2)],
]


def table_problem(constants: np.ndarray, epsilon: float) -> dict[str, Any]:
    """A problem with gamma, C1/C2 and C3/C2 (at epsilon 1) as given, and C2 = 1 there: mu = 2, one record a client, Gamma = 0."""
    gamma, c1, c3 = (float(value) for value in constants)
    return {
        "mechanism": "laplace",
        "num_clients": 10,
        "num_records": 1,
        "dimension": 1,
        "clip_norm": 10 / math.sqrt(8),  # C2 = 32 clip^2 (10/epsilon^2) / (mu^2 * 10 * 10^2)
        "epsilon": epsilon,
        "strong_convexity": 2.0,
        "smoothness": gamma,  # gamma = 2 smoothness / 2
        "gradient_bound": math.sqrt(9 * c1 / 20),  # C1 = 2 * 10 G^2 / 9
        "heterogeneity": 0.0,
        "initial_distance": (c3 + c1 / 10) / gamma,  # C3 = gamma Y0 - 2 G^2 / 9
    }


def continuous(constants: np.ndarray, row: str, column: int) -> float:
    problem = table_problem(constants, EPSILONS[column])
    if row == "b":
        value = plan(problem | {"num_rounds": 50}).candidates[0].continuous_cohort_size
    else:
        value = plan(problem | {"cohort_size": int(row[1:])}).candidates[0].continuous_num_rounds
    assert value is not None
    return value


def predicted(constants: np.ndarray, row: str, column: int) -> float:
    """As the table has it: b* rounded up, T* to the nearest."""
    value = continuous(constants, row, column)
    return math.ceil(value) if row == "b" else round(value)


def fitted(data: str, half: list[tuple[str, int]]) -> np.ndarray:
    """Least squares for gamma, C1/C2, C3/C2 on the T* of a half (a b* is only known rounded up)."""
    rows = [(row, column) for row, column in half if row != "b"]

    def errors(constants: np.ndarray) -> list[float]:
        return [continuous(constants, row, column) - TABLE[data][row][column] for row, column in rows]

    # smoothness >= strong_convexity puts gamma at 2 or more.
    found = least_squares(errors, [4.0, 300.0, 100.0], bounds=([2.0, 1.0, 0.0], [100.0, 1e5, 1e5]), x_scale=[4.0, 300.0, 100.0])
    return np.asarray(found.x)


class TestTableOne:
    @pytest.mark.parametrize("half", [0, 1])
    @pytest.mark.parametrize("data", ["MNIST", "FEMNIST"])
    def test_all_entries_follow_from_a_part(self, data, half):
        constants = fitted(data, HALVES[half])
        wrong = {
            (row, EPSILONS[column]): (predicted(constants, row, column), TABLE[data][row][column])
            for row, column in ENTRIES
            if abs(predicted(constants, row, column) - TABLE[data][row][column]) > 1
        }
        assert wrong == {}

    @pytest.mark.parametrize("data", ["MNIST", "FEMNIST"])
    def test_cohort_sizes_follow_exactly_and_one_is_the_joint_optimum(self, data):
        constants = fitted(data, [entry for entry in ENTRIES if entry[0] != "b"])
        for column, epsilon in enumerate(EPSILONS):
            assert predicted(constants, "b", column) == TABLE[data]["b"][column]
            joint = plan(table_problem(constants, epsilon)).best
            assert joint.cohort_size == 1
            assert abs(joint.num_rounds - TABLE[data]["T1"][column]) <= 1
