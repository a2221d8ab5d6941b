"""The plot of one run: its metrics and its epsilon over the rounds."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flower_dp.core import metric_columns
from flower_dp.core.formatting import format_delta, format_epsilon
from flower_dp.running.progress import private_quantity

Rows = Sequence[Mapping[str, Any]]

# Blue circles and orange squares differ for the color-blind and in gray print.
_METRIC, _EPSILON = "#0072B2", "#D55E00"
_STYLES = ("-", ":", "-.")
_MAX_PANELS = 11  # of metrics
_ROWS = 4  # panels in a column before another one begins
_MAX_MARKS = 60


def png(rows: Rows) -> bytes:
    """Return the PNG of a run's plot."""
    buffer = io.BytesIO()
    figure(rows).savefig(buffer, format="png")
    return buffer.getvalue()


def figure(rows: Rows) -> Figure:
    """Return a figure of the metrics of `evaluate_fn` and of private evaluations, and of epsilon, over the rounds.

    Metrics with the same last word, such as `loss` and `validation-loss`, share a panel; epsilon has the last one. All panels
    have the same rounds. A line bridges rounds without a metric, and leaves out rounds whose epsilon is null (not private).

    Args:
        rows: lines of `metrics.jsonl`.
    """
    panels = _panels(rows)
    shown = list(panels)[:_MAX_PANELS] or [""]
    columns = -(-(len(shown) + 1) // _ROWS)
    height = -(-(len(shown) + 1) // columns)
    result = Figure(figsize=(8.0 * columns, 1.5 + 2.3 * height), dpi=150, layout="constrained")
    FigureCanvasAgg(result)
    grid = result.subplots(height, columns, squeeze=False, sharex=True).ravel()
    for axes, kind in zip(grid, shown, strict=False):
        _draw_metrics(axes, kind, panels.get(kind, []), rows)
    _draw_epsilon(grid[len(shown)], rows)
    for axes in grid[len(shown) + 1 :]:
        axes.set_axis_off()
    for axes in grid[: len(shown) + 1][-columns:]:  # the lowest of each column: nothing is drawn below it
        axes.set_xlabel("round")
        axes.tick_params(axis="x", labelbottom=True)
    num_hidden = len(panels) - len(shown)
    result.suptitle(_title(rows) + (f" ({num_hidden} more in metrics.jsonl)" if num_hidden > 0 else ""), fontsize="medium")
    return result


def _panels(rows: Rows) -> dict[str, list[str]]:
    """Return the metrics by their last word, one panel each: accuracy first, then in the order of the lines."""
    panels: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in (*metric_columns.metrics(row), *metric_columns.private(row))):
        panels.setdefault(metric_columns.kind(name), []).append(name)
    return dict(sorted(panels.items(), key=lambda panel: panel[0] != "accuracy"))


def _draw_metrics(axes: Axes, kind: str, names: Sequence[str], rows: Rows) -> None:
    lines: list[Line2D] = []
    for name, style in zip(names, _STYLES * len(names), strict=False):
        label = f"test {name}" if name in ("accuracy", "loss") else name.replace("private-", "private ")
        lines += _line(axes, rows, name, color=_METRIC, marker="o", linestyle=style, label=label)
        private = [
            (row["round"], *metric_columns.private(row)[name])
            for row in rows
            if "round" in row and name in metric_columns.private(row)
        ]
        if bars := [numbers for numbers in private if all(map(math.isfinite, numbers))]:
            rounds, values, spread = zip(*bars, strict=True)
            axes.errorbar(rounds, values, yerr=spread, fmt="none", ecolor=_METRIC)
    unit = " (%)" if metric_columns.percent(kind) else ""
    _finish(axes, f"{lines[0].get_label() if len(lines) == 1 else kind}{unit}" or "no metric recorded", drawn=bool(lines))
    if metric_columns.percent(kind):
        axes.set_ylim(0.0, 1.0)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0, symbol=""))
    if len(lines) > 1:
        axes.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _draw_epsilon(axes: Axes, rows: Rows) -> None:
    """Draw epsilon in a panel of its own: with a second scale in the metric's panel, lines would cross without a meaning."""
    lines = _line(axes, rows, "epsilon", color=_EPSILON, marker="s", linestyle="--", label="epsilon spent")
    # "not recorded" could be read as no epsilon spent.
    infinite = not lines and any("epsilon" in row for row in rows)
    text = "epsilon: infinite, not private" if infinite else "epsilon spent" if lines else "epsilon: not recorded"
    _finish(axes, text, drawn=bool(lines))
    if lines:
        axes.set_ylim(bottom=0.0)


def _finish(axes: Axes, text: str, *, drawn: bool) -> None:
    axes.set_ylabel(text)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if not drawn:
        axes.set_yticks([])


def _line(axes: Axes, rows: Rows, name: str, **look: Any) -> list[Line2D]:
    """Draw a column over the rounds that have it; return its line, or no line if no round has it."""
    rounds, values = _points(rows, name)
    if len(rounds) > _MAX_MARKS:
        look["marker"] = None
    return axes.plot(rounds, values, markersize=4, **look) if rounds else []


def _points(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Return the rounds at which a column is present and finite, and its values there."""
    kept = [
        (int(row["round"]), float(row[name]))
        for row in rows
        if "round" in row and isinstance(row.get(name), int | float) and math.isfinite(row[name])
    ]
    return [at for at, _ in kept], [value for _, value in kept]


def _title(rows: Rows) -> str:
    """Return the run's last values as one line."""
    parts = [f"{max((int(row.get('round', 0)) for row in rows), default=0)} rounds"]
    _, accuracies = _points(rows, "accuracy")
    if accuracies:
        parts.append(f"accuracy {100 * accuracies[-1]:.1f} %")
    newest = {name: value for row in rows for name, value in row.items()}
    parts += [private_quantity(name, *of) for name, of in metric_columns.private(newest).items()]
    last = rows[-1] if rows else {}
    if isinstance(last.get("epsilon"), int | float):
        delta = f" at delta {format_delta(last['delta'])}" if last.get("delta") else ""
        parts.append(f"epsilon {format_epsilon(last['epsilon'], decimals=2)}{delta}")
    elif "epsilon" in last:
        parts.append("not private")
    return ", ".join(parts)
