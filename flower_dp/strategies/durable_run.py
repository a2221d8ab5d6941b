"""A run that outlives its process: every charge is on the disk before its messages leave, and checkpoints follow the rounds."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from flower_dp.privacy.charge import Charge
from flower_dp.strategies.checkpoint import Checkpoint, CheckpointError, CheckpointFolder, metrics_of
from flower_dp.strategies.durable import Durable, InMemory
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import numpy_arrays

log = logging.getLogger("flwr")

# The part of a run's time that writing checkpoints takes at most.
_SHARE = 0.05
# Of the server's own model.
_LARGEST_ARRAY = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a checkpoint will have: the run as it was when a round was learnt from, or was over.

    Attributes:
        server_round: the round; 0 before the first.
        is_over: whether it was evaluated as well, and told to everyone.
        state: of the run.
        arrays: the model.
    """

    server_round: int
    is_over: bool
    state: RunState
    arrays: ArrayRecord


class DurableRun:
    """One run's charges and checkpoints; without a folder it is in memory alone.

    Attributes:
        found: the checkpoint from which the run goes on; None for a new run.
        went_on: whether the strategy has gone on from there.
        setting: what the run must have again to go on (`Checkpoint.setting`).
        result: of the rounds so far, which the loop fills.
        unfinished: what was charged since the last snapshot, with the rounds.

    Args:
        folder: of the checkpoints; None: nowhere.
        ledger: where charges are written down.
        resume: go on with the run in the folder, if there is one.

    Raises:
        CheckpointError: the folder has a run and `resume` is false, or no checkpoint of the run is whole.
    """

    def __init__(
        self, folder: CheckpointFolder | None = None, ledger: Durable | None = None, *, resume: bool = False
    ) -> None:
        self._folder, self._ledger = folder, ledger or InMemory()
        self.found: Checkpoint | None = None
        self.went_on = False
        self.setting: Mapping[str, str] = {}
        self.result: Result | None = None
        self.unfinished: list[tuple[Charge, int]] = []
        self._last: Snapshot | None = None
        self._written: Snapshot | None = None
        self._num_charges = 0
        self._began = self._due = time.monotonic()
        if folder is None:
            return
        folder.create()
        if not folder.is_empty:
            if not resume:
                raise CheckpointError(
                    f"checkpoint_dir={str(folder.path)!r}: already holds a run; resume=True goes on with it"
                )
            self.found = folder.read()
            self._num_charges = self.found.num_charges
            self._began -= self.found.elapsed
        elif resume:
            log.info("%s has no checkpoint: a new run begins", folder.path)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken."""
        return time.monotonic() - self._began

    def begin(self, setting: Mapping[str, str]) -> Checkpoint | None:
        """Begin the rounds of a run with this setting; return the checkpoint from which it goes on, None for a new run.

        Raises:
            CheckpointError: if the run can't go on with this setting.
        """
        if self.found is not None:
            self.found.check(setting)
        self.setting = setting
        return self.found

    def charge(self, charge: Charge, server_round: int) -> None:
        """Write a charge down, on the disk when this returns: no message of its round has left before.

        Raises:
            LedgerError: if it could not be written; nothing may be released then.
        """
        self.unfinished.append((charge, server_round))
        try:
            self._ledger.charge(charge, server_round)
        except Exception:  # not an interruption: then it may be on the disk
            self.unfinished.pop()
            raise

    def charged_after(self, found: Checkpoint) -> list[tuple[Charge, int]]:
        """Return what was charged after a checkpoint, with the rounds."""
        return []

    def keep(self, snapshot: Snapshot, *, write: bool = True) -> None:
        """Take a snapshot; the charges before are part of it.

        A round that is over is written if that takes little of the run's time: it is the last one from which the run goes on if
        the process is killed.
        """
        self._num_charges += len(self.unfinished)
        self._last, self.unfinished = snapshot, []
        if write and self._folder is not None and snapshot.is_over and time.monotonic() >= self._due:
            self._write(ended=False)

    def evaluated(self, state: RunState) -> None:
        """The last snapshot's round was evaluated by clients: its state changes, and nothing of it is left unfinished."""
        if self._last is not None:
            self.keep(replace(self._last, state=state), write=False)

    def end(self, state: RunState, result: Result | None) -> None:
        """Write the last checkpoint: of a run that has ended, or, without its result, the last snapshot of one that has not."""
        if result is not None and self._last is not None:
            self.result = result
            self.keep(replace(self._last, is_over=True, state=state, arrays=result.arrays), write=False)
        if self._folder is not None and self._last is not None and self._last is not self._written:
            self._write(ended=result is not None)

    def _write(self, *, ended: bool) -> None:
        if self._folder is None or self._last is None:
            return
        now, started = self._last, time.monotonic()
        checkpoint = Checkpoint(
            setting=self.setting,
            server_round=now.server_round,
            is_over=now.is_over,
            state=now.state,
            arrays=numpy_arrays(now.arrays, limit=_LARGEST_ARRAY),
            num_charges=self._num_charges,
            elapsed=self.elapsed,
            ended=ended,
        )
        if self.result is not None:
            checkpoint = replace(checkpoint, **metrics_of(self.result, now.server_round))
        try:
            self._folder.write(checkpoint)
        except OSError as error:  # what was charged is in the ledger, and what was released stays so
            log.warning("no checkpoint after round %s: %s; the one before it stays", now.server_round, error)
        self._written = now
        seconds = time.monotonic() - started
        self._due = time.monotonic() + seconds * (1 - _SHARE) / _SHARE
