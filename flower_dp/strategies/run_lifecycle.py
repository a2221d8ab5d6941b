"""Wrap a strategy's `start`: write the run's journal, checkpoints and statement."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

from flower_dp.core import checks
from flower_dp.strategies import diagnostics
from flower_dp.strategies.journal import Journal, observers_of, place_of
from flower_dp.strategies.session import Session
from flower_dp.strategies.writer import CheckpointPlace, Writer

log = logging.getLogger("flwr")

Start = TypeVar("Start", bound=Callable[..., Any])


class StatementOnlyExit(SystemExit):
    """Ends a ServerApp that was started only to rebuild a run's statement."""


def _place(given: Mapping[str, Any], own: CheckpointPlace | None) -> CheckpointPlace | None:
    """Return the place for checkpoints: that of the call's arguments, or else that of an observer."""
    resume, folder = checks.flag("resume", given.get("resume") or False), given.get("checkpoint_dir")
    if folder is not None:
        return CheckpointPlace(folder=Path(folder), resume=resume)
    if resume and (own is None or not own.resume):
        raise checks.refusal("resume", True, "needs checkpoint_dir, the folder with which the run was started")
    return own


def with_run_lifecycle(start: Start) -> Start:
    """Decorate `start` so that the run is journaled, checkpointed and resumable.

    Only the outermost `start` of a class is decorated, since a subclass may choose another final model, or have a custom loop.
    A run that has ended is not run again: its result is returned.
    """
    signature = inspect.signature(start)
    keywords = next((known.name for known in signature.parameters.values() if known.kind is known.VAR_KEYWORD), "")

    @functools.wraps(start)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        session: Session = self._session
        if session.journal is not None:
            return start(self, *arguments, **named)
        forgettable = session.log.charges.numbers() == session.finished
        bound = signature.bind(self, *arguments, **named)
        bound.apply_defaults()
        rest = bound.arguments.get(keywords, {})  # of a subclass whose `start` takes further keyword arguments
        given = {**rest, **bound.arguments}
        observers = observers_of(self.on_round)
        session.journal = journal = Journal(self, observers, given.get("num_rounds"))
        if (evaluate_fn := given.get("evaluate_fn")) is not None:
            (rest if "evaluate_fn" in rest else bound.arguments)["evaluate_fn"] = journal.evaluated(evaluate_fn)
        writer: Writer | None = None
        result, failed = None, True
        # Callbacks run last to first, each even if another fails, since what was released before a failure stays released.
        # `write` comes first: the statement must describe the state that the checkpoint holds. `tell` passes that statement to
        # the observers. `close` releases the ledger and its lock last, since `write` reads the charges that were not finished.
        with ExitStack() as ends:

            @ends.callback
            def close() -> None:
                session.log.close()
                if forgettable:  # these charges have a statement now
                    session.finished = session.log.charges.numbers()

            @ends.callback
            def tell() -> None:
                journal.end(result, lambda: self.statement, failed=failed, is_of_folder=writer is not None and writer.has_run)

            @ends.callback
            def write() -> None:
                session.journal = None
                if writer is not None and writer.has_run:
                    writer.close(result, session.state, failed=failed)
                    session.charge_interrupted()
                    if session.knows_clients:  # before the client query there is nothing to state
                        diagnostics.log_statement(self.statement)

            session.writer = writer = Writer(_place(given, place_of(observers)))
            checkpoint = writer.found
            if checkpoint is None or not (checkpoint.ended or writer.statement_only):
                result = start(*bound.args, **bound.kwargs)
                failed = False
            else:
                session.begin()
                session.resume(checkpoint)
                if checkpoint.ended:
                    log.info("The run in %s has ended: no round is run, and its result is returned", writer.folder.path)
                    result, failed = checkpoint.result, False
        if writer.statement_only:
            raise StatementOnlyExit
        return result

    return cast(Start, run)
