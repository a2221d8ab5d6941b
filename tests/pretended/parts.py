"""Engines, clips, draws, records and models on a pretend device: run by tests/test_pretend_device.py."""

import itertools
import math
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import Tensor, nn

from flower_dp import clients as dp
from flower_dp.clients import DPClient, FlatModel, TensorRecords, Training, local_updates
from flower_dp.clients.reply.client_level import pipeline
from flower_dp.clients.reply.pipeline import ClientJob, Refusal, Reply
from flower_dp.clients.training import devices
from flower_dp.clients.training.attributes import base_hash
from flower_dp.clients.training.channels_last import Convolutions
from flower_dp.clients.training.engines import ENGINES, num_slots
from flower_dp.clients.training.records import OnDevice
from flower_dp.clients.training.training_rng import IsolatedRng
from flower_dp.core.clipping import l2_norms
from flower_dp.core.noise import lattice_step, noise_generator
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg
from flower_dp.wire import Indicator, RoundMask
from tests.asks import ask as made
from tests.clients.test_engines import LoRA
from tests.contract_runs import SMALL, run_of
from tests.contracts import METHODS, Words
from tests.grids import LocalGrid
from tests.local_grids import linear, records
from tests.pretended import device as pretend
from tests.pretended.device import DEVICE, Pretend
from tests.pretended.helpers import moved, on, pretended, seeded, without_float64  # noqa: F401 (fixtures)

# Engines


def images(num_records: int, seed: int) -> TensorRecords:
    rng = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(256, (40, 2, 6, 6), generator=rng, dtype=torch.uint8), torch.randint(3, (40,), generator=rng)
    rows = torch.randperm(40, generator=rng)[:num_records]
    return TensorRecords(inputs=inputs, targets=targets, indices=rows, transform=lambda raw: raw.float() / 255 - 0.5)


def convolutions() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


RECIPE = Training(
    **{"learning_rate": 0.1, "batch_size": 3, "num_local_epochs": 2, "momentum": 0.5, "sam_radius": 0.05, "weight_decay": 0.01},
    regularizers=(dp.ProximalTerm(strength=0.5),),
)


def rows_of(model: nn.Module, clients: list[Any], device: Any, engine: str, training: Training = RECIPE) -> list[Tensor]:
    flat = FlatModel(model, torch.device(device))
    found = local_updates(
        flat.vector.clone(), clients, training, model=flat, server_round=1, seeds=list(range(len(clients))), engine=engine
    )
    rows = list(found)
    assert all(isinstance(row, Tensor) for row in rows), rows
    if engine == "batched":
        assert flat.programs
        assert None not in flat.programs.values()
    return [row.cpu() for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [convolutions, lambda: LoRA(72)], ids=["convolutions", "LoRA"])
def test_an_engine_gives_the_bits_of_the_cpu(make: Callable[[], nn.Module], engine: str, monkeypatch: Any) -> None:
    # Of convolutions a processor alone computes with channels last, where last bits differ.
    monkeypatch.setattr(Convolutions, "suit", lambda self, inputs, targets, gradients, *, key: False)
    clients = [images(size, size) for size in (9, 4, 7)]
    expected = rows_of(make(), clients, "cpu", engine)
    assert min(row.abs().max() for row in expected) > 1e-4
    for own in (clients, [moved(one) for one in clients], [moved(one, indices=True) for one in clients]):
        for row, other in zip(rows_of(make(), own, DEVICE, engine), expected, strict=True):
            assert torch.equal(row, other)


def test_one_lookup_serves_all_clients_that_share_their_tensors() -> None:
    own = images(9, 1)
    clients = [replace(own, indices=torch.arange(first, first + 6)) for first in (0, 8, 30)]
    expected = rows_of(convolutions(), clients, "cpu", "batched")
    here = moved(own)
    for there in (clients, [replace(one, inputs=here.inputs, targets=here.targets) for one in clients]):
        assert all(map(torch.equal, rows_of(convolutions(), there, DEVICE, "batched"), expected))
    broken = [*there[:2], replace(there[2], indices=torch.tensor([3, 40]))]  # 40 is no row
    model = FlatModel(convolutions(), DEVICE)
    arguments: dict[str, Any] = {"model": model, "server_round": 1, "seeds": [0, 1, 2], "engine": "batched"}
    first, second, error = local_updates(model.vector.clone(), broken, RECIPE, **arguments)
    assert isinstance(error, IndexError)
    assert all(map(torch.equal, (first.cpu(), second.cpu()), expected))


class Doubled(TensorRecords):
    """A class of a user's own, which reads its records itself."""

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(positions, device)
        return 2 * inputs, targets


def test_clients_with_tensors_of_their_own_are_read_from_these() -> None:
    clients = [images(6, 1), replace(images(6, 2), targets=images(6, 1).targets), images(6, 3)]
    shared = [replace(clients[0], indices=one.indices) for one in clients]
    doubled = Doubled(**{field: getattr(clients[0], field) for field in ("inputs", "targets", "indices", "transform")})
    for own in (clients, [*shared[:2], clients[2]], [*shared, doubled]):
        expected = rows_of(convolutions(), own, "cpu", "batched")
        assert all(map(torch.equal, rows_of(convolutions(), own, DEVICE, "batched"), expected))


def test_the_size_of_a_group_is_the_same_for_any_cohort(monkeypatch: Any) -> None:
    """The number of those who take part is secret, and one client more must change no bit of another's row."""
    from flower_dp.clients.training.engines import batched

    sizes = set()
    program = batched.Program

    def seen(model: Any, training: Any, kind: Any, num_slots: int, **arguments: Any) -> Any:
        sizes.add(num_slots)
        return program(model, training, kind, num_slots, **arguments)

    monkeypatch.setattr(batched, "Program", seen)
    (method,) = (one for one in METHODS if one.label == "dp-fedavg")
    arguments = Words(sampling_rate=0.5, num_rounds=6, num_clients=8)
    run = run_of(method, arguments, on(SMALL, here=True, training_engine="batched", group_size=6), num_nodes=1)
    assert len({report.replies for report in run.strategy.rounds}) > 1
    assert sizes == {6}


def test_what_a_round_costs_does_not_grow_with_the_clients_of_a_group() -> None:
    """A GPU waits for each number that is read from it; each operation takes microseconds to start."""
    own = moved(replace(images(9, 1), transform=None))
    own = replace(own, inputs=(own.inputs.float() / 255).flatten(1))
    training, counts = Training(learning_rate=0.1, batch_size=4), []
    for number in (4, 24):
        clients = {f"c{index}": replace(own, indices=torch.arange(index, index + 12)) for index in range(number)}
        node: dict[str, Any] = {"device": DEVICE, "training_engine": "batched", "group_size": 24}
        client = DPClient(model=nn.Linear(72, 3), clients=clients, training=training, **node)
        strategy = DPFedAvg(clip_norm=0.5, noise_multiplier=1.0, sampling=FullSampling(), num_clients=number, delta=1e-3)

        def client_fn(context: Context, client: DPClient = client) -> DPClient:
            Pretend.counted.clear()  # what is left at the end is of the last round
            return client

        strategy.start(LocalGrid(dp.client_app(client_fn), 1), dp.model_arrays(client.model.module), num_rounds=3)
        assert [report.replies for report in strategy.rounds] == [number] * 3
        last = Counter(Pretend.counted)
        counts.append((last["to the CPU"], sum(count for name, count in last.items() if name not in ("to the CPU", "views"))))
    (reads, few), (more_reads, many) = counts
    assert max(reads, more_reads) < 12
    # For each client: its records and their targets are cut from those of all, its row from those of the group, and added up.
    assert (many - few) / 20 <= 4


# The clip of several rows at once

LENGTH = 50


class Rows:
    """Training that gives each client a row, or an error; so many rows are clipped at once."""

    def __init__(self, rows: list[Any], rows_together: int) -> None:
        self.given, self.rows_together = rows, rows_together

    def rows(self, vector: Tensor, jobs: Any) -> Iterator[Any]:
        yield from (row if isinstance(row, Exception) else (row, torch.tensor(0.0)) for row in self.given)


def replies(rows: list[Any], rows_together: int, device: Any = DEVICE, **asked: Any) -> list[Reply | Refusal]:
    """What clients with these rows reply; the server adds the noise."""
    train = Rows([row if isinstance(row, Exception) else row.to(device) for row in rows], rows_together)
    jobs = [ClientJob(name=f"c{place}", records=[], seed=0, secret=noise_generator, measured=True) for place in range(len(rows))]
    made_of = pipeline(made(size=LENGTH, **asked), train=train, length=LENGTH)
    return list(made_of.replies(torch.zeros(LENGTH).to(device), jobs))


def drawn_rows() -> list[Tensor]:
    """Rows far within the clip norm of 1, close to it, beyond it, and so long that they are scaled in float64; and zeros."""
    rng = torch.Generator().manual_seed(3)
    return [scale * torch.randn(LENGTH, generator=rng) for scale in (0.01, 0.1, 0.14, 0.142, 1.0, 1e4, 1e35, 0.0)]


ASKS: dict[str, dict[str, Any]] = {
    "whole rows": {},
    "with an indicator": {"indicator": Indicator(clip_norm=0.8, scale=0.4), "clip_norm": math.hypot(0.8, 0.2)},
    "masked": {"mask": RoundMask(seed=7, keep_ratio=0.4)},
}


@pytest.mark.parametrize("asked", ASKS.values(), ids=ASKS)
def test_rows_that_are_clipped_together_are_those_that_are_clipped_alone(asked: dict[str, Any]) -> None:
    """Up to the last bit of the factor: one step of the lattice. The norm is within the bound exactly."""
    rows = drawn_rows()
    clip_norm, step = asked.get("clip_norm", 1.0), lattice_step(1.0, clip_norm=1.0, dimension=LENGTH)
    for together, alone in zip(replies(rows, 5, **asked), replies(rows, 1, "cpu", **asked), strict=True):
        assert isinstance(together, Reply)
        assert isinstance(alone, Reply)
        assert (together.row.cpu() - alone.row).abs().max() <= 2 * step
        assert float(l2_norms(together.row.cpu())) <= clip_norm
        assert float(together.norm) == pytest.approx(float(alone.norm), rel=1e-12)
    assert float(l2_norms(together.row.cpu())) > 0 or not rows[-1].any()


@pytest.mark.parametrize(
    "device", [DEVICE, pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
@pytest.mark.parametrize("asked", ASKS.values(), ids=ASKS)
def test_no_neighbor_changes_a_bit_of_a_row_that_is_clipped_with_others(asked: dict[str, Any], device: Any, caplog: Any) -> None:
    """Neither a long row, nor one that is not finite, nor an error, nor how many there are, nor the place."""
    caplog.set_level("DEBUG", logger="flwr")
    own = drawn_rows()[4]
    (alone,) = replies([own], 4, device, **asked)
    others = [own * 1e30, own * math.nan, own * math.inf, RuntimeError("no"), torch.zeros(LENGTH)]
    for before in itertools.permutations(others, 2):
        found = replies([*before, own, others[0]], 4, device, **asked)
        assert torch.equal(found[2].row.cpu(), alone.row.cpu())
        for one, reply in zip(before, found, strict=False):
            lost = isinstance(one, Exception) or not bool(one.isfinite().all())
            assert isinstance(reply, Refusal) == lost
    assert "clipped at once" not in caplog.text


def test_rows_are_clipped_in_one_shape_for_any_number_of_them(monkeypatch: Any) -> None:
    from flower_dp.clients.reply import parts

    shapes, clip = set(), parts.clip_l2
    monkeypatch.setattr(parts, "clip_l2", lambda rows, norm: (shapes.add(tuple(rows.shape)), clip(rows, norm))[1])
    for count in (1, 3, 4, 7):
        replies(drawn_rows()[:count], 4)
    assert shapes == {(4, LENGTH)}


# Groups


@pytest.mark.parametrize(
    ("num_parameters", "group_size", "slots"),
    [(1000, None, 64), (1000, 101, 102), (1000, 1, 2), (2**20, 100, 16), (2**40, 100, 2)],
)
def test_a_group_has_as_many_clients_as_are_asked_for_and_fit(num_parameters: int, group_size: int | None, slots: int) -> None:
    """The device has 4 GiB: 1/64 of it holds 2^24 weights."""
    assert num_slots(num_parameters, DEVICE, group_size) == slots
    assert num_slots(num_parameters, torch.device("cpu"), group_size) == num_slots(num_parameters, torch.device("cpu"))


# As torch raises them.
NO_MEMORY = (
    torch.OutOfMemoryError("out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB, other allocations: 1.02 MB, max allowed: 9.07 GB)."),
)


def limited(monkeypatch: Any, fits: Callable[[Any], bool]) -> list[tuple[int, int]]:
    """Let steps of programs run out of memory unless they fit; return the widths of records and sizes of groups that were tried."""
    from flower_dp.clients.training.engines import program

    stage, tried = program.Program._stage, []

    def staged(self: Any, batches: Any) -> None:
        tried.append((self._inputs.shape[-1], self.num_slots))
        if not fits(self):
            raise torch.OutOfMemoryError("out of memory")
        stage(self, batches)

    monkeypatch.setattr(program.Program, "_stage", staged)
    return tried


def rounds_of(model: FlatModel, clients: list[Any], number: int) -> list[list[Any]]:
    arguments: dict[str, Any] = {"model": model, "server_round": 1, "engine": "batched", "group_size": 16}
    start = model.vector.clone()
    seeds = list(range(len(clients)))
    return [list(local_updates(start, clients, RECIPE, seeds=seeds, **arguments)) for _ in range(number)]


def test_a_lack_of_memory_is_told_from_other_errors() -> None:
    assert all(devices.is_out_of_memory(error) for error in NO_MEMORY)
    for text in ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", "CUDA error: device-side assert triggered", "out of memory"):
        assert not devices.is_out_of_memory(RuntimeError(text))
    assert not devices.is_out_of_memory(ValueError(str(NO_MEMORY[1])))


def test_memory_that_ends_in_the_middle_loses_no_client_and_holds_nothing(monkeypatch: Any) -> None:
    """Some clients have ended then. The others train alone, when what has failed is gone."""
    from flower_dp.clients.training.engines import batched, program

    clients = [flat(6, 1), flat(12, 2), flat(30, 3)]
    (expected,) = rounds_of(FlatModel(Wide(), DEVICE), clients, 1)
    model = FlatModel(Wide(), DEVICE)
    start = model.vector.clone()
    rounds_of(model, clients[:1], 1)  # its program is proved
    model.vector.copy_(start)
    made: list[Any] = []
    train, alone = program.Program._step, batched.train_one

    def step(self: Any, start: Tensor, size: float) -> Tensor:
        made.append(weakref.ref(self))
        if len(made) > 5:  # the first client has taken all of its 4 steps then
            raise torch.OutOfMemoryError("out of memory")
        return train(self, start, size)

    def one(*arguments: Any, **named: Any) -> Any:
        assert not any(program() for program in made)
        return alone(*arguments, **named)

    monkeypatch.setattr(program.Program, "_step", step)
    monkeypatch.setattr(batched, "train_one", one)
    (rows,) = rounds_of(model, clients, 1)
    torch.testing.assert_close([row.cpu() for row in rows], [row.cpu() for row in expected], atol=1e-5, rtol=1e-4)


def flat(num_records: int, seed: int, width: int = 8) -> TensorRecords:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_records, width, generator=rng)
    return TensorRecords(inputs=inputs, targets=torch.randint(3, (num_records,), generator=rng))


class Wide(nn.Module):
    """Takes records of any length, of which it looks at the first 8 numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs[:, :8])


def test_a_group_that_does_not_fit_into_memory_is_halved_and_other_records_change_nothing(monkeypatch: Any, caplog: Any) -> None:
    """Neither in the round in which memory ends, nor later: only the size of the groups of records of one kind changes."""
    clients, model = [flat(6, 1), flat(9, 2), flat(12, 3)], FlatModel(Wide(), DEVICE)
    expected = rounds_of(FlatModel(Wide(), DEVICE), clients, 3)
    tried = limited(monkeypatch, lambda program: program._inputs.shape[-1] < 100 or program.num_slots <= 4)
    found = rounds_of(model, [*clients, flat(6, 4, width=100)], 3)
    assert list(dict.fromkeys(slots for width, slots in tried if width == 100)) == [16, 8, 4]
    assert {slots for width, slots in tried if width < 100} == {16}
    assert caplog.text.count("do not fit into memory") == 2
    for rows, others in zip(found, expected, strict=True):
        assert isinstance(rows[3], Tensor)
        assert all(torch.equal(row.cpu(), other.cpu()) for row, other in zip(rows[:3], others, strict=True))


@pytest.mark.parametrize("read", ["first", "later"])
def test_memory_that_ends_while_records_are_read_is_no_clients_fault(read: str) -> None:
    """The client trains alone, when what others have read is gone."""

    class Large(TensorRecords):
        reads = 0

        def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
            Large.reads += 1
            if Large.reads == (1 if read == "first" else 2):
                raise torch.OutOfMemoryError("out of memory")
            return super().batch(positions, device)

    inner = flat(600, 1)
    clients = [flat(6, 2), Large(inputs=inner.inputs, targets=inner.targets)]
    (rows,) = rounds_of(FlatModel(nn.Linear(8, 3), DEVICE), clients, 1)
    assert all(isinstance(row, Tensor) for row in rows)
    assert Large.reads > 3


# Where rows begin in memory


def test_no_sum_over_a_row_is_in_an_order_that_follows_from_its_place() -> None:
    """On a GPU the order follows from where a row begins, and the place from which other clients take part and who fails."""
    length = 135
    rows = [torch.randn(length, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    Pretend.counted.clear()
    (rows[0].to(DEVICE)[None].expand(3, -1).contiguous()).norm(dim=1)
    assert Pretend.counted.pop("sums whose order follows from the place") == 1  # the device notices
    train = Rows([row.to(DEVICE) for row in rows], 4)
    jobs = [ClientJob(name=f"c{place}", records=[], seed=0, secret=noise_generator, measured=True) for place in range(5)]
    for asked in ({}, {"indicator": Indicator(clip_norm=0.8, scale=0.4), "clip_norm": math.hypot(0.8, 0.2)}):
        made_of = pipeline(made(size=length, **asked), train=train, length=length)
        assert all(isinstance(reply, Reply) for reply in made_of.replies(torch.zeros(length).to(DEVICE), jobs))
    training = replace(RECIPE, batch_size=13)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3), nn.GroupNorm(1, 3), nn.Linear(3, 45))
    rows_of(model, [images(30, 1)], DEVICE, "batched", training)
    assert not Pretend.counted["sums whose order follows from the place"]


def test_a_transform_gets_rows_in_memory_of_the_clients_own() -> None:
    """The last bits of what it computes may follow from where they begin."""
    offsets = []

    def seen(raw: Tensor) -> Tensor:
        offsets.append(raw.storage_offset())
        return raw.float() / 255

    own = replace(images(9, 1), transform=seen)
    clients = [replace(own, indices=torch.arange(first, first + 5)) for first in (0, 8, 30)]
    rows_of(convolutions(), clients, DEVICE, "batched")
    assert len(offsets) > 3
    assert not any(offsets)


# What is drawn


def test_what_a_transform_draws_follows_from_its_clients_own_seed() -> None:
    """Also where the records of all clients are read with one lookup."""
    own = replace(images(9, 1), transform=lambda raw: raw.float() / 255 + torch.rand(raw.shape, device=raw.device))
    first, second = (replace(own, indices=torch.arange(first, first + 6)) for first in (0, 8))
    both = rows_of(convolutions(), [first, second], DEVICE, "batched")
    (alone,) = rows_of(convolutions(), [first], DEVICE, "batched")
    assert torch.equal(both[0], alone)


@pytest.mark.parametrize("lists", [True, False], ids=["lists its generators", "as MPS"])
@pytest.mark.parametrize("device", [DEVICE, torch.device(pretend.NAME)], ids=str)
def test_draws_on_it_resume_where_they_stopped(device: torch.device, lists: bool, monkeypatch: Any) -> None:
    (own,) = pretend._Module.default_generators
    if not lists:
        monkeypatch.setattr(pretend._Module, "default_generators", ())
        with pytest.raises(RuntimeError, match=f"device {device}: its random generator can't be found"):
            IsolatedRng(device, 7)
        functions = {"get_rng_state": own.get_state, "set_rng_state": own.set_state, "manual_seed": own.manual_seed}
        for name, function in functions.items():
            monkeypatch.setattr(pretend._Module, name, staticmethod(function), raising=False)
    before, draws, expected = own.get_state(), IsolatedRng(device, 7), torch.Generator(device).manual_seed(7)
    for _ in range(3):
        with draws:
            drawn = torch.rand(5, device=DEVICE, generator=own)
        assert torch.equal(drawn.cpu(), torch.rand(5, device=DEVICE, generator=expected).cpu())
    assert torch.equal(own.get_state(), before)


# Records


@pytest.mark.parametrize("device", ["cpu", DEVICE], ids=str)
def test_records_of_a_data_set_may_be_anywhere(device: Any) -> None:
    pairs = [(torch.full((3,), float(index)).to(device), index % 2) for index in range(6)]
    own = dp.DatasetRecords(dataset=pairs, example=(torch.zeros(3), 0))
    inputs, targets = own.batch(torch.tensor([4, 1]), DEVICE)
    assert inputs.device == targets.device == DEVICE
    assert (inputs.tolist(), targets.tolist()) == ([[4.0] * 3, [1.0] * 3], [0, 1])


@pytest.mark.parametrize("rows", [[3, -1], [3, 40]])
def test_a_row_that_does_not_exist_is_refused_before_the_device_is_asked(rows: list[int]) -> None:
    """A GPU would be unusable for the process."""
    with pytest.raises(IndexError):
        replace(moved(images(9, 1)), indices=torch.tensor(rows)).batch(torch.arange(2), DEVICE)


def test_records_that_fit_are_kept_on_it_and_others_stay_where_they_are(monkeypatch: Any) -> None:
    own, other = images(9, 1), images(9, 2)
    named = OnDevice(DEVICE)(replace(own, inputs={"a": own.inputs, "b": own.inputs}))
    assert {value.device for value in named.inputs.values()} == {DEVICE}
    size = own.inputs.nbytes + own.targets.nbytes
    for free, moves in ((16 * size, [True, True]), (16 * size - 1, [True, False]), (8 * size - 1, [False, False])):
        monkeypatch.setattr(pretend._Module, "mem_get_info", lambda *_, free=free: (free, 2**32))
        keep = OnDevice(DEVICE)
        kept = [keep(one) for one in (own, other)]
        assert [one.inputs.device == one.targets.device == DEVICE for one in kept] == moves  # all of them have one limit
        assert kept[0].indices is own.indices  # whether a row exists is asked on the CPU
        assert torch.equal(kept[0].inputs.cpu(), own.inputs)
    assert OnDevice(torch.device("cpu"))(own) is own
    for others in (
        dp.DatasetRecords(dataset=[]),
        Doubled(inputs=own.inputs, targets=own.targets),
    ):  # which may read in their own way
        assert OnDevice(DEVICE)(others) is others


def test_tensors_that_clients_share_are_moved_once() -> None:
    """Also where each client wraps the same array anew."""
    inputs, targets = np.zeros((9, 4), np.float32), np.zeros(9, np.int64)
    keep = OnDevice(DEVICE)
    first, second = (keep(dp.as_records((inputs, targets))) for _ in range(2))
    assert first.inputs is second.inputs
    assert first.targets is second.targets
    apart = keep(dp.as_records((inputs.copy(), targets)))
    assert apart.inputs is not first.inputs


# Models


def test_the_hash_of_a_frozen_base_is_the_same_on_it() -> None:
    assert base_hash(LoRA(72).to(DEVICE)) == base_hash(LoRA(72)) != ""


# Precision


def test_convolutions_on_cuda_are_deterministic_and_without_tf32_unless_asked(monkeypatch: Any) -> None:
    """And cuDNN stays on: torch's context turns it off if it is not told."""
    cudnn, cuda = torch.backends.cudnn, torch.device("cuda")

    def flags() -> tuple[bool, ...]:
        return cudnn.enabled, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32

    before = flags()
    with devices.reproducible(cuda):
        assert flags() == (True, True, False, False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with devices.reproducible(cuda):
        assert flags() == (True, True, False, True)
    with cudnn.flags(enabled=False), devices.reproducible(cuda):
        assert not cudnn.enabled
    with devices.reproducible(torch.device("cpu")):
        assert flags() == before
    assert flags() == before


def test_all_that_a_client_computes_is_in_that_context(monkeypatch: Any) -> None:
    """Training by either engine, gradients of single records, evaluation, and the dry run."""
    from flower_dp.clients import node_client

    inside, seen = [False], []

    @contextmanager
    def context(device: Any) -> Iterator[None]:
        was, inside[0] = inside[0], True
        yield
        inside[0] = was

    class Watched(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inside[0])
            return super().forward(inputs)

    monkeypatch.setattr(node_client, "reproducible", context)
    for label in ("dp-fedavg", "dp-sgd", "nbafl"):
        (method,) = (one for one in METHODS if one.label == label)
        run_of(method, Words(num_rounds=1), replace(SMALL, model=lambda: nn.Sequential(Watched(6, 3, bias=False))))
    assert len(seen) > 20
    assert all(seen)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="an older torch")
@pytest.mark.parametrize("switch", ["fp32_precision", "cudnn.fp32_precision", "cudnn.conv.fp32_precision"])
def test_the_newer_switches_of_torch_end_nothing(switch: str) -> None:
    """In a process of its own: torch keeps them."""
    code = f"""
import torch
from flower_dp.clients.training.devices import reproducible
torch.backends.{switch} = "ieee"
with reproducible(torch.device("cuda")), reproducible(torch.device("cuda")):
    assert (torch.backends.cudnn.deterministic, torch.backends.{switch}) == (True, "ieee")
assert (torch.backends.cudnn.deterministic, torch.backends.{switch}) == (False, "ieee")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_of_clients_are_told_without_float64(engine: str) -> None:
    clients, policy = {f"c{index}": records(f"c{index}", 8) for index in range(2)}, dp.ClientPolicy(allow_metrics=True)
    node: dict[str, Any] = {"policy": policy, "device": DEVICE, "training_engine": engine}
    client = DPClient(model=linear(), clients=clients, training=Training(learning_rate=0.1), **node)
    terms: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": 2}
    strategy = DPFedAvg(**terms, delta=1e-3, report_client_metrics=True)
    strategy.start(LocalGrid(dp.client_app(lambda _: client), 1), dp.model_arrays(linear()), num_rounds=2)
    assert [report.replies for report in strategy.rounds] == [2, 2]
