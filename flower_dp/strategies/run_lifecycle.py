"""What is around a strategy's `start`: the journal of its run, and what of the run outlives its process."""

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
    """The statement of a run was made from its folder; its ServerApp ends there."""


def _place(given: Mapping[str, Any], own: CheckpointPlace | None) -> CheckpointPlace | None:
    """Return where checkpoints are to be: where a call says, or else where an observer does."""
    resume, folder = checks.flag("resume", given.get("resume") or False), given.get("checkpoint_dir")
    if folder is not None:
        return CheckpointPlace(folder=Path(folder), resume=resume)
    if resume and (own is None or not own.resume):
        raise checks.refusal("resume", True, "needs checkpoint_dir, the folder that the run was started with")
    return own


def with_run_lifecycle(start: Start) -> Start:
    """Return a strategy's `start` that keeps a journal of its run, and what outlives its process.

    The outermost `start` of a class does so, since a subclass may choose another final model, or have a loop of its own. A run
    that has ended is not run again: its result is returned.
    """
    signature = inspect.signature(start)
    keywords = next((one.name for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD), "")

    @functools.wraps(start)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        session: Session = self._session
        if session.journal is not None:
            return start(self, *arguments, **named)
        forgettable = session.log.charges.numbers() == session.finished
        bound = signature.bind(self, *arguments, **named)
        bound.apply_defaults()
        rest = bound.arguments.get(keywords, {})  # what a subclass's own `start` takes by keyword
        given = {**rest, **bound.arguments}
        observers = observers_of(self.on_round)
        session.journal = journal = Journal(self, observers, given.get("num_rounds"))
        if (evaluate_fn := given.get("evaluate_fn")) is not None:
            (rest if "evaluate_fn" in rest else bound.arguments)["evaluate_fn"] = journal.evaluated(evaluate_fn)
        writer: Writer | None = None
        result, failed = None, True
        with ExitStack() as ends:  # in turn, the last one first, whatever fails: what was released before stays released

            @ends.callback
            def close() -> None:
                session.log.close()
                if forgettable:  # what was charged here has a statement
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
                    if session.knows_clients:  # before anybody is asked there is nothing to state
                        diagnostics.log_statement(self.statement)

            session.writer = writer = Writer(_place(given, place_of(observers)))
            found = writer.found
            if found is None or not (found.ended or writer.statement_only):
                result = start(*bound.args, **bound.kwargs)
                failed = False
            else:
                session.begin()
                session.resume(found)
                if found.ended:
                    log.info("the run in %s has ended: no round is run, and its result is returned", writer.folder.path)
                    result, failed = found.result, False
        if writer.statement_only:
            raise StatementOnlyExit
        return result

    return cast(Start, run)
