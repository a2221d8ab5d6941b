"""A client's part in private evaluation under local DP: metrics record by record, and full noise."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_dp.clients.local.recipe import LocalRecipe
from flower_dp.clients.local.row import evaluation_pipeline
from flower_dp.clients.refusal_messages import Declined, contained
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline
from flower_dp.clients.training.attributes import evaluating
from flower_dp.clients.training.batches import Inputs, num_rows, split
from flower_dp.clients.training.isolated_records import map_isolated
from flower_dp.clients.training.losses import Loss, record_cross_entropy
from flower_dp.clients.training.per_record import keeps_records_apart
from flower_dp.clients.training.recipe import FlatModel, outputs_of
from flower_dp.clients.training.record_isolation import must_compute_alone
from flower_dp.clients.training.records import Records
from flower_dp.clients.training.training_rng import IsolatedRng, draws_seed
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.release import Release
from flower_dp.wire import EVALUATION

log = logging.getLogger("flwr")

# Records that go through the model together, always so many: a record's bits then don't depend on the number of records.
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMetrics:
    """Metrics of single records, for private evaluation, which estimates their means.

    Attributes:
        names: names of the metrics.
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
    """Return the metrics `loss` and `accuracy` of a record; accuracy is 1 if the model's label is the target, else 0.

    Args:
        loss: model outputs, targets -> loss, for batches of one record.
        labels: model outputs [1, ...] -> the predicted label [1]; None: the largest of logits [1, classes].
    """
    of_record = record_cross_entropy if loss is torch.nn.functional.cross_entropy else loss
    label_of = labels or (lambda outputs: outputs.argmax(1))

    def metrics(outputs: Tensor, target: Tensor) -> dict[str, float]:
        return {"loss": float(of_record(outputs, target)), "accuracy": float((label_of(outputs) == target).all())}

    return RecordMetrics(names=("loss", "accuracy"), of=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordContributions:
    """A client's contributions to an evaluation of the global model.

    If the unit of privacy is a record, each record has a contribution of its own, computed from that record alone. A record that
    can't be read, or whose metrics can't be computed, contributes zero: no record decides whether the client replies. If the unit
    is the client, the mean of its records is its one contribution.
    """

    model: FlatModel
    metrics: RecordMetrics
    bounds: MetricBounds
    release: Release

    @torch.no_grad()
    def __call__(self, vector: Tensor, job: ClientJob) -> np.ndarray:
        """Return the contributions [n, dimension], float64, of the client's records, or of a secret choice of them."""
        model, release, rng = self.model, self.release, job.secret()
        positions = np.arange(len(job.records))
        if release.unit == "record" and release.relation == "replace-one" and len(job.records) > release.num_units:
            # The public number is smaller, for example a batch. Not under add-or-remove-one: an added record could take another's
            # place here.
            positions = np.sort(rng.choice(len(job.records), release.num_units, replace=False))
        # Under add-or-remove-one an added record moves the others to other places, and a place may change the last bits.
        together = _CHUNK if release.relation == "replace-one" and keeps_records_apart(model.module) else 1
        model.reset_buffers()
        model.vector.copy_(vector)
        rows, seed, problems = np.zeros((len(positions), len(self.bounds.bounds))), int(rng.integers(2**63)), set[str]()
        try:
            with evaluating(model.module):
                for index, record in _outputs(model, job.records, torch.from_numpy(positions), seed, together):
                    rows[index] = _contribution(self.metrics, record, self.bounds, problems)
        finally:
            model.reset_buffers()
        if problems:
            log.warning("Metrics of records can't be computed, and they count as zero: %s", ", ".join(sorted(problems)))
        return rows.sum(axis=0, keepdims=True) / max(1, len(rows)) if release.unit == "client" else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecipe:
    """One reply to an evaluation: the noised mean of its contributions, by the client's own terms of evaluation.

    Attributes:
        training: recipe of the method, whose terms fix the unit of privacy.
        budget: budget of evaluations; None: the client takes part in none.
        metrics: metrics of one record.
        bounds: bounds of the requested metrics.
    """

    training: LocalRecipe
    budget: EvaluationBudget | None
    metrics: RecordMetrics
    bounds: MetricBounds

    method = EVALUATION

    def terms(self, name: str, records: Records) -> ClientTerms:
        """Return one client's terms of evaluation.

        Raises:
            Declined: if the client has no budget of evaluations.
        """
        if self.budget is None:
            raise Declined("evaluation=None: this client has no budget of private evaluations")
        return self.budget.terms(name, self.training.terms(name, records))

    def pipeline(self, release: Release, *, model: FlatModel, server_round: int) -> Pipeline:
        """Return the pipeline of one client's reply, with the bound and the noise of its own release."""
        of = RecordContributions(model=model, metrics=self.metrics, bounds=self.bounds, release=release)
        return evaluation_pipeline(release, of=of, dimension=len(self.bounds.bounds))


def _contribution(metrics: RecordMetrics, record: tuple[Tensor, Tensor], bounds: MetricBounds, problems: set[str]) -> np.ndarray:
    """Return a record's contribution [dimension]; if its metrics can't be computed, zero, and add the error to `problems`."""
    try:
        with contained():
            values = metrics.of(*record)
        return np.asarray(bounds.centered(np.asarray([[float(values[name]) for name in bounds.bounds]]))[0])
    except Exception as error:
        problems.add(type(error).__name__)
        return np.zeros(len(bounds.bounds))


def _outputs(
    model: FlatModel, records: Records, positions: Tensor, seed: int, size: int
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield the index in `positions` of every record that can be read and run, and its outputs and target [1, ...]."""
    start, problems, draws = model.vector.clone(), set[str](), IsolatedRng.of_data_sets(model.vector.device)

    def passed(inputs: Inputs) -> Tensor:
        # Every forward pass begins with the same weights, buffers and draws, however many there were before it.
        model.reset_buffers()
        with draws:
            draws.restart(draws_seed(seed))
            made = outputs_of(model.module, inputs)
        if len(made) != num_rows(inputs):
            raise ValueError(f"outputs: {len(made)} for {num_rows(inputs)} records: must be one for each")
        return made

    def rows(inputs: Inputs, targets: Tensor) -> Tensor:
        weights = model.vector.clone()
        made = passed(inputs)
        made = (torch.view_as_real(made) if made.is_complex() else made).to(torch.float32).flatten(start_dim=1)
        model.vector.copy_(weights)
        return made

    def at_start(inputs: Inputs) -> Tensor:
        model.vector.copy_(start)
        return passed(inputs)

    def outputs(inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        if must_compute_alone(model, inputs, targets, rows, "outputs"):
            return torch.cat([at_start(row) for row in split(inputs, 1)]), targets
        return at_start(inputs), targets

    for first, places, (made, targets) in map_isolated(
        records, positions, outputs, size=size, device=model.device, seed=seed, problems=problems
    ):
        for place in places.tolist():
            yield first + place, (made[place : place + 1], targets[place : place + 1])
    if problems:
        log.warning("Records can't be evaluated and count as zero: %s", ", ".join(sorted(problems)))
