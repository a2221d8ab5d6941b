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

# No payload or model that a device can hold is larger.
_LARGEST_ARRAY = 2**40
# Seconds of a dry run that each message repeats.
_LONG = 1.0


def client_app(client_fn: Callable[[Context], HostingClient]) -> ClientApp:
    """Return a ClientApp that answers three kinds of messages: which clients the node hosts, train, and evaluate.

    Args:
        client_fn: makes the node's client from its context; called for every message. A client that it keeps between messages
            (`functools.cache`) makes its dry run once; a new one makes it again, which may take longer than to train.
            The node's context is attached to the client before it trains: its state, so that an account outlives client and
            process, and the file that the device's owner names as `ledger-path` in the node's config, so that it outlives the
            run. Of an error in `client_fn` the server learns only that there was one.
    """
    app = ClientApp()
    # Runs in which a client of this process was found able to train: one dry run a simulation's worker is enough.
    able: set[int] = set()
    anew = _MadeAnew()

    def client_of(context: Context) -> HostingClient:
        with redact_errors("client_fn"):
            client = client_fn(context)
            client.attach(context)
            return client

    @app.query()
    def hosts(message: Message, context: Context) -> Message:
        try:
            client = client_fn(context)
            why = None if context.run_id in able else client.unable_reason()
            text = client.describe_hosted(why)
            if why is None:
                able.add(context.run_id)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
        except BaseException as error:  # after any error, also SystemExit, the server must learn that this node has no clients
            log.error("client_fn failed", exc_info=error)
            text = wire.HostedClients(names=(), methods=frozenset(), error=client_fn_refusal(error)).to_json()
        return Message(RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def trained() -> Message:
            client = client_of(context)
            arrays, answer = client.answer(*_read(message))
            anew.note(context.node_id, client)
            return Message(RecordDict({"arrays": ArrayRecord(arrays), wire.KEY: ConfigRecord(answer)}), reply_to=message)

        return replied(message, "training", trained)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        def evaluated() -> Message:
            answer = client_of(context).evaluation(*_read(message))
            return Message(RecordDict({wire.KEY: ConfigRecord(answer)}), reply_to=message)

        return replied(message, "evaluation", evaluated)

    return app


class _MadeAnew:
    """Warns once where every message to a node makes a new client, and so a long dry run."""

    def __init__(self) -> None:
        self._last: dict[int, weakref.ref[HostingClient]] = {}
        self._told = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # an app goes to a simulation's workers by value: what its process has seen does not

    def note(self, node: int, client: HostingClient) -> None:
        """Note the client that has trained for a node."""
        before = self._last.get(node)
        self._last[node] = weakref.ref(client)
        if before is None or before() is client or client.dry_run_seconds < _LONG or self._told:
            return
        self._told = True
        log.warning(
            "client_fn has made a new client for this message, whose dry run took %.1f s. Return the same client for all "
            "messages to a node (functools.cache), and the dry run is made once",
            client.dry_run_seconds,
        )


def _read(message: Message) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a message, in order, and its configuration."""
    with redact_errors("reading the message"), decline_invalid():
        arrays = wire.numpy_arrays(wire.arrays_of(message.content), limit=_LARGEST_ARRAY)
        return arrays, dict(message.content.config_records.get(wire.MESSAGE_API.config, {}))
