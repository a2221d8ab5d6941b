"""The journal of a run: one line of public numbers per round, for a run folder, a screen, or a tracker."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from flower_dp.core import metric_columns
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.checkpoint import Checkpoint
from flower_dp.strategies.evaluate_fn import Around, EvaluateFn, named
from flower_dp.strategies.rules import OnRound
from flower_dp.strategies.writer import CheckpointPlace

log = logging.getLogger("flwr")


class Observer(Protocol):
    """Follows one run."""

    def line(self, line: Mapping[str, Any]) -> None:
        """Take the public numbers of a round; 0 is the initial model."""

    def end(self, statement: PrivacyStatement, result: Result | None) -> None:
        """Take the statement, and the result of a run that did not fail."""


def place_of(observers: Iterable[Observer]) -> CheckpointPlace | None:
    """Return the place for checkpoints of the first observer that has one; None without any."""
    places = (getattr(observer, "checkpoints", None) for observer in observers)
    return next((place for place in places if place is not None), None)


# Makes the observers of the next run.
OBSERVERS: ContextVar[Callable[[], tuple[Observer, ...]] | None] = ContextVar("observers", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeObserver:
    """An observer whose errors are logged, so that they neither stop nor change the run.

    Attributes:
        observer: the observer.
        name: the observer's name in the log.
    """

    observer: Observer
    name: str

    @property
    def checkpoints(self) -> CheckpointPlace | None:
        """The observer's place for checkpoints."""
        return place_of((self.observer,))

    def resume(self, last: int) -> None:
        """Pass on that the run resumes, if the observer has a `resume`."""
        if callable(call := getattr(self.observer, "resume", None)):
            self._try(f"round {last}", call, last)

    def line(self, line: Mapping[str, Any]) -> None:
        """Pass a line on."""
        self._try(f"round {line['round']}", self.observer.line, line)

    def end(self, statement: PrivacyStatement, result: Result | None) -> None:
        """Pass the end on."""
        self._try("the end", self.observer.end, statement, result)

    def _try(self, when: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            log.warning("%s failed at %s, and the run continues: %s: %s", self.name, when, type(error).__name__, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker:
    """An observer that calls a function with a copy of every line, and its `close`, if it has one, at the end.

    Attributes:
        on_round: the function.
    """

    on_round: OnRound

    def line(self, line: Mapping[str, Any]) -> None:
        """Call the function."""
        self.on_round(dict(line))

    def end(self, statement: PrivacyStatement, result: Result | None) -> None:
        """Call the function's `close`."""
        if callable(close := getattr(self.on_round, "close", None)):
            close()


def tracker(on_round: OnRound) -> Observer:
    """Return the observer that calls `on_round`; from now on its errors do no harm to the run.

    Raises:
        Exception: if the `open` of `on_round` raises it: nothing was released yet.
    """
    if callable(begin := getattr(on_round, "open", None)):
        begin()
    return SafeObserver(observer=Tracker(on_round=on_round), name="on_round")


class Told(Protocol):
    """The run, as far as its lines need it."""

    @property
    def cohort_is_secret(self) -> bool: ...  # noqa: D102
    @property
    def delta(self) -> float: ...  # noqa: D102

    def line_of(self, server_round: int) -> Mapping[str, Any]:
        """Return the public numbers of a round."""


class Journal:
    """The lines of one run, which it passes to the observers.

    Args:
        run: source of the lines.
        observers: observers of the run.
        num_rounds: maximum number of rounds; None if unknown.
    """

    def __init__(self, run: Told, observers: tuple[Observer, ...], num_rounds: int | None) -> None:
        self._run, self._observers = run, observers
        self._num_rounds = {} if num_rounds is None else {"num-rounds": num_rounds}
        self._started = time.monotonic()
        self._due: int | None = 0
        self._arrays: ArrayRecord | None = None
        self._evaluated = False
        self._metrics: dict[int, Mapping[str, Any]] = {}
        self._warned: set[str] = set()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue the lines of an earlier process; an observer's `resume`, if it has one, gets the last round that stays."""
        self._due, self._arrays = None if checkpoint.round_complete else checkpoint.server_round, checkpoint.model
        self._started -= checkpoint.elapsed
        for observer in self._observers:
            if callable(call := getattr(observer, "resume", None)):
                call(checkpoint.server_round - (not checkpoint.round_complete))

    def evaluated(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        """Return an `evaluate_fn` whose metrics are in the lines."""
        function = named(evaluate_fn)

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            self._evaluated = True
            metrics = function(server_round, arrays)
            self._metrics[server_round] = metrics if isinstance(metrics, Mapping) else {}
            return metrics

        return Around(evaluate)

    def released(self, server_round: int, arrays: ArrayRecord) -> None:
        """Note that a round has ended with this model; its line is passed on when it is complete."""
        self._due, self._arrays = server_round, arrays

    def flush(self) -> None:
        """Pass on the line of the last round, unless that was done."""
        if self._due is None or not self._observers:
            return
        server_round, self._due = self._due, None
        line: dict[str, Any] = {**self._users(self._metrics.pop(server_round, {})), "round": server_round, **self._num_rounds}
        line |= self._run.line_of(server_round)
        # If cohorts are secret, no times: a round takes longer with more clients.
        elapsed = {} if self._run.cohort_is_secret else {"elapsed": round(time.monotonic() - self._started, 3)}
        line |= {"delta": self._run.delta} | elapsed
        for observer in self._observers:
            observer.line(line)

    def end(self, result: Any, statement_of: Callable[[], PrivacyStatement], *, failed: bool, is_of_folder: bool) -> None:
        """Pass on the statement and the result; the result of a custom loop that returns no model is its last round's.

        Args:
            result: return value of `start`.
            statement_of: function that returns the statement.
            failed: whether `start` has raised an error instead.
            is_of_folder: whether an observer's folder belongs to this run; false if the run there could not be resumed.
        """
        if not is_of_folder:
            self._observers = tuple(observer for observer in self._observers if place_of((observer,)) is None)
        if not self._observers:
            return
        if failed or (isinstance(result, Result) and result.arrays):
            last: Result | None = result
        else:
            last = None if self._arrays is None else Result(arrays=self._arrays)
        try:
            if not failed or self._due or self._evaluated:  # an initial model has a line only if the run began
                self.flush()
        finally:
            statement = statement_of()
            with ExitStack() as ends:  # calls every observer, in order, even if one fails
                for observer in reversed(self._observers):
                    ends.callback(observer.end, statement, last)

    def _users(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics whose names are not reserved for the run; warn of each other one once.

        In a line without the run's own column, a reader would take the user's number for the run's: for its epsilon, for a noised
        mean, or for the size of a secret cohort.
        """
        taken = {name for name in metrics if metric_columns.is_reserved(name)}
        for name in sorted(taken - self._warned):
            log.warning("evaluate_fn: its metric %r is not written: the name is reserved for the run; give it another", name)
        self._warned |= taken
        return {name: value for name, value in metrics.items() if name not in taken}


def observers_of(on_round: OnRound | None) -> tuple[Observer, ...]:
    """Return the observers of the next run: those of its environment, and the strategy's `on_round`."""
    make = OBSERVERS.get()
    return (*(make() if make else ()), *(() if on_round is None else (tracker(on_round),)))
