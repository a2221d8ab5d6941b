"""The columns of `metrics.jsonl`: reserved ones, and the metrics of `evaluate_fn`."""

import sys
from collections.abc import Mapping
from typing import Any

# Reserved columns, whether a line has them or not: progress of the run, numbers of a round, further ones of methods.
OWN = frozenset(
    {"round", "num-rounds", "delta", "elapsed", "seconds", "epsilon", "server-round", "cohort-is-secret", "numbers"}
    | {"cohort-size", "replies", "bytes-down", "bytes-up", "bytes-per-client"}
    | {"cost-per-device", "clip-norm"}
)
# Private evaluations, and training metrics of clients.
PREFIXES = ("private-", "client-")
_ERROR = "-standard-error"


def is_reserved(name: str) -> bool:
    """Return whether a column name is reserved for the run's own columns."""
    return name in OWN or name.startswith(PREFIXES)


def metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of `evaluate_fn` in one line: loss and accuracy, then the others in their order."""
    values = {name: float(value) for name, value in row.items() if not is_reserved(name) and number(value)}
    return {name: values[name] for name in sorted(values, key=lambda name: name not in ("loss", "accuracy"))}


def private(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return value and standard error of each metric of a private evaluation in one line, by its column."""
    estimates = {}
    for name, value in row.items():
        if name.startswith("private-") and not name.endswith(_ERROR) and number(value):
            error = row.get(name + _ERROR, 0.0)
            estimates[name] = float(value), float(error) if number(error) else 0.0
    return estimates


def number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold; null stands for one that was not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def percent(name: str) -> bool:
    """Return whether a metric is an accuracy, which is shown in percent: `accuracy`, `validation-accuracy`."""
    return kind(name) == "accuracy"


def kind(name: str) -> str:
    """Return the last word of a metric's name: `loss` of `validation-loss` and of `loss`."""
    return name.replace("_", "-").rpartition("-")[2]
