"""What is around a strategy's `start`: the journal of its run, and what of the run outlives its process."""

import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from flower_dp.core import checks
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies import diagnostics
from flower_dp.strategies.journal import Journal, Told, observers_of, place_of
from flower_dp.strategies.rules import OnRound
from flower_dp.strategies.session import Session
from flower_dp.strategies.writer import CheckpointPlace, Writer

log = logging.getLogger("flwr")

Start = TypeVar("Start", bound=Callable[..., Any])


class Stated(SystemExit):
    """The statement of a run was made from its folder; its ServerApp ends there."""


class _Strategy(Told, Protocol):
    """What a run is followed by: what it tells, its session, and its statement."""

    _session: Session
    on_round: OnRound | None

    @property
    def statement(self) -> PrivacyStatement: ...


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a call of `start`, whatever a subclass's own one takes by keyword."""

    bound: inspect.BoundArguments
    rest: dict[str, Any]

    @classmethod
    def of(cls, signature: inspect.Signature, *arguments: Any, **named: Any) -> "_Call":
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        kinds = {one.kind: one.name for one in signature.parameters.values()}
        return cls(bound, bound.arguments.get(kinds.get(inspect.Parameter.VAR_KEYWORD, ""), {}))

    def get(self, name: str) -> Any:
        return self.bound.arguments.get(name, self.rest.get(name))

    def change(self, name: str, value: Any) -> None:
        for place in (self.bound.arguments, self.rest):
            if name in place:
                place[name] = value

    def place(self, own: CheckpointPlace | None) -> CheckpointPlace | None:
        """Return where checkpoints are to be: where the call says, or else where an observer does."""
        resume, folder = checks.flag("resume", self.get("resume") or False), self.get("checkpoint_dir")
        if folder is not None:
            return CheckpointPlace(folder=Path(folder), resume=resume)
        if resume and (own is None or not own.resume):
            raise checks.refusal("resume", True, "needs checkpoint_dir, the folder that the run was started with")
        return own


def followed(start: Start) -> Start:
    """Return a strategy's `start` that keeps a journal of its run, and what outlives its process.

    The outermost `start` of a class does so, since a subclass may choose another final model, or have a loop of its own. A run
    that has ended is not run again: its result is returned.
    """
    signature = inspect.signature(start)

    @functools.wraps(start)
    def run(self: _Strategy, *arguments: Any, **named: Any) -> Any:
        session = self._session
        if session.journal is not None:
            return start(self, *arguments, **named)
        forgettable = session.log.charges.numbers() == session.finished
        call = _Call.of(signature, self, *arguments, **named)
        observers = observers_of(self.on_round)
        session.journal = journal = Journal(self, observers, call.get("num_rounds"))
        if call.get("evaluate_fn") is not None:
            call.change("evaluate_fn", journal.evaluated(call.get("evaluate_fn")))
        writer: Writer | None = None
        result, failed = None, True
        with ExitStack() as ends:  # in turn, the last one first, whatever fails: what was released before stays released

            @ends.callback
            def close() -> None:
                session.close()
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
                    session.unfinished()
                    if session.knows_clients:  # before anybody is asked there is nothing to state
                        diagnostics.log_statement(self.statement)

            session.writer = writer = Writer(call.place(place_of(observers)))
            found = writer.found
            if found is None or not (found.ended or writer.only_state):
                result = start(*call.bound.args, **call.bound.kwargs)
                failed = False
            else:
                session.begin()
                session.go_on(found)
                if found.ended:
                    log.info(
                        "the run in %s has ended: no round is run, and its result is returned",
                        writer.place and writer.place.folder,
                    )
                    result, failed = found.result, False
        if writer.only_state:
            raise Stated
        return result

    return cast(Start, run)
