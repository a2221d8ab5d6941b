"""How many runs are made at once, and on which GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flower_dp.sweeps import lanes, plan
from flower_dp.sweeps.file import read


@pytest.fixture
def runs(write):
    def planned(text):
        return plan.planned(read(write(text)), 1)

    return planned


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    def has(gigabytes):
        monkeypatch.setattr(lanes.psutil, "virtual_memory", lambda: SimpleNamespace(available=gigabytes * 2**30))

    has(64)
    return has


@pytest.mark.parametrize(
    ("cores", "workers", "at_once", "expected"),
    [(2, 1, None, 2), (16, 1, None, 6), (16, 4, None, 4), (3, 4, None, 1), (16, 1, 3, 3), (1, 1, 5, 5), (16, 1, 9, 6)],
)
def test_as_many_runs_as_there_are_cores_for(runs, cores, workers, at_once, expected):
    six = runs(f"seeds = 6\nworkers = {workers}")
    assert lanes.how_many(six, at_once, cores, None) == expected


def test_memory_and_gpus_limit_them(runs, memory):
    six = runs("seeds = 6")
    memory(3)
    assert lanes.how_many(six, None, 16, None) == 3
    memory(0)
    assert lanes.how_many(six, None, 16, None) == 1
    memory(64)
    half = [replace(run, launched=replace(run.launched, gpus_per_worker=0.5, workers=1)) for run in six]
    assert [lanes.how_many(half, None, 16, gpus) for gpus in (1, 2, None)] == [2, 4, 6]
    whole = [replace(run, launched=replace(run.launched, gpus_per_worker=1.0, workers=2)) for run in six]
    assert [lanes.how_many(whole, None, 16, gpus) for gpus in (1, 4)] == [1, 2]


def test_one_ledger_takes_one_run_at_a_time(runs, tmp_path):
    assert lanes.how_many(runs(f"seeds = 6\n[settings]\nserver-ledger = '{tmp_path}/x'"), 4, 16, None) == 1


@pytest.mark.parametrize(
    ("of_a_run", "gpus", "visible"),
    [
        (0.0, 4, [None, None, None]),
        (1.0, 1, [None, None, None]),
        (1.0, None, [None, None, None]),
        (0.5, 2, ["0", "0", "1"]),
        (1.0, 4, ["0", "1", "2"]),
        (2.0, 4, ["0,1", "2,3", "0,1"]),
    ],
)
def test_runs_are_spread_over_gpus(monkeypatch, of_a_run, gpus, visible):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [lanes._visible(number, of_a_run, gpus) for number in range(3)] == visible


def test_gpus_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [lanes._visible(number, 1.0, 2) for number in range(3)] == ["5", "7", "5"]
