"""The loss around final models: directions and losses by hand, runs of the app, and the command."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from flower_dp.clients import TensorRecords
from flower_dp.reporting import landscape
from flower_dp.reporting.landscape import PublicTest, landscapes
from flower_dp.reporting.past_run import read_past_run
from flower_dp.running.launch_record import LaunchRecord
from flower_dp.running.run_folder import RunFolder
from tests.app_runs import DEFAULTS, play
from tests.own_apps import write_app

RNG = np.random.default_rng(5)
INPUTS = RNG.standard_normal((12, 3)).astype(np.float32)
TARGETS = RNG.standard_normal((12, 2)).astype(np.float32)
WEIGHTS = np.array([[1.0, 2.0, -2.0], [0.0, 0.3, -0.4]], np.float32)
BIAS = np.array([0.5, -0.5], np.float32)
PRIVATE = {"format": 2, "guarantee": {"private": True, "epsilon": 1.5}}


def recorded(folder, arrays=None, statement=PRIVATE, **config):
    """Write a run folder, with a final model if there are arrays."""
    made = RunFolder.create(folder, {**DEFAULTS, **config}, "a run")
    made.append({"round": 1, "loss": 1.0})
    made.state(statement, "a statement")
    if arrays is not None:
        made.write_results(arrays)
    return read_past_run(folder)


def squares(outputs, targets):
    return ((outputs - targets) ** 2).sum(1).mean()


def problem(module=None, inputs=INPUTS, targets=TARGETS):
    records = TensorRecords(inputs=torch.from_numpy(inputs), targets=torch.from_numpy(targets))
    return PublicTest(module=module or nn.Linear(3, 2), loss=squares, records=records)


@pytest.fixture
def given(monkeypatch):
    """Give runs their models and records by the name of their folder, without an app."""
    known = {}
    monkeypatch.setattr(landscape, "_public_test", lambda run: known[run.folder.name])
    return known


# The method


def scaled(weights, seed, axis):
    """A direction by hand: one draw for all parameters, in their order, each row as long as the model's."""
    drawn = np.random.default_rng((seed, axis)).standard_normal(8, dtype=np.float32)[:6].reshape(2, 3).astype(float)
    return drawn * (np.linalg.norm(weights, axis=1) / np.linalg.norm(drawn, axis=1))[:, None]


@pytest.mark.parametrize("seed", [0, 3])
def test_losses_are_those_of_the_moved_model_whose_biases_stay(tmp_path, given, seed):
    given["run"] = problem()
    run = recorded(tmp_path / "run", {"weight": WEIGHTS, "bias": BIAS})
    (found,) = landscapes([run], resolution=5, distance=2.0, seed=seed)
    assert found.offsets.tolist() == [-2, -1, 0, 1, 2]
    first, second = scaled(WEIGHTS, seed, 0), scaled(WEIGHTS, seed, 1)
    for row, up in enumerate(found.offsets):
        for column, along in enumerate(found.offsets):
            outputs = INPUTS @ (WEIGHTS + along * first + up * second).T + BIAS
            assert found.losses[row, column] == pytest.approx(((outputs - TARGETS) ** 2).sum(1).mean(), rel=1e-5)
    assert found.line.tolist() == found.losses[2].tolist()
    assert found.here == found.losses[2, 2]
    assert (found.label, found.epsilon, found.num_records) == (DEFAULTS["method"], 1.5, 12)
    # Some records at random, the same for all runs.
    drawn = np.random.default_rng((seed, 2)).permutation(12)[:5]
    (found,) = landscapes([run], resolution=3, num_records=5, seed=seed)
    expected = ((INPUTS[drawn] @ WEIGHTS.T + BIAS - TARGETS[drawn]) ** 2).sum(1).mean()
    assert (found.num_records, found.here) == (5, pytest.approx(expected, rel=1e-5))


def test_runs_share_the_draw_and_each_scales_it_by_its_own_filters(tmp_path, given):
    given |= {"a": problem(), "b": problem()}
    arrays = {"weight": WEIGHTS, "bias": BIAS}
    runs = [recorded(tmp_path / "a", arrays), recorded(tmp_path / "b", {**arrays, "weight": 2 * WEIGHTS}, **{"seed": 1})]
    one, other = landscapes(runs, resolution=3)
    again, alone = landscapes(runs[:1], resolution=3)[0], landscapes(runs[1:], resolution=3)[0]
    assert np.array_equal(one.losses, again.losses)
    assert np.array_equal(other.losses, alone.losses)
    outputs = INPUTS @ (2 * WEIGHTS + scaled(2 * WEIGHTS, 0, 0)).T + BIAS
    assert other.line[-1] == pytest.approx(((outputs - TARGETS) ** 2).sum(1).mean(), rel=1e-5)
    # Seeds tell no run from another: their folders do.
    assert [one.label, other.label] == ["a", "b"]


# Refusals


def test_what_can_not_be_compared_is_refused_naming_the_folder(tmp_path, given):
    given |= {"a": problem(), "b": problem(), "wide": problem(nn.Linear(3, 3)), "moved": problem(inputs=INPUTS + 1)}
    given["more"] = problem(inputs=INPUTS[:6], targets=TARGETS[:6])
    arrays = {"weight": WEIGHTS, "bias": BIAS}
    good = recorded(tmp_path / "a", arrays)
    given["odd"] = problem()
    wide = recorded(tmp_path / "wide", {"weight": np.ones((3, 3), np.float32), "bias": np.ones(3, np.float32)})
    for run, match in [
        (recorded(tmp_path / "b"), "b: the run was not finished"),
        (wide, "wide: has another model than the first run"),
        (recorded(tmp_path / "moved", arrays), "moved: has other test records than the first run"),
        (recorded(tmp_path / "more", arrays), "more: has other test records than the first run"),
        (good, "a: is given twice"),
        (recorded(tmp_path / "odd", {"weight": WEIGHTS}), "odd: arrays: names differ"),
    ]:
        with pytest.raises(ValueError, match=match):
            landscapes([good, run], resolution=3)
    (tmp_path / "a" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"a: model\.safetensors can't be read"):
        landscapes([good])


MODULE = """
import torch
from flower_dp.clients import TensorRecords
from flower_dp.reporting.landscape import PublicTest

def test(config):
    rows = int(config["rows"])
    records = TensorRecords(inputs=torch.ones(rows, 3), targets=torch.zeros(rows, dtype=torch.long))
    return PublicTest(module=torch.nn.Linear(3, 2), loss=torch.nn.functional.cross_entropy, records=records)
"""


def test_an_app_of_ones_own_may_say_what_its_runs_are_tested_with(tmp_path):
    app = write_app(tmp_path / "mine", "rows = 12", landscape_app=MODULE)
    made = RunFolder.create(tmp_path / "run", {"rows": 7}, "a run")
    made.append({"round": 1, "loss": 1.0})
    made.write_results({"weight": WEIGHTS, "bias": BIAS})
    with pytest.raises(
        ValueError,
        match=r"\(its run-config\.toml has no adult.*nor of a known app: .* holds no run that `flower-dp run` has begun",
    ):
        landscapes([read_past_run(made.path)])
    more = recorded(tmp_path / "more", {"weight": WEIGHTS}, **{"model-fn": "own:model"})
    with pytest.raises(ValueError, match=r"more: .* of a task of this flower-dp \(its run-config\.toml has model-fn\), nor"):
        landscapes([more])
    words = {"name": "mine", "overrides": {}, "workers": 1, "supernodes": 1, "gpus_per_worker": 0.0}
    LaunchRecord(app=str(app), **words).write(made.path)
    with pytest.raises(ValueError, match=r"mine names no public test; add public-test"):
        landscapes([read_past_run(made.path)])
    write_app(app, "rows = 12", tool='[tool.flower-dp]\npublic-test = "landscape_app:test"')
    (found,) = landscapes([read_past_run(made.path)], resolution=3)
    assert found.num_records == 7
    # Of ones: outputs 1 + 0.5 and -0.1 - 0.5, and the first is right.
    assert found.here == pytest.approx(math.log(1 + math.exp(-0.6 - 1.5)), rel=1e-5)


# The command, on runs of the app


@pytest.mark.slow
def test_the_middle_of_the_landscape_is_the_recorded_loss_of_the_run(tmp_path, call):
    pytest.importorskip("sklearn")
    keywords = {"task": "breast-cancer", "method": "dp-fedavg", "num-clients": 10, "num-rounds": 2, "sampling": "full"}
    keywords |= {"dp-fedavg.delta": 1e-3, "dp-fedavg.target-epsilon": 0.0, "test-every": 0}
    played = [play(tmp_path / f"z{z:g}", {**keywords, "dp-fedavg.noise-multiplier": z}) for z in (0.0, 4.0)]
    target = str(tmp_path / "figure.png")
    words = ("--output", target, "--resolution", "3", "--records", "1000")
    status, out, _ = call("figure", "landscape", *map(str, played), *words)
    *lines, last = out.splitlines()[-3:]
    assert (status, last, (tmp_path / "figure.png").read_bytes()[:4]) == (0, f"figure: {target}", b"\x89PNG")
    assert [line.partition(":")[0] for line in lines] == ["dp-fedavg.noise-multiplier=0", "dp-fedavg.noise-multiplier=4"]
    runs = [read_past_run(folder) for folder in played]
    for run, one in zip(runs, landscapes(runs, resolution=3, num_records=1000), strict=True):
        assert one.num_records == 113
        assert one.here == pytest.approx(run.series("loss")[2], rel=1e-5)
        assert math.isinf(one.epsilon) == (run.config["dp-fedavg.noise-multiplier"] == 0)
    status, _, err = call("figure", "landscape", str(played[0]), "--resolution", "8")
    assert (status, err) == (2, "error: --resolution=8: must be odd, so that the model itself is a point\n")
