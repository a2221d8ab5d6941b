"""Somebody's `evaluate_fn`: its failure is reported as what it is, and costs no round that was charged."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import ArrayRecord, MetricRecord

log = logging.getLogger("flwr")

# The number of a round and its model -> metrics by public data, or nothing.
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, slots=True)
class Guarded:
    """Somebody's function. If it fails later than on the initial model, the round has no metrics and the run goes on.

    Raises:
        RuntimeError: if it fails on the initial model, before any client was asked.
    """

    function: EvaluateFn

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return its metrics, None if it has none or fails."""
        try:
            return self.function(server_round, arrays)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if server_round == 0:
                raise RuntimeError(f"evaluate_fn failed on the initial model, before any client was asked: {text}") from error
            # `flower-dp run` shows the first line.
            log.error("evaluate_fn failed in round %s: %s; the round counts, the run goes on", server_round, text, exc_info=error)
            return None


@dataclass(frozen=True, slots=True)
class Around:
    """A function of this package's around a guarded one: its own errors end the run."""

    function: EvaluateFn

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return what the function returns."""
        return self.function(server_round, arrays)


def guarded(evaluate_fn: EvaluateFn | None) -> EvaluateFn | None:
    """Return a function that reports the failure of somebody's; None for None.

    Example:
        >>> from flower_dp.strategies.evaluate_fn import guarded
        >>> guarded(None) is None
        True
    """
    return evaluate_fn if evaluate_fn is None or isinstance(evaluate_fn, Guarded | Around) else Guarded(evaluate_fn)
