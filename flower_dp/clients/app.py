"""A Message-API ClientApp around a client of this package."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_dp import wire
from flower_dp.clients.node_client import HostingClient
from flower_dp.clients.refusal_messages import client_fn_refusal, decline_invalid, redact_errors, replied

log = logging.getLogger("flwr")

# Bytes; no payload or model that a device can hold is larger.
_LARGEST_ARRAY = 2**40
# Seconds of a dry run from which on its repetition for every message is worth a warning.
_LONG = 1.0


def client_app(client_fn: Callable[[Context], HostingClient]) -> ClientApp:
    """Return a ClientApp that replies to three kinds of messages: the client query, train, and evaluate.

    The node's context is attached to the client before it trains. Its state makes an account outlive client and process. The file
    that the device's owner names as `ledger-path` in the node's config makes it outlive the run.

    Args:
        client_fn: function that makes the node's client from its context, called for every message. A client that it keeps
            between messages (`functools.cache`) does its dry run once; a new one repeats it, which may take longer than to train.
            If `client_fn` fails, the server learns only that it failed, and perhaps one of the package's fixed reasons.
    """
    app = ClientApp()
    # Runs in which a client of this process was found able to train: one dry run per worker of a simulation is enough.
    able: set[int] = set()
    repeated = _RepeatedDryRuns()

    def client_of(context: Context) -> HostingClient:
        with redact_errors("client_fn"):
            client = client_fn(context)
            client.attach(context)
            return client

    @app.query()
    def hosts(message: Message, context: Context) -> Message:
        try:
            client = client_fn(context)
            reason = None if context.run_id in able else client.unable_reason()
            text = client.describe_hosted(reason)
            if reason is None:
                able.add(context.run_id)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
        except BaseException as error:  # after any error, also SystemExit, the server must learn that this node has no clients
            log.error("The app's client_fn failed", exc_info=error)
            text = wire.HostedClients(names=(), methods=frozenset(), error=client_fn_refusal(error)).to_json()
        return Message(RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def trained() -> Message:
            client = client_of(context)
            arrays, answer = client.answer(*_read(message))
            repeated.note(context.node_id, client)
            return Message(RecordDict({"arrays": ArrayRecord(arrays), wire.KEY: ConfigRecord(answer)}), reply_to=message)

        return replied(message, "training", trained)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        def evaluated() -> Message:
            answer = client_of(context).evaluation(*_read(message))
            return Message(RecordDict({wire.KEY: ConfigRecord(answer)}), reply_to=message)

        return replied(message, "evaluation", evaluated)

    return app


class _RepeatedDryRuns:
    """A warning, once, that every message to a node makes a new client and so repeats a long dry run."""

    def __init__(self) -> None:
        self._last: dict[int, weakref.ref[HostingClient]] = {}
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # an app goes to a simulation's workers by value, without the clients of its process

    def note(self, node: int, client: HostingClient) -> None:
        """Note the client that has trained for a node."""
        before = self._last.get(node)
        self._last[node] = weakref.ref(client)
        if before is None or before() is client or client.dry_run_seconds < _LONG or self._warned:
            return
        self._warned = True
        log.warning(
            "The app's client_fn made a new client for this message, whose dry run took %.1f s. Return the same client for all "
            "messages to a node (functools.cache), so that it does the dry run once",
            client.dry_run_seconds,
        )


def _read(message: Message) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a message, in order, and its configuration."""
    with redact_errors("reading the message"), decline_invalid():
        arrays = wire.numpy_arrays(wire.arrays_of(message.content), limit=_LARGEST_ARRAY)
        return arrays, dict(message.content.config_records.get(wire.MESSAGE_API.config, {}))
