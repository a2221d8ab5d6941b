"""Records: one client's data, in batches that are ready for the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Records(Protocol):
    """One client's records."""

    def __len__(self) -> int:
        """Return the number of records."""

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the records at these positions (0 to len - 1), on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecords:
    """Records in tensors, possibly some rows of tensors that many clients share.

    Attributes:
        inputs: [n, ...], of any dtype; uint8 images stay small this way.
        targets: [n, ...].
        indices: the rows that are this client's [records], int64; None for all of them.
        transform: turns a batch of raw inputs, on the device, into what the model takes.

    Raises:
        ValueError: for what is no tensor, or inputs and targets of different length, naming it.

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

    inputs: Tensor
    targets: Tensor
    indices: Tensor | None = None
    transform: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        given = {"inputs": self.inputs, "targets": self.targets}
        if self.indices is not None:
            given["indices"] = self.indices
        for name, value in given.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name}: is a {type(value).__name__}: must be a torch.Tensor")
        if self.inputs.ndim == 0 or self.targets.ndim == 0 or len(self.inputs) != len(self.targets):
            shapes = f"{tuple(self.inputs.shape)} and {tuple(self.targets.shape)}"
            raise ValueError(f"inputs, targets: shapes {shapes}: must have one row a record, equally many")
        if self.indices is not None and (self.indices.ndim != 1 or self.indices.dtype != torch.int64):
            raise ValueError(
                f"indices: {self.indices.dtype} of shape {tuple(self.indices.shape)}: must be int64 of shape [records]"
            )

    def __len__(self) -> int:
        return len(self.inputs if self.indices is None else self.indices)

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some records."""
        rows = positions if self.indices is None else self.indices[positions]
        inputs = self.inputs.index_select(0, rows).to(device)
        targets = self.targets.index_select(0, rows).to(device)
        return (inputs if self.transform is None else self.transform(inputs)), targets
