"""A client's part in private evaluation: metrics of the global model as one clipped vector, with its share of the noise."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_dp.clients.losses import Loss, checked
from flower_dp.clients.metric_vector import protected_vector
from flower_dp.clients.parts import Secret
from flower_dp.clients.records import Records
from flower_dp.wire import EvaluationOrder, Instruction

# A model in evaluation mode, and one client's records -> the metrics by name.
Metrics = Callable[[nn.Module, Records], Mapping[str, float]]
_BATCH = 512


def loss_and_accuracy(loss: Loss, *, labels: Callable[[Tensor], Tensor] | None = None) -> Metrics:
    """Return a client's own metrics: `loss`, and `accuracy`.

    Args:
        loss: model outputs, targets -> the mean loss of a batch.
        labels: model outputs [n, ...] -> the labels [n] that they speak for. None: the largest of logits [n, classes], and no
            accuracy where targets are no classes [n].
    """
    mean_loss = checked(loss)

    def metrics(module: nn.Module, records: Records) -> dict[str, float]:
        total, right, count, classes = 0.0, 0, len(records), True
        device = next(module.parameters()).device
        for positions in torch.split(torch.arange(count), _BATCH):
            inputs, targets = records.batch(positions, device)
            outputs = module(inputs)
            total += float(mean_loss(outputs, targets)) * len(positions)
            if labels is not None:
                right += int((labels(outputs) == targets).sum())
                continue
            classes = classes and targets.ndim == 1 and outputs.ndim == 2 and not targets.dtype.is_floating_point
            right += int((outputs.argmax(1) == targets).sum()) if classes else 0
        return {"loss": total / max(count, 1)} | ({"accuracy": right / max(count, 1)} if classes else {})

    return metrics


@torch.no_grad()
def private_vector(
    module: nn.Module, records: Records, metrics: Metrics, *, instruction: Instruction, order: EvaluationOrder, secret: Secret
) -> np.ndarray:
    """Return one client's vector [dimension], float64: clipped, on the lattice of the round, with its share of the noise.

    Whatever the metrics are, its norm before the noise is at most 1; nothing stands between the clip and the noise.

    Args:
        module: the global model.
        records: one client's.
        metrics: what to compute.
        instruction: of the round.
        order: its table.
        secret: gives the generator of the noise.

    Raises:
        ValueError: if a metric that is asked for is not there.
    """
    training = module.training
    module.eval()
    try:
        values = metrics(module, records)
    finally:
        module.train(training)
    numbers = {name: _number(value) for name, value in values.items()}
    return protected_vector(numbers, instruction=instruction, order=order, secret=secret)


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)
