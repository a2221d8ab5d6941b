"""The program that puts DP-FedSAM's claims to the test: its budget of runs, its choice, its slices of time, and a small run of all."""

import importlib.util
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

from flower_dp.running.run_folder import is_finished, read_metrics
from flower_dp.sweeps.results import Results
from flower_dp.sweeps.sweep import Sweep

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "dp_fedsam.py"
SMALL = """
seeds = [100]
metric = "validation-accuracy"
workers = 1
jobs = 1
[settings]
data-dir = ""
num-clients = 20
sampling-rate = 0.5
num-rounds = 1
partition = "iid"
validation-ratio = 0.1
records-per-client = 8
test-every = 0
training-engine = "one-by-one"
[grid]
"METHOD.noise-multiplier" = 3.0
"METHOD.delta" = 0.002
"METHOD.target-epsilon" = 0.0
"METHOD.placement" = "central"
[[points]]
method = "dp-fedavg"
dp-fedavg.clip-norm = [0.001, 10.0]
[[points]]
method = "dp-fedsam"
dp-fedsam.keep-ratio = 1.0
"""


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(Results, "draw", lambda *_, **__: None)  # a sweep's own pictures, which no test here looks at
    spec = importlib.util.spec_from_file_location("dp_fedsam", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sweep_of(content, folder):
    (folder / "file.toml").write_text(tomli_w.dumps(content))
    return Sweep.read(folder / "file.toml")


def test_every_method_is_tuned_on_as_many_runs_and_by_no_test_record(program, tmp_path):
    sweep = sweep_of(program.tuning({"data-dir": str(tmp_path)}, 0.0), tmp_path)
    budget = Counter(program.variant(run.config) for run in sweep.runs)
    assert set(budget) == {(method, clip) for method in program.METHODS for clip in program.CLIPS}
    assert len(set(budget.values())) == 1
    assert {program.CHOSEN_BY, sweep.file.metric} == {"validation-accuracy"}
    for run in sweep.runs:
        own = {key.partition(".")[2]: value for key, value in run.config.items() if key.startswith(f"{run.config['method']}.")}
        assert (run.config["num-clients"], run.config["sampling-rate"]) == (500, 0.1)
        assert (own["noise-multiplier"], own["delta"], own["target-epsilon"], own["placement"]) == (0.95, 0.002, 0.0, "central")
        assert (run.config["validation-ratio"] > 0, run.config["test-ratio"]) == (True, 0)


@pytest.mark.slow
def test_what_is_run_with_the_chosen_settings(program, tmp_path):
    content = program.tuning({"data-dir": str(tmp_path)}, 0.0, rates=[0.1], norms=[0.4, 0.8], radius=0.05, epsilon=3.0)
    tune = sweep_of(content, tmp_path).runs
    fixed = [run.config for run in tune if program.variant(run.config)[1] == "fixed"]
    assert {config[f"{config['method']}.clip-norm"] for config in fixed} == {0.4, 0.8}
    assert {run.config[f"{run.config['method']}.epsilon"] for run in tune} == {3.0}
    assert {run.config["dp-fedsam.sam-radius"] for run in tune if run.config["method"] == "dp-fedsam"} == {0.05}
    chosen = program.best([(run.point.settings, 0.0) for run in tune])

    def runs(stage):
        return sweep_of(program.chosen_runs(stage, chosen, 3, content), tmp_path).runs

    tables = runs(program.TABLES)
    assert Counter((program.variant(run.config), program.partition_of(run.config)) for run in tables) == {
        (variant, partition): 3 for variant in chosen for partition in program.PARTITIONS
    }
    assert not {run.seed for run in tables} & {run.seed for run in tune}
    free = ("partition", "dirichlet-alpha", "seed")
    for run in tables:
        assert [key for key, of in chosen[program.variant(run.config)].items() if key not in free and run.config[key] != of] == []
    assert Counter((program.variant(run.config), run.config[f"{run.config['method']}.epsilon"]) for run in runs("epsilons")) == {
        ((method, "fixed"), target): 3 for method in program.METHODS for target in program.TARGETS
    }
    plain, radii = chosen["DP-FedAvg", "fixed"], runs(program.RADII)
    wanted = [(radius, seed) for radius in program.SAM_RADII for seed in range(3)]
    assert sorted((run.config["dp-fedsam.sam-radius"], run.seed) for run in radii) == wanted
    for run in radii:
        for key in ("clip-norm", "epsilon", "delta", "placement"):
            assert run.config[f"dp-fedsam.{key}"] == plain[f"dp-fedavg.{key}"]
        assert (run.config["learning-rate"], run.config["partition"]) == (plain["learning-rate"], plain["partition"])
    assert all(run.config["report-client-metrics"] for run in runs(program.NORMS))


def test_numbers_in_words(program):
    assert program.spread([0.5, 0.52]) == "51.0 ± 1.4"  # by hand: deviation 0.02 / sqrt 2
    assert program.spread([0.5]) == "50.0"
    ours, theirs = {("a", 0): 0.52, ("a", 1): 0.50, ("b", 0): 0.9}, {("a", 0): 0.50, ("a", 1): 0.51}
    # By hand: +2 and -1, their standard error 3 / sqrt 2 / sqrt 2.
    assert program.differences(ours, theirs) == "+0.50 ± 1.50 (above in 1 of 2)"
    assert program.differences(ours, {}) == "not run"


def test_a_second_program_in_a_folder_is_refused_before_it_writes_there(program, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dp_fedsam.py", "--output-dir", str(tmp_path), "--in-process"])
    with program.alone_in(tmp_path), pytest.raises(SystemExit, match="another process of this program uses this folder"):
        program.main()
    assert [path.name for path in tmp_path.iterdir()] == [program.LOCK]


@pytest.mark.slow
def test_all_of_it_in_small_in_slices(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "GRID", tmp_path / "grid.toml")
    monkeypatch.setattr(program, "PARTITIONS", {"i.i.d.": {"partition": "iid"}})
    monkeypatch.setattr(program, "TARGETS", (2.0,))
    monkeypatch.setattr(program, "SAM_RADII", (0.1,))
    (tmp_path / "grid.toml").write_text(SMALL)
    place = tmp_path / "out"
    arguments = ["dp_fedsam.py", "--output-dir", str(place), "--seeds", "2", "--in-process", "--set", "learning-rate=0.1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes", "0"])
    with pytest.raises(SystemExit, match=str(program.UNFINISHED)):
        program.main()
    assert "repeat the command to resume" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--stages", "tune", "tables"])
    program.main()
    assert sorted(path.name for path in place.glob("*.toml")) == ["tables.toml", "tune.toml"]
    monkeypatch.setattr(sys, "argv", arguments)
    program.main()
    for stage, count in (("tune", 3), ("norms", 2), ("tables", 4), ("radii", 2), ("epsilons", 4)):
        runs = Sweep.read(place / f"{stage}.toml").runs
        assert len(runs) == count
        assert all(is_finished(place / stage / "runs" / run.name) for run in runs)
        assert {run.config["learning-rate"] for run in runs} == {0.1}
        assert (place / stage / "table.md").is_file()
    # What was chosen is what the validation records say.
    tuned = [run for run in Sweep.read(place / "tune.toml").runs if run.config["method"] == "dp-fedavg"]
    lines = {run.name: read_metrics(place / "tune" / "runs" / run.name)[-1] for run in tuned}
    numbers = {run.config["dp-fedavg.clip-norm"]: lines[run.name]["validation-accuracy"] for run in tuned}
    wanted = max(numbers, key=lambda norm: (numbers[norm], -norm))
    points = tomllib.loads((place / "tables.toml").read_text())["points"]
    assert [point["dp-fedavg.clip-norm"] for point in points if point["method"] == "dp-fedavg"] == [wanted]
    report = (place / "report.md").read_text()
    assert report.count("(2)") == 2 + 2 + 2  # both methods, in the tables of the fixed clip norm, radii and epsilons
    assert report.count("| DP-FedSAM, radius 0.1, with DP-FedAvg's settings |") == 1
    assert (place / "accuracy-epsilon.png").stat().st_size > 1000
    before = (place / "tables" / "results.csv").read_text()
    program.main()  # all is there
    assert (place / "tables" / "results.csv").read_text() == before
