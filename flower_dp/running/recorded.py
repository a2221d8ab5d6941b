"""Recorded runs: one call starts a strategy and writes its metrics, statement and model to a run folder."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.running.run_folder import RunFolder
from flower_dp.strategies.evaluate_fn import Around, named
from flower_dp.strategies.run_state import RoundReport
from flower_dp.strategies.strategy import DPStrategy
from flower_dp.wire import numpy_arrays

log = logging.getLogger("flwr")

_LARGEST_ARRAY = 2**40
# The columns of `metrics.jsonl` that are the run's own, whether a line has them or not.
_OWN = frozenset(
    {"round", "num-rounds", "delta", "elapsed", "seconds"} | {one.name.replace("_", "-") for one in fields(RoundReport)}
) | {"cost-per-device", "clip-norm"}  # the further numbers of methods (`Rules.numbers`)
# Of private evaluations, and of training metrics that clients were asked for.
_PREFIXES = ("private-", "client-")


@dataclass(slots=True, kw_only=True)
class Watch:
    """What the caller of a ServerApp learns of the run that it records; the app's main function returns nothing."""

    on_line: Callable[[Mapping[str, Any]], None]
    folder: Path | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    statement: PrivacyStatement | None = None
    result: Result | None = None


WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


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
        arguments: further arguments of `strategy.start`.

    Raises:
        ValueError: the folder already holds a run.
        Exception: as `strategy.start`; the folder then has the statement of what was released before.

    Example:
        >>> from flower_dp import record_run
        >>> def main(grid, context):  # of a ServerApp
        ...     strategy, arrays = make_strategy(), make_arrays()
        ...     record_run(strategy, grid, arrays, num_rounds=20, config=context.run_config)
    """
    folder = RunFolder.create(path, config, name)
    log.info("The run's folder is %s", folder.path)
    started = time.monotonic()
    warned: set[str] = set()
    watch = WATCH.get() or Watch(on_line=lambda line: None)
    watch.folder = folder.path

    evaluate = named(evaluate_fn)

    def record(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        metrics, failed = None, None
        try:
            metrics = evaluate(server_round, arrays) if evaluate else None
        except Exception as error:  # the round was charged, and gets its line
            failed = error
        line: dict[str, Any] = {**_users(metrics or {}, warned), "round": server_round, "num-rounds": num_rounds}
        line |= strategy.line_of(server_round)
        # Rounds take the longer, the more clients are in them.
        elapsed = {} if strategy.secret_cohort else {"elapsed": round(time.monotonic() - started, 3)}
        line |= {"delta": strategy.delta} | elapsed
        folder.append(line)
        watch.rounds.append(line)
        watch.on_line(line)
        if failed is not None:
            raise failed
        return metrics

    try:
        result = strategy.start(grid, initial_arrays, num_rounds=num_rounds, evaluate_fn=Around(record), **arguments)
    finally:
        stated = strategy.statement
        statement = replace(stated, not_covered=(*stated.not_covered, *not_covered))
        folder.state(statement.to_dict(), str(statement))
        watch.statement = statement
    folder.finish(numpy_arrays(result.arrays, limit=_LARGEST_ARRAY))
    watch.result = result
    return result


def _users(metrics: Mapping[str, Any], warned: set[str]) -> dict[str, Any]:
    """Return the metrics that are no column of the run's own; warn of each of the others once.

    In a line in which the run has no such column, the user's number would pass for the run's: for its epsilon, for a noised mean,
    or for the size of a cohort that is secret.
    """
    taken = {name for name in metrics if name in _OWN or name.startswith(_PREFIXES)}
    for name in sorted(taken - warned):
        log.warning("evaluate_fn: its metric %r is not written: this is a column of the run's own; give it another name", name)
    warned |= taken
    return {name: value for name, value in metrics.items() if name not in taken}
