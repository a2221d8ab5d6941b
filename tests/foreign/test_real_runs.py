"""Foreign apps with the real `flower-dp run`: what they leave, and what their log says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def flower_dp_run(tmp_path, app, *arguments):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "flower_dp.cli.main",
        "run",
        str(HERE / app),
        "--workers",
        "1",
        "--output-dir",
        "run",
        *arguments,
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.flwr_run
def test_a_stock_pytorch_app_keeps_its_files_and_its_log(tmp_path):
    before = sorted(path.name for path in (HERE / "pytorch").iterdir())
    lines = flower_dp_run(tmp_path, "pytorch", "--supernodes", "4")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["final_model.pt", "flower.log"]
    assert sorted(path.name for path in (HERE / "pytorch").iterdir()) == before
    told = [line.partition(":")[2].strip() for line in lines]
    # The app has no metrics.jsonl: its log is what is shown. Every line once, no debugging, no traceback of the roll call.
    assert told.count("Privacy statement: DP-FedAvg") == 1
    assert [line for line in lines if line.startswith(("DEBUG", "Traceback", "ERROR")) or "Traceback (most" in line] == []
    assert told.count("[ROUND 2/2]") == 1
    assert not any("did not count" in line for line in lines)  # the clients found data/shape.csv
