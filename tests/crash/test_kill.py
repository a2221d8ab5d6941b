"""Servers and devices that are killed (SIGKILL) or interrupted, at points drawn from all: `python -m tests.crash` kills at more."""

import json
import subprocess
import sys

import pytest

from tests.crash.__main__ import WHOM

SEED, POINTS = 11, 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs pidfd_open and /proc")
def test_the_ledger_never_has_less_than_was_released_and_no_round_is_released_twice(tmp_path):
    words = ["--seed", str(SEED), "--points", str(POINTS), "--times", "0", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash", *words], capture_output=True, text=True, timeout=1750, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["holes"], said["seed"]) == (0, SEED)
    assert said["points"] >= POINTS * len(WHOM)
