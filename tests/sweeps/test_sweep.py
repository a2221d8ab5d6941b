"""Sweeps that are really made: failures, interruptions, and what goes on afterwards."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from flower_dp.running.run_folder import is_finished, read_metrics
from flower_dp.sweeps.folder import SweepFolder
from flower_dp.sweeps.sweep import Sweep
from tests.sweeps.conftest import MODULE

GOOD = "0.1"


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run `flower-dp sweep` in a process of its own, as a user does."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    begun = []

    def begin(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "flower_dp.cli.main", "sweep", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        begun.append(process)
        return process

    def run(*arguments):
        process = begin(*arguments)
        out, _ = process.communicate(timeout=900)
        return process.returncode, out

    run.begin = begin
    yield run
    for process in begun:  # of a test that has failed
        process.kill()
        process.communicate()


def rows(folder):
    return list(csv.DictReader((folder / "results.csv").read_text().splitlines()))


@pytest.mark.flwr_run
def test_a_run_that_fails_or_dies_is_told_and_the_others_go_on(call, write, own_app, tmp_path):
    text = "app = 'mine'\nseeds = 1\nat-once = 1\n[grid]\nlearning-rate = [0.03, 0.02, 0.1]\n"
    path, out = write(text), tmp_path / "out"
    status, said = call(path, "--output-dir", out)
    assert status == 1, said
    assert "learning-rate=0.03, seed 0: LOST: the process that ran the app ended before the run did; its log is" in said
    assert re.search(r"learning-rate=0.02, seed 0: FAILED: .*told to fail; its log is", said)
    assert "[3/3] learning-rate=0.1, seed 0: accuracy 25.0 %" in said
    assert "2 of 3 runs failed:" in said
    found = rows(out)
    assert [row["state"] == "finished" for row in found] == [False, False, True]
    (together,) = json.loads((out / "statement.json").read_text())["together"]
    alone = json.loads((out / found[2]["folder"] / "statement.json").read_text())["epsilon"]
    assert together["epsilon"] == pytest.approx(alone)  # the others had charged nothing
    # What has been repaired goes on, seeds are added, and what had finished stays as it was.
    (own_app / "my_app.py").write_text(MODULE.replace("0.02, 0.03", "0, 0"))
    before = (out / found[2]["folder"] / "metrics.jsonl").stat().st_mtime_ns
    status, said = call(write(text.replace("seeds = 1", "seeds = 2")), "--output-dir", out)
    assert status == 0, said
    assert "1 of 6 runs have finished before" in said
    assert (out / found[2]["folder"] / "metrics.jsonl").stat().st_mtime_ns == before
    found = rows(out)
    assert {row["state"] for row in found} == {"finished"}
    assert len({row["process"] for row in found}) == 2  # one warm process has made all of the second time
    assert "| 2 | 30 ± 7.1 |" in (out / "table.md").read_text()
    assert (out / "figure.png").exists()
    (together,) = json.loads((out / "statement.json").read_text())["together"]
    assert together["runs"] == 6
    assert 2 * alone < together["epsilon"] < 6 * alone


@pytest.mark.flwr_run
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_an_interrupted_sweep_goes_on(call, write, own_app, tmp_path, monkeypatch, signum):
    """Its second run waits in round 5, so that it is not over before it is interrupted."""
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("HOLD", str(hold))
    path = write("app = 'mine'\nat-once = 1\nseeds = 2\n[settings]\nnum-rounds = 12\n")
    out = tmp_path / "out"
    runs = Sweep.read(path).runs
    first, second = (SweepFolder(out).of(run) for run in runs)
    process = call.begin(path, "--output-dir", out)
    deadline = time.monotonic() + 600
    while len(read_metrics(second)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signum)
    said, _ = process.communicate(timeout=600)
    if signum == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted by SIGINT; nothing is left running" in said
        assert "It goes on with: flower-dp sweep" in said
    while time.monotonic() < deadline:  # a killed sweep's lane ends by itself
        try:
            with SweepFolder(out).locked():
                break
        except ValueError:
            time.sleep(0.1)
    hold.unlink()
    kept = read_metrics(second)
    assert 4 <= len(kept) < 13
    assert is_finished(first)
    assert not is_finished(second)
    assert (second / "statement.txt").exists()
    done = (first / "metrics.jsonl").stat().st_mtime_ns
    status, said = call(path, "--output-dir", out)
    assert status == 0, said
    assert "1 runs to make, 1 at once" in said
    assert "1 of them from a checkpoint" in said
    assert (first / "metrics.jsonl").stat().st_mtime_ns == done
    now = read_metrics(second)
    assert now[: len(kept) - 1] == kept[:-1]  # whose evaluation may have been cut
    assert now[-1]["round"] == 12
    assert json.loads((second / "statement.json").read_text())["num_rounds"] == 12  # no round was charged twice
    # Nothing is left to do, and nothing is started.
    status, said = call(path, "--output-dir", out)
    assert (status, "to make" in said) == (0, False)
    assert "2 of 2 runs have finished before" in said
    # Another seed may be added, other settings not.
    changed = write(path.read_text().replace("num-rounds = 12", "num-rounds = 3"), "changed.toml")
    status, said = call(changed, "--output-dir", out)
    assert status == 2
    assert "was made with num-rounds=12 (now 3)" in said


def test_bad_settings_start_nothing(call, write, tmp_path):
    status, said = call(write("[grid]\nbatch-size = [4, 0]"), "--output-dir", tmp_path / "out")
    assert status == 2
    assert "error: batch-size=0: must be a whole number >= 1 (point batch-size=0)" in said
    assert not (tmp_path / "out").exists()


def test_the_commands_are_shown_without_a_folder(call, write, tmp_path):
    status, said = call(write("seeds = [4]\n[grid]\nnum-rounds = [1, 2]"), "--output-dir", tmp_path / "out", "--dry-run")
    assert status == 0
    assert [line for line in said.splitlines() if line.startswith("flower-dp run --set num-rounds=")] == said.splitlines()
    assert len(said.splitlines()) == 2
    assert not (tmp_path / "out").exists()
