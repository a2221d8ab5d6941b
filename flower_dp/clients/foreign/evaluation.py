"""Evaluation by an app that is not ours: its metrics of the global model, which stay on the device. NumPy only."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict

from flower_dp import wire
from flower_dp.clients.foreign.training import AppCall
from flower_dp.clients.local.row import private_row
from flower_dp.clients.reply.pipeline import Job, Trained
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.vectors import Array
from flower_dp.privacy.release import Release
from flower_dp.wire import RecordNames

log = logging.getLogger("flwr")

EVALUATE_STATUS = "evaluateres.status"


def names_to_evaluate(content: RecordDict) -> RecordNames | None:
    """Return the record names of a message with an instruction to evaluate; None for any other message."""
    for record_names in (wire.MESSAGE_API.to_evaluate, wire.NUMPY_CLIENT.to_evaluate):
        if wire.KEY in content.config_records.get(record_names.config, {}):
            return record_names
    return None


def metrics_of(app: AppCall) -> dict[str, float]:
    """Return the numbers that the app's own evaluate function replies with, by name.

    Raises:
        RuntimeError: if the app replies with an error.
        Exception: what the app raises.
    """
    return wire.reported_metrics(app.content())


@dataclass(frozen=True, slots=True, kw_only=True)
class AppMetrics:
    """The app's own evaluate function, as the `train` part of a pipeline; nothing else of its reply is used.

    Attributes:
        app: the call of the app.
        bounds: the metrics that are asked for.
    """

    app: AppCall
    bounds: MetricBounds

    def rows(self, vector: Array, jobs: Sequence[Job]) -> Iterator[Trained]:
        """Yield the client's vector [metrics + 1], float64 and of norm at most 1, and 0 as the loss; or the app's error."""
        for _ in jobs:
            made: Trained
            try:
                made = self.bounds.counted(metrics_of(self.app)), np.zeros(())
            except Exception as error:
                made = error
            yield made


def local_row_of_app(app: AppCall, *, bounds: MetricBounds, release: Release, rng: Generator) -> np.ndarray:
    """Return a client's row [dimension] that is private on its own: the app's metrics, clipped, with the full noise of a release.

    Where the app fails, or lacks a metric, the row is noise alone: no record decides whether the client replies.
    """
    rows = np.zeros((1, len(bounds.bounds)))
    try:
        told = metrics_of(app)
        rows = bounds.centred(np.asarray([[told[name] for name in bounds.bounds]]))
    except Exception as error:
        log.error("evaluation failed: the reply is noise alone", exc_info=error)
    return private_row(rows, release, rng)
