"""A problem that can't be planned for: one line that names the key."""

import math
from typing import Any

import pytest

from flower_dp.methods import METHODS
from flower_dp.planning import ProblemError, nbafl
from flower_dp.planning.command import planner_of
from flower_dp.planning.dp_fedpaq import MAX_LEVELS
from flower_dp.planning.planner import keys_of
from tests.planning.problems import BOUND, FEDPAQ, FTRL, GAUSSIAN, LAPLACE, NOISE, PASGD

PROBLEMS = {"fedsgd-dpc": LAPLACE, "nbafl": BOUND, "dp-pasgd": PASGD, "dp-fedpaq": FEDPAQ, "dp-ftrl": FTRL}
KEYS = {name: keys_of(nbafl.Bounds if name == "nbafl" else METHODS[name].load("planner").Problem) for name in PROBLEMS}
MAY_BE_ZERO = {"cost_per_aggregation", "cost_per_step", "initial_gap", "initial_distance", "heterogeneity", "gradient_variance"}
MAY_BE_ZERO |= {"min_separation", "max_participations"}
# Beyond another key, of another kind, or where a bound leaves the range of numbers.
OTHERS: dict[str, dict[str, list[Any]]] = {
    "fedsgd-dpc": {
        "mechanism": ["cauchy"],
        "num_clients": [1, True, 10**400],
        "num_records": [[6000] * 9 + [0]],
        "epsilon": ["1", [1.0] * 9 + [-1.0], 1e-200, [1.0, 2.0, 3.0]],
        "strong_convexity": [1e-300],
        "smoothness": [0.49],
        "cohort_size": [11],
        "delta": [1.0],
        "sampling_rate": [1.5],
    },
    "nbafl": {
        "cohort_size": [51],
        "uplink_exposures": [26],
        "epsilon": [1e-320],
        "delta": [[0.1]],
        "min_records": [0.5],
        "pl_constant": [1.1],
        "proximal": [1e-200],
        "dissimilarity": [0.9],
        "max_rounds": [10**9],
    },
    "dp-pasgd": {
        "max_resource_cost": [100.5],
        "epsilon": [1e-200, 1e-155],
        "initial_gap": [1e308],
        "delta": [1.0],
        "learning_rate": [1.01],
        "strong_convexity": [1.5],
        "batch_size": [[1, 2], "many"],
    },
    "dp-fedpaq": {
        "num_iterations": [10**9],
        "batch_size": [601],
        "num_records": [[600, 600]],
        "epsilon": [1e-200],
        "delta": [1.0],
        "strong_convexity": [1e-150],
        "smoothness": [0.1],
        "gradient_bound": [1e200],
        "num_local_steps": [51],
        "cohort_size": [101],
        "quantization_levels": [MAX_LEVELS + 1],  # QSGD is made for no more: no run could have them
        "max_quantization_levels": [MAX_LEVELS + 1],
    },
    "dp-ftrl": {
        "num_rounds": [10**4 + 1],
        "cohort_size": [10_001],
        "epsilon": [1e-200],
        "delta": [1.0],
        "online_fraction": [1.5],
        "min_separation": [1001],
        "relation": ["zero-out"],
        "noise": ["fresh"],
    },
}


def impossible(method: str) -> list[tuple[str, Any]]:
    no_number = [(key, value) for key in KEYS[method] for value in (-1.0, math.nan, "many")]
    zero = [(key, 0) for key in KEYS[method] if key not in MAY_BE_ZERO and (method, key) != ("fedsgd-dpc", "gradient_bound")]
    return no_number + zero + [(key, value) for key, values in OTHERS[method].items() for value in values]


@pytest.mark.parametrize("method", PROBLEMS)
def test_an_impossible_value_is_named(method):
    for key, value in impossible(method):
        with pytest.raises(ProblemError, match=rf"^{key}\W") as caught:
            planner_of(method).plan(PROBLEMS[method] | {key: value})
        assert caught.value.field == key
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", PROBLEMS)
def test_a_missing_key_is_named(method):
    # Without any constant of its bounds, NbAFL's problem is one of the noise alone.
    for problem in (PROBLEMS[method], *({"fedsgd-dpc": [GAUSSIAN], "nbafl": [NOISE]}.get(method, []))):
        for key in set(problem) - {"max_rounds", "online_fraction"}:
            with pytest.raises(ProblemError, match=f"^{key}: missing") as caught:
                planner_of(method).plan({name: value for name, value in problem.items() if name != key})
            assert caught.value.field == key


@pytest.mark.parametrize(
    ("method", "changes", "what"),
    [
        ("fedsgd-dpc", {"num-rounds": 3}, "num-rounds: unknown key.*did you mean num_rounds"),
        ("fedsgd-dpc", {"num_rounds": 7, "max_rounds": 5}, "num_rounds=7: must be <= max_rounds=5"),
        ("fedsgd-dpc", {"mechanism": "gaussian"}, "max_rounds: missing"),
        ("fedsgd-dpc", {"epsilon": 1e20}, "max_rounds: missing"),  # no noise to speak of
        ("dp-pasgd", {"max_resource_cost": 100.5}, "max_resource_cost=.* must pay for one round of one step.* = 101"),
        ("dp-pasgd", {"smoothness": 2.0, "learning_rate": 0.51}, "learning_rate=.* learning_rate <= 0.5"),
        ("dp-fedpaq", {"quantization_levels": 9, "max_quantization_levels": 8}, "quantization_levels=9: must be .* <= 8"),
        # E b / n = 0.02 for E = 1: the noise formula's delta / gamma would be 2.5.
        ("dp-fedpaq", {"delta": 0.05, "num_local_steps": 1}, "delta=0.05: .* num_local_steps >= 3, and the problem allows 1"),
        ("dp-fedpaq", {"delta": 0.999999, "num_records": 601}, "delta=0.999999: "),
    ],
)
def test_what_would_be_possible_is_said(method, changes, what):
    with pytest.raises(ProblemError, match=f"^{what}"):
        planner_of(method).plan(PROBLEMS[method] | changes)
