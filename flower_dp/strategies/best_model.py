"""The best model of a run, by the server's own evaluation on public data."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import ArrayRecord, MetricRecord

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def less_is_better(best_by: str) -> bool:
    """Return whether the least value of a metric is the best (`...loss`), or the largest (`...accuracy`).

    Raises:
        ValueError: for a name with another ending.
    """
    if isinstance(best_by, str) and best_by.endswith(("loss", "accuracy")):
        return best_by.endswith("loss")
    raise ValueError(f"best_by={best_by!r}: must be the name of a metric that ends in loss or accuracy, such as validation-loss")


@dataclass(slots=True)
class BestModel:
    """An `evaluate_fn` that keeps the best model that it has evaluated, the initial one included.

    Rounds in which the evaluation returns nothing, or a number that is not finite, are passed over.

    Attributes:
        evaluate: the user's `evaluate_fn`; with public data the choice costs no privacy.
        best_by: the metric that decides, see `less_is_better`.
        arrays: the best model; None before any.
        server_round: the round of the best model; 0 is the initial one.
        value: its metric.
        num_seen: models that were compared.
    """

    evaluate: Evaluate
    best_by: str
    arrays: ArrayRecord | None = None
    server_round: int = 0
    value: float = math.nan
    num_seen: int = 0

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate a model and keep it if it is better than all before.

        Raises:
            ValueError: if the evaluation returns numbers, and not the one that models are compared by.
        """
        metrics = self.evaluate(server_round, arrays)
        if metrics is None:
            return None
        found = metrics.get(self.best_by)
        if not isinstance(found, int | float):
            raise ValueError(f"evaluate_fn: returns {', '.join(metrics) or 'nothing'}; must have best_by={self.best_by!r}")
        if math.isfinite(found):
            self.num_seen += 1
            better = found < self.value if less_is_better(self.best_by) else found > self.value
            if self.arrays is None or better:
                self.arrays, self.server_round, self.value = arrays, server_round, float(found)
        return metrics

    def in_words(self) -> str | None:
        """Return how the resulting model was chosen; None if nothing was compared."""
        if self.arrays is None:
            return None
        which = f"of round {self.server_round}" if self.server_round else "the initial one"
        return f"the resulting model, {which}, was chosen out of {self.num_seen} by its {self.best_by}"
