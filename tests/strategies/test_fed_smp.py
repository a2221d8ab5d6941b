"""Fed-SMP on the client: mask, then clip and noise on the kept coordinates alone."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from torch import nn

from flower_dp import wire
from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays
from flower_dp.clients.reasons import Declined
from flower_dp.clients.reply.parts import Mask
from flower_dp.core.compression import decode
from flower_dp.core.noise import lattice_step
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import FedSMP
from flower_dp.wire import Answer, Ask, Instruction, RoundMask
from tests.asks import config_of, forged, masked
from tests.clients.test_client import _client, _records
from tests.closed_forms import assert_std
from tests.grids import LocalGrid, asks_to_train

SIZE, KEPT = 40_000, 20_000
WORDS: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}


def masked_ask(*, size: int = SIZE, keep_ratio: float = 0.5, seed: int = 11, **changes: Any) -> Ask:
    arguments = {"placement": "distributed", "noise_std": 0.5}
    return masked(size=size, keep_ratio=keep_ratio, seed=seed, **arguments | changes)


def coordinates(asked: Ask, size: int) -> np.ndarray:
    assert asked.mask is not None
    return asked.mask.indices(size)


def instruction(names: tuple[str, ...], asked: Ask) -> Instruction:
    return Instruction(server_round=1, method="fed-smp", clients=names, ask=asked)


def fit(client: Any, names: tuple[str, ...], asked: Ask) -> tuple[np.ndarray, Answer]:
    size = client.model.layout.size
    arrays, _, answer = client.fit([np.zeros(size, np.float32)], config_of(instruction(names, asked)))
    read = Answer.from_json(answer[wire.KEY], names)
    return decode(wire.payload_of(ArrayRecord(arrays), read.payload, size), size, mask=coordinates(asked, size)), read


@pytest.mark.parametrize("placement", ["distributed", "central"])
def test_only_kept_coordinates_leave_and_the_payload_is_their_values(placement: str) -> None:
    table = masked_ask(placement=placement, noise_std=0.5 if placement == "distributed" else 0.0)
    total, answer = fit(_client({"a": _records(np.ones(SIZE))}), ("a",), table)
    mask = coordinates(table, SIZE)
    assert len(mask) == KEPT
    assert not np.delete(total, mask).any()
    assert np.count_nonzero(total[mask]) > 0.99 * KEPT
    assert answer.payload["encoding"] == "rand-k"
    assert answer.payload_bytes == 4 * KEPT


def test_the_clip_bounds_the_masked_update() -> None:
    """What is not kept takes nothing of the clip norm; what is kept is as long as the clip norm, less the lattice."""
    table = masked_ask(placement="central", noise_std=0.0)
    mask = coordinates(table, SIZE)
    update = np.full(SIZE, 1e6)
    update[mask] = 3.0
    total, _ = fit(_client({"a": _records(update)}), ("a",), table)
    norm = np.linalg.norm(total.astype(np.float64))
    assert 1 - 1 / 200 < norm <= 1
    # An update that is short on the kept coordinates is not scaled down by what the others hold.
    update[mask] = 2.0**-10
    total, _ = fit(_client({"a": _records(update)}), ("a",), table)
    np.testing.assert_array_equal(total[mask], 2.0**-10)


def test_the_lattice_is_that_of_the_kept_coordinates() -> None:
    table = masked_ask(keep_ratio=0.0025, noise_std=30.0)
    step = lattice_step(30.0, clip_norm=1.0, dimension=100)
    assert step > lattice_step(30.0, clip_norm=1.0, dimension=SIZE)
    total, _ = fit(_client({"a": _records(np.ones(SIZE))}), ("a",), table)
    np.testing.assert_array_equal(total / step, np.rint(total / step))
    assert (total / step % 2).any()


def test_the_order_and_the_client_draw_one_mask() -> None:
    table = masked_ask(keep_ratio=0.01)
    assert table.mask is not None
    np.testing.assert_array_equal(coordinates(table, SIZE), Mask(of=RoundMask(seed=11, keep_ratio=0.01), length=SIZE).indices)
    # As NumPy draws it everywhere: its checksum travels with every payload.
    assert (
        RoundMask(keep_ratio=0.1, seed=0).indices(20).tolist()
        == np.sort(np.random.default_rng(0).choice(20, 2, replace=False)).tolist()
    )


def test_a_payload_under_another_mask_is_refused() -> None:
    client, names = _client({"a": _records(np.ones(100))}), ("a",)
    arrays, _, answer = client.fit([np.zeros(100, np.float32)], config_of(instruction(names, masked_ask(size=100))))
    read = Answer.from_json(answer[wire.KEY], names)
    payload = wire.payload_of(ArrayRecord(arrays), read.payload, 100)
    with pytest.raises(ValueError, match="mask is not the one of this round"):
        decode(payload, 100, mask=coordinates(masked_ask(seed=12, size=100), 100))


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": "local"},
        {"placement": "central"},
        {"noise_std": 0.0},
        {"mask": {"type": "seed", "seed": 7, "keep_ratio": 1.5}},
        {"mask": {"type": "seed", "seed": 7}},
        {"mask": {"type": "seed", "seed": 2**63, "keep_ratio": 0.5}},
        {"keep_ratio": 0.5},  # of what noise has changed: goes with no mask
        {"quantization_levels": 3},
    ],
)
def test_asks_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    text = forged(instruction(("a",), masked_ask(size=2)), **changes)
    with pytest.raises(Declined, match=r"placement|noise_std|keep_ratio|mask|extra"):
        _client({"a": _records([0.5, 0.0])}).fit([np.zeros(2, np.float32)], config_of(text))


# The server


def still(num_clients, outputs=2000):
    """Clients whose update is zero: all that moves the model is noise."""
    inputs, targets = torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)

    def client_fn(context):
        part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
        hosted = {f"c{i:03}": TensorRecords(inputs=inputs, targets=targets) for i in range(part, num_clients, parts)}
        return DPClient(model=nn.Linear(1, outputs), clients=hosted, training=Training(learning_rate=1e-30), device="cpu")

    return client_app(client_fn)


def masks_of(grid: LocalGrid) -> list[Any]:
    """The mask of every round, as it was asked of clients: of all of them the same."""
    masks: dict[int, set[Any]] = {}
    for message in filter(asks_to_train, grid.sent):
        (config,) = (record for record in message.content.config_records.values() if wire.KEY in record)
        asked = wire.instruction_of(config)
        masks.setdefault(asked.server_round, set()).add(asked.ask.mask)
    assert all(len(asked) == 1 for asked in masks.values())
    return [mask for _, (mask,) in sorted(masks.items())]


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "mask", "drop"), [("central", "rand-k", 1), ("distributed", "top-k", 1)])
def test_noise_is_on_the_rounds_mask_alone_and_of_the_right_std(placement, drop, mask):
    strategy = FedSMP(**WORDS, keep_ratio=0.25, placement=placement, mask=mask)
    grid = LocalGrid(still(4, 10_000), 4, tamper=lambda node, reply: [] if strategy.rounds and node <= drop else [reply])
    models = []

    def keep(server_round, current):
        models.append(np.concatenate([array.numpy().ravel() for array in current.values()]).astype(np.float64))

    start = nn.Linear(1, 10_000)
    torch.nn.init.zeros_(start.weight)
    torch.nn.init.zeros_(start.bias)
    strategy.start(grid, model_arrays(start), num_rounds=8, evaluate_fn=keep)
    steps = np.diff(np.stack(models), axis=0)
    values, masks = [], [mask.indices(20_000) for mask in masks_of(grid)]
    for step, kept in zip(steps, masks, strict=True):
        assert np.abs(np.delete(step, kept)).max() < 1e-6  # what float32 makes of adding nothing
        values.append(step[kept])
    assert len({kept.tobytes() for kept in masks}) == 8
    assert_std(np.concatenate(values), 0.8 * 0.5 / 4)


def test_coordinates_beside_the_mask_are_not_taken_from_a_reply():
    def forge(node, reply):
        record = next(iter(reply.content.array_records.values()))
        for name in list(record):
            record[name] = FlowerArray(np.ones(4000, np.float32))
        config = next(iter(reply.content.config_records.values()))
        answer = json.loads(config["flower-dp"])
        answer["payload"] = {"encoding": "dense", "length": 4000}
        config["flower-dp"] = json.dumps(answer)
        return [reply]

    strategy = FedSMP(**WORDS | {"noise_multiplier": 0, "num_clients": 1}, placement="central")
    start = model_arrays(nn.Linear(1, 2000))
    grid = LocalGrid(still(1), 1, tamper=forge)
    result = strategy.start(grid, start, num_rounds=1)
    before, after = (np.concatenate([array.numpy().ravel() for array in record.values()]) for record in (start, result.arrays))
    moved = after - before
    assert set(np.flatnonzero(moved)) <= set(masks_of(grid)[0].indices(4000))
    assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-4)
