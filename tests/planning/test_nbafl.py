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


class TestUplink:
    def test_by_hand(self):
        # c L (2C/m) / epsilon = 3.1075114 * 25 * (2 * 20 / 100) / 60
        std = uplink_noise_std(uplink_exposures=25, epsilon=60.0, delta=0.01, clip_norm=20.0, min_records=100)
        assert std == pytest.approx(C_AT_ONE_PERCENT * 25 * 0.4 / 60, rel=1e-7)


class TestDownlink:
    def test_all_clients_by_hand(self):
        # 2 c C sqrt(T^2 - L^2 N) / (m N epsilon) = 2 * 3.1075114 * 20 * sqrt(625 - 50) / (100 * 50 * 60)
        std = downlink_noise_std(**NOISE | {"cohort_size": 50})
        assert std == pytest.approx(2 * C_AT_ONE_PERCENT * 20 * math.sqrt(575) / 300_000, rel=1e-7)

    def test_all_clients_none_up_to_the_threshold(self):
        # L sqrt(N) = 5 * sqrt(25) = 25
        arguments = NOISE | {"num_clients": 25, "cohort_size": 25, "uplink_exposures": 5}
        assert downlink_noise_std(**arguments) == 0.0
        assert downlink_noise_std(**arguments | {"num_rounds": 26}) > 0.0

    def test_both_noises_make_the_aggregate_of_eq_13(self):
        for rounds in (8, 25, 400):
            arguments = NOISE | {"cohort_size": 50, "num_rounds": rounds, "epsilon": 3.0}
            uplink = uplink_noise_std(
                **{key: arguments[key] for key in ("uplink_exposures", "epsilon", "delta", "clip_norm", "min_records")}
            )
            aggregate = downlink_noise_std(**arguments) ** 2 + uplink**2 / 50
            sensitivity = 2 * 20 / (100 * 50)
            assert math.sqrt(aggregate) == pytest.approx(C_AT_ONE_PERCENT * rounds * sensitivity / 3.0, rel=1e-7)

    def test_cohort_by_hand(self):
        # N/K = 2.5, epsilon/T = 0.04: v = ln(1 - 2.5 + 2.5 e^-0.04) = -0.10319...; b = -T v / epsilon
        v = math.log(1 - 2.5 + 2.5 * math.exp(-0.04))
        b = -25 * v / 1.0
        expected = 2 * C_AT_ONE_PERCENT * 20 * math.sqrt(625 / b**2 - 20) / (100 * 20 * 1.0)
        assert downlink_noise_std(**NOISE | {"epsilon": 1.0}) == pytest.approx(expected, rel=1e-7)

    def test_cohort_is_defined_everywhere_and_continuous(self):
        rng = np.random.default_rng(0)
        quiet = loud = undefined = 0
        for _ in range(2000):
            n = int(rng.integers(2, 100))
            k, t = int(rng.integers(1, n + 1)), int(rng.integers(1, 300))
            exposures, epsilon = int(rng.integers(1, t + 1)), float(10 ** rng.uniform(-3, 3))
            arguments = NOISE | {
                "num_clients": n,
                "cohort_size": k,
                "num_rounds": t,
                "uplink_exposures": exposures,
                "epsilon": epsilon,
            }
            std = downlink_noise_std(**arguments)
            assert math.isfinite(std)
            argument = 1 - n / k + n / k * math.exp(-epsilon / t)
            if k == n:
                assert (std > 0) == (t > exposures * math.sqrt(n))
                continue
            gamma = -math.log(1 - k / n + k / n * math.exp(-epsilon / (exposures * math.sqrt(k))))
            quiet, loud, undefined = quiet + (std == 0), loud + (std > 0), undefined + (argument <= 0)
            if argument <= 0:
                # b is not defined: the paper's other case must apply.
                assert t <= epsilon / gamma
                assert std == 0.0
            elif abs(t - epsilon / gamma) > 1e-6 * t:
                assert (std > 0) == (t > epsilon / gamma)
        assert min(quiet, loud, undefined) > 100

    def test_a_full_cohort_is_all_clients(self):
        # Lemma 4 at K = N: b = 1 and epsilon/gamma = L sqrt(N). Close to it, K = N - 1 is close to it.
        arguments = NOISE | {"num_clients": 2000, "num_rounds": 100, "epsilon": 2.0}
        full = downlink_noise_std(**arguments | {"cohort_size": 2000})
        assert downlink_noise_std(**arguments | {"cohort_size": 1999}) == pytest.approx(full, rel=1e-3)


class TestPlan:
    def test_noise_alone(self):
        answer = plan(NOISE)
        assert answer.infeasible is None
        content = answer.to_dict()
        assert content["uplink_noise_std"] == pytest.approx(C_AT_ONE_PERCENT * 0.4 / 60, rel=1e-7)
        assert content["downlink_noise_std"] == 0.0
        assert "best_num_rounds" not in content

    @pytest.mark.parametrize("epsilon", [1.0, 60.0, 300.0])
    def test_optima_are_the_best_of_all(self, epsilon):
        rng = np.random.default_rng(1)
        inside = 0
        for _ in range(40):
            n = int(rng.integers(2, 80))
            smoothness = float(rng.uniform(0.2, 2))
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
            best_num_rounds, best_cohort_size = answer.candidates[:2]
            by_rounds = [printed_theorem_2(problem, t) for t in range(1, 201)] if best_num_rounds.feasible else []
            if by_rounds:
                assert best_num_rounds.bound == pytest.approx(min(by_rounds), rel=1e-9)
                assert by_rounds[best_num_rounds.num_rounds - 1] == pytest.approx(min(by_rounds), rel=1e-9)
                inside += 1 < best_num_rounds.num_rounds < 200
            by_cohort = {k: value for k in range(1, n + 1) if (value := printed_theorem_3(problem, k)) is not None}
            assert best_cohort_size.feasible == bool(by_cohort)
            if by_cohort:
                assert best_cohort_size.bound == pytest.approx(min(by_cohort.values()), rel=1e-9)
                assert by_cohort[best_cohort_size.cohort_size] == pytest.approx(min(by_cohort.values()), rel=1e-9)
            gone = {
                k
                for point in answer.candidates
                if point.last_cohort_size
                for k in range(point.cohort_size, point.last_cohort_size + 1)
            }
            assert gone == set(range(1, n + 1)) - set(by_cohort)
        assert inside >= 5

    def test_an_interior_cohort_can_be_best(self):
        constants = {"lipschitz": 4.0, "pl_constant": 0.14, "proximal": 5.0, "clip_norm": 34.0}
        problem = BOUND | constants | {"num_clients": 20, "epsilon": 0.4, "num_rounds": 40}
        best = plan(problem).candidates[1]
        assert 1 < best.cohort_size < 20
        around = [printed_theorem_3(problem, best.cohort_size + step) for step in (-1, 0, 1)]
        assert around[1] is not None
        # Neighbours on both sides have a bound, and a larger one: not an edge of where it is defined.
        assert all(value is not None and value > around[1] for value in (around[0], around[2]))

    def test_an_optimum_at_the_edge_of_the_logarithm_is_said_to_be_one(self):
        # N (1 - e^(-60/25)) = 45.46
        answer = plan(BOUND)
        assert answer.candidates[1].cohort_size == 46
        assert any(reason.startswith("K=46 is the least K") for reason in answer.reasons)

    def test_nothing_feasible(self):
        # proximal = 1 < rho B (1 + B/2) = 1.5: P = 1 + 2 * 0.8 * (-1 + 1 + 0.5) = 1.8, and Q > P
        answer = plan(BOUND | {"proximal": 1.0})
        assert answer.infeasible is not None
        content = answer.to_dict()
        assert content["best_num_rounds"] is None
        assert content["best_cohort_size"] is None
        assert content["candidates"] == []
        assert any(
            "P = 1.8 is outside (0, 1)" in point["reason"] and "proximal > rho B (1 + B/2) = 1.5" in point["reason"]
            for point in content["infeasible"]
        )
        json.dumps(content, allow_nan=False)

    def test_one_of_two_feasible_is_an_answer(self):
        # K <= 4 with B = 2 is never in Q's range; all clients still have a bound.
        answer = plan(BOUND | {"num_clients": 4, "cohort_size": 4, "dissimilarity": 2.0, "proximal": 20.0})
        assert answer.infeasible is None
        assert answer.candidates[1].reason is not None
        assert "K > B^2 = 4" in answer.candidates[1].reason

    def test_the_hint_about_proximal_is_right(self):
        # At the least proximal that the reason names, Q crosses 1.
        reason = plan(BOUND | {"epsilon": 1.0, "proximal": 1.0}).candidates[3].reason
        assert reason is not None
        least = float(reason.split("proximal > ")[1].split(" ")[0])
        assert printed_theorem_3(BOUND | {"epsilon": 1.0, "proximal": least * 0.9999}, 20) is None
        assert printed_theorem_3(BOUND | {"epsilon": 1.0, "proximal": least * 1.0001}, 20) is not None

    def test_best_proximal(self):
        # The minimum of P over mu, on a fine grid.
        grid = np.linspace(0.5, 40, 200_000)
        p = 1 + 2 * 0.4 * (-1 / grid + 0.7 * 1.3 / grid**2 + 0.7 * 1.3**2 / (2 * grid**2))
        assert best_proximal(smoothness=0.7, dissimilarity=1.3) == pytest.approx(grid[np.argmin(p)], rel=1e-3)

    def test_all_clients_at_an_epsilon_whose_exponential_underflows(self):
        answer = plan(BOUND | {"epsilon": 1e5, "cohort_size": 50})
        assert answer.candidates[1].cohort_size == 50
