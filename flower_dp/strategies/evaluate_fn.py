"""Somebody's `evaluate_fn`, whose failure is reported as what it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

# The number of a round and its model -> metrics by public data, or nothing.
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, slots=True)
class Named:
    """Somebody's function, whose errors say that they are its own.

    Raises:
        RuntimeError: if it fails, with the round, and the class and the text of its error.
    """

    function: EvaluateFn

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return its metrics, None if it has none."""
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
    """A function of this package's around somebody's: its own errors stay what they are."""

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return what the function returns."""
        return self.function(server_round, arrays)


def named(evaluate_fn: EvaluateFn) -> EvaluateFn:
    """Return a function whose failure is reported as that of somebody's `evaluate_fn`."""
    return evaluate_fn if isinstance(evaluate_fn, Named) else Named(evaluate_fn)
