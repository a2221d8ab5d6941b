import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import least_squares

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


def test_noise_by_hand():
    # MNIST in the paper: 10 clients of 6000 records; b = 1, T = 244 ask at most 25 replies of one. 2 * 300 * 25 / (6000 * 5)
    assert num_replies(10, 1, 244) == 25
    assert laplace_scale(300.0, 6000, 5.0, 25) == pytest.approx(0.5, rel=1e-15)
    # Pure DP: a reply costs (L1 sensitivity)/(scale); all replies together must cost epsilon.
    assert 9 * (2 * 3.0 / 50) / laplace_scale(3.0, 50, 0.7, 9) == pytest.approx(0.7, rel=1e-12)
    # (1.5 * 10 / (6000 * 0.5))^2 * 100 * ln(1e5) = 2.5e-5 * 100 * 11.512925
    variance = gaussian_noise_variance(10.0, 6000, 0.5, 100, delta=1e-5, noise_constant=1.5)
    assert variance == pytest.approx(0.0287823137, rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("fixed", ["", "cohort_size", "num_rounds", "max_rounds"])
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_is_the_best_of_all_whole_numbers(mechanism, fixed):
    rng = np.random.default_rng(3)
    winners = set()
    for _ in range(150 if mechanism == "laplace" and not fixed else 30):
        problem = random_problem(rng, mechanism)
        n = problem["num_clients"]
        if fixed:
            problem[fixed] = int(rng.integers(1, {"cohort_size": n}.get(fixed, problem.get("max_rounds", 15)) + 1))
        answer = plan(problem)
        best = answer.best
        # U is convex in T, so beyond twice the largest T* nothing is smaller.
        horizon = problem.get("max_rounds", 2 * max([5, *(candidate.num_rounds for candidate in answer.candidates)]))
        if horizon > 100:
            continue
        cohorts = [problem["cohort_size"]] if fixed == "cohort_size" else range(1, n + 1)
        rounds = [problem["num_rounds"]] if fixed == "num_rounds" else range(horizon + 1)
        assert best.bound == pytest.approx(min(printed_bound(problem, t, b) for t in rounds for b in cohorts), rel=1e-9)
        assert best.bound == pytest.approx(printed_bound(problem, best.num_rounds, best.cohort_size), rel=1e-9)
        parts = answer.problem.parts(best.num_rounds, best.cohort_size)
        assert sum(parts.values()) == pytest.approx(best.bound, rel=1e-9)
        assert best.bound == min(candidate.bound for candidate in answer.candidates)
        assert (best.num_rounds in rounds, best.cohort_size in cohorts) == (True, True)
        winners.add("none" if best.num_rounds == 0 else {1: "one", n: "all"}.get(best.cohort_size, "between"))
    if not fixed:  # the sample has every kind of winner, so no branch is untested
        assert winners == ({"one", "all", "none", "between"} if mechanism == "laplace" else {"all", "none"})


def test_the_continuous_optimum_and_a_cap_that_cuts():
    answer = plan(LAPLACE)
    found = answer.details["continuous_optimum"]
    assert answer.best.bound >= found["bound"]
    assert found["bound"] == pytest.approx(printed_bound(LAPLACE, found["num_rounds"], found["cohort_size"]), rel=1e-9)
    # Without the cap b = 1 and many rounds are best; with few rounds a larger cohort makes up for them.
    assert (answer.best.cohort_size, answer.best.num_rounds) == (1, 82)
    capped = plan(LAPLACE | {"max_rounds": 20})
    assert 1 < capped.best.cohort_size < 10
    assert any("max_rounds=20 limits T" in reason for reason in capped.reasons)


# Table I: T* for fixed b, and b* for T = 50, at epsilon 1, 5, 10; N = 10.
TABLE = {
    "MNIST": {"T5": (5, 32, 67), "T10": (2, 20, 42), "b": (1, 3, 5), "T1": (22, 121, 244)},
    "FEMNIST": {"T5": (2, 22, 48), "T10": (1, 14, 31), "b": (1, 2, 3), "T1": (11, 70, 145)},
}
EPSILONS = (1.0, 5.0, 10.0)


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


@pytest.mark.parametrize("data", TABLE)
def test_table_one_follows_from_three_constants(data):
    """gamma, C1/C2 and C3/C2 by least squares on the nine T*: all T* but for one, all b* exactly, and b = 1 the joint optimum."""
    entries = [(row, column) for row in ("T1", "T5", "T10") for column in range(3)]

    def errors(constants: np.ndarray) -> list[float]:
        return [continuous(constants, row, column) - TABLE[data][row][column] for row, column in entries]

    # smoothness >= strong_convexity puts gamma at 2 or more.
    found = least_squares(errors, [4.0, 300.0, 100.0], bounds=([2.0, 1.0, 0.0], [100.0, 1e5, 1e5]), x_scale=[4.0, 300.0, 100.0])
    assert max(abs(round(continuous(found.x, *entry)) - TABLE[data][entry[0]][entry[1]]) for entry in entries) <= 1
    for column, epsilon in enumerate(EPSILONS):
        assert math.ceil(continuous(found.x, "b", column)) == TABLE[data]["b"][column]
        joint = plan(table_problem(found.x, epsilon)).best
        assert joint.cohort_size == 1
        assert abs(joint.num_rounds - TABLE[data]["T1"][column]) <= 1
