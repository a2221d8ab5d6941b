"""benchmarks/gpu.py: what it plans, computes, reads and prints, and that it says so where there is no GPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from flower_dp.simulation.cluster import fitting

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def program():
    path, modules = list(sys.path), set(sys.modules)
    spec = importlib.util.spec_from_file_location("gpu", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # where dataclasses look their own module up
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == PROGRAM.parent:
            del sys.modules[name]


@pytest.fixture
def tf32(monkeypatch):
    """What torch may round to TF32, as it was before."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0")
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    yield lambda: [flag.allow_tf32 for flag in flags]
    for flag, value in zip(flags, before, strict=True):
        flag.allow_tf32 = value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(program, capsys):
    program.main([])
    assert tuple(capsys.readouterr()) == ("nothing measured: torch finds no GPU here\n", "")


@pytest.mark.usefixtures("tf32")
def test_what_the_time_does_not_allow_is_named(program, capsys, tmp_path):
    program.main(["--device", "cpu", "--workers", "1", "--budget", "-1", "--json", str(tmp_path / "gpu.json")])
    out = capsys.readouterr().out
    assert out.count("s were over)") == 4 + 3  # all but a run of resnet
    assert "Not measured: mlp, 100 clients x 60 records, batch 10 (0 of -1 s were over); cnn" in out


@pytest.mark.slow
def test_loop_and_limit_make_the_same_sum(program, monkeypatch):
    """Also where the memory takes one client at a time."""
    bare = program.Bare(program.replace(program.COHORTS[1].smaller(), size=5), torch.device("cpu"))
    loop = bare.loop()
    assert bare.at_once == 5
    assert 0 < loop.norm() <= 5 * program.CLIP_NORM
    torch.testing.assert_close(bare.limit(), loop, rtol=1e-3, atol=1e-5)
    together = bare._together

    def small(rows):
        if len(rows) > 1:
            raise torch.cuda.OutOfMemoryError("no memory")
        return together(rows)

    monkeypatch.setattr(bare, "_together", small)
    torch.testing.assert_close(bare.limit(), loop, rtol=1e-3, atol=1e-5)
    assert bare.at_once == 1


@pytest.mark.slow
def test_a_quick_run_on_a_cpu_measures_every_way(program, capsys, tmp_path, tf32):
    file = tmp_path / "gpu.json"
    program.main(["mlp", "cnn", "--device", "cpu", "--quick", "--repeats", "1", "--json", str(file)])
    report = json.loads(file.read_text())
    assert capsys.readouterr().out.endswith(f"\n\n{(tables := program.table(report))}\n")
    assert "| `batched` fell back | no | no |" in tables
    assert "| the same bits alone and in a group | yes | yes |" in tables
    assert list(report["jobs"]) == [f"{name}, 2 clients x 3 records, batch 2" for name in ("mlp", "cnn")]
    for job in report["jobs"].values():
        ways = ["plain_loop", "vmap_limit", "one_by_one_cpu", "batched_cpu", "round_cpu"]
        assert (list(job["seconds"]), job["errors"]) == (ways, {})
        assert job["ratio_to_plain_loop"]["round_cpu"] == job["seconds"]["round_cpu"] / job["seconds"]["plain_loop"]
        assert (job["fell_back"], job["same_bits"], job["vmap_clients_at_once"]) == (False, True, 2)
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert (report["runs"], report["skipped"], report["tf32"], tf32()) == ({}, [], False, [False, False])


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_the_workers_of_a_plan_fit_on_one_gpu_and_take_it_whole(program, cores):
    machine = {"Alive": True, "Resources": {"CPU": float(cores), "GPU": 1.0}}
    for plan in program.gpu_runs.plans([1, 2, 3, 4, 7], cores):
        assert fitting(machine, plan.cpus, plan.gpus) == plan.workers
        assert plan.workers * plan.gpus == pytest.approx(1.0, abs=1e-3)
    assert [plan.gpus for plan in program.gpu_runs.plans([1, 2], cores, gpu=False)] == [0.0, 0.0]
