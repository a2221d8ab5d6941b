"""Checkpoints: a run's state and model on the disk, so that the run can resume after a crash or an interruption."""

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
    """A checkpoint that can't be used: damaged, of another run, or missing. Nothing was charged."""


# Such a loop would start again from round 1, and send its requests a second time.
CUSTOM_LOOP = "its strategy has a custom loop, without super().start(...)"


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A run between two steps of its loop.

    It holds numbers that must stay on the server, as `RunState` does.

    Attributes:
        setting: facts that a resumed run must match, as text by name: its method, its model, and so on. Empty if the strategy's
            `start` has a custom loop: such a run can't be resumed.
        server_round: the last round that has given a model; 0 before the first.
        round_complete: whether that round was evaluated as well, and passed to the observers.
        state: the strategy's state.
        arrays: the model as it is sent; the result of a run that has ended.
        train: Flower's training metrics so far, by round.
        evaluate_clients: metrics of clients' evaluations, by round.
        evaluate_server: metrics of `evaluate_fn`, by round.
        run: the run's id in its ledger; empty without one.
        elapsed: duration of the run so far, in seconds.
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
        """The reason why no run can resume from here; empty if one can. A run that has ended only returns its result."""
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
        """Refuse a strategy or a model with which this run can't resume.

        Raises:
            CheckpointError: naming the fact that differs.
        """
        for name, before in self.setting.items():
            if (now := setting.get(name)) != before:
                raise CheckpointError(f"checkpoint: {name} was {before}, and is {now}; resume the run as it began")


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnNoise:
    """The secret state of a run's correlated noise after its last charge, which may be later than its last checkpoint.

    Attributes:
        run: the run's id in its ledger.
        charged: number of charges by release.
        secret: the state of the noise, by release.
    """

    run: str
    charged: Mapping[str, int]
    secret: Mapping[str, Any]

    def into(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint of the same run, with this noise if it is later: no noise may be drawn twice."""
        state = checkpoint.state
        for name, noise in self.secret.items() if self.run == checkpoint.run else ():
            if self.charged.get(name, 0) > state.charged.get(name, 0):
                release = state.releases.get(name)
                if release is None:
                    raise ValueError(f"has noise of {name}, which the checkpoint does not have")
                state = state.with_release(name, replace(release, noise=noise))
        return replace(checkpoint, state=state)


def metrics_of(result: Result, server_round: int) -> dict[str, Any]:
    """Return the metrics of a result up to a round, in the form of a checkpoint."""
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
    """The folder of a run's checkpoints: the newest and the previous one.

    A checkpoint is written completely or not at all. Only this user can read it, since it has numbers that must stay on the
    server.

    Attributes:
        path: path of the folder.
    """

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser().absolute())

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint."""
        return not any((self.path / name).exists() for name in (NEWEST, PREVIOUS))

    def create(self) -> None:
        """Create the folder, with access for this user only.

        Raises:
            OSError: if it can't be created.
            CheckpointError: if others can write to it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(self.path)

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, on the disk when this returns; the newest becomes the previous one.

        Raises:
            OSError: if the disk is full, or the folder can't be written: the old checkpoints stay.
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
        """Return why no run can resume from here; empty if one can, with the same settings, or none has begun."""
        try:
            return "" if self.is_empty else self.read().resume_blocker
        except (CheckpointError, OSError) as error:
            return str(error)

    def read(self) -> Checkpoint:
        """Return the newest checkpoint, with the noise that was drawn after it; the previous one if the newest is damaged.

        Raises:
            CheckpointError: if there is none, none that is whole, or one that somebody else could have written. If its noise is
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
                log.warning("%s: %s; the previous checkpoint is used", self.path, problem)
            if not (path := self.path / NOISE).exists():
                return checkpoint
            _check_own(path)
            try:
                return _whole(path, DrawnNoise).into(checkpoint)
            except (ValueError, OSError) as error:
                raise CheckpointError(f"{path}: {error}") from error
        raise CheckpointError(f"{self.path}: {'; '.join(problems) or 'has no checkpoint'}")


def _whole(path: Path, kind: type[T]) -> T:
    """Return the object in a file; it must be of this kind."""
    content = load_bytes(path.read_bytes())
    if not isinstance(content, kind):
        raise ValueError(f"must be a {kind.__name__}")
    return content


def _check_own(path: Path) -> None:
    """Refuse a file that others can write: they would choose the state of the run and the text of its statement."""
    if why := ownership_error(path.stat()):
        raise CheckpointError(f"{path}: {why}")
