"""The results of a sweep: one row per run, one row per point, the figure, and the commands. Public numbers only."""

import csv
import importlib.util
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_dp.core import metric_columns
from flower_dp.reporting import compare, tables
from flower_dp.reporting.compare import Curve
from flower_dp.reporting.past_run import RunContents, read_past_run
from flower_dp.running.run_folder import CONFIG, write_whole
from flower_dp.sweeps.cost import CHOOSING
from flower_dp.sweeps.file import SelectionRule
from flower_dp.sweeps.folder import RESULTS, SweepFolder
from flower_dp.sweeps.plan import SweepRun

TABLE, FIGURE, COMMANDS = "table.md", "figure.png", "commands.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The point with the best mean of a metric.

    Attributes:
        run: first run of the point.
        mean: mean of the metric over the point's runs.
        num_seeds: number of these runs.
    """

    run: SweepRun
    mean: float
    num_seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The current results of a sweep's runs, read from their folders.

    Attributes:
        folder: folder of the sweep.
        runs: all planned runs.
        metric: metric of tables and figure.
    """

    folder: SweepFolder
    runs: tuple[SweepRun, ...]
    metric: str

    def past(self, run: SweepRun) -> RunContents | None:
        """Return the contents of a run that has begun; None otherwise."""
        folder = self.folder.of(run)
        return read_past_run(folder) if (folder / CONFIG).is_file() else None

    def write_rows(self) -> None:
        """Write `results.csv` and `commands.txt`."""
        rows = [self._row(run) for run in self.runs]
        heads = dict.fromkeys(key for row in rows for key in row)
        last = ("folder", "command")
        names = [*(name for name in heads if name not in last), *last]
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.folder.path / RESULTS, buffer.getvalue().encode())
        lines = [line for run in self.runs for line in (f"# {run.description}", f"{run.command}\n")]
        write_whole(self.folder.path / COMMANDS, "\n".join(lines).encode())

    def _row(self, run: SweepRun) -> dict[str, Any]:
        settings = {"app": run.point.app} if run.point.app else {}
        row: dict[str, Any] = {**settings, **run.point.settings, "seed": run.seed}
        past = self.past(run)
        row["state"] = "finished" if past and past.finished else "unfinished" if past and past.rows else "not begun"
        if past and past.rows:
            # A run's lines have times only if times reveal nothing about who took part.
            row |= {"rounds": past.rows[-1].get("round"), "seconds": past.rows[-1].get("elapsed")}
            row |= last_metrics(past, self.metric)
            row |= {"epsilon": past.epsilon if past.statement else None, "delta": past.delta}
            row |= {key: past.guarantee.get(key) for key in ("unit", "relation", "protected_against")}
        return {**row, "folder": str(self.folder.of(run).relative_to(self.folder.path)), "command": run.command}

    def curves(self) -> list[Curve]:
        """Return one curve per point, of the finished runs that have the metric."""
        compared = []
        for run in self.runs:
            past = self.past(run)
            if past is not None and past.finished and past.series(self.metric):
                compared.append(compare.read_run(self.folder.of(run), self.metric))
        return compare.curves_of(compared, self.metric) if compared else []

    def write_table(self, curves: Sequence[Curve], best: str) -> None:
        """Write `table.md`: mean and spread of each point, and the command of its first run."""
        finished = {run.folder.name for curve in curves for run in curve.runs}
        if curves:
            lines = [tables.as_markdown(curves, self.metric, compare.notes(curves))]
            lines += [tables.as_markdown(curves, self.metric, pivot=True)] if tables.is_pivot(curves) else []
        else:
            lines = self.unknown((self.metric,)) or ["No run has finished."]
        if missing := [run for run in self.runs if run.name not in finished]:
            lines.append(
                f"Not in the table (unfinished, or without {self.metric}): {'; '.join(run.description for run in missing)}."
            )
        lines += [best] if best else []
        lines += [
            "Mean ± standard deviation (n - 1) over seeds. Epsilon is that of one run, the largest over seeds.",
            f"Not covered: {CHOOSING}.",
        ]
        lines.append("Commands, each with the first seed; all are in commands.txt:")
        first = {run.label: run for run in reversed(self.runs)}
        commands = [f"# {run.description}\n{run.command}" for run in reversed(first.values())]
        lines.append("```bash\n" + "\n".join(commands) + "\n```")
        write_whole(self.folder.path / TABLE, ("\n\n".join(lines) + "\n").encode())

    def unknown(self, metrics: Iterable[str]) -> list[str]:
        """Return a line for each metric that no finished run has; no line if no run has finished."""
        past = [past for run in self.runs if (past := self.past(run)) is not None and past.finished]
        known = ", ".join(dict.fromkeys(name for run in past for name in last_metrics(run, self.metric))) or "no metric"
        missing = [metric for metric in dict.fromkeys(metrics) if not any(run.series(metric) for run in past)]
        return [f"metric={metric!r}: must be in a finished run; they have {known}" for metric in missing] if past else []

    def draw(self, curves: Sequence[Curve]) -> Path | None:
        """Draw the metric over epsilon, or over rounds if no run is private; return None without matplotlib or curves."""
        if not curves or importlib.util.find_spec("matplotlib") is None:
            return None
        from flower_dp.reporting import canvas, figures  # noqa: PLC0415  (slow to load)

        private = any(curve.private for curve in curves)
        drawn = figures.against_epsilon(curves, self.metric) if private else figures.figure(curves, self.metric)
        canvas.save(drawn, str(self.folder.path / FIGURE))
        return self.folder.path / FIGURE

    def best(self, choice: SelectionRule) -> Best | None:
        """Return the point with the best mean, among points whose runs have all finished; None if there is none."""
        by_point: dict[str, list[tuple[SweepRun, float]]] = {}
        for run in self.runs:
            past = self.past(run)
            series = past.series(choice.metric) if past is not None and past.finished else {}
            by_point.setdefault(run.label, []).append((run, series[max(series)] if series else math.nan))
        means = {label: statistics.fmean(value for _, value in values) for label, values in by_point.items()}
        complete = {label: mean for label, mean in means.items() if math.isfinite(mean)}
        if not complete:
            return None
        label = (max if choice.mode == "max" else min)(complete, key=lambda label: complete[label])
        return Best(run=by_point[label][0][0], mean=complete[label], num_seeds=len(by_point[label]))


def last_metrics(past: RunContents, metric: str) -> Mapping[str, float]:
    """Return the last value of each metric of a run, `metric` first, without metrics that clients reported.

    NaN stands for a value that was not finite.
    """
    names = (name for row in past.rows for name in row if not metric_columns.is_reserved(name) or name.startswith("private-"))
    series = {name: past.series(name) for name in dict.fromkeys((metric, *names))}
    # A column that never had a number is not a metric: null stands for a number that was not finite.
    return {
        name: values[max(values)]
        for name, values in series.items()
        if values and any(metric_columns.number(row.get(name)) for row in past.rows)
    }
