"""The program that measures workers on a GPU: what it plans and reads, and that it says so where there is none."""

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flower_dp.simulation.cluster import fitting

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_workers.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("gpu_workers", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_workers"] = module  # where dataclasses look their own module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_workers"]


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_the_workers_of_a_plan_fit_on_one_gpu_and_take_it_whole(program, cores):
    machine = {"Alive": True, "Resources": {"CPU": float(cores), "GPU": 1.0}}
    for plan in program.plans([1, 2, 3, 4, 7], cores):
        assert fitting(machine, plan.cpus, plan.gpus) == plan.workers
        assert plan.workers * plan.gpus == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(ValueError, match="--workers=2 0"):
        program.plans([2, 0], cores)


def test_what_nvidia_smi_says(program):
    assert program.used_mib("1234\n5\n") == 1234


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(program, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(PROGRAM)])
    program.main()
    assert tuple(capsys.readouterr()) == ("nothing measured: torch finds no GPU here\n", "")


def test_a_plan_is_measured_by_the_ends_of_its_rounds(program, monkeypatch):
    """The runs' own lines have no times: their cohorts are secret."""
    made = []

    def simulated(app, *, run_config, output_dir, gpus_per_node, **_):
        output_dir.mkdir()
        (output_dir / "metrics.jsonl").write_text("{}\n" * (run_config["num-rounds"] + 1))
        made.append((run_config["num-rounds"], gpus_per_node))

    used = iter([100, 130, 150])
    monkeypatch.setattr(program, "simulate", simulated)
    monkeypatch.setattr(program, "used", lambda: next(used))
    found = program.measured(program.plans([2], 2)[0], 40, "")
    assert made == [(10, 0.5), (40, 0.5)]
    assert (found["memory_mib"], found["growth_mib"]) == (50, 20)
    assert 0 <= found["seconds"] < 600


def test_every_line_of_a_runs_metrics_has_a_time(program, tmp_path):
    with program.RoundTimes(tmp_path) as rounds:
        (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n{"round": 1}\n{"round"')
    assert len(rounds.ends) == 2
    assert all(before <= after for before, after in pairwise(rounds.ends))
