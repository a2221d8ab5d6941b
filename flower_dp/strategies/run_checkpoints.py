"""The checkpoints of one run: when they are written, what they have, and how the run goes on from one."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from flower_dp.privacy.charge import Charge
from flower_dp.privacy.server_ledger import ServerLedger
from flower_dp.strategies.checkpoint import OWN_LOOP, Checkpoint, CheckpointError, CheckpointFolder, metrics_of
from flower_dp.strategies.durable import OnLedger
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import numpy_arrays

if TYPE_CHECKING:
    from flower_dp.strategies.run import Run

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
        only_state: make its statement, and end there.
    """

    folder: Path
    resume: bool = False
    only_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """The run as it was when a round was learnt from (`is_over` false), or was over."""

    server_round: int
    is_over: bool
    state: RunState
    arrays: ArrayRecord


class RunCheckpoints:
    """The checkpoints of one run; without a place nothing is written.

    Between two rounds a snapshot is taken, and written where that takes little of the run's time: from there the run goes on if
    its process is killed. The last snapshot is written whenever the run ends, however it does.

    Attributes:
        place: where they are; None: nowhere.
        found: the checkpoint from which the run goes on; None for a new run.
        went_on: whether it has.
        result: of the rounds so far; the loop fills it.

    Args:
        run: the run.
        place: where to keep its checkpoints.

    Raises:
        CheckpointError: the place has a run that is not to go on, no whole checkpoint of it, or none where one is needed.
    """

    def __init__(self, run: "Run", place: CheckpointPlace | None = None) -> None:
        self._run, self.place = run, place
        self.found: Checkpoint | None = None
        self.went_on = False
        self.result: Result | None = None
        self._setting: Mapping[str, str] = {}
        self._last: _Snapshot | None = None
        self._written: _Snapshot | None = None
        self._charges: list[tuple[int, Charge]] = []
        # The last snapshot after a round with a reply, and what was charged since.
        self._answered: _Snapshot | None = None
        self._unanswered: list[tuple[int, Charge]] = []
        self._began = self._due = time.monotonic()
        if place is None:
            return
        self._folder = CheckpointFolder(place.folder)
        if not self._folder.is_empty:
            if not place.resume:
                raise CheckpointError(f"checkpoint_dir={str(place.folder)!r}: already holds a run; resume=True goes on with it")
            self.found = self._folder.read()
            if (why := self.found.why_stuck) and not place.only_state:
                raise CheckpointError(f"{place.folder}: this run can't go on: {why}; a new run needs another folder")
            self._began -= self.found.elapsed
        elif place.only_state:
            ledger = place.folder / LEDGER
            raise CheckpointError(
                f"{place.folder}: has no checkpoint for a statement; `flower-dp ledger {ledger}` says what was charged"
            )
        elif place.resume:
            log.info("%s has no checkpoint: a new run begins", place.folder)
        self._folder.create()

    # Going on

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

    def go_on(self, found: Checkpoint) -> None:
        """Go on from a checkpoint. What was charged after it stays charged, and is not released a second time.

        Raises:
            ValueError: if the run had other releases: its charges would get another cost.
        """
        self._run.state = found.state
        if isinstance(durable := self._run.durable, OnLedger):
            known = {release.name: release.num_charged for release in self._run.releases}
            self._leave(durable.charges(known))
        if self._setting:  # it runs on; where only its last evaluation is left, no other snapshot comes
            self._last = self._written = self._answered = _Snapshot(
                server_round=found.server_round, is_over=found.is_over, state=self._run.state, arrays=found.model
            )
        self.went_on = True

    def ledger(self) -> Path | None:
        """Return the path of the ledger beside the checkpoints; for a new run it is made. None without a place.

        Raises:
            LedgerError: if it can't be made.
            CheckpointError: it has charges, and there is no checkpoint from which their run could go on.
        """
        if self.place is None:
            return None
        path = self._folder.path / LEDGER
        if self.found is not None:
            return path
        if not path.exists():
            ServerLedger.create(path)
            return path
        with ServerLedger(path, read_only=True) as ledger:
            charged = ledger.has_charges
        if charged:
            raise CheckpointError(
                f"{path}: has charges of a run without a checkpoint, which can't go on; a new run needs another folder"
            )
        return path

    @property
    def next_round(self) -> int:
        """The round with which the run goes on: every round is charged once, whether it was finished or not."""
        return max(self._run.rules.training.num_charged, 0 if self.found is None else self.found.server_round) + 1

    # What is not finished

    @contextmanager
    def unfinished(self, charge: Charge, server_round: int) -> Iterator[None]:
        """Count a charge that is made in this context among those that are not finished, before the next snapshot."""
        self._charges.append((server_round, charge))
        try:
            yield
        except Exception:  # an interruption is none: then the charge may have been made
            self._charges.pop()
            raise

    def _leave(self, charges: Iterable[tuple[int, Charge]]) -> None:
        run = self._run
        releases = {release.name: release for release in run.releases}
        rounds: dict[str, list[int]] = {name: [] for name in releases}
        for server_round, charge in charges:
            release = releases.get(charge.release)
            if release is None:
                raise CheckpointError(f"{charge.release} was charged in round {server_round}, and is no release of this strategy")
            if charge.number > release.num_charged:
                release.take(charge)
                run.charged(release, server_round)
            if release is run.rules.training:
                run.rules.unfinished(charge)
            rounds[release.name].append(server_round)
        for name, numbers in rounds.items():
            what = "" if name == run.rules.training.name else "the evaluation of "
            for first, last in _ranges(numbers):
                which = f"round {first} was" if first == last else f"rounds {first} to {last} were"
                run.note(incidents=(*run.record.incidents, f"{what}{which} charged and not finished"))

    def go_back(self, *, evaluates: bool) -> None:
        """Go back to the last round with a reply. What was charged since stays charged, and its noise is in no model.

        Args:
            evaluates: whether private evaluations go on; those that have ended stay so, as the statement says.
        """
        if self._answered is None:
            return
        charges, self._charges, self._unanswered = [*self._unanswered, *self._charges], [], []
        names = ("rounds", "model", "method", "optimizer", *["unanswered_evaluations"] * evaluates)
        self._run.state = replace(self._run.state, **{name: getattr(self._answered.state, name) for name in names})
        self._leave(charges)
        self._last = replace(self._answered, state=self._run.state)

    # Snapshots

    def keep(self, server_round: int, arrays: ArrayRecord, *, is_over: bool) -> None:
        """Take a snapshot after a round; what was charged before is part of it.

        Raises:
            CheckpointError: if the run was to go on, and a loop of the strategy's own has begun it anew; or the first checkpoint
                can't be written: whoever is charged by a run that is then killed would have no statement.
        """
        if self.found is not None and not self.went_on:
            raise CheckpointError(f"{self._folder.path}: the run there can't go on: {OWN_LOOP}; a new run needs another folder")
        self._take(_Snapshot(server_round=server_round, is_over=is_over, state=self._run.state, arrays=arrays))
        if is_over and time.monotonic() >= self._due:
            error = self._write(ended=False)
            if error is not None and self._folder.is_empty:
                raise CheckpointError(f"no checkpoint can be written in {self._folder.path}: {error}") from error

    def evaluated(self) -> None:
        """Clients have evaluated the model of the last snapshot: its state has changed, and their charge is finished."""
        if self._last is not None:
            self._take(replace(self._last, state=self._run.state))

    def close(self, result: Any, *, failed: bool) -> None:
        """Write the last checkpoint: of a run that has ended with its result, of one that has not the last snapshot."""
        if self._last is not None and not failed:
            self.result = result if isinstance(result, Result) else None
            arrays = self._last.arrays if self.result is None else self.result.arrays
            self._take(replace(self._last, is_over=True, state=self._run.state, arrays=arrays))
        if self._last is not self._written:
            self._write(ended=not failed)
        self._leave(self._charges)

    def _take(self, snapshot: _Snapshot) -> None:
        if snapshot.state.unanswered:
            self._unanswered += self._charges
        else:
            self._answered, self._unanswered = snapshot, []
        self._last, self._charges = snapshot, []

    def _write(self, *, ended: bool) -> OSError | None:
        """Write the last snapshot; return why it could not be written."""
        if self.place is None or self._last is None:
            return None
        now, started = self._last, time.monotonic()
        checkpoint = Checkpoint(
            setting=self._setting,
            server_round=now.server_round,
            is_over=now.is_over,
            state=now.state,
            arrays=numpy_arrays(now.arrays, limit=_LARGEST_ARRAY),
            run=self._run.durable.run if isinstance(self._run.durable, OnLedger) else "",
            elapsed=started - self._began,
            ended=ended,
        )
        if self.result is not None:
            checkpoint = replace(checkpoint, **metrics_of(self.result, now.server_round))
        failed = None
        try:
            self._folder.write(checkpoint)
        except OSError as error:  # the ledger has what was charged
            failed = error
            log.warning("no checkpoint after round %s: %s; the one before it stays", now.server_round, error)
        self._written = now
        self._due = time.monotonic() + (time.monotonic() - started) * (1 - _SHARE) / _SHARE
        return failed


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of every range without a gap."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
