"""A run that uses none of a machine's GPUs says in one line how to use them, where its user sees it."""

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flower_dp.running import preflight
from flower_dp.simulation import workers
from flower_dp.simulation.workers import unused_gpus
from flower_dp.sweeps import sweep
from tests.torch_free import module

LINE = "1 GPU is not used by this run: add {} (docs: Run on a GPU)"


@pytest.mark.parametrize(("num_gpus", "line"), [(0, ""), (1.0, LINE), (4.0, LINE.replace("1 GPU is", "4 GPUs are")), (0.5, "")])
def test_the_line_counts_whole_gpus(num_gpus, line):
    assert unused_gpus(num_gpus, "{}") == line


@pytest.mark.parametrize(
    ("there", "gpus", "lines"),
    [({"CPU": 2.0, "GPU": 1.0}, 0.0, 1), ({"CPU": 2.0, "GPU": 1.0}, 0.5, 0), ({"CPU": 2.0}, 0.0, 0)],
)
def test_simulate_says_it_once_for_its_workers(there, gpus, lines, monkeypatch, caplog):
    """Ray is a stub; warm workers say nothing again."""
    monkeypatch.setattr(workers, "start_ray", lambda *_, **__: SimpleNamespace(cluster_resources=lambda: there))
    monkeypatch.setattr(workers, "session_of", lambda ray: ("stub",))
    monkeypatch.setattr(workers, "Workers", lambda **_: SimpleNamespace())
    monkeypatch.setattr(workers, "_idle", {})
    with caplog.at_level(logging.INFO, "flwr"):
        for _ in range(2):
            with workers.warm_workers(cpus=1.0, gpus=gpus, at_most=None):
                pass
    assert [record.getMessage() for record in caplog.records] == [LINE.format("gpus_per_node=1")] * lines


@pytest.fixture
def stock(tmp_path):
    """A stock app without torch, of one client and one round."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text(module(num_clients=1))
    (tmp_path / "mine" / "pyproject.toml").write_text(
        "[project]\nname='mine'\nversion='1'\n[tool.flwr.app]\npublisher='me'\n[tool.flwr.app.config]\nnum-rounds=1\n"
        "[tool.flwr.app.components]\nserverapp='mine:server'\nclientapp='mine:client'\n"
    )
    return tmp_path / "mine"


@pytest.mark.flwr_run
def test_flower_dp_run_says_it_once(stock, tmp_path):
    """Ray believes in a GPU that is not there."""
    done = subprocess.run(
        [sys.executable, "-m", "flower_dp.cli.entry", "run", str(stock), "--workers", "1", "--output-dir", "run"],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path), "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 1})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not used by this run") == done.stdout.count(LINE.format("--gpus-per-worker 1")) == 1
    assert (tmp_path / "run" / "flower.log").read_text().count("not used by this run") == 1


@pytest.mark.parametrize(("num_gpus", "lines"), [(2, 1), (0, 0), (None, 0)])
def test_a_sweep_says_it_once_of_all_its_runs(monkeypatch, num_gpus, lines):
    monkeypatch.setattr(preflight, "num_gpus", lambda: num_gpus)
    told = []
    sweep._Progress(told.append, SimpleNamespace(), 2, 2).tell_unused_gpus()
    assert told == ["2 GPUs are not used by this sweep: add gpus-per-worker = 1 to its file (docs: Run on a GPU)"][:lines]
