"""Figures of the curves of runs. The only module of the comparison that needs matplotlib."""

import os
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from flower_dp.privacy.statement import delta_in_words
from flower_dp.reporting import canvas
from flower_dp.reporting.compare import Curve, wrapped

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_BARS = 12  # approximate number of error bars and markers on a curve


def draw(curves: Sequence[Curve], metric: str, path: str | os.PathLike[str]) -> None:
    """Write the figure of the curves to a PNG file, completely or not at all.

    Raises:
        ValueError: if the file's name does not end in .png, or it can't be written.
    """
    canvas.save(figure(curves, metric), path)


def figure(curves: Sequence[Curve], metric: str) -> Figure:
    """Return a figure of the metric over the rounds and, if a curve is private, over the epsilon spent.

    If a curve has an adaptive clip norm, a last panel has the clip norm over the rounds.
    """
    panels = 2 if any(curve.private for curve in curves) else 1
    moving = [place for place, curve in enumerate(curves) if np.isfinite(curve.clip_norms).any()]
    lines = sum(len(_entry(curve)) for curve in curves)
    result = canvas.empty(5.5 * (panels + bool(moving)) + 0.5, 4.6 + 0.2 * lines / panels)
    axes = result.subplots(1, panels + bool(moving), squeeze=False)[0]
    every = axes[:panels]
    for one in every[1:]:
        one.sharey(every[0])
        one.tick_params(labelleft=False)
    for place, curve in enumerate(curves):
        _plot(every[0], curve.rounds.astype(float), curve, place, len(curves))
        if curve.private:
            _plot(every[-1], curve.spent, curve, place, len(curves))
    every[0].set_xlabel("round")
    every[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    shown = f"test {metric}" if metric in ("accuracy", "loss") else metric
    every[0].set_ylabel("test accuracy (%)" if metric == "accuracy" else shown)
    if panels > 1:
        _epsilon_axis(every[-1], curves)
    if metric == "accuracy":
        every[0].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, symbol=""))
    if moving:
        _clip_norms(axes[-1], [(place, curves[place]) for place in moving])
    for one in axes:
        one.grid(alpha=0.3)
    if any(len(curve.runs) > 1 for curve in curves):
        result.suptitle(f"{shown[0].upper()}{shown[1:]}: mean of n runs with different seeds; bars: their standard deviation")
    else:
        result.suptitle(f"{shown[0].upper()}{shown[1:]}: one run a curve, so its spread over seeds is not known")
    handles, names = every[0].get_legend_handles_labels()
    result.legend(handles, names, loc="outside lower center", ncols=panels, frameon=False)
    return result


def _plot(axes: Axes, x: NDArray[np.float64], curve: Curve, place: int, count: int) -> None:
    step = max(1, round(len(x) / _BARS))
    # The bars of different curves are at different rounds, so that they don't overlap; those of the first end at the last round.
    first = (len(x) - 1 - place * step // count) % step
    axes.errorbar(
        x,
        curve.mean,
        yerr=curve.std if len(curve.runs) > 1 else None,
        errorevery=(first, step),
        marker=_MARKERS[place % len(_MARKERS)],
        markevery=(first, step),
        markersize=4,
        capsize=3,
        elinewidth=1,
        label="\n".join(_entry(curve)),
        **canvas.look(place),
    )


def _clip_norms(axes: Axes, curves: Sequence[tuple[int, Curve]]) -> None:
    for place, curve in curves:
        axes.plot(curve.rounds, curve.clip_norms, **canvas.look(place))
    axes.set_yscale("log")
    axes.set_xlabel("round")
    axes.set_ylabel("clip norm")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _epsilon_axis(axes: Axes, curves: Sequence[Curve]) -> None:
    private = [curve for curve in curves if curve.private]
    ends = [curve.epsilon for curve in private if curve.epsilon > 0]
    if ends and max(ends) > 20 * min(ends):
        axes.set_xscale("log")
    guarantees = {(curve.runs[0].delta, curve.runs[0].unit) for curve in private}
    delta, unit = next(iter(guarantees))
    one = f" (delta {delta_in_words(delta)}; {unit})" if isinstance(delta, int | float) else f" ({unit})"
    axes.set_xlabel("epsilon spent" + (one if len(guarantees) == 1 else " (for different deltas or units)"))
    if len(private) < len(curves):
        axes.set_title("without the curves that are not private", fontsize="medium")


def _entry(curve: Curve) -> list[str]:
    """Return a curve's lines of the legend."""
    private = f"tight epsilon {curve.epsilon_in_words()}" if curve.private else "not private"
    return [*wrapped(curve.label), f"{private}, n = {len(curve.runs)}"]
