"""Writers for on_round, by their own libraries: what they store, and that it holds no time of a round with a secret cohort."""

import sys
import time
from types import SimpleNamespace

import pytest

from flower_dp.running import trackers

SECRET = [
    {"round": number, "num-rounds": 2, "epsilon": 0.5 * number, "delta": 1e-5, "rmse": 3.0, "loss": float("nan"), "note": "x"}
    for number in range(3)
]
PUBLIC = [line | {"elapsed": 10.0 * line["round"], "cohort-size": 7} for line in SECRET]


def play(tracker, lines):
    """Write some lines; return when the last round had ended."""
    tracker.open()
    for line in lines:
        time.sleep(0.02)
        tracker(line)
    ended = time.time()
    tracker.close()
    return ended


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"wandb is not installed: pip install 'flower-dp\[wandb\]'"):
        trackers.WandB("p").open()


# TensorBoard


def events_of(folder):
    """Return step, value and time of each number, by its name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(folder))
    found.Reload()
    read = {tag: found.Tensors(tag) for tag in found.Tags()["tensors"]}
    return {tag: [(one.step, float(make_ndarray(one.tensor_proto)), one.wall_time) for one in read[tag]] for tag in read}


@pytest.mark.slow
@pytest.mark.parametrize("lines", [SECRET, PUBLIC], ids=["secret", "public"])
def test_tensorboard(lines, tmp_path):
    pytest.importorskip("tensorboard")
    play(trackers.TensorBoard(tmp_path), lines)
    found = events_of(tmp_path)
    assert set(found) == {"epsilon", "delta", "rmse"} | ({"elapsed", "cohort-size"} if lines is PUBLIC else set())
    assert [(step, value) for step, value, _ in found["epsilon"]] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    times = [when - found["epsilon"][0][2] for _, _, when in found["epsilon"]]
    assert times == (pytest.approx([0, 10, 20], abs=1e-3) if lines is PUBLIC else [0, 0, 0])


# MLflow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path):
    """Two runs of one experiment."""
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/runs.db"
    play(trackers.MLflow("mine", tracking_uri=uri, run_name="secret"), SECRET)
    play(trackers.MLflow("mine", tracking_uri=uri, run_name="public"), PUBLIC)
    client = mlflow.MlflowClient(uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "mine"]
    runs = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"secret", "public"}
    for name, expected in (("secret", [0, 0, 0]), ("public", [0, 10_000, 20_000])):
        run = runs[name]
        history = client.get_metric_history(run.info.run_id, "epsilon")
        assert [(one.step, one.value) for one in history] == [(0, 0.0), (1, 0.5), (2, 1.0)]
        assert [one.timestamp - run.info.start_time for one in history] == expected
        assert (run.info.status, run.info.end_time - run.info.start_time) == ("FINISHED", expected[-1])


# Weights & Biases


@pytest.mark.parametrize("lines", [SECRET, PUBLIC], ids=["secret", "public"])
def test_wandb(lines, monkeypatch):
    """W&B writes when a row was logged: at the end, where that would tell the length of each round. Nor does it get the server's load."""
    rows, given = [], {}
    run = SimpleNamespace(log=lambda row, step: rows.append((step, row["epsilon"], row["rmse"], time.time())), finish=dict)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **words: given.update(words) or run))
    ended = play(trackers.WandB("mine", mode="offline"), lines)
    assert [row[:3] for row in rows] == [(0, 0.0, 3.0), (1, 0.5, 3.0), (2, 1.0, 3.0)]
    assert [row[3] < ended for row in rows] == [lines is PUBLIC] * 3
    assert given == {"project": "mine", "mode": "offline", "settings": {"console": "off", "x_disable_stats": True}}
