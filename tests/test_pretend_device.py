"""This package's clients on a device that is no CPU, without one: every method, both engines, records on the device and off it.

The tests are in tests/pretended, and run in processes of their own: once torch has the pretend device, it starts threads for it, and
no process that has been forked can train any more.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["methods", "parts"])
def test_clients_train_on_a_pretend_device_as_on_the_cpu(name):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/pretended/{name}.py"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout or done.stdout.rstrip().endswith("[100%]")
