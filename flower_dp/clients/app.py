"""A Message-API ClientApp around a client of this package."""

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_dp import wire
from flower_dp.clients.node_client import NodeClient
from flower_dp.clients.reasons import in_own_words, reading, why_no_client

log = logging.getLogger("flwr")

# No payload or model that a device can hold is larger.
_LARGEST_ARRAY = 2**40


def client_app(client_fn: Callable[[Context], NodeClient]) -> ClientApp:
    """Return a ClientApp that answers three kinds of messages: which clients the node hosts, train, and evaluate.

    Args:
        client_fn: makes the node's client from its context; called for every message, so cache what is costly. The
            node's context is attached to the client before it trains: its state, so that an account outlives client and process,
            and the file that the device's owner names as `ledger-path` in the node's config, so that it outlives the run. Of an
            error in `client_fn` the server learns only that there was one.
    """
    app = ClientApp()
    # Runs in which a client of this process was found able to train: one dry run a simulation's worker is enough.
    able: set[int] = set()

    def client_of(context: Context) -> NodeClient:
        with in_own_words("client_fn"):
            client = client_fn(context)
            client.attach(context)
            return client

    @app.query()
    def hosts(message: Message, context: Context) -> Message:
        try:
            client = client_fn(context)
            why = None if context.run_id in able else client.why_unable()
            text = client.hosts(why)
            if why is None:
                able.add(context.run_id)
        except Exception as error:  # after any error the server must learn that this node has no clients
            log.error("client_fn failed", exc_info=error)
            text = json.dumps({"error": why_no_client(error)})
        return Message(RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = client_of(context)
        arrays, answer = client.answer(*_read(message))
        content = RecordDict({"arrays": ArrayRecord(arrays), wire.KEY: ConfigRecord(answer)})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = client_of(context)
        answer = client.evaluation(*_read(message))
        return Message(RecordDict({wire.KEY: ConfigRecord(answer)}), reply_to=message)

    return app


def _read(message: Message) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a message, in order, and its configuration."""
    with in_own_words("reading the message"), reading():
        arrays = wire.numpy_arrays(wire.arrays_of(message.content), limit=_LARGEST_ARRAY)
        return arrays, dict(message.content.config_records.get(wire.MESSAGE_API.config, {}))
