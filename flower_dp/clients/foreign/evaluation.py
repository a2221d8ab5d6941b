"""Evaluation by an app that is not ours: its metrics of the global model, which stay on the device. NumPy only."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict

from flower_dp import wire
from flower_dp.clients.foreign.training import AppCall
from flower_dp.clients.reasons import contained
from flower_dp.clients.reply.pipeline import Job, Trained
from flower_dp.clients.reply.rows import one_by_one
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.vectors import Array
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
    """The app's own evaluate function, as the `train` part of a pipeline; nothing else of its reply is used."""

    app: AppCall
    bounds: MetricBounds

    def rows(self, vector: Array, jobs: Sequence[Job]) -> Iterator[Trained]:
        """Yield the client's vector [metrics + 1], float64 and of norm at most 1, and 0 as the loss; or the app's error."""
        return one_by_one(jobs, lambda _: (self.bounds.counted(metrics_of(self.app)), np.zeros(())))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContribution:
    """The one contribution of a client whose message is private on its own: the app's metrics, clipped.

    Where the app fails, or lacks a metric, it is zero and the reply noise alone: no record decides whether the client replies.
    """

    app: AppCall
    bounds: MetricBounds

    def __call__(self, vector: Array, job: Job) -> np.ndarray:
        """Return the contribution [1, dimension], float64."""
        try:
            with contained():
                metrics = metrics_of(self.app)
            return self.bounds.centred(np.asarray([[metrics[name] for name in self.bounds.bounds]]))
        except Exception as error:
            log.error("evaluation failed: the reply is noise alone", exc_info=error)
            return np.zeros((1, len(self.bounds.bounds)))
