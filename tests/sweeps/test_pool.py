"""How many runs are made at once."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flower_dp.running.launch_record import LaunchRecord
from flower_dp.running.signals import Signals
from flower_dp.simulation.workers import RayStartError
from flower_dp.sweeps import pool
from flower_dp.sweeps.folder import SweepFolder


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    def has(gigabytes):
        monkeypatch.setattr(pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=gigabytes * 2**30))

    has(64)
    return has


@pytest.mark.parametrize(
    ("cores", "workers", "jobs", "expected"),
    [(2, 1, None, 2), (16, 4, None, 4), (3, 4, None, 1), (16, 1, 3, 3), (1, 1, 5, 5), (16, 1, 9, 6)],
)
def test_as_many_runs_as_there_are_cores_for(runs, cores, workers, jobs, expected):
    six = runs(f"seeds = 6\nworkers = {workers}")
    assert pool.num_jobs(six, jobs, cores, None) == expected


def test_memory_and_gpus_limit_them(runs, memory):
    six = runs("seeds = 6")
    memory(3)
    assert pool.num_jobs(six, None, 16, None) == 3
    memory(0)
    assert pool.num_jobs(six, None, 16, None) == 1
    memory(64)
    half = [replace(run, launched=replace(run.launched, gpus_per_worker=0.5, workers=1)) for run in six]
    assert [pool.num_jobs(half, None, 16, gpus) for gpus in (1, 2, None)] == [2, 4, 6]
    whole = [replace(run, launched=replace(run.launched, gpus_per_worker=1.0, workers=2)) for run in six]
    assert [pool.num_jobs(whole, None, 16, gpus) for gpus in (1, 4)] == [1, 2]


def test_one_ledger_takes_one_run_at_a_time(runs, tmp_path):
    assert pool.num_jobs(runs(f"seeds = 6\n[settings]\nserver-ledger = '{tmp_path}/x'"), 4, 16, None) == 1


def test_no_other_sweep_begins_while_a_run_is_made(tmp_path, monkeypatch):
    """Nor where the sweep itself was killed: the lock is that of the run's process."""
    folder, workers = SweepFolder(tmp_path / "out"), SimpleNamespace(actors=[1])
    with folder.locked() as lock:
        pass

    def attempt(*_, **__):
        with pytest.raises(ValueError, match="another sweep runs there"), folder.locked():
            pass
        return "made"

    monkeypatch.setattr(pool, "attempt", attempt)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    begun = LaunchRecord(app="", name="", overrides={}, workers=1, supernodes=1, gpus_per_worker=0.0)
    assert pool._make(begun, tmp_path, "", workers, lock) == ("made", True)
    with folder.locked():
        pass


def test_what_workers_write_is_not_shown(runs, tmp_path, monkeypatch):
    """A choice by private results shows nothing before it is made."""
    given = {}
    monkeypatch.setattr(pool, "start_ray", lambda num_cpus, **words: given.update(words, num_cpus=num_cpus))
    monkeypatch.setattr(pool, "stop_ray", lambda: None)
    with pool.Pool(runs("seeds = 6\nworkers = 2"), 3, tmp_path, Signals()):
        pass
    assert given == {"to_screen": False, "num_cpus": max(6, pool.default_workers())}


def test_a_ray_that_does_not_start_begins_no_run(runs, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RayStartError("Ray does not start")

    monkeypatch.setattr(pool, "start_ray", fail)
    monkeypatch.setattr(pool, "stop_ray", lambda: None)
    six = runs("seeds = 6")
    with pytest.raises(pool.LaunchError, match="Ray does not start"), pool.Pool(six, 3, tmp_path, Signals()) as made:
        made.make([(run, tmp_path, False) for run in six], pytest.fail)
