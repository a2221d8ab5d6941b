"""The figure of loss landscapes: one panel of lines, and one of contours for every run, all on one scale."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flower_dp.core.formatting import format_rounded_up
from flower_dp.reporting import canvas
from flower_dp.reporting.labels import wrapped
from flower_dp.reporting.landscape import Landscape

_LEVELS = 15
# Losses that differ by more than this factor are drawn on a logarithmic scale.
_WIDE = 5.0


def figure(landscapes: Sequence[Landscape]) -> Figure:
    """Return a figure of the losses of all runs along one direction, and of each run along two.

    Raises:
        ValueError: if no loss is finite.
    """
    levels, log = _scale(landscapes)
    panels = len(landscapes) + 1
    columns = panels if panels <= 3 else math.isqrt(panels - 1) + 1
    rows = -(-panels // columns)
    result = canvas.empty(4.2 * columns + 0.8, 4.2 * rows + 0.4)
    every = result.subplots(rows, columns, squeeze=False).ravel()
    _draw_lines(every[0], landscapes, levels, log=log)
    result.legend(loc="outside lower center", fontsize="small", ncols=columns, frameon=False)
    norm = LogNorm(levels[0], levels[-1]) if log else Normalize(levels[0], levels[-1])
    shown = every[1:panels]
    for axes, landscape in zip(shown, landscapes, strict=True):
        grid = landscape.offsets, landscape.offsets, np.ma.masked_invalid(landscape.losses)
        filled = axes.contourf(*grid, levels=levels, norm=norm, cmap="viridis")
        axes.contour(*grid, levels=levels, colors="white", linewidths=0.4)
        axes.plot(0, 0, marker="+", color="white", markersize=8)
        axes.set_title("\n".join(_entry(landscape)), fontsize="small")
        axes.set(aspect="equal", xlabel="first direction", ylabel="second direction")
    result.colorbar(filled, ax=list(shown), label="test loss", format="%.3g", shrink=0.8)
    for axes in every[panels:]:
        axes.set_axis_off()
    result.suptitle(
        f"Loss on {landscapes[0].num_records} test records around final models (+), along random directions normalized filter by "
        "filter",
        fontsize="medium",
    )
    return result


def _draw_lines(axes: Axes, landscapes: Sequence[Landscape], levels: NDArray[np.float64], *, log: bool) -> None:
    for index, landscape in enumerate(landscapes):
        axes.plot(landscape.offsets, landscape.line, label=canvas.entry(_entry(landscape)), **canvas.look(index))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.set(ylim=(levels[0], levels[-1]), box_aspect=1, xlabel="first direction", ylabel="test loss")
    axes.grid(alpha=0.3)


def _scale(landscapes: Sequence[Landscape]) -> tuple[NDArray[np.float64], bool]:
    """Return the common contour levels of all runs, increasing, and whether they are logarithmic."""
    values = np.concatenate([landscape.losses.ravel() for landscape in landscapes])
    values = values[np.isfinite(values)]
    if not values.size:
        raise ValueError("losses: one or more must be finite; set a smaller --distance")
    low, high = float(values.min()), float(values.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    log = low > 0 and high > _WIDE * low
    return (np.geomspace if log else np.linspace)(low, high, _LEVELS), log


def _entry(landscape: Landscape) -> list[str]:
    """Return a run's label, loss and epsilon."""
    private = f"epsilon {format_rounded_up(landscape.epsilon, 4)}" if math.isfinite(landscape.epsilon) else "not private"
    return [*wrapped(landscape.label), f"loss {landscape.here:.4g}, {private}"]
