"""Training of groups of clients at once, for simulations.

No bit of a client's row depends on the other clients of its group, on its slot in the group, or on the number of clients. A step
always has the same number of records. Before a model is trained in groups, synthetic records are trained in all slots and next to
different records, and must give the same bits everywhere. So must a group with fewer slots, in which a CPU trains fewer clients.
(A GPU takes as long for few as for many.)
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from flower_dp.clients.refusal_messages import contained
from flower_dp.clients.reply.pipeline import Trained
from flower_dp.clients.training.devices import is_accelerator, is_out_of_memory, release_memory, total_memory
from flower_dp.clients.training.engines.feed import Feed, Kind, MixedRecordsError
from flower_dp.clients.training.engines.one_by_one import train_one
from flower_dp.clients.training.engines.program import Program, UnevenLossError
from flower_dp.clients.training.recipe import FlatModel, Training
from flower_dp.clients.training.records import Records, TensorRecords, rows_of_all

log = logging.getLogger("flwr")

_MAX_SLOTS = 64
# The number of weights in a group: as many as fit a CPU's caches, or 1/64 of a GPU's memory, so that gradients and activations
# fit beside them.
_CACHED_FLOATS = 2**20
_PART_OF_GPU = 64
# The number of weights of the clients that are sorted by their number of steps at a time, and wait to be yielded.
_WAITING_FLOATS = 2**20
# The largest distance between the two engines' updates of synthetic records, relative to the norm.
_TOLERANCE = 1e-3
# Part of the key, beside a kind of record, of the number of slots that fit into memory after more did not.
_FITTING = "slots that fit"
_TINY = torch.finfo(torch.float32).tiny


class UnfitRecipeError(RuntimeError):
    """Raised for a recipe that can't be trained in groups of clients."""


def num_slots(num_parameters: int, device: torch.device, group_size: int | None = None) -> int:
    """Return the number of clients in a full group, an even number that never depends on the cohort or its size.

    Args:
        num_parameters: number of the model's parameters.
        device: device on which the group is trained.
        group_size: number of clients, for a GPU, where an operation costs the same for few clients and many. On a CPU, or if so
            many models do not fit, it is a power of two of at most 64, by the model's size and the device.
    """
    floats, most = _CACHED_FLOATS, _MAX_SLOTS
    if is_accelerator(device):
        floats = total_memory(device) // 4 // _PART_OF_GPU
        most = _MAX_SLOTS if group_size is None else group_size + group_size % 2
    fitting = max(2, floats // max(1, num_parameters))
    return most if most <= fitting else int(2 ** (fitting.bit_length() - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The clients of one round on one node, each with an index.

    A client is trained alone with `one_by_one` in four cases: its model can't be batched; its records are not all of one shape;
    the loss of one of its batches is not the mean of the losses of the batch's records; a group does not fit into memory. The
    choice depends on the model, the recipe, the device and the client's own records, never on other clients. Reasons known before
    any record is read are logged, once for a model, a recipe and a kind of record.
    """

    vector: Tensor
    clients: Sequence[Records]
    training: Training
    model: FlatModel
    server_round: int
    seeds: Sequence[int]
    num_slots: int
    threads: int = field(default_factory=torch.get_num_threads)

    def results(self) -> Iterator[Trained]:
        """Yield the result of every client, in order."""
        window = self.num_slots * max(1, _WAITING_FLOATS // max(1, self.model.layout.size * self.num_slots))
        for start in range(0, len(self.clients), window):
            yield from self._train(range(len(self.clients))[start : start + window])

    def _train(self, window: range) -> Iterator[Trained]:
        """Train these clients, in groups with similar numbers of steps; yield the result of each, in order."""
        waiting: dict[int, Trained] = {}
        turn = window.start
        order = sorted(window, key=self._num_steps)
        for start in range(0, len(order), self.num_slots):
            for index, trained in self._train_group(order[start : start + self.num_slots]):
                waiting[index] = trained
                while turn in waiting:
                    yield waiting.pop(turn)
                    turn += 1

    def _train_group(self, group: Sequence[int]) -> Iterator[tuple[int, Trained]]:
        """Yield the results of clients, each with its index."""
        kinds: dict[Kind, dict[int, Feed]] = {}
        starved: list[int] = []
        for index, feed in self._feeds(group):
            if isinstance(feed, Feed):
                kinds.setdefault(feed.kind, {})[index] = feed
            elif is_out_of_memory(feed):  # the records of the other clients are in memory as well: train it alone, later
                starved.append(index)
            else:
                yield index, feed
        while kinds:
            kind, feeds = kinds.popitem()
            while feeds:
                some = [feeds.popitem() for _ in range(min(self._slots(kind), len(feeds)))]
                yield from self._train_kind(kind, dict(reversed(some)))
        yield from map(self._alone, starved)

    def _train_kind(self, kind: Kind, feeds: dict[int, Feed]) -> Iterator[tuple[int, Trained]]:
        """Yield the results of clients of one group with one kind of records, each with its index."""
        program, places, left = self._program_for(kind, len(feeds)), list(feeds), set(feeds)
        if program is None:
            yield from map(self._alone, places)
            return
        failed: Exception | None = None
        try:
            for slot, trained in program.train(list(feeds.values()), self.vector, self.training.step_size(self.server_round)):
                left.remove(index := places[slot])
                alone = isinstance(trained, MixedRecordsError | UnevenLossError)
                yield self._alone(index) if alone else (index, trained)
        except Exception as error:
            # The traceback would keep the memory of the failed step.
            failed = error.with_traceback(None) if is_out_of_memory(error) else error
        if failed is not None and is_out_of_memory(failed):  # not a client's fault
            program = None
            feeds.clear()
            self._use_less_memory(kind)
            yield from map(self._alone, sorted(left))
        elif failed is not None:
            # One client's records make a step fail. To find out which, train each client in a group alone.
            for index in sorted(left):
                yield from [(index, failed)] if len(places) == 1 else self._train_group([index])

    def _feeds(self, group: Sequence[int]) -> Iterator[tuple[int, Feed | Exception]]:
        """Yield the batches of clients, each with its index, or the error of its first records."""
        device, feeds = self.model.device, dict[int, Feed]()
        for index in group:
            try:
                with contained():
                    feeds[index] = Feed(self.clients[index], self.training, device, self.seeds[index])
            except Exception as error:
                yield index, error
        rows = {}
        if is_accelerator(device):  # one lookup for all clients costs as much as one for a single client
            rows = rows_of_all({index: (self.clients[index], feed.first) for index, feed in feeds.items()}, device)
        for index, feed in feeds.items():
            try:
                with contained():
                    feed.begin(rows.get(index))
            except Exception as error:
                yield index, error
            else:
                yield index, feed

    def _num_steps(self, index: int) -> int:
        """Return the number of a client's steps; 0 if even that fails, and training will then raise the error."""
        try:
            with contained():
                return self.training.num_steps(len(self.clients[index]))
        except Exception:
            return 0

    def _alone(self, index: int) -> tuple[int, Trained]:
        records, seed = self.clients[index], self.seeds[index]
        return index, train_one(self.vector, records, self.training, model=self.model, server_round=self.server_round, seed=seed)

    def _slots(self, kind: Kind) -> int:
        """Return the number of clients with records of a kind in a group."""
        fitting: int = self.model.programs.get((_FITTING, kind), self.num_slots)
        return min(fitting, self.num_slots)

    def _program(self, kind: Kind) -> Program | None:
        """Return the program for a kind of record, or None if clients are trained one by one."""
        key = (self.training, kind, self.threads, self._slots(kind))
        if key not in self.model.programs:
            proven: Program | None = None
            starved = False
            try:
                with contained():
                    proven = self._proven(kind)
            except Exception as error:
                log.warning("Engine batched: clients train one by one: %s: %s", type(error).__name__, error)
                starved = is_out_of_memory(error)
            self.model.programs[key] = proven
            if starved:
                self._use_less_memory(kind)
        program: Program | None = self.model.programs[key]
        return program

    def _program_for(self, kind: Kind, num_clients: int) -> Program | None:
        """Return the program for `num_clients` clients; on a CPU its slots are the smallest sufficient power of two."""
        full = self._program(kind)
        if full is None or is_accelerator(self.model.device):
            return full
        slots = max(2, 1 << (num_clients - 1).bit_length())
        while slots < full.num_slots:
            key = ("fewer slots", self.training, kind, self.threads, slots)
            if key not in self.model.programs:
                self.model.programs[key] = self._smaller(kind, full, slots)
            if self.model.programs[key]:
                smaller: Program = self.model.programs[key]
                return smaller
            slots *= 2
        return full

    def _smaller(self, kind: Kind, full: Program, slots: int) -> Program | Literal[False]:
        """Return a program with fewer slots if it gives synthetic records the same bits as the full one, else False."""
        try:
            with contained():
                program = Program(self.model, self.training, kind, slots, sliced=full.sliced)
                rows = [self._one_row(tried, kind) for tried in (program, full)]
        except Exception as error:
            log.debug("No program of %s slots: %s: %s", slots, type(error).__name__, error)
            return False
        return program if _same_bits(rows) else False

    def _use_less_memory(self, kind: Kind) -> None:
        """Halve the groups of clients with records of a kind from now on, and release their memory.

        Clients with records of another kind are trained as before: a client must change nothing for others.
        """
        slots = self._slots(kind)
        half = max(2, slots // 4 * 2)
        log.warning("Engine batched: groups of %s clients do not fit into memory: from now on they have %s", slots, half)
        self.model.programs[self.training, kind, self.threads, slots] = None
        self.model.programs[_FITTING, kind] = half
        release_memory(self.model.device)

    def _proven(self, kind: Kind) -> Program:
        """Return a program that trains synthetic records as `one_by_one` does, with the same bits in every slot.

        Raises:
            Exception: if there is no such program.
        """
        if self.training.optimizer != "sgd":
            raise UnfitRecipeError(f"optimizer={self.training.optimizer!r}: must be 'sgd'")
        # Compute matrix products slot by slot, which takes longer, only if their bits depend on the slot.
        for sliced in (False, True):
            program = Program(self.model, self.training, kind, self._slots(kind), sliced=sliced)
            if (row := self._one_row(program, kind)) is not None:
                break
        else:
            raise RuntimeError("a client's bits depend on its slot in the group")
        records = _made_up(kind, self.training.batch_size, self.model.device, seed=1)
        expected = train_one(self.vector, records, self._brief(), model=self.model, server_round=self.server_round, seed=0)
        if isinstance(expected, Exception):
            raise expected
        distance = float((row - expected[0]).norm() / expected[0].norm().clamp(min=_TINY))
        if not distance <= _TOLERANCE:
            raise RuntimeError(
                f"a client's update in a group differs from its update alone by {distance:.1e} of its norm; make the loss a mean "
                "over records"
            )
        return program

    def _one_row(self, program: Program, kind: Kind) -> Tensor | None:
        """Return the row of synthetic records; None if it is not the same in every slot and beside other records."""
        own, other = (_made_up(kind, self.training.batch_size, self.model.device, seed) for seed in (1, 2))
        half = program.num_slots // 2
        layouts = [[own, own] * half, [own, other] * half, [other, own] * half]
        rows = [row for mix in layouts for records, row in zip(mix, self._tried(program, mix), strict=True) if records is own]
        return rows[0] if _same_bits(rows) else None

    def _tried(self, program: Program, clients: Sequence[Records]) -> list[Tensor]:
        feeds = [Feed(records, self._brief(), self.model.device, seed=0).begin() for records in clients]
        rows: dict[int, Tensor] = {}
        for slot, trained in program.train(feeds, self.vector, self.training.step_size(self.server_round)):
            if isinstance(trained, Exception):
                raise trained
            rows[slot] = trained[0]
        return [rows[slot] for slot in range(len(feeds))]

    def _brief(self) -> Training:
        return replace(self.training, num_local_epochs=1, num_local_steps=None)


def _same_bits(rows: Sequence[Tensor | None]) -> bool:
    bits = [row.view(torch.int32) for row in rows if row is not None]
    return len(bits) == len(rows) and all(torch.equal(word, bits[0]) for word in bits)


def _made_up(kind: Kind, batch_size: int, device: torch.device, seed: int) -> TensorRecords:
    """Return synthetic records of a kind that fill a batch and half of another."""
    rng = torch.Generator().manual_seed(seed)
    num_records = batch_size + -(-batch_size // 2)

    def made_up(shape: tuple[int, ...], type_: torch.dtype, num_whole: int) -> Tensor:
        size = (num_records, *shape)
        drawn = torch.rand(size, generator=rng) if type_.is_floating_point else torch.randint(num_whole, size, generator=rng)
        return drawn.to(device, type_)

    if kind.input_type is None:
        raise UnfitRecipeError("a record has several input tensors")
    inputs = made_up(kind.input_shape, kind.input_type, num_whole=1)
    # Targets of two classes: some losses are means over records only if all targets are equal.
    targets = made_up(kind.target_shape, kind.target_type, num_whole=2)
    return TensorRecords(inputs=inputs, targets=targets)
