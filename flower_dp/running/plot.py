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
_MOST_PANELS = 12
_ROWS = 4  # rows of panels in one column
_MOST_MARKS = 60


def png(rows: Rows) -> bytes:
    """Return the PNG of a run's plot."""
    buffer = io.BytesIO()
    figure(rows).savefig(buffer, format="png")
    return buffer.getvalue()


def figure(rows: Rows) -> Figure:
    """Return a figure of metrics (left) and epsilon (right) over the rounds.

    The metrics are those of `evaluate_fn` and of private evaluations. Metrics with the same last word, such as `loss` and
    `validation-loss`, share one panel. Lines bridge rounds without a metric, and leave out rounds whose epsilon is null (not
    private).

    Args:
        rows: lines of `metrics.jsonl`.
    """
    panels = _panels(rows)
    shown = list(panels)[:_MOST_PANELS] or [""]
    width = -(-len(shown) // _ROWS)
    height = -(-len(shown) // width)
    result = Figure(figsize=(8.0 * width, 2.0 + 2.5 * height), dpi=150, layout="constrained")
    FigureCanvasAgg(result)
    every = result.subplots(height, width, squeeze=False).ravel()
    for axes, name in zip(every, shown, strict=False):
        _draw(axes, name, panels.get(name, []), rows)
    for axes in every[len(shown) :]:
        axes.set_axis_off()
    left_out = len(panels) - len(shown)
    result.suptitle(_title(rows) + (f" ({left_out} more in metrics.jsonl)" if left_out > 0 else ""), fontsize="medium")
    return result


def _panels(rows: Rows) -> dict[str, list[str]]:
    """Return the metrics of every panel by their last word: accuracy first, others in the order of the lines."""
    panels: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in (*metric_columns.metrics(row), *metric_columns.private(row))):
        panels.setdefault(metric_columns.kind(name), []).append(name)
    return dict(sorted(panels.items(), key=lambda panel: panel[0] != "accuracy"))


def _draw(left: Axes, kind: str, names: Sequence[str], rows: Rows) -> None:
    right = left.twinx()
    lines: list[Line2D] = []
    for name, style in zip(names, _STYLES * len(names), strict=False):
        label = f"test {name}" if name in ("accuracy", "loss") else name.replace("private-", "private ")
        lines += _line(left, rows, name, color=_METRIC, marker="o", linestyle=style, label=label)
        points = [
            (row["round"], *metric_columns.private(row)[name])
            for row in rows
            if "round" in row and name in metric_columns.private(row)
        ]
        if bars := [point for point in points if all(map(math.isfinite, point))]:
            rounds, values, spread = zip(*bars, strict=True)
            left.errorbar(rounds, values, yerr=spread, fmt="none", ecolor=_METRIC)
    spent = _line(right, rows, "epsilon", color=_EPSILON, marker="s", linestyle="--", label="epsilon spent")
    unit = " (%)" if metric_columns.percent(kind) else ""
    _label(left, f"{lines[0].get_label() if len(lines) == 1 else kind}{unit}", _METRIC, drawn=bool(lines))
    # Of a run that is not private, "not recorded" could be read as no epsilon spent.
    unbounded = not spent and any("epsilon" in row for row in rows)
    label = "epsilon: infinite, not private" if unbounded else "epsilon spent" if spent else "epsilon: not recorded"
    _label(right, label, _EPSILON, drawn=bool(spent))
    left.set_xlabel("round")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    if metric_columns.percent(kind):
        left.set_ylim(0.0, 1.0)
        left.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0, symbol=""))
    if spent:
        right.set_ylim(bottom=0.0)
    left.grid(alpha=0.3)
    if lines or spent:
        left.legend(handles=[*lines, *spent], loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _line(axes: Axes, rows: Rows, name: str, **look: Any) -> list[Line2D]:
    """Draw a column over the rounds that have it, and return its line; return no line without such rounds."""
    rounds, values = _points(rows, name)
    if len(rounds) > _MOST_MARKS:
        look["marker"] = None
    return axes.plot(rounds, values, markersize=4, **look) if rounds else []


def _label(axes: Axes, text: str, color: str, *, drawn: bool) -> None:
    axes.set_ylabel(text or "no metric recorded", color=color)
    axes.tick_params(axis="y", labelcolor=color)
    if not drawn:
        axes.set_yticks([])


def _points(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Return the rounds and values at which a column is present and finite."""
    kept = [
        (int(row["round"]), float(row[name]))
        for row in rows
        if "round" in row and isinstance(row.get(name), int | float) and math.isfinite(row[name])
    ]
    return [at for at, _ in kept], [value for _, value in kept]


def _title(rows: Rows) -> str:
    """Return the last values of the run in one line."""
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
