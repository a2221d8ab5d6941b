"""Plain `flwr run` releases what a grid in one process does."""

import shutil
import tomllib
from functools import partial
from pathlib import Path

import pytest

from flower_dp.running.guard import short_folder
from tests.contract_runs import assert_left_by, seeded_run
from tests.flower.superlink import flwr_run

FOREIGN = Path(__file__).parents[1] / "foreign"


@pytest.mark.flwr_run
def test_plain_flwr_run_releases_the_bits_of_a_grid_in_one_process(tmp_path, request):
    """With fixed noise and the same data; the app's run folder is where the app says, or in the user's home."""
    place = short_folder()
    request.addfinalizer(partial(shutil.rmtree, place, ignore_errors=True))
    label = "dp-fedsam distributed"
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(FOREIGN.parents[1]), "OMP_NUM_THREADS": "1"}
    ended = flwr_run(FOREIGN / "seeded", place, {"label": label, "fail": False}, num_supernodes=2, environment=environment)
    assert ended.status == "completed", ended.log
    (folder,) = (tmp_path / ".flower-dp" / "runs").iterdir()
    assert_left_by(seeded_run(label), folder)
    assert tomllib.loads((folder / "run-config.toml").read_text())["label"] == label
