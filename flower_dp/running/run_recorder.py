"""The run recorder: an observer that writes metrics, statement and model of a run to its run folder."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_dp.core import checks, environment
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.running import run_folder, trained_model
from flower_dp.strategies import checkpoint, journal, rules, writer
from flower_dp.strategies.strategy import DPStrategy
from flower_dp.wire import BASE, numpy_arrays

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("flwr")

_LARGEST_ARRAY = 2**40


@dataclass(slots=True, kw_only=True)
class Watch:
    """The results of a run, for the caller of its ServerApp, whose main function returns nothing."""

    folder: Path | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    statement: PrivacyStatement | None = None
    result: Result | None = None


WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(
    config: Mapping[str, Any], name: str, on_line: Callable[[Mapping[str, Any]], None] = lambda line: None
) -> Iterator[Watch]:
    """Record the run of a ServerApp that is called within this context, also if the app calls `strategy.start` itself.

    Args:
        config: settings of the run.
        name: name of the run, for the name of a new folder.
        on_line: function called with every line of `metrics.jsonl`.
    """
    watch = Watch()
    token, lines = WATCH.set(watch), run_folder.ON_LINE.set(on_line)
    observers = journal.OBSERVERS.set(partial(default_observers, config, name))
    try:
        yield watch
    finally:
        journal.OBSERVERS.reset(observers)
        run_folder.ON_LINE.reset(lines)
        WATCH.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecorder:
    """An observer that writes a run folder.

    Attributes:
        folder: run folder.
        watch: results of the run for its caller in this process.
        not_covered: texts added to the statement's list of what it does not cover.
        others: arrays of the whole model that the run does not have (`rest_of`).
        checkpoints: place of the run's checkpoints.
    """

    folder: run_folder.RunFolder
    watch: Watch
    not_covered: tuple[str, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: writer.CheckpointPlace

    @classmethod
    def begin(
        cls, path: str | os.PathLike[str] | None, config: Mapping[str, Any], name: str, *, resume: bool = False, **fields: Any
    ) -> "RunRecorder":
        """Create the folder, see `RunFolder.create`; or reopen that of a resumed run.

        Raises:
            ValueError: if the folder already holds a run and `resume` is false, or that run had other settings.
        """
        launched = os.environ.pop(environment.RESUME, "") if path is None else ""  # an app's second run is a new one
        resume = resume or bool(launched)
        again = bool(launched) or (resume and path is not None and (Path(path).expanduser() / run_folder.CONFIG).is_file())
        folder = run_folder.RunFolder.reopen(path, config) if again else run_folder.RunFolder.create(path, config, name)
        log.info("The run's folder is %s", folder.path)
        watch = WATCH.get() or Watch()
        watch.folder = folder.path
        where = writer.CheckpointPlace(
            folder=folder.path / run_folder.CHECKPOINT, resume=resume, statement_only=launched == environment.STATED
        )
        return cls(folder=folder, watch=watch, checkpoints=where, **fields)

    def resume(self, last: int) -> None:
        """Drop the lines of rounds after `last`."""
        self.watch.rounds[:] = self.folder.truncate(last)

    def line(self, line: Mapping[str, Any]) -> None:
        """Write a line of `metrics.jsonl`."""
        self.folder.append(line)
        self.watch.rounds.append(dict(line))

    def end(self, statement: PrivacyStatement, result: Result | None) -> None:
        """Write the statement and the model; if the run did not end, the model of its last checkpoint."""
        whole = replace(statement, not_covered=(*statement.not_covered, *self.not_covered))
        self.folder.state(whole.to_dict(), str(whole))
        self.watch.statement = whole
        if result is not None:
            self.folder.write_results(numpy_arrays(result.arrays, limit=_LARGEST_ARRAY), self.others)
            self.watch.result = result
            return
        checkpoints, blocker = checkpoint.CheckpointFolder(self.checkpoints.folder), ""
        if not checkpoints.is_empty:
            last = checkpoints.read()
            blocker = last.resume_blocker
            self.folder.write_results(last.arrays, self.others, unfinished=f"after round {last.server_round}")
        remedy = (
            f"It can't be resumed: {blocker}" if blocker else f"Resume it with resume=True and this folder: {self.folder.path}"
        )
        log.info("The run did not end. %s", remedy)


def record_run(
    strategy: DPStrategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    *,
    num_rounds: int,
    config: Mapping[str, Any],
    name: str = "run",
    path: str | os.PathLike[str] | None = None,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    not_covered: Sequence[str] = (),
    on_round: rules.OnRound | None = None,
    model: "nn.Module | None" = None,
    resume: bool = False,
    **arguments: Any,
) -> Result:
    """Run a strategy and write its run folder: configuration, one line of metrics per round, statement, model and plot.

    `flower-dp compare` reads such folders, and `flower-dp run` shows their metrics during the run.

    Args:
        strategy: strategy of this package.
        grid: grid of the ServerApp.
        initial_arrays: initial global model.
        num_rounds: number of rounds, see `strategy.start`.
        config: settings of the run, such as `context.run_config`.
        name: name of the run, for the name of a new folder.
        path: run folder; None for that of `flower-dp run`, else a new one under `~/.flower-dp/runs`.
        evaluate_fn: function that tests the model, see `strategy.start`. Every number that it returns is written to the line of
            its round, except under names of the run's own columns (`epsilon`, `round`, `private-...`, `client-...`). The log
            warns of such names.
        not_covered: texts about what the app's guarantee does not cover, added to the statement in the folder.
        on_round: function called with every line, like the strategies' argument of this name.
        model: whole torch module, if the run trains a part of it, as with LoRA. The folder then has the hashes of the rest, and
            `RunFolder.load_model_into` accepts no other base. Messages name the SHA-256 of the frozen base; clients of this
            package refuse another base.
        resume: whether to continue the run in the folder `path` from its last checkpoint. If there is no run, a new one begins.
        arguments: further arguments of `strategy.start`.

    Raises:
        ValueError: if the folder already holds a run and `resume` is false, or the run to resume had other settings.
        Exception: any error of `strategy.start`; the folder then has the statement of everything released before.

    Example:
        >>> from flower_dp import record_run
        >>> def main(grid, context):  # of a ServerApp
        ...     strategy, arrays = make_strategy(), make_arrays()
        ...     record_run(strategy, grid, arrays, num_rounds=20, config=context.run_config)
    """
    others = {} if model is None else trained_model.rest_of(model)
    if model is not None:
        arguments |= _naming_the_base(model, strategy, arguments)
    recording = RunRecorder.begin(path, config, name, not_covered=tuple(not_covered), others=others, resume=resume)
    observers = (recording,) if on_round is None else (recording, journal.tracker(on_round))
    token = journal.OBSERVERS.set(lambda: observers)
    try:
        return strategy.start(grid, initial_arrays, num_rounds=num_rounds, evaluate_fn=evaluate_fn, **arguments)
    finally:
        journal.OBSERVERS.reset(token)


def _naming_the_base(model: "nn.Module", strategy: DPStrategy, arguments: Mapping[str, Any]) -> dict[str, ConfigRecord]:
    """Return the configurations to send, with the SHA-256 of the model's frozen base; nothing if the model has no such base."""
    from flower_dp.clients.training.attributes import base_hash  # noqa: PLC0415 - torch

    if not (base := base_hash(model)):
        return {}
    log.info("The frozen base has SHA-256 %s", base)
    kinds = ["train_config", *(["evaluate_config"] if len(strategy.rules.releases) > 1 else [])]
    return {kind: ConfigRecord({**(arguments.get(kind) or {}), BASE: base}) for kind in kinds}


def default_observers(config: Mapping[str, Any], name: str) -> tuple[journal.Observer, ...]:
    """Return the recorder of a run of an app that calls `strategy.start` itself.

    If the folder can't be used, for example because another run of the app has it, return nothing and log the reason. No error
    of the folder ends the run. But a resumed run with other settings does not begin: it would be another run.

    Args:
        config: settings of the run.
        name: name of the run, for the name of a new folder.

    Raises:
        SettingsError: if the run to resume had other settings.
    """
    try:
        recording = RunRecorder.begin(None, config, name)
    except checks.SettingsError:
        raise
    except Exception as error:
        log.warning("This run has no run folder: %s", error)
        return ()
    return (journal.SafeObserver(observer=recording, name="the run folder"),)
