"""The worst case that clip and noise must hide: two parameters, and records that push them by a sign.

The loss of a record is its target times the model's output. Its gradient is the target times (input, 1): of any size, and the
same at all weights. Input 1 pushes both parameters alike, so an update is longer than each of its arrays; input 0 pushes the bias
alone.
"""

from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flower_dp.clients import TensorRecords

# Far above every clip norm.
_LARGE = 1e6


def model() -> nn.Module:
    """Return a linear model of one weight and one bias, both 0: two arrays."""
    module = nn.Linear(1, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the outputs times the targets; its gradient is linear in the targets, at any weights."""
    return (outputs[..., 0] * targets).mean()


def records(push: float, *, size: int, inputs: float) -> TensorRecords:
    """Return records, the first of which pushes the parameters by the sign of `push`; the others push nowhere.

    Args:
        push: direction in which training moves the parameters, -1, 0 or 1.
        size: number of records.
        inputs: input of every record, 1 or 0, see above.
    """
    targets = torch.zeros(size)
    targets[0] = -_LARGE * push
    return TensorRecords(inputs=torch.full((size, 1), inputs), targets=targets)


def direction(inputs: float) -> np.ndarray:
    """Return the direction [d] in which training pushes weight and bias, in the order of the model's arrays."""
    return np.array([inputs, 1.0])


def stock_app(push: Callable[[Context], float]) -> ClientApp:
    """Return a stock Flower app, which knows nothing of this package and replies with its trained model.

    Args:
        push: function that returns the push of a node.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        moved = {
            name: Array(np.asarray(array.numpy() + _LARGE * push(context), np.float32))
            for name, array in message.content.array_records["arrays"].items()
        }
        metrics = MetricRecord({"num-examples": 1000})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return app
