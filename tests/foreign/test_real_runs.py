"""Foreign apps with the real `flower-dp run`: what they leave, and what their log says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load

from flower_dp.running.run_folder import RESULTS
from tests.contracts import METHODS, Words
from tests.test_contract import SEED, run_of

HERE = Path(__file__).resolve().parent


def flower_dp_run(tmp_path, app, *arguments):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "flower_dp.cli.main",
        "run",
        str(HERE / app),
        *("--workers", "1", *arguments),
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.flwr_run
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_a_stock_pytorch_app_keeps_its_files_and_its_log(tmp_path, engine):
    before = sorted(path.name for path in (HERE / "pytorch").iterdir())
    lines = flower_dp_run(tmp_path, "pytorch", "--supernodes", "4", "--engine", engine, "--output-dir", "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(["final_model.pt", "config.toml", *RESULTS])
    assert sorted(path.name for path in (HERE / "pytorch").iterdir()) == before
    # The app's log until the first round, then the rounds. Every line once, no debugging, no traceback of the client query.
    assert lines.count("Privacy statement: DP-FedAvg") == 1
    assert [line for line in lines if line.startswith(("DEBUG", "Traceback", "ERROR")) or "Traceback (most" in line] == []
    assert [line.split()[1] for line in lines if line.startswith("round ")] == ["0/2", "1/2", "2/2"]
    log = (tmp_path / "run" / "flower.log").read_text()
    assert log.count("[ROUND 2/2]") == 1
    assert "did not count" not in log  # the clients found data/shape.csv
    assert "num-server-rounds = 2" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.flwr_run
def test_both_engines_release_the_same_bits(tmp_path):
    """Fixed noise, the same data: the same model, and the same statement; and those of a grid in one process."""
    found = {}
    for engine in ("ray", "flower"):
        (tmp_path / engine).mkdir()
        lines = flower_dp_run(tmp_path / engine, "seeded", "--supernodes", "2", "--engine", engine)
        (folder,) = (tmp_path / engine / ".flower-dp" / "runs").iterdir()
        assert lines[-1] == f"results: {folder}"
        found[engine] = [(folder / name).read_bytes() for name in ("model.safetensors", "statement.txt", "config.toml")]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[engine].append([[row[key] for key in ("round", "epsilon", "delta")] for row in rows])
    assert found["ray"] == found["flower"]
    (method,) = [method for method in METHODS if method.label == "dp-fedsam distributed"]
    alone = run_of(method, Words(noise_seed=SEED), num_nodes=2, noise_seed=SEED)
    (weights,) = load(found["ray"][0]).values()
    assert weights.tobytes() == alone.bits[-1]
