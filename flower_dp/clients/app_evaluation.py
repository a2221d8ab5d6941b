"""Evaluation by an app that is not ours: its metrics of the global model, which stay on the device. NumPy only."""

import logging
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from flower_dp import wire
from flower_dp.clients.account import kept_account
from flower_dp.clients.app_training import stock_message
from flower_dp.clients.local_row import private_row
from flower_dp.core.noise import Generator
from flower_dp.privacy.release import Release
from flower_dp.wire import LocalEvaluationOrder, RecordNames

log = logging.getLogger("flwr")

_STATUS = "evaluateres.status"
_TO_EVALUATE = tuple(
    replace(record_names, arrays=record_names.evaluated_arrays, config=record_names.evaluated_config)
    for record_names in (wire.MESSAGE_API, wire.NUMPY_CLIENT)
)


def names_to_evaluate(content: RecordDict) -> RecordNames | None:
    """Return the record names of a message with an instruction to evaluate; None for any other message."""
    for record_names in _TO_EVALUATE:
        if wire.KEY in content.config_records.get(record_names.config, {}):
            return record_names
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppMetrics:
    """The app's own evaluate function.

    Attributes:
        call: the app, or the next mod before it.
        message: the server's.
        context: of the node.
        record_names: the record names that the message and the app use.
    """

    call: ClientAppCallable
    message: Message
    context: Context
    record_names: RecordNames

    def __call__(self) -> dict[str, float]:
        """Return the numbers that the app replies with, by name; it gets the model and the config that a stock server would send.

        Raises:
            RuntimeError: if the app replies with an error.
            Exception: what the app raises.
        """
        with kept_account(self.context):
            reply = self.call(stock_message(self.message, self.record_names), self.context)
        if reply.has_error():
            raise RuntimeError(f"the app replied with error {reply.error.code}")
        status = reply.content.config_records.get(_STATUS)
        if status is not None and status.get("code") != 0:
            raise RuntimeError(f"the app replied with status {status.get('code')!r}")
        return wire.reported_metrics(reply.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullScale:
    """The noise that a client adds to its own vector in full, for its policy."""

    noise_std: float


def local_row_of_app(app: AppMetrics, *, order: LocalEvaluationOrder, release: Release, rng: Generator) -> np.ndarray:
    """Return a client's row [dimension] that is private on its own: the app's metrics, clipped, with the full noise of a release.

    Where the app fails, or lacks a metric, the row is noise alone: no record decides whether the client replies.
    """
    rows = np.zeros((1, order.dimension))
    try:
        told = app()
        rows = order.contributions(np.asarray([[told[name] for name in order.bounds]]))
    except Exception as error:
        log.error("evaluation failed: the reply is noise alone", exc_info=error)
    return private_row(rows, release, rng)
