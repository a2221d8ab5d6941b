"""The last bits of floats: what leaves lies on a lattice, so that no bit of it tells more than its noise allows."""

import numpy as np
import pytest

from flower_dp.clients import DPClient, LocalDPClient, NbAFLRecipe, Training, client_app
from flower_dp.core import noise
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg, DPFedSAM, NbAFL
from tests.grids import LocalGrid
from tests.local_grids import CLASSES, FEATURES, linear, records
from tests.stock import arrays, shifted, stock_app

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
