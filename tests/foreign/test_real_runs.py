"""The real `flower-dp run` on apps of other people: what it leaves, what it says, and that it leaves no process running."""

import json
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flower_dp.running.run_folder import RESULTS
from tests.contract_runs import assert_left_by, seeded_run
from tests.torch_free import module

HERE = Path(__file__).resolve().parent
# Ray can't give every worker a title of its own: where the first variable of its environment has changed, it keeps its command.
PROCESSES = (r"flower_dp\.cli\.entry", r"ray::Worker|default_worker\.py", "raylet")
pytestmark = pytest.mark.flwr_run


@dataclass(frozen=True)
class Ended:
    """A command that has ended, and the command lines of the processes that it had started."""

    status: int
    out: str
    err: str
    seen: dict[psutil.Process, str]

    @property
    def left(self):
        return [name for process, name in self.seen.items() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def assert_nothing_left(self):
        names = " ".join(self.seen.values())
        assert all(re.search(name, names) for name in PROCESSES)  # the watching worked
        assert self.left == []
        rooms = set(re.findall(r"/[^ =]*/flower-dp-[^/ ]+", names))
        assert len(rooms) == 1
        assert not any(Path(room).exists() for room in rooms)


def flower_dp_run(tmp_path, app, *arguments, stop_at=None):
    """Run the real command to its end, or send it a signal when its output has a text; watch what it starts."""
    out, err = tmp_path / "out", tmp_path / "err"
    home = tmp_path / "home"
    home.mkdir()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = psutil.Popen(
            [sys.executable, "-m", "flower_dp.cli.entry", "run", str(HERE / app), "--workers", "1", *arguments],
            stdout=stdout,
            stderr=stderr,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "HOME": str(home), "OMP_NUM_THREADS": "1"},
        )
    seen = {}
    while command.poll() is None:
        with suppress(psutil.Error):
            for process in command.children(recursive=True):
                with suppress(psutil.Error):
                    line = " ".join(process.cmdline())  # it changes: of a process that was just forked, or of a worker of Ray
                    if line and line not in seen.get(process, ""):
                        seen[process] = f"{seen.get(process, '')} {line}".strip()
        if stop_at is not None and stop_at[0] in out.read_text():
            command.send_signal(stop_at[1])
            stop_at = None
        time.sleep(0.2)
    return Ended(command.returncode, out.read_text(), err.read_text(), seen)


def rounds_in(lines):
    return [line.split()[1] for line in lines if line.startswith("round ")]


def test_a_stock_pytorch_app_keeps_its_files_and_its_log(tmp_path):
    before = sorted(path.name for path in (HERE / "pytorch").iterdir())
    run = flower_dp_run(tmp_path, "pytorch", "--output-dir", "run")
    assert (run.status, run.err) == (0, ""), run.out + run.err
    lines = run.out.splitlines()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(["final_model.pt", *RESULTS])
    assert sorted(path.name for path in (HERE / "pytorch").iterdir()) == before
    # The app's log until the first round, then the rounds. Every line once, no debugging, no traceback of the client query.
    assert lines.count("Privacy statement: DP-FedAvg") == 1
    assert [line for line in lines if line.startswith(("DEBUG", "Traceback", "ERROR")) or "Traceback (most" in line] == []
    assert rounds_in(lines) == ["0/2", "1/2", "2/2"]
    log = (tmp_path / "run" / "flower.log").read_text()
    assert log.count("[ROUND 2/2]") == 1
    assert log.count("4 SuperNodes, one per client") == 1
    assert "did not count" not in log  # the clients found data/shape.csv
    assert "num-server-rounds = 2" in (tmp_path / "run" / "run-config.toml").read_text()


@pytest.mark.parametrize("fail", [True, False])
def test_a_run_releases_the_bits_of_a_grid_in_one_process(tmp_path, fail):
    """With fixed noise and the same data it leaves what one process makes of them; if the app fails afterwards, the run says so."""
    app = tmp_path / "app"
    shutil.copytree(HERE / "seeded", app)
    (app / "config.toml").write_text("of = 'the app'")
    before = {path.name: path.read_bytes() for path in app.iterdir() if path.is_file()}
    greeting = """a 'b' "c" = d"""
    settings = ("--set", f"greeting={greeting}", "--set", f"fail={str(fail).lower()}")
    run = flower_dp_run(tmp_path, app, "--supernodes", "2", *settings, "--output-dir", "results")
    assert {path.name: path.read_bytes() for path in app.iterdir()} == before
    folder = tmp_path / "results"
    log = (folder / "flower.log").read_text()
    assert run.status == fail
    if fail:
        assert run.err.startswith("error: the run failed: RuntimeError: the seeded app was told to fail\n")
        assert f"The statement of everything released so far is {folder / 'statement.txt'}" in run.err
    else:
        assert run.err == ""
        assert {path.name for path in folder.iterdir()} == set(RESULTS)
    assert ("Traceback" in log) == fail
    assert "\x1b" not in log
    lines = run.out.splitlines()
    assert rounds_in(lines) == ["0/3", "1/3", "2/3", "3/3"]
    # Flower's log before them, and from then on one of the warnings that are always shown.
    assert not lines[0].startswith("round ")
    assert any("one round teaches little" in line for line in lines)
    run.assert_nothing_left()
    # What it has released.
    assert_left_by(seeded_run("dp-fedsam distributed"), folder)
    told = {"label": "dp-fedsam distributed", "greeting": greeting, "fail": fail}
    assert tomllib.loads((folder / "run-config.toml").read_text()) == told
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == [0.0, None, None, None]  # noise from a seed protects nobody


# Interruptions, of an app that pauses after each of many rounds

SLOW = ("--supernodes", "2", "--set", "num-rounds=1000", "--set", "pause=0.2", "--output-dir", "results")


def test_an_interrupted_run_leaves_nothing_running(tmp_path):
    run = flower_dp_run(tmp_path, "tiny", *SLOW, stop_at=("round 2/1000", signal.SIGINT))
    assert run.status == 130, run.out + run.err
    assert "interrupted by SIGINT; nothing is left running" in run.err
    run.assert_nothing_left()


ENDS = """
import os
import signal
import sys
import time


def evaluate(server_round, arrays):
    if server_round == 2:
        END
    return MetricRecord({"accuracy": 0.5})
"""
APP = (
    "[project]\nname='mine'\nversion='1'\n[tool.flwr.app]\npublisher='me'\n[tool.flwr.app.config]\nnum-rounds=4\n"
    "[tool.flwr.app.components]\nserverapp='mine:server'\nclientapp='mine:client'\n"
)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process that ran the app ended before the run did"),
        ("sys.exit(0)", "the run failed: SystemExit: 0"),
    ],
)
def test_an_app_that_ends_the_process_leaves_a_statement_and_the_run_goes_on(tmp_path, end, told):
    app = tmp_path / "mine"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    (app / "mine.py").write_text(module(ENDS.replace("END", end), num_clients=1))
    run = flower_dp_run(tmp_path, app, "--output-dir", "run")
    assert run.status == 1, run.out + run.err
    assert told in run.err
    folder = tmp_path / "run"
    assert f"The statement of everything released so far is {folder}/statement.txt\n" in run.err
    assert f"resume it with: flower-dp run --resume {folder}" in run.err
    assert json.loads((folder / "statement.json").read_text())["guarantee"]["num_charged_rounds"] == 2
    run.assert_nothing_left()


def test_the_process_of_a_run_ends_when_the_command_is_killed(tmp_path):
    """It does not train on unseen, and the ledger of the run is free for the one who resumes."""
    run = flower_dp_run(tmp_path, "tiny", *SLOW, stop_at=("round 2/1000", signal.SIGKILL))
    assert run.status == -signal.SIGKILL, run.out + run.err
    deadline = time.monotonic() + 200
    while left := run.left:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
