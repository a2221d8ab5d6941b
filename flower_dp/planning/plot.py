"""Draw the bound around its optimum. Only this module of the planners needs matplotlib."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flower_dp.planning.planner import Panel, Plan, ProblemError

_POINTS = 400
# With at most this many points, the curve marks each whole number.
_FEW = 50


def figure(plan: Plan[Any, Any]) -> Figure:
    """Return the bound over each variable that the plan chose, one diagram per variable, with the optimum marked.

    Raises:
        ProblemError: if the plan has no bound to draw.
    """
    if not plan.panels:
        why = plan.infeasible or "the problem has none of its constants"
        raise ProblemError("plot", f"plot: there is no bound to draw; {why}")
    panels = plan.panels
    result = Figure(figsize=(5.5 * len(panels), 4.0), layout="constrained")
    for number, panel in enumerate(panels, 1):
        _fill(result.add_subplot(1, len(panels), number), panel)
    return result


def _fill(axes: Axes, panel: Panel) -> None:
    x = np.unique(np.linspace(panel.first, panel.last, _POINTS).round())
    if panel.optimum is not None:
        x = np.union1d(x, [panel.optimum[0]])
    drawn = []
    for label, curve in panel.curves.items():
        y = curve(x)
        axes.plot(x, y, label=label, marker="." if len(x) <= _FEW else "")
        drawn.append(y[np.isfinite(y)])
    if panel.optimum is not None:
        optimum, value = panel.optimum
        axes.plot([optimum], [value], "*", markersize=14, color="black", label=f"optimum: {optimum} ({value:.4g})")
    else:
        axes.text(0.5, 0.5, "infeasible", transform=axes.transAxes, ha="center")
    finite = np.concatenate(drawn)
    if finite.size and finite.min() > 0 and finite.max() > 100 * finite.min():
        axes.set_yscale("log")
    axes.set(title=panel.title, xlabel=panel.variable, ylabel="bound")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
