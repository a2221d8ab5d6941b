"""Per-record clipping: the sum of some records' clipped gradients, for the training of any method."""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_dp.clients.refusal_messages import LOSS_OF_WEIGHTS, LOSS_SHAPE, LOSS_UNEVEN, UnfitLossError, UnfitModelError
from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.training.batches import Inputs, canonical, kind_of, mapped, repeated, split
from flower_dp.clients.training.devices import exact_device, is_accelerator
from flower_dp.clients.training.dry_run_cache import findings_of
from flower_dp.clients.training.isolated_records import map_isolated
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.per_record import record_gradients
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.record_isolation import must_compute_alone
from flower_dp.clients.training.records import Records, made_up
from flower_dp.clients.training.training_rng import IsolatedRng, draws_seed
from flower_dp.privacy.events import Relation

log = logging.getLogger("flwr")

# The maximum number of entries and of rows in the matrix of per-record gradients: the fastest on a CPU core, or enough to fill a
# GPU.
_LARGEST_MATRIX = {"cpu": 2**22}
_LARGEST_MATRIX_ELSEWHERE = 2**26
_MAX_RECORDS = {"cpu": 64}
_MAX_RECORDS_ELSEWHERE = 1024
# The maximum number of synthetic records, and of their classes, on which a loss is tried, and the largest relative difference
# between two sums of losses.
_MAX_CLASSES = 64
_LOSS_TOLERANCE = 1e-4


def secret_batch(num_records: int, sampling_rate: float, rng: np.random.Generator) -> Tensor:
    """Draw the positions of a batch, every record independently with probability `sampling_rate`; all records at rate 1."""
    if sampling_rate == 1:
        return torch.arange(num_records)
    return torch.from_numpy(np.flatnonzero(rng.random(num_records) < sampling_rate))


def clipped_sum(
    model: FlatModel,
    records: Records,
    positions: Tensor,
    *,
    clip: RecordClip,
    loss: Loss,
    seed: int,
    relation: Relation = "replace-one",
) -> tuple[Tensor, Tensor]:
    """Return the exact float64 sum [d] of the records' clipped gradients on the lattice, and their mean loss.

    A record counts as zero if its loss or gradient is not finite, it can't be read, or it raises an error. Dropout drops the same
    units for all records, so a record in the batch changes no other record's gradient.

    Args:
        model: model at the weights of the gradients.
        records: records of the client.
        positions: positions of the batch.
        clip: bound on every record's gradient, with rounding to the lattice.
        loss: loss of every record.
        seed: secret seed of the random numbers of the model and the data set.
        relation: neighboring relation. Under add-or-remove-one each record is computed alone, which is slower: an added record
            moves the others to other places, and the last bits of a product may depend on the place.

    Raises:
        UnfitModelError: if the model has no gradient even for a record of zeros.
    """
    check_model(model, records, loss)
    total = torch.zeros(model.layout.size, dtype=torch.float64, device=exact_device(model.device))
    losses = [torch.zeros(0, device=model.device)]
    problems: set[str] = set()
    size = _chunk(model) if relation == "replace-one" else 1
    gradients = _Gradients(model, loss, seed)
    computed = map_isolated(
        records, positions, gradients, size=size, device=model.device, seed=draws_seed(seed), problems=problems
    )
    for _, places, (made, values) in computed:
        finite = made.isfinite().all(dim=1) & values.isfinite()
        # All rows of the part are clipped, whichever of its records could be read: on a GPU the last bits of a norm may depend on
        # the number of rows.
        clipped = clip.records(made.where(finite[:, None], 0.0).to(total.device))
        total += clipped[places].sum(dim=0, dtype=torch.float64)
        losses.append(values[places][finite[places]])
        if len(losses[-1]) < len(places):
            problems.add("loss or gradient not finite")
    counted = torch.cat(losses)
    if problems:
        effect = "Some records count as zero" if len(counted) else "All records count as zero, and the reply is noise alone"
        log.warning("%s: %s", effect, ", ".join(sorted(problems)))
    return total, counted.mean() if len(counted) else torch.zeros((), device=model.device)


class RecordLoss:
    """A loss, to be called with outputs and target of one record [1, ...] each, also within `torch.func.vmap`.

    `check` finds out, on synthetic outputs and targets, whether the loss of a batch is made of the losses of its records. A mean
    over a batch may divide by a number that targets decide: `CrossEntropyLoss(weight=...)` divides by the weights of the targets'
    classes. For a single record this cancels the record's own weight, without any error.

    Args:
        model: model whose weights the loss must not use.
        loss: model outputs, targets -> loss.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss.

        Raises:
            UnfitLossError: if it is not one number.
        """
        value = self._loss(outputs, target)
        if value.ndim:
            raise UnfitLossError(LOSS_SHAPE)
        self._seen.add((outputs.shape[1:], outputs.dtype, target.shape[1:], target.dtype))
        return value

    def check(self) -> None:
        """Check the loss on synthetic outputs and targets of the shapes and types that it was called with.

        Raises:
            UnfitLossError: if the loss of a batch is neither the mean nor the sum of the losses of its records, or it uses the
                model's weights.
        """
        findings = findings_of(self._model)
        for seen in self._seen:
            key = ("record loss", self._loss, *seen)
            if key not in findings:
                try:
                    findings[key] = self._loss_unfit_reason(*seen)
                except Exception:  # the loss may not take such targets, which is not known here
                    findings[key] = None
            if findings[key] is not None:
                raise UnfitLossError(findings[key])

    def _loss_unfit_reason(
        self, output: torch.Size, output_type: torch.dtype, target: torch.Size, target_type: torch.dtype
    ) -> str | None:
        device = self._model.device
        classes = output[0] if output else 2
        if classes == 1 and not is_accelerator(device):  # an unknown class would make a GPU unusable for the process
            classes = 2
        count = min(_MAX_CLASSES, max(2, classes))
        outputs = _waves(count, output).to(device, output_type)
        if target_type.is_floating_point:
            targets = _waves(count, target).abs().to(device, target_type)
        else:  # all targets of a record are of one class, because some losses leave out a class
            chosen = (torch.arange(count) * classes // count).view(-1, *[1] * len(target)).expand(count, *target)
            targets = chosen.to(device, target_type)
        with torch.enable_grad():
            each = torch.stack([self._loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(count)])
            finite = each.isfinite()
            whole = self._loss(outputs[finite], targets[finite])
        gradients = torch.autograd.grad(whole, self._model.parameters, allow_unused=True) if whole.requires_grad else ()
        if any(gradient is not None for gradient in gradients):
            return LOSS_OF_WEIGHTS
        # A loss that was written for one record may look at the first one alone.
        each, size = each.detach()[finite], float(each.detach()[finite].abs().mean())
        wanted = ((each.mean(), size), (each.sum(), size * len(each)), (each[0], size))
        return None if any(abs(float(whole - one)) <= _LOSS_TOLERANCE * scale for one, scale in wanted) else LOSS_UNEVEN


def _waves(count: int, shape: torch.Size) -> Tensor:
    """Return numbers in [-1, 1] that differ from each other."""
    return torch.cos(1.7 * torch.arange(1.0, count * shape.numel() + 1)).view(count, *shape)


class _Gradients:
    """Gradients and losses of the records of a part, at the model's present weights, one at a time if the model joins records."""

    def __init__(self, model: FlatModel, loss: Loss, seed: int) -> None:
        self._model, self._loss, self._seed = model, loss, seed
        self._checked = None if loss is nn.functional.cross_entropy else RecordLoss(model, loss)
        self._start = model.vector.clone()
        self._draws = IsolatedRng.of_data_sets(model.vector.device)

    def __call__(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients [size, d] and losses [size] of inputs [size, ...] and targets [size, ...]."""
        if not must_compute_alone(self._model, inputs, targets, self._rows, ("gradients", self._loss)):
            return self._together(inputs, targets)
        alone = zip(split(inputs, 1), torch.split(targets, 1), strict=True)
        rows, losses = zip(*(self._together(*one, engine="torch.func") for one in alone), strict=True)
        return torch.cat(rows), torch.cat(losses)

    def _together(self, inputs: Inputs, targets: Tensor, engine: str | None = None) -> tuple[Tensor, Tensor]:
        # A forward pass may change weights and buffers. No pass may depend on earlier ones: one record could change their number.
        self._model.vector.copy_(self._start)
        return self._passed(inputs, targets, engine)

    def _rows(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return gradients at synthetic weights."""
        weights = self._model.vector.clone()
        try:
            return self._passed(inputs, targets)[0]
        finally:
            self._model.vector.copy_(weights)

    def _passed(self, inputs: Inputs, targets: Tensor, engine: str | None = None) -> tuple[Tensor, Tensor]:
        self._model.reset_buffers()
        with self._draws:
            self._draws.restart(self._seed)
            loss = self._checked or self._loss
            made = record_gradients(self._model, inputs, targets, loss=loss, engine=engine)
            if self._checked is not None:
                self._checked.check()
        return made


def check_model(model: FlatModel, records: Records, loss: Loss) -> None:
    """Raise if the model has no gradient even for a synthetic record: then the model is at fault, and noise would hide it.

    Only the synthetic record decides, whatever the client's records do.
    """
    try:
        made = made_up(records, model.device)
        if made is None:
            return
        record = mapped(canonical, *made)
        key, findings = ("fits", loss, kind_of(*record)), findings_of(model)
        if key not in findings:
            start = model.vector.clone()
            _Gradients(model, loss, 0)(*repeated(*record, _chunk(model)))
            model.vector.copy_(start)
            findings[key] = True
    except Exception as error:
        raise UnfitModelError(f"the gradient of a single record can't be computed: {type(error).__name__}") from error


def _chunk(model: FlatModel) -> int:
    """Return the fixed number of records computed together: a row then has the same bits beside any others."""
    kind = model.device.type
    numbers, records = _LARGEST_MATRIX.get(kind, _LARGEST_MATRIX_ELSEWHERE), _MAX_RECORDS.get(kind, _MAX_RECORDS_ELSEWHERE)
    return max(1, min(records, numbers // model.layout.size))
