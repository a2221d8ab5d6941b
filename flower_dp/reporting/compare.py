"""Comparison of finished runs. Runs that differ only in the seed form one curve."""

import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_dp.privacy.statement import delta_in_words
from flower_dp.reporting.past_run import read_past_run
from flower_dp.running import run_folder as run_folders

# Keys in which repetitions of the same run may differ.
REPEATED = ("seed", "output-dir")
# Settings whose values name the table of settings that is read.
_CHOICES = ("method", "task")
_WIDTH = 46  # of a label, in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. `values` holds the metric by round, NaN where it was not finite; `spent` the epsilon by round.

    `clip_norms` holds the clip norm by round, where it moved. `epsilon` is the statement's, or for an unfinished run the last one
    recorded; infinite: not private.
    """

    folder: Path
    config: Mapping[str, Any]
    values: Mapping[int, float]
    spent: Mapping[int, float]
    clip_norms: Mapping[int, float]
    epsilon: float
    delta: float | None
    unit: str
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Runs of the same settings: mean and standard deviation (n - 1) of the metric over runs, at the rounds that all have.

    `std` is zero if there is only one run; `spent` is the mean epsilon at each round, infinite if a run is not private;
    `clip_norms` is the mean clip norm at each round, NaN where none was recorded.
    """

    label: str
    runs: tuple[Run, ...]
    rounds: NDArray[np.int64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    spent: NDArray[np.float64]
    clip_norms: NDArray[np.float64]

    @property
    def epsilon(self) -> float:
        """The largest epsilon of the runs."""
        return max(run.epsilon for run in self.runs)

    @property
    def private(self) -> bool:
        """Whether every run is private."""
        return math.isfinite(self.epsilon)

    def epsilon_in_words(self) -> str:
        """Return the epsilon as text for tables and figures."""
        return f"{self.epsilon:.4g}" if self.private else "not private"


def read_run(folder: str | os.PathLike[str], metric: str, *, allow_unfinished: bool = False) -> Run:
    """Read a run folder.

    Args:
        folder: as `flower-dp run` writes it.
        metric: a key of `metrics.jsonl`.
        allow_unfinished: accept a run without a final model, with the rounds that it has.

    Raises:
        ValueError: naming the folder, if it is not a run folder, was not finished or never recorded the metric.
    """
    past = read_past_run(folder)
    rows, statement = past.rows, past.statement
    values = past.series(metric)
    if not values:
        there = (
            ", ".join(dict.fromkeys(key for row in rows for key, value in row.items() if _is_metric(key, value))) or "no metric"
        )
        raise ValueError(f"{folder}: has no {metric} in {run_folders.METRICS}, but {there}: set --metric")
    if not past.finished and not allow_unfinished:
        raise ValueError(f"{folder}: the run was not finished (no {run_folders.MODEL}); set --allow-unfinished to use it")
    spent = past.series("epsilon", otherwise=math.inf)
    epsilon = past.epsilon if past.finished or statement else max(spent.values(), default=math.inf)
    return Run(
        folder=past.folder,
        config=past.config,
        values=values,
        spent=spent,
        clip_norms=past.series("clip-norm"),
        epsilon=epsilon,
        delta=statement.get("delta", rows[-1].get("delta")),
        unit=", ".join(str(statement[key]) for key in ("unit", "relation") if key in statement) or "unknown",
        finished=past.finished,
    )


def curves_of(runs: Sequence[Run], metric: str) -> list[Curve]:
    """Group runs into curves, in the order in which their settings first occur.

    Raises:
        ValueError: naming the folder, if it is given twice or shares no round with the others of its curve.
    """
    groups: dict[str, list[Run]] = {}
    seen: set[Path] = set()
    for run in runs:
        if (place := run.folder.resolve()) in seen:
            raise ValueError(f"{run.folder}: is given twice")
        seen.add(place)
        settings = sorted(_setting(key, run.config) for key in run.config if key not in REPEATED)
        groups.setdefault("\n".join(settings), []).append(run)
    labels = labels_of([group[0].config for group in groups.values()])
    return [_curve(label, group, metric) for label, group in zip(labels, groups.values(), strict=True)]


def table(curves: Sequence[Curve], metric: str) -> str:
    """Return a table of the curves' last points: label, seeds, last mean +- standard deviation, epsilon, rounds."""
    scale, unit = (100, " (%)") if metric == "accuracy" else (1, "")
    lines: list[tuple[str, ...]] = [("curve", "seeds", f"final {metric}{unit}", "tight epsilon", "delta", "protects", "rounds")]
    for curve in curves:
        seeds = len({run.config.get("seed") for run in curve.runs})
        many = f"{seeds}" if seeds == len(curve.runs) else f"{seeds} ({len(curve.runs)} runs)"
        final = _final(scale * curve.mean[-1], scale * curve.std[-1], len(curve.runs))
        first, private = curve.runs[0], curve.private
        delta = delta_in_words(first.delta) if private and isinstance(first.delta, int | float) else "-"
        cells = (many, final, curve.epsilon_in_words(), delta, first.unit if private else "-", str(curve.rounds[-1]))
        label, *rest = wrapped(curve.label)
        lines += [(label, *cells), *((text, *[""] * len(cells)) for text in rest)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def notes(curves: Sequence[Curve]) -> list[str]:
    """Return notes that a reader of the table needs."""
    lines = [
        f"{run.folder}: not finished; its rounds so far are used" for curve in curves for run in curve.runs if not run.finished
    ]
    for curve in curves:
        if len({max(run.values) for run in curve.runs}) > 1:
            lines.append(f"{curve.label}: its runs end in different rounds; compared up to the last that all have")
    private = [curve.runs[0] for curve in curves if curve.private]
    if len({(run.delta, run.unit) for run in private}) > 1:
        lines.append("the epsilons hold for different deltas or protect different units: don't compare them with each other")
    return lines


def wrapped(text: str) -> list[str]:
    """Return the lines of a wrapped label."""
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False, break_long_words=False) or [""]


def _curve(label: str, runs: Sequence[Run], metric: str) -> Curve:
    common = sorted(set.intersection(*(set(run.values) for run in runs)))
    if not common:
        raise ValueError(f"{runs[-1].folder}: has no {metric} of a round that the other runs of its curve have")
    values = np.asarray([[run.values[at] for at in common] for run in runs])
    spent = np.asarray([[_spent(run, at) for at in common] for run in runs])
    return Curve(
        label=label,
        runs=tuple(runs),
        rounds=np.asarray(common),
        mean=values.mean(axis=0),
        std=values.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(common)),
        spent=spent.mean(axis=0),
        clip_norms=np.asarray([[run.clip_norms.get(at, math.nan) for at in common] for run in runs]).mean(axis=0),
    )


def _spent(run: Run, at: int) -> float:
    """Return the last epsilon recorded up to a round; infinite for all rounds of a run that was not private."""
    if math.isinf(run.epsilon):
        return math.inf
    return run.spent[max(before for before in run.spent if before <= at)] if min(run.spent, default=at + 1) <= at else 0.0


def labels_of(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each configuration, made of the keys in which they differ."""
    if len(configs) == 1:
        return [str(configs[0].get("method", "all runs"))]
    tables = {str(config[key]) for config in configs for key in _CHOICES if key in config}
    configs = [_read_by(config, tables) for config in configs]
    keys = list(dict.fromkeys(key for config in configs for key in config if key not in REPEATED))
    differ = [key for key in keys if any(_setting(key, config) != _setting(key, configs[0]) for config in configs)]
    # Keys that some runs do not have (those of an older version) are left out, if the other keys distinguish the curves.
    known = [key for key in differ if all(key in config for config in configs)]
    for chosen in (known, differ):
        labels = [", ".join(_setting(key, one) for key in chosen if key in one or _table(key) not in tables) for one in configs]
        if len(set(labels)) == len(labels):
            break
    return labels


def _read_by(config: Mapping[str, Any], tables: set[str]) -> dict[str, Any]:
    """Return a configuration without the tables of methods and tasks that other runs have chosen, and this one has not."""
    own = {config.get(key) for key in _CHOICES}
    return {key: value for key, value in config.items() if _table(key) not in tables or _table(key) in own}


def _table(key: str) -> str:
    """Return the table of a setting, such as `dp-fedsam`; empty for a common one."""
    return key.rpartition(".")[0]


def _setting(key: str, config: Mapping[str, Any]) -> str:
    if key not in config:
        return f"{key} not set"
    value = config[key]
    if isinstance(value, bool) or value == "":
        return f"{key}={json.dumps(value)}"
    return f"{key}={value:.10g}" if isinstance(value, float) else f"{key}={value}"


def _final(mean: float, std: float, count: int) -> str:
    if not math.isfinite(mean):
        return "not finite"
    return f"{mean:.4g}" if count == 1 else f"{mean:.4g} +- {std:.2g}"


def _is_metric(key: str, value: Any) -> bool:
    return key not in ("round", "num-rounds") and isinstance(value, int | float) and not isinstance(value, bool)
