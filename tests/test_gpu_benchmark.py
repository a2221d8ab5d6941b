"""benchmarks/gpu.py: what it plans, computes, reads and prints, and that it says so where there is no GPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from flower_dp.simulation.cluster import fitting

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"
REPORT = {
    "machine": {
        "card": "a card",
        "driver": "560.1",
        "cores": 16,
        "versions": {"Python": "3.12.3", "torch": "2.11.0+cu126", "flower-dp": "0.1.0 with files 0"},
        "commit": "abc",
        "date": "2026-11-01",
    },
    "tf32": False,
    "jobs": {
        "mlp": {
            "seconds": {"plain_loop": 0.4, "vmap_limit": 0.02, "batched_gpu": 0.05},
            "errors": {"one_by_one_gpu": "ValueError: no"},
            "ratio_to_plain_loop": {"plain_loop": 1.0, "vmap_limit": 0.05, "batched_gpu": 0.125},
            "ratio_to_vmap_limit": {"plain_loop": 20.0, "vmap_limit": 1.0, "batched_gpu": 2.5},
            "fell_back": False,
            "same_bits": True,
        },
        "cnn": {
            "seconds": {"plain_loop": 0.2},
            "errors": {"vmap_limit": "OutOfMemoryError: no"},
            "ratio_to_plain_loop": {"plain_loop": 1.0},
            "ratio_to_vmap_limit": {},
            "fell_back": True,
        },
    },
    "runs": {
        "mlp": [
            {"workers": 1, "seconds": 0.06, "memory_mib": 700, "growth_mib": 0},
            {"workers": 2, "error": "RuntimeError: no"},
        ],
        "cnn": [{"workers": 1, "seconds": 0.3, "memory_mib": 900, "growth_mib": 2}],
    },
    "skipped": ["run of cnn, workers 2 (331 of 330 s were over)"],
}
TABLES = """
| seconds a round | mlp | cnn |
|---|---|---|
| plain PyTorch loop, client by client | 0.4 (1.00, 20.00) | 0.2 (1.00, -) |
| one vmap over all clients (the limit) | 0.02 (0.05, 1.00) | failed |
| `one_by_one`, records on the GPU | failed | - |
| `batched`, records on the GPU | 0.05 (0.12, 2.50) | - |
| `batched` fell back | no | yes |
| the same bits alone and in a group | yes | - |

| simulated run | 1 worker | 2 workers |
|---|---|---|
| mlp | 0.06 s (700 MiB, +0) | failed |
| cnn | 0.3 s (900 MiB, +2) | - |

"""


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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["mlp", "mpl"], "unknown jobs ['mpl']; known are mlp, cnn, resnet, logistic"),
        (["--workers", "2", "0"], "--workers=2 0: each must be at least 1"),
        (["--repeats", "0"], "--repeats=0, --rounds=40: must be at least 1 and 7"),
        (["--rounds", "6"], "--repeats=5, --rounds=6: must be at least 1 and 7"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(program, capsys, arguments, named):
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert (ended.value.code, named in capsys.readouterr().err) == (2, True)


def test_a_report_is_printed_as_tables(program, capsys, tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps(REPORT))
    program.main(["--table", str(tmp_path / "gpu.json")])
    first, tables, last = capsys.readouterr().out.partition(TABLES)
    assert tables, first
    assert first.startswith("Measured on 2026-11-01 with `python benchmarks/gpu.py` (a card, driver 560.1, 16 cores, ")
    assert "torch 2.11.0+cu126, commit abc; TF32 off)." in first
    assert last.endswith("Not measured: run of cnn, workers 2 (331 of 330 s were over).\n")


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
    assert capsys.readouterr().out.endswith(f"\n\n{program.table(report)}\n")
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


def test_a_run_is_measured_by_the_ends_of_its_rounds(program, monkeypatch):
    """The runs' own lines have no times: their cohorts are secret."""
    made = []

    def simulated(app, *, run_config, output_dir, gpus_per_node, **_):
        output_dir.mkdir()
        (output_dir / "metrics.jsonl").write_text("{}\n" * (run_config["num-rounds"] + 1))
        made.append((run_config["num-rounds"], run_config["cohort-size"], gpus_per_node))

    used = iter([100, 130, 150])
    monkeypatch.setattr(program.gpu_runs, "simulate", simulated)
    monkeypatch.setattr(program.gpu_runs, "used_mib", lambda: next(used))
    found = program.gpu_runs.measured(program.gpu_runs.plans([2], 2)[0], 40, program.COHORTS[1].config(40, ""))
    assert made == [(10, 10, 0.5), (40, 10, 0.5)]
    assert (found["memory_mib"], found["growth_mib"], len(found["repeats"])) == (50, 20, 35)
    assert 0 <= found["seconds"] < 600
