"""The writer of the files from which a run resumes: its checkpoints, its ledger, and the secret state of its noise."""

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

# The file name of the server's ledger, beside the checkpoints.
LEDGER = "ledger.sqlite"
# The maximum fraction of a run's time for writing checkpoints: without a limit, large models and quick rounds would wait for it.
_SHARE = 0.05
# Bytes of an array in a checkpoint: practically no limit, since the model is the server's own.
_LARGEST_ARRAY = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlace:
    """The place of a run's checkpoints, and the use of a run that is there already.

    Attributes:
        folder: folder of the checkpoints.
        resume: whether to resume the run.
        statement_only: whether to make only its statement.
    """

    folder: Path
    resume: bool = False
    statement_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run after a round's model (`round_complete` false), or after the whole round."""

    server_round: int
    round_complete: bool
    state: RunState
    arrays: ArrayRecord


class Writer:
    """The checkpoints of one run; without a place nothing is written.

    Between two rounds the writer takes a snapshot, and writes it if that takes little of the run's time. If the process is
    killed, the run resumes from there. However the run ends, the writer writes the last snapshot.

    Attributes:
        place: place of the checkpoints; None: nowhere.
        found: checkpoint from which the run resumes; None for a new run.
        resumed: whether the run has resumed from it.
        folder: folder of the checkpoints, if there is a place.
        result: result of the rounds so far; the loop fills it.
        last: the last snapshot.
        answered: the last snapshot after a round with a reply.
        run: the run's id in its ledger; empty without one.

    Args:
        place: place for the checkpoints.

    Raises:
        CheckpointError: if the place has a run that may not be resumed, no whole checkpoint of it, or none although one is
            needed.
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
                raise CheckpointError(f"checkpoint_dir={str(place.folder)!r}: already holds a run; resume=True resumes it")
            self.found = self.folder.read()
            if (why := self.found.resume_blocker) and not place.statement_only:
                raise CheckpointError(f"{place.folder}: this run can't be resumed: {why}; a new run needs another folder")
            self._began -= self.found.elapsed
        elif place.statement_only:
            ledger = place.folder / LEDGER
            raise CheckpointError(
                f"{place.folder}: has no checkpoint for a statement; `flower-dp ledger show {ledger}` says what was charged"
            )
        elif place.resume:
            log.info("A new run starts: %s has no checkpoint", place.folder)
        self.folder.create()

    @property
    def statement_only(self) -> bool:
        """Whether to make only the run's statement."""
        return self.place is not None and self.place.statement_only

    @property
    def has_run(self) -> bool:
        """Whether the checkpoints belong to this run; false if the run there could not be resumed by this process."""
        return self.found is None or self.resumed

    def begin(self, setting: Mapping[str, str]) -> Checkpoint | None:
        """Return the checkpoint from which a run with this setting resumes; None for a new run.

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
        """Return the path of the ledger beside the checkpoints, and create it for a new run. Return None without a place.

        Raises:
            LedgerError: if it can't be created.
            CheckpointError: if it has charges, and there is no checkpoint from which their run could resume.
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
                f"{path}: has charges of a run without a checkpoint, which can't be resumed; a new run needs another folder"
            )
        return path

    def noise(self, run: str, charged: Mapping[str, int], secret: Mapping[str, Any]) -> None:
        """Write the secret state of noise; it is on the disk when this returns, before the messages of its round leave.

        Args:
            run: the run's id.
            charged: number of charges by release, this round included.
            secret: the state, by release.

        Raises:
            OSError: if it can't be written; nothing may be sent then, since noise could be drawn twice.
        """
        if self.place is not None:
            self.folder.write_noise(DrawnNoise(run=run, charged=charged, secret=secret))

    def record_resume(self, state: RunState) -> None:
        """Note that the run has resumed from its checkpoint, with this state."""
        # This is the only snapshot of a run whose last evaluation alone is left.
        if self._setting and (old := self.found) is not None:
            self.last = self._written = self.answered = Snapshot(
                server_round=old.server_round, round_complete=old.round_complete, state=_stored(state), arrays=old.model
            )
        self.resumed = True

    # Snapshots

    def keep(self, server_round: int, arrays: ArrayRecord, state: RunState, *, round_complete: bool) -> None:
        """Take a snapshot after a round, with all charges before it.

        Raises:
            CheckpointError: if a custom loop restarted a run that had to be resumed. If the first checkpoint can't be written:
                after a kill, clients would be charged without a statement.
        """
        if self.found is not None and not self.resumed:
            raise CheckpointError(
                f"{self.folder.path}: the run there can't be resumed: {CUSTOM_LOOP}; a new run needs another folder"
            )
        self._take(Snapshot(server_round=server_round, round_complete=round_complete, state=state, arrays=arrays))
        if round_complete and time.monotonic() >= self._due:
            error = self._write(ended=False)
            if error is not None and self.folder.is_empty:
                raise CheckpointError(f"{self.folder.path}: no checkpoint can be written: {error}") from error

    def evaluated(self, state: RunState) -> None:
        """Update the state of the last snapshot, whose model clients have now evaluated: their charge is finished."""
        if self.last is not None:
            self._take(replace(self.last, state=state))

    def went_back(self, state: RunState) -> None:
        """Take the snapshot of a run that returned to the last round with a reply, with everything charged since."""
        if self.answered is not None:
            self.last = replace(self.answered, state=_stored(state))

    def close(self, result: Any, state: RunState, *, failed: bool) -> None:
        """Write the last checkpoint: with the result if the run has ended, else the last snapshot."""
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
        except OSError as error:  # the run continues: the ledger has its charges
            failed = error
            log.warning("No checkpoint after round %s: %s; the previous one stays", now.server_round, error)
        self._written = now
        # Writing took t, so the next write waits t (1 - share) / share: writing then takes at most this share of the time.
        self._due = time.monotonic() + (time.monotonic() - started) * (1 - _SHARE) / _SHARE
        return failed


def _stored(state: RunState) -> RunState:
    """Return a state without its charges, of which the ledger has the record."""
    return replace(state, charges=Charges())
