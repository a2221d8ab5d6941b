"""Processes whose launcher is gone while Ray starts."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

# A Ray that never has started, and hears no signal, as its own code while it waits for a process of its own.
STUCK = """
import os, signal, time
from types import SimpleNamespace
from pathlib import Path

_private = SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=False))

def is_initialized():
    return False

def init(**_):
    signal.signal(signal.SIGTERM, lambda *_: None)
    Path(os.environ["STUCK_AT"]).touch()
    while True:
        time.sleep(1)
"""
SECONDS = 60.0


@pytest.fixture
def stuck(tmp_path):
    """Return the environment in which Ray gets stuck, and a function that waits until it has."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ray.py").write_text(STUCK)
    there = tmp_path / "there"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "modules"), "STUCK_AT": str(there)}

    def until_stuck():
        deadline = time.monotonic() + SECONDS
        while not there.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return environment, until_stuck


def test_a_lane_ends_with_its_orders(stuck, tmp_path):
    environment, until_stuck = stuck
    command = [sys.executable, "-P", "-m", "flower_dp.simulation.lane", "1", "0.0", str(tmp_path)]
    lane = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    try:
        until_stuck()
        lane.stdin.close()
        lane.wait(SECONDS)
    finally:
        lane.kill()
        lane.wait()


def test_the_process_of_a_run_ends_with_its_launcher(stuck, tmp_path):
    environment, until_stuck = stuck
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname='a'\nversion='1'\n[tool.flwr.app]\npublisher='p'\n"
        "[tool.flwr.app.components]\nserverapp='theirs:server'\nclientapp='theirs:client'\n"
    )
    (tmp_path / "theirs.py").write_text(
        "from flwr.serverapp import ServerApp\nfrom flwr.clientapp import ClientApp\nserver = ServerApp()\nclient = ClientApp()\n"
    )
    request = {"folder": str(tmp_path), "overrides": {}, "num_workers": 1, "num_nodes": 1, "gpus_per_worker": 0.0}
    request |= {
        "ray_folder": str(tmp_path),
        "ray_address": "",
        "only_state": False,
        "outcome": str(tmp_path / "outcome"),
        "go": "",
    }
    launcher = (
        "import json, os, subprocess, sys\n"
        f"request = json.loads({json.dumps(json.dumps(request))}) | dict(launcher=os.getpid())\n"
        f"open({str(tmp_path / 'request')!r}, 'w').write(json.dumps(request))\n"
        f"command = [sys.executable, '-P', '-m', 'flower_dp.simulation.process', {str(tmp_path / 'request')!r}]\n"
        "run = subprocess.Popen(command)\n"
        "print(run.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    run = int(started.stdout.readline())
    try:
        until_stuck()
        # The launcher ends with its input. Its output has an end in the process of the run too, and is closed once both are gone.
        started.communicate(timeout=SECONDS)
    finally:
        started.kill()
        with suppress(ProcessLookupError):
            os.kill(run, signal.SIGKILL)
