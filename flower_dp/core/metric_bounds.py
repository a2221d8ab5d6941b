"""Metrics of an evaluation as vectors of bounded norm, which noise can protect."""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from flower_dp.core import checks

# Rounding toward zero biases a mean. On a lattice finer than that of updates by this factor it is negligible beside the noise.
FINER_LATTICE = 2.0**12
_MOST_METRICS = 16


class MetricBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metrics that an evaluation requests, each with its public upper bound. All metrics are at least 0.

    Attributes:
        bounds: upper bound of every metric, by name, in the order of the vectors.

    Raises:
        ValueError: if there are none or too many, or a bound is not above 0.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.metric_bounds import MetricBounds
        >>> three = MetricBounds(bounds={"loss": 4.0, "accuracy": 1.0, "f1": 1.0})
        >>> three.counted({"loss": 8.0, "accuracy": 0.5, "f1": 0.0}).tolist()
        [0.5, 0.25, 0.0, 0.5]
        >>> metrics = MetricBounds(bounds={"loss": 4.0, "accuracy": 1.0})
        >>> metrics.centered(np.array([[8.0, 0.5], [1.0, 0.0]])).tolist()
        [[0.5, 0.0], [-0.25, -0.5]]
        >>> metrics.fractions(np.array([0.5, 0.0])).tolist()  # of the bounds
        [1.0, 0.5]
    """

    bounds: Mapping[str, float]

    def __post_init__(self) -> None:
        if not isinstance(self.bounds, Mapping) or not 0 < len(self.bounds) <= _MOST_METRICS:
            raise checks.bad("metrics", self.bounds, f"1 to {_MOST_METRICS} metrics, each with its upper bound")
        for name, bound in self.bounds.items():
            checks.line("metrics: name", name)
            checks.number(f"metrics[{name!r}]", bound, above=0)

    @property
    def num_counted(self) -> int:
        """Number of entries of a `counted` vector."""
        return len(self.bounds) + 1

    def counted(self, values: Mapping[str, float]) -> np.ndarray:
        """Return one client's vector [metrics + 1], float64, of L2 norm at most 1.

        Each metric is one entry, clipped to [0, bound] and divided by the bound. A last entry, 1, counts the client. All entries
        are divided by the square root of their number. A metric that is NaN counts as its bound.

        Raises:
            ValueError: if a metric is missing or is no number.
        """
        entries = []
        for name, bound in self.bounds.items():
            if not isinstance(values.get(name), int | float):
                raise ValueError(f"metric {name!r}: must be a number; the client has {', '.join(map(repr, values)) or 'none'}")
            value = float(values[name])
            entries.append(1.0 if math.isnan(value) else min(max(value / bound, 0.0), 1.0))
        return np.asarray([*entries, 1.0]) / math.sqrt(len(entries) + 1)

    def centered(self, values: np.ndarray) -> np.ndarray:
        """Return the contributions of metrics [n, metrics], float64, of L1 norm at most 1.

        Each value is clipped to [0, bound], mapped to [-1, 1] and divided by the number of metrics. NaN counts as the bound.
        """
        with np.errstate(over="ignore"):
            fractions = np.asarray(values, np.float64) / np.asarray(list(self.bounds.values()))
        clipped = np.clip(np.where(np.isnan(fractions), 1.0, fractions), 0.0, 1.0)
        return np.asarray((2 * clipped - 1) / len(self.bounds))

    def fractions(self, mean: np.ndarray) -> np.ndarray:
        """Return each metric as a part of its bound [metrics], from a mean of `centered` contributions."""
        return np.asarray((mean * len(self.bounds) + 1) / 2)
