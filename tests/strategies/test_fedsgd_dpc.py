import logging
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from flower_dp.clients import FedSGDDPCRecipe, FlatModel, TensorRecords
from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.training.record_clipping import clipped_sum
from flower_dp.core.noise import lattice_step, noise_generator
from flower_dp.privacy import fedsgd_dpc as terms
from flower_dp.strategies import FedSGDDPC
from tests import local_grids
from tests.local_grids import CLASSES, FEATURES, NAMES, grid_of, linear, one_reply, records, start

FOUR = {name: records(name) for name in NAMES[:4]}
LAPLACE = {"mechanism": "laplace", "clip_norm": 0.5, "epsilon": 2.0}
GAUSSIAN = {"mechanism": "gaussian", "clip_norm": 0.5, "epsilon": 2.0, "delta": 1e-5, "sampling_rate": 0.5}


def pair(num_rounds, *, server=None, **arguments):
    """A strategy for the four clients, two a round, and the recipe with the same numbers."""
    recipe = FedSGDDPCRecipe(num_replies=math.ceil(num_rounds / 2), **arguments)
    options = {"num_clients": 4, "cohort_size": 2, "num_records": 8, "learning_rate": 0.5} | (server or {})
    return FedSGDDPC(**arguments, **options), recipe


def reply_and_loss(recipe, data, *, seed=0, model=None, name="c0"):
    flat = FlatModel(model or linear())
    release = recipe.terms(name, data).release
    vector = flat.vector.clone()
    rng = np.random.default_rng(seed)
    reply = one_reply(recipe, vector, data, release, model=flat, rng=rng)
    return reply.row.to(torch.float64), reply.loss


def sum_of(recipe, flat, data, positions, seed, step=0.0):
    """The sum of the clipped gradients of some records."""
    clip = RecordClip(clip_norm=recipe.clip_norm, step=step, norm="l1" if recipe.mechanism == "laplace" else "l2")
    return clipped_sum(flat, data, positions, clip=clip, loss=recipe.loss, seed=seed)[0]


def reply(recipe, data, **arguments):
    return reply_and_loss(recipe, data, **arguments)[0]


# The gradient


def by_hand(data, clip_norm, order):
    """The sum of clipped gradients of a linear model."""
    return len(data) * local_grids.mean_gradient(linear()[0].weight.detach().double(), data, clip_norm, order).flatten()


@pytest.mark.parametrize("huge", [1e30, math.inf, math.nan])
def test_one_huge_record_moves_the_mean_by_its_clip_norm_at_most(huge):
    recipe = FedSGDDPCRecipe(**LAPLACE | {"epsilon": math.inf}, num_replies=1)
    data = records("c0")
    inputs = data.inputs.clone()
    inputs[3] = huge
    other = TensorRecords(inputs=inputs, targets=data.targets)
    moved = (reply(recipe, data) - reply(recipe, other)).abs().sum()
    assert 0 < moved <= 2 * 0.5 / 8 * (1 + 1e-6)


# Records without a gradient


def but(data, *positions):
    """The records without some of them."""
    kept = [position for position in range(len(data)) if position not in positions]
    return TensorRecords(inputs=data.inputs[kept], targets=data.targets[kept])


class Holed(TensorRecords):
    """Records some of which can't be read; it may take a word of the data to say so."""

    def batch(self, positions, device):
        for position in positions.tolist():
            if self.targets[position] < 0:
                raise OSError("Jane Doe's file is broken")
        return super().batch(positions, device)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [LAPLACE, GAUSSIAN], ids=["laplace", "gaussian"])
def test_a_client_none_of_whose_records_have_a_gradient_replies_with_noise(arguments, caplog):
    recipe, data = FedSGDDPCRecipe(**arguments, num_replies=1), records("c0")
    with caplog.at_level(logging.WARNING, logger="flwr"):
        row, loss = reply_and_loss(recipe, Holed(inputs=data.inputs, targets=-data.targets - 1), seed=4)
    assert loss == 0
    assert len(set(row.tolist())) == FEATURES * CLASSES
    assert row.isfinite().all()
    (warning,) = caplog.messages
    assert warning.startswith("All records count as zero, and the reply is noise alone: ")
    assert "Jane" not in warning


@pytest.mark.parametrize("rows", [1, 5])
def test_more_or_fewer_rows_than_records_count_as_zero(rows):
    """A data set that returns what it was not asked for does not make one record count more often."""

    class Miscounted(TensorRecords):
        def batch(self, positions, device):
            inputs, targets = super().batch(positions, device)
            if 3 not in positions:
                return inputs, targets
            at = positions.tolist().index(3)
            extra = [at] * (rows - 1) if len(positions) > 1 else [0] * rows if rows > 1 else []
            order = [*(i for i in range(len(positions)) if i != at), *extra]
            return inputs[order], targets[order]

    recipe = FedSGDDPCRecipe(**LAPLACE | {"epsilon": math.inf}, num_replies=1)
    data = records("c0")
    row = reply(recipe, Miscounted(inputs=data.inputs, targets=data.targets))
    torch.testing.assert_close(row, -by_hand(but(data, 3), 0.5, 1) / 8, rtol=1e-5, atol=1e-7)


# Dropout


def dropping():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def test_dropout_depends_on_no_other_client_and_not_on_the_global_seed():
    """As where a client_fn seeds torch's own generator; the other client has 8 or 9 records in its batch."""
    recipe = FedSGDDPCRecipe(**LAPLACE | {"epsilon": math.inf}, num_replies=3)
    flat = FlatModel(dropping())
    vector = flat.vector.clone()

    def row_after(size, global_seed, rng):
        torch.manual_seed(global_seed)
        for data, generator in ((records("c0", size), np.random.default_rng(0)), (records("c1"), rng)):
            release = recipe.terms("c1", data).release
            row = one_reply(recipe, vector, data, release, model=flat, rng=generator).row
        return row

    row, rng = row_after(8, 3, noise_generator(5, 1, "c1")), noise_generator(5, 1, "c1")
    assert torch.equal(row_after(9, 4, rng), row)
    assert len({tuple(row_after(8, 3, rng).tolist()) for _ in range(5)}) == 5


def test_dropout_of_a_record_does_not_depend_on_who_is_in_the_batch(monkeypatch):
    """With and without each record the sums differ by its own clipped gradient, whatever part it and the others are in."""
    monkeypatch.setattr("flower_dp.clients.training.record_clipping._LARGEST_MATRIX", {"cpu": 3 * 163})
    recipe = FedSGDDPCRecipe(**GAUSSIAN | {"epsilon": math.inf, "clip_norm": 0.25}, num_replies=1)
    flat, data = FlatModel(dropping()), records("c0")
    everyone = torch.arange(8)

    def total(positions):
        return sum_of(recipe, flat, data, positions, 77)

    for position in range(8):
        moved = total(everyone) - total(everyone[everyone != position])
        torch.testing.assert_close(moved, total(everyone[position : position + 1]), atol=1e-6, rtol=1e-4)
        assert 0.2 < torch.linalg.vector_norm(moved) <= 0.25 * (1 + 1e-6)


@pytest.mark.parametrize(("arguments", "norm"), [(LAPLACE, "l1"), (GAUSSIAN, "l2")], ids=["laplace", "gaussian"])
def test_gradients_are_rounded_to_the_lattice_one_by_one_after_their_clip(arguments, norm):
    """So that the sum with and without a record differs by its clip norm at most, exactly; in any parts, and in any order."""
    recipe = FedSGDDPCRecipe(**arguments, num_replies=1)
    data = records("c0")
    release = recipe.terms("c0", data).release
    flat = FlatModel(linear())
    size = FEATURES * CLASSES
    step = release.lattice_step(size)
    assert step == lattice_step(release.noise_scale, clip_norm=0.5, dimension=size, norm=norm) > 0

    def total(*positions):
        return sum_of(recipe, flat, data, torch.tensor(positions), 1, step).numpy()

    everyone = total(*range(8))
    np.testing.assert_array_equal(everyone / step, np.rint(everyone / step))
    np.testing.assert_array_equal(total(*range(7, -1, -1)), everyone)
    alone = []
    for position in range(8):
        alone.append(everyone - total(*(i for i in range(8) if i != position)))
        assert np.linalg.norm(alone[-1], 1 if norm == "l1" else 2) <= 0.5
        clipped = by_hand(
            TensorRecords(inputs=data.inputs[[position]], targets=data.targets[[position]]), 0.5, int(norm[1])
        ).numpy()
        # Toward zero, and less than a step; where float32 and float64 gradients fall on two sides of a multiple, a step.
        assert (np.abs(alone[-1]) <= np.abs(clipped) + 1e-6).all()
        assert (np.abs(alone[-1] - clipped) < step + 1e-6).all()
    np.testing.assert_array_equal(sum(alone), everyone)
    # Something was rounded.
    exact = sum_of(recipe, flat, data, torch.arange(8), 1).numpy()
    assert (exact != everyone).any()


@pytest.mark.parametrize("arguments", [LAPLACE, GAUSSIAN], ids=["laplace", "gaussian"])
def test_the_noised_sum_lies_on_the_lattice(arguments):
    recipe = FedSGDDPCRecipe(**arguments, num_replies=1)
    release = recipe.terms("c0", records("c0")).release
    watched, seen = local_grids.watching(release)
    flat = FlatModel(linear())
    row = one_reply(recipe, flat.vector.clone(), records("c0"), watched, model=flat, rng=np.random.default_rng(1)).row
    local_grids.assert_on_lattice(seen, release, release.lattice_step(FEATURES * CLASSES))
    ((total, drawn, _, _),) = seen
    np.testing.assert_array_equal(row.numpy(), (-(total + drawn) / release.expected_cohort_size).astype(np.float32))


# Laplace: the privacy loss


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "num_replies"), [(10.0, 1), (1.0, 7)])
def test_laplace_privacy_loss_of_worst_swap_is_exactly_the_budget(epsilon, num_replies):
    """Closed form: for independent Laplace noise the loss at any output is at most ||a - b||_1 / scale, and reaches it."""
    model, up, down = local_grids.worst_swap()
    noiseless = FedSGDDPCRecipe(mechanism="laplace", clip_norm=0.5, epsilon=math.inf, num_replies=num_replies)
    recipe = FedSGDDPCRecipe(mechanism="laplace", clip_norm=0.5, epsilon=epsilon, num_replies=num_replies)
    a, b = reply(noiseless, up, model=model), reply(noiseless, down, model=model)
    distance = float((a - b).abs().sum())
    assert distance == pytest.approx(2 * 0.5 / 8, rel=1e-5)
    release = recipe.terms("c0", up).release
    scale = release.noise_scale / release.expected_cohort_size
    assert num_replies * distance / scale <= epsilon
    assert num_replies * distance / scale == pytest.approx(epsilon, rel=1e-5)
    # Real rows, drawn under the one data set: their log-likelihood ratio never exceeds the reply's share, and comes near it. One
    # in four has it: where both coordinates lie beyond what there is without noise. That none of 50 does has a probability of 1e-6.
    losses = []
    for seed in range(50):
        row = reply(recipe, up, model=model, seed=seed)
        losses.append(float(((row - b).abs() - (row - a).abs()).sum()) / scale)
    assert max(losses) <= epsilon / num_replies * (1 + 1e-5)
    assert max(losses) > epsilon / num_replies * 0.999


# Gaussian: the least noise


def single_reply_delta(multiplier, rate, epsilon):
    """Exact delta of one Poisson-subsampled reply under replace-one, by integration: +C against -C, each there with rate q."""

    def density(sign, x):
        return (1 - rate) * stats.norm.pdf(x, 0, multiplier) + rate * stats.norm.pdf(x, sign, multiplier)

    def excess(x):
        return max(0.0, density(1, x) - math.exp(epsilon) * density(-1, x))

    return integrate.quad(excess, -1, 12 * multiplier + 2, limit=400, points=[0.0, 1.0, multiplier])[0]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "epsilon"), [(0.1, 0.5), (1.0, 1.0)])
def test_gaussian_noise_of_one_reply_is_the_least(rate, epsilon):
    release = terms.gradient_terms(
        mechanism="gaussian", clip_norm=1.0, epsilon=epsilon, delta=1e-5, num_replies=1, num_records=8, sampling_rate=rate
    ).release
    multiplier = release.mechanism.noise_multiplier
    assert single_reply_delta(multiplier, rate, epsilon) <= 1e-5 * (1 + 1e-6)
    assert single_reply_delta(multiplier / 1.01, rate, epsilon) > 1e-5


# Denominators


def test_the_denominator_is_the_expected_batch_not_the_drawn_one():
    """With a noiseless Poisson batch the reply is the batch's sum over q n, whatever the batch's size."""
    recipe = FedSGDDPCRecipe(**GAUSSIAN | {"epsilon": math.inf, "clip_norm": 100.0}, num_replies=1)
    data = TensorRecords(inputs=torch.ones(8, FEATURES), targets=torch.zeros(8, dtype=torch.int64))
    one = by_hand(TensorRecords(inputs=data.inputs[:1], targets=data.targets[:1]), 100.0, 2)
    sizes = set()
    for seed in range(30):
        counted = float(-reply(recipe, data, seed=seed) @ one / (one @ one)) * 0.5 * 8
        assert counted == pytest.approx(round(counted), abs=1e-4)
        sizes.add(round(counted))
    assert len(sizes) > 3


def test_add_or_remove_one_takes_the_public_size_and_replace_one_insists_on_it():
    arguments = {**LAPLACE, "num_replies": 1}
    with pytest.raises(ValueError, match="num_records=None: must be the public data size"):
        FedSGDDPCRecipe(**arguments, relation="add-or-remove-one")
    recipe = FedSGDDPCRecipe(**arguments, relation="add-or-remove-one", num_records=10)
    assert recipe.terms("c0", records("c0")).release.expected_cohort_size == 10
    with pytest.raises(ValueError, match="num_records=10: client 'c0' has 8 records"):
        FedSGDDPCRecipe(**arguments, num_records=10).terms("c0", records("c0"))


# The server


# The statement


@pytest.mark.slow
def test_the_papers_gaussian_epsilon_needs_its_constant():
    strategy, recipe = pair(4, **GAUSSIAN)
    assert strategy.statement.paper_epsilon is None
    strategy, _ = pair(4, server={"noise_constant": 1.5}, **GAUSSIAN)
    start(strategy, grid_of(recipe, FOUR), 4)
    paper = strategy.statement.paper_epsilon
    multiplier = recipe.terms("c0", FOUR["c0"]).release.mechanism.noise_multiplier
    # By hand: sigma of the mean is z C / (q n); eps = c2 C sqrt(R log(1/delta)) / (n sigma) = c2 q sqrt(R log(1/delta)) / z.
    assert paper.epsilon == pytest.approx(1.5 * 0.5 * math.sqrt(2 * math.log(1e5)) / multiplier)
    assert not paper.valid


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": [1.0, 2.0]}, "epsilon: has 2 values"),
        ({"delta": 1e-5}, "delta=1e-05: Laplace"),
        ({"sampling_rate": 0.5}, "sampling_rate=0.5: must be 1"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"mechanism": "gaussian"}, "delta=0.0"),
        ({"mechanism": "cauchy"}, "mechanism='cauchy'"),
        ({"learning_rate": None}, "learning_rate=None"),
        ({"strong_convexity": 1.0}, "learning_rate=0.5: must be None"),
        ({"cohort_size": 5}, "cohort_size=5"),
        ({"aggregation": "median"}, "aggregation='median'"),
    ],
)
def test_nonsense_is_refused_before_any_client_is_asked(arguments, message):
    options = {"num_clients": 4, "cohort_size": 2, "num_records": 8, "learning_rate": 0.5, **LAPLACE} | arguments
    with pytest.raises(ValueError, match=message):
        FedSGDDPC(**options)
