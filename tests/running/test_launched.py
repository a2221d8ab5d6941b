"""What `flower-dp run` was asked for, kept for a run that goes on."""

from dataclasses import replace

import pytest

from flower_dp.running.launch_record import LaunchRecord
from flower_dp.running.run_folder import CHECKPOINT

BEGUN = LaunchRecord(app="", name="run", overrides={"num-rounds": 2}, workers=1, supernodes=2, gpus_per_worker=0.0)


def test_how_a_run_was_begun_is_read_back(tmp_path):
    BEGUN.write(tmp_path)
    assert LaunchRecord.read(tmp_path) == BEGUN
    assert (tmp_path / CHECKPOINT).stat().st_mode & 0o777 == 0o700
    with pytest.raises(ValueError, match=r"other: holds no run that `flower-dp run` has begun"):
        LaunchRecord.read(tmp_path / "other")
    assert BEGUN.target.app.own
    gone = replace(BEGUN, app=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="is no longer the folder of a Flower app"):
        _ = gone.target
    LaunchRecord.forget(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_does_not_say_which_app_runs(mode, tmp_path):
    BEGUN.write(tmp_path)
    (tmp_path / CHECKPOINT).chmod(mode)
    with pytest.raises(ValueError, match=r"others can write to it .* it says which app runs"):
        LaunchRecord.read(tmp_path)
