"""A client's records, one batch per step."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_dp.clients.training.batches import Inputs, each, num_rows
from flower_dp.clients.training.recipe import Training
from flower_dp.clients.training.records import Records
from flower_dp.clients.training.training_rng import IsolatedRng, draws_seed

# Inputs and targets of a step, each [records, ...].
Batch = tuple[Any, Tensor]


class Kind(NamedTuple):
    """Shape and type of one record; without a type if its inputs are several tensors."""

    input_shape: tuple[int, ...]
    input_type: torch.dtype | None
    target_shape: tuple[int, ...]
    target_type: torch.dtype

    @classmethod
    def of(cls, inputs: Inputs, targets: Tensor) -> "Kind":
        """Return the kind of the records in a batch.

        Raises:
            ValueError: if there are none, or not as many targets as inputs.
        """
        if not 0 < num_rows(inputs) == targets.shape[0]:
            raise ValueError(f"records: a batch of {num_rows(inputs)} inputs and {len(targets)} targets: must be equally many")
        if not isinstance(inputs, Tensor):
            return cls((), None, targets.shape[1:], targets.dtype)
        return cls(inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype)


class MixedRecordsError(ValueError):
    """Raised if a client's records are not all of one kind."""


class Feed:
    """The batches of one client for one round, read from its data set as they are needed.

    Order and number of records equal those of `Training.train` with a generator of the same seed. So do the data set's draws from
    torch's own generators.

    Args:
        records: records of the client.
        training: recipe of local training.
        device: device of the batches.
        seed: seed of the client for this round.

    Attributes:
        first: positions of the records that are read first.
        kind: kind of all records, taken from the first ones; set by `begin`.

    Raises:
        Exception: any error of the data set's length.
    """

    kind: Kind

    def __init__(self, records: Records, training: Training, device: torch.device, seed: int) -> None:
        self._records, self._device, self._batch_size = records, device, training.batch_size
        self._draws = IsolatedRng(device, draws_seed(seed))
        self._positions = training.positions(len(records), torch.Generator().manual_seed(seed))
        self.first = next(self._positions)

    def begin(self, rows: Batch | None = None) -> "Feed":
        """Read the first records; return this object.

        Args:
            rows: `TensorRecords.rows` of the first records, if they have been read already.

        Raises:
            Exception: any error that the data set raises for the first records.
        """
        if rows is None:
            first = self._read(self.first)
        elif (transform := self._records.transform) is None:  # type: ignore[attr-defined]
            first = rows
        else:
            # Copy: last bits of a transform may depend on the address of its rows, which here follow those of another client.
            copied = each(rows[0], lambda tensor: tensor.clone())
            with self._draws:
                first = transform(copied), rows[1]
        self.kind = Kind.of(*first)
        self._batches = self._all(first)
        return self

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches; there is one pass."""
        return self._batches

    def _all(self, first: Batch) -> Iterator[Batch]:
        yield from self._split(first)
        for positions in self._positions:
            part = self._read(positions)
            if Kind.of(*part) != self.kind:
                raise MixedRecordsError("records: are not all of one shape and type")
            yield from self._split(part)

    def _read(self, positions: Tensor) -> Batch:
        with self._draws:
            return self._records.batch(positions, self._device)

    def _split(self, part: Batch) -> Iterator[Batch]:
        inputs, targets = part
        for start in range(0, targets.shape[0], self._batch_size):  # cheaper than torch.split
            yield inputs[start : start + self._batch_size], targets[start : start + self._batch_size]
