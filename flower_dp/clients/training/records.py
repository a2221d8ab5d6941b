"""Records: one client's data, in batches that are ready for the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from flower_dp.clients.refusal_messages import TABLE, Declined
from flower_dp.clients.training.batches import Batch, Inputs, mapped, split, stacked
from flower_dp.clients.training.devices import free_memory, is_accelerator, select_rows

# The tensors of a node's clients may take 1/8 of a GPU's free memory.
_PART_OF_FREE_MEMORY = 8


def made_up(records: "Records", device: torch.device) -> Batch | None:
    """Return inputs and target [1, ...] of a synthetic record of the client's kind; None if the kind is not public.

    A dry run judges model and loss on this record: judged on a client's own records, one of them could decide.
    """
    make = getattr(records, "made_up", None)
    return None if make is None else make(device)


class Records(Protocol):
    """One client's records.

    Methods whose unit of privacy is a record read one at a time, except from `TensorRecords`. A class may have a method
    `made_up(device)`, which returns inputs and target [1, ...] of a synthetic record, or None; see `DatasetRecords.example`.
    """

    def __len__(self) -> int:
        """Return the number of records."""

    def batch(self, positions: Tensor, device: torch.device) -> Batch:
        """Return inputs and targets of the records at these positions (0 to len - 1), on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecords:
    """Records in tensors, possibly some rows of tensors that many clients share.

    Attributes:
        inputs: tensor [n, ...] of any dtype, on any device; uint8 images stay small this way. Or several such tensors by the
            names of the model's arguments, such as {"input_ids": ..., "attention_mask": ...}.
        targets: tensor [n, ...].
        indices: this client's rows [records], int64; None for all rows. If the unit of privacy is a record, a client with a
            repeated row does not reply.
        transform: function from a batch of raw inputs, on the device, to the model's inputs. If the unit of privacy is a record,
            the function sees one record at a time.

    Shapes and types of the tensors are public: a client whose tensors do not fit the model says so. Make tensors of a fixed type,
    such as `torch.tensor(labels, dtype=torch.int64)`; without one, a single label with a fraction decides the type of all labels.

    Raises:
        ValueError: for a value that is not a tensor, or inputs and targets of different length, naming the field.

    Example:
        >>> import torch
        >>> from flower_dp.clients import TensorRecords
        >>> images, labels = torch.zeros(100, 28, 28, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64)
        >>> records = TensorRecords(
        ...     inputs=images, targets=labels, indices=torch.arange(10, 20), transform=lambda batch: batch.float() / 255
        ... )
        >>> inputs, targets = records.batch(torch.tensor([0, 9]), torch.device("cpu"))
        >>> len(records), inputs.shape
        (10, torch.Size([2, 28, 28]))
    """

    inputs: Inputs
    targets: Tensor
    indices: Tensor | None = None
    transform: Callable[[Any], Inputs] | None = None

    def __post_init__(self) -> None:
        features: dict[str, Any] = {"inputs": self.inputs}
        if isinstance(self.inputs, Mapping):
            features = {f"inputs[{name!r}]": value for name, value in self.inputs.items()}
            if not features:
                raise ValueError("inputs={}: must have at least one tensor")
        rows = {} if self.indices is None else {"indices": self.indices}
        for name, value in {**features, "targets": self.targets, **rows}.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name}: is a {type(value).__name__}: must be a torch.Tensor")
        for name, value in features.items():
            if value.ndim == 0 or self.targets.ndim == 0 or len(value) != len(self.targets):
                shapes = f"{tuple(value.shape)} and {tuple(self.targets.shape)}"
                raise ValueError(f"{name}, targets: shapes {shapes}: must have one row a record, equally many")
        if self.indices is not None and (self.indices.ndim != 1 or self.indices.dtype != torch.int64):
            raise ValueError(
                f"indices: {self.indices.dtype} of shape {tuple(self.indices.shape)}: must be int64 of shape [records]"
            )

    def __len__(self) -> int:
        return int((self.targets if self.indices is None else self.indices).shape[0])  # cheaper than len

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Any, Tensor]:
        """Return inputs and targets of some records."""
        return self._transformed(*self.rows(positions, device))

    def rows(self, positions: Tensor, device: torch.device) -> tuple[Any, Tensor]:
        """Return inputs and targets of some records, before the transform."""
        rows = self.positions_of_rows(positions)
        return mapped(lambda tensor: select_rows(tensor, rows).to(device), self.inputs, self.targets)

    def positions_of_rows(self, positions: Tensor) -> Tensor:
        """Return the rows of the tensors at which some records are."""
        return positions if self.indices is None else self.indices[positions]

    def zeros(self, device: torch.device) -> tuple[Any, Tensor]:
        """Return inputs and target [1, ...] of a record of zeros, before the transform."""
        return mapped(
            lambda tensor: torch.zeros(1, *tensor.shape[1:], dtype=tensor.dtype, device=device), self.inputs, self.targets
        )

    def made_up(self, device: torch.device) -> tuple[Any, Tensor]:
        """Return inputs and target [1, ...] of a record of zeros: shapes and types of the tensors are public."""
        return self._transformed(*self.zeros(device))

    def _transformed(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        return (inputs if self.transform is None else self.transform(inputs)), targets


class OnDevice:
    """A copier of the tensors of `TensorRecords` to a GPU, each once, up to a fraction of the GPU's free memory.

    It returns other records, and those that do not fit, as they are; they are copied batch by batch.

    Args:
        device: GPU to copy to; on a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left: int | None = None
        # The original tensor is kept as well: its address is the key, and must not be reused for another tensor.
        self._moved: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, records: "Records") -> Any:
        """Return records with their tensors on the device; the client's indices stay on the CPU."""
        if type(records) is not TensorRecords or not is_accelerator(self._device):  # a subclass may do anything
            return records
        inputs = records.inputs
        tensors = [records.targets, *([inputs] if isinstance(inputs, Tensor) else inputs.values())]
        if self._left is None:
            self._left = free_memory(self._device) // _PART_OF_FREE_MEMORY
        needed = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu" and _place(tensor) not in self._moved)
        if needed > self._left:
            return records
        self._left -= needed
        inputs, targets = mapped(self._there, inputs, records.targets)
        return replace(records, inputs=inputs, targets=targets)

    def _there(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if _place(tensor) not in self._moved:
            self._moved[_place(tensor)] = tensor, tensor.to(self._device)
        return self._moved[_place(tensor)][1]


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def rows_of_all(asked: Mapping[Any, tuple["Records", Tensor]], device: torch.device) -> dict[Any, tuple[Any, Tensor]]:
    """Return `TensorRecords.rows` of several clients that share their tensors, with one lookup for all clients.

    Args:
        asked: each client's records and some positions [n].
        device: device of the rows.

    Returns:
        Rows by the keys of `asked`. Empty if not all clients have `TensorRecords` of the same tensors, or if the lookup fails:
        reading client by client then finds the client with wrong rows.
    """
    clients = [records for records, _ in asked.values() if type(records) is TensorRecords]  # a subclass may do anything
    shared = {(id(records.inputs), id(records.targets)) for records in clients}
    if len(shared) != 1 or len(clients) < len(asked):
        return {}
    try:
        parts = [records.positions_of_rows(part) for records, (_, part) in zip(clients, asked.values(), strict=True)]
        inputs, targets = replace(clients[0], indices=None).rows(torch.cat(parts), device)
    except Exception:
        return {}
    sizes = [len(part) for part in parts]
    cut = zip(split(inputs, sizes), torch.split(targets, sizes), strict=True)
    return dict(zip(asked, cut, strict=True))


def repeats_rows(records: Records) -> bool:
    """Tell whether one row of tensors stands for several of a client's records: replacing the row would replace all of them."""
    indices = records.indices if isinstance(records, TensorRecords) else None
    return indices is not None and bool((indices.sort().values.diff() == 0).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecords:
    """Records of a map-style torch data set, read one by one and stacked.

    If the unit of privacy is a record, each record is judged by itself. Floats count as float32 and whole numbers as int64. A
    record counts as zero if the model or the loss does not accept its shape or type. The other records do not matter.

    Attributes:
        dataset: data set with a length, whose items are pairs: inputs (a tensor, number or dict of them) and target.
        example: synthetic item, such as `(torch.zeros(3), 0)`; it is public, so take none from the data set. Records get its
            types, for example float32 instead of float64, or floats instead of whole numbers. A record of other names or shapes,
            or of a type that can't be converted, does not fit. If the model can't be trained on the example, the client says so
            and does not reply. None: if the model fits no record, only the client's log says so, and its replies are noise alone.

    Example:
        >>> import torch
        >>> from flower_dp.clients import DatasetRecords
        >>> pairs = [(torch.zeros(3), 1), (torch.ones(3, dtype=torch.float64), 0)]
        >>> records = DatasetRecords(dataset=pairs, example=(torch.zeros(3), 0))
        >>> inputs, targets = records.batch(torch.tensor([1]), torch.device("cpu"))
        >>> inputs.tolist(), inputs.dtype, targets.tolist()
        ([[1.0, 1.0, 1.0]], torch.float32, [0])
    """

    dataset: Any
    example: Any = None
    _like: Batch | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_like", None if self.example is None else _pairs([self.example]))

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, positions: Tensor, device: torch.device) -> Batch:
        """Return inputs and targets of some records.

        Raises:
            ValueError: if an item is not a pair, or does not fit the example.
        """
        items = [self.dataset[position] for position in positions.tolist()]
        if self._like is None:
            inputs, targets = _pairs(items)
        else:
            rows = [[_fitting(*part) for part in zip(_pairs([item]), self._like, strict=True)] for item in items]
            inputs, targets = stacked([row[0] for row in rows]), torch.cat([row[1] for row in rows])
        return mapped(lambda tensor: tensor.to(device), inputs, targets)

    def made_up(self, device: torch.device) -> Batch | None:
        """Return inputs and target [1, ...] of the example; None without one."""
        return None if self._like is None else mapped(lambda tensor: tensor.to(device), *self._like)


def _pairs(items: list[Any]) -> Batch:
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise ValueError("dataset: its items must be pairs of inputs and target")
    inputs, targets = default_collate(items)
    return inputs, targets


def _fitting(record: Any, like: Any) -> Any:
    """Return inputs or the target of a record [1, ...] with the types of another record.

    Raises:
        ValueError: if the record has other names, shapes, or types that can't be converted; without a value of the record.
    """
    if isinstance(record, Mapping) and isinstance(like, Mapping) and set(record) == set(like):
        return {name: _fitting(record[name], like[name]) for name in like}
    tensors = isinstance(record, Tensor) and isinstance(like, Tensor)
    if not tensors or record.shape != like.shape or not torch.can_cast(record.dtype, like.dtype):
        raise ValueError("dataset: a record does not fit the example: it has other names, or another shape or type")
    return record.to(like.dtype)


def as_records(data: Any) -> Records:
    """Return one client's data as records.

    Args:
        data: records; a pair of inputs and targets, each a tensor or a NumPy array (inputs may be a dict of them); or a
            map-style torch data set of such pairs.

    Raises:
        ValueError: for anything else; for a DataFrame in words that the server may learn.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients import as_records
        >>> len(as_records((np.zeros((5, 3), np.float32), np.zeros(5, np.int64))))
        5
    """
    if hasattr(data, "batch") and hasattr(data, "__len__"):
        records: Records = data
        return records
    if isinstance(data, tuple) and len(data) == 2:
        inputs, targets = data
        named = {name: _tensor(value) for name, value in inputs.items()} if isinstance(inputs, Mapping) else _tensor(inputs)
        return TensorRecords(inputs=named, targets=_tensor(targets))
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # a DataFrame of pandas or polars, which also has a length
        raise Declined(TABLE)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple | Mapping | str):
        return DatasetRecords(dataset=data)
    raise ValueError(f"a client's data is a {type(data).__name__}: must be a pair of inputs and targets, or a data set of pairs")


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
