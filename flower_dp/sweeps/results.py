"""What a sweep has found: one row a run, one row a point, the figure, and the commands. Public numbers alone."""

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
    """The point that was chosen by the mean of a metric.

    Attributes:
        run: the first of its runs.
        mean: of the metric.
        num_seeds: how many runs it is the mean of.
    """

    run: SweepRun
    mean: float
    num_seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results of a sweep's runs, as their folders have them now.

    Attributes:
        folder: the sweep's.
        runs: all that are planned.
        metric: of tables and figure.
    """

    folder: SweepFolder
    runs: tuple[SweepRun, ...]
    metric: str

    def past(self, run: SweepRun) -> RunContents | None:
        """Return a run that has begun; None otherwise."""
        place = self.folder.of(run)
        return read_past_run(place) if (place / CONFIG).is_file() else None

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
        lines = [line for run in self.runs for line in (f"# {run.told}", f"{run.command}\n")]
        write_whole(self.folder.path / COMMANDS, "\n".join(lines).encode())

    def _row(self, run: SweepRun) -> dict[str, Any]:
        settings = {"app": run.point.app} if run.point.app else {}
        row: dict[str, Any] = {**settings, **run.point.settings, "seed": run.seed}
        past = self.past(run)
        row["state"] = "finished" if past and past.finished else "unfinished" if past and past.rows else "not begun"
        if past and past.rows:
            # Times are in the lines of those runs alone whose times tell nothing about who took part.
            row |= {"rounds": past.rows[-1].get("round"), "seconds": past.rows[-1].get("elapsed")}
            row |= last_metrics(past, self.metric)
            row |= {"epsilon": past.epsilon if past.statement else None, "delta": past.delta}
            row |= {key: past.guarantee.get(key) for key in ("unit", "relation", "protected_against")}
        return {**row, "folder": str(self.folder.of(run).relative_to(self.folder.path)), "command": run.command}

    def curves(self) -> list[Curve]:
        """Return a curve a point, of the finished runs with the metric; runs without it are left out."""
        found = []
        for run in self.runs:
            past = self.past(run)
            if past is not None and past.finished and past.series(self.metric):
                found.append(compare.read_run(self.folder.of(run), self.metric))
        return compare.curves_of(found, self.metric) if found else []

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
                f"Not in the table, since not finished or without {self.metric}: {'; '.join(run.told for run in missing)}."
            )
        lines += [best] if best else []
        lines += [
            "Mean ± standard deviation (n - 1) over seeds; epsilon of one run, the largest of its seeds.",
            f"Not covered: {CHOOSING}.",
        ]
        lines.append("Commands, each with the first seed; all are in commands.txt:")
        first = {run.label: run for run in reversed(self.runs)}
        commands = [f"# {run.told}\n{run.command}" for run in reversed(first.values())]
        lines.append("```bash\n" + "\n".join(commands) + "\n```")
        write_whole(self.folder.path / TABLE, ("\n\n".join(lines) + "\n").encode())

    def unknown(self, metrics: Iterable[str]) -> list[str]:
        """Return a line for each metric that no finished run has, while there are finished runs."""
        past = [past for run in self.runs if (past := self.past(run)) is not None and past.finished]
        known = ", ".join(dict.fromkeys(name for one in past for name in last_metrics(one, self.metric))) or "no metric"
        missing = [metric for metric in dict.fromkeys(metrics) if not any(one.series(metric) for one in past)]
        return [f"metric {metric!r}: is in no finished run; they have {known}" for metric in missing] if past else []

    def draw(self, curves: Sequence[Curve]) -> Path | None:
        """Draw the metric against epsilon, or over rounds where no run is private; None without matplotlib or curves."""
        if not curves or importlib.util.find_spec("matplotlib") is None:
            return None
        from flower_dp.reporting import canvas, figures  # noqa: PLC0415  (slow to load)

        private = any(curve.private for curve in curves)
        drawn = figures.against_epsilon(curves, self.metric) if private else figures.figure(curves, self.metric)
        canvas.save(drawn, str(self.folder.path / FIGURE))
        return self.folder.path / FIGURE

    def best(self, choice: SelectionRule) -> Best | None:
        """Return the point with the best mean, of those whose runs have all finished; None without one."""
        found: dict[str, list[tuple[SweepRun, float]]] = {}
        for run in self.runs:
            past = self.past(run)
            series = past.series(choice.metric) if past is not None and past.finished else {}
            found.setdefault(run.label, []).append((run, series[max(series)] if series else math.nan))
        means = {label: statistics.fmean(value for _, value in values) for label, values in found.items()}
        whole = {label: mean for label, mean in means.items() if math.isfinite(mean)}
        if not whole:
            return None
        label = (max if choice.mode == "max" else min)(whole, key=lambda one: whole[one])
        return Best(run=found[label][0][0], mean=whole[label], num_seeds=len(found[label]))


def last_metrics(past: RunContents, metric: str) -> Mapping[str, float]:
    """Return the last value of each metric of a run, the wanted one first; what clients were asked for is left out.

    NaN stands for one that was not finite.
    """
    told = (name for row in past.rows for name in row if not metric_columns.is_reserved(name) or name.startswith("private-"))
    found = {name: past.series(name) for name in dict.fromkeys((metric, *told))}
    # What was never a number is no metric: null stands for one that was not finite.
    return {
        name: of[max(of)] for name, of in found.items() if of and any(metric_columns.number(row.get(name)) for row in past.rows)
    }
