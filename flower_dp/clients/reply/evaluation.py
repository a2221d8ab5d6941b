"""A client's part in private evaluation: metrics of the global model, as the row of a pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flower_dp.clients.reply.pipeline import ClientJob, Trained, one_by_one
from flower_dp.clients.training.attributes import evaluating
from flower_dp.clients.training.losses import Loss, checked
from flower_dp.clients.training.recipe import FlatModel, outputs_of
from flower_dp.clients.training.records import Records
from flower_dp.core.metric_bounds import MetricBounds

# A model in evaluation mode, and one client's records -> the metrics by name.
Metrics = Callable[[nn.Module, Records], Mapping[str, float]]
_BATCH = 512


def loss_and_accuracy(loss: Loss, *, labels: Callable[[Tensor], Tensor] | None = None) -> Metrics:
    """Return a function that computes a client's own metrics: `loss`, and `accuracy`.

    Args:
        loss: model outputs, targets -> the mean loss of a batch. It gets all of a client's outputs at once, because it may divide
            by a number that depends on the targets.
        labels: model outputs [n, ...] -> the predicted labels [n]. None: the largest of logits [n, classes], and no accuracy if
            targets are not classes [n].
    """
    mean_loss = checked(loss)

    def metrics(module: nn.Module, records: Records) -> dict[str, float]:
        right, count, classes = 0, len(records), True
        made: list[tuple[Tensor, Tensor]] = []
        device = next(module.parameters()).device
        for positions in torch.split(torch.arange(count), _BATCH):
            inputs, targets = records.batch(positions, device)
            outputs = outputs_of(module, inputs)
            made.append((outputs, targets))
            if labels is not None:
                right += int((labels(outputs) == targets).sum())
                continue
            classes = classes and targets.ndim == 1 and outputs.ndim == 2 and not targets.dtype.is_floating_point
            right += int((outputs.argmax(1) == targets).sum()) if classes else 0
        if len({(outputs.shape[1:], targets.shape[1:]) for outputs, targets in made}) == 1:
            made = [(torch.cat([outputs for outputs, _ in made]), torch.cat([targets for _, targets in made]))]
        total = sum(float(mean_loss(outputs, targets)) * len(targets) for outputs, targets in made)
        return {"loss": total / max(count, 1)} | ({"accuracy": right / max(count, 1)} if classes else {})

    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRows:
    """Evaluation of the global model, as the `train` part of a pipeline: a row holds a client's metrics and a count of 1."""

    model: FlatModel
    metrics: Metrics
    bounds: MetricBounds

    def rows(self, vector: Tensor, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's vector [metrics + 1], float64 and of norm at most 1, and 0 as the loss; or its error."""
        return one_by_one(jobs, partial(self._row, vector), reset=self.model.reset)

    @torch.no_grad()
    def _row(self, vector: Tensor, job: ClientJob) -> tuple[Tensor, Tensor]:
        module = self.model.module
        self.model.vector.copy_(vector)
        with evaluating(module):
            values = self.metrics(module, job.records)
        row = self.bounds.counted({name: float(value) for name, value in values.items()})
        return torch.from_numpy(row).to(vector.device), torch.zeros((), device=vector.device)
