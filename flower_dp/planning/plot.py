"""The bound around its optimum, drawn. The only module of the planners that needs matplotlib."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flower_dp.planning import fedsgd_dpc, nbafl
from flower_dp.planning.problem import Floats, ProblemError

_POINTS = 400
# Up to this many points the whole numbers are marked on the curve.
_FEW = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One diagram: curves over a whole-numbered variable, and the optimum among them."""

    title: str
    variable: str
    last: int
    curves: dict[str, Callable[[Floats], Floats]]
    optimum: tuple[int, float] | None
    first: int = 1


def draw(plan: fedsgd_dpc.Plan | nbafl.Plan, path: Path) -> None:
    """Write the figure of a plan as PNG.

    Raises:
        ProblemError: if the plan has no bound to draw.
        OSError: if the file can't be written.
    """
    figure(plan).savefig(path, format="png", dpi=150)


def figure(plan: fedsgd_dpc.Plan | nbafl.Plan) -> Figure:
    """Return the bound over the number of rounds, and over the cohort size, with the optimum marked in each.

    Raises:
        ProblemError: if the plan has no bound to draw.
    """
    panels = _fedsgd_panels(plan) if isinstance(plan, fedsgd_dpc.Plan) else _nbafl_panels(plan)
    result = Figure(figsize=(5.5 * len(panels), 4.0), layout="constrained")
    for place, panel in enumerate(panels):
        _fill(result.add_subplot(1, len(panels), place + 1), panel)
    return result


def _fedsgd_panels(plan: fedsgd_dpc.Plan) -> list[_Panel]:
    best, problem, bound = plan.best, plan.problem, plan.problem.bound()
    cohorts = sorted({1, problem.num_clients, best.cohort_size})
    rounds = max([best.num_rounds, *(point.num_rounds for point in plan.candidates if point.num_rounds)])
    last = min(max(2 * rounds, 10), problem.max_rounds or 10**15)
    by_rounds = _Panel(
        title=f"FedSGD-DPC, {problem.mechanism}",
        variable="rounds T",
        first=0,
        last=last,
        curves={f"b = {b}": partial(bound.value, cohort_size=b) for b in cohorts},
        optimum=(best.num_rounds, best.bound),
    )
    if best.num_rounds == 0:
        return [by_rounds]
    by_cohort = _Panel(
        title=f"at T = {best.num_rounds}",
        variable="cohort size b",
        last=problem.num_clients,
        curves={f"T = {best.num_rounds}": partial(bound.value, best.num_rounds)},
        optimum=(best.cohort_size, best.bound),
    )
    return [by_rounds, by_cohort]


def _nbafl_panels(plan: nbafl.Plan) -> list[_Panel]:
    bounds, best_t, best_k = plan.bounds, plan.best_num_rounds, plan.best_cohort_size
    if bounds is None or best_t is None or best_k is None:
        raise ProblemError("plot", "plot: there is no bound to draw; the problem gives none of its constants")
    rounds = plan.problem.num_rounds
    return [
        _Panel(
            title="NbAFL, all clients",
            variable="rounds T",
            last=bounds.max_rounds if best_t.bound is None else min(bounds.max_rounds, max(4 * best_t.num_rounds, 10)),
            curves={"Theorem 2": bounds.all_clients},
            optimum=None if best_t.bound is None else (best_t.num_rounds, best_t.bound),
        ),
        _Panel(
            title=f"NbAFL, K of {bounds.num_clients} clients, T = {rounds}",
            variable="cohort size K",
            last=bounds.num_clients,
            curves={"Theorem 3": lambda k: bounds.sampled_clients(k, rounds)},
            optimum=None if best_k.bound is None else (best_k.cohort_size, best_k.bound),
        ),
    ]


def _fill(axes: Axes, panel: _Panel) -> None:
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
