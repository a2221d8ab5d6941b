"""LUS: a client drops small coordinates of its own update before the clip, and neither noise nor message tells which."""

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from flower_dp.clients import LUS, DPClient, NbAFLRecipe, client_app, model_arrays
from flower_dp.clients.training.engines import ENGINES
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg, DPFedSAM, DPStrategy, FedSMP
from tests.asks import config_of
from tests.clients.test_client import FALSE_ALARM, TRAINING, Direct, _fit, _instruction, _records
from tests.clients.test_engines import RECIPE, _classes, _net, rows_of
from tests.grids import LocalGrid

HALF = replace(TRAINING, sparsifier=LUS(keep_ratio=0.5))


def sparse_client(update: np.ndarray, **settings: Any) -> DPClient:
    return DPClient(model=Direct(update.size), clients={"a": _records(update)}, training=HALF, device="cpu", **settings)


@pytest.mark.parametrize(("keep_ratio", "kept"), [(0.25, 250), (0.2501, 251), (1e-9, 1)])
def test_the_largest_coordinates_are_kept_as_they_are(keep_ratio: float, kept: int) -> None:
    update = torch.from_numpy(np.random.default_rng(4).standard_normal(1000).astype(np.float32))
    before = update.clone()
    found = LUS(keep_ratio=keep_ratio)(update).numpy()
    smallest = np.sort(np.abs(update.numpy()))[-kept]
    np.testing.assert_array_equal(found, np.where(np.abs(update.numpy()) >= smallest, update.numpy(), 0))
    assert torch.equal(update, before)
    assert np.count_nonzero(LUS(keep_ratio=keep_ratio)(torch.ones(1000)).numpy()) == kept  # not more where all are equal


def test_a_value_that_is_not_finite_is_not_dropped() -> None:
    """The clip refuses such an update; LUS must not make a usable one of it."""
    for bad in (math.nan, math.inf, -math.inf):
        update = torch.full((1000,), 1e30)
        update[17] = bad
        assert not LUS(keep_ratio=0.001)(update).isfinite().all()
        _, answer = _fit(sparse_client(update.numpy()), ("a",))
        assert "NaN" in answer.refused["a"].reason


@pytest.mark.parametrize("engine", ENGINES)
def test_every_row_is_sparsified_by_itself(engine: str) -> None:
    clients = [_classes(size, size) for size in (9, 4, 7)]
    whole = rows_of(_net, clients, RECIPE, engine=engine)
    sparse = rows_of(_net, clients, replace(RECIPE, sparsifier=LUS(keep_ratio=0.3)), engine=engine)
    for row, full in zip(sparse, whole, strict=True):
        assert torch.equal(row, LUS(keep_ratio=0.3)(full))
        assert int(row.count_nonzero()) == math.ceil(0.3 * len(full))


@pytest.mark.parametrize("noise_std", [0.0, 0.5])
def test_no_message_tells_by_its_size_how_much_was_dropped(noise_std: float) -> None:
    """Of an update with one coordinate, and with all: 4 bytes a coordinate, also where the server adds the noise."""
    sizes = set()
    for nonzero in (1, 100, 2000):
        update = np.zeros(2000)
        update[:nonzero] = 0.01
        config = config_of(_instruction(("a",), size=2000, noise_std=noise_std))
        arrays, _, answer = sparse_client(update).fit([np.zeros(2000, np.float32)], config)
        payload = json.loads(answer["flower-dp"])
        assert payload["payload"]["encoding"] == "dense"
        sizes.add((sum(array.nbytes for array in arrays), payload["payload_bytes"]))
    assert sizes == {(8000, 8000)}


STRATEGIES: dict[str, Any] = {
    "dp-fedsam untrusted": partial(DPFedSAM, server_completes_noise=False, min_reply_ratio=1.0),
    "fed-smp": partial(FedSMP, keep_ratio=1.0),
    "dp-fedavg": DPFedAvg,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_released_model_has_the_noise_of_the_ledger_on_every_coordinate(name: str) -> None:
    """Through the real path: what all clients have dropped carries the noise of std z C / m, as all else does."""
    arguments = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
    update = np.zeros(4000)
    update[::2] = 1e-9  # kept, and less than a step of the lattice
    hosted = {f"c{index}": _records(update) for index in range(4)}
    client = DPClient(model=Direct(4000), clients=hosted, training=HALF, device="cpu")
    models: list[np.ndarray] = []
    grid, start = LocalGrid(client_app(lambda _: client), 1), model_arrays(Direct(4000))
    strategy: DPStrategy = STRATEGIES[name](**arguments)
    strategy.start(
        grid, start, num_rounds=20, evaluate_fn=lambda _, arrays: models.append(arrays["weight"].numpy().astype(np.float64))
    )
    steps = np.diff(np.stack(models), axis=0)
    for half in (steps[:, 1::2], steps[:, ::2]):
        ratio = np.sum(half**2) / (0.8 * 0.5 / 4) ** 2
        low, high = stats.chi2.interval(1 - FALSE_ALARM, half.size)
        assert low < ratio < high
        assert not low < 1.05**2 * ratio < high
        assert not low < ratio / 1.05**2 < high


def test_nbafl_has_no_updates_to_make_sparse() -> None:
    arguments = {"clip_norm": 1.0, "paper_epsilon": 1.0, "delta": 1e-3, "uplink_exposures": 1, "min_records": 4}
    with pytest.raises(ValueError, match=r"sparsifier=LUS\(keep_ratio=0\.5\): must be None, since NbAFL sends weights"):
        NbAFLRecipe(training=HALF, **arguments)
