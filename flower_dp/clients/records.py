"""Records: one client's data, in batches that are ready for the model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

# A model's inputs, one row per record: a tensor, or tensors by the names of the model's arguments.
Inputs = Tensor | Mapping[str, Tensor]


def each(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with a function applied to every tensor."""
    return function(inputs) if isinstance(inputs, Tensor) else {name: function(value) for name, value in inputs.items()}


def num_rows(inputs: Inputs) -> int:
    """Return the number of records.

    Raises:
        ValueError: if the tensors have different numbers of rows, or there is none.
    """
    counts = {len(inputs)} if isinstance(inputs, Tensor) else {len(value) for value in inputs.values()}
    if len(counts) != 1:
        raise ValueError(f"inputs: tensors with {sorted(counts)} rows: must be equally many")
    return counts.pop()


def split(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """Yield parts of `size` records, the last of which may be smaller."""
    if isinstance(inputs, Tensor):
        yield from torch.split(inputs, size)
        return
    for parts in zip(*(torch.split(value, size) for value in inputs.values()), strict=True):
        yield dict(zip(inputs, parts, strict=True))


def outputs_of(module: nn.Module, inputs: Inputs) -> Tensor:
    """Return the model's outputs; named tensors are its keyword arguments."""
    outputs: Tensor = module(inputs) if isinstance(inputs, Tensor) else module(**inputs)
    return outputs


class Records(Protocol):
    """One client's records."""

    def __len__(self) -> int:
        """Return the number of records."""

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of the records at these positions (0 to len - 1), on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecords:
    """Records in tensors, possibly some rows of tensors that many clients share.

    Attributes:
        inputs: [n, ...], of any dtype; uint8 images stay small this way. Or several such tensors by the names of the model's
            arguments, such as {"input_ids": ..., "attention_mask": ...}.
        targets: [n, ...].
        indices: the rows that are this client's [records], int64; None for all of them.
        transform: turns a batch of raw inputs, on the device, into the model's inputs.

    Raises:
        ValueError: for a value that is not a tensor, or inputs and targets of different length, naming it.

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
        named = {f"inputs[{name!r}]": value for name, value in self.inputs.items()} if isinstance(self.inputs, Mapping) else {}
        if isinstance(self.inputs, Mapping) and not named:
            raise ValueError("inputs: has no tensor")
        features: dict[str, Any] = named or {"inputs": self.inputs}
        given: dict[str, Any] = {**features, "targets": self.targets}
        if self.indices is not None:
            given["indices"] = self.indices
        for name, value in given.items():
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
        rows = positions if self.indices is None else self.indices[positions]
        inputs = each(self.inputs, lambda tensor: tensor.index_select(0, rows).to(device))
        targets = self.targets.index_select(0, rows).to(device)
        return (inputs if self.transform is None else self.transform(inputs)), targets


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecords:
    """Records of a map-style torch data set, read one by one and stacked.

    Attributes:
        dataset: with a length, whose items are pairs: inputs (a tensor, number or dict of them) and target.

    Example:
        >>> import torch
        >>> from flower_dp.clients import DatasetRecords
        >>> pairs = [(torch.zeros(3), 1), (torch.ones(3), 0)]
        >>> inputs, targets = DatasetRecords(dataset=pairs).batch(torch.tensor([1]), torch.device("cpu"))
        >>> inputs.tolist(), targets.tolist()
        ([[1.0, 1.0, 1.0]], [0])
    """

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of some records.

        Raises:
            ValueError: if an item is not a pair.
        """
        items = [self.dataset[position] for position in positions.tolist()]
        if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
            raise ValueError("dataset: its items must be pairs of inputs and target")
        inputs, targets = default_collate(items)
        return each(inputs, lambda tensor: tensor.to(device)), targets.to(device)


def as_records(data: Any) -> Records:
    """Return one client's data as records.

    Args:
        data: records; a pair of inputs and targets, each a tensor or a NumPy array (inputs may be a dict of them); or a
            map-style torch data set of such pairs.

    Raises:
        ValueError: for anything else.

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
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple | Mapping | str):
        return DatasetRecords(dataset=data)
    raise ValueError(f"a client's data is a {type(data).__name__}: must be a pair of inputs and targets, or a data set of pairs")


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
