"""Sweeps that are really made: failures, interruptions, and what goes on afterwards."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from flower_dp.cli import main as cli
from flower_dp.cli.main import app
from flower_dp.running.run_folder import is_finished, read_metrics
from flower_dp.sweeps import sweep
from flower_dp.sweeps.folder import SweepFolder
from flower_dp.sweeps.pool import RunOutcome
from flower_dp.sweeps.results import Results
from flower_dp.sweeps.sweep import Sweep
from tests.sweeps.conftest import finish
from tests.torch_free import module


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin `flower-dp sweep` in a process of its own, as a user does."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    command = [sys.executable, "-m", "flower_dp.cli.entry", "sweep"]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    begun = []

    def process(*arguments):
        begun.append(subprocess.Popen([*command, *map(str, arguments)], **output))
        return begun[-1]

    yield process
    for one in begun:  # of a test that has failed
        one.kill()
        one.communicate()


def rows(folder):
    return list(csv.DictReader((folder / "results.csv").read_text().splitlines()))


# With some learning rates its server fails, or its process dies, or it waits for `HOLD`.
STOCK = module("""
import os
import signal
import time
import tomllib
from collections import Counter
from pathlib import Path

FAILS, DIES, WAITS = 0.02, 0.03, 0.2
calls = Counter()


def evaluate(server_round, arrays):
    config = tomllib.loads(Path(os.environ["FLOWER_DP_RUN_FOLDER"], "run-config.toml").read_text())
    calls[config["learning-rate"]] += 1
    while calls[WAITS] > 5 and Path(os.environ.get("HOLD", "/nowhere")).exists():
        time.sleep(0.05)
    if config["learning-rate"] == FAILS:
        raise RuntimeError("told to fail")
    if config["learning-rate"] == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    return MetricRecord({"accuracy": 0.1 * config["seed"] + 0.25, "process": float(os.getpid())})
""")
REPAIRED = STOCK.replace("FAILS, DIES, WAITS = 0.02, 0.03", "FAILS, DIES, WAITS = 0, 0")
FILE = "app = 'mine'\nseeds = 1\njobs = 1\n[settings]\nnum-rounds = 12\n[grid]\nlearning-rate = [0.02, 0.03, 0.1, 0.2]\n"


def epsilon_of(run):
    return json.loads((run / "statement.json").read_text())["guarantee"]["epsilon"]


def together_of(out):
    (found,) = json.loads((out / "statement.json").read_text())["together"]
    return found


def interrupted(process, waits, num_lines):
    """Press Ctrl-C when the run that waits has so many lines of metrics; return the status, the output and the processes."""
    seen = set()
    deadline = time.monotonic() + 600
    while len(read_metrics(waits)) < num_lines and process.poll() is None and time.monotonic() < deadline:
        seen.update(psutil.Process(process.pid).children(recursive=True))
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=600)
    return process.returncode, said, seen


@pytest.mark.flwr_run
def test_a_sweep_of_which_runs_fail_and_die_is_interrupted_and_goes_on(begin, write, own_app, tmp_path, monkeypatch):
    """Of four runs one fails, one dies with its process, one ends, and one waits for `HOLD` after five evaluations."""
    hold, out, path = tmp_path / "hold", tmp_path / "out", write(FILE)
    hold.touch()
    monkeypatch.setenv("HOLD", str(hold))
    (own_app / "my_app.py").write_text(STOCK)
    sweep = SweepFolder(out)
    folders = [sweep.of(run) for run in Sweep.read(path).runs]
    *_, ends, waits = folders
    status, said, seen = interrupted(begin(path, "--output-dir", out), waits, 4)
    # The others go on after a failure and a death, and Ctrl-C leaves no process.
    assert status == 130, said
    assert re.search(r"\[1/4\] learning-rate=0.02, seed 0: FAILED: .*told to fail; its log is", said)
    assert "learning-rate=0.03, seed 0: LOST: the process that ran the app ended before the run did; its log is" in said
    assert "[3/4] learning-rate=0.1, seed 0: accuracy 25.0 %" in said
    assert "interrupted by SIGINT; nothing is left running" in said
    assert "Resume it with: flower-dp sweep" in said
    assert [process for process in seen if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    with sweep.locked():
        pass  # by nobody
    assert [is_finished(folder) for folder in folders] == [False, False, True, False]
    assert [row["state"] == "finished" for row in rows(out)] == [False, False, True, False]
    # The others had charged nothing.
    assert epsilon_of(ends) < together_of(out)["epsilon"] < epsilon_of(ends) + epsilon_of(waits)
    kept, done = read_metrics(waits), (ends / "metrics.jsonl").stat().st_mtime_ns
    assert 4 <= len(kept) < 13
    (own_app / "my_app.py").write_text(REPAIRED)
    hold.unlink()
    again = begin(path, "--output-dir", out)
    said, _ = again.communicate(timeout=900)
    # What has failed or died is made again; the other goes on, and no round of it is charged twice.
    assert again.returncode == 0, said
    for text in ("1 of 4 runs have already finished", "3 runs to make, 1 at once", "1 of them from a checkpoint"):
        assert text in said
    now = read_metrics(waits)
    assert now[: len(kept) - 1] == kept[:-1]  # whose evaluation may have been cut
    assert now[-1]["round"] == json.loads((waits / "statement.json").read_text())["guarantee"]["num_charged_rounds"] == 12
    assert {row["state"] for row in rows(out)} == {"finished"}
    assert len({row["process"] for row in rows(out)}) == 2  # a warm process makes all of a time
    assert (out / "table.md").read_text().count(" | 1 | 25.00 | ") == 4
    assert (out / "figure.png").exists()
    assert together_of(out)["runs"] == 4
    assert epsilon_of(ends) < together_of(out)["epsilon"] < 4 * epsilon_of(ends)
    assert (ends / "metrics.jsonl").stat().st_mtime_ns == done


@pytest.fixture
def finished(write, own_app, tmp_path):
    """A sweep of two runs that has ended: its file and its folder."""
    path = write("app = 'mine'\nseeds = 2\n[settings]\nnum-rounds = 12\n")
    folder = SweepFolder(tmp_path / "out")
    with folder.locked():
        folder.keep(path)
    for run in Sweep.read(path).runs:
        finish(folder.of(run), run.config)
    return path, folder


@pytest.mark.usefixtures("no_process")
def test_a_run_with_warnings_says_so_when_it_ends_and_below_the_table(finished):
    path, folder = finished
    plan = Sweep.read(path)
    first = folder.of(plan.runs[0])
    (first / "flower.log").write_text("WARNING :   node 1: too long\nWARNING :   the evaluation of round 5 was left out\n")
    said = []
    results = Results(folder=folder, runs=plan.runs, metric="accuracy")
    sweep._Progress(said.append, results, 1).ended(RunOutcome(run=plan.runs[0], status="completed", details="", seconds=1.0))
    assert ", 2 warnings, 0:01; none left" in said[0]
    status, out = in_this_process(path, "--output-dir", folder.path)
    assert status == 0
    assert f"seed 0: 2 warnings, in {first / 'flower.log'}\n" in out
    # The table may be shown to others; warnings may come of sums without noise, and the log is its owner's alone.
    assert "2 warnings" not in (folder.path / "table.md").read_text()


@pytest.fixture
def no_process(monkeypatch):
    """Let no sweep start one."""
    monkeypatch.setattr(sweep, "Pool", lambda *_, **__: pytest.fail("started"))


def in_this_process(*arguments):
    done = CliRunner().invoke(app, ["sweep", *map(str, arguments)])
    return done.exit_code, done.output


class Failing(AbstractContextManager):
    """Stands for the pool: all runs fail."""

    status, sweep, count = "failed", None, 1

    def __init__(self, *_, **__):
        pass

    def __exit__(self, *_):
        pass

    def make(self, runs, on_end, meanwhile=None):
        # Killed now, the sweep leaves no statement: it would leave out what these runs have charged.
        assert not list(self.sweep.glob("statement.*"))
        for run, _, _ in runs:
            on_end(RunOutcome(run=run, status=self.status, details="told to fail", seconds=1.0))


def test_a_sweep_of_which_runs_fail_says_so_in_the_end(finished, monkeypatch):
    path, folder = finished
    path.write_text(path.read_text().replace("seeds = 2", "seeds = 4"))
    monkeypatch.setattr(sweep, "Pool", Failing)
    monkeypatch.setattr(Failing, "sweep", folder.path)
    status, said = in_this_process(path, "--output-dir", folder.path)
    assert status == 1, said
    assert "[3/4] seed 2: FAILED: told to fail; its log is" in said
    assert "2 of 4 runs failed:\n  seed 2: told to fail\n  seed 3: told to fail\nRepeat the command to try them again.\n" in said
    assert list(folder.path.glob("statement.*"))
    monkeypatch.setattr(Failing, "status", "refused")
    said = in_this_process(path, "--output-dir", folder.path)[1]
    assert "to try them again. A refused run needs its app as it was" in said


def test_bad_settings_start_nothing(write, tmp_path, monkeypatch, capsys):
    """They are checked while the processes start, which make no run and are ended."""
    ended = []

    class Starting(Failing):
        def __exit__(self, *_):
            ended.append(True)

        def make(self, runs, on_end, meanwhile=None):
            pytest.fail("started")

    monkeypatch.setattr(sweep, "Pool", Starting)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["sweep", str(write("[grid]\nbatch-size = [4, 0]")), "--output-dir", str(tmp_path / "out")])
    assert "error: batch-size=0: must be a whole number >= 1 (point batch-size=0)" in capsys.readouterr().err
    assert ended
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_process")
def test_the_commands_are_shown_without_a_folder(write, tmp_path):
    file = write("seeds = [4]\n[grid]\nnum-rounds = [1, 2]")
    status, said = in_this_process(file, "--output-dir", tmp_path / "out", "--dry-run")
    assert status == 0
    assert [line.startswith("flower-dp run --set num-rounds=") for line in said.splitlines()] == [True, True]
    # It writes nothing, and needs no place for it; a sweep does.
    assert in_this_process(file, "--dry-run") == (status, said)
    assert not (tmp_path / "out").exists()
    status, missing = in_this_process(file)
    assert (status, "--output-dir" in missing) == (2, True)


@pytest.mark.usefixtures("no_process")
def test_a_dry_run_names_all_that_would_be_refused(finished, write):
    path, folder = finished
    other = write("app = 'mine'\nseeds = 2\n[settings]\nnum-rounds = 9\n[grid]\nbatch-size = [4, 0]\n", "other.toml")
    status, said = in_this_process(other, "--output-dir", folder.path, "--dry-run")
    assert status == 2
    # A line of each: the settings, and the folder that has runs with others.
    assert "batch-size=0: must be a whole number >= 1 (point batch-size=0)" in said
    assert "was made with num-rounds=12" in said
    assert "flower-dp run" not in said
    assert in_this_process(path, "--output-dir", folder.path, "--dry-run")[0] == 0
