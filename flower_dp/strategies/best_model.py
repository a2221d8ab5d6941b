"""The best model of a run, by the server's own evaluation on public data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, MetricRecord

from flower_dp.core.stored import stored


def less_is_better(best_by: str) -> bool:
    """Return whether the least value of a metric is the best (`...loss`), or the largest (`...accuracy`).

    Raises:
        ValueError: for a name with another ending.
    """
    if isinstance(best_by, str) and best_by.endswith(("loss", "accuracy")):
        return best_by.endswith("loss")
    raise ValueError(f"best_by={best_by!r}: must be the name of a metric that ends in loss or accuracy, such as validation-loss")


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestModel:
    """The best model of those that were compared.

    Attributes:
        arrays: the best model, by the names of its arrays; None before any.
        server_round: the round of the best model; 0 is the initial one.
        value: its metric.
        num_seen: models that were compared.
    """

    arrays: Mapping[str, np.ndarray] | None = None
    server_round: int = 0
    value: float = math.nan
    num_seen: int = 0

    def after(self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord, *, best_by: str) -> "BestModel":
        """Return the best model with one more to compare: this one, or the new one if it is better than all before.

        A model whose number is not finite is passed over.

        Args:
            server_round: of the model.
            arrays: the model.
            metrics: its evaluation, with public data: then the choice costs no privacy.
            best_by: the metric that decides, see `less_is_better`.

        Raises:
            ValueError: if the evaluation does not have the number by which models are compared.
        """
        found = metrics.get(best_by)
        if not isinstance(found, int | float):
            raise ValueError(f"evaluate_fn: returns {', '.join(metrics) or 'nothing'}; must have best_by={best_by!r}")
        if not math.isfinite(found):
            return self
        better = found < self.value if less_is_better(best_by) else found > self.value
        if self.arrays is not None and not better:
            return replace(self, num_seen=self.num_seen + 1)
        model = {name: array.numpy() for name, array in arrays.items()}
        return BestModel(arrays=model, server_round=server_round, value=float(found), num_seen=self.num_seen + 1)

    def in_words(self, best_by: str) -> str | None:
        """Return how the resulting model was chosen; None if nothing was compared."""
        if self.arrays is None:
            return None
        which = f"of round {self.server_round}" if self.server_round else "the initial one"
        return f"the resulting model, {which}, was chosen out of {self.num_seen} by its {best_by}"
