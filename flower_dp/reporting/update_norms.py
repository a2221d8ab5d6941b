"""The norms of client updates before the clip, by round, which clients report without noise if asked for metrics."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from flower_dp.core import metric_columns
from flower_dp.reporting import canvas
from flower_dp.reporting.past_run import RunContents

_MEAN, _SQUARE, _CLIP = "client-update-norm", "client-update-norm-squared", "clip-norm"
# A clip norm that changes by more than this factor is drawn on a logarithmic scale.
_WIDE = 20.0
# A clip norm that exceeds all norms by more than this factor is not drawn.
_BEYOND = 5.0

Series = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateNorms:
    """The norms of one run's updates.

    Attributes:
        rounds: rounds [n] whose clients reported their norms; empty if only the clip norm is known.
        mean: mean norm [n] over the clients of a round.
        std: standard deviation [n] over the clients of a round.
        clip_rounds: rounds [m] whose clip norm is known.
        clip_norms: clip norm [m] of these rounds.
    """

    rounds: Series
    mean: Series
    std: Series
    clip_rounds: Series
    clip_norms: Series


def read_update_norms(run: RunContents) -> UpdateNorms:
    """Return the norms that a run has recorded, and its clip norm.

    If the clip norm changes from round to round, it is public, and in the round's metrics; else it is in the statement.

    Raises:
        ValueError: naming the folder and the setting, if there are no norms.
    """
    means, squares, clips = (run.series(key) for key in (_MEAN, _SQUARE, _CLIP))
    if not means and not clips:
        raise ValueError(
            f"{run.folder}: has no norms of updates; run it again with --set report-client-metrics=true and a method that clips "
            "updates (dp-fedavg, dp-fedsam, dp-ftrl, fed-smp): clients then report the norms without noise; the statement says so"
        )
    rounds = sorted(means)
    mean = np.asarray([means[at] for at in rounds])
    square = np.asarray([squares.get(at, np.nan) for at in rounds])
    if not clips and metric_columns.number(fixed := run.statement.get("mechanism", {}).get("noise", {}).get("clip_norm")):
        clips = {at: float(fixed) for at in (rounds[0], rounds[-1])}
    return UpdateNorms(
        rounds=np.asarray(rounds, float),
        mean=mean,
        std=np.sqrt(np.maximum(square - mean**2, 0.0)),
        clip_rounds=np.asarray(sorted(clips), float),
        clip_norms=np.asarray([clips[at] for at in sorted(clips)]),
    )


def figure(norms: UpdateNorms, label: str) -> Figure:
    """Return a figure of the mean norm with its spread over clients, and of the clip norm."""
    result = canvas.empty(7.0, 4.6)
    axes = result.subplots()
    if norms.rounds.size:
        axes.plot(norms.rounds, norms.mean, label="norm before the clip, mean of a round", **canvas.look(0))
        low, high = np.maximum(norms.mean - norms.std, 0.0), norms.mean + norms.std
        axes.fill_between(norms.rounds, low, high, color=canvas.COLORS[0], alpha=0.2, label="± standard deviation over clients")
    _draw_clip_norm(axes, norms)
    axes.set(xlabel="round", ylabel="L2 norm of an update")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    source = "reported without noise: NOT PRIVATE" if norms.rounds.size else "the clip norm alone, which is public"
    axes.set_title(f"Client updates of {label}; {source}", fontsize="medium")
    return result


def _draw_clip_norm(axes: Axes, norms: UpdateNorms) -> None:
    """Draw the clip norm; if it is far above all norms, name it in the legend instead."""
    axes.set_ylim(bottom=0.0)
    if not norms.clip_norms.size:
        return
    least, largest = norms.clip_norms.min(), norms.clip_norms.max()
    color = canvas.COLORS[1]
    if norms.mean.size and least > _BEYOND * (norms.mean + norms.std).max():
        axes.plot([], [], "--", color=color, label=f"clip norm: {least:.4g} at least, above the axis")
        return
    axes.plot(norms.clip_rounds, norms.clip_norms, "--", color=color, label="clip norm")
    axes.set_ylim(bottom=0.0)
    if least > 0 and largest > _WIDE * least:
        axes.set(yscale="log", ylim=(0.5 * norms.mean.min(initial=least), None))


def in_words(norms: UpdateNorms) -> str:
    """Return the norms as one line."""
    parts = []
    if norms.rounds.size:
        least, largest = norms.mean.min(), norms.mean.max()
        parts.append(
            f"mean norm before the clip {norms.mean[-1]:.4g} in round {norms.rounds[-1]:g}, {least:.4g} to {largest:.4g} in all"
        )
    if norms.clip_norms.size:
        parts.append(f"clip norm {norms.clip_norms[-1]:.4g}")
    return "; ".join(parts)
