"""Run folders of runs that go on: their lines, statement and model, and what they refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
from flwr.app import MetricRecord

from flower_dp import record_run
from flower_dp.core.checks import SettingsError
from flower_dp.core.sampling import FullSampling
from flower_dp.running.launched import Launched
from flower_dp.running.recorded import watched
from flower_dp.strategies import DPFedAvg, writer
from flower_dp.strategies.started import Stated
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    monkeypatch.setattr(writer, "_SHARE", 1.0)


class Fails:
    """An evaluate_fn that fails in one round, once."""

    def __init__(self, at=None):
        self.at = at

    def __call__(self, server_round, model):
        if server_round == self.at:
            self.at = None
            raise KeyboardInterrupt
        return MetricRecord({"loss": 1 / (1 + server_round)})


def strategy(**words):
    arguments = {"clip_norm": 0.5, "noise_multiplier": 4.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
    return DPFedAvg(**arguments | words)


def grid():
    return LocalGrid(stock_app(shifted(lambda node: 0.1)), 4)


def model():
    return arrays(weight=np.zeros(3, np.float32))


def recorded(folder, fails=None, config=None, **words):
    return record_run(
        words.pop("strategy", None) or strategy(),
        grid(),
        model(),
        num_rounds=4,
        config={"rate": 0.1} | (config or {}),
        path=folder,
        evaluate_fn=fails or Fails(),
        **words,
    )


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def interrupted(folder, at=3):
    with pytest.raises(KeyboardInterrupt):
        recorded(folder, Fails(at))


def test_a_run_that_goes_on_has_one_line_a_round_and_one_statement(tmp_path):
    folder = tmp_path / "run"
    interrupted(folder)
    said = json.loads((folder / "statement.json").read_text())
    assert said["num_rounds"] == 3
    assert json.loads((folder / "model.json").read_text())["unfinished"] == "after round 3"
    recorded(folder, resume=True)
    assert [(line["round"], line["loss"]) for line in lines_of(folder)] == [(number, 1 / (1 + number)) for number in range(5)]
    elapsed = [line["elapsed"] for line in lines_of(folder)]
    assert elapsed == sorted(elapsed)
    assert json.loads((folder / "statement.json").read_text())["num_rounds"] == 4
    assert "unfinished" not in json.loads((folder / "model.json").read_text())


def test_lines_of_rounds_after_the_checkpoint_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_SHARE", 1e-9)  # none but the first, and the last
    folder = tmp_path / "run"
    monkeypatch.setattr(writer.Writer, "close", lambda self, result, state, failed: None)  # kill -9
    interrupted(folder)
    monkeypatch.undo()
    assert [line["round"] for line in lines_of(folder)] == [0, 1, 2, 3]
    recorded(folder, resume=True)
    assert [line["round"] for line in lines_of(folder)] == [0, 4]
    assert "rounds 1 to 3 were charged and not finished" in (folder / "statement.txt").read_text()


def test_other_settings_are_refused_and_the_statement_stays(tmp_path, caplog):
    caplog.set_level("INFO", "flwr")
    folder = tmp_path / "run"
    interrupted(folder)
    assert f"It goes on with resume=True and this folder: {folder}" in caplog.text
    caplog.clear()
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with pytest.raises(ValueError, match=r"rate=0.2: was 0.1 in"):
        recorded(folder, resume=True, config={"rate": 0.2})
    with pytest.raises(ValueError, match="num_clients was 4, and is 5"):
        recorded(folder, resume=True, strategy=strategy(num_clients=5))
    with pytest.raises(ValueError, match="already holds"):
        recorded(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    assert "goes on with" not in caplog.text


def test_no_statement_is_left_of_less_than_was_charged(tmp_path):
    """From the first message on, a run that goes on has no statement of its beginning, which `kill -9` would leave behind."""
    folder, seen = tmp_path / "run", []
    interrupted(folder, at=2)

    def look(server_round, model):
        seen.append((server_round, (folder / "statement.json").exists(), (folder / "statement.txt").exists()))

    recorded(folder, look, resume=True)
    assert seen == [(number, False, False) for number in (2, 3, 4)]


def test_a_run_that_has_ended_keeps_what_it_has(tmp_path):
    folder = tmp_path / "run"
    first = recorded(folder)
    lines, statement = lines_of(folder), (folder / "statement.txt").read_bytes()
    again = recorded(folder, resume=True)
    assert (lines_of(folder), (folder / "statement.txt").read_bytes()) == (lines, statement)
    np.testing.assert_array_equal(again.arrays["weight"].numpy(), first.arrays["weight"].numpy())


def test_resume_begins_a_run_where_there_is_none(tmp_path):
    recorded(tmp_path / "run", resume=True)
    assert [line["round"] for line in lines_of(tmp_path / "run")] == [0, 1, 2, 3, 4]
    recorded(tmp_path / "run", resume=True, config={"resume": True})  # says nothing of what the run does


# Apps that call `strategy.start` themselves, under `flower-dp run`


@pytest.fixture
def launched(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("FLOWER_DP_RUN_FOLDER", str(folder))
    with watched({"num-rounds": 4}, "run"):
        with pytest.raises(KeyboardInterrupt):
            strategy().start(grid(), model(), num_rounds=4, evaluate_fn=Fails(3))
        yield folder


def test_an_app_that_starts_a_strategy_itself_goes_on(launched, monkeypatch):
    monkeypatch.setenv("FLOWER_DP_RESUME", "resume")
    strategy().start(grid(), model(), num_rounds=4, evaluate_fn=Fails())
    assert [line["round"] for line in lines_of(launched)] == [0, 1, 2, 3, 4]
    # The app's second run is another one; the folder is taken.
    other, asked = strategy(), grid()
    other.start(asked, model(), num_rounds=1)
    assert asked.sent
    assert [line["round"] for line in lines_of(launched)] == [0, 1, 2, 3, 4]


def test_an_app_whose_settings_have_changed_begins_no_other_run_instead(launched, monkeypatch):
    monkeypatch.setenv("FLOWER_DP_RESUME", "resume")
    asked = grid()
    with (
        watched({"num-rounds": 5}, "run"),
        pytest.raises(SettingsError, match=r"num-rounds=5: was 4 in .*: it can't change"),
    ):
        strategy().start(asked, model(), num_rounds=5)
    assert not asked.sent
    assert json.loads((launched / "statement.json").read_text())["num_rounds"] == 3


class OwnLoop(DPFedAvg):
    def start(self, grid, initial_arrays, num_rounds=3, **_):
        raise AssertionError("a statement needs no round")


@pytest.mark.parametrize("kind", [DPFedAvg, OwnLoop])
def test_a_statement_is_made_again_without_a_message(kind, launched, monkeypatch):
    before = json.loads((launched / "statement.json").read_text())
    for name in ("statement.json", "statement.txt", "model.json", "model.safetensors"):
        (launched / name).unlink()
    monkeypatch.setenv("FLOWER_DP_RESUME", "statement")
    asked = grid()
    again = kind(clip_norm=0.5, noise_multiplier=4.0, sampling=FullSampling(), num_clients=4, delta=1e-3)
    with pytest.raises(Stated):
        again.start(asked, model(), num_rounds=4)
    assert not asked.sent
    assert json.loads((launched / "statement.json").read_text()) == before
    assert json.loads((launched / "model.json").read_text())["unfinished"] == "after round 3"
    assert [line["round"] for line in lines_of(launched)] == [0, 1, 2, 3]


def test_how_a_run_was_begun_is_read_back(tmp_path):
    words = {"app": "", "name": "x", "overrides": {"seed": 1, "lr": 0.5}, "workers": 2, "supernodes": 3}
    begun = Launched(**words, gpus_per_worker=0.0)
    begun.write(tmp_path)
    assert Launched.read(tmp_path) == begun
    assert begun.target.app.own
    Launched.forget(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds no run that `flower-dp run` has begun"):
        Launched.read(tmp_path)
    gone = Launched(**words | {"app": str(Path(tmp_path) / "gone")}, gpus_per_worker=0.0)
    with pytest.raises(ValueError, match="is no longer the folder of a Flower app"):
        _ = gone.target
