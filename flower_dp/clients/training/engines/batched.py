"""Training of groups of clients at once, for simulations.

No bit of a client's row depends on the other clients of its group, on its slot in the group, or on the number of clients. A group
always has the same number of slots, and a step the same number of records. Before a model is trained in groups, made-up records
are trained in all slots and next to different records, and must give the same bits everywhere.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flower_dp.clients.reasons import contained
from flower_dp.clients.training.devices import is_accelerator, is_out_of_memory, release_memory, total_memory
from flower_dp.clients.training.engines.feed import Feed, Kind, MixedRecordsError
from flower_dp.clients.training.engines.one_by_one import Trained, train_one
from flower_dp.clients.training.engines.program import Program, UnevenLossError
from flower_dp.clients.training.recipe import FlatModel, Training
from flower_dp.clients.training.records import Records, TensorRecords, rows_of_all

log = logging.getLogger("flwr")

_MOST_SLOTS = 64
# The number of weights in a group: as many as fit a CPU's caches, or this part of a GPU's memory, the rest of which gradients and
# activations may use.
_CACHED_FLOATS = 2**20
_PART_OF_GPU = 64
# The number of weights of the clients that are sorted by their number of steps at a time, and wait to be yielded.
_WAITING_FLOATS = 2**20
# The largest distance between the two engines' updates of made-up records, relative to the norm.
_TOLERANCE = 1e-3
# In the key, beside a kind of record, of the largest number of slots for which memory was enough, where more were tried.
_FITTING = "slots that fit"
_TINY = torch.finfo(torch.float32).tiny


class UnfitRecipeError(RuntimeError):
    """A recipe that can't be trained in groups of clients."""


def train_batched(
    vector: Tensor,
    clients: Sequence[Records],
    training: Training,
    *,
    model: FlatModel,
    server_round: int,
    seeds: Sequence[int],
    group_size: int | None = None,
) -> Iterator[Trained]:
    """Yield the result of every client, in order.

    `group_size` is that of `num_slots`. A client is trained alone with `one_by_one` if its model can't be batched, its records
    are not all of one shape, the loss of one of its batches is not the mean of the losses of the batch's records, or a group does
    not fit into memory. What is known before any record is read is logged, once for a model, a recipe and a kind of record. The
    choice depends on the model, the recipe, the device and the client's own records, never on other clients.
    """
    trainer = _Trainer(vector, training, model, server_round, num_slots(model.layout.size, model.device, group_size))
    window = trainer.num_slots * max(1, _WAITING_FLOATS // max(1, model.layout.size * trainer.num_slots))
    for start in range(0, len(clients), window):
        yield from trainer.train(clients[start : start + window], seeds[start : start + window])


def num_slots(num_parameters: int, device: torch.device, group_size: int | None = None) -> int:
    """Return how many clients are in a group, an even number that never depends on which clients take part, or how many.

    Args:
        num_parameters: of the model.
        device: where the group is trained.
        group_size: on a GPU the number itself, if so many models fit into its memory: an operation costs the same for few clients
            and many. Else, and on a CPU, it is a power of two of at most 64, from the model's size and the device alone.
    """
    floats, most = _CACHED_FLOATS, _MOST_SLOTS
    if is_accelerator(device):
        floats = total_memory(device) // 4 // _PART_OF_GPU
        most = _MOST_SLOTS if group_size is None else group_size + group_size % 2
    fitting = max(2, floats // max(1, num_parameters))
    return most if most <= fitting else int(2 ** (fitting.bit_length() - 1))


class _Trainer:
    """One round of one node's clients."""

    def __init__(self, vector: Tensor, training: Training, model: FlatModel, server_round: int, num_slots: int) -> None:
        self._vector, self._training, self._model, self._round = vector, training, model, server_round
        self._threads = torch.get_num_threads()
        self.num_slots = num_slots

    def train(self, clients: Sequence[Records], seeds: Sequence[int]) -> Iterator[Trained]:
        """Train these clients, in groups with similar numbers of steps; yield the result of each, in order."""
        waiting: dict[int, Trained] = {}
        turn = 0
        order = sorted(range(len(clients)), key=lambda index: self._num_steps(clients[index]))
        for start in range(0, len(order), self.num_slots):
            for index, trained in self._train_group(order[start : start + self.num_slots], clients, seeds):
                waiting[index] = trained
                while turn in waiting:
                    yield waiting.pop(turn)
                    turn += 1

    def _train_group(
        self, group: Sequence[int], clients: Sequence[Records], seeds: Sequence[int]
    ) -> Iterator[tuple[int, Trained]]:
        """Yield the results of the clients with these indices, each with its index."""
        kinds: dict[Kind, dict[int, Feed]] = {}
        starved: list[int] = []
        for index, feed in self._feeds(group, clients, seeds):
            if isinstance(feed, Feed):
                kinds.setdefault(feed.kind, {})[index] = feed
            elif is_out_of_memory(feed):  # what others have read is in memory as well
                starved.append(index)
            else:
                yield index, feed
        while kinds:
            kind, feeds = kinds.popitem()
            while feeds:
                some = [feeds.popitem() for _ in range(min(self._slots(kind), len(feeds)))]
                yield from self._train_kind(kind, dict(reversed(some)), clients, seeds)
        yield from ((index, self._alone(clients[index], seeds[index])) for index in starved)

    def _train_kind(
        self, kind: Kind, feeds: dict[int, Feed], clients: Sequence[Records], seeds: Sequence[int]
    ) -> Iterator[tuple[int, Trained]]:
        """Yield the results of clients whose records are of one kind, and who fit into one group, each with its index."""
        program, places, left = self._program(kind), list(feeds), set(feeds)
        if program is None:
            yield from ((index, self._alone(clients[index], seeds[index])) for index in places)
            return
        failed: Exception | None = None
        try:
            for slot, trained in program.train(list(feeds.values()), self._vector, self._training.step_size(self._round)):
                index = places[slot]
                left.remove(index)
                alone = isinstance(trained, MixedRecordsError | UnevenLossError)
                yield index, self._alone(clients[index], seeds[index]) if alone else trained
        except Exception as error:
            # The traceback holds the memory of all that has failed.
            failed = error.with_traceback(None) if is_out_of_memory(error) else error
        if failed is not None and is_out_of_memory(failed):  # no client's fault
            self._use_less_memory(kind)
            program = None
            feeds.clear()
            release_memory(self._model.device)
            yield from ((index, self._alone(clients[index], seeds[index])) for index in sorted(left))
        elif failed is not None:
            # One client's records make a step fail. To find out which, train each client in a group alone.
            for index in sorted(left):
                yield from [(index, failed)] if len(places) == 1 else self._train_group([index], clients, seeds)

    def _feeds(
        self, group: Sequence[int], clients: Sequence[Records], seeds: Sequence[int]
    ) -> Iterator[tuple[int, Feed | Exception]]:
        """Yield the batches of the clients with these indices, each with its index, or the error of its first records."""
        device, feeds = self._model.device, dict[int, Feed]()
        for index in group:
            try:
                with contained():
                    feeds[index] = Feed(clients[index], self._training, device, seeds[index])
            except Exception as error:
                yield index, error
        rows = {}
        if is_accelerator(device):  # whose every lookup costs as much as one for all clients
            rows = rows_of_all({index: (clients[index], feed.first) for index, feed in feeds.items()}, device)
        for index, feed in feeds.items():
            try:
                with contained():
                    feed.begin(rows.get(index))
            except Exception as error:
                yield index, error
            else:
                yield index, feed

    def _num_steps(self, records: Records) -> int:
        """Return how many steps a client takes; 0 if even that fails, and training will then raise the error."""
        try:
            with contained():
                return self._training.num_steps(len(records))
        except Exception:
            return 0

    def _alone(self, records: Records, seed: int) -> Trained:
        return train_one(self._vector, records, self._training, model=self._model, server_round=self._round, seed=seed)

    def _slots(self, kind: Kind) -> int:
        """Return how many clients with records of a kind are in a group."""
        fitting: int = self._model.programs.get((_FITTING, kind), self.num_slots)
        return min(fitting, self.num_slots)

    def _program(self, kind: Kind) -> Program | None:
        """Return the program for a kind of record, or None if clients are trained one by one."""
        key = (self._training, kind, self._threads, self._slots(kind))
        if key not in self._model.programs:
            try:
                with contained():
                    self._model.programs[key] = self._proven(kind)
            except Exception as error:
                log.warning("engine batched: clients train one by one: %s: %s", type(error).__name__, error)
                self._model.programs[key] = None
                starved = is_out_of_memory(error)
            else:
                starved = False
            if starved:
                self._use_less_memory(kind)
                release_memory(self._model.device)
                return None
        program: Program | None = self._model.programs[key]
        return program

    def _use_less_memory(self, kind: Kind) -> None:
        """Make the groups of clients with records of a kind half as large from now on.

        Clients with records of another kind are trained as before: a client must change nothing for others.
        """
        slots = self._slots(kind)
        half = max(2, slots // 4 * 2)
        log.warning("engine batched: groups of %s clients do not fit into memory: from now on they have %s", slots, half)
        self._model.programs[self._training, kind, self._threads, slots] = None
        self._model.programs[_FITTING, kind] = half

    def _proven(self, kind: Kind) -> Program:
        """Return a program that trains made-up records as `one_by_one` does, with the same bits in every slot.

        Raises:
            Exception: if there is no such program.
        """
        if self._training.optimizer != "sgd":
            raise UnfitRecipeError(f"optimizer={self._training.optimizer!r}")
        slots = self._slots(kind)
        # Matrix products slot by slot only where they need it.
        for sliced in (False, True):
            program = Program(self._model, self._training, kind, slots, sliced=sliced)
            own, other = (_made_up(kind, self._training.batch_size, self._model.device, seed) for seed in (1, 2))
            layouts = [[own] * slots, [own, other] * (slots // 2), [other, own] * (slots // 2)]
            trained = [self._tried(program, layout) for layout in layouts]
            pairs = [pair for layout, rows in zip(layouts, trained, strict=True) for pair in zip(layout, rows, strict=True)]
            rows = [row for records, row in pairs if records is own]
            if all(torch.equal(row.view(torch.int32), rows[0].view(torch.int32)) for row in rows):
                break
        else:
            raise RuntimeError("a client's bits depend on its slot in the group")
        expected = train_one(self._vector, own, self._brief(), model=self._model, server_round=self._round, seed=0)
        if isinstance(expected, Exception):
            raise expected
        distance = float((rows[0] - expected[0]).norm() / expected[0].norm().clamp(min=_TINY))
        if not distance <= _TOLERANCE:
            raise RuntimeError(
                f"a client's update in a group differs from its update alone by {distance:.1e} of its norm; is the loss a mean "
                "over records?"
            )
        return program

    def _brief(self) -> Training:
        return replace(self._training, num_local_epochs=1, num_local_steps=None)

    def _tried(self, program: Program, clients: Sequence[Records]) -> list[Tensor]:
        feeds = [Feed(records, self._brief(), self._model.device, seed=0).begin() for records in clients]
        rows: dict[int, Tensor] = {}
        for slot, trained in program.train(feeds, self._vector, self._training.step_size(self._round)):
            if isinstance(trained, Exception):
                raise trained
            rows[slot] = trained[0]
        return [rows[slot] for slot in range(len(feeds))]


def _made_up(kind: Kind, batch_size: int, device: torch.device, seed: int) -> TensorRecords:
    """Return records of a kind that fill a batch and half of another."""
    rng = torch.Generator().manual_seed(seed)
    num_records = batch_size + -(-batch_size // 2)

    def made_up(shape: tuple[int, ...], type_: torch.dtype, num_whole: int) -> Tensor:
        if type_.is_floating_point:
            return torch.rand(num_records, *shape, generator=rng).to(device, type_)
        return torch.randint(num_whole, (num_records, *shape), generator=rng).to(device, type_)

    if kind.input_type is None:
        raise UnfitRecipeError("a record has several input tensors")
    inputs = made_up(kind.input_shape, kind.input_type, num_whole=1)
    # Of two classes: some losses are means over records only where all targets are equal.
    targets = made_up(kind.target_shape, kind.target_type, num_whole=2)
    return TensorRecords(inputs=inputs, targets=targets)
