"""DP-PASGD and DP-SGD: noised local steps, their terms, a plain mean, the best model, two budgets."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord
from torch import nn

from flower_dp.clients import DPPASGDRecipe, FlatModel, TensorRecords, model_arrays
from flower_dp.clients import dp_pasgd as client_side
from flower_dp.clients.reply.parts import RecordClip, RowClip, StepNoise
from flower_dp.core.step_schedule import StepSchedule
from flower_dp.planning.dp_pasgd import plan
from flower_dp.privacy.dp_pasgd import step_terms
from flower_dp.strategies import DPPASGD
from tests import local_grids
from tests.contracts import gaussian_multiplier
from tests.local_grids import CLASSES, FEATURES, NAMES, grid_of, linear, one_reply, records, start
from tests.planning.problems import PASGD

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


# Local steps


def test_the_terms_sensitivity_is_reached_and_not_passed():
    """The worst swap moves the mean of a batch by 2 G / X: a smaller sensitivity would be wrong."""
    model, up, down = local_grids.worst_swap()
    recipe = DPPASGDRecipe(**SILENT | {"num_local_steps": 1})
    apart = torch.linalg.vector_norm(row_of(recipe, up, model=lambda: model) - row_of(recipe, down, model=lambda: model)) / 0.25
    release = recipe.terms("c0", up).release
    assert release.sensitivity == 1.0
    assert float(apart) == pytest.approx(release.sensitivity / release.expected_cohort_size, rel=1e-5)
    assert float(apart) <= release.sensitivity / release.expected_cohort_size * (1 + 1e-6)


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
    assert strategy.statement.num_charged_rounds == 2


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
    one = local_grids.mean_gradient(linear()[0].weight.detach().double(), data, 100.0).flatten()
    counted = [float(-row_of(recipe, data, seed=seed) @ one / (one @ one)) / 0.25 * 6 for seed in range(30)]
    assert counted == pytest.approx(np.rint(counted), abs=1e-3)
    sizes = set(np.rint(counted))
    assert sizes == {6} if batch_sampling == "fixed-size" else len(sizes) > 3


def test_fewer_records_than_a_batch_are_refused():
    recipe = DPPASGDRecipe(**WORDS | {"batch_size": {"c0": 4, "c1": 9}})
    assert recipe.terms("c0", FOUR["c0"]).release.expected_cohort_size == 4
    with pytest.raises(ValueError, match="batch_size=9: must be at most the number of records, 8"):
        recipe.terms("c1", FOUR["c1"])
    with pytest.raises(ValueError, match="batch_size: has no value for client 'c2'"):
        recipe.terms("c2", FOUR["c2"])


# Noise


def test_the_noise_of_every_step_lies_on_the_lattice_of_its_sum():
    recipe = DPPASGDRecipe(**WORDS)
    release = recipe.terms("c0", FOUR["c0"]).release
    watched, seen = local_grids.watching(release)
    flat = FlatModel(linear())
    row = one_reply(recipe, flat.vector.clone(), FOUR["c0"], watched, model=flat, rng=np.random.default_rng(1)).row
    assert len(seen) == 2
    assert not np.array_equal(seen[0][1], seen[1][1])
    local_grids.assert_on_lattice(seen, release, release.lattice_step(FEATURES * CLASSES))
    # What leaves is made of the noised sums alone.
    np.testing.assert_array_equal(
        row.numpy(), sum(-0.25 * ((total + drawn) / 4) for total, drawn, _, _ in seen).astype(np.float32)
    )


# The pipeline


def made():
    recipe = DPPASGDRecipe(**WORDS)
    return recipe.pipeline(recipe.terms("c0", FOUR["c0"]).release, model=FlatModel(linear()), server_round=1)


def test_training_must_add_the_very_noise_that_the_pipeline_names():
    good = made()
    assert type(good.noise) is StepNoise
    own = type("Own", (StepNoise,), {})(release=good.noise.release)
    less = replace(good.noise.release, mechanism=replace(good.noise.release.mechanism, noise_multiplier=0.1))
    for changes, message in (
        ({"noise": StepNoise(release=good.noise.release)}, "NoisedSteps does not add this StepNoise in every step"),
        ({"train": replace(good.train, step_noise=StepNoise(release=less))}, "does not add this StepNoise"),
        ({"train": replace(good.train, record_clip=RecordClip(clip_norm=5.0, step=good.clip.step))}, "does not clip its records"),
        ({"clip": RowClip(clip_norm=0.5, step=good.clip.step)}, "RowClip would clip what is noised already"),
        ({"train": replace(good.train, step_noise=own), "noise": own}, "noise: Own may not stand here"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(good, **changes)


# Terms


TERMS = {"clip_norm": 1.0, "delta": 1e-4, "num_local_steps": 1, "num_records": 1000, "batch_size": 64}


def test_exact_noise_is_the_closed_forms_and_zcdp_noise_the_papers():
    """K = 200, G = 1, X = 64, delta 1e-4, epsilon 4: eq. 9 asks for 0.521051; eq. 23 as printed would give 0.0469."""
    exact, paper = (
        step_terms(**TERMS | {"num_local_steps": 10}, epsilon=4.0, num_steps=200, calibration=calibration).release
        for calibration in ("exact", "zcdp")
    )
    assert exact.noise_scale == pytest.approx(2 * math.sqrt(200) * gaussian_multiplier(4.0, 1e-4), rel=2e-4)
    assert paper.noise_scale / 64 == pytest.approx(0.521051, abs=5e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 95, "num_local_steps": 10}, "num_steps=95: must be a multiple of num_local_steps=10, .* 90 or 100"),
        ({"num_steps": 3, "num_local_steps": 10}, "num_steps=3: must be a multiple of num_local_steps=10, for example 10"),
        ({"num_local_steps": 0}, "num_local_steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"epsilon": math.nan}, "epsilon=nan"),
        ({"learning_rate_decay": 1.0}, "learning_rate_decay=1.0"),
        ({"weight_decay": 5.0}, "weight_decay=5.0: must be a finite number >= 0 and <= 4"),
        ({"batch_sampling": "shuffled"}, "batch_sampling='shuffled': must be one of fixed-size, poisson"),
        ({"calibration": "zcdp", "batch_sampling": "poisson"}, "calibration='zcdp': must be 'exact'"),
    ],
)
def test_nonsense_is_refused_on_both_sides(arguments, message):
    for make in (DPPASGDRecipe, lambda **words: DPPASGD(**words, num_clients=4, num_records=100)):
        with pytest.raises(ValueError, match=message):
            make(**WORDS | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sampling": "poisson"}, "num_records=None: must be the public data sizes"),
        ({"batch_size": [4, 4]}, "batch_size: has 2 values"),
        ({"best_model_metric": "auc"}, "best_model_metric='auc': must be the name of a metric that ends in loss or accuracy"),
        ({"cost_per_step": -1.0}, "cost_per_step=-1.0"),
        ({"max_resource_cost": 10.0}, "max_resource_cost=10.0: needs cost_per_aggregation or cost_per_step above 0"),
        (
            {"max_resource_cost": 11.9, "cost_per_step": 1, "cost_per_aggregation": 10},
            "must pay for one round, which costs a device 12",
        ),
    ],
)
def test_nonsense_is_refused_before_any_client_is_asked(arguments, message):
    with pytest.raises(ValueError, match=message):
        DPPASGD(**WORDS | arguments, num_clients=4)


def test_terms_of_different_numbers_of_steps_in_a_reply_differ_where_nothing_else_does():
    """As many replies, and no noise to tell them by."""
    arguments = TERMS | {"epsilon": math.inf}
    one, ten = (step_terms(**arguments | {"num_local_steps": tau}, num_steps=20 * tau) for tau in (1, 10))
    assert (one.num_replies, one.release) == (ten.num_replies, ten.release)
    assert one.fingerprint != ten.fingerprint


# The server


@pytest.mark.slow
def test_poisson_batches_run_on_public_sizes():
    """Half of the steps would cost less, and without its amplification the same noise far more: what the paper's formula says."""
    data = {name: records(name, 16) for name in FOUR}
    strategy, recipe = pair(server={"num_records": 16}, batch_sampling="poisson", num_steps=4, epsilon=0.5)
    start(strategy, grid_of(recipe, data), 2)
    statement = strategy.statement
    assert 0.98 * 0.5 < statement.epsilon <= 0.5
    assert statement.accountant == "pld"
    assert statement.paper_epsilon.epsilon > 1


def test_honest_rows_are_never_too_long_and_longer_ones_are_refused():
    for changed, heard in ((None, 4), (local_grids.filled(1e3), 3)):
        strategy, recipe = pair(weight_decay=3.0)
        start(strategy, grid_of(recipe, FOUR, tamper=changed), 3)
        assert [report.replies for report in strategy.rounds] == [heard] * 3


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
        ([0.9, 0.5, 0.5, 0.6], "loss", 1),
        ([0.1, 0.5, 0.7, 0.6], "validation-loss", 0),
        ([0.9, None, 0.7, math.nan], "loss", 2),
        ([0.1, 0.5, 0.7, 0.6], "accuracy", 2),
        ([None, math.nan, None, None], "loss", None),
    ],
)
def test_the_result_is_the_best_model_by_the_servers_evaluation_else_the_last(numbers, name, best):
    strategy, recipe = pair(server={"best_model_metric": name, "num_clients": 1})
    evaluate, shown = evaluation(numbers, name)
    grid = grid_of(recipe, {"c0": FOUR["c0"]})
    result = strategy.start(grid, model_arrays(linear()), num_rounds=3, evaluate_fn=evaluate)
    bytes_of = [[value.numpy().tobytes() for value in arrays.values()] for arrays in (*shown, result.arrays)]
    assert bytes_of[-1] == bytes_of[3 if best is None else best]
    assert len({*map(tuple, bytes_of)}) == 4  # training has gone on from the last model, not from the best
    said = " ".join(str(strategy.statement).split())
    if best is None:
        assert "was chosen" not in said
    else:
        which, many = f"of round {best}" if best else "the initial one", sum(n is not None and math.isfinite(n) for n in numbers)
        chosen = f"The final model, {which}, was chosen out of {many} by its {name} on data assumed to be public: such a choice costs nothing."
        assert chosen in said


def test_an_evaluation_without_the_number_that_decides_is_refused_before_anything_is_charged():
    strategy, recipe = pair()
    grid = grid_of(recipe, FOUR)
    evaluate, _ = evaluation([1.0], "auc")
    with pytest.raises(ValueError, match="evaluate_fn: returns auc; must have best_model_metric='loss'"):
        strategy.start(grid, model_arrays(linear()), num_rounds=3, evaluate_fn=evaluate)
    assert not grid.received


# Two budgets

PRIVACY = "the privacy budget is spent: num_steps=6, all of them charged"
RESOURCES = "the resource budget is spent: a device has spent {}, and one more round would make that {} of max_resource_cost={}"


@pytest.mark.parametrize(
    ("max_resource_cost", "num_rounds", "rounds", "why"),
    [
        (26.0, 3, 2, RESOURCES.format(26, 39, 26)),
        (39.0, 4, 3, f"{PRIVACY} and {RESOURCES.format(39, 52, 39)}"),
        (None, 5, 3, PRIVACY),
        (52.0, 3, 3, None),
    ],
)
def test_a_run_ends_before_the_round_that_would_pass_either_budget_and_says_which(max_resource_cost, num_rounds, rounds, why):
    """The reply of the first device never arrives, and costs what the others do."""
    strategy, recipe = pair(server={"cost_per_aggregation": 10.0, "cost_per_step": 1.5, "max_resource_cost": max_resource_cost})
    grid = grid_of(recipe, FOUR, tamper=lambda node, reply: [] if node == 1 else [reply])
    result = strategy.start(grid, model_arrays(linear()), num_rounds=num_rounds)
    assert len(strategy.rounds) == strategy.statement.num_charged_rounds == rounds
    assert len(grid.received) == 3 * rounds
    ended = [line for line in strategy.statement.incidents if line.startswith("ended before round")]
    assert [line.partition(";")[0] for line in ended] == ([f"ended before round {rounds + 1}: {why}"] if why else [])
    # What it has cost stands beside the epsilon: in the rounds, in the result and in the statement.
    spent = [13.0 * (index + 1) for index in range(rounds)]
    assert [report.public()["cost-per-device"] for report in strategy.rounds] == spent
    assert [record["cost-per-device"] for record in result.train_metrics_clientapp.values()] == spent
    assert strategy.rules.costs(strategy.charges) == dict.fromkeys(FOUR, spent[-1])
    (line,) = [line for line in strategy.statement.incidents if line.startswith("Resources:")]
    assert line.startswith(f"Resources: a device spent at most {spent[-1]:g}")
    assert line.endswith(f"for {rounds} aggregations at 10 and {2 * rounds} local steps at 1.5")


# The planner's answer

PROBLEM = PASGD | {"learning_rate": 0.02, "initial_gap": 1.0, "dimension": FEATURES * CLASSES, "batch_size": 8, "num_clients": 4}


def test_the_planners_answer_can_be_run_as_it_is():
    """Rounds, cost, noise and epsilon are those that the planner says, and no round is missing."""
    answer = plan(PROBLEM)
    shared = {key: PROBLEM[key] for key in ("epsilon", "delta", "learning_rate", "batch_size", "clip_norm")}
    shared |= {"num_steps": answer["num_steps"], "num_local_steps": answer["steps_per_round"], "calibration": "zcdp"}
    prices = {key: PROBLEM[key] for key in ("cost_per_aggregation", "cost_per_step", "max_resource_cost")}
    strategy, recipe = DPPASGD(**shared, **prices, num_clients=4), DPPASGDRecipe(**shared)
    start(strategy, grid_of(recipe, FOUR), answer["num_rounds"])
    assert len(strategy.rounds) == answer["num_rounds"] > 1
    assert not any(line.startswith("ended") for line in strategy.incidents)
    assert strategy.rounds[-1].numbers["cost-per-device"] == answer["cost"]
    statement = strategy.statement
    assert statement.noise["min_noise_std_of_a_mean_gradient"] == pytest.approx(answer["noise_std"], rel=1e-12)
    assert statement.paper_epsilon.epsilon == pytest.approx(answer["epsilon"], rel=1e-9)
    assert statement.epsilon == pytest.approx(answer["epsilon_proved"], rel=1e-6)
