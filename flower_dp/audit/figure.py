"""The figure of an audit: error rates, and the rates that the claim allows."""

import numpy as np
from matplotlib.figure import Figure

from flower_dp.audit.audit import Audit, claimed_tradeoff
from flower_dp.reporting import canvas

# Smallest rate on the axes, in parts of one trial.
_LEAST = 0.3


def figure(audits: list[Audit]) -> Figure:
    """Return one diagram per audit: false negatives over false positives, and the curves of claim and lower bound."""
    columns = min(3, len(audits))
    rows = -(-len(audits) // columns)
    drawn = canvas.empty(4.6 * columns, 4.0 * rows)
    for index, audit in enumerate(audits, start=1):
        axes = drawn.add_subplot(rows, columns, index)
        least = _LEAST / audit.errors.trials
        x = np.geomspace(least, 1.0, 300)
        y = np.maximum(claimed_tradeoff(audit.claim, x), least)
        axes.plot(x, y, **canvas.look(0), label=f"claimed: epsilon {audit.claim.epsilon:.3g}")
        axes.fill_between(x, least, y, color=canvas.COLORS[0], alpha=0.12, label="refutes the claim")
        bound = np.maximum(audit.estimator.curve(audit.strength, x), least)
        axes.plot(x, bound, **canvas.look(6), label=f"lower bound: epsilon {audit.lower:.3g}")
        points = np.maximum(np.array(audit.points), least)
        axes.plot(
            points[:, 0], points[:, 1], ".", markersize=3, color=canvas.COLORS[1], label=f"{audit.errors.statistic}, measured"
        )
        chosen = np.array([audit.errors.false_positives, audit.errors.false_negatives]) / audit.errors.trials
        axes.plot(*np.maximum(chosen, least), "*", markersize=13, color=canvas.COLORS[6], label="the test that was chosen")
        axes.set(title=audit.label, xlabel="false positives", ylabel="false negatives", xscale="log", yscale="log")
        axes.set(xlim=(least, 1.0), ylim=(least, 1.0))
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small", loc="lower left")
    return drawn
