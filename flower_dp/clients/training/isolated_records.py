"""Isolated records: a client's records, read one by one and computed in fixed places, so that no record changes another.

Whether a record counts follows from that record alone: whether it can be read, whether model and loss accept its shapes and
types, and whether its results are finite (`clipped_sum`). No other record decides it, neither the first record nor the majority.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from flower_dp.clients.refusal_messages import contained
from flower_dp.clients.training import batches
from flower_dp.clients.training.batches import Inputs
from flower_dp.clients.training.record_isolation import Watch, looks_up
from flower_dp.clients.training.records import Records, TensorRecords
from flower_dp.clients.training.training_rng import IsolatedRng, record_seed

Made = TypeVar("Made")
Transform = Callable[[Any], Inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some records of one kind, and their places in a part of a larger batch.

    Attributes:
        places: places of the records [k], increasing.
        inputs: inputs [k, ...], before the transform.
        targets: targets [k, ...].
    """

    places: Tensor
    inputs: Inputs
    targets: Tensor

    def filled(self, chosen: Tensor, size: int) -> tuple[Inputs, Tensor]:
        """Return `size` records: the chosen ones [k] at their places, and copies of the first chosen one everywhere else."""
        if len(chosen) == size:
            return self.inputs, self.targets
        order = torch.full((size,), int(chosen[0]))
        order[self.places[chosen]] = chosen
        order = order.to(self.targets.device)
        return batches.mapped(lambda tensor: tensor.index_select(0, order), self.inputs, self.targets)


def map_isolated(
    records: Records,
    positions: Tensor,
    compute: Callable[[Inputs, Tensor], Made],
    *,
    size: int,
    device: torch.device,
    seed: int,
    problems: set[str],
) -> Iterator[tuple[int, Tensor, Made]]:
    """Yield the results of all records that can be read and computed, for one part of `size` records after another.

    `compute` receives `size` records, each in its fixed place, with the types of `canonical`. If it raises, it is called again
    for fewer and fewer of the records, with copies of them in the other places. A row of its result must depend on the record in
    that place alone. Then the row has the same bits whatever the other records are, and whether or not they can be computed.

    Args:
        records: records of the client.
        positions: positions of the batch [n].
        compute: inputs [size, ...], targets [size, ...] -> result.
        size: number of records in a part.
        device: device to compute on.
        seed: secret seed; the draws of reading a record follow from it and from the record's position alone.
        problems: set that receives the kinds of errors.

    Yields:
        The part's first index in `positions`, the places [k] in the part for which the result counts, and the result.
    """
    draws = IsolatedRng.of_data_sets(device)
    given = records.transform if type(records) is TensorRecords else None
    transform = None if given is None else _transform(given, records, device)  # type: ignore[arg-type]
    for number, part in enumerate(torch.split(positions, size)):

        def run(inputs: Inputs, targets: Tensor, number: int = number) -> Made:
            if transform is not None:
                with draws:
                    inputs = transform(inputs, lambda place: draws.restart(record_seed(seed, number * size + place)))
            return compute(*batches.mapped(batches.canonical, inputs, targets))

        for batch in _read(records, part, device, draws, seed, problems):
            for places, made in _computed(batch, run, size, problems):
                yield number * size, places, made


def _computed(
    batch: Batch, compute: Callable[[Inputs, Tensor], Made], size: int, problems: set[str]
) -> Iterator[tuple[Tensor, Made]]:
    for chosen, made in _working(len(batch.places), lambda chosen: compute(*batch.filled(chosen, size)), problems):
        yield batch.places[chosen], made


def _read(
    records: Records, positions: Tensor, device: torch.device, draws: IsolatedRng, seed: int, problems: set[str]
) -> Iterator[Batch]:
    """Yield the records that can be read, those of one kind together."""
    if type(records) is TensorRecords:  # its rows can't mix; a subclass may do anything
        for places, rows in _working(len(positions), lambda places: records.rows(positions[places], device), problems):
            yield Batch(places=places, inputs=rows[0], targets=rows[1])
        return
    kinds: dict[object, list[tuple[int, Inputs, Tensor]]] = {}
    with draws:
        for place, position in enumerate(positions.tolist()):
            draws.restart(record_seed(seed, position))
            try:
                with contained():
                    inputs, targets = _one(records, position, device)
                kinds.setdefault(batches.kind_of(inputs, targets), []).append((place, inputs, targets))
            except Exception as error:
                problems.add(type(error).__name__)
    for members in kinds.values():
        places_of, inputs_of, targets_of = zip(*members, strict=True)
        yield Batch(places=torch.tensor(places_of), inputs=batches.stacked(inputs_of), targets=torch.cat(targets_of))


def _working(count: int, function: Callable[[Tensor], Made], problems: set[str]) -> Iterator[tuple[Tensor, Made]]:
    """Yield some of the indices of `count` records, and a function's result for them.

    The function gets all indices. If it raises, it gets one half and then the other, and so on, down to single records.
    """
    waiting = [torch.arange(count)] if count else []
    while waiting:
        chosen = waiting.pop()
        try:
            with contained():
                made = function(chosen)
        except Exception as error:
            if len(chosen) == 1:
                problems.add(type(error).__name__)
            else:
                middle = len(chosen) // 2
                waiting += [chosen[middle:], chosen[:middle]]
        else:
            yield chosen, made


def _one(records: Records, position: int, device: torch.device) -> tuple[Inputs, Tensor]:
    """Return inputs and target [1, ...] of one record."""
    inputs, targets = records.batch(torch.tensor([position]), device)
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
    if not all(isinstance(tensor, Tensor) for tensor in (*tensors, targets)):
        raise ValueError("records: inputs and targets: must be tensors")
    inputs, targets = batches.mapped(batches.canonical, inputs, targets)
    if not batches.num_rows(inputs) == len(targets) == 1:
        raise ValueError(f"one record came with {batches.num_rows(inputs)} inputs and {len(targets)} targets")
    return inputs, targets


def _transform(
    transform: Transform, records: TensorRecords, device: torch.device
) -> Callable[[Inputs, Callable[[int], None]], Inputs]:
    """Return a function that transforms records [n, ...] each alone: vectorized if that works for a record of zeros."""

    def one(row: Any) -> Any:
        made = transform(row)
        if batches.num_rows(made) != 1:
            raise ValueError(f"transform: made {batches.num_rows(made)} records of one")
        return made

    def alone(row: Any) -> Any:
        return batches.each(one(batches.each(row, lambda tensor: tensor.unsqueeze(0))), lambda tensor: tensor.squeeze(0))

    vectorized = torch.func.vmap(alone, randomness="different")

    def together(inputs: Inputs, restart: Callable[[int], None]) -> Inputs:
        restart(0)
        made: Inputs = vectorized(inputs if isinstance(inputs, Tensor) else dict(inputs))
        return made

    def one_by_one(inputs: Inputs, restart: Callable[[int], None]) -> Inputs:
        made = []
        for place, row in enumerate(batches.split(inputs, 1)):
            restart(place)
            made.append(one(row))
        return batches.stacked(made)

    try:
        with contained(), IsolatedRng.of_data_sets(device), Watch(looks_up) as watch:
            together(records.zeros(device)[0], lambda _: None)
    except Exception:
        return one_by_one
    return one_by_one if watch.found else together
