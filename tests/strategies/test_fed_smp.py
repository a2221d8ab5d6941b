"""Fed-SMP on the client: mask, then clip and noise on the kept coordinates alone."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from scipy import stats
from torch import nn

from flower_dp import wire
from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays
from flower_dp.clients.reasons import Declined
from flower_dp.clients.reply.parts import Mask
from flower_dp.core.compression import decode
from flower_dp.core.noise import lattice_step
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedSAM, FedSMP
from flower_dp.wire import Answer, Ask, Instruction, RoundMask
from tests.asks import config_of, forged, masked
from tests.clients.test_client import FALSE_ALARM, _client, _records
from tests.grids import LocalGrid

SIZE, KEPT = 40_000, 20_000


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


def others(mask: np.ndarray) -> np.ndarray:
    return np.setdiff1d(np.arange(SIZE), mask)


def fits(values: np.ndarray, std: float) -> bool:
    """Whether values look like Gaussian noise of this std, with a false alarm in a million."""
    return bool(stats.kstest(values, stats.norm(0, std).cdf).pvalue > FALSE_ALARM)


@pytest.mark.parametrize("placement", ["distributed", "central"])
def test_only_kept_coordinates_leave_and_the_payload_is_their_values(placement: str) -> None:
    table = masked_ask(placement=placement, noise_std=0.5 if placement == "distributed" else 0.0)
    total, answer = fit(_client({"a": _records(np.ones(SIZE))}), ("a",), table)
    mask = coordinates(table, SIZE)
    assert len(mask) == KEPT
    assert not total[others(mask)].any()
    assert np.count_nonzero(total[mask]) > 0.99 * KEPT
    assert answer.payload["encoding"] == "rand-k"
    assert answer.payload_bytes == 4 * KEPT


@pytest.mark.slow
@pytest.mark.parametrize(("noise_std", "hosted"), [(0.02, 1), (3.0, 3)])
def test_noise_on_kept_coordinates_has_the_right_std_and_a_wrong_one_is_rejected(noise_std: float, hosted: int) -> None:
    size = 5 * SIZE
    names = tuple(f"c{i}" for i in range(hosted))
    table = masked_ask(noise_std=noise_std)
    total, _ = fit(_client({name: _records(np.zeros(size)) for name in names}, noise_seed=41), names, table)
    kept, std = total[coordinates(table, size)], noise_std * math.sqrt(hosted)
    assert fits(kept, std)
    assert not fits(kept, 1.05 * std)
    assert not fits(kept, 0.95 * std)


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


def test_clients_of_a_round_share_the_mask_and_no_data_chooses_it() -> None:
    table = masked_ask(placement="central", noise_std=0.0)
    rows = {name: np.random.default_rng(i).standard_normal(SIZE) * 10.0**i for i, name in enumerate("ab")}
    kept = []
    for name, row in rows.items():
        total, _ = fit(_client({name: _records(row)}), (name,), table)
        kept.append(np.flatnonzero(total))
        # Less than a step of an entry is rounded away.
        assert set(kept[-1]) <= set(coordinates(table, SIZE))
        assert len(kept[-1]) > 0.95 * KEPT
    both, _ = fit(_client({name: _records(row) for name, row in rows.items()}), ("a", "b"), table)
    assert set(np.flatnonzero(both)) <= set(coordinates(table, SIZE))
    other, _ = fit(_client({"a": _records(rows["a"])}), ("a",), masked_ask(placement="central", noise_std=0.0, seed=12))
    # Two masks of half the coordinates share a quarter of them; the standard deviation of that is 50.
    assert abs(len(np.intersect1d(np.flatnonzero(other), coordinates(table, SIZE))) - SIZE / 4) < 1000


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
        {"noise_std": -0.1},
        {"mask": {"type": "seed", "seed": 7, "keep_ratio": 0.0}},
        {"mask": {"type": "seed", "seed": 7, "keep_ratio": 1.5}},
        {"mask": {"type": "seed", "seed": 7}},
        {"mask": {"type": "seed", "seed": -1, "keep_ratio": 0.5}},
        {"mask": {"type": "seed", "seed": 1.5, "keep_ratio": 0.5}},
        {"mask": {"type": "seed", "seed": 2**63, "keep_ratio": 0.5}},
        {"mask": {"type": "seed", "keep_ratio": 0.5}},
        {"keep_ratio": 0.5},  # of what noise has changed: goes with no mask
        {"quantization_levels": 3},
        {"extra": 1},
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


def masks_of(grid, size=4000):
    """The mask of every round, as it was asked of clients: of all of them the same."""
    masks = {}
    for message in grid.sent:
        if message.metadata.message_type == "train":
            (config,) = (record for record in message.content.config_records.values() if wire.KEY in record)
            instruction = wire.instruction_of(config)
            masks.setdefault(instruction.server_round, set()).add(instruction.ask.mask)
    assert all(len(asked) == 1 for asked in masks.values())
    return [mask.indices(size) for _, (mask,) in sorted(masks.items())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "mask", "drop"),
    [("central", "rand-k", 1), ("central", "top-k", 0), ("distributed", "rand-k", 0), ("distributed", "top-k", 1)],
)
def test_noise_is_on_the_rounds_mask_alone_and_of_the_right_std(placement, drop, mask):
    sampling = FullSampling()
    arguments = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": sampling, "num_clients": 4, "delta": 1e-3}
    strategy = FedSMP(**arguments, keep_ratio=0.25, placement=placement, mask=mask)
    grid = LocalGrid(still(4, 10_000), 4, tamper=lambda node, reply: [] if strategy.rounds and node <= drop else [reply])
    models = []

    def keep(server_round, current):
        models.append(np.concatenate([array.numpy().ravel() for array in current.values()]).astype(np.float64))

    start = nn.Linear(1, 10_000)
    torch.nn.init.zeros_(start.weight)
    torch.nn.init.zeros_(start.bias)
    strategy.start(grid, model_arrays(start), num_rounds=8, evaluate_fn=keep)
    steps = np.diff(np.stack(models), axis=0)
    values, masks = [], masks_of(grid, 20_000)
    for step, kept in zip(steps, masks, strict=True):
        outside = np.ones(20_000, bool)
        outside[kept] = False
        assert np.abs(step[outside]).max() < 1e-6  # what float32 makes of adding nothing
        values.append(step[kept])
    assert len({kept.tobytes() for kept in masks}) == 8
    ratio = np.sum(np.concatenate(values) ** 2) / (0.8 * 0.5 / 4) ** 2
    low, high = stats.chi2.interval(1 - 1e-6, 40_000)
    assert low < ratio < high
    assert not low < 1.05**2 * ratio < high
    assert not low < ratio / 1.05**2 < high


def test_the_statement_is_that_of_the_noised_sum():
    arguments = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
    masked, whole = FedSMP(**arguments, keep_ratio=0.25), DPFedSAM(**arguments)
    for strategy in (masked, whole):
        strategy.start(LocalGrid(still(4), 2), model_arrays(nn.Linear(1, 2000)), num_rounds=3)
    assert masked.statement.epsilon == whole.statement.epsilon
    assert masked.rounds[0].bytes_per_client == 1000 * 4


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

    strategy = FedSMP(clip_norm=0.5, noise_multiplier=0, sampling=FullSampling(), num_clients=1, delta=1e-3, placement="central")
    start = model_arrays(nn.Linear(1, 2000))
    grid = LocalGrid(still(1), 1, tamper=forge)
    result = strategy.start(grid, start, num_rounds=1)
    moved = np.concatenate([array.numpy().ravel() for array in result.arrays.values()]) - np.concatenate(
        [array.numpy().ravel() for array in start.values()]
    )
    assert set(np.flatnonzero(moved)) <= set(masks_of(grid)[0])
    assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-4)
