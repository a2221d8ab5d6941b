"""A problem that can't be planned for: one line that names the key."""

import math
from typing import Any

import pytest

from flower_dp.planning import ProblemError
from flower_dp.planning.command import planner_of
from flower_dp.planning.dp_fedpaq import MAX_LEVELS
from tests.planning.problems import BOUND, FEDPAQ, GAUSSIAN, LAPLACE, NOISE, PASGD

PROBLEMS = {"fedsgd-dpc": LAPLACE, "nbafl": BOUND, "dp-pasgd": PASGD, "dp-fedpaq": FEDPAQ}
IMPOSSIBLE: dict[str, dict[str, list[Any]]] = {
    "fedsgd-dpc": {
        "mechanism": ["cauchy"],
        "num_clients": [1, 10.0, True, 10**400],
        "num_records": [0, [6000] * 9 + [0]],
        "dimension": [0],
        "clip_norm": [0.0, math.inf, 10**400],
        "epsilon": [0.0, math.nan, "1", [1.0] * 9 + [-1.0], 1e-200, [1.0, 2.0, 3.0]],
        "strong_convexity": [0.0, 1e-300],
        "smoothness": [0.49],
        "gradient_bound": [-1.0],
        "heterogeneity": [-0.1],
        "initial_distance": [-1.0],
        "cohort_size": [11, 0],
        "num_rounds": [0],
        "max_rounds": [0],
        "delta": [1.0],
        "sampling_rate": [1.5],
        "gradient_variance": [[-1.0] * 10],
        "noise_constant": [0.0],
    },
    "nbafl": {
        "num_clients": [0],
        "cohort_size": [51],
        "num_rounds": [0],
        "uplink_exposures": [26],
        "epsilon": [-1.0, 1e-320],
        "delta": [0.0, [0.1]],
        "clip_norm": [math.nan],
        "min_records": [0.5],
        "smoothness": [0.0],
        "lipschitz": [0.0],
        "pl_constant": [1.1],
        "proximal": [0.0, 1e-200],
        "dissimilarity": [0.9],
        "initial_gap": [-1.0],
        "max_rounds": [0, 10**9],
    },
    "dp-pasgd": {
        "cost_per_aggregation": [-1.0],
        "cost_per_step": [math.inf],
        "max_cost": [0.0, 100.5],
        "epsilon": [0.0, 1e-200, 1e-155],
        "initial_gap": [1e308, -0.1],
        "delta": [1.0],
        "learning_rate": [1.01],
        "strong_convexity": [1.5, 0.0],
        "smoothness": [-1.0],
        "gradient_variance": [math.nan],
        "dimension": [0],
        "batch_size": [0, [1, 2], "many"],
        "clip_norm": [0.0],
        "num_clients": [0],
    },
    "dp-fedpaq": {
        "bits_budget": [0, math.inf],
        "num_iterations": [0, 10**9],
        "dimension": [1.5],
        "num_clients": [0],
        "batch_size": [601],
        "num_records": [[600, 600]],
        "epsilon": [0.0, 1e-200],
        "delta": [1.0, 0.0],
        "strong_convexity": [0.0, 1e-150],
        "smoothness": [0.1],
        "gradient_bound": [0.0, 1e200],
        "gradient_variance": [-1.0],
        "heterogeneity": [math.nan],
        "initial_distance": ["far"],
        "num_local_steps": [51],
        "cohort_size": [101],
        "quantization_levels": [0, MAX_LEVELS + 1],  # QSGD is made for no more: no run could have them
        "max_quantization_levels": [0, MAX_LEVELS + 1],
    },
}


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [(method, key, value) for method, keys in IMPOSSIBLE.items() for key, values in keys.items() for value in values],
)
def test_an_impossible_value_is_named(method, key, value):
    with pytest.raises(ProblemError, match=rf"^{key}\W") as caught:
        planner_of(method).plan(PROBLEMS[method] | {key: value})
    assert caught.value.field == key
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", PROBLEMS)
def test_a_missing_key_is_named(method):
    # Without any constant of its bounds, NbAFL's problem is one of the noise alone.
    for problem in (PROBLEMS[method], *({"fedsgd-dpc": [GAUSSIAN], "nbafl": [NOISE]}.get(method, []))):
        for key in set(problem) - {"max_rounds"}:
            with pytest.raises(ProblemError, match=f"^{key}: missing") as caught:
                planner_of(method).plan({name: value for name, value in problem.items() if name != key})
            assert caught.value.field == key


@pytest.mark.parametrize(
    ("method", "changes", "what"),
    [
        ("fedsgd-dpc", {"smoothnes": 1.0}, "smoothnes: unknown key.*did you mean smoothness"),
        ("fedsgd-dpc", {"num-rounds": 3}, "num-rounds: unknown key.*did you mean num_rounds"),
        ("fedsgd-dpc", {"num_rounds": 7, "max_rounds": 5}, "num_rounds=7: must be <= max_rounds=5"),
        ("fedsgd-dpc", {"mechanism": "gaussian"}, "max_rounds: missing"),
        ("dp-pasgd", {"max_cost": 100.5}, "max_cost=.* must pay for one round of one step.* = 101"),
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
