import json
import math
import shlex
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_dp.apps.client_app import app as client_app
from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.server_app import app as server_app
from flower_dp.cli import plans
from flower_dp.planning import ProblemError
from flower_dp.planning.dp_fedpaq import MAX_LEVELS, Problem, plan
from flower_dp.running import apps
from tests.grids import LocalGrid
from tests.planning.problems import FEDPAQ as PROBLEM

SMALL: dict[str, Any] = PROBLEM | {
    "num_iterations": 30,
    "dimension": 50,
    "num_clients": 8,
    "num_records": 100,
    "batch_size": 7,
    "max_quantization_levels": 12,
    "bits_budget": 20_000,
}


def sizes_of(p: dict[str, Any]) -> list[int]:
    return p["num_records"] if isinstance(p["num_records"], list) else [p["num_records"]] * p["num_clients"]


def printed_noise(p: dict[str, Any], e: int, m: int, s: int) -> float:
    """The last term of eq. 19, as the mean over the clients where their data sizes differ."""
    d, g, b, q = p["dimension"], p["gradient_bound"], p["batch_size"], min(p["dimension"] / s**2, math.sqrt(p["dimension"]) / s)
    terms = [
        4096 * d * g**2 * b**2 * (1 + q) * math.log(1.25 * e * b / (n * p["delta"])) * e**3
        / (m * n**2 * p["epsilon"] ** 2 * p["num_iterations"])
        for n in sizes_of(p)
    ]  # fmt: skip
    return sum(terms) / len(terms)


def printed_bound(p: dict[str, Any], e: int, m: int, s: int) -> float:
    """Theorem 1, eq. 19, written out in the order of the paper."""
    t, n, b = p["num_iterations"], p["num_clients"], p["batch_size"]
    mu, big_l, g = p["strong_convexity"], p["smoothness"], p["gradient_bound"]
    var, lam = p["gradient_variance"], p["heterogeneity"]
    q = min(p["dimension"] / s**2, math.sqrt(p["dimension"]) / s)
    return (
        16 * e**2 / t**2 * p["initial_distance"]
        + 16 / mu**2 * (2 * q * g**2 / m + q * g**2 / n) * e / t
        + 16 / mu**2 * (4 * math.e * var / (b * m) + 3 * big_l * lam**2 / mu + var / (b * n)) / t
        + 128 * math.e * lam**2 / (mu**2 * m) * (e - 1) / t
        + 128 * g**2 * (e - 1) ** 2 / (mu**2 * t)
        + printed_noise(p, e, m, s)
    )


def bits(p: dict[str, Any], e: int, m: int, s: int) -> float:
    return (p["num_iterations"] // e) * m * (p["dimension"] * math.log2(2 * s + 1) + 32)


def points(p: dict[str, Any]) -> list[tuple[int, int, int]]:
    """All points that the data, the noise formula (delta <= E b / n_i) and what is fixed allow, whatever they cost."""
    sizes, b = sizes_of(p), p["batch_size"]
    most = min(p["num_iterations"], min(sizes) // b)
    steps = [e for e in range(1, most + 1) if e * b >= p["delta"] * max(sizes)]
    every = [
        (e, m, s)
        for e in steps
        for m in range(1, p["num_clients"] + 1)
        for s in range(1, p.get("max_quantization_levels", MAX_LEVELS) + 1)
    ]
    fixed = [p.get(key) for key in ("num_local_steps", "cohort_size", "quantization_levels")]
    return [point for point in every if all(want in {None, have} for want, have in zip(fixed, point, strict=True))]


def test_the_noise_term_lacks_a_factor_one_over_mu_squared():
    """A loss times a number has the same optimum, and the method with its step sizes makes the same steps."""
    scale = 3.0
    rescaled = PROBLEM | {
        key: scale * PROBLEM[key] for key in ("strong_convexity", "smoothness", "gradient_bound", "heterogeneity")
    }
    rescaled["gradient_variance"] = scale**2 * PROBLEM["gradient_variance"]
    before, after = Problem.from_mapping(PROBLEM), Problem.from_mapping(rescaled)
    first, second = before.parts(10, 10, 5), after.parts(10, 10, 5)
    assert second.pop("noise") == pytest.approx(scale**2 * first.pop("noise"))  # a different distance to the same optimum
    assert second == pytest.approx(first)
    assert float(after.scaled_bound(10, 10, 5)) == pytest.approx(float(before.scaled_bound(10, 10, 5)))
    assert float(before.scaled_bound(10, 10, 5)) == pytest.approx(
        sum(first.values()) + printed_noise(PROBLEM, 10, 10, 5) / 0.5**2
    )


@settings(max_examples=15, deadline=None)
@given(
    budget=st.floats(0.5, 60.0),
    num_iterations=st.integers(1, 40),
    num_clients=st.integers(1, 8),
    sizes=st.integers(20, 200) | st.lists(st.integers(20, 200), min_size=8, max_size=8),
    batch_size=st.integers(1, 20),
    epsilon=st.floats(0.1, 1e4),
    delta=st.floats(1e-6, 0.05),
    gradient_bound=st.floats(1e-3, 10),
    heterogeneity=st.floats(0, 10),
    initial_distance=st.floats(0, 1e3),
    fixed=st.sampled_from(
        [{}, {}, {"num_local_steps": 1}, {"quantization_levels": 3}, {"cohort_size": 1, "quantization_levels": 2}]
    ),
)
def test_is_feasible_and_the_best_of_all(budget, sizes, num_clients, fixed, **keys):
    p = SMALL | keys | fixed | {"num_clients": num_clients, "max_quantization_levels": 6}
    p["num_records"] = sizes[:num_clients] if isinstance(sizes, list) else sizes
    allowed = points(p)
    if not allowed:  # delta is above the part of the records that any round draws
        with pytest.raises(ProblemError, match=r"^delta="):
            plan(p)
        return
    least = min(bits(p, *point) for point in allowed)
    p["bits_budget"] = budget * least
    answer = plan(p)
    found = answer.to_dict()
    assert found["smallest_bits_budget"] == math.ceil(least)
    feasible = [point for point in allowed if bits(p, *point) <= p["bits_budget"]]
    if not feasible:
        assert found["bound"] is None
        assert found["run"] is None
        assert str(math.ceil(least)) in (answer.infeasible or "")
        return
    point = (found["num_local_steps"], found["cohort_size"], found["quantization_levels"])
    assert point in feasible
    assert found["num_rounds"] == p["num_iterations"] // point[0]
    assert p["bits_budget"] >= found["bits_used"] == pytest.approx(bits(p, *point), rel=1e-12)
    assert sum(answer.problem.parts(*point).values()) == pytest.approx(printed_bound(p, *point))
    best = min(printed_bound(p, *one) for one in feasible)
    assert found["bound"] == pytest.approx(best, rel=1e-10)
    assert printed_bound(p, *point) == pytest.approx(best, rel=1e-10)


def test_reasons_name_what_the_paper_leaves_open():
    text = " | ".join(plan(PROBLEM | {"quantization_levels": 1, "num_local_steps": 13}).reasons)
    assert "76 rounds of 13 steps are 988 iterations; the bound counts 1000" in text
    assert "QSGD has q = 88.6 at s=1" in text  # sqrt(7850)
    # epsilon / (2 E b / n) = 10 / (2 * 156 / 600)
    assert "epsilon / (2 gamma) = 19.23 > 1, where it is not proved" in text
    assert "epsilon and delta are those of one round" in text
    assert "lacks a factor 1/mu^2" in text


# The run that an answer prints

RUN: dict[str, Any] = PROBLEM | {
    "num_clients": 4,
    "num_records": 20,
    "batch_size": 2,
    "num_iterations": 6,
    "num_local_steps": 2,
    "bits_budget": 200_000,
    "epsilon": [9.0, 8.0, 9.0, 9.0],
}


@pytest.mark.slow
@pytest.mark.parametrize("cohort_size", [4, 2])
def test_the_command_of_an_answer_runs_with_its_epsilon_and_bits(tmp_path, cohort_size):
    """The app on its embedded digits, with what the command says: three rounds of two steps."""
    answer = plan(RUN | {"cohort_size": cohort_size})
    said: Any = answer.to_dict()["run"]
    words = said["command"].split()
    assert words[:3] == ["flower-dp", "run", "PRESET"]
    more = ["partition=sample", "records-per-client=20", f"output-dir={tmp_path / 'run'}"]
    target = apps.resolve("mnist-dp-fedpaq", [word for word in words[3:] if word != "--set"] + more)
    config = {**target.app.defaults, **target.overrides}
    server_app(LocalGrid(client_app, 4, **config), Context(1, 0, {}, RecordDict(), config))
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    rounds = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sent = sum(8 * cohort_size * one["bytes-per-client"] for one in rounds if "bytes-per-client" in one)
    assert statement["guarantee"]["num_charged_rounds"] == answer.best.num_rounds == 3
    assert 0.5 * said["bits_sent"] < sent <= said["most_bits_sent"]
    assert said["bits_sent"] <= said["most_bits_sent"]
    assert 8.0 < statement["guarantee"]["epsilon"] <= said["epsilon"] * (1 + 1e-3)
    if cohort_size == 4:
        assert statement["guarantee"]["epsilon"] == pytest.approx(said["epsilon"], rel=1e-3)
        assert said["num_replies"] == 3
    # The theorem's 4 / (mu (k E + 4 E)), and the paper's noise of the least epsilon.
    planned = ParsedRunConfig.of(config)
    run = planned.strategy(lambda: dict.fromkeys(planned.settings.client_names(), 20)).rules.steps
    assert [run.step_size(number) for number in (1, 5)] == pytest.approx([4 / (0.5 * 8), 4 / (0.5 * (4 * 2 + 8))])
    noise = 2 * run.sum_norm * 2 * 0.2 * math.sqrt(2 * math.log(1.25 * 0.2 / 1e-4)) / 8.0
    assert statement["mechanism"]["noise"]["min_noise_multiplier"] == pytest.approx(noise / run.sum_norm)


def test_an_answer_for_clients_of_many_sizes_leaves_epsilon_to_the_command_that_says_it():
    sizes = [100, 101, 102, 103, 104, 105, 106, 107]
    run: Any = plan(SMALL | {"num_records": sizes}).to_dict()["run"]
    assert run["epsilon"] is None
    assert "flower-dp epsilon computes it" in "\n".join(plan(SMALL | {"num_records": sizes}).lines())
    fixed = {"num_local_steps": 2, "cohort_size": 4, "quantization_levels": 3}
    both, large, small = (
        plan(SMALL | fixed | {"num_records": own}).to_dict()["run"]["epsilon"] for own in ([100] * 4 + [50] * 4, 100, 50)
    )
    assert both == max(large, small)
    assert large != small


@pytest.mark.parametrize("as_json", [True, False])
def test_the_preset_of_the_estimates_is_in_the_command(as_json):
    answer = plan(SMALL)
    text = json.dumps(answer.to_dict()) if as_json else "\n".join(answer.lines())
    named = plans._named(text, "mnist", ["seed=3", "num-rounds=9", 'data-dir=a "b"'], as_json=as_json)
    command = (
        json.loads(named)["run"]["command"] if as_json else next(line for line in named.splitlines() if "flower-dp run" in line)
    )
    words = shlex.split(command)
    assert words[:7] == ["flower-dp", "run", "mnist", "--set", "seed=3", "--set", 'data-dir=a "b"']
    assert words.count("num-rounds=9") == 0
    assert sum(word.startswith("num-rounds=") for word in words) == 1
