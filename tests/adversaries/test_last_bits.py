"""The last bits of floats: what leaves lies on a lattice, so that no bit of it tells more than its noise allows."""

import math

import numpy as np
import pytest
from scipy import stats

from flower_dp.clients import DPClient, LocalDPClient, NbAFLRecipe, Training, client_app
from flower_dp.core import noise
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg, DPFedSAM, NbAFL
from tests.grids import LocalGrid
from tests.local_grids import CLASSES, FEATURES, linear, records
from tests.stock import arrays, shifted, stock_app

TRIALS = 2000


def attack(released, steps):
    """The best lower bound of epsilon from counting, at 99.9 %, how many outputs lie on the grid that one input would leave.

    `released(present)` is an output for either neighbour; `steps` maps an output to the count of coordinates that lie on the float
    grid of "value + float32 noise" for the value of the present neighbour.
    """
    counts = {present: np.asarray([steps(released(present)) for _ in range(TRIALS)]) for present in (True, False)}
    best = 0.0
    for threshold in np.unique(np.concatenate(list(counts.values()))):
        hits = {present: int((count >= threshold).sum()) for present, count in counts.items()}
        for one, other in ((True, False), (False, True)):
            for flipped in (False, True):
                k = {p: TRIALS - hits[p] if flipped else hits[p] for p in hits}
                low = stats.beta.ppf(5e-4, k[one], TRIALS - k[one] + 1) if k[one] else 0.0
                high = stats.beta.ppf(1 - 5e-4, k[other] + 1, TRIALS - k[other]) if k[other] < TRIALS else 1.0
                if low > 1e-3:
                    best = max(best, math.log((low - 1e-3) / high))
    return best


def on_grid(value, spacing):
    """Count coordinates whose distance from a value is a multiple of the spacing of small float32 noise."""
    return lambda output: int((np.abs((output - value) / spacing - np.round((output - value) / spacing)) < 1e-6).sum())


@pytest.mark.parametrize(
    ("kind", "size", "scale", "entry", "spacing", "most"),
    [("gaussian", 400, 4.0, 0.99 / 20 + 1e-4, 2.0**-24, 0.5), ("laplace", 50, 2.0, 0.0123456789, 2.0**-26, 0.3)],
)
def test_counting_floats_tells_nothing_of_a_noised_sum(kind, size, scale, entry, spacing, most):
    """The attacks that once proved 2.79 where 0.926 was claimed, and 2.01 where a pure 0.5 was; with fewer trials."""
    step = noise.lattice_step(scale, clip_norm=1.0, dimension=size, norm="l1" if kind == "laplace" else "l2")
    update = {True: np.full(size, np.float32(entry)), False: np.zeros(size)}

    def lattice(present):
        value = noise.toward_zero(update[present], step)
        return value + getattr(noise, kind)(value, scale, step, noise.noise_generator())

    def floating(present):
        rng = noise.noise_generator()
        drawn = rng.standard_normal(size, dtype=np.float32) if kind == "gaussian" else rng.laplace(0, 1, size)
        return update[present] + (drawn * scale).astype(np.float32).astype(np.float64)

    assert attack(floating, on_grid(0.0, spacing)) > 1.0  # the attack is one
    assert attack(lattice, on_grid(0.0, spacing)) < most
    assert attack(lattice, on_grid(float(np.float32(entry)), step)) < most


WORDS = {"clip_norm": 0.5, "noise_multiplier": 4.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
NBAFL = {"clip_norm": 1.5, "paper_epsilon": 2.0, "delta": 0.01, "uplink_exposures": 9}


def app_of(make):
    def client_fn(context):
        name = f"c{int(context.node_config['partition-id'])}"
        return make(model=linear(), clients={name: records(name)}, device="cpu")

    return client_app(client_fn)


RECIPE = NbAFLRecipe(training=Training(learning_rate=0.1), min_records=8, **NBAFL)


def noisy_client(**arguments):
    return LocalDPClient(**arguments, recipe=RECIPE)


def sharing_client(**arguments):
    return DPClient(**arguments, training=Training(learning_rate=0.1))


def spacing(values):
    """The largest power of two of which all values are multiples."""
    return next(2.0**-power for power in range(-9, 200) if not np.mod(values, 2.0**-power).any())


def played(strategy, app, num_rounds):
    """The replies of a run that begins at zero, and its models."""
    grid, models = LocalGrid(app, 4), []
    initial = arrays(**{"0.weight": np.zeros((CLASSES, FEATURES), np.float32)})
    strategy.start(
        grid, initial, num_rounds=num_rounds, evaluate_fn=lambda _, model: models.append(model["0.weight"].numpy().astype(float))
    )
    replies = [list(next(iter(reply.content.array_records.values())).values())[-1].numpy() for reply in grid.received]
    return [reply.astype(float) for reply in replies], models[1:]


@pytest.mark.parametrize(
    ("strategy", "app", "scale"),
    [
        (DPFedAvg(**WORDS), stock_app(shifted(lambda node: 0.0123456789 * node)), 2.0),
        (DPFedSAM(**WORDS, placement="central"), app_of(sharing_client), 2.0),
        (DPFedSAM(**WORDS, placement="distributed"), app_of(sharing_client), 1.0),
    ],
    ids=["stock clients", "the server's noise", "shares of the noise"],
)
def test_what_leaves_lies_on_the_lattice_whatever_the_update(strategy, app, scale):
    step = noise.lattice_step(scale, clip_norm=0.5, dimension=CLASSES * FEATURES)
    assert step <= scale / 1024
    replies, models = played(strategy, app, 3)
    assert len(replies) == 12
    if isinstance(strategy, DPFedSAM):
        assert all(spacing(reply) >= step for reply in replies)
    for model in models:  # of means of four
        assert spacing(model) >= step / 4


def test_the_broadcasts_of_nbafl_lie_on_a_coarser_lattice_than_its_replies():
    """With little noise of its own the server once rounded more finely than the clients, whose lattices then showed."""
    step = RECIPE.terms("c0", records("c0")).release.lattice_step(CLASSES * FEATURES) / 2**10
    for num_rounds in (3, 1):  # where the server adds noise, and where it hardly does
        replies, models = played(NbAFL(**NBAFL, num_clients=4, num_records=8), app_of(noisy_client), num_rounds)
        assert all(spacing(reply) >= step / 4 for reply in replies)  # of a weight of a quarter
        assert all(spacing(model) >= 64 * step for model in models)
