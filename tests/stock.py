"""Stock Flower ClientApps for the strategies' tests: they know nothing of this package."""

from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

# node id, global arrays by name -> trained arrays by name
Train = Callable[[int, dict[str, np.ndarray]], dict[str, np.ndarray]]


def stock_app(train: Train, *, num_examples: Callable[[int], int] = lambda node: 1, mods: Sequence[Mod] = ()) -> ClientApp:
    """A Message-API app as Flower's own templates write it: arrays and metrics, with an example count."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        trained = {name: Array(np.asarray(value)) for name, value in train(context.node_id, arrays).items()}
        metrics = MetricRecord({"num-examples": num_examples(context.node_id), "train_loss": 0.25})
        return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)

    return app


def shifted(shift: Callable[[int], np.ndarray | float]) -> Train:
    """Clients that add a constant of their own to every array."""
    return lambda node, arrays: {name: (value + shift(node)).astype(value.dtype) for name, value in arrays.items()}


def arrays(**named: np.ndarray) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in named.items()})
