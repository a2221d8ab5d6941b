"""Fed-SMP on the client: mask, then clip and noise on the kept coordinates alone."""

import json
import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from torch import nn

from flower_dp import wire
from flower_dp.clients import model_arrays
from flower_dp.clients.refusal_messages import Declined
from flower_dp.clients.reply.parts import Mask
from flower_dp.core.compression import decode
from flower_dp.core.noise import lattice_step
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.strategies import DPFedSAM, FedSMP
from flower_dp.strategies.releases.masks import LargestMasks
from flower_dp.wire import Instruction, ReleaseRequest, ReplyHeader, RoundMask, SentMask
from tests.asks import ask, config_of, forged, masked
from tests.clients.test_client import _client, _records
from tests.closed_forms import assert_std
from tests.grids import LocalGrid, asks_to_train
from tests.local_grids import models_of, still_app, still_model

SIZE, KEPT = 40_000, 20_000
WORDS: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}


def masked_ask(*, size: int = SIZE, keep_ratio: float = 0.5, seed: int = 11, **changes: Any) -> ReleaseRequest:
    arguments = {"placement": "distributed", "noise_std": 0.5}
    return masked(size=size, keep_ratio=keep_ratio, seed=seed, **arguments | changes)


def coordinates(asked: ReleaseRequest, size: int) -> np.ndarray:
    assert asked.mask is not None
    return asked.mask.indices(size)


def instruction(names: tuple[str, ...], asked: ReleaseRequest) -> Instruction:
    return Instruction(server_round=1, method="fed-smp", clients=names, ask=asked)


def fit(client: Any, names: tuple[str, ...], asked: ReleaseRequest) -> tuple[np.ndarray, ReplyHeader]:
    size = client.model.layout.size
    arrays, _, answer = client.fit([np.zeros(size, np.float32)], config_of(instruction(names, asked)))
    read = ReplyHeader.from_json(answer[wire.KEY], names)
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
    read = ReplyHeader.from_json(answer[wire.KEY], names)
    payload = wire.payload_of(ArrayRecord(arrays), read.payload, 100)
    with pytest.raises(ValueError, match="mask is not the one of this round"):
        decode(payload, 100, mask=coordinates(masked_ask(seed=12, size=100), 100))


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": "central"},
        {"noise_std": 0.0},
        {"mask": {"type": "seed", "seed": 7, "keep_ratio": 1.5}},
        {"mask": {"type": "seed", "seed": 2**63, "keep_ratio": 0.5}},
        {"keep_ratio": 0.5},  # of what noise has changed: goes with no mask
    ],
)
def test_asks_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    text = forged(instruction(("a",), masked_ask(size=2)), **changes)
    with pytest.raises(Declined, match=r"placement|noise_std|keep_ratio|mask|extra"):
        _client({"a": _records([0.5, 0.0])}).fit([np.zeros(2, np.float32)], config_of(text))


# The server


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
    grid = LocalGrid(still_app(4, 10_000), 4, tamper=lambda node, reply: [] if strategy.rounds and node <= drop else [reply])
    steps = np.diff(models_of(strategy, grid, model_arrays(still_model(10_000)), 8), axis=0)
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
    grid = LocalGrid(still_app(1), 1, tamper=forge)
    result = strategy.start(grid, start, num_rounds=1)
    before, after = (np.concatenate([array.numpy().ravel() for array in record.values()]) for record in (start, result.arrays))
    moved = after - before
    assert set(np.flatnonzero(moved)) <= set(masks_of(grid)[0].indices(4000))
    assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-4)


# Masks that follow from what was released (top-k)

RELEASED = np.random.default_rng(5).standard_normal(1000)


# The masks


@pytest.mark.parametrize(("keep_ratio", "random_ratio", "largest"), [(0.4, 0.5, 200), (0.1, 0.001, 99)])
def test_a_mask_keeps_the_largest_of_what_was_released_and_random_ones(
    keep_ratio: float, random_ratio: float, largest: int
) -> None:
    made = LargestMasks(keep_ratio=keep_ratio, random_ratio=random_ratio)
    first, second = (made.mask(1000, RELEASED).indices(1000) for _ in range(2))
    top = set(np.argsort(-np.abs(RELEASED))[:largest])
    for mask in (first, second):
        assert len(mask) == len(set(mask)) == int(1000 * keep_ratio)
        assert top <= set(mask)
    assert set(first) != set(second)
    assert set(made.mask(1000, -3 * RELEASED).indices(1000)) >= top


def test_every_other_coordinate_is_drawn_as_often_as_any() -> None:
    """None is left out for ever, which is what the largest alone would do."""
    made, counts = LargestMasks(keep_ratio=0.4, random_ratio=0.5), np.zeros(1000)
    for _ in range(400):
        counts[made.mask(1000, RELEASED).indices(1000)] += 1
    others = counts[np.argsort(-np.abs(RELEASED))[200:]]
    # 200 of 800 a round: 100 of 400, with a standard deviation of 8.7.
    assert 100 - 6 * 8.7 < others.min() <= others.max() < 100 + 6 * 8.7
    assert counts.sum() == 400 * 400


def test_before_anything_was_released_a_mask_is_random() -> None:
    made = LargestMasks(keep_ratio=0.4, random_ratio=0.5)
    masks = [made.mask(1000, None) for _ in range(5)]
    assert all(isinstance(mask, RoundMask) and mask.keep_ratio == 0.4 for mask in masks)
    assert len({mask.seed for mask in masks if isinstance(mask, RoundMask)}) == 5
    assert isinstance(LargestMasks(keep_ratio=0.4, random_ratio=1.0).mask(1000, RELEASED), RoundMask)
    assert len(LargestMasks(keep_ratio=1.0, random_ratio=0.5).mask(1000, RELEASED).indices(1000)) == 1000
    assert len(LargestMasks(keep_ratio=1e-9, random_ratio=0.5).mask(1000, RELEASED).indices(1000)) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mask": "top_k"}, "mask='top_k': must be one of rand-k, top-k"),
        ({"mask": "top-k", "random_ratio": 1.5}, r"random_ratio=1\.5"),
        ({"random_ratio": 0.5}, r"random_ratio=0\.5: is read with mask='top-k' only"),
        ({"mask": "top-k", "keep_ratio": 0.0}, "keep_ratio=0"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedSMP(**WORDS, **arguments)


# The strategy


def run(strategy: Any, num_clients: int, num_rounds: int, **arguments: Any) -> tuple[np.ndarray, LocalGrid]:
    """The models of a run of still clients [rounds + 1, d], and its grid."""
    grid = LocalGrid(still_app(num_clients), 2, **arguments)
    return models_of(strategy, grid, model_arrays(still_model()), num_rounds), grid


@pytest.mark.parametrize("placement", ["central", "distributed"])
def test_every_mask_follows_from_the_last_two_released_models(placement: str) -> None:
    """Anyone who sees the models can check it. No client's update moves anything here: what is largest is noise alone."""
    strategy = FedSMP(**WORDS, keep_ratio=0.25, mask="top-k", placement=placement)
    models, grid = run(strategy, 4, 6)
    first, *rest = masks_of(grid)
    assert isinstance(first, RoundMask)
    assert len(rest) == 5
    for mask, change in zip(rest, np.diff(models, axis=0), strict=False):
        assert isinstance(mask, SentMask)
        kept = mask.indices(4000)
        # The models are float32: of two changes that are nearly equal either may be the larger one.
        least = np.sort(np.abs(change))[-500] + 1e-6
        assert set(np.flatnonzero(np.abs(change) > least)) <= set(kept)
        assert np.sum(np.abs(change) > least) > 490
        assert len(kept) == 1000


def test_a_new_run_knows_nothing_of_the_last_one() -> None:
    strategy = FedSMP(**WORDS, mask="top-k")
    for _ in range(2):
        _, grid = run(strategy, 4, 2)
        assert [type(mask) for mask in masks_of(grid)] == [RoundMask, SentMask]


def test_a_round_that_is_not_released_makes_no_mask() -> None:
    """With nobody's reply but too few the sum stays where it is; the next mask is of the last release."""
    silent = {2}

    def tamper(node: int, reply: Any) -> list[Any]:
        return [] if len(strategy.rounds) + 1 in silent else [reply]

    strategy = FedSMP(**WORDS, mask="top-k", server_completes_noise=False)
    models, grid = run(strategy, 4, 3, tamper=tamper)
    assert not np.any(models[2] - models[1])
    change = np.abs(models[1] - models[0])
    for mask in masks_of(grid)[1:]:
        assert set(np.flatnonzero(change > np.sort(change)[-800] + 1e-6)) <= set(mask.indices(4000))


def test_statement_and_bytes_are_those_of_rand_k() -> None:
    """Masks are post-processing; the title is the method's own."""
    arguments = WORDS | {"sampling": PoissonSampling(sampling_rate=0.5), "num_clients": 8}
    found = []
    for own in ({"mask": "top-k"}, {}):
        strategy = FedSMP(**arguments, keep_ratio=0.25, **own)
        run(strategy, 8, 3)
        found.append((strategy.statement.epsilon, strategy.statement.noise, strategy.rounds[-1].bytes_per_client))
        assert strategy.statement.method == f"Fed-SMP-{'top_k' if own else 'rand_k'}"
    assert found[0] == found[1]
    whole = DPFedSAM(**arguments)
    run(whole, 8, 3)
    assert whole.statement.epsilon == found[0][0]


# The client


def test_a_client_clips_and_noises_under_a_sent_mask_as_under_a_seeded_one() -> None:
    """One set of coordinates, told in two ways, with one noise: the same payload, but for what names the mask."""
    update, seeded = np.random.default_rng(1).standard_normal(1000), RoundMask(seed=3, keep_ratio=0.2)
    sent = SentMask.of(seeded.indices(1000), length=1000)
    made = []
    for mask in (seeded, sent):
        asked = ask(placement="distributed", noise_std=0.3, size=200, mask=mask)
        client = _client({"a": _records(update)}, noise_seed=8)
        arrays, _, _ = client.fit([np.zeros(1000, np.float32)], config_of(instruction(("a",), asked)))
        made.append(arrays[0])
    assert made[0].tobytes() == made[1].tobytes()
    assert math.sqrt(200) * 0.2 < np.linalg.norm(made[0]) < math.sqrt(200) * 0.5


@pytest.mark.parametrize("length", [992, 1016])
def test_a_client_refuses_a_mask_of_another_model(length: int) -> None:
    asked = ask(placement="distributed", size=1, mask=SentMask.of([1], length=length))
    with pytest.raises(Declined, match="do not fit a vector with 1000 entries"):
        _client({"a": _records(np.ones(1000))}).fit([np.zeros(1000, np.float32)], config_of(instruction(("a",), asked)))
