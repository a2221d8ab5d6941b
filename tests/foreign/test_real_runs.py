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
from safetensors.numpy import load

from flower_dp.running.run_folder import RESULTS
from tests.contract_runs import SEED, run_of
from tests.contracts import METHODS, Words

HERE = Path(__file__).resolve().parent
# Ray can't give every worker a title of its own: where the first variable of its environment has changed, it keeps its command.
PROCESSES = {
    "ray": (r"flower_dp\.simulation\.process", r"ray::Worker|default_worker\.py"),
    "flower": ("flower-superlink", "flwr-simulation"),
}
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

    def assert_nothing_left(self, engine):
        names = " ".join(self.seen.values())
        assert all(re.search(name, names) for name in (*PROCESSES[engine], "raylet"))  # the watching worked
        assert self.left == []
        rooms = set(re.findall(r"\S+/flower-dp-[^/ ]+(?=/(?:overrides\.toml|request\.json))", names))
        assert rooms
        assert not any(Path(room).exists() for room in rooms)


def flower_dp_run(tmp_path, app, *arguments, stop_at=None):
    """Run the real command to its end, or send it a signal when its output has a text; watch what it starts."""
    out, err = tmp_path / "out", tmp_path / "err"
    home = tmp_path / "home"
    home.mkdir()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = psutil.Popen(
            [sys.executable, "-m", "flower_dp.cli.main", "run", str(HERE / app), "--workers", "1", *arguments],
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
    run = flower_dp_run(tmp_path, "pytorch", "--supernodes", "4", "--output-dir", "run")
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
    assert "did not count" not in log  # the clients found data/shape.csv
    assert "num-server-rounds = 2" in (tmp_path / "run" / "run-config.toml").read_text()


@pytest.mark.parametrize(("engine", "fail"), [("ray", True), ("flower", False)])
def test_both_engines_release_the_bits_of_a_grid_in_one_process(tmp_path, engine, fail):
    """With fixed noise and the same data both leave what one process makes of them; one app fails afterwards, and its run says so."""
    app = tmp_path / "app"
    shutil.copytree(HERE / "seeded", app)
    connections = '\n[tool.flwr.federations]\ndefault = "remote"\n\n[tool.flwr.federations.remote]\naddress = "example.org:9093"\ninsecure = true\n'
    before = (app / "pyproject.toml").read_text() + connections
    (app / "pyproject.toml").write_text(before)
    (app / "config.toml").write_text("of = 'the app'")
    greeting = """a 'b' "c" = d"""
    settings = ("--set", f"greeting={greeting}", "--set", f"fail={str(fail).lower()}")
    run = flower_dp_run(tmp_path, app, "--supernodes", "2", "--engine", engine, *settings, "--output-dir", "results")
    # Flower's migration would take the connections into a home that is gone by now.
    assert (app / "pyproject.toml").read_text() == before
    folder = tmp_path / "results"
    log = (folder / "flower.log").read_text()
    assert ("igration completed" in log) == (engine == "flower")
    if fail:
        assert run.status == 1
        assert run.err.startswith("error: the run failed: RuntimeError: the seeded app was told to fail\n")
        assert f"What it released before is in {folder / 'statement.txt'}" in run.err
    else:
        assert (run.status, run.err) == (0, "")
        assert {path.name for path in folder.iterdir()} == set(RESULTS)
    assert ("Traceback" in log) == fail
    assert "\x1b" not in log
    lines = run.out.splitlines()
    assert rounds_in(lines) == ["0/3", "1/3", "2/3", "3/3"]
    if fail:
        # Flower's log before them, and from then on one of the warnings that are always shown.
        (first, *_) = (at for at, line in enumerate(lines) if line.startswith("round "))
        (warning,) = (line for line in lines[first:] if not line.startswith("round "))
        assert "one round teaches little" in warning
    assert not list(app.glob("**/__pycache__"))
    run.assert_nothing_left(engine)
    # What it has released.
    (method,) = [method for method in METHODS if method.label == "dp-fedsam distributed"]
    alone = run_of(method, Words(noise_seed=SEED), num_nodes=2, noise_seed=SEED)
    (weights,) = load((folder / "model.safetensors").read_bytes()).values()
    assert weights.tobytes() == alone.bits[-1]
    assert (folder / "statement.txt").read_text() == f"{alone.strategy.statement}\n"
    told = {"label": method.label, "greeting": greeting, "fail": fail}
    assert tomllib.loads((folder / "run-config.toml").read_text()) == told
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["replies"] for row in rows[1:]] == [report.replies for report in alone.strategy.rounds]
    assert [[row[key] for key in ("round", "epsilon", "delta")] for row in rows] == [
        [0, 0.0, 1e-3],
        *([at, None, 1e-3] for at in (1, 2, 3)),
    ]


# Interruptions, of an app that pauses after each of many rounds

SLOW = ("--supernodes", "2", "--set", "num-rounds=1000", "--set", "pause=0.2", "--output-dir", "results")


def test_an_interrupted_run_leaves_nothing_running(tmp_path):
    """With Flower's engine, which starts more; with ours sweeps and scripts are interrupted in their own tests."""
    run = flower_dp_run(tmp_path, "tiny", "--engine", "flower", *SLOW, stop_at=("round 2/1000", signal.SIGINT))
    assert run.status == 130, run.out + run.err
    assert "interrupted by SIGINT; nothing is left running" in run.err
    run.assert_nothing_left("flower")


def test_the_process_of_a_run_ends_when_the_command_is_killed(tmp_path):
    """It does not train on unseen, and the ledger of the run is free for the one who resumes."""
    run = flower_dp_run(tmp_path, "tiny", *SLOW, stop_at=("round 2/1000", signal.SIGKILL))
    assert run.status == -signal.SIGKILL, run.out + run.err
    deadline = time.monotonic() + 200
    while left := run.left:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
