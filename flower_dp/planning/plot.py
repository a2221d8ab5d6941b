"""The bound around its optimum, drawn. The only module of the planners that needs matplotlib."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flower_dp.planning.planner import Panel, Plan, ProblemError

_POINTS = 400
# Up to this many points the whole numbers are marked on the curve.
_FEW = 50


def figure(plan: Plan[Any, Any]) -> Figure:
    """Return the bound over what the plan chose, one diagram a variable, with the optimum marked in each.

    Raises:
        ProblemError: if the plan has no bound to draw.
    """
    if not plan.panels:
        why = plan.infeasible or "the problem gives none of its constants"
        raise ProblemError("plot", f"plot: there is no bound to draw; {why}")
    panels = plan.panels
    result = Figure(figsize=(5.5 * len(panels), 4.0), layout="constrained")
    for place, panel in enumerate(panels):
        _fill(result.add_subplot(1, len(panels), place + 1), panel)
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
        place, value = panel.optimum
        axes.plot([place], [value], "*", markersize=14, color="black", label=f"optimum: {place} ({value:.4g})")
    else:
        axes.text(0.5, 0.5, "infeasible", transform=axes.transAxes, ha="center")
    found = np.concatenate(drawn)
    if found.size and found.min() > 0 and found.max() > 100 * found.min():
        axes.set_yscale("log")
    axes.set(title=panel.title, xlabel=panel.variable, ylabel="bound")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
