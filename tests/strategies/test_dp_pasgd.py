"""DP-PASGD and DP-SGD: noised local steps, their terms, a plain mean, the best model, two budgets."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from flwr.app import ArrayRecord, MetricRecord
from scipy import integrate, stats
from torch import nn

from flower_dp.clients import DPPASGDRecipe, FlatModel, TensorRecords, model_arrays
from flower_dp.clients import dp_pasgd as client_side
from flower_dp.clients.reply.parts import FullNoise, RecordClip, RowClip, StepNoise
from flower_dp.core.steps import StepSchedule
from flower_dp.planning.dp_pasgd import plan
from flower_dp.privacy import accounting
from flower_dp.privacy.dp_pasgd import step_terms
from flower_dp.strategies import DPPASGD
from tests.local_grids import CLASSES, FEATURES, NAMES, grid_of, linear, one_reply, records, start, vector_of

FALSE_ALARM = 1e-6
FOUR = {name: records(name) for name in NAMES[:4]}
WORDS = {
    "batch_size": 4,
    "clip_norm": 0.5,
    "epsilon": 2.0,
    "delta": 1e-3,
    "num_steps": 6,
    "num_local_steps": 2,
    "learning_rate": 0.25,
}
SILENT = WORDS | {"epsilon": math.inf, "batch_size": 8}


def pair(*, server=None, **arguments):
    """A strategy for the four clients, and the recipe with the same numbers."""
    arguments = WORDS | arguments
    return DPPASGD(**arguments, **{"num_clients": 4} | (server or {})), DPPASGDRecipe(**arguments)


def row_of(recipe, data, *, model=linear, server_round=1, seed=0, name="c0"):
    """What leaves a client, as float64."""
    flat = FlatModel(model())
    release = recipe.terms(name, data).release
    rng = np.random.default_rng(seed)
    reply = one_reply(recipe, flat.vector.clone(), data, release, model=flat, server_round=server_round, rng=rng)
    return reply.row.to(torch.float64)


def mean_gradient(weight, data, clip_norm):
    """The mean of clipped gradients of a linear model under cross-entropy, in closed form: (softmax - one-hot) x^T."""
    total = torch.zeros_like(weight)
    for x, y in zip(data.inputs.double(), data.targets, strict=True):
        gradient = torch.outer(torch.softmax(weight @ x, 0) - nn.functional.one_hot(y, CLASSES), x)
        total += gradient * min(1.0, clip_norm / float(torch.linalg.vector_norm(gradient)))
    return total / len(data)


def by_hand(data, *, clip_norm, steps, step_size, weight_decay=0.0):
    """How far plain gradient descent on all records moves the weights, in float64."""
    first = linear()[0].weight.detach().double()
    weight = first.clone()
    for _ in range(steps):
        weight = weight - step_size * (mean_gradient(weight, data, clip_norm) + weight_decay * weight)
    return (weight - first).flatten()


# Local steps


def test_a_reply_is_the_movement_of_clipped_gradient_descent():
    data = records("c0")
    recipe = DPPASGDRecipe(**SILENT | {"num_local_steps": 3, "learning_rate_decay": 0.2, "weight_decay": 0.3})
    moved = row_of(recipe, data, server_round=3)
    expected = by_hand(data, clip_norm=0.5, steps=3, step_size=0.25 * 0.8**2, weight_decay=0.3)
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)
    # Steps, decays and clip all show.
    for other in ({"steps": 2}, {"step_size": 0.25}, {"weight_decay": 0.0}, {"clip_norm": 5.0}):
        arguments = {"clip_norm": 0.5, "steps": 3, "step_size": 0.25 * 0.8**2, "weight_decay": 0.3} | other
        assert not torch.allclose(moved, by_hand(data, **arguments), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
@pytest.mark.parametrize("tau", [1, 3])
def test_one_huge_record_moves_a_step_by_its_clip_norm_at_most(value, tau):
    """By 2 G / X at the same weights; the next steps start elsewhere, which noise has to cover and does: here is none."""
    recipe = DPPASGDRecipe(**SILENT | {"num_local_steps": tau})
    data = records("c0")
    inputs = data.inputs.clone()
    inputs[3] = value
    other = TensorRecords(inputs=inputs, targets=data.targets)
    apart = torch.linalg.vector_norm(row_of(recipe, data) - row_of(recipe, other))
    assert apart > 0
    if tau == 1:
        assert apart <= 0.25 * 2 * 0.5 / 8 * (1 + 1e-6)


def worst_swap():
    """Two data sets that differ in one record, with clipped gradients as far apart as they can be."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    up, down = torch.zeros(8, 1), torch.zeros(8, 1)
    up[0], down[0] = 1e6, -1e6
    targets = torch.zeros(8, dtype=torch.int64)
    return model, TensorRecords(inputs=up, targets=targets), TensorRecords(inputs=down, targets=targets)


def test_the_terms_sensitivity_is_reached_and_not_passed():
    """The worst swap moves the mean of a batch by 2 G / X: a smaller sensitivity would be wrong."""
    model, up, down = worst_swap()
    recipe = DPPASGDRecipe(**SILENT | {"num_local_steps": 1})
    apart = torch.linalg.vector_norm(row_of(recipe, up, model=lambda: model) - row_of(recipe, down, model=lambda: model)) / 0.25
    release = recipe.terms("c0", up).release
    assert release.sensitivity == 1.0
    assert float(apart) == pytest.approx(release.sensitivity / release.expected_cohort, rel=1e-5)
    assert float(apart) <= release.sensitivity / release.expected_cohort * (1 + 1e-6)


class Remembering(nn.Linear):
    """A model that keeps in a buffer how often it was called, and multiplies its output by that."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES, bias=False)
        with torch.no_grad():
            self.weight.copy_(linear()[0].weight)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, inputs):
        outputs = super().forward(inputs) * self.calls
        self.calls = self.calls + 1
        return outputs


def test_nothing_but_weights_goes_from_one_step_to_the_next():
    """A buffer may hold what a step has seen of the records without noise."""
    recipe = DPPASGDRecipe(**SILENT | {"num_local_steps": 3})
    data = records("c0")
    torch.testing.assert_close(row_of(recipe, data, model=Remembering), row_of(recipe, data))


def test_weights_beyond_float32_are_no_reply():
    recipe = DPPASGDRecipe(**WORDS | {"learning_rate": 1e39, "num_local_steps": 2})
    strategy, _ = pair(learning_rate=1e39)
    with pytest.raises(RuntimeError, match="training failed; the node"):
        start(strategy, grid_of(recipe, FOUR), 2)
    assert strategy.statement.num_rounds == 2


# Batches


def batches_of(monkeypatch, recipe, data, replies=1):
    """The batches of a client's steps; what the steps make of them is that of the first batch."""
    seen, made, real = [], [], client_side.clipped_sum

    def watched(model, records_, positions, **arguments):
        seen.append(tuple(positions.tolist()))
        if not made:
            made.append(real(model, records_, positions, **arguments))
        return made[0]

    monkeypatch.setattr(client_side, "clipped_sum", watched)
    for seed in range(replies):
        row_of(recipe, data, seed=seed)
    return seen


def test_a_batch_of_fixed_size_holds_no_record_twice_and_is_drawn_anew_in_every_step(monkeypatch):
    recipe = DPPASGDRecipe(**WORDS | {"batch_size": 5, "num_steps": 40, "num_local_steps": 20})
    batches = batches_of(monkeypatch, recipe, records("c0", 30), replies=20)
    assert len(batches) == 400
    assert all(len(set(batch)) == len(batch) == 5 for batch in batches)
    assert len({tuple(sorted(batch)) for batch in batches}) > 390
    # Every record equally often: 400 x 5 / 30 times, 6 sigma for each of 30.
    counts = np.bincount(np.concatenate(batches), minlength=30)
    assert np.abs(counts - 2000 / 30).max() < 6 * math.sqrt(2000 / 30)


@pytest.mark.slow
def test_poisson_batches_hold_every_record_by_itself(monkeypatch):
    recipe = DPPASGDRecipe(**WORDS | {"batch_size": 6, "num_steps": 40, "num_local_steps": 20, "batch_sampling": "poisson"})
    batches = batches_of(monkeypatch, recipe, records("c0", 30), replies=20)
    sizes = np.asarray([len(batch) for batch in batches])
    # Binomial(30, 1/5): mean and variance within 5 standard errors, and far from those of a fixed size.
    assert sizes.mean() == pytest.approx(6, abs=5 * math.sqrt(4.8 / 400))
    assert sizes.var() == pytest.approx(4.8, rel=5 * math.sqrt(2 / 400))


@pytest.mark.parametrize("batch_sampling", ["fixed-size", "poisson"])
def test_the_denominator_is_the_public_batch_size(batch_sampling):
    """Equal records: a step is their gradient times the size of the batch over the public one."""
    arguments = {"batch_size": 6, "num_local_steps": 1, "batch_sampling": batch_sampling, "clip_norm": 100.0}
    recipe = DPPASGDRecipe(**SILENT | arguments)
    data = TensorRecords(inputs=torch.ones(30, FEATURES), targets=torch.zeros(30, dtype=torch.int64))
    one = mean_gradient(linear()[0].weight.detach().double(), data, 100.0).flatten()
    counted = [float(-row_of(recipe, data, seed=seed) @ one / (one @ one)) / 0.25 * 6 for seed in range(30)]
    assert counted == pytest.approx(np.rint(counted), abs=1e-3)
    sizes = set(np.rint(counted))
    assert sizes == {6} if batch_sampling == "fixed-size" else len(sizes) > 3


def test_fewer_records_than_a_batch_are_refused():
    recipe = DPPASGDRecipe(**WORDS | {"batch_size": {"c0": 4, "c1": 9}})
    assert recipe.terms("c0", FOUR["c0"]).release.expected_cohort == 4
    with pytest.raises(ValueError, match="batch_size=9: must be at most the number of records, 8"):
        recipe.terms("c1", FOUR["c1"])
    with pytest.raises(ValueError, match="batch_size: has no value for client 'c2'"):
        recipe.terms("c2", FOUR["c2"])


# Noise


def gaussian_delta(mu, epsilon):
    """The delta of K releases with sensitivity / std = mu / sqrt(K) each (Balle and Wang 2018, Theorem 8)."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))


def std_of_a_step(epsilon, delta, num_steps, clip_norm, batch_size):
    """The least sigma_m by bisection of the exact curve: mu = sqrt(K) (2 G / X) / sigma."""
    low, high = 1e-3, 100.0
    for _ in range(200):
        mu = (low + high) / 2
        low, high = (mu, high) if gaussian_delta(mu, epsilon) < delta else (low, mu)
    return math.sqrt(num_steps) * 2 * clip_norm / batch_size / low


WIDE = 20_000


def still_model():
    model = nn.Linear(10, WIDE // 10, bias=False)
    nn.init.zeros_(model.weight)
    return model


def still_data(size):
    """Records whose gradients are zero: what leaves is noise alone."""
    return TensorRecords(inputs=torch.zeros(size, 10), targets=torch.zeros(size, dtype=torch.int64))


def fits(sample, std):
    low, high = stats.chi2.interval(1 - FALSE_ALARM, sample.size)
    return bool(low < np.sum(sample**2) / std**2 < high)


@pytest.mark.parametrize("tau", [1, 10])
def test_the_sum_of_the_steps_that_the_server_sees_has_the_variance_of_tau_draws(tau):
    """Chi-square with 20,000 degrees of freedom for each device, false alarm 1e-6; 5 %, a missing 2 and a factor of tau are noticed."""
    arguments = {
        "batch_size": {"c0": 4, "c1": 8},
        "epsilon": {"c0": 2.0, "c1": 0.5},
        "num_steps": 3 * tau,
        "num_local_steps": tau,
        "clip_norm": 0.7,
    }
    strategy, recipe = pair(server={"num_clients": 2}, **arguments)
    data = {"c0": still_data(8), "c1": still_data(8)}
    grid = grid_of(recipe, data, model=still_model)
    start(strategy, grid, 1, model=still_model)
    for name, reply in zip(data, grid.received, strict=True):
        (record,) = reply.content.array_records.values()
        moved = next(iter(reversed(record.values()))).numpy().astype(np.float64)
        of_one = std_of_a_step(arguments["epsilon"][name], 1e-3, 3 * tau, 0.7, arguments["batch_size"][name])
        right = 0.25 * math.sqrt(tau) * of_one
        assert fits(moved, right)
        wrong = {right * 1.05, right / 1.05, right / 2, right * 2}
        wrong |= set() if tau == 1 else {right * math.sqrt(tau), right / math.sqrt(tau), right / math.sqrt(3)}
        assert not any(fits(moved, std) for std in wrong)


def test_the_noise_of_every_step_lies_on_the_lattice_of_its_sum():
    recipe = DPPASGDRecipe(**WORDS)
    release = recipe.terms("c0", FOUR["c0"]).release
    step = release.lattice_step(FEATURES * CLASSES)
    seen = []

    class Seen(type(release.mechanism)):
        def noise(self, like, scale, lattice, rng):
            drawn = super().noise(like, scale, lattice, rng)
            seen.append((like.numpy().copy(), drawn.numpy().copy(), scale, lattice))
            return drawn

    watched = replace(release, mechanism=Seen(noise_multiplier=release.mechanism.noise_multiplier))
    flat = FlatModel(linear())
    row = one_reply(recipe, flat.vector.clone(), FOUR["c0"], watched, model=flat, rng=np.random.default_rng(1)).row
    assert len(seen) == 2
    assert not np.array_equal(seen[0][1], seen[1][1])
    for total, drawn, scale, lattice in seen:
        assert (scale, lattice) == (release.noise_scale, step)
        for part in (total, drawn):
            np.testing.assert_array_equal(part / step, np.rint(part / step))
    # What leaves is made of the noised sums alone.
    sums = [total + drawn for total, drawn, _, _ in seen]
    np.testing.assert_array_equal(row.numpy(), sum(-0.25 * (one / 4) for one in sums).astype(np.float32))


# The pipeline


def made():
    recipe = DPPASGDRecipe(**WORDS)
    return recipe.pipeline(recipe.terms("c0", FOUR["c0"]).release, model=FlatModel(linear()), server_round=1)


def test_training_must_add_the_very_noise_that_the_pipeline_names():
    good = made()
    assert type(good.noise) is StepNoise
    copy = StepNoise(release=good.noise.release)
    with pytest.raises(ValueError, match="NoisedSteps does not add this StepNoise in every step"):
        replace(good, noise=copy)
    less = replace(good.noise.release, mechanism=replace(good.noise.release.mechanism, noise_multiplier=0.1))
    with pytest.raises(ValueError, match="does not add this StepNoise"):
        replace(good, train=replace(good.train, step_noise=StepNoise(release=less)))
    with pytest.raises(ValueError, match="does not clip its records by"):
        replace(good, train=replace(good.train, record_clip=RecordClip(clip_norm=5.0, step=good.clip.step)))
    with pytest.raises(ValueError, match="RowClip would clip what is noised already"):
        replace(good, clip=RowClip(clip_norm=0.5, step=good.clip.step))
    own = type("Own", (StepNoise,), {})(release=good.noise.release)
    with pytest.raises(ValueError, match="noise: Own may not stand here"):
        replace(good, train=replace(good.train, step_noise=own), noise=own)
    assert replace(good, noise=FullNoise(release=good.noise.release)).noise.noise_std == good.noise.noise_std


# Terms


def single_step_delta(multiplier, rate, epsilon):
    """Exact delta of one Poisson-subsampled step under replace-one, by integration: +G against -G, each there with rate q."""

    def density(sign, x):
        return (1 - rate) * stats.norm.pdf(x, 0, multiplier) + rate * stats.norm.pdf(x, sign, multiplier)

    def excess(x):
        return max(0.0, density(1, x) - math.exp(epsilon) * density(-1, x))

    return integrate.quad(excess, -1, 12 * multiplier + 2, limit=400, points=[0.0, 1.0, multiplier])[0]


TERMS = {"clip_norm": 1.0, "delta": 1e-4, "num_local_steps": 1, "num_records": 1000, "batch_size": 64}


@pytest.mark.slow
def test_poisson_noise_of_one_step_is_the_least():
    release = step_terms(**TERMS, epsilon=0.5, num_steps=1, batch_sampling="poisson").release
    multiplier = release.mechanism.noise_multiplier
    assert single_step_delta(multiplier, 0.064, 0.5) <= 1e-4 * (1 + 1e-6)
    assert single_step_delta(multiplier / 1.01, 0.064, 0.5) > 1e-4


@pytest.mark.slow
def test_poisson_noise_of_all_steps_meets_the_budget_and_one_percent_less_does_not():
    terms = step_terms(**TERMS | {"num_local_steps": 10}, epsilon=4.0, num_steps=200, batch_sampling="poisson")
    assert terms.event.event == PoissonSampledDpEvent(0.064, GaussianDpEvent(terms.release.mechanism.noise_multiplier))
    assert (terms.event.count, terms.num_replies) == (10, 20)

    def cost(multiplier):
        event = SelfComposedDpEvent(PoissonSampledDpEvent(0.064, GaussianDpEvent(multiplier)), 200)
        return accounting.epsilon(event, delta=1e-4, relation="replace-one").epsilon

    assert cost(terms.release.mechanism.noise_multiplier) <= 4.0 < cost(terms.release.mechanism.noise_multiplier / 1.01)


def test_exact_noise_is_the_closed_forms_and_zcdp_noise_the_papers():
    """K = 200, G = 1, X = 64, delta 1e-4, epsilon 4: eq. 9 asks for 0.521051; eq. 23 as printed would give 0.0469."""
    exact, paper = (
        step_terms(**TERMS | {"num_local_steps": 10}, epsilon=4.0, num_steps=200, calibration=calibration).release
        for calibration in ("exact", "zcdp")
    )
    assert exact.noise_scale / 64 == pytest.approx(std_of_a_step(4.0, 1e-4, 200, 1.0, 64), rel=2e-4)
    assert exact.noise_scale / 64 >= std_of_a_step(4.0, 1e-4, 200, 1.0, 64) * (1 - 1e-9)
    assert paper.noise_scale / 64 == pytest.approx(0.521051, abs=5e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_steps": 95, "num_local_steps": 10},
            "num_steps=95: must be a multiple of num_local_steps=10, for example 90 or 100",
        ),
        ({"num_steps": 3, "num_local_steps": 10}, "num_steps=3: must be a multiple of num_local_steps=10, for example 10"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"num_local_steps": 0}, "num_local_steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"epsilon": math.nan}, "epsilon=nan"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate_decay": 1.0}, "learning_rate_decay=1.0"),
        ({"weight_decay": 5.0}, r"weight_decay=5.0: must be a finite number >= 0 and <= 4"),
        ({"batch_sampling": "shuffled"}, "batch_sampling='shuffled': must be one of fixed-size, poisson"),
        ({"calibration": "loose"}, "calibration='loose': must be one of exact, zcdp"),
        ({"calibration": "zcdp", "batch_sampling": "poisson"}, "calibration='zcdp': must be 'exact'"),
    ],
)
def test_nonsense_is_refused_on_both_sides(arguments, message):
    with pytest.raises(ValueError, match=message):
        DPPASGDRecipe(**WORDS | arguments)
    with pytest.raises(ValueError, match=message):
        DPPASGD(**WORDS | arguments, num_clients=4, num_records=100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sampling": "poisson"}, "num_records=None: must be the public data sizes"),
        ({"epsilon": [1.0, 2.0]}, "epsilon: has 2 values"),
        ({"batch_size": [4, 4]}, "batch_size: has 2 values"),
        ({"best_by": "auc"}, "best_by='auc': must be the name of a metric that ends in loss or accuracy"),
        ({"cost_per_step": -1.0}, "cost_per_step=-1.0"),
        ({"cost_per_aggregation": math.nan}, "cost_per_aggregation=nan"),
        ({"max_cost": 0.0, "cost_per_step": 1.0}, "max_cost=0.0"),
        ({"max_cost": 10.0}, "max_cost=10.0: needs cost_per_aggregation or cost_per_step above 0"),
        (
            {"max_cost": 11.9, "cost_per_step": 1.0, "cost_per_aggregation": 10},
            "max_cost=11.9: must pay for one round, which costs a device 12",
        ),
    ],
)
def test_nonsense_is_refused_before_any_client_is_asked(arguments, message):
    with pytest.raises(ValueError, match=message):
        DPPASGD(**WORDS | arguments, num_clients=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [
        {"num_local_steps": 3},
        {"num_local_steps": 1},
        {"num_steps": 8},
        {"num_steps": 4},
        {"batch_size": 5},
        {"clip_norm": 0.6},
        {"epsilon": 1.9},
        {"calibration": "zcdp"},
        {"batch_sampling": "poisson"},
    ],
    ids=str,
)
def test_a_client_whose_own_terms_are_others_than_the_servers_does_not_reply(lie):
    """The server would state too small an epsilon; the client works by its own terms, whatever it is told."""
    _, recipe = pair()
    strategy, _ = pair(server={"num_records": 8}, **lie)
    grid = grid_of(recipe, FOUR)
    with pytest.raises(RuntimeError, match=r"the server's terms|this client's own"):
        start(strategy, grid, 1)
    for reply in grid.received:
        (record,) = reply.content.array_records.values()
        assert not next(iter(reversed(record.values()))).numpy().any()
    assert not any(context.state.config_records["flower-dp.account"]["clients"] for context in grid.contexts.values())


def test_terms_of_different_numbers_of_steps_in_a_reply_differ_where_nothing_else_does():
    """As many replies, and no noise to tell them by."""
    arguments = TERMS | {"epsilon": math.inf}
    one, ten = (step_terms(**arguments | {"num_local_steps": tau}, num_steps=20 * tau) for tau in (1, 10))
    assert (one.num_replies, one.release) == (ten.num_replies, ten.release)
    assert one.kind != ten.kind


# The server


def test_the_next_model_is_the_plain_mean_of_the_models_that_came():
    data = {name: records(name, size) for name, size in zip(FOUR, (8, 9, 10, 20), strict=True)}
    arguments = SILENT | {"batch_size": {name: len(data[name]) for name in data}, "num_local_steps": 3}
    moved = {name: by_hand(data[name], clip_norm=0.5, steps=3, step_size=0.25) for name in data}
    for missing in ((), ("c1", "c3")):
        strategy, recipe = pair(**arguments)
        gone = {list(data).index(name) + 1 for name in missing}
        tamper = lambda node, reply, gone=gone: [] if node in gone else [reply]  # noqa: E731
        final = start(strategy, grid_of(recipe, data, tamper=tamper), 1)
        heard = [moved[name] for name in data if name not in missing]
        expected = vector_of(linear()).double() + sum(heard) / len(heard)
        torch.testing.assert_close(final.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_poisson_batches_run_on_public_sizes():
    data = {name: records(name, 16) for name in FOUR}
    strategy, recipe = pair(server={"num_records": 16}, batch_sampling="poisson", num_steps=4, epsilon=0.5)
    start(strategy, grid_of(recipe, data), 2)
    statement = strategy.statement
    assert [report.replies for report in strategy.rounds] == [4, 4]
    assert 0.98 * 0.5 < statement.epsilon <= 0.5
    assert statement.accountant == "pld"
    assert "known to the client alone" in str(statement)
    # Without its amplification the same noise costs far more, which is what the paper's formula says.
    assert statement.paper.epsilon > 1


def test_honest_rows_are_never_too_long_and_longer_ones_are_refused():
    strategy, recipe = pair(weight_decay=3.0)
    start(strategy, grid_of(recipe, FOUR, num_nodes=2), 3)
    assert [report.replies for report in strategy.rounds] == [4, 4, 4]

    def longer(node, reply):
        if node == 1:
            (record,) = reply.content.array_records.values()
            name = list(record)[-1]
            array = np.full_like(record[name].numpy(), 1e3)
            record[name] = type(record[name])(array)
        return [reply]

    strategy, recipe = pair()
    start(strategy, grid_of(recipe, FOUR, tamper=longer), 3)
    assert [report.replies for report in strategy.rounds] == [3, 3, 3]


def test_the_longest_movement_by_hand():
    """Three steps of 0.5: 3 x 0.5 x (2 + 0.1 x 7) + sqrt(3) x 0.5 x 4."""
    steps = StepSchedule(num_local_steps=3, learning_rate=1.0, learning_rate_decay=0.5, weight_decay=0.1)
    longest = steps.longest(2, start=7.0, gradient=2.0, noise=4.0)
    assert longest == pytest.approx(3 * 0.5 * 2.7 + math.sqrt(3) * 0.5 * 4)


# The best model


def evaluation(numbers, name="loss"):
    """An evaluate_fn that gives these numbers, one a round, and the models that it was shown."""
    shown = []

    def evaluate(server_round, arrays):
        shown.append(arrays)
        number = numbers[server_round]
        return None if number is None else MetricRecord({name: number})

    return evaluate, shown


@pytest.mark.parametrize(
    ("numbers", "name", "best"),
    [
        ([0.9, 0.5, 0.7, 0.6], "loss", 1),
        ([0.9, 0.5, 0.5, 0.4], "loss", 3),
        ([0.1, 0.5, 0.7, 0.6], "loss", 0),
        ([0.9, None, 0.7, None], "loss", 2),
        ([math.nan, math.inf, 5.0, math.nan], "loss", 2),
        ([0.1, 0.5, 0.7, 0.6], "accuracy", 2),
        ([0.9, 0.5, 0.7, 0.6], "validation-loss", 1),
        ([0.9, 0.5, 0.7, 0.6], "validation-accuracy", 0),
        ([0.5, 0.5, 0.5, 0.5], "accuracy", 0),
        ([None, None, None, None], "loss", None),
        ([math.nan, math.nan, math.nan, math.nan], "loss", None),
    ],
)
def test_the_result_is_the_best_model_by_the_servers_evaluation_else_the_last(numbers, name, best):
    strategy, recipe = pair(server={"best_by": name, "num_clients": 1})
    evaluate, shown = evaluation(numbers, name)
    result = strategy.start(grid_of(recipe, {"c0": FOUR["c0"]}), model_arrays(linear()), num_rounds=3, evaluate_fn=evaluate)
    assert len(shown) == 4
    expected = shown[-1 if best is None else best]
    assert [value.numpy().tobytes() for value in result.arrays.values()] == [
        value.numpy().tobytes() for value in expected.values()
    ]
    # Training has gone on from the last model, not from the best.
    assert len({next(iter(arrays.values())).numpy().tobytes() for arrays in shown}) == 4
    arguments = str(strategy.statement)
    if best is None:
        assert "was chosen" not in arguments
    else:
        which = f"of round {best}" if best else "the initial one"
        assert (
            f"the resulting model, {which}, was chosen out of {sum(n is not None and math.isfinite(n) for n in numbers)} by its {name}"
            in arguments
        )
        assert "choosing by public data costs nothing" in arguments


def test_a_second_run_forgets_the_best_model_of_the_first():
    strategy, recipe = pair()
    evaluate, _ = evaluation([0.9, 0.1, 0.2, 0.3])
    strategy.start(grid_of(recipe, FOUR), model_arrays(linear()), num_rounds=3, evaluate_fn=evaluate)
    result = strategy.start(grid_of(recipe, FOUR), model_arrays(linear()), num_rounds=3)
    assert "was chosen" not in str(strategy.statement)
    assert isinstance(result.arrays, ArrayRecord)


def test_an_evaluation_without_the_number_that_decides_is_refused_before_anything_is_charged():
    strategy, recipe = pair()
    grid = grid_of(recipe, FOUR)
    evaluate, _ = evaluation([1.0], "auc")
    with pytest.raises(ValueError, match="evaluate_fn: returns auc; must have best_by='loss'"):
        strategy.start(grid, model_arrays(linear()), num_rounds=3, evaluate_fn=evaluate)
    assert not grid.received


# Two budgets

PRICES = {"cost_per_aggregation": 10.0, "cost_per_step": 1.5}


@pytest.mark.parametrize(
    ("max_cost", "num_rounds", "rounds", "why"),
    [
        (26.0, 3, 2, "the resource budget is spent: a device has spent 26, and one more round would make that 39 of max_cost=26"),
        (38.9, 3, 2, "the resource budget is spent"),
        (39.0, 4, 3, "the privacy budget is spent: num_steps=6, all of them charged and the resource budget is spent"),
        (52.0, 5, 3, "the privacy budget is spent: num_steps=6, all of them charged"),
        (None, 5, 3, "the privacy budget is spent: num_steps=6, all of them charged"),
        (52.0, 3, 3, None),
    ],
)
def test_a_run_ends_before_the_round_that_would_pass_either_budget_and_says_which(max_cost, num_rounds, rounds, why):
    strategy, recipe = pair(server={**PRICES, "max_cost": max_cost})
    grid = grid_of(recipe, FOUR)
    result = strategy.start(grid, model_arrays(linear()), num_rounds=num_rounds)
    assert len(strategy.rounds) == strategy.statement.num_rounds == rounds
    assert len(grid.received) == 4 * rounds
    ended = [line for line in strategy.statement.incidents if line.startswith("ended before round")]
    assert len(ended) == (why is not None)
    if why:
        assert ended[0].startswith(f"ended before round {rounds + 1}: {why}")
        assert ("resource" in ended[0]) == ("resource" in why)
    # What it has cost stands beside the epsilon: in the rounds, in the result and in the statement.
    spent = [13.0 * (index + 1) for index in range(rounds)]
    assert [report.numbers["cost-per-device"] for report in strategy.rounds] == spent
    assert [report.public()["cost-per-device"] for report in strategy.rounds] == spent
    assert [record["cost-per-device"] for record in result.train_metrics_clientapp.values()] == spent
    assert strategy.rules.costs(strategy.charges) == dict.fromkeys(FOUR, spent[-1])
    (line,) = [line for line in strategy.statement.incidents if line.startswith("resources:")]
    assert line.startswith(f"resources: a device spent at most {spent[-1]:g}")
    assert line.endswith(f"for {rounds} aggregations at 10 and {2 * rounds} local steps at 1.5")


def test_a_reply_that_is_lost_has_cost_its_device():
    strategy, recipe = pair(server=PRICES)
    start(strategy, grid_of(recipe, FOUR, tamper=lambda node, reply: [] if node == 1 else [reply]), 2)
    assert strategy.rules.costs(strategy.charges) == dict.fromkeys(FOUR, 26.0)


def test_without_prices_there_is_no_cost():
    strategy, recipe = pair()
    start(strategy, grid_of(recipe, FOUR), 2)
    assert not strategy.rounds[-1].numbers
    assert "cost-per-device" not in strategy.rounds[-1].public()
    assert "resources:" not in str(strategy.statement)


# The statement


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("calibration", ["exact", "zcdp"])
def test_the_statement_has_the_tight_epsilon_and_the_papers(calibration, rounds):
    """Of the steps that there were: eq. 9 with K = 2 a round, and the exact curve."""
    strategy, recipe = pair(calibration=calibration)
    start(strategy, grid_of(recipe, FOUR), rounds)
    statement = strategy.statement
    ell = math.log(1e3)
    if calibration == "zcdp":
        rho_of_all = (math.sqrt(ell + 2.0) - math.sqrt(ell)) ** 2
        sigma = 0.5 * math.sqrt(2 * 6 / rho_of_all) / 4
    else:
        sigma = std_of_a_step(2.0, 1e-3, 6, 0.5, 4)
    rho = 2 * (2 * rounds) * 0.5**2 / (4 * sigma) ** 2
    assert statement.paper.epsilon == pytest.approx(rho + 2 * math.sqrt(rho * ell), rel=2e-3)
    assert statement.paper.valid
    mu = math.sqrt(2 * rounds) * 2 * 0.5 / 4 / sigma
    assert gaussian_delta(mu, statement.epsilon) == pytest.approx(1e-3, rel=1e-2)
    if rounds == 3:
        assert statement.epsilon <= 2.0 * (1 + 1e-9)
        assert (statement.paper.epsilon if calibration == "zcdp" else statement.epsilon) == pytest.approx(2.0, rel=2e-3)
    assert statement.epsilon < statement.paper.epsilon


def test_every_device_has_its_own_budget_batch_and_cost():
    budgets, sizes = {"c0": 1.0, "c1": 4.0, "c2": 2.0, "c3": 3.0}, {"c0": 8, "c1": 4, "c2": 2, "c3": 5}
    strategy, recipe = pair(epsilon=budgets, batch_size=sizes, num_steps=2)
    start(strategy, grid_of(recipe, FOUR), 1)
    statement = strategy.statement
    assert statement.clients.each == pytest.approx(budgets, rel=2e-3)
    assert statement.epsilon == statement.clients.maximum <= 4.0
    numbers = statement.noise
    stds = [std_of_a_step(budgets[name], 1e-3, 2, 0.5, sizes[name]) for name in FOUR]
    assert numbers["least_noise_std_of_a_mean_gradient"] == pytest.approx(min(stds), rel=2e-3)
    assert numbers["largest_noise_std_of_a_mean_gradient"] == pytest.approx(max(stds), rel=2e-3)


# The planner's answer

PROBLEM = {
    "cost_per_aggregation": 100.0,
    "cost_per_step": 1.0,
    "max_cost": 1000.0,
    "epsilon": 4.0,
    "delta": 1e-4,
    "learning_rate": 0.02,
    "strong_convexity": 0.1,
    "smoothness": 1.0,
    "initial_gap": 1.0,
    "gradient_variance": 0.01,
    "dimension": FEATURES * CLASSES,
    "batch_size": 8,
    "clip_norm": 1.0,
    "num_clients": 4,
}


def test_the_planners_answer_can_be_run_as_it_is():
    """Rounds, cost, noise and epsilon are those that the planner says, and no round is missing."""
    answer = plan(PROBLEM)
    shared = {key: PROBLEM[key] for key in ("epsilon", "delta", "learning_rate", "batch_size", "clip_norm")}
    shared |= {"num_steps": answer["num_steps"], "num_local_steps": answer["steps_per_round"], "calibration": "zcdp"}
    prices = {key: PROBLEM[key] for key in ("cost_per_aggregation", "cost_per_step", "max_cost")}
    strategy, recipe = DPPASGD(**shared, **prices, num_clients=4), DPPASGDRecipe(**shared)
    start(strategy, grid_of(recipe, FOUR), answer["num_rounds"])
    assert len(strategy.rounds) == answer["num_rounds"] > 1
    assert not any(line.startswith("ended") for line in strategy.incidents)
    assert strategy.rounds[-1].numbers["cost-per-device"] == answer["cost"]
    statement = strategy.statement
    assert statement.noise["least_noise_std_of_a_mean_gradient"] == pytest.approx(answer["noise_std"], rel=1e-12)
    assert statement.paper.epsilon == pytest.approx(answer["epsilon"], rel=1e-9)
    assert statement.epsilon == pytest.approx(answer["epsilon_tight"], rel=1e-6)
