"""Fed-SMP-top_k: masks follow from what was released, and from nothing else."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flower_dp.clients import model_arrays
from flower_dp.clients.reasons import Declined
from flower_dp.core.sampling import PoissonSampling
from flower_dp.strategies import DPFedSAM, FedSMP
from flower_dp.strategies.releases.masks import LargestMasks
from flower_dp.wire import RoundMask, SentMask
from tests.asks import ask, config_of
from tests.clients.test_client import _client, _records
from tests.grids import LocalGrid
from tests.strategies.test_fed_smp import WORDS, instruction, masks_of, still

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


def run(strategy: Any, app: Any, model: nn.Module, num_rounds: int, **arguments: Any) -> tuple[np.ndarray, LocalGrid]:
    """The models of a run [rounds + 1, d], and its grid."""
    models: list[np.ndarray] = []

    def keep(server_round: int, arrays: Any) -> None:
        models.append(np.concatenate([array.numpy().ravel() for array in arrays.values()]).astype(np.float64))

    grid = LocalGrid(app, 2, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    strategy.start(grid, model_arrays(model), num_rounds=num_rounds, evaluate_fn=keep)
    return np.stack(models), grid


@pytest.mark.parametrize("placement", ["central", "distributed"])
def test_every_mask_follows_from_the_last_two_released_models(placement: str) -> None:
    """Anyone who sees the models can check it. No client's update moves anything here: what is largest is noise alone."""
    strategy = FedSMP(**WORDS, keep_ratio=0.25, mask="top-k", placement=placement)
    models, grid = run(strategy, still(4), nn.Linear(1, 2000), 6)
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
        _, grid = run(strategy, still(4), nn.Linear(1, 2000), 2)
        assert [type(mask) for mask in masks_of(grid)] == [RoundMask, SentMask]


def test_a_round_that_is_not_released_makes_no_mask() -> None:
    """With nobody's reply but too few the sum stays where it is; the next mask is of the last release."""
    silent = {2}

    def tamper(node: int, reply: Any) -> list[Any]:
        return [] if len(strategy.rounds) + 1 in silent else [reply]

    strategy = FedSMP(**WORDS, mask="top-k", trusted_server=False)
    models, grid = run(strategy, still(4), nn.Linear(1, 2000), 3, tamper=tamper)
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
        run(strategy, still(8), nn.Linear(1, 2000), 3)
        found.append((strategy.statement.epsilon, strategy.statement.noise, strategy.rounds[-1].bytes_per_client))
        assert strategy.statement.method == f"Fed-SMP-{'top_k' if own else 'rand_k'}"
    assert found[0] == found[1]
    whole = DPFedSAM(**arguments)
    run(whole, still(8), nn.Linear(1, 2000), 3)
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
    with pytest.raises(Declined, match="are no mask of a vector with 1000 entries"):
        _client({"a": _records(np.ones(1000))}).fit([np.zeros(1000, np.float32)], config_of(instruction(("a",), asked)))
