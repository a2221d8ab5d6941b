"""Error rates of an audit, against what the claim allows, drawn."""

import numpy as np
from matplotlib.figure import Figure

from flower_dp.audit.audit import Audit, claimed_tradeoff
from flower_dp.reporting import canvas

# Rates below this part of one trial are not seen.
_LEAST = 0.3


def figure(audits: list[Audit]) -> Figure:
    """Return one diagram an audit: false negatives over false positives, the claimed trade-off curve, and the test's bounds."""
    columns = min(3, len(audits))
    rows = -(-len(audits) // columns)
    drawn = canvas.empty(4.6 * columns, 4.0 * rows)
    for place, one in enumerate(audits, start=1):
        axes = drawn.add_subplot(rows, columns, place)
        least = _LEAST / one.rates.trials
        x = np.geomspace(least, 1.0, 300)
        y = np.maximum(claimed_tradeoff(one.claim, x), least)
        axes.plot(x, y, **canvas.look(0), label=f"claimed: epsilon {one.claim.epsilon:.3g}")
        axes.fill_between(x, least, y, color=canvas.COLOURS[0], alpha=0.12, label="refutes the claim")
        points = np.maximum(np.array(one.points), least)
        axes.plot(
            points[:, 0], points[:, 1], ".", markersize=3, color=canvas.COLOURS[1], label=f"{one.rates.statistic}, measured"
        )
        axes.plot(
            [one.rates.false_positive_rate],
            [one.rates.false_negative_rate],
            "*",
            markersize=13,
            color=canvas.COLOURS[6],
            label=f"bounds: epsilon at least {one.lower:.3g}",
        )
        axes.set(title=one.label, xlabel="false positives", ylabel="false negatives", xscale="log", yscale="log")
        axes.set(xlim=(least, 1.0), ylim=(least, 1.0))
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small", loc="lower left")
    return drawn
