"""A run that uses none of a machine's GPUs says in one line how to use them, where its user sees it."""

import logging
from types import SimpleNamespace

import pytest

from flower_dp.running import preflight
from flower_dp.running.flower_log import is_shown
from flower_dp.simulation import workers
from flower_dp.simulation.workers import unused_gpus
from flower_dp.sweeps import sweep

LINE = "1 GPU is not used by this run: add {} (docs: Simulate, On a GPU)"


@pytest.mark.parametrize(("num_gpus", "line"), [(0, ""), (1.0, LINE), (4.0, LINE.replace("1 GPU is", "4 GPUs are")), (0.5, "")])
def test_the_line_counts_whole_gpus(num_gpus, line):
    assert unused_gpus(num_gpus, "{}") == line


@pytest.mark.parametrize(
    ("there", "gpus", "lines"), [({"CPU": 2.0, "GPU": 1.0}, 0.0, 1), ({"CPU": 2.0, "GPU": 1.0}, 0.5, 0), ({"CPU": 2.0}, 0.0, 0)]
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
    assert all(map(is_shown, caplog.records))


@pytest.mark.parametrize(("num_gpus", "lines"), [(2, 1), (0, 0), (None, 0)])
def test_a_sweep_says_it_once_of_all_its_runs(monkeypatch, num_gpus, lines):
    monkeypatch.setattr(preflight, "num_gpus", lambda: num_gpus)
    told = []
    sweep._Progress(told.append, SimpleNamespace(), 2).begin(1, SimpleNamespace(workers=1, gpus_per_worker=0.0), 0)
    assert told[1:] == ["2 GPUs are not used by this sweep: add gpus-per-worker = 1 to its file (docs: Simulate, On a GPU)"][:lines]
