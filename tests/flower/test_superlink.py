"""Plain `flwr run`: it releases what a grid in one process does, and its harness leaves no process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load

from flower_dp.running.guard import short_folder
from tests.contract_runs import SEED, run_of
from tests.contracts import METHODS, Words
from tests.flower.processes import ProcessTree
from tests.flower.superlink import flwr_run

FOREIGN = Path(__file__).parents[1] / "foreign"


def _wait_for(path):
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return psutil.Process(int(path.read_text()))


def test_a_child_in_its_own_session_whose_parent_is_gone_is_ended(tmp_path):
    # The root starts a child in a session of its own and leaves; nobody looked while it lived.
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(300)"
    root = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    mark = ("FLOWER_DP_MARK", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", root], env=os.environ | dict([mark])) as process:
        tree = ProcessTree(mark)
        tree.add(process.pid)
        stray = _wait_for(tmp_path / "child")
        process.wait()
    tree.end()
    assert not stray.is_running() or stray.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_hides_its_environment_is_ended_if_it_was_seen(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(300)"
    root = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True, env={{}});"
        "sys.stdin.read()"
    )
    tree = ProcessTree(("FLOWER_DP_MARK", str(tmp_path)))
    with subprocess.Popen([sys.executable, "-c", root], stdin=subprocess.PIPE) as process:
        tree.add(process.pid)
        stray = _wait_for(tmp_path / "child")
        tree.remember_descendants()
    assert process.returncode == 0
    assert stray in set(tree.alive())
    tree.end()
    assert not stray.is_running() or stray.status() == psutil.STATUS_ZOMBIE


def test_who_ignores_sigterm_is_killed_and_a_stranger_lives(tmp_path):
    deaf = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(tmp_path / 'deaf')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(300)"
    )
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    process = subprocess.Popen([sys.executable, "-c", deaf])
    try:
        _wait_for(tmp_path / "deaf")
        tree = ProcessTree(("FLOWER_DP_MARK", str(tmp_path)))
        tree.add(process.pid)
        tree.end(grace=0.2)
        assert process.wait() == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.flwr_run
def test_plain_flwr_run_releases_the_bits_of_a_grid_in_one_process(tmp_path, request):
    """With fixed noise and the same data; the app's run folder is where the app says, or in the user's home."""
    place = short_folder()
    request.addfinalizer(partial(shutil.rmtree, place, ignore_errors=True))
    overrides = {"label": "dp-fedsam distributed", "fail": False}
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(FOREIGN.parents[1]), "OMP_NUM_THREADS": "1"}
    ended = flwr_run(FOREIGN / "seeded", place, overrides, num_supernodes=2, environment=environment)
    assert ended.status == "completed", ended.log
    (folder,) = (tmp_path / ".flower-dp" / "runs").iterdir()
    (method,) = [method for method in METHODS if method.label == "dp-fedsam distributed"]
    alone = run_of(method, Words(noise_seed=SEED), num_nodes=2, noise_seed=SEED)
    (weights,) = load((folder / "model.safetensors").read_bytes()).values()
    assert weights.tobytes() == alone.bits[-1]
    assert (folder / "statement.txt").read_text() == f"{alone.strategy.statement}\n"
    assert tomllib.loads((folder / "run-config.toml").read_text())["label"] == method.label
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["replies"] for row in rows[1:]] == [report.replies for report in alone.strategy.rounds]
