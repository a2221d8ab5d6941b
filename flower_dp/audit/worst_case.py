"""The worst case that clip and noise must hide: two parameters, and records that push them as far as a sign says.

The loss of a record is its target times the model's output, whose gradient is the target times (input, 1): as large as wanted and
the same at all weights. With input 1 both parameters are pushed alike, so an update is longer than each of its arrays; with input
0 the bias alone is.
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
    made = nn.Linear(1, 1)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the outputs times the targets; its gradient is linear in the targets, at any weights."""
    return (outputs[..., 0] * targets).mean()


def records(push: float, *, size: int, inputs: float) -> TensorRecords:
    """Return records whose first pushes the parameters by the sign of `push` (0: nowhere), and whose others push nowhere.

    Args:
        push: training moves the parameters into this direction.
        size: how many records.
        inputs: 1 or 0, see above.
    """
    targets = torch.zeros(size)
    targets[0] = -_LARGE * push
    return TensorRecords(inputs=torch.full((size, 1), inputs), targets=targets)


def direction(inputs: float) -> np.ndarray:
    """Return what training pushes [d], in the order of the model's arrays: weight, bias."""
    return np.array([inputs, 1.0])


def stock_app(push: Callable[[Context], float]) -> ClientApp:
    """Return an app as Flower's own templates write it, which knows nothing of this package: it replies with its trained model.

    Args:
        push: of a node.
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
