"""Servers and devices that are killed (SIGKILL) or interrupted, at points drawn from all: `python -m tests.crash` kills at more."""

import json
import sys

import pytest

from tests.crash.__main__ import main
from tests.forks import trains_after_a_fork

SEED, POINTS = 11, 2
# A state that learns; noise with a secret state; two releases a round; devices with ledgers and a state of their own; a device that is killed.
NAMES = ["adaptive clip", "DP-FTRL", "private evaluation", "SCAFFOLD", "device, DP-FedPAQ, evaluation"]


@pytest.mark.slow
@trains_after_a_fork
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs pidfd_open and /proc")
@pytest.mark.parametrize("name", NAMES)
def test_the_ledger_never_has_less_than_was_released_and_no_round_is_released_twice(name, tmp_path, capsys):
    words = ["--seed", str(SEED), "--points", str(POINTS), "--times", "0", "--folder", str(tmp_path), "--methods", name]
    status = main(words)
    said = capsys.readouterr().out
    assert status == 0, said
    found = json.loads(said.splitlines()[-1])
    assert (found["holes"], found["seed"]) == (0, SEED)
    assert found["points"] >= POINTS
