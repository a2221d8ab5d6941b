"""Recorded runs: metrics, statement and model of a run in its run folder."""

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
    """What the caller of a ServerApp learns of the run that it records; the app's main function returns nothing."""

    folder: Path | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    statement: PrivacyStatement | None = None
    result: Result | None = None


WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(
    config: Mapping[str, Any], name: str, on_line: Callable[[Mapping[str, Any]], None] = lambda line: None
) -> Iterator[Watch]:
    """Record the run of a ServerApp that is called within this context, also if it starts a strategy of this package itself.

    Args:
        config: the run's settings.
        name: the name of the run, used in the name of a new folder.
        on_line: called with every line of `metrics.jsonl`.
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
        folder: the folder.
        watch: who waits for the run in this process.
        not_covered: added to the statement.
        others: what the whole model has besides the arrays of the run (`rest_of`).
        checkpoints: where those of the run are.
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
        """Create the folder, see `RunFolder.create`; or take that of a run that goes on.

        Raises:
            ValueError: the folder already holds a run, and `resume` is false; or that had other settings.
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
        """Forget the lines of rounds after `last`."""
        self.watch.rounds[:] = self.folder.truncate(last)

    def line(self, line: Mapping[str, Any]) -> None:
        """Write a line of `metrics.jsonl`."""
        self.folder.append(line)
        self.watch.rounds.append(dict(line))

    def end(self, statement: PrivacyStatement, result: Result | None) -> None:
        """Write the statement, and the model: of a run that did not end that of its checkpoint."""
        whole = replace(statement, not_covered=(*statement.not_covered, *self.not_covered))
        self.folder.state(whole.to_dict(), str(whole))
        self.watch.statement = whole
        if result is not None:
            self.folder.write_results(numpy_arrays(result.arrays, limit=_LARGEST_ARRAY), self.others)
            self.watch.result = result
            return
        kept, stuck = checkpoint.CheckpointFolder(self.checkpoints.folder), ""
        if not kept.is_empty:
            found = kept.read()
            stuck = found.resume_blocker
            self.folder.write_results(found.arrays, self.others, unfinished=f"after round {found.server_round}")
        goes_on = f"It can't go on: {stuck}" if stuck else f"It goes on with resume=True and this folder: {self.folder.path}"
        log.info("The run did not end. %s", goes_on)


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
        strategy: a strategy of this package.
        grid: the ServerApp's grid.
        initial_arrays: the first global model.
        num_rounds: as for `strategy.start`.
        config: the run's settings, such as `context.run_config`.
        name: the name of the run, used in the name of a new folder.
        path: the folder; by default that of `flower-dp run`, else a new one under `~/.flower-dp/runs`.
        evaluate_fn: as for `strategy.start`; every number that it returns is written to the line of its round, but
            for names of the run's own columns (`epsilon`, `round`, `private-...`, `client-...`), which the log then warns of.
        not_covered: what the app's guarantee does not cover, in words; added to the statement in the folder.
        on_round: called with every line, as the strategies' argument of this name.
        model: the whole torch module, where the run trains a part of it, as with LoRA: the folder then has the hashes of the
            rest, and `RunFolder.load_model_into` takes no other base. Messages name the SHA-256 of the frozen base; clients
            of this package refuse another base.
        resume: go on with the run in the folder `path`, from its last checkpoint; if there is no run, a new one begins there.
        arguments: further arguments of `strategy.start`.

    Raises:
        ValueError: the folder already holds a run, and `resume` is false; or the run that is to go on had other settings.
        Exception: as `strategy.start`; the folder then has the statement of what was released before.

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
    """Return the configurations that are sent, with the SHA-256 of the model's frozen base; nothing where there is none."""
    from flower_dp.clients.training.attributes import base_hash  # noqa: PLC0415 - torch

    if not (base := base_hash(model)):
        return {}
    log.info("The frozen base has SHA-256 %s", base)
    kinds = ["train_config", *(["evaluate_config"] if len(strategy.rules.releases) > 1 else [])]
    return {kind: ConfigRecord({**(arguments.get(kind) or {}), BASE: base}) for kind in kinds}


def default_observers(config: Mapping[str, Any], name: str) -> tuple[journal.Observer, ...]:
    """Return what records a run of an app that calls `strategy.start` itself.

    Nothing, if the folder can't be used, as where another run of the app has it; the log then says why. No error of the folder
    ends the run, but a run that was to go on with other settings does not begin: it would be another one.

    Args:
        config: the run's settings.
        name: the name of the run, used in the name of a new folder.

    Raises:
        SettingsError: the run is to go on, and had other settings.
    """
    try:
        recording = RunRecorder.begin(None, config, name)
    except checks.SettingsError:
        raise
    except Exception as error:
        log.warning("this run has no run folder: %s", error)
        return ()
    return (journal.SafeObserver(observer=recording, name="the run folder"),)
