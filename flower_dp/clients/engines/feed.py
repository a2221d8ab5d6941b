"""A client's records as batches of one fixed shape, one a step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_dp.clients.draws import OwnDraws, draws_seed
from flower_dp.clients.records import Records
from flower_dp.clients.training import LocalTraining


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Shape and type of one record."""

    input_shape: tuple[int, ...]
    input_type: torch.dtype
    target_shape: tuple[int, ...]
    target_type: torch.dtype

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> "Kind":
        """Return the kind of the records in a batch."""
        if not 0 < len(inputs) == len(targets):
            raise ValueError(f"records: a batch of {len(inputs)} inputs and {len(targets)} targets")
        return cls(
            input_shape=tuple(inputs.shape[1:]),
            input_type=inputs.dtype,
            target_shape=tuple(targets.shape[1:]),
            target_type=targets.dtype,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and targets [batch_size, ...] of a step, the first `num_records` of which count; the others are padding."""

    inputs: Tensor
    targets: Tensor
    num_records: int


class MixedRecordsError(ValueError):
    """A client's records are not all of one kind."""


class Feed:
    """The batches of one client for one round, read from its data set as they are needed.

    Order and number of records are those of `LocalTraining.train` with a generator of the same seed, and so is what the data set
    draws from torch's own generators.

    Attributes:
        kind: the kind of all its records, that of the first ones.

    Raises:
        Exception: whatever the data set raises for the first records.
    """

    def __init__(self, records: Records, training: LocalTraining, device: torch.device, seed: int) -> None:
        self._parts = training.fetched(records, device, torch.Generator().manual_seed(seed))
        self._draws = OwnDraws(torch.empty(0, device=device).device, draws_seed(seed))
        self._batch_size = training.batch_size
        first = self._fetch()
        if first is None:
            raise ValueError("records: a client without records can't train")
        self.kind = Kind.of(*first)
        self._batches = self._all(first)

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches; there is one pass."""
        return self._batches

    def _fetch(self) -> tuple[Tensor, Tensor] | None:
        with self._draws:
            return next(self._parts, None)

    def _all(self, part: tuple[Tensor, Tensor] | None) -> Iterator[Batch]:
        while part is not None:
            if Kind.of(*part) != self.kind:
                raise MixedRecordsError("records: not all of one shape and type")
            yield from self._split(*part)
            part = self._fetch()

    def _split(self, inputs: Tensor, targets: Tensor) -> Iterator[Batch]:
        """Yield batches of the full size; the last record stands again for those that are missing in the last batch."""
        size, num_records = self._batch_size, len(inputs)
        missing = -num_records % size
        if missing:
            inputs = torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])])
            targets = torch.cat([targets, targets[-1:].expand(missing, *targets.shape[1:])])
        for start in range(0, num_records, size):
            batch = slice(start, start + size)
            yield Batch(inputs[batch], targets[batch], min(size, num_records - start))
