"""The files from which a run goes on: its checkpoints, its ledger, and the secret state of its noise. It knows values alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from flower_dp.privacy.charges import Charges
from flower_dp.privacy.store import Store
from flower_dp.strategies.checkpoint import CUSTOM_LOOP, Checkpoint, CheckpointError, CheckpointFolder, DrawnNoise, metrics_of
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import numpy_arrays

log = logging.getLogger("flwr")

# The server's ledger, beside the checkpoints.
LEDGER = "ledger.sqlite"
# The part of a run's time that writing checkpoints takes at most.
_SHARE = 0.05
# Of the server's own model.
_LARGEST_ARRAY = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlace:
    """Where the checkpoints of a run are, and what is wanted of a run that is there.

    Attributes:
        folder: their folder.
        resume: go on with it.
        statement_only: make its statement, and end there.
    """

    folder: Path
    resume: bool = False
    statement_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run as it was when a round was learnt from (`round_complete` false), or was over."""

    server_round: int
    round_complete: bool
    state: RunState
    arrays: ArrayRecord


class Writer:
    """The checkpoints of one run; without a place nothing is written.

    Between two rounds a snapshot is taken, and written where that takes little of the run's time: from there the run goes on if
    its process is killed. The last snapshot is written whenever the run ends, however it does.

    Attributes:
        place: where they are; None: nowhere.
        found: the checkpoint from which the run goes on; None for a new run.
        resumed: whether it has.
        folder: of the checkpoints, if there is a place.
        result: of the rounds so far; the loop fills it.
        last: the last snapshot.
        answered: the last one after a round with a reply.
        run: the run's id in its ledger; empty without one.

    Args:
        place: where to keep checkpoints.

    Raises:
        CheckpointError: the place has a run that is not to go on, no whole checkpoint of it, or none where one is needed.
    """

    def __init__(self, place: CheckpointPlace | None = None) -> None:
        self.place, self.run = place, ""
        self.found: Checkpoint | None = None
        self.resumed = False
        self.result: Result | None = None
        self.last: Snapshot | None = None
        self.answered: Snapshot | None = None
        self._setting: Mapping[str, str] = {}
        self._written: Snapshot | None = None
        self._began = self._due = time.monotonic()
        if place is None:
            return
        self.folder = CheckpointFolder(place.folder)
        if not self.folder.is_empty:
            if not place.resume:
                raise CheckpointError(f"checkpoint_dir={str(place.folder)!r}: already holds a run; resume=True goes on with it")
            self.found = self.folder.read()
            if (why := self.found.resume_blocker) and not place.statement_only:
                raise CheckpointError(f"{place.folder}: this run can't go on: {why}; a new run needs another folder")
            self._began -= self.found.elapsed
        elif place.statement_only:
            ledger = place.folder / LEDGER
            raise CheckpointError(
                f"{place.folder}: has no checkpoint for a statement; `flower-dp ledger show {ledger}` says what was charged"
            )
        elif place.resume:
            log.info("%s has no checkpoint: a new run begins", place.folder)
        self.folder.create()

    @property
    def statement_only(self) -> bool:
        """Whether the statement of the run alone is wanted."""
        return self.place is not None and self.place.statement_only

    @property
    def has_run(self) -> bool:
        """Whether it is of this run: one that could not go on has its statement, and this process has nothing of it."""
        return self.found is None or self.resumed

    def begin(self, setting: Mapping[str, str]) -> Checkpoint | None:
        """Return the checkpoint from which a run with this setting goes on, None for a new run.

        Args:
            setting: see `Checkpoint`.

        Raises:
            CheckpointError: if the run had another setting.
        """
        if self.found is not None:
            self.found.check(setting)
        self._setting = setting
        return self.found

    def ledger(self) -> Path | None:
        """Return the path of the ledger beside the checkpoints; for a new run it is made. None without a place.

        Raises:
            LedgerError: if it can't be made.
            CheckpointError: it has charges, and there is no checkpoint from which their run could go on.
        """
        if self.place is None:
            return None
        path = self.folder.path / LEDGER
        if self.found is not None:
            return path
        if not path.exists():
            Store.create(path)
            return path
        with Store(path, read_only=True) as ledger:
            charged = ledger.num_charges
        if charged:
            raise CheckpointError(
                f"{path}: has charges of a run without a checkpoint, which can't go on; a new run needs another folder"
            )
        return path

    def noise(self, run: str, charged: Mapping[str, int], secret: Mapping[str, Any]) -> None:
        """Write the secret state of noise; it is on the disk when this returns, before the messages of its round leave.

        Args:
            run: the run's id.
            charged: how often each release was charged, this round included.
            secret: the state, by release.

        Raises:
            OSError: if it can't be written; nothing may be sent then, for noise could be drawn twice.
        """
        if self.place is not None:
            self.folder.write_noise(DrawnNoise(run=run, charged=charged, secret=secret))

    def went_on_with(self, state: RunState) -> None:
        """Note that the run has gone on from the checkpoint that was found, with this state."""
        if self._setting and (found := self.found) is not None:  # where only its last evaluation is left, no other snapshot comes
            self.last = self._written = self.answered = Snapshot(
                server_round=found.server_round, round_complete=found.round_complete, state=_stored(state), arrays=found.model
            )
        self.resumed = True

    # Snapshots

    def keep(self, server_round: int, arrays: ArrayRecord, state: RunState, *, is_over: bool) -> None:
        """Take a snapshot after a round; what was charged before is part of it.

        Raises:
            CheckpointError: if the run was to go on, and a loop of the strategy's own has begun it anew; or the first checkpoint
                can't be written: whoever is charged by a run that is then killed would have no statement.
        """
        if self.found is not None and not self.resumed:
            raise CheckpointError(f"{self.folder.path}: the run there can't go on: {CUSTOM_LOOP}; a new run needs another folder")
        self._take(Snapshot(server_round=server_round, round_complete=is_over, state=state, arrays=arrays))
        if is_over and time.monotonic() >= self._due:
            error = self._write(ended=False)
            if error is not None and self.folder.is_empty:
                raise CheckpointError(f"no checkpoint can be written in {self.folder.path}: {error}") from error

    def evaluated(self, state: RunState) -> None:
        """Clients have evaluated the model of the last snapshot: its state has changed, and their charge is finished."""
        if self.last is not None:
            self._take(replace(self.last, state=state))

    def went_back(self, state: RunState) -> None:
        """Take the snapshot of a run that went back to the last round with a reply, with what was charged since."""
        if self.answered is not None:
            self.last = replace(self.answered, state=_stored(state))

    def close(self, result: Any, state: RunState, *, failed: bool) -> None:
        """Write the last checkpoint: of a run that has ended with its result, of one that has not the last snapshot."""
        if self.last is not None and not failed:
            self.result = result if isinstance(result, Result) else None
            arrays = self.last.arrays if self.result is None else self.result.arrays
            self._take(replace(self.last, round_complete=True, state=state, arrays=arrays))
        if self.last is not self._written:
            self._write(ended=not failed)

    def _take(self, snapshot: Snapshot) -> None:
        self.last = replace(snapshot, state=_stored(snapshot.state))
        if not snapshot.state.unanswered:
            self.answered = self.last

    def _write(self, *, ended: bool) -> OSError | None:
        """Write the last snapshot; return why it could not be written."""
        if self.place is None or self.last is None:
            return None
        now, started = self.last, time.monotonic()
        checkpoint = Checkpoint(
            setting=self._setting,
            server_round=now.server_round,
            round_complete=now.round_complete,
            state=now.state,
            arrays=numpy_arrays(now.arrays, limit=_LARGEST_ARRAY),
            run=self.run,
            elapsed=started - self._began,
            ended=ended,
        )
        if self.result is not None:
            checkpoint = replace(checkpoint, **metrics_of(self.result, now.server_round))
        failed = None
        try:
            self.folder.write(checkpoint)
        except OSError as error:  # the ledger has what was charged
            failed = error
            log.warning("no checkpoint after round %s: %s; the one before it stays", now.server_round, error)
        self._written = now
        self._due = time.monotonic() + (time.monotonic() - started) * (1 - _SHARE) / _SHARE
        return failed


def _stored(state: RunState) -> RunState:
    """Return a state without its charges, of which the ledger has the record."""
    return replace(state, charges=Charges())
