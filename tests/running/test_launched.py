"""What `flower-dp run` was asked for, kept for a run that goes on."""

import os
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from flower_dp.core.environment import RESUME, RESUMED, RUN_FOLDER
from flower_dp.running.launched import Launched
from flower_dp.running.recorded import Recording
from flower_dp.running.run_folder import CHECKPOINT, RunFolder

BEGUN = Launched(app="", name="run", overrides={"num-rounds": 2}, workers=1, supernodes=2, gpus_per_worker=0.0)


def test_how_a_run_was_begun_is_read_back(tmp_path):
    BEGUN.write(tmp_path)
    assert Launched.read(tmp_path) == BEGUN
    assert (tmp_path / CHECKPOINT).stat().st_mode & 0o777 == 0o700
    with pytest.raises(
        ValueError, match=r"other: holds no run that `flower-dp run` has begun: it has no checkpoint/launch.json$"
    ):
        Launched.read(tmp_path / "other")
    assert BEGUN.target.app.own
    gone = replace(BEGUN, app=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="is no longer the folder of a Flower app"):
        _ = gone.target
    Launched.forget(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_does_not_say_which_app_runs(mode, tmp_path):
    BEGUN.write(tmp_path)
    (tmp_path / CHECKPOINT).chmod(mode)
    with pytest.raises(ValueError, match=r"others can write to it .* it says which app runs"):
        Launched.read(tmp_path)


def test_the_first_run_alone_of_an_app_goes_on(tmp_path, monkeypatch):
    RunFolder.create(tmp_path / "run", {"a": 1}, "run")
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path / "run"))
    monkeypatch.setenv(RESUME, RESUMED)
    assert Recording.begin(None, {"a": 1}, "run").checkpoints.resume
    assert RESUME not in os.environ
    with pytest.raises(ValueError, match="already holds"):
        Recording.begin(None, {"a": 1}, "run")


def test_the_model_of_a_run_that_did_not_end_is_told_as_such(tmp_path, caplog):
    folder = RunFolder.create(tmp_path / "run", {}, "run")
    arrays = {"weight": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
    for unfinished in ("", "after round 1"):
        folder.finish(arrays, unfinished=unfinished)
        folder.model_into(nn.Linear(2, 2))
        assert ("a run that did not end: after round 1" in caplog.text) is bool(unfinished)
