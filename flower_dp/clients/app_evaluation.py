"""Evaluation by an app that is not ours: its metrics of the global model, which stay on the device. NumPy only."""

import logging

import numpy as np
from flwr.app import RecordDict

from flower_dp import wire
from flower_dp.clients.app_training import AppCall
from flower_dp.clients.local_row import private_row
from flower_dp.core.noise import Generator
from flower_dp.privacy.release import Release
from flower_dp.wire import LocalEvaluationOrder, RecordNames

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


def local_row_of_app(app: AppCall, *, order: LocalEvaluationOrder, release: Release, rng: Generator) -> np.ndarray:
    """Return a client's row [dimension] that is private on its own: the app's metrics, clipped, with the full noise of a release.

    Where the app fails, or lacks a metric, the row is noise alone: no record decides whether the client replies.
    """
    rows = np.zeros((1, order.dimension))
    try:
        told = metrics_of(app)
        rows = order.contributions(np.asarray([[told[name] for name in order.bounds]]))
    except Exception as error:
        log.error("evaluation failed: the reply is noise alone", exc_info=error)
    return private_row(rows, release, rng)
