"""Foreign apps with the real `flower-dp run`: what they leave, and what their log says."""

import json
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
        "2",
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


@pytest.mark.flwr_run
def test_the_five_lines_run_and_show_their_metrics(tmp_path):
    lines = flower_dp_run(tmp_path, "five-lines", "--set", "num-rounds=3")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert all({"accuracy", "perplexity", "epsilon"} <= set(row) for row in rows)
    written = {
        "config.toml",
        "flower.log",
        "metrics.jsonl",
        "model.safetensors",
        "progress.png",
        "statement.json",
        "statement.txt",
    }
    assert {path.name for path in (tmp_path / "run").iterdir()} == written
    assert [line.split("  ")[0] for line in lines if line.startswith("round ")] == [f"round {at}/3" for at in range(4)]
    assert sum("Privacy statement: DP-FedAvg" in line for line in lines) == 1
