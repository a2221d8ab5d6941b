"""Faults of Flower's own differential privacy, each of which this package must be free of."""

import inspect
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy
from torch import nn

import flower_dp
from flower_dp import clients
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.strategies import DPFedAvg
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app


def run(train, *, num_clients=4, clip_norm=1.0, num_examples=lambda node: 1, tamper=None, record=None, num_rounds=1):
    strategy = DPFedAvg(clip_norm=clip_norm, noise_multiplier=0, sampling=FullSampling(), num_clients=num_clients, delta=1e-3)
    grid = LocalGrid(stock_app(train, num_examples=num_examples), num_clients, tamper=tamper)
    start = record or arrays(w=np.zeros(4, np.float32))
    result = strategy.start(grid, start, num_rounds=num_rounds)
    return np.concatenate([array.numpy().ravel() for array in result.arrays.values()]), strategy


def test_example_counts_do_not_raise_one_clients_influence_above_c_over_m():
    only_first = shifted(lambda node: 100.0 if node == 1 else 0.0)
    for count in (1, 10**9):
        vector, _ = run(only_first, num_examples=lambda node, count=count: count if node == 1 else 1)
        assert np.linalg.norm(vector) <= 1.0 / 4
        assert np.linalg.norm(vector) == pytest.approx(1.0 / 4, rel=1e-6)


def test_missing_replies_do_not_raise_the_weight_of_the_others():
    everyone = shifted(lambda node: 100.0)
    vector, _ = run(everyone, tamper=lambda node, reply: [reply] if node == 1 else [])
    assert np.linalg.norm(vector) <= 1.0 / 4


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_batch_statistics_are_refused_on_both_sides(norm):
    model = nn.Sequential(nn.Linear(4, 4), norm)
    if any("running" in name for name in model.state_dict()):
        with pytest.raises(ValueError, match="GroupNorm"):
            run(shifted(lambda node: 0.0), record=ArrayRecord(model.state_dict()))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\).*GroupNorm"):
        clients.FlatModel(model)


def test_noise_does_not_come_from_a_global_generator():
    strategy = DPFedAvg(clip_norm=1, noise_multiplier=1, sampling=PoissonSampling(sampling_rate=0.5), num_clients=4, delta=1e-3)

    def noise():
        np.random.seed(7)  # noqa: NPY002
        result = strategy.start(
            LocalGrid(stock_app(shifted(lambda node: 0.0)), 4), arrays(w=np.zeros(4, np.float32)), num_rounds=1
        )
        assert np.random.random() == pytest.approx(0.07630829)  # noqa: NPY002  (the first draw of seed 7: nobody drew before)
        return result.arrays["w"].numpy()

    assert not np.allclose(noise(), noise())


def test_no_module_uses_a_global_generator():
    """One module lends them to a user's data set, seeded for one record, and gives them back as they were."""
    lends = Path(flower_dp.__file__).parent / "clients" / "training" / "draws.py"
    for path in set(Path(flower_dp.__file__).parent.rglob("*.py")) - {lends}:
        text = path.read_text(encoding="utf-8")
        for word in ("np.random.seed", "np.random.normal", "np.random.rand", "torch.manual_seed", "random.seed"):
            # There, what apps draw from the global generators is seeded for a while, and the generators are put back.
            lent = path.name == "draws.py" and word in ("np.random.seed", "random.seed")
            assert lent or word not in text, f"{path.name} uses {word}"


def test_all_hooks_have_flowers_signatures():
    for name in ("start", "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary"):
        ours = inspect.signature(getattr(DPFedAvg, name)).parameters
        own = ["checkpoint_dir", "resume"] if name == "start" else []  # behind Flower's, with defaults
        assert list(ours) == [*inspect.signature(getattr(Strategy, name)).parameters, *own]
