"""The program that measures workers on a GPU: what it plans, and that it says so where there is none."""

import importlib.util
import sys
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
