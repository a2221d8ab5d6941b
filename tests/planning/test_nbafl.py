import json
import math
from typing import Any

import numpy as np
import pytest

from flower_dp.planning.nbafl import best_proximal, plan
from flower_dp.privacy.nbafl import downlink_noise_std, uplink_noise_std
from tests.planning.problems import BOUND, NOISE

# sqrt(2 ln 125), by a calculator
C_AT_ONE_PERCENT = 3.1075114


def printed_theorem_2(p: dict[str, Any], num_rounds: int) -> float:
    """Theorem 2, written out in the order of the paper."""
    rho, beta, pl, mu, b = (p[key] for key in ("smoothness", "lipschitz", "pl_constant", "proximal", "dissimilarity"))
    c = math.sqrt(2 * math.log(1.25 / p["delta"]))
    lambda_0, lambda_1 = rho / 2, 1 / mu + rho * b / mu
    lambda_2 = -1 / mu + rho * b / mu**2 + rho * b**2 / (2 * mu**2)
    big_p = 1 + 2 * pl * lambda_2
    kappa_1 = (
        lambda_1 * beta * c * p["clip_norm"] / (p["min_records"] * (1 - big_p)) * math.sqrt(2 / (p["num_clients"] * math.pi))
    )
    kappa_0 = lambda_0 * c**2 * p["clip_norm"] ** 2 / (p["min_records"] ** 2 * (1 - big_p) * p["num_clients"])
    decay = big_p**num_rounds
    ratio = num_rounds / p["epsilon"]
    return decay * p["initial_gap"] + (kappa_1 * ratio + kappa_0 * ratio**2) * (1 - decay)


def printed_theorem_3(p: dict[str, Any], k: int) -> float | None:
    """Theorem 3, written out in the order of the paper; None where it says nothing."""
    rho, beta, pl, mu, b = (p[key] for key in ("smoothness", "lipschitz", "pl_constant", "proximal", "dissimilarity"))
    n, t, m, clip = p["num_clients"], p["num_rounds"], p["min_records"], p["clip_norm"]
    c = math.sqrt(2 * math.log(1.25 / p["delta"]))
    root = math.sqrt(k)
    q = 1 + 2 * pl / mu**2 * (rho * b**2 / 2 + rho * b + rho * b**2 / k + 2 * rho * b**2 / root + mu * b / root - mu)
    argument = 1 - n / k + n / k * math.exp(-p["epsilon"] / t)
    if argument <= 0 or not 0 < q < 1:
        return None
    alpha_0, alpha_1 = 2 * rho * k / n + rho, 1 + 2 * rho * b / mu + 2 * rho * b * root / (mu * n)
    v = math.log(argument)
    noise = c * clip * alpha_1 * beta / (-m * k * v) * math.sqrt(2 / math.pi) + c**2 * clip**2 * alpha_0 / (m**2 * k**2 * v**2)
    return q**t * p["initial_gap"] + (1 - q**t) / (1 - q) * noise


def test_both_noises_make_the_aggregate_of_eq_13():
    for rounds in (8, 25, 400):
        arguments = NOISE | {"cohort_size": 50, "num_rounds": rounds, "epsilon": 3.0}
        uplink = uplink_noise_std(
            **{key: arguments[key] for key in ("uplink_exposures", "epsilon", "delta", "clip_norm", "min_records")}
        )
        aggregate = downlink_noise_std(**arguments) ** 2 + uplink**2 / 50
        sensitivity = 2 * 20 / (100 * 50)
        assert math.sqrt(aggregate) == pytest.approx(C_AT_ONE_PERCENT * rounds * sensitivity / 3.0, rel=1e-7)


def test_downlink_noise_of_a_cohort_by_hand():
    # N/K = 2.5, epsilon/T = 0.04: v = ln(1 - 2.5 + 2.5 e^-0.04) = -0.10319...; b = -T v / epsilon
    v = math.log(1 - 2.5 + 2.5 * math.exp(-0.04))
    b = -25 * v / 1.0
    expected = 2 * C_AT_ONE_PERCENT * 20 * math.sqrt(625 / b**2 - 20) / (100 * 20 * 1.0)
    assert downlink_noise_std(**NOISE | {"epsilon": 1.0}) == pytest.approx(expected, rel=1e-7)


def test_downlink_noise_is_defined_everywhere():
    rng = np.random.default_rng(0)
    quiet = loud = undefined = 0
    for _ in range(500):
        n = int(rng.integers(2, 100))
        k, t = int(rng.integers(1, n + 1)), int(rng.integers(1, 300))
        exposures, epsilon = int(rng.integers(1, t + 1)), float(10 ** rng.uniform(-3, 3))
        std = downlink_noise_std(
            **NOISE | {"num_clients": n, "cohort_size": k, "num_rounds": t, "uplink_exposures": exposures, "epsilon": epsilon}
        )
        if k == n:
            assert (std > 0) == (t > exposures * math.sqrt(n))
            continue
        argument = 1 - n / k + n / k * math.exp(-epsilon / t)
        threshold = -epsilon / math.log(1 - k / n + k / n * math.exp(-epsilon / (exposures * math.sqrt(k))))
        quiet, loud, undefined = quiet + (std == 0), loud + (std > 0), undefined + (argument <= 0)
        if argument <= 0:  # b is not defined: the paper's other case must apply
            assert (t <= threshold, std) == (True, 0.0)
        elif abs(t - threshold) > 1e-6 * t:
            assert (std > 0) == (t > threshold)
    assert min(quiet, loud, undefined) > 25


def test_noise_alone():
    answer = plan(NOISE)
    assert answer.infeasible is None
    content = answer.to_dict()
    # c L (2C/m) / epsilon = 3.1075114 * 1 * (2 * 20 / 100) / 60
    assert content["uplink_noise_std"] == pytest.approx(C_AT_ONE_PERCENT * 0.4 / 60, rel=1e-7)
    assert content["downlink_noise_std"] == 0.0
    assert "best_num_rounds" not in content


@pytest.mark.parametrize("epsilon", [1.0, 60.0, 300.0])
def test_optima_are_the_best_of_all(epsilon):
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(40):
        n, smoothness = int(rng.integers(2, 80)), float(rng.uniform(0.2, 2))
        problem = BOUND | {
            "epsilon": epsilon,
            "num_clients": n,
            "cohort_size": int(rng.integers(1, n + 1)),
            "num_rounds": int(rng.integers(1, 100)),
            "clip_norm": float(10 ** rng.uniform(-3, 1)),
            "smoothness": smoothness,
            "lipschitz": float(rng.uniform(0.1, 2)),
            "pl_constant": smoothness * float(rng.uniform(0.1, 1)),
            "proximal": smoothness * float(rng.uniform(2, 20)),
            "dissimilarity": float(rng.uniform(1, 1.5)),
        }
        answer = plan(problem)
        best_t, best_k = answer.candidates[:2]
        if best_t.feasible:
            by_rounds = [printed_theorem_2(problem, t) for t in range(1, 201)]
            assert best_t.bound == pytest.approx(min(by_rounds), rel=1e-9)
            assert by_rounds[best_t.num_rounds - 1] == pytest.approx(min(by_rounds), rel=1e-9)
            inside += 1 < best_t.num_rounds < 200
        by_cohort = {k: value for k in range(1, n + 1) if (value := printed_theorem_3(problem, k)) is not None}
        assert best_k.feasible == bool(by_cohort)
        if by_cohort:
            assert best_k.bound == pytest.approx(min(by_cohort.values()), rel=1e-9)
            assert by_cohort[best_k.cohort_size] == pytest.approx(min(by_cohort.values()), rel=1e-9)
        without = [point for point in answer.candidates if point.last_cohort_size]
        gone = {k for point in without for k in range(point.cohort_size, point.last_cohort_size + 1)}
        assert gone == set(range(1, n + 1)) - set(by_cohort)
    assert inside >= 5


def test_an_optimum_at_the_edge_of_the_logarithm_is_said_to_be_one():
    # N (1 - e^(-60/25)) = 45.46
    answer = plan(BOUND)
    assert answer.candidates[1].cohort_size == 46
    assert any(reason.startswith("K=46 is the least K") for reason in answer.reasons)


def test_nothing_feasible():
    # proximal = 1 < rho B (1 + B/2) = 1.5: P = 1 + 2 * 0.8 * (-1 + 1 + 0.5) = 1.8, and Q > P
    answer = plan(BOUND | {"proximal": 1.0})
    assert answer.infeasible is not None
    content = answer.to_dict()
    assert (content["best_num_rounds"], content["best_cohort_size"], content["candidates"]) == (None, None, [])
    reason = content["infeasible"][0]["reason"]
    assert "P = 1.8 is outside (0, 1)" in reason
    assert "proximal > rho B (1 + B/2) = 1.5" in reason
    json.dumps(content, allow_nan=False)


def test_the_hint_about_proximal_is_right():
    # At the least proximal that the reason names, Q crosses 1.
    reason = plan(BOUND | {"epsilon": 1.0, "proximal": 1.0}).candidates[3].reason
    assert reason is not None
    least = float(reason.split("proximal > ")[1].split(" ")[0])
    assert printed_theorem_3(BOUND | {"epsilon": 1.0, "proximal": least * 0.9999}, 20) is None
    assert printed_theorem_3(BOUND | {"epsilon": 1.0, "proximal": least * 1.0001}, 20) is not None


def test_best_proximal():
    # The minimum of P over mu, on a fine grid.
    grid = np.linspace(0.5, 40, 200_000)
    p = 1 + 2 * 0.4 * (-1 / grid + 0.7 * 1.3 / grid**2 + 0.7 * 1.3**2 / (2 * grid**2))
    assert best_proximal(smoothness=0.7, dissimilarity=1.3) == pytest.approx(grid[np.argmin(p)], rel=1e-3)


def test_all_clients_at_an_epsilon_whose_exponential_underflows():
    answer = plan(BOUND | {"epsilon": 1e5, "cohort_size": 50})
    assert answer.candidates[1].cohort_size == 50
