"""Evaluation by an app that is not ours: its metrics of the global model, which stay on the device. NumPy only."""

from dataclasses import replace

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from flower_dp import wire
from flower_dp.clients.account import kept_account
from flower_dp.clients.app_training import stock_message
from flower_dp.wire import Dialect

_STATUS = "evaluateres.status"
_DIALECTS = tuple(
    replace(dialect, arrays=dialect.evaluated_arrays, config=dialect.evaluated_config)
    for dialect in (wire.MESSAGE_API, wire.NUMPY_CLIENT)
)


def evaluating_dialect(content: RecordDict) -> Dialect | None:
    """Return the dialect of a message with an instruction to evaluate, its names those to evaluate by; None for another one."""
    for dialect in _DIALECTS:
        if wire.KEY in content.config_records.get(dialect.config, {}):
            return dialect
    return None


def metrics_of_app(call: ClientAppCallable, message: Message, context: Context, dialect: Dialect) -> dict[str, float]:
    """Return the numbers that the app's own evaluate function replies with, by name.

    The app gets the model and the config that a stock server would send.

    Raises:
        RuntimeError: if the app replies with an error.
        Exception: what the app raises.
    """
    with kept_account(context):
        reply = call(stock_message(message, dialect), context)
    if reply.has_error():
        raise RuntimeError(f"the app replied with error {reply.error.code}")
    status = reply.content.config_records.get(_STATUS)
    if status is not None and status.get("code") != 0:
        raise RuntimeError(f"the app replied with status {status.get('code')!r}")
    return wire.reported_metrics(reply.content)
