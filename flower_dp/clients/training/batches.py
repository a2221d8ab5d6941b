"""Batches: inputs and targets of records, one row per record, and operations on all their tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

# A model's inputs, one row per record: a tensor, or tensors by the names of the model's arguments.
Inputs = Tensor | Mapping[str, Tensor]
# Inputs and targets, one row per record.
Batch = tuple[Inputs, Tensor]


def each(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with a function applied to every tensor."""
    return function(inputs) if isinstance(inputs, Tensor) else {name: function(value) for name, value in inputs.items()}


def mapped(function: Callable[[Tensor], Tensor], inputs: Inputs, targets: Tensor) -> Batch:
    """Return inputs and targets with a function applied to every tensor."""
    return each(inputs, function), function(targets)


def canonical(tensor: Tensor) -> Tensor:
    """Return numbers as float32 or int64, the types of a model's weights and of classes; other types as they are."""
    plain = tensor.detach().as_subclass(Tensor)
    if plain.is_floating_point():
        return plain.to(torch.float32)
    return plain if plain.is_complex() or plain.dtype == torch.bool else plain.to(torch.int64)


def num_rows(inputs: Inputs) -> int:
    """Return the number of records.

    Raises:
        ValueError: if the tensors have different numbers of rows, or there is no tensor.
    """
    counts = {len(inputs)} if isinstance(inputs, Tensor) else {len(value) for value in inputs.values()}
    if len(counts) != 1:
        raise ValueError(f"inputs: tensors with {sorted(counts)} rows: must be equally many")
    return counts.pop()


def split(inputs: Inputs, size: int | list[int]) -> Iterator[Inputs]:
    """Yield parts of `size` records, of which the last may be smaller; or parts of the sizes in a list."""
    if isinstance(inputs, Tensor):
        yield from torch.split(inputs, size)
    else:
        for parts in zip(*(torch.split(value, size) for value in inputs.values()), strict=True):
            yield dict(zip(inputs, parts, strict=True))


def repeated(inputs: Inputs, targets: Tensor, count: int) -> Batch:
    """Return a batch of `count` copies of one record [1, ...]."""
    return mapped(lambda tensor: tensor.expand(count, *tensor.shape[1:]).clone(), inputs, targets)


def kind_of(inputs: Inputs, targets: Tensor) -> object:
    """Return names, shapes and types of a batch as a key, without values: batches of one key are computed alike."""

    def key_of(tensor: Tensor) -> object:
        return tensor.shape, tensor.dtype, tensor.layout, tensor.device

    named = {None: inputs} if isinstance(inputs, Tensor) else inputs
    return frozenset((name, key_of(tensor)) for name, tensor in named.items()), key_of(targets)


def stacked(parts: Sequence[Inputs]) -> Inputs:
    """Return inputs of several batches [n, ...] as those of one."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return {name: torch.cat([part[name] for part in parts if not isinstance(part, Tensor)]) for name in first}
