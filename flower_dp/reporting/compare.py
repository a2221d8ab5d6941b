"""Comparison of recorded runs. Runs that differ only in the seed form one curve."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_dp.core import metric_columns
from flower_dp.core.formatting import format_rounded_up
from flower_dp.reporting import labels
from flower_dp.reporting.past_run import check_each_once, read_past_run
from flower_dp.running import run_folder as run_folders
from flower_dp.running.progress import private_quantity

_IN_BRACES = r"\{([\w.-]+)\}"
# Settings that decide a run's test records, besides the tables of tasks.
_TESTS = ("task", "data-dir", "test-ratio", "data-fn", "evaluate-fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run to compare.

    Attributes:
        folder: the run folder.
        config: settings by run-config key.
        values: the metric by round; NaN if it was not finite.
        spent: epsilon spent by round.
        clip_norms: clip norm by round, if it is adaptive.
        epsilon: the statement's epsilon, or the last one recorded if the run is unfinished; infinite if not private.
        delta: the delta at which `epsilon` holds, or None.
        unit: unit of privacy and neighboring relation.
        protected_against: adversaries, as the statement names them.
        finished: whether the run has ended with a final model.
        private: last value and standard error of each metric of private evaluations.
    """

    folder: Path
    config: Mapping[str, Any]
    values: Mapping[int, float]
    spent: Mapping[int, float]
    clip_norms: Mapping[int, float]
    epsilon: float
    delta: float | None
    unit: str
    protected_against: str
    finished: bool
    private: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve: the metric of runs with the same settings, at the rounds that all of them have.

    Attributes:
        label: label of the curve.
        line: name of the curve's line: that of all curves that differ only in the noise, or of one group.
        differ: settings in which the curves of a comparison differ.
        left_out: those of these settings that no label has.
        runs: the runs.
        rounds: rounds that all runs have.
        mean: mean of the metric over runs, by round.
        std: standard deviation (n - 1) over runs, by round; zero for a single run.
        spent: largest epsilon of the runs, by round; infinite if a run is not private.
        clip_norms: mean clip norm, by round; NaN if none was recorded.
    """

    label: str
    line: str
    differ: Mapping[str, Any]
    left_out: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
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

    def format_epsilon(self) -> str:
        """Return the epsilon as text for tables and figures, rounded up to four digits."""
        return format_rounded_up(self.epsilon, 4) if self.private else "not private"


def read_run(folder: str | os.PathLike[str], metric: str, *, include_unfinished: bool = False) -> ComparedRun:
    """Read a run folder.

    Args:
        folder: run folder that `flower-dp run` has written.
        metric: key of `metrics.jsonl`.
        include_unfinished: whether to accept a run without a final model, with its rounds so far.

    Raises:
        ValueError: naming the folder, if it is not a run folder, was not finished, or never recorded the metric.
    """
    past = read_past_run(folder)
    rows, guarantee = past.rows, past.guarantee
    values = past.series(metric)
    if not values:
        numbers = (key for row in rows for key, value in row.items() if metric_columns.number(value))
        known = ", ".join(dict.fromkeys(key for key in numbers if key not in ("round", "num-rounds"))) or "no metric"
        raise ValueError(f"{folder}: has no {metric} in {run_folders.METRICS}, but {known}; set --metric")
    if not past.finished and not include_unfinished:
        reason = f"no {run_folders.MODEL}" if not (past.folder / run_folders.MODEL).is_file() else "its model is of a checkpoint"
        raise ValueError(f"{folder}: the run was not finished ({reason}); set --include-unfinished to use it")
    spent = past.series("epsilon", otherwise=math.inf)
    epsilon = past.epsilon if past.finished or past.statement else max(spent.values(), default=math.inf)
    return ComparedRun(
        folder=past.folder,
        config=past.config,
        values=values,
        spent=spent,
        clip_norms=past.series("clip-norm"),
        epsilon=epsilon,
        delta=past.delta,
        unit=", ".join(str(guarantee[key]) for key in ("unit", "relation") if key in guarantee) or "unknown",
        protected_against=str(guarantee.get("protected_against", "unknown")),
        finished=past.finished,
        private=metric_columns.private({name: value for row in rows for name, value in row.items()}),
    )


def curves_of(
    runs: Sequence[ComparedRun], metric: str, *, names: Sequence[str] = (), group_by: Sequence[str] = ()
) -> list[Curve]:
    """Group runs into curves, in the order in which their settings first occur; curves of other noise alone by epsilon.

    Args:
        runs: runs; those that differ only in the seed, or in settings that their method does not read, form one curve.
        metric: metric of the curves.
        names: the user's names, one for each run or for each curve; or one for all, with settings in braces, as "{method}".
            Settings tell curves of one name apart.
        group_by: settings that group curves.

    Raises:
        ValueError: naming the folder, if it is given twice or shares no round with the others of its curve; or naming the
            option, if there are too many or too few names, or no run has a setting.
    """
    check_each_once(run.folder for run in runs)
    if len(names) == 1 and re.search(_IN_BRACES, names[0]):
        names = [_filled(names[0], run.config) for run in runs]
    each = names if len(names) == len(runs) else [""] * len(runs)
    groups: dict[tuple[str, str], list[ComparedRun]] = {}
    for run, name in zip(runs, each, strict=True):
        settings = sorted(labels.setting(key, {key: value}) for key, value in labels.read_settings(run.config).items())
        groups.setdefault((name, "\n".join(settings)), []).append(run)
    places = _lines_of([group[0].config for group in groups.values()])
    largest = [max(run.epsilon for run in group) for group in groups.values()]
    order = sorted(zip(places, largest, groups.items(), strict=True), key=lambda curve: (places.index(curve[0]), curve[1]))
    groups = dict(group for _, _, group in order)
    given = [name for name, _ in groups] if names else []
    if names and len(names) != len(runs):
        if len(names) != len(groups):
            raise ValueError(
                f"--label: given {len(names)} times; must be one for each of {len(runs)} runs or of {len(groups)} curves"
            )
        given = list(names)
    configs = [group[0].config for group in groups.values()]
    for key in group_by:
        if all(labels.find(key, config) is None for config in configs):
            raise ValueError(f"--group-by={key}: must be a setting of a run")
    legend = labels.legend_of(configs, group_by)
    texts = _with_names(given, configs) if given else legend.labels
    lines = given or _lines_of(configs)
    if group_by:
        lines = [", ".join(labels.setting(key, config) for key in group_by) for config in configs]
    return [
        _curve(group, metric, label=label, line=line, differ=differ, left_out=() if given else tuple(legend.left_out))
        for label, line, differ, group in zip(texts, lines, legend.differ, groups.values(), strict=True)
    ]


def _filled(name: str, config: Mapping[str, Any]) -> str:
    """Return a name with values in place of the settings in braces."""

    def value(match: re.Match[str]) -> str:
        if labels.find(key := match.group(1), config) is None:
            raise ValueError(f"--label={name}: {key} must be a setting of every run")
        return labels.setting(key, config).partition("=")[2]

    return re.sub(_IN_BRACES, value, name)


def _with_names(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names. To names that several curves share, add the settings that tell these curves apart."""
    texts = list(names)
    for name in set(names):
        indices = [index for index, other in enumerate(names) if other == name]
        if len(indices) > 1:
            for index, label in zip(indices, labels.labels_of([configs[index] for index in indices]), strict=True):
                texts[index] = f"{name}, {label}"
    return texts


def _lines_of(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each configuration, without the settings of the amount of noise."""
    rest = [
        {key: value for key, value in labels.read_settings(config).items() if key.rpartition(".")[2] not in labels.NOISE}
        for config in configs
    ]
    kinds = [sorted(labels.setting(key, config) for key in config) for config in rest]
    first = {str(kind): index for index, kind in reversed(list(enumerate(kinds)))}
    named = dict(zip(first, labels.labels_of([rest[index] for index in first.values()]), strict=True))
    return [named[str(kind)] for kind in kinds]


def notes(curves: Sequence[Curve]) -> list[str]:
    """Return the notes that belong below a table."""
    lines = [
        f"{run.folder}: not finished; its rounds so far are used" for curve in curves for run in curve.runs if not run.finished
    ]
    for curve in curves:
        if len({max(run.values) for run in curve.runs}) > 1:
            lines.append(f"{curve.label}: its runs end in different rounds; compared up to the last that all have")
    private = [run for curve in curves if curve.private for run in curve.runs]
    apart = "don't compare them with each other"
    if len({(run.delta, run.unit) for run in private}) > 1:
        lines.append(f"the epsilons hold for different deltas or protect different units: {apart}")
    if len(adversaries := dict.fromkeys(run.protected_against for run in private)) > 1:
        lines.append(f"the epsilons hold against different adversaries ({'; or '.join(adversaries)}): {apart}")
    if other := _tested_otherwise([curve.runs[0].config for curve in curves]):
        lines.append(
            f"the runs are tested on different records ({'; '.join(other)}): don't compare their metrics with each other"
        )
    for curve in curves:
        if private_metrics := _private(curve):
            lines.append(f"{curve.label}: {', '.join(private_metrics)}; these evaluations are charged")
    if keys := curves[0].left_out:
        lines.append(f"the curves also differ in {'; '.join(_values(key, curves) for key in keys)}")
    return lines


def _private(curve: Curve) -> list[str]:
    """Return the last values of a curve's private evaluations, as means over its runs, as text."""
    names = dict.fromkeys(name for run in curve.runs for name in run.private)
    values = {name: [run.private[name] for run in curve.runs if name in run.private] for name in names}
    return [
        private_quantity(name, sum(value for value, _ in of) / len(of), math.hypot(*(error for _, error in of)) / len(of))
        for name, of in values.items()
    ]


def _tested_otherwise(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings of test records in which runs differ, with their values."""
    tasks = {str(config["task"]) for config in configs if "task" in config}
    # Two folders may hold the same records; no folder means the records that packages carry.
    configs = [{**config, "data-dir": "a folder" if config.get("data-dir") else ""} for config in configs]
    keys = dict.fromkeys(key for config in configs for key in config if key in _TESTS or key.rpartition(".")[0] in tasks)
    values = {key: list(dict.fromkeys(labels.setting(key, config) for config in configs)) for key in keys}
    differ = {key: texts for key, texts in values.items() if len(texts) > 1}
    # Different tasks have different records anyway, so name the task alone.
    return [", ".join(texts) for key, texts in differ.items() if "task" not in differ or key == "task"]


def _values(key: str, curves: Sequence[Curve]) -> str:
    """Return a setting with its values, each once."""
    values = dict.fromkeys(labels.setting(key, curve.differ).removeprefix(f"{key}=") for curve in curves if key in curve.differ)
    return f"{key} ({', '.join(values)})"


def _curve(runs: Sequence[ComparedRun], metric: str, **named: Any) -> Curve:
    common = sorted(set.intersection(*(set(run.values) for run in runs)))
    if not common:
        raise ValueError(f"{runs[-1].folder}: has no {metric} of a round that the other runs of its curve have; leave it out")
    values = np.asarray([[run.values[at] for at in common] for run in runs])
    spent = np.asarray([[_spent(run, at) for at in common] for run in runs])
    return Curve(
        **named,
        runs=tuple(runs),
        rounds=np.asarray(common),
        mean=values.mean(axis=0),
        std=values.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(common)),
        spent=spent.max(axis=0),
        clip_norms=np.asarray([[run.clip_norms.get(at, math.nan) for at in common] for run in runs]).mean(axis=0),
    )


def _spent(run: ComparedRun, at: int) -> float:
    """Return the last epsilon recorded up to a round; infinite for all rounds of a run that was not private.

    Epsilons recorded by round are upper bounds. The statement's epsilon, of the whole run, also bounds each part of the run.
    """
    if math.isinf(run.epsilon):
        return math.inf
    if not run.spent:  # a privately selected run records no epsilon by round: any round may have cost all of it
        return run.epsilon if at else 0.0
    if min(run.spent) > at:
        return 0.0
    return min(run.spent[max(before for before in run.spent if before <= at)], run.epsilon)
