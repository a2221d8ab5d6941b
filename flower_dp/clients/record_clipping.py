"""Per-record clipping: the sum of some records' clipped gradients, for the training of any method."""

import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from flower_dp.clients.draws import OwnDraws, draws_seed
from flower_dp.clients.parts import RecordClip
from flower_dp.clients.per_record import UnfitModelError, record_gradients
from flower_dp.clients.records import Inputs, Records, TensorRecords, each, num_rows
from flower_dp.clients.training import FlatModel

log = logging.getLogger("flwr")

Loss = Callable[[Tensor, Tensor], Tensor]
# The largest number of entries and of rows in the matrix of per-record gradients: the fastest on a CPU core, or enough to fill a
# GPU.
_LARGEST_MATRIX = {"cpu": 2**22}
_LARGEST_MATRIX_ELSEWHERE = 2**26
_MOST_RECORDS = {"cpu": 64}
_MOST_RECORDS_ELSEWHERE = 1024


def secret_batch(num_records: int, sampling_rate: float, rng: np.random.Generator) -> Tensor:
    """Draw the positions of a batch, every record independently with probability `sampling_rate`; all records at rate 1."""
    if sampling_rate == 1:
        return torch.arange(num_records)
    return torch.from_numpy(np.flatnonzero(rng.random(num_records) < sampling_rate))


def clipped_sum(
    model: FlatModel, records: Records, positions: Tensor, *, clip: RecordClip, loss: Loss, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the exact float64 sum [d] of the records' clipped gradients on the lattice, and their mean loss.

    A record whose loss or gradient is not finite counts as zero, and so does one that can't be read or raises. Dropout drops the
    same units for all records, so a record in the batch changes no other record's gradient.

    Args:
        model: at the weights where gradients are taken.
        records: the client's.
        positions: of the batch.
        clip: bounds every record's gradient, and rounds it to the lattice.
        loss: model outputs, targets -> loss, for batches of one record.
        seed: secret; determines the random numbers of the model and the data set.

    Raises:
        UnfitModelError: if the model has no gradient even for a record of zeros.
    """
    total = torch.zeros_like(model.vector, dtype=torch.float64)
    losses = [torch.zeros(0, device=model.device)]
    problems: set[str] = set()
    reading = OwnDraws(model.vector.device, draws_seed(seed))
    for part in torch.split(positions, _chunk(model)):
        for rows, values in _gradients(model, records, part, reading, seed, loss, problems):
            finite = rows.isfinite().all(dim=1) & values.isfinite()
            clipped = clip.records(rows.where(finite[:, None], 0.0))
            total += clipped.sum(dim=0, dtype=torch.float64)
            losses.append(values[finite])
            if len(losses[-1]) < len(values):
                problems.add("loss or gradient not finite")
    counted = torch.cat(losses)
    if problems:
        what = "records count as zero" if len(counted) else "all records count as zero, the reply is noise alone"
        log.warning("%s: %s", what, ", ".join(sorted(problems)))
    return total, counted.mean() if len(counted) else torch.zeros((), device=model.device)


def _gradients(
    model: FlatModel, records: Records, positions: Tensor, reading: OwnDraws, seed: int, loss: Loss, problems: set[str]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gradients [n, d] and losses [n] of some records: of all together, or, if that fails, of each record that has them."""
    if len(positions) == 0:
        return
    try:
        with reading:
            inputs, targets = records.batch(positions, model.device)
        if not num_rows(inputs) == len(targets) == len(positions):
            raise ValueError(f"{len(positions)} records came with {num_rows(inputs)} inputs and {len(targets)} targets")
        try:
            with OwnDraws(model.vector.device, seed):
                gradients = record_gradients(model, inputs, targets, loss=loss, chunk=_chunk(model))
        except Exception as error:
            if len(positions) > 1 or isinstance(records, TensorRecords):  # of one shape, which no single record changes
                _check_model(model, inputs, targets, loss, error)
            raise
    except UnfitModelError:
        raise
    except Exception as error:
        if len(positions) == 1:
            problems.add(type(error).__name__)
            return
        for position in torch.split(positions, 1):
            yield from _gradients(model, records, position, reading, seed, loss, problems)
        return
    yield gradients


def _check_model(model: FlatModel, inputs: Inputs, targets: Tensor, loss: Loss, error: Exception) -> None:
    """Raise if the model has no gradient even for a record of zeros: then the model is at fault, and noise would hide it."""
    try:
        zeros = each(inputs, lambda tensor: torch.zeros_like(tensor[:1])), torch.zeros_like(targets[:1])
        record_gradients(model, *zeros, loss=loss, chunk=_chunk(model))
    except Exception:
        raise UnfitModelError(f"the gradient of a single record can't be computed: {type(error).__name__}") from error


def _chunk(model: FlatModel) -> int:
    """Return the fixed number of records computed together: a row then has the same bits among any others."""
    kind = model.device.type
    numbers, records = _LARGEST_MATRIX.get(kind, _LARGEST_MATRIX_ELSEWHERE), _MOST_RECORDS.get(kind, _MOST_RECORDS_ELSEWHERE)
    return max(1, min(records, numbers // model.layout.size))
