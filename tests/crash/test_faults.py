"""Disks that are full, folders that can't be written, clocks that are set back, older copies: noticed, or harmless."""

import os
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.privacy.store import Store
from flower_dp.strategies.checkpoint import CheckpointFolder
from tests.crash import server
from tests.crash.lives import live
from tests.crash.server import NOISE, NUM_NODES, NUM_ROUNDS, SETUPS, Holes, Setup
from tests.crash.witness import Heard
from tests.forks import trains_after_a_fork

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs pidfd_open and /proc"),
    trains_after_a_fork,
]
# Every client in every round: a Poisson cohort may be empty, one of 64 here, and then nobody is asked and no server dies there.
EVERYBODY = replace(SETUPS["DP-FedAvg"], strategy=server.central(sampling=FullSampling()), event=lambda _: GaussianDpEvent(NOISE))


class Case:
    """A run in a folder, one life after the other."""

    def __init__(self, folder: Path, setup: Setup = EVERYBODY) -> None:
        self.folder, self.setup, self.lives = folder / "run", setup, 0
        server.warm(self.setup, folder / "warm")
        server.create(self.setup, self.folder)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def live(self, at: int | None = None, before: Callable[[], object] = lambda: None) -> int:
        self.lives += 1
        life = self.lives

        def body() -> None:
            before()
            server.run(self.setup, self.folder, life, at, often=True)

        return live(body, self.folder / "output", None)

    def die_in(self, server_round: int) -> None:
        """Kill the server when the first messages of a round have left."""
        dies = server.TellingGrid.send_and_receive

        def before() -> None:
            def send(self, messages, **named):
                messages = list(messages)
                self.rounds = getattr(self, "rounds", 0) + any(map(server.asks_to_train, messages))
                replies = dies(self, messages, **named)
                if self.rounds == server_round:
                    os.kill(os.getpid(), 9)
                return replies

            server.TellingGrid.send_and_receive = send

        assert self.live(before=before) == -9

    def sent(self, life: int) -> int:
        return sum(line["life"] == life for line in Heard.of(self.folder / "witness").all("sent"))

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def holes(self, *, ended: bool) -> list[str]:
        holes = Holes()
        server.check_now(self.setup, self.folder, holes)
        if ended:
            server.check_end(self.setup, self.folder, holes)
        return holes.found

    def copy(self, name: str, *files: str) -> Path:
        """Copy the whole folder of checkpoints, or some of its files."""
        to = self.folder.parent / name
        to.mkdir()
        for path in self.checkpoint.iterdir():
            if not files or path.name in files:
                shutil.copy2(path, to)
        return to

    def put_back(self, copy: Path) -> None:
        for path in copy.iterdir():
            shutil.copy2(path, self.checkpoint)


LEDGER = ("ledger.sqlite", "ledger.sqlite-journal")


@pytest.mark.parametrize("size", [12_000, 40_000, 90_000, 130_000])
def test_with_a_full_disk_nothing_is_released_that_is_not_charged(size, tmp_path):
    """No file of this process may be larger: SQLite and the checkpoints meet that at different rounds."""
    case = Case(tmp_path)
    case.live(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)))
    assert case.holes(ended=False) == []
    assert case.live() == 0, case.output()[-2000:]
    assert case.holes(ended=True) == []


@pytest.mark.parametrize(("copied", "last", "files"), [(2, 1, LEDGER), (1, 3, (*LEDGER, "ledger.sqlite.mark"))])
def test_an_older_copy_of_the_ledger_is_noticed(copied, last, files, tmp_path):
    """By the mark of its lock; with that, by the checkpoint."""
    case = Case(tmp_path)
    case.die_in(copied)
    older = case.copy("older", *files)
    case.die_in(last)
    case.put_back(older)
    assert case.live() == 1
    assert "older copy" in case.output()
    assert case.sent(3) == 0


def test_an_older_copy_of_the_checkpoint_loses_rounds_and_no_charge(tmp_path):
    case = Case(tmp_path)
    case.die_in(2)
    older = case.copy("older", "checkpoint.state", "checkpoint.previous.state")
    case.die_in(2)
    case.put_back(older)
    assert case.live() == 0, case.output()[-2000:]
    assert case.holes(ended=True) == []


def test_an_older_copy_of_everything_is_beyond_the_server_and_the_devices_own_budgets_hold(tmp_path):
    """The server asks for rounds 2 and 3 a second time; every device has counted, and sends no more than it agreed to."""
    case = Case(tmp_path, SETUPS["DP-FedPAQ"])
    case.die_in(2)
    older = case.copy("older")
    case.die_in(2)
    case.put_back(older)
    case.live()
    counts = [
        entry.replies for part in range(NUM_NODES) for entry in DeviceLedger(case.folder / f"node-{part}.sqlite").read().values()
    ]
    assert all(count <= NUM_ROUNDS for count in counts)
    (ended,) = list(Heard.of(case.folder / "witness").all("stated"))[-1:]
    assert [line for line in ended["incidents"] if "did not count" in line], ended


def test_an_interrupted_evaluation_of_the_last_round_is_made_up_for_and_ends_the_run(tmp_path):
    """It was not charged: so it is not stated as unfinished, and the run has ended for good when it is made."""
    case = Case(tmp_path, SETUPS["private evaluation"])

    def before() -> None:
        append = Store.append

        def interrupted(self, run, one):
            if (one.release, one.server_round) == (server.EVALUATION, NUM_ROUNDS):
                raise KeyboardInterrupt
            append(self, run, one)

        Store.append = interrupted

    assert case.live(before=before) == 1
    assert case.live() == 0, case.output()[-2000:]
    assert case.holes(ended=True) == []
    checkpoint = CheckpointFolder(case.checkpoint).read()
    assert checkpoint.ended
    assert NUM_ROUNDS in checkpoint.state.evaluations
