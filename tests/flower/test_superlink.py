"""Plain `flwr run` releases what a grid in one process does."""

import json
import shutil
import tomllib
from functools import partial
from pathlib import Path

import pytest
from safetensors.numpy import load

from flower_dp.running.guard import short_folder
from tests.contract_runs import SEED, run_of
from tests.contracts import METHODS, Words
from tests.flower.superlink import flwr_run

FOREIGN = Path(__file__).parents[1] / "foreign"


@pytest.mark.flwr_run
def test_plain_flwr_run_releases_the_bits_of_a_grid_in_one_process(tmp_path, request):
    """With fixed noise and the same data; the app's run folder is where the app says, or in the user's home."""
    place = short_folder()
    request.addfinalizer(partial(shutil.rmtree, place, ignore_errors=True))
    overrides = {"label": "dp-fedsam distributed", "fail": False}
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(FOREIGN.parents[1]), "OMP_NUM_THREADS": "1"}
    ended = flwr_run(FOREIGN / "seeded", place, overrides, num_supernodes=2, environment=environment)
    assert ended.status == "completed", ended.log
    (folder,) = (tmp_path / ".flower-dp" / "runs").iterdir()
    (method,) = [method for method in METHODS if method.label == "dp-fedsam distributed"]
    alone = run_of(method, Words(noise_seed=SEED), num_nodes=2, noise_seed=SEED)
    (weights,) = load((folder / "model.safetensors").read_bytes()).values()
    assert weights.tobytes() == alone.bits[-1]
    assert (folder / "statement.txt").read_text() == f"{alone.strategy.statement}\n"
    assert tomllib.loads((folder / "run-config.toml").read_text())["label"] == method.label
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["replies"] for row in rows[1:]] == [report.replies for report in alone.strategy.rounds]
