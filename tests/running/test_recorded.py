"""Run folders of recorded runs, also of those that go on: their lines, statement and model, and what they refuse."""

import json
import logging
from functools import partial

import numpy as np
import pytest
from flwr.app import MetricRecord
from safetensors.numpy import load_file

from flower_dp import RunFolder, record_run
from flower_dp.core.checks import SettingsError
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.running.run_recorder import watched
from flower_dp.strategies import DPFedAvg, writer
from flower_dp.strategies.run_lifecycle import StatementOnlyExit
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app

# Columns that a run has in every line, in the lines of its rounds, in those of private evaluations, or keeps to itself.
OWN = ("round", "num-rounds", "epsilon", "delta", "elapsed", "seconds", "cohort-size", "replies", "bytes-up", "bytes-down")
OWN += ("bytes-per-client", "cost-per-device", "private-accuracy", "private-loss-standard-error", "client-update-norm")


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    monkeypatch.setattr(writer, "_SHARE", 1.0)


def loss_but(at=None):
    """Return an evaluate_fn that fails in one round."""

    def evaluate(server_round, model):
        if server_round == at:
            raise KeyboardInterrupt
        return MetricRecord({"loss": 1 / (1 + server_round)})

    return evaluate


def strategy(kind=DPFedAvg, **words):
    arguments = {"clip_norm": 0.5, "noise_multiplier": 4.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
    return kind(**arguments | words)


def grid():
    return LocalGrid(stock_app(shifted(lambda node: 0.1)), 4)


def model():
    return arrays(weight=np.zeros(3, np.float32))


def recorded(folder, fails=None, *, config=None, made=None, **words):
    words = {"config": {"rate": 0.1} | (config or {}), "path": folder, "evaluate_fn": fails or loss_but()} | words
    return record_run(made or strategy(), grid(), model(), num_rounds=4, **words)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def json_of(folder, name="statement"):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture
def interrupted(tmp_path):
    """The folder of a run that was interrupted in round 3."""
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path / "run", loss_but(3), not_covered=("what the app has left out",))
    return tmp_path / "run"


def test_no_metric_of_the_users_takes_the_place_of_a_column_of_the_run(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="flwr"):
        recorded(tmp_path, lambda server_round, model: MetricRecord({**dict.fromkeys(OWN, -7.5), "accuracy": 0.25}))
    lines = lines_of(tmp_path)
    assert [line["accuracy"] for line in lines] == [0.25] * 5
    assert [name for name in OWN for line in lines if line.get(name) == -7.5] == []
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]
    answer = [entry.getMessage() for entry in caplog.records if "evaluate_fn" in entry.getMessage()]
    said = "evaluate_fn: its metric {!r} is not written: the name is reserved for the run; give it another"
    assert answer == [said.format(name) for name in sorted(OWN)]


def test_a_run_that_fails_has_told_what_it_released_and_has_one_line_a_round_when_it_goes_on(interrupted):
    said, text = json_of(interrupted), (interrupted / "statement.txt").read_text()
    assert (said["guarantee"]["num_charged_rounds"], said["not_covered"][-1]) == (3, "what the app has left out")
    not_covered = text.partition("NOT COVERED    ")[2].partition("\n\n")[0]
    assert "- what the app has left out" in [line.strip() for line in not_covered.splitlines()]
    assert json_of(interrupted, "model")["unfinished"] == "after round 3"
    recorded(interrupted, resume=True)
    assert [(line["round"], line["loss"]) for line in lines_of(interrupted)] == [(at, 1 / (1 + at)) for at in range(5)]
    elapsed = [line["elapsed"] for line in lines_of(interrupted)]
    assert elapsed == sorted(elapsed)
    assert json_of(interrupted)["guarantee"]["num_charged_rounds"] == 4
    assert "unfinished" not in json_of(interrupted, "model")


def test_lines_of_rounds_after_the_checkpoint_are_dropped(tmp_path, monkeypatch):
    with monkeypatch.context() as killed:  # kill -9
        killed.setattr(writer, "_SHARE", 1e-9)  # no checkpoint but the first, and the last
        killed.setattr(writer.Writer, "close", lambda self, result, state, failed: None)
        with pytest.raises(KeyboardInterrupt):
            recorded(tmp_path, loss_but(3))
    assert [line["round"] for line in lines_of(tmp_path)] == [0, 1, 2, 3]
    monkeypatch.setattr(writer, "_SHARE", 1e-9)
    recorded(tmp_path, resume=True)
    assert [line["round"] for line in lines_of(tmp_path)] == [0, 4]
    assert "rounds 1 to 3 were charged and not finished" in (tmp_path / "statement.txt").read_text()


def test_other_settings_are_refused_and_the_statement_stays(interrupted):
    before = {file.name: file.read_bytes() for file in interrupted.iterdir() if file.is_file()}
    with pytest.raises(ValueError, match=r"rate=0.2: was 0.1 in"):
        recorded(interrupted, resume=True, config={"rate": 0.2})
    with pytest.raises(ValueError, match="num_clients was 4, and is 5"):
        recorded(interrupted, resume=True, made=strategy(num_clients=5))
    with pytest.raises(ValueError, match="already holds"):
        recorded(interrupted)
    assert {file.name: file.read_bytes() for file in interrupted.iterdir() if file.is_file()} == before


def test_no_statement_is_left_of_less_than_was_charged(interrupted):
    """From the first message on, a run that goes on has no statement of its beginning, which `kill -9` would leave behind."""
    seen = []

    def look(server_round, model):
        seen.append((server_round, (interrupted / "statement.json").exists(), (interrupted / "statement.txt").exists()))

    recorded(interrupted, look, resume=True)
    assert seen == [(number, False, False) for number in (3, 4)]


def test_resume_begins_a_run_where_there_is_none(tmp_path):
    recorded(tmp_path, resume=True)
    assert [line["round"] for line in lines_of(tmp_path)] == [0, 1, 2, 3, 4]
    recorded(tmp_path, resume=True, config={"resume": True})  # says nothing of what the run does


# Apps that call `strategy.start` themselves, under `flower-dp run`


@pytest.fixture
def launched(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWER_DP_RUN_FOLDER", str(tmp_path))
    with watched({"num-rounds": 4}, "run"):
        yield tmp_path


@pytest.fixture
def begun(launched):
    """The folder of such an app's run, which was interrupted in round 3."""
    with pytest.raises(KeyboardInterrupt):
        strategy().start(grid(), model(), num_rounds=4, evaluate_fn=loss_but(3))
    return launched


def test_a_strategy_that_is_started_by_the_app_fills_the_run_folder(launched):
    made = strategy(sampling=PoissonSampling(sampling_rate=0.9))  # a secret cohort
    evaluate = partial(lambda told, *_: MetricRecord(told), {"accuracy": 0.25, "replies": 3, "cohort-size": 2.0})
    result = made.start(grid(), model(), num_rounds=2, evaluate_fn=evaluate)
    assert (launched / "run-config.toml").read_text() == "num-rounds = 4\n"
    lines = lines_of(launched)
    assert [(line["round"], line["accuracy"]) for line in lines] == [(0, 0.25), (1, 0.25), (2, 0.25)]
    assert not any({"elapsed", "seconds", "replies", "cohort-size"} & line.keys() for line in lines)
    assert (launched / "statement.txt").read_text() == f"{made.statement}\n"
    np.testing.assert_array_equal(load_file(launched / "model.safetensors")["weight"], result.arrays["weight"].numpy())


def test_an_error_of_the_folder_does_not_lose_a_run_that_did_not_ask_for_one(launched, monkeypatch, caplog):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(RunFolder, "append", full)
    made = strategy()
    made.start(grid(), model(), num_rounds=2)
    assert len(made.rounds) == 2
    assert "the run folder failed at round 1, and the run continues: OSError: no space left on device" in caplog.text
    assert (launched / "model.safetensors").exists()


def test_an_app_that_starts_a_strategy_itself_goes_on(begun, monkeypatch):
    monkeypatch.setenv("FLOWER_DP_RESUME", "resume")
    strategy().start(grid(), model(), num_rounds=4, evaluate_fn=loss_but())
    assert [line["round"] for line in lines_of(begun)] == [0, 1, 2, 3, 4]
    # The app's second run is another one; the folder is taken.
    asked = grid()
    strategy().start(asked, model(), num_rounds=1)
    assert asked.sent
    assert [line["round"] for line in lines_of(begun)] == [0, 1, 2, 3, 4]


def test_an_app_whose_settings_have_changed_begins_no_other_run_instead(begun, monkeypatch):
    monkeypatch.setenv("FLOWER_DP_RESUME", "resume")
    asked = grid()
    with watched({"num-rounds": 5}, "run"), pytest.raises(SettingsError, match=r"num-rounds=5: was 4 in .*: it can't change"):
        strategy().start(asked, model(), num_rounds=5)
    assert not asked.sent
    assert json_of(begun)["guarantee"]["num_charged_rounds"] == 3


class OwnLoop(DPFedAvg):
    def start(self, grid, initial_arrays, num_rounds=3, **_):
        raise AssertionError("a statement needs no round")


@pytest.mark.parametrize("kind", [DPFedAvg, OwnLoop])
def test_a_statement_is_made_again_without_a_message(kind, begun, monkeypatch):
    before = json_of(begun)
    for name in ("statement.json", "statement.txt", "model.json", "model.safetensors"):
        (begun / name).unlink()
    monkeypatch.setenv("FLOWER_DP_RESUME", "statement")
    asked = grid()
    with pytest.raises(StatementOnlyExit):
        strategy(kind).start(asked, model(), num_rounds=4)
    assert not asked.sent
    assert json_of(begun) == before
    assert json_of(begun, "model")["unfinished"] == "after round 3"
    assert [line["round"] for line in lines_of(begun)] == [0, 1, 2, 3]
