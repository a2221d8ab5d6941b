"""Figures of the curves of runs. No other module of the comparison needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from flower_dp.core.formatting import format_delta
from flower_dp.reporting import canvas
from flower_dp.reporting.compare import Curve
from flower_dp.reporting.labels import wrapped

_POINTS: Mapping[str, Any] = {"markersize": 4, "capsize": 3, "elinewidth": 1}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_BARS = 12  # approximate number of error bars and markers on a curve
_HALF = 34  # letters in half the width of the figure over epsilon


def figure(curves: Sequence[Curve], metric: str, *, grouped: bool = False) -> Figure:
    """Return a figure of the metric over the rounds, beside one over the epsilon spent if a curve is private.

    If a curve has an adaptive clip norm, the last panel shows the clip norm over the rounds.

    Args:
        curves: curves to draw.
        metric: metric of the curves.
        grouped: whether curves of one line (`Curve.line`) get one color.
    """
    looks = _looks(curves, grouped=grouped)
    panels = 2 if any(curve.private for curve in curves) else 1
    moving = [index for index, curve in enumerate(curves) if np.isfinite(curve.clip_norms).any()]
    entries = [_entry(curve, curves) for curve in curves]
    result = canvas.empty(5.5 * (panels + bool(moving)) + 0.5, 4.6 + 0.2 * sum(map(len, entries)) / panels)
    axes = result.subplots(1, panels + bool(moving), squeeze=False)[0]
    every = axes[:panels]
    for panel in every[1:]:
        panel.sharey(every[0])
        panel.tick_params(labelleft=False)
    for index, curve in enumerate(curves):
        label = canvas.entry(entries[index])
        _plot(every[0], curve.rounds.astype(float), curve, label, index, looks)
        if curve.private:
            _plot(every[-1], curve.spent, curve, label, index, looks)
    every[0].set_xlabel("round")
    every[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    _metric_axis(every[0], metric)
    if panels > 1:
        _epsilon_axis(every[-1], curves)
    if moving:
        _clip_norms(axes[-1], [(looks[index], curves[index]) for index in moving])
    for panel in axes:
        panel.grid(alpha=0.3)
    result.suptitle(_title(curves, metric, "curve"))
    handles, names = every[0].get_legend_handles_labels()
    result.legend(handles, names, loc="outside lower center", ncols=panels, frameon=False)
    return result


def against_epsilon(curves: Sequence[Curve], metric: str) -> Figure:
    """Return a figure of the last metric of every curve over the curve's epsilon, as in the table.

    Curves of one line (`Curve.line`) are points of one line, by epsilon. A curve that is not private is a horizontal line.

    Raises:
        ValueError: if no curve is private.
    """
    if not any(curve.private for curve in curves):
        raise ValueError("--x-axis=epsilon: needs a private run; set --x-axis rounds")
    lines: dict[str, list[Curve]] = {}
    for curve in curves:
        lines.setdefault(curve.line, []).append(curve)
    labels = [wrapped(name + _counted(points, curves)) for name, points in lines.items()]
    columns = 2 if max(len(line) for label in labels for line in label) <= _HALF else 1
    inches = sum(0.18 * len(label) + 0.06 for label in labels)  # approximate height of the legend, with letters of 10 points
    result = canvas.empty(6.5, 4.6 + inches / columns)
    axes = result.subplots()
    for index, points in enumerate(lines.values()):
        look, label = canvas.look(index), canvas.entry(labels[index])
        private = sorted((curve for curve in points if curve.private), key=lambda curve: curve.epsilon)
        if private:
            axes.errorbar(
                [curve.epsilon for curve in private],
                [curve.mean[-1] for curve in private],
                yerr=[curve.std[-1] if len(curve.runs) > 1 else np.nan for curve in private],
                marker=_MARKERS[index % len(_MARKERS)],
                label=label,
                **look,
                **_POINTS,
            )
        for curve in points:
            if not curve.private:
                _level(axes, curve, label, look["color"])
    _metric_axis(axes, metric)
    _epsilon_axis(axes, [curve for curve in curves if curve.private], "epsilon of the whole run")
    axes.grid(alpha=0.3)
    result.suptitle(_title(curves, metric, "point"), fontsize="medium")
    result.legend(loc="outside lower center", ncols=columns, frameon=False)
    return result


def _level(axes: Axes, curve: Curve, label: str, color: str) -> None:
    """Draw the last metric of a curve without privacy as a horizontal line, with its spread."""
    last, spread = float(curve.mean[-1]), float(curve.std[-1])
    axes.axhline(last, color=color, linestyle=":", label=f"{label}\nnot private")
    if len(curve.runs) > 1:
        axes.axhspan(last - spread, last + spread, color=color, alpha=0.15, linewidth=0)


def _counted(part: Sequence[Curve], curves: Sequence[Curve]) -> str:
    """Return the number of runs of some curves, for the legend; empty if it is the same for all curves, as in the title."""
    if len({len(curve.runs) for curve in curves}) == 1:
        return ""
    counts = sorted({len(curve.runs) for curve in part})
    return ", n = " + " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def _looks(curves: Sequence[Curve], *, grouped: bool) -> list[Mapping[str, Any]]:
    """Return the color and style of every curve."""
    if not grouped:
        return [canvas.look(index) for index in range(len(curves))]
    lines = [curve.line for curve in curves]
    colors = {line: index for index, line in enumerate(dict.fromkeys(lines))}
    return [canvas.look(colors[line], lines[:index].count(line)) for index, line in enumerate(lines)]


def _title(curves: Sequence[Curve], metric: str, mark: str) -> str:
    shown = _shown(metric)
    if all(len(curve.runs) == 1 for curve in curves):
        return f"{shown[0].upper()}{shown[1:]}: one run per {mark}; its spread over seeds is unknown"
    counts = {len(curve.runs) for curve in curves}
    number = counts.pop() if len(counts) == 1 else "n"
    title = f"{shown[0].upper()}{shown[1:]}: mean of {number} runs with different seeds; bars: their standard deviation"
    return title + (f"\nepsilon: the largest of the {number} runs" if any(curve.private for curve in curves) else "")


def _shown(metric: str) -> str:
    return f"test {metric}" if metric in ("accuracy", "loss") else metric


def _metric_axis(axes: Axes, metric: str) -> None:
    axes.set_ylabel("test accuracy (%)" if metric == "accuracy" else _shown(metric))
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, symbol=""))


def _plot(axes: Axes, x: NDArray[np.float64], curve: Curve, label: str, index: int, looks: Sequence[Mapping[str, Any]]) -> None:
    step = max(1, round(len(x) / _BARS))
    # Bars of different curves are at different rounds, so that they don't overlap; the first curve has one at the last round.
    first = (len(x) - 1 - index * step // len(looks)) % step
    axes.errorbar(
        x,
        curve.mean,
        yerr=curve.std if len(curve.runs) > 1 else None,
        errorevery=(first, step),
        marker=_MARKERS[index % len(_MARKERS)],
        markevery=(first, step),
        label=label,
        **looks[index],
        **_POINTS,
    )


def _clip_norms(axes: Axes, curves: Sequence[tuple[Mapping[str, Any], Curve]]) -> None:
    for look, curve in curves:
        axes.plot(curve.rounds, curve.clip_norms, **look)
    axes.set(yscale="log", xlabel="round", ylabel="clip norm")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _epsilon_axis(axes: Axes, curves: Sequence[Curve], text: str = "epsilon spent") -> None:
    private = [curve for curve in curves if curve.private]
    ends = [curve.epsilon for curve in private if curve.epsilon > 0]
    if ends and max(ends) > 20 * min(ends):
        axes.set_xscale("log")
    guarantees = {(curve.runs[0].delta, curve.runs[0].unit) for curve in private}
    delta, unit = next(iter(guarantees))
    guarantee = f" (delta {format_delta(delta)}; {unit})" if isinstance(delta, int | float) else f" ({unit})"
    axes.set_xlabel(text + (guarantee if len(guarantees) == 1 else " (for different deltas or units)"))
    if len(private) < len(curves):
        axes.set_title("without the curves that are not private", fontsize="medium")


def _entry(curve: Curve, curves: Sequence[Curve]) -> list[str]:
    """Return the lines of a curve's legend entry."""
    private = f"epsilon {curve.format_epsilon()}" if curve.private else "not private"
    return [*wrapped(curve.label), private + _counted([curve], curves)]
