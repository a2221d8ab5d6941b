"""What is around a strategy's `start`: the journal of its run, and what of the run outlives its process."""

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flower_dp.core import checks
from flower_dp.strategies import diagnostics
from flower_dp.strategies.journal import Journal, observers_of, place_of
from flower_dp.strategies.writer import CheckpointPlace, Writer

if TYPE_CHECKING:
    from flower_dp.strategies.strategy import DPStrategy

log = logging.getLogger("flwr")

Start = TypeVar("Start", bound=Callable[..., Any])


class Stated(SystemExit):
    """The statement of a run was made from its folder; its ServerApp ends there."""


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
            raise ValueError("resume=True: needs checkpoint_dir, the folder that the run was started with")
        return own


def followed(start: Start) -> Start:
    """Return a strategy's `start` that keeps a journal of its run, and what outlives its process.

    The outermost `start` of a class does so, since a subclass may choose another final model, or have a loop of its own. A run
    that has ended is not run again: its result is returned.
    """
    signature = inspect.signature(start)

    @functools.wraps(start)
    def run(self: "DPStrategy", *arguments: Any, **named: Any) -> Any:
        if self.journal is not None:
            return start(self, *arguments, **named)
        forgettable = self._session.log.charges.numbers() == self._forgettable
        call = _Call.of(signature, self, *arguments, **named)
        observers = observers_of(self)
        self.journal = journal = Journal(observers, call.get("num_rounds"))
        if call.get("evaluate_fn") is not None:
            call.change("evaluate_fn", journal.evaluated(call.get("evaluate_fn")))
        where, checkpoints = None, None
        result, failed = None, True
        try:
            where = call.place(place_of(observers))
            self._session.writer = checkpoints = Writer(where)
            found = checkpoints.found
            if found is not None and (found.ended or (where is not None and where.only_state)):
                self.begin()
                self.go_on(found)
                if found.ended:
                    log.info("the run in %s has ended: no round is run, and its result is returned", where and where.folder)
                result, failed = (found.result, False) if found.ended else (None, True)
            else:
                result = start(*call.bound.args, **call.bound.kwargs)
                failed = False
        finally:  # what was released before a failure stays released
            self.journal = None
            # A run that could not go on has its statement, and one of this process would have nothing in it.
            is_of_folder = checkpoints is not None and (checkpoints.found is None or checkpoints.went_on)
            try:
                if checkpoints is not None and is_of_folder:
                    checkpoints.close(result, self._session.state, failed=failed)
                    self._session.unfinished()
                    if self._manager is not None:  # before anybody is asked there is nothing to state
                        diagnostics.log_statement(self.statement)
            finally:
                try:
                    journal.end(self, result, failed=failed, is_of_folder=is_of_folder)
                finally:
                    self.close()
                    if forgettable:  # what was charged here has a statement
                        self._forgettable = self._session.log.charges.numbers()
        if where is not None and where.only_state:
            raise Stated
        return result

    return cast(Start, run)
