"""A client's part in private evaluation where its message is private on its own: metrics record by record, and full noise."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_dp.clients.local_row import private_row
from flower_dp.clients.losses import Loss, record_cross_entropy
from flower_dp.clients.per_record import keeps_records_apart
from flower_dp.clients.records import Records, outputs_of
from flower_dp.clients.training import FlatModel
from flower_dp.core.noise import Generator
from flower_dp.privacy.release import Release
from flower_dp.wire import LocalEvaluationOrder

log = logging.getLogger("flwr")

# Records that go through the model together, always so many: a record's bits then don't depend on how many there are.
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMetrics:
    """Metrics of single records, for private evaluation: their means are what is estimated.

    Attributes:
        names: of the metrics.
        of: outputs [1, ...] and target [1, ...] of one record -> its metrics by name, all of `names`.

    Example:
        >>> from flower_dp.clients import RecordMetrics
        >>> error = RecordMetrics(
        ...     names=("absolute_error",), of=lambda outputs, target: {"absolute_error": float((outputs - target).abs())}
        ... )
    """

    names: tuple[str, ...]
    of: Callable[[Tensor, Tensor], Mapping[str, float]]


def record_loss_and_accuracy(loss: Loss, *, labels: Callable[[Tensor], Tensor] | None = None) -> RecordMetrics:
    """Return a record's own `loss`, and `accuracy`, which is 1 where the model's label is the target and else 0.

    Args:
        loss: model outputs, targets -> loss, for batches of one record.
        labels: model outputs [1, ...] -> the label [1] that they speak for; None: the largest of logits [1, classes].
    """
    of_record = record_cross_entropy if loss is torch.nn.functional.cross_entropy else loss
    label_of = labels or (lambda outputs: outputs.argmax(1))

    def metrics(outputs: Tensor, target: Tensor) -> dict[str, float]:
        return {"loss": float(of_record(outputs, target)), "accuracy": float((label_of(outputs) == target).all())}

    return RecordMetrics(names=("loss", "accuracy"), of=metrics)


@torch.no_grad()
def evaluated_row(
    model: FlatModel, records: Records, metrics: RecordMetrics, *, order: LocalEvaluationOrder, release: Release, rng: Generator
) -> np.ndarray:
    """Return one client's row [dimension], float64: the mean of its contributions with the full noise of the release.

    Where the unit of privacy is a record, each has a contribution of its own, computed from that record alone; one that can't be
    read, or whose metrics can't be computed, contributes zero: no record decides whether the client replies. Where the unit is
    the client, the mean of its records is its one contribution.

    Args:
        model: at the global model's weights.
        records: the client's.
        metrics: of one record.
        order: names and bounds.
        release: of the client's own terms of evaluation.
        rng: secret; gives the noise, and the choice of records where there are more than the release has.
    """
    positions = np.arange(len(records))
    if release.unit == "record" and release.relation == "replace-one" and len(records) > release.num_clients:
        # Fewer are public, for example a batch. Under add-or-remove-one a record more could take another's place in the choice.
        positions = np.sort(rng.choice(len(records), release.num_clients, replace=False))
    was = model.module.training
    model.module.eval()
    try:
        made = [_contribution(metrics, one, order) for one in _outputs(model, records, positions)]
    finally:
        model.module.train(was)
        model.reset_buffers()
    rows = np.asarray(made).reshape(-1, order.dimension)
    if release.unit == "client":
        rows = rows.sum(axis=0, keepdims=True) / max(1, len(rows))
    return private_row(rows, release, rng)


def _contribution(metrics: RecordMetrics, record: tuple[Tensor, Tensor] | None, order: LocalEvaluationOrder) -> np.ndarray:
    """Return a record's contribution [dimension]; zero for one without outputs, or with metrics that can't be computed."""
    if record is None:
        return np.zeros(order.dimension)
    try:
        told = metrics.of(*record)
        return np.asarray(order.contributions(np.asarray([[float(told[name]) for name in order.bounds]]))[0])
    except Exception as error:
        log.warning("a record's metrics can't be computed (%s): it counts as zero", type(error).__name__)
        return np.zeros(order.dimension)


def _outputs(model: FlatModel, records: Records, positions: np.ndarray) -> Iterator[tuple[Tensor, Tensor] | None]:
    """Yield outputs and target of every record, each [1, ...]; None for one that can't be read or run."""
    size = _CHUNK if keeps_records_apart(model.module) else 1
    for start in range(0, len(positions), size):
        chunk = positions[start : start + size]
        together = _run(model, records, np.append(chunk, np.repeat(chunk[:1], size - len(chunk))))
        for place, position in enumerate(chunk):
            # A record that breaks its chunk must not change the others' bits: each runs again in the same place among its copies.
            made = together or _run(model, records, np.repeat(position, size))
            yield None if made is None else (made[0][place : place + 1], made[1][place : place + 1])


def _run(model: FlatModel, records: Records, positions: np.ndarray) -> tuple[Tensor, Tensor] | None:
    try:
        inputs, targets = records.batch(torch.from_numpy(positions), model.device)
        return outputs_of(model.module, inputs), targets
    except Exception as error:
        log.warning("%s records can't be evaluated together (%s)", len(positions), type(error).__name__)
        return None
