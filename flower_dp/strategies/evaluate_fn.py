"""The user's `evaluate_fn`, with errors that name it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

# (number of a round, its model) -> metrics on public data, or None.
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, slots=True)
class Named:
    """The user's function; its errors name it.

    Raises:
        RuntimeError: if the function fails, with the round, and the class and the text of its error.
    """

    function: EvaluateFn

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the function's metrics; None if it returns none."""
        try:
            metrics: Any = self.function(server_round, arrays)
            if metrics is None or isinstance(metrics, MetricRecord):
                return metrics
            if isinstance(metrics, Mapping):
                return MetricRecord({**metrics})
            raise TypeError(f"it returned a {type(metrics).__name__}: must be a MetricRecord, a dict of numbers by name, or None")
        except Exception as error:
            when = f"in round {server_round}, whose cost is stated" if server_round else "on the initial model, before any charge"
            raise RuntimeError(f"evaluate_fn failed {when}: {type(error).__name__}: {error}") from error


class Around(Named):
    """A function of this package around the user's; its errors stay unchanged."""

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the function's result."""
        return self.function(server_round, arrays)


def named(evaluate_fn: EvaluateFn) -> EvaluateFn:
    """Return a function whose errors name the user's `evaluate_fn`, wrapped once."""
    return evaluate_fn if isinstance(evaluate_fn, Named) else Named(evaluate_fn)
