"""flower-dp epsilon | calibrate of a run: what they say is what the run's statement will say."""

import json
from pathlib import Path

import pytest

from flower_dp.privacy import accounting, selection
from flower_dp.running import apps, new_app, plugins

LOCAL = ("--set", "method=nbafl", "--set", "sampling=full", "--set", "sampling-rate=0", "--set", "nbafl.epsilon=1")
STOCK = Path(__file__).parents[1] / "foreign" / "tiny"
IN_TURN = ("--noise-multiplier", "4", "--sampling", "round-robin", "--cohort-size", "10")
QUICK = ("--set", "num-rounds=4", "--set", "sampling=full", "--set", "num-clients=200")


@pytest.mark.parametrize("target", ["dp-fedsam", "mnist-dp-fedsam"])
def test_calibrate_gives_the_noise_with_which_the_run_costs_epsilon_against_participants(call, target):
    status, out, err = call("calibrate", target, "--epsilon", "3", *QUICK, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert 0.99 * 3 <= found["epsilon"] == found["against participants"] <= 3
    assert found["against outsiders"] < found["epsilon"]
    assert found["num_rounds"] == 4
    # The other way round, to the digits that are printed.
    noise = ("--set", f"dp-fedsam.noise-multiplier={found['noise_multiplier']:.6g}", "--set", "dp-fedsam.target-epsilon=0")
    status, out, err = call("epsilon", target, *QUICK, *noise, "--json")
    assert (status, json.loads(out)["epsilon"]) == (0, found["epsilon"])


def test_a_run_that_a_target_ends_is_told_with_its_rounds_in_words(call):
    more = ("--set", "dp-fedavg.noise-multiplier=2", "--set", "dp-fedavg.target-epsilon=2.5")
    status, out, err = call("epsilon", "mnist-dp-fedavg", *QUICK, *more)
    assert (status, err) == (0, "")
    lines = dict(line.rsplit(maxsplit=1) for line in out.splitlines() if not line.endswith("private"))
    assert 0 < int(lines["rounds"]) < 4
    assert float(lines["epsilon"]) <= 2.5
    assert "against the server    infinite: not private" in out


@pytest.mark.parametrize(
    ("command", "more", "warning"),
    [
        (("epsilon", "--noise-multiplier", "4"), ("--delta", "0.3"), "0.3 is at least 1/4 for 4 clients"),
        (("epsilon", *IN_TURN, "--num-clients", "200"), ("--delta", "0.005"), "0.005 is at least 1/200 for 200 clients"),
        (("epsilon", *IN_TURN, "--num-clients", "199"), ("--delta", "0.005"), None),
        (("epsilon", "mnist-dp-fedavg"), (*QUICK, "--set", "dp-fedavg.delta=0.005"), "0.005 is at least 1/200 for 200 clients"),
        (("epsilon", "breast-cancer-fedsgd-dpc"), ("--set", "fedsgd-dpc.delta=0.5"), " records. A mechanism that publishes"),
    ],
)
def test_a_delta_that_promises_nothing_is_warned_of(call, command, more, warning):
    status, out, err = call(*command, *more, "--json")
    assert (status, json.loads(out)["epsilon"] > 0) == (0, True)
    assert err == "" if warning is None else err.startswith("warning: DELTA IS NO GUARANTEE: ") and warning in err


PAPER = ("--set", "dp-fedpaq.calibration=paper", "--set", "dp-fedpaq.epsilon=8")


def test_an_app_around_ones_own_model_is_told_as_well(call, tmp_path):
    new_app.write_app(tmp_path / "mine")
    status, out, err = call("epsilon", str(tmp_path / "mine"), "--json")
    assert (status, err) == (0, "")
    assert 0.99 * 5 <= json.loads(out)["epsilon"] <= 5  # what the template asks for
    assert json.loads(out)["num_rounds"] == 30
    status, _, err = call("epsilon", str(tmp_path / "mine"), *LOCAL)
    assert status == 2
    assert "epsilon depends on each client's number of records" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("epsilon", "--set", "seed=1"), "--set: needs a preset, a task, a method or an app"),
        (("epsilon", str(STOCK)), "names no function `cost` under [tool.flower-dp]; in its place describe what"),
        (
            ("calibrate", "dp-fedavg", "--epsilon", "8", "--num-rounds", "9"),
            "--num-rounds: can't be combined with dp-fedavg; change its settings with --set",
        ),
        (
            ("calibrate", "dp-fedavg", "--epsilon", "8", "--set", "dp-fedavg.noise-multiplier=2"),
            "noise-multiplier=2.0: the table's epsilon=8 already determines the noise",
        ),
        (
            ("calibrate", "mnist-dp-fedpaq", "--epsilon", "8", *PAPER),
            "--epsilon=8: must be the epsilon of the run, and with dp-fedpaq.calibration=paper it is not",
        ),
        (
            ("epsilon", "dp-fedavg", *QUICK, "--set", "dp-fedavg.target-epsilon=0.01"),
            "target-epsilon: the first round alone would exceed it, so no round can run",
        ),
    ],
)
def test_bad_options_end_with_one_line_that_names_them(call, arguments, message):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


# The best of several runs


def test_the_best_of_several_releases(call):
    # Corollary 3 of Papernot & Steinke (2022): a pure epsilon of 0.5 becomes at most (2 + shape) of it.
    plain = ("epsilon", "--mechanism", "laplace", "--noise-multiplier", "2", "--delta", "0")
    status, out, err = call(*plain, "--best-of-mean", "1000", "--best-of-shape", "0", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["epsilon"], found["best_of_mean"], found["best_of_shape"]) == (0.5, 1000, 0)
    assert found["best_of_epsilon"] == pytest.approx(2 * 0.5, rel=1e-6)
    lines = dict(line.rsplit(maxsplit=1) for line in call(*plain, "--best-of-mean", "1000")[1].splitlines())
    assert (lines["epsilon"], lines["epsilon of best"]) == ("0.5", "1.50001")


def test_the_best_of_several_runs_is_told_against_outsiders(call):
    # Shares of noise: outsiders see more noise than participants do.
    status, out, err = call("epsilon", "dp-fedsam", *QUICK, "--best-of-mean", "10", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    event, statement = plugins.event_against_outsiders(apps.resolve(None, ["method=dp-fedsam", *QUICK[1::2]]))
    assert found["against outsiders"] == pytest.approx(
        accounting.epsilon(event, delta=statement.delta, relation=statement.relation).epsilon
    )
    assert found["against outsiders"] < found["against participants"]
    law = selection.NegativeBinomialRunCount(mean=10)
    cost = selection.epsilon([event], law, delta=statement.delta, relation=statement.relation)
    assert found["best_of_epsilon"] == cost.epsilon > found["against outsiders"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("mnist-nbafl", "--best-of-mean", "10"), "protected from the server, which sees every run"),
        (("--noise-multiplier", "2", "--delta", "1e-5", "--best-of-mean", "0.5"), "--best-of-mean: mean=0.5"),
        (
            ("--noise-multiplier", "2", "--delta", "1e-5", "--best-of-mean", "2", "--best-of-shape", "-1"),
            "--best-of-mean: shape=-1",
        ),
        (("--noise-multiplier", "2", "--delta", "1e-5", "--best-of-shape", "0"), "--best-of-shape: needs --best-of-mean"),
    ],
)
def test_a_choice_that_has_no_bound_is_refused(call, options, message):
    status, out, err = call("epsilon", *options)
    assert (status, out) == (2, "")
    assert message in err
