import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from scipy import optimize, stats
from torch import nn

from flower_dp.clients import FlatModel, NbAFLRecipe, ProximalTerm, TensorRecords, Training, model_arrays
from flower_dp.clients.training.draws import batch_seed
from flower_dp.privacy.nbafl import downlink_noise_std, uplink_noise_std
from flower_dp.strategies import NbAFL
from tests.local_grids import CLASSES, FEATURES, NAMES, grid_of, linear, one_reply, records, start, vector_of

FOUR = {name: records(name) for name in NAMES[:4]}
TRAINING = Training(learning_rate=0.1, batch_size=4, regularizers=(ProximalTerm(strength=0.5),))
NOISE = {"clip_norm": 1.5, "paper_epsilon": 2.0, "delta": 0.01, "uplink_exposures": 4}
QUIET = NOISE | {"paper_epsilon": math.inf}


def pair(*, training=TRAINING, server=None, min_records=8, **arguments):
    arguments = NOISE | arguments
    recipe = NbAFLRecipe(training=training, min_records=min_records, **arguments)
    return NbAFL(**{"num_clients": 4, "num_records": 8, **arguments, **(server or {})}), recipe


def reply(recipe, data, *, seed=0, model=None, start_at=None):
    flat = FlatModel(model or linear())
    vector = flat.vector.clone() if start_at is None else start_at
    rng = torch.Generator().manual_seed(seed)
    release = recipe.terms("c0", data).release
    return one_reply(recipe, vector, data, release, model=flat, seed=7, rng=rng).row.to(torch.float64)


def exact_epsilon(multiplier, delta):
    """Balle & Wang's exact curve, solved with scipy, for noise std / sensitivity; log-space, for very large values."""

    def excess(epsilon):
        first = stats.norm.logcdf(1 / (2 * multiplier) - epsilon * multiplier)
        second = epsilon + stats.norm.logcdf(-1 / (2 * multiplier) - epsilon * multiplier)
        return math.exp(first) - math.exp(second) - delta

    return optimize.brentq(excess, 0.0, 2 / multiplier**2 + 20 / multiplier)


# Local training


@pytest.mark.parametrize("wrapped", [False, True])
def test_proximal_term_pulls_towards_the_global_model(wrapped):
    """Three steps by hand: w - eta (g + mu (w - w_global)); also where plain steps have a short cut."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES)) if wrapped else linear()
    data = records("c0")
    flat = FlatModel(module)
    origin = flat.vector.clone()
    training = Training(learning_rate=0.3, batch_size=8, num_local_steps=3, regularizers=(ProximalTerm(strength=0.7),))
    expected = origin.clone()
    parameters = list(module.parameters())
    for _ in range(3):
        flat.vector.copy_(expected)
        loss = nn.functional.cross_entropy(module(data.inputs), data.targets)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        expected = expected - 0.3 * (gradient + 0.7 * (expected - origin))
    flat.vector.copy_(origin)
    training.train(flat, data, 1, torch.Generator().manual_seed(0))
    torch.testing.assert_close(flat.vector, expected)
    flat.vector.copy_(origin)
    Training(learning_rate=0.3, batch_size=8, num_local_steps=3).train(flat, data, 1, torch.Generator().manual_seed(0))
    assert (flat.vector - origin).norm() > 1.1 * (expected - origin).norm()


def test_a_negative_proximal_coefficient_is_refused():
    with pytest.raises(ValueError, match=r"strength=-1\.0"):
        ProximalTerm(strength=-1.0)


# The reply


@pytest.mark.parametrize(("clip_norm", "clips"), [(0.2, True), (50.0, False)])
def test_whole_weights_are_clipped_not_the_update(clip_norm, clips):
    _, recipe = pair(**QUIET | {"clip_norm": clip_norm})
    flat = FlatModel(linear())
    origin = flat.vector.clone()
    TRAINING.train(flat, FOUR["c0"], 1, torch.Generator().manual_seed(7))
    trained = flat.vector.clone()
    row = reply(recipe, FOUR["c0"], start_at=origin)
    expected = trained.double() / max(1.0, float(trained.double().norm()) / clip_norm)
    torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-7)
    assert row.norm() <= clip_norm
    assert (abs(float(row.norm()) - clip_norm) < 1e-5) == clips


@pytest.mark.parametrize("huge", [1e30, math.inf, math.nan])
def test_training_that_breaks_replies_with_the_global_model(huge):
    _, recipe = pair(**QUIET)
    data = TensorRecords(inputs=torch.full((8, FEATURES), huge), targets=torch.zeros(8, dtype=torch.int64))
    origin = vector_of(linear())
    row = reply(recipe, data, start_at=origin)
    assert row.isfinite().all()
    assert row.norm() <= 1.5


class Counting(nn.Linear):
    """Notes how many records every batch has, and takes no fewer than some."""

    def __init__(self, fewest):
        super().__init__(FEATURES, CLASSES)
        self.fewest, self.seen = fewest, SimpleNamespace(sizes=[])  # plain lists are restored

    def forward(self, inputs):
        self.seen.sizes.append(len(inputs))
        if len(inputs) < self.fewest:
            raise RuntimeError("too few")
        return super().forward(inputs)


def test_a_large_batch_size_costs_no_batch_of_made_up_records():
    """With a batch size above any data size, a step is on all records; the check of the model takes two."""
    model = Counting(1)
    _, recipe = pair(training=Training(learning_rate=0.1, batch_size=10**9), **QUIET)
    reply(recipe, records("c0"), model=model)
    assert model.seen.sizes == [2, 8]


def test_a_model_that_takes_whole_batches_alone_is_checked_with_one():
    model = Counting(4)
    _, recipe = pair(training=Training(learning_rate=0.1, batch_size=4), **QUIET)
    origin = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    row = reply(recipe, records("c0"), model=model)
    assert model.seen.sizes == [2, 4, 4, 4]
    assert not torch.equal(row, origin.to(torch.float64))


@pytest.mark.parametrize("wrong", [1.0, 1.05, 0.95])
def test_measured_uplink_noise_has_the_papers_std_and_a_wrong_one_is_rejected(wrong):
    """36,000 draws; 5 sigma of the variance, false alarm below 1e-6."""
    _, recipe = pair()
    model = nn.Linear(FEATURES, 300, bias=False)
    nn.init.zeros_(model.weight)
    data = TensorRecords(inputs=torch.zeros(8, FEATURES), targets=torch.zeros(8, dtype=torch.int64))
    rows = torch.cat([reply(recipe, data, seed=seed, model=model) for seed in range(20)]).numpy()
    by_hand = math.sqrt(2 * math.log(1.25 / 0.01)) * 4 * (2 * 1.5 / 8) / 2.0
    ratio = (rows**2).mean() / (wrong * by_hand) ** 2
    assert (abs(ratio - 1) < 5 * math.sqrt(2 / rows.size)) == (wrong == 1.0)


def test_terms_are_those_of_replaced_weights():
    """All records of a client together move its clipped weights by 2 C."""
    _, recipe = pair()
    release = recipe.terms("c0", FOUR["c0"]).release
    assert (release.unit, release.relation, release.sensitivity) == ("client", "replace-one", 2 * 1.5)


def test_replies_lie_on_a_lattice_that_broadcasts_hide():
    """Averages are rounded to the step of a release: what clients send is a thousand times finer."""
    _, recipe = pair()
    release = recipe.terms("c0", FOUR["c0"]).release
    model = FlatModel(linear())
    clip = recipe.pipeline(release, model=model, server_round=1).clip
    assert clip.step == release.lattice_step(model.layout.size) / 2**10


def test_noise_follows_from_the_clients_own_budget():
    recipe = NbAFLRecipe(training=TRAINING, min_records=8, **NOISE | {"paper_epsilon": {"c0": 1.0, "c1": 10.0}})
    strong, weak = (recipe.terms(name, FOUR[name]).release.noise_scale for name in ("c0", "c1"))
    assert strong == pytest.approx(10 * weak)
    assert weak == uplink_noise_std(uplink_exposures=4, epsilon=10.0, delta=0.01, clip_norm=1.5, min_records=8)


def test_a_client_with_fewer_records_than_the_noise_is_made_for_does_not_reply():
    _, recipe = pair(min_records=9)
    strategy, _ = pair(server={"num_records": 9})
    grid = grid_of(recipe, FOUR)
    with pytest.raises(RuntimeError, match="no client has sent a usable update"):
        start(strategy, grid, 1)
    assert strategy.rounds[0].replies == 0


# The average


def test_average_of_weights_by_public_size_renormalised_over_who_replied():
    sizes = {"c0": 8, "c1": 10, "c2": 12, "c3": 14}
    data = {name: records(name, size) for name, size in sizes.items()}
    rows = {}
    for name, local in data.items():
        recipe = NbAFLRecipe(training=TRAINING, min_records=8, **QUIET)
        flat = FlatModel(linear())
        release = recipe.terms(name, local).release
        seed = batch_seed(0, 1, name)
        made = one_reply(recipe, flat.vector.clone(), local, release, model=flat, seed=seed, rng=torch.Generator())
        rows[name] = made.row.double()
    for lost in ((), (2,), (1, 2, 3)):
        strategy, recipe = pair(server={"num_records": sizes}, **QUIET)
        grid = grid_of(recipe, data, tamper=lambda node, message, lost=lost: [] if node in lost else [message])
        final = start(strategy, grid, 1).double()
        there = {name: sizes[name] for index, name in enumerate(data, 1) if index not in lost}
        expected = sum(size * rows[name] for name, size in there.items()) / sum(there.values())
        torch.testing.assert_close(final, expected, rtol=1e-5, atol=1e-6)


def test_a_round_without_any_reply_leaves_the_model_as_it_was():
    finals = []
    for num_rounds in (1, 2):
        strategy, recipe = pair(**QUIET)
        once = lambda node, message, strategy=strategy: [] if strategy.rounds else [message]  # noqa: E731
        finals.append(start(strategy, grid_of(recipe, FOUR, tamper=once), num_rounds))
    assert [report.replies for report in strategy.rounds] == [4, 0]
    torch.testing.assert_close(*finals, rtol=0, atol=0)


def test_same_result_for_one_client_a_node_and_for_many():
    finals = []
    for num_nodes in (4, 2, 1):
        strategy, recipe = pair(**QUIET)
        finals.append(start(strategy, grid_of(recipe, FOUR, num_nodes=num_nodes), 3))
        assert [report.replies for report in strategy.rounds] == [4, 4, 4]
    torch.testing.assert_close(finals[0], finals[1])
    torch.testing.assert_close(finals[0], finals[2])


@pytest.mark.slow
def test_k_of_n_asks_k_at_random_and_not_more_than_the_budget():
    strategy, recipe = pair(server={"cohort_size": 2, "num_replies": 3}, uplink_exposures=3)
    start(strategy, grid_of(recipe, FOUR), 12)
    cohorts = [report.cohort_size for report in strategy.rounds]
    assert max(cohorts) == 2
    assert sum(cohorts) <= 12
    assert all(ledger.num_charges <= 3 for ledger in strategy.rules.ledgers(strategy.charges).values())


# Downlink noise


def wide():
    """A model that training leaves at zero, so that what comes out of a round is noise alone: 3,000 coordinates."""
    model = nn.Linear(FEATURES, 500, bias=False)
    nn.init.zeros_(model.weight)
    return model


ZEROS = {name: TensorRecords(inputs=torch.zeros(8, FEATURES), targets=torch.zeros(8, dtype=torch.int64)) for name in NAMES[:4]}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [1.0, 1.05, 0.95])
def test_measured_noise_of_broadcasts_and_a_wrong_one_is_rejected(wrong):
    """One exposure and 30 rounds: sigma_D^2 + sigma_U^2 / N; 8 runs of 3,000 draws, 5 sigma of the variance."""
    arguments = {"uplink_exposures": 1}
    up = math.sqrt(2 * math.log(125)) * (2 * 1.5 / 8) / 2.0
    down = 2 * math.sqrt(2 * math.log(125)) * 1.5 * math.sqrt(30**2 - 4) / (8 * 4 * 2.0)
    values = []
    for _ in range(8):
        strategy, recipe = pair(server={"num_replies": 1}, **arguments)
        grid = grid_of(recipe, ZEROS, model=wide)
        strategy.plan(30)
        assert strategy.rules.downlink_noise_std == pytest.approx(down)
        # The plan is for 30 rounds, of which the first is run.
        messages = strategy.configure_train(1, model_arrays(wide()), ConfigRecord(), grid)
        model, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
        values.append(model["weight"].numpy().ravel().astype(np.float64))
    measured = (np.concatenate(values) ** 2).mean() / (wrong**2 * (down**2 + up**2 / 4))
    assert (abs(measured - 1) < 5 * math.sqrt(2 / 24000)) == (wrong == 1.0)


def planned(num_rounds=30, **server):
    strategy, _ = pair(server=server, uplink_exposures=1)
    strategy.plan(num_rounds)
    return strategy


def test_downlink_noise_is_the_planners():
    strategy = planned(num_records=8, cohort_size=2)
    assert strategy.rules.downlink_noise_std == downlink_noise_std(
        num_clients=4, cohort_size=2, num_rounds=30, uplink_exposures=1, epsilon=2.0, delta=0.01, clip_norm=1.5, min_records=8
    )
    assert strategy.rules.added_noise_std([0.5, 0.5]) == pytest.approx(strategy.rules.downlink_noise_std)


@pytest.mark.parametrize("num_rounds", [1, 30])
@pytest.mark.parametrize("parts", [[0.25] * 4, [1 / 3] * 3, [0.5, 0.5], [1.0], [0.7, 0.1, 0.1, 0.1], [0.9, 0.1]])
def test_missing_and_unequal_clients_never_lower_the_ratio_of_noise_to_a_clients_part(parts, num_rounds):
    strategy = planned(num_rounds)
    assert (strategy.rules.downlink_noise_std > 0) == (num_rounds == 30)
    std, up = strategy.rules.added_noise_std(parts), strategy.rules.uplink_noise_std
    ratio = math.sqrt(std**2 + up**2 * sum(part**2 for part in parts)) / max(parts)
    full = math.sqrt(strategy.rules.downlink_noise_std**2 + up**2 / 4) / 0.25
    assert ratio >= full * (1 - 1e-12)
    if parts == [0.25] * 4:
        assert std == pytest.approx(strategy.rules.downlink_noise_std, abs=1e-9)


# The statement


@pytest.mark.slow
def test_all_adversaries_are_stated_with_what_clipping_proves():
    strategy, recipe = pair()
    start(strategy, grid_of(recipe, FOUR), 4)
    statement = strategy.statement
    uplink, inside, downlink = statement.adversaries
    up = uplink_noise_std(uplink_exposures=4, epsilon=2.0, delta=0.01, clip_norm=1.5, min_records=8)
    assert uplink.epsilon == pytest.approx(exact_epsilon(up / (2 * 1.5) / math.sqrt(4), 0.01), rel=1e-4)
    # An average over 4 of sensitivity 2 C / 4 with noise of sigma_U / 2: as if the clip were halved.
    assert strategy.rules.downlink_noise_std == 0.0
    assert downlink.epsilon == pytest.approx(exact_epsilon(2 * up / (2 * 1.5) / math.sqrt(4), 0.01), rel=1e-4)
    # A participant knows a quarter of that noise, in variance.
    assert inside.epsilon == pytest.approx(exact_epsilon(math.sqrt(3) * up / (2 * 1.5) / math.sqrt(4), 0.01), rel=1e-4)
    assert inside.noise_std == pytest.approx(up / 2 * math.sqrt(3 / 4))
    assert statement.epsilon == uplink.epsilon > inside.epsilon > downlink.epsilon
    assert statement.clients.each == pytest.approx(dict.fromkeys(FOUR, uplink.epsilon))
    text = str(statement)
    assert "Against the server: every message" in text
    assert "Against outsiders: the 4 broadcasts" in text
    names = ["the server", "participants", "outsiders"]
    assert [entry["name"] for entry in statement.to_dict()["adversaries"]] == names


@pytest.mark.slow
def test_downlink_charges_what_was_there_when_clients_are_missing():
    """Three of four replies lost: the average is one client's weights; the server's noise makes up for it."""
    costs = []
    for lost in ((), (2, 3, 4)):
        strategy, recipe = pair(uplink_exposures=1)
        grid = grid_of(recipe, FOUR, tamper=lambda node, message, lost=lost: [] if node in lost else [message])
        start(strategy, grid, 1)
        costs.append(strategy.statement.adversaries[2].epsilon)
    assert strategy.rules.broadcasts(strategy.state).largest_added_std == pytest.approx(
        strategy.rules.uplink_noise_std * math.sqrt(4 - 1)
    )
    assert costs[1] == pytest.approx(costs[0], rel=1e-6)


@pytest.mark.parametrize(("claimed", "exact"), [(50.0, 166.0), (60.0, 230.0), (100.0, 592.0)])
def test_one_exposure_costs_what_exact_accounting_says_under_the_papers_assumption(claimed, exact):
    """sigma_U for one exposure at delta 0.01 is exactly 166/230/592 at sensitivity 2C/m; clipping proves only 2C."""
    std = uplink_noise_std(uplink_exposures=1, epsilon=claimed, delta=0.01, clip_norm=20.0, min_records=100)
    assert exact_epsilon(std / (2 * 20.0 / 100), 0.01) == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("claimed", "exact"), [(50.0, 11.9), (60.0, 15.7), (100.0, 34.8)])
def test_exact_composition_under_the_papers_assumption_is_told(claimed, exact):
    """Exact composition of L = 25 exposures."""
    recipe = NbAFLRecipe(
        training=TRAINING, clip_norm=20.0, paper_epsilon=claimed, delta=0.01, uplink_exposures=25, min_records=100
    )
    data = {"c0": records("c0", 100)}
    arguments = {"clip_norm": 20.0, "paper_epsilon": claimed, "delta": 0.01, "uplink_exposures": 25}
    strategy = NbAFL(num_clients=1, num_records=100, **arguments)
    start(strategy, grid_of(recipe, data), 25)
    answer = float(re.search(r"exact composition under it gives ([\d.]+)", strategy.statement.adversaries[0].paper.reason)[1])
    assert answer == pytest.approx(exact, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("claimed", [50.0, 1e4])
def test_huge_tight_epsilon_is_printed_and_the_paper_flagged(claimed):
    strategy, recipe = pair(paper_epsilon=claimed)
    start(strategy, grid_of(recipe, FOUR), 4)
    statement = strategy.statement
    assert statement.private
    multiplier = uplink_noise_std(uplink_exposures=4, epsilon=claimed, delta=0.01, clip_norm=1.5, min_records=8) / 3.0
    # (1/2) (D/s)^2 plus a few D/s, D the distance of four replies.
    assert statement.epsilon == pytest.approx(2 / multiplier**2, abs=10 / multiplier)
    uplink = statement.adversaries[0].paper
    assert uplink.epsilon == claimed
    assert not uplink.valid
    assert f"epsilon < 1 for an exposure, which is {claimed / 4:.4g} here" in uplink.reason
    assert "2 C / m" in uplink.reason


@pytest.mark.slow
def test_paper_formula_is_in_its_range_for_small_epsilon_and_flagged_beyond_its_exposures():
    strategy, recipe = pair()
    start(strategy, grid_of(recipe, FOUR), 4)
    assert strategy.statement.adversaries[0].paper.valid
    assert "leans on an assumption" in strategy.statement.adversaries[0].paper.reason
    arguments = {"uplink_exposures": 3}
    recipe = NbAFLRecipe(training=TRAINING, min_records=8, num_replies=4, **NOISE | arguments)
    strategy, _ = pair(server={"num_replies": 4}, **arguments)
    start(strategy, grid_of(recipe, FOUR), 4)
    paper = strategy.statement.adversaries[0].paper
    assert not paper.valid
    assert "4 exposures, and the noise is made for 3" in paper.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paper_epsilon": -1.0}, r"paper_epsilon=-1\.0"),
        ({"delta": 0.0}, r"delta=0\.0"),
        ({"clip_norm": 0.0}, r"clip_norm=0\.0"),
        ({"uplink_exposures": 0}, "uplink_exposures=0"),
        ({"cohort_size": 9}, "cohort_size=9"),
        ({"min_records": 9}, "min_records=9"),
        ({"num_records": [8, 8]}, "num_records: has 2 values"),
        ({"aggregation": "best"}, "aggregation='best'"),
    ],
)
def test_nonsense_is_refused_before_any_client_is_asked(arguments, message):
    with pytest.raises(ValueError, match=message):
        NbAFL(**{"num_clients": 4, "num_records": 8, **NOISE, **arguments})
