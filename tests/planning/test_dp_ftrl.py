import json
import math
import shlex
import tomllib

import numpy as np
import pytest
from typer.testing import CliRunner

from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.cli.main import app
from flower_dp.core import dp_events
from flower_dp.core.participation import MinimumSeparationSampling, Participation
from flower_dp.core.strategy_matrix import ParticipationSchema
from flower_dp.planning import ProblemError
from flower_dp.planning.correlated_noise import BLT, Banded, error
from flower_dp.planning.dp_ftrl import expected_fill, from_data, plan
from flower_dp.planning.planner import Data
from flower_dp.planning.plot import figure
from flower_dp.privacy import accounting, planned_run
from flower_dp.running import apps

PROBLEM = {"num_rounds": 200, "num_clients": 1000, "cohort_size": 20, "epsilon": 4.0, "delta": 1e-6}
NOISES = ("blt", "bisr", "banded", "tree")
EXAMPLE = """
num_rounds = 1000
num_clients = 10_000
cohort_size = 50
epsilon = 4.0
delta = 1e-6
online_fraction = 0.02
"""


def points(answer):
    return {point.name: point for point in answer.candidates}


def epsilon(event, delta=1e-6, relation="add-or-remove-one"):
    return accounting.epsilon(event, delta=delta, relation=relation).epsilon


def simulate(sampling, num_rounds, num_clients, online_fraction, seed):
    """The cohorts that `choose` draws from clients, each with a name and its participations."""
    rng, past, filled = np.random.default_rng(seed), {}, 0
    names = np.array([f"client {number}" for number in range(num_clients)])
    for number in range(1, num_rounds + 1):
        online = names[rng.random(num_clients) < online_fraction].tolist()
        chosen = sampling.choose(online, past, number, rng)
        for name in (online[index] for index in chosen):
            before = past.get(name, Participation(last=0, count=0))
            past[name] = Participation(last=number, count=before.count + 1)
        filled += len(chosen)
    return filled / (num_rounds * sampling.cohort_size)


# RMSE of the prefix sums at noise multiplier 1 of the whole run: with 2 buffers, the answer's; with 3 and banded, published.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("separation", "participations", "two_buffers", "blt", "banded", "independent"),
    [
        (1000, 1, 3.0758, 3.05, 3.11, 22.37),
        (400, 3, 5.5054, 5.49, 5.38, 38.75),
        (200, 5, 7.6569, 7.66, 7.3569, 50.0),
        (100, 10, 12.194, 12.19, 11.57, 70.7),
    ],
)
def test_errors_of_a_thousand_rounds(separation, participations, two_buffers, blt, banded, independent):
    sizes = {"num_rounds": 1000, "min_separation": separation, "max_participations": participations}
    answer, schema = plan(PROBLEM | sizes | {"num_clients": 10**6}), ParticipationSchema(**sizes)
    unit = answer["noise_multiplier"] / answer["sensitivity"]
    assert (answer["min_separation"], answer["max_participations"]) == (separation, participations)
    assert answer["rmse_of_sums"] / unit == pytest.approx(two_buffers, rel=1e-4)
    assert points(answer)["independent"].rmse_of_sums / unit == pytest.approx(independent, rel=1e-3)
    assert error(BLT(num_buffers=3).matrix(schema), schema) == pytest.approx(blt, rel=1e-3)
    assert error(Banded(bands=min(separation, 400)).matrix(schema), schema) == pytest.approx(banded, rel=1e-3)
    short = error(Banded(bands=64).matrix(schema), schema)
    assert points(answer)["banded"].rmse_of_sums / unit == pytest.approx(short, rel=1e-3)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
def test_the_noise_is_the_least_for_epsilon(noise, relation):
    answer = plan(PROBLEM | {"noise": noise, "relation": relation})

    def cost(multiplier):
        return epsilon(dp_events.GaussianDpEvent(multiplier / answer["sensitivity"]), relation=relation)

    assert cost(answer["noise_multiplier"]) <= 4.0 < cost(0.99 * answer["noise_multiplier"])
    assert answer.best.relation == relation
    assert answer.best.name == answer.candidates[0].name == noise
    assert answer["rmse_of_mean"] == answer["rmse_of_sums"] / 20


def test_the_other_points_cost_as_much():
    answer = plan(PROBLEM)
    common = {"mechanism": "gaussian", "sampling_rate": None, "cohort_size": None, "num_clients": None, "num_rounds": 200}
    for name, changes in {
        "independent": {"sampling": "full", "num_rounds": 4},
        "Poisson sampling": {"sampling": "poisson", "sampling_rate": 0.02},
        "fixed-size sampling": {"sampling": "fixed-size", "cohort_size": 20, "num_clients": 1000, "relation": "replace-one"},
        "all clients": {"sampling": "full"},
    }.items():
        point, run = points(answer)[name], planned_run.from_options(**{"relation": None} | common | changes, delta=1e-6)
        assert run.cost(point.noise_multiplier)["epsilon"] <= 4.0 < run.cost(0.99 * point.noise_multiplier)["epsilon"]
        assert point.relation == run.relation
        assert point.rmse_of_sums == pytest.approx(point.noise_multiplier * math.sqrt(201 / 2))
        assert point.rmse_of_mean == point.rmse_of_sums / (1000 if name == "all clients" else 20)
    assert "its epsilon is for replace-one" in " ".join(answer.reasons)


def test_a_larger_epsilon_needs_less_noise_and_sampling_wins_if_it_is_small():
    answers = {target: plan(PROBLEM | {"epsilon": target}) for target in (0.5, 4.0, 16.0)}
    multipliers = [answer["noise_multiplier"] for answer in answers.values()]
    assert multipliers == sorted(multipliers, reverse=True)
    assert multipliers[0] > 2 * multipliers[1] > 2 * multipliers[2]
    for answer in answers.values():
        sampled = points(answer)["Poisson sampling"].rmse_of_sums < answer["rmse_of_sums"]
        (advice,) = [reason for reason in answer.reasons if reason.startswith("Poisson sampling")]
        assert "needs a secret cohort, sampled independently" in advice
        assert advice.endswith("take it only then" if sampled else "take blt, which needs none of these")
    assert points(answers[0.5])["Poisson sampling"].rmse_of_sums < answers[0.5]["rmse_of_sums"]
    assert points(answers[16.0])["Poisson sampling"].rmse_of_sums > answers[16.0]["rmse_of_sums"]


# Gboard (Xu et al. 2023; McMahan, Xu & Zhang 2024): noise for b = 400 and k = 5 of 2,000 rounds, with sensitivity 1; in the run, devices
# took part at most three times, 484 rounds apart. Published: zCDP 0.15 and epsilon 3.42, zCDP 0.0144 and epsilon 0.994.
def test_published_cases_of_gboard():
    planned, actual = (
        ParticipationSchema(num_rounds=2000, min_separation=separation, max_participations=most)
        for separation, most in ((400, 5), (484, 3))
    )
    matrix = Banded(bands=400).matrix(planned)
    sensitivity = matrix.sensitivity(actual) / matrix.sensitivity(planned)
    assert sensitivity**2 / (2 * 1.411**2) == pytest.approx(0.15, abs=0.005)
    assert epsilon(dp_events.GaussianDpEvent(1.411 / sensitivity), delta=1e-10) == pytest.approx(3.42, abs=0.02)
    assert epsilon(dp_events.GaussianDpEvent(1 / math.sqrt(2 * 0.0144)), delta=1e-10) == pytest.approx(0.994, abs=0.005)


def fill(size, separation, num_rounds, num_clients, online, most=None):
    sampling = MinimumSeparationSampling(cohort_size=size, min_separation=separation, max_participations=most)
    return expected_fill(sampling, num_rounds, num_clients, online)


def test_fill_by_hand():
    assert fill(20, 50, 500, 1000, 1.0) == 1.0
    # After 50 full cohorts of 20 nobody is left until round 52: one round of 51 is empty.
    assert fill(20, 51, 510, 1000, 1.0) == pytest.approx(50 / 51)
    # 60 clients take part nine times each, in cohorts of 6: 90 of 100 rounds.
    assert fill(6, 1, 100, 60, 1.0, most=9) == 0.9
    assert fill(6, 7, 100, 60, 1.0, most=9) == 0.9
    # A client of two, each connected every second time, in every round.
    assert fill(2, 1, 10_000, 2, 0.5) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "separation", "num_rounds", "num_clients", "online", "most"),
    [
        (20, 50, 500, 1000, 0.1, None),
        (20, 40, 500, 1000, 0.05, None),
        (5, 200, 800, 1000, 0.02, None),
        (10, 5, 200, 300, 0.05, 6),
    ],
)
def test_fill_is_that_of_the_sampling(size, separation, num_rounds, num_clients, online, most):
    sampling = MinimumSeparationSampling(cohort_size=size, min_separation=separation, max_participations=most)
    drawn = np.mean([simulate(sampling, num_rounds, num_clients, online, seed) for seed in range(4)])
    assert 0.5 < drawn < 0.99
    assert fill(size, separation, num_rounds, num_clients, online, most) == pytest.approx(drawn, abs=0.015)


@pytest.mark.parametrize(
    ("changes", "separation", "filled"),
    [
        ({}, 50, 1.0),
        ({"num_clients": 100_000}, 200, 1.0),  # one participation each
        ({"min_separation": 10, "online_fraction": 0.05}, 10, 1.0),
        ({"min_separation": 100}, 100, 0.5),
    ],
)
def test_the_separation_that_full_cohorts_allow_or_as_given(changes, separation, filled):
    answer = plan(PROBLEM | changes)
    assert answer["min_separation"] == separation
    assert answer["max_participations"] == 200 // separation
    assert answer["expected_fill"] == pytest.approx(filled, abs=0.01)


@pytest.mark.parametrize("online", [0.1, 0.05, 0.01])
def test_offline_clients_cost_a_twentieth_of_a_cohort(online):
    answer = plan(PROBLEM | {"online_fraction": online})
    separation, filled = answer["min_separation"], answer["expected_fill"]
    without = fill(20, 1, 200, 1000, online)
    assert without == pytest.approx(min(1.0, online * 50), abs=0.03)
    assert fill(20, separation + 1, 200, 1000, online) < 0.95 * without <= filled
    assert 1 < separation < 50
    shown = f"min_separation=50 fills {100 * fill(20, 50, 200, 1000, online):.3g} % of a cohort"
    assert f"min_separation={separation} fills {100 * filled:.3g} % of a cohort; {shown}" in answer.reasons[0]
    given = plan(PROBLEM | {"online_fraction": online, "min_separation": 50})
    assert f"min_separation={separation} fills" in given.reasons[0]


def test_fewer_participations_need_less_noise_and_leave_places_empty():
    answer = plan(PROBLEM | {"max_participations": 2})
    assert (answer["max_participations"], answer["expected_fill"]) == (2, 0.5)  # 1,000 clients, twice: half of 200 cohorts of 20
    assert answer["noise_multiplier"] < plan(PROBLEM)["noise_multiplier"]


@pytest.mark.parametrize("noise", NOISES)
def test_the_command_runs_what_was_planned(noise):
    answer = plan(PROBLEM | {"noise": noise, "relation": "replace-one", "online_fraction": 0.5})
    words = shlex.split(answer.reasons[-1].removeprefix("to run it: "))
    assert words[:3] == ["flower-dp", "run", "PRESET"]
    for preset in ("mnist-dp-ftrl", "mnist-dp-fedsam"):
        run = ParsedRunConfig.of(apps.resolve(preset, words[4::2]).config)
        shared = run.strategy(lambda: {}).rules.training.noise
        assert shared.release.relation == "replace-one"
        assert shared.release.mechanism.noise_multiplier == pytest.approx(answer["noise_multiplier"], rel=2e-4)
        assert shared.run_sensitivity == answer["sensitivity"]
        assert shared.release.sampler.cohort_size == 20
        assert run.settings.num_clients == 1000


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("num_rounds", 0, "must be a whole number >= 1"),
        ("num_rounds", 10_001, "must be a whole number"),
        ("num_clients", 0, "must be a whole number"),
        ("cohort_size", 1001, "must be a whole number >= 1 and <= 1000"),
        ("epsilon", 0.0, "must be a finite number > 0"),
        ("epsilon", 1e-9, "no noise multiplier up to 1e6 reaches it"),
        ("delta", 0.0, "must be a finite number > 0"),
        ("delta", 1.0, "must be a finite number"),
        ("online_fraction", 0.0, "must be a finite number > 0"),
        ("online_fraction", 1.5, "must be a finite number > 0 and <= 1"),
        ("min_separation", -1, "must be a whole number >= 0"),
        ("min_separation", 201, "must be a whole number >= 0 and <= 200"),
        ("max_participations", -1, "must be a whole number >= 0"),
        ("relation", "zero-out", "must be one of add-or-remove-one, replace-one"),
        ("noise", "fresh", "must be one of blt, bisr, banded, tree"),
        ("clip_norm", 0.5, "unknown key for dp-ftrl"),
    ],
)
def test_a_bad_value_is_named(key, value, why):
    with pytest.raises(ProblemError, match=rf"^{key}\W") as caught:
        plan(PROBLEM | {key: value})
    assert caught.value.field == key
    assert why in str(caught.value)


def test_a_missing_key_is_named():
    for key in PROBLEM:
        with pytest.raises(ProblemError, match=f"^{key}: missing"):
            plan({name: value for name, value in PROBLEM.items() if name != key})


def test_a_single_round_and_a_single_client():
    once = plan(PROBLEM | {"num_rounds": 1})
    assert (once["min_separation"], once["max_participations"], once["sensitivity"]) == (1, 1, 1.0)
    assert once["rmse_of_sums"] == once["noise_multiplier"]
    alone = plan(PROBLEM | {"num_clients": 1, "cohort_size": 1, "num_rounds": 8})
    assert (alone["min_separation"], alone["max_participations"]) == (1, 8)


def test_every_client_of_the_data_is_counted():
    inputs = from_data(Data(constants=None, num_records=(5, 6, 7), dimension=10), {})
    assert inputs.values == {"num_clients": 3}


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["blt", "tree"])
def test_the_diagram_has_the_answer_on_its_curve(noise):
    answer = plan(PROBLEM | {"noise": noise, "online_fraction": 0.05, "num_rounds": 100})
    (panel,), (axes,) = answer.panels, figure(answer).axes
    own, independent, sampled, star = axes.lines
    assert (star.get_xdata()[0], star.get_ydata()[0]) == panel.optimum == (answer["min_separation"], answer["rmse_of_sums"])
    there = own.get_xdata() == answer["min_separation"]
    assert own.get_ydata()[there].item() == pytest.approx(answer["rmse_of_sums"])
    assert independent.get_ydata()[there].item() == pytest.approx(points(answer)["independent"].rmse_of_sums, rel=1e-3)
    assert set(sampled.get_ydata()) == {points(answer)["Poisson sampling"].rmse_of_sums}
    assert (panel.first, panel.last) == (answer["min_separation"] // 8, 50)
    assert np.all(np.diff(independent.get_ydata()) <= 0)


@pytest.mark.slow
def test_the_command_line(tmp_path):
    path = tmp_path / "problem.toml"
    path.write_text(EXAMPLE)
    done = CliRunner().invoke(app, ["plan", "dp-ftrl", "--problem", str(path), "--json"])
    assert done.exit_code == 0
    content = json.loads(done.output)
    answer = plan(tomllib.loads(EXAMPLE))
    assert content == json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert (content["method"], content["noise"], content["min_separation"], content["max_participations"]) == (
        "dp-ftrl",
        "blt",
        159,
        7,
    )
    assert content["candidates"][0]["rmse_of_sums"] == content["rmse_of_sums"]
    assert len(content["matrix"]["decays"]) == 2
    # The rule of thumb: 0.8 N / m still fills 95 % of a cohort.
    assert content["expected_fill"] == pytest.approx(0.95, abs=0.01)
    shown = CliRunner().invoke(app, ["plan", "dp-ftrl", "--problem", str(path)]).output
    assert shown == "\n".join([*answer.lines(), "", "Why", *(f"  - {reason}" for reason in answer.reasons)]) + "\n"
    path.write_text(EXAMPLE + "clip_norm = 1.0\n")
    refused = CliRunner().invoke(app, ["plan", "dp-ftrl", "--problem", str(path)])
    assert refused.exit_code == 2
    assert "clip_norm: unknown key for dp-ftrl" in refused.output
