import json
import math
import stat
from dataclasses import fields

import numpy as np
import pytest
from safetensors.numpy import load_file

from flower_dp.core import metric_columns
from flower_dp.running import plot, run_folder
from flower_dp.running.run_folder import RunFolder
from flower_dp.strategies.run_state import RoundReport


def test_an_app_takes_the_folder_that_the_command_line_has_made(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWER_DP_RUN_FOLDER", str(tmp_path / "run"))
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / "flower.log").write_text("starting")
    assert RunFolder.create(None, {"a": 1}, "main").path == tmp_path / "run"
    assert (tmp_path / "run" / "run-config.toml").read_text() == "a = 1\n"
    with pytest.raises(ValueError, match=r"already holds run-config\.toml"):
        RunFolder.create(None, {}, "main")
    assert RunFolder.create(tmp_path / "other", {}, "main").path == tmp_path / "other"


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path, why in (("file/run", "Not a directory"), ("file", "File exists")):
        with pytest.raises(ValueError, match=rf"run folder '.*/{path}': can't be created: {why}; choose another folder"):
            run_folder.new_folder(tmp_path / path, "main")


def test_append_makes_lines_that_any_json_reader_takes(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {}, "main")
    folder.append({"round": 0, "loss": np.float32(0.5), "epsilon": math.inf, "more": [math.nan, np.int64(3)]})
    folder.append({"round": 1, "accuracy": 0.25})
    text = (folder.path / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        {"round": 0, "loss": 0.5, "epsilon": None, "more": [None, 3]},
        {"round": 1, "accuracy": 0.25},
    ]
    assert run_folder.read_metrics(folder.path) == run_folder.read_metrics(folder.path / "metrics.jsonl")


@pytest.mark.parametrize("half", ['{"round": 2, "lo', '{"round": 2}', ""])
def test_a_half_written_last_line_is_left_out(tmp_path, half):
    assert run_folder.read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n' + half)
    assert run_folder.read_metrics(tmp_path) == [{"round": 1}]
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\nnonsense\n{"round": 2}\n')
    with pytest.raises(ValueError, match="line 2: must be a JSON object"):
        run_folder.read_metrics(tmp_path)


@pytest.mark.drawn
def test_state_and_finish_write_all_four(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {}, "main")
    folder.append({"round": 1, "accuracy": 0.5, "epsilon": 1.0, "delta": 1e-5})
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"transposed": grid.T, "strided": grid[:, ::2], "scalar": np.array(7.0), "big-endian": np.array([1, 2], ">i4")}
    arrays["empty"] = np.zeros((0, 3), np.float16)
    folder.state({"epsilon": math.inf, "delta": 1e-5}, "Who is protected\n")
    folder.write_results(arrays)
    assert json.loads((folder.path / "statement.json").read_text()) == {"epsilon": None, "delta": 1e-5}
    assert (folder.path / "statement.txt").read_text() == "Who is protected\n"
    loaded = load_file(folder.path / "model.safetensors")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].shape == array.shape
        np.testing.assert_array_equal(loaded[name], array)
    assert (folder.path / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.path.glob(".*"))


@pytest.mark.drawn
def test_the_plot_stands_gaps_and_nothing():
    gaps = [{"round": n, **({"accuracy": 0.01 * n} if n % 3 == 0 else {}), "epsilon": None} for n in range(100)]
    assert all(plot.png(metrics).startswith(b"\x89PNG") for metrics in ([], gaps))


def test_the_plot_has_a_panel_for_each_kind_of_metric_that_evaluate_fn_returned():
    own = {"epsilon": 0.5, "delta": 1e-5, "elapsed": 3.0, "clip-norm": 0.2, "private-accuracy": 0.3, "client-loss": 2.0}
    metrics = [{"rmse": 9.0, "loss": 4.0, "round": 0}, {"rmse": 7.0, "validation-loss": 3.0, "round": 1} | own]
    drawn = plot.figure(metrics)
    panels = {axes.get_ylabel(): axes.get_lines() for axes in drawn.axes if axes.get_lines()}
    drawn = {name: {line.get_label(): line.get_ydata().tolist() for line in lines} for name, lines in panels.items()}
    assert drawn.pop("epsilon spent") == {"epsilon spent": [0.5]}
    assert drawn.pop("private accuracy (%)") == {"private accuracy": [0.3]}
    assert drawn == {"rmse": {"rmse": [9.0, 7.0]}, "loss": {"test loss": [4.0], "validation-loss": [3.0]}}


def test_epsilon_has_a_panel_of_its_own_below_the_metrics_with_the_same_rounds():
    drawn = plot.figure([{"round": n, "accuracy": 0.1 * n, "loss": 1.0, "epsilon": 0.5 * n} for n in range(3)])
    accuracy, _, epsilon = drawn.axes
    places = [axes.get_subplotspec().rowspan.start for axes in drawn.axes]
    assert ([len(axes.get_lines()) for axes in drawn.axes], places) == ([1, 1, 1], [0, 1, 2])
    assert accuracy.get_shared_x_axes().joined(accuracy, epsilon)
    assert [axes.get_xlabel() for axes in drawn.axes] == ["", "", "round"]
    assert epsilon.get_ylim()[0] == 0.0
    many = plot.figure([{"round": 1, "epsilon": 0.5, **{f"m-{name}": 1.0 for name in "abcdefghijklmno"}}])
    assert many.get_suptitle().endswith("(4 more in metrics.jsonl)")
    assert [axes.get_ylabel() for axes in many.axes if axes.get_xlabel()] == ["m-j", "m-k", "epsilon spent"]


def test_the_runs_own_columns_are_those_of_every_report():
    assert {one.name.replace("_", "-") for one in fields(RoundReport)} <= metric_columns.OWN
    row = dict.fromkeys(metric_columns.OWN, 1.0) | {
        "private-loss": 1.0,
        "client-loss": 1.0,
        "note": "text",
        "best": True,
        "auc": 1,
    }
    assert metric_columns.metrics(row) == {"auc": 1.0}


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_its_owners_alone(tmp_path, monkeypatch):
    """Its log, and the times of its files, may tell how many clients took part."""
    monkeypatch.setenv("HOME", str(tmp_path))
    named, *unnamed = (
        RunFolder.create(tmp_path / "a" / "run", {}, "main").path,
        *(run_folder.new_folder(None, "m/n") for _ in "ab"),
    )
    assert [mode(folder) for folder in (named, *unnamed)] == [0o700] * 3
    assert len({folder for folder in unnamed if folder.parent == tmp_path / ".flower-dp" / "runs"}) == 2
    assert mode(named / "run-config.toml") & 0o400  # whose owner may open it to others


def test_a_folder_that_was_there_stays_as_open_as_it_was_and_its_log_is_its_owners_alone(tmp_path):
    log = tmp_path / "flower.log"
    tmp_path.chmod(0o755)
    log.touch(0o644)
    assert run_folder.new_folder(tmp_path, "main") == tmp_path
    run_folder.new_log(tmp_path).close()
    modes = [mode(log)]
    run_folder.write_whole(log, b"without colors\n")
    assert [mode(tmp_path), *modes, mode(log)] == [0o755, 0o600, 0o600]
