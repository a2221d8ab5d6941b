"""Checkpoints: a run's state and model on the disk, so that the run can go on after a crash or an interruption."""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from flower_dp.core.checks import SettingsError
from flower_dp.core.serialization import dump_bytes, load_bytes, serializable
from flower_dp.privacy.private_file import ownership_error
from flower_dp.strategies.run_state import RunState

log = logging.getLogger("flwr")

T = TypeVar("T")

NEWEST, PREVIOUS, NOISE = "checkpoint.state", "checkpoint.previous.state", "noise.state"

Metrics = Mapping[int, Mapping[str, Any]]


class CheckpointError(SettingsError):
    """A checkpoint can't be used: it is damaged, of another run, or there is none. Nothing was charged."""


# Its loop would begin anew, and ask a second time.
CUSTOM_LOOP = "its strategy has a loop of its own, without super().start(...)"


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A run as it was between two steps of its loop.

    It holds numbers that must stay on the server, as `RunState` does.

    Attributes:
        setting: what the run must have again to go on, by name, as text: its method, its model, and so on. Empty where the
            strategy's `start` has a loop of its own: such a run can't go on.
        server_round: the last round that was learnt from; 0 before the first.
        round_complete: whether that round was evaluated as well, and told to everyone.
        state: all that the strategy needs to go on.
        arrays: the model as it is sent; of a run that has ended its result.
        train: Flower's training metrics so far, by round.
        evaluate_clients: those of clients' evaluations.
        evaluate_server: those of `evaluate_fn`.
        run: the run's id in its ledger; empty without one.
        elapsed: seconds that the run has taken.
        ended: whether the run has ended.
    """

    setting: Mapping[str, str]
    server_round: int
    round_complete: bool
    state: RunState
    arrays: Mapping[str, np.ndarray]
    train: Metrics = field(default_factory=dict)
    evaluate_clients: Metrics = field(default_factory=dict)
    evaluate_server: Metrics = field(default_factory=dict)
    run: str = ""
    elapsed: float = 0.0
    ended: bool = False

    @property
    def resume_blocker(self) -> str:
        """Why no run can go on from here; empty if one can. A run that has ended only returns its result."""
        return "" if self.setting or self.ended else CUSTOM_LOOP

    @property
    def model(self) -> ArrayRecord:
        """The model as it is sent."""
        return ArrayRecord({name: Array(array) for name, array in self.arrays.items()})

    @property
    def result(self) -> Result:
        """Flower's result so far."""
        return Result(
            arrays=self.model,
            train_metrics_clientapp=_records(self.train),
            evaluate_metrics_clientapp=_records(self.evaluate_clients),
            evaluate_metrics_serverapp=_records(self.evaluate_server),
        )

    def check(self, setting: Mapping[str, str]) -> None:
        """Refuse a strategy or a model with which this run can't go on.

        Raises:
            CheckpointError: naming what differs.
        """
        for name, before in self.setting.items():
            if (now := setting.get(name)) != before:
                raise CheckpointError(f"checkpoint: {name} was {before}, and is {now}: a run goes on as it began")


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnNoise:
    """The secret state of a run's correlated noise after its last charge, which may be later than its last checkpoint.

    Attributes:
        run: the run's id in its ledger.
        charged: how often each release was charged.
        secret: the state of the noise, by release.
    """

    run: str
    charged: Mapping[str, int]
    secret: Mapping[str, Any]

    def into(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint of the same run with this noise where that is later: what was drawn is never drawn again."""
        state = checkpoint.state
        for name, noise in self.secret.items() if self.run == checkpoint.run else ():
            if self.charged.get(name, 0) > state.charged.get(name, 0):
                of = state.releases.get(name)
                if of is None:
                    raise ValueError(f"has noise of {name}, which the checkpoint does not have")
                state = state.with_release(name, replace(of, noise=noise))
        return replace(checkpoint, state=state)


def metrics_of(result: Result, server_round: int) -> dict[str, Any]:
    """Return the metrics of a result up to a round, as a checkpoint has them."""
    return {
        "train": _tables(result.train_metrics_clientapp, server_round),
        "evaluate_clients": _tables(result.evaluate_metrics_clientapp, server_round),
        "evaluate_server": _tables(result.evaluate_metrics_serverapp, server_round),
    }


def _tables(records: Mapping[int, MetricRecord], last: int) -> Metrics:
    return {number: dict(record) for number, record in records.items() if number <= last}


def _records(tables: Metrics) -> dict[int, MetricRecord]:
    return {number: MetricRecord({**table}) for number, table in tables.items()}


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The folder of a run's checkpoints: the newest, and the one before.

    A checkpoint is written completely or not at all. It is this user's alone to read, since it has numbers that must stay on
    the server.

    Attributes:
        path: of the folder.
    """

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser().absolute())

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint."""
        return not any((self.path / name).exists() for name in (NEWEST, PREVIOUS))

    def create(self) -> None:
        """Make the folder, this user's alone.

        Raises:
            OSError: it can't be made, or others can write to it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(self.path)

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, on the disk when this returns; the newest becomes the previous one.

        Raises:
            OSError: the disk is full, or the folder can't be written: what was there is still there.
        """
        newest = self.path / NEWEST
        self._put(NEWEST, dump_bytes(checkpoint), before=lambda: newest.exists() and newest.replace(self.path / PREVIOUS))

    def write_noise(self, noise: DrawnNoise) -> None:
        """Write the secret state of noise, on the disk when this returns.

        Raises:
            OSError: as `write`.
        """
        self._put(NOISE, dump_bytes(noise))

    def _put(self, name: str, content: bytes, before: Callable[[], object] = lambda: None) -> None:
        part = self.path / f".{name}.{os.getpid()}.part"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            before()
            part.replace(self.path / name)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def resume_blocker(self) -> str:
        """Return why no run can go on from here; empty if one can, with the same settings, or none has begun."""
        try:
            return "" if self.is_empty else self.read().resume_blocker
        except (CheckpointError, OSError) as error:
            return str(error)

    def read(self) -> Checkpoint:
        """Return the newest checkpoint, with the noise that was drawn after it; the previous one if the newest is damaged.

        Raises:
            CheckpointError: there is none, none that is whole, or one that somebody else could have written; or its noise is
                damaged: without it noise could be drawn twice.
        """
        problems = []
        for name in (NEWEST, PREVIOUS):
            if not (self.path / name).exists():
                continue
            _check_own(self.path)
            _check_own(self.path / name)
            try:
                checkpoint = _whole(self.path / name, Checkpoint)
            except (ValueError, OSError) as error:
                problems.append(f"{name} {error}")
                continue
            for problem in problems:
                log.warning("%s: %s; the one before it is taken", self.path, problem)
            if not (place := self.path / NOISE).exists():
                return checkpoint
            _check_own(place)
            try:
                return _whole(place, DrawnNoise).into(checkpoint)
            except (ValueError, OSError) as error:
                raise CheckpointError(f"{place}: {error}") from error
        raise CheckpointError(f"{self.path}: {'; '.join(problems) or 'has no checkpoint'}")


def _whole(place: Path, kind: type[T]) -> T:
    """Return what a file holds, which is of this kind."""
    found = load_bytes(place.read_bytes())
    if not isinstance(found, kind):
        raise ValueError(f"is no {kind.__name__}")
    return found


def _check_own(place: Path) -> None:
    """Refuse what others can write: they would decide what the run goes on from, and what its statement says."""
    if why := ownership_error(place.stat()):
        raise CheckpointError(f"{place}: {why}")
