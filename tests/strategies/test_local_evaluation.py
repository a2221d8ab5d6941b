"""Private evaluation where every message is private on its own: values, noise, budgets, accounts, statement. Numbers by hand."""

import copy
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, LaplaceDpEvent
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from torch import nn

from flower_dp import wire
from flower_dp.clients import (
    ClientPolicy,
    DPFedPAQRecipe,
    DPPASGDRecipe,
    EvaluationBudget,
    FedSGDDPCRecipe,
    FlatModel,
    LocalDPClient,
    NbAFLRecipe,
    RecordMetrics,
    ScaffoldRecipe,
    TensorRecords,
    Training,
    client_app,
)
from flower_dp.clients.local.evaluation import record_loss_and_accuracy
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.sampling import FullSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.privacy.fedsgd_dpc import gradient_terms
from flower_dp.strategies import (
    DPPASGD,
    DPFedAvg,
    DPFedPAQ,
    FedSGDDPC,
    LocalEvaluation,
    NbAFL,
    PrivateEvaluation,
    Scaffold,
)
from tests.adversaries.fuzzing import examples
from tests.asks import ANSWERED, GONE, config_of, evaluated, forged, forged_total, own_ask, told
from tests.charges import Kept, assert_charges_are_the_ledgers
from tests.contracts import SAMPLERS
from tests.grids import LocalGrid
from tests.local_grids import context_of, evaluated_row, private_row
from tests.stock import arrays

CLIENTS, SIZE = 4, 40
NAMES = [f"c{number}" for number in range(CLIENTS)]
RIGHT = {"c0": 10, "c1": 20, "c2": 30, "c3": 40}  # of 40 records
PLENTY = EvaluationBudget(epsilon=1e7, num_evaluations=2)  # next to no noise
BUDGET = EvaluationBudget(epsilon=0.5, num_evaluations=2)
EPSILON = 0.7  # of training
STEPS = FedPAQSteps(
    learning_rate=1e-6, num_local_steps=2, batch_size=4, clip_norm=1.0, sensitivity="per-step", decay_iterations=None
)
PAQ = {"steps": STEPS, "epsilon": EPSILON, "delta": 1e-3, "quantization_levels": None}
PASGD = {"batch_size": 16, "clip_norm": 1.0, "epsilon": EPSILON, "delta": 1e-3}
PASGD |= {"num_steps": 6, "num_local_steps": 2, "learning_rate": 1e-6}
NBAFL = {"clip_norm": 2.0, "paper_epsilon": 1.0, "delta": 1e-3, "uplink_exposures": 3}
SGD = {"mechanism": "laplace", "clip_norm": 1.0, "epsilon": EPSILON}
GAUSSIAN = {"mechanism": "gaussian", "clip_norm": 1.0, "epsilon": EPSILON, "delta": 1e-3}
TURN = {"cohort_size": CLIENTS, "learning_rate": 1e-6, "num_clients": CLIENTS, "num_records": SIZE, "num_replies": 3}


def sgd(arguments, **more):
    return (
        lambda **options: FedSGDDPC(**arguments, **TURN, **more, **options),
        FedSGDDPCRecipe(**arguments, num_replies=3, num_records=SIZE, **more),
    )


def paq(strategy, recipe):
    arguments = {"num_clients": CLIENTS, "num_records": SIZE, "num_replies": 3, "sampling": FullSampling()}
    return lambda **options: strategy(**PAQ, **arguments, **options), recipe(**PAQ, num_replies=3)


METHODS = {
    "fedsgd-dpc laplace": sgd(SGD),
    "fedsgd-dpc gaussian": sgd(GAUSSIAN),
    "fedsgd-dpc add-or-remove": sgd(GAUSSIAN, relation="add-or-remove-one"),
    "dp-fedpaq": paq(DPFedPAQ, DPFedPAQRecipe),
    "scaffold": paq(Scaffold, ScaffoldRecipe),
    "dp-pasgd": (lambda **options: DPPASGD(**PASGD, num_clients=CLIENTS, num_records=SIZE, **options), DPPASGDRecipe(**PASGD)),
    "nbafl": (
        lambda **options: NbAFL(**NBAFL, num_clients=CLIENTS, num_records=SIZE, **options),
        NbAFLRecipe(**NBAFL, min_records=SIZE, training=Training(learning_rate=1e-6)),
    ),
}


def data(name, size=SIZE):
    targets = torch.cat([torch.zeros(RIGHT[name]), torch.ones(SIZE - RIGHT[name])]).long()
    return TensorRecords(inputs=torch.ones(size, 2), targets=targets[:size])


def client_of(context, recipe, budget, *, nodes=CLIENTS, **arguments):
    part = int(context.node_config["partition-id"])
    hosted = {name: data(name) for name in NAMES[part::nodes]}
    return LocalDPClient(model=nn.Linear(2, 2), clients=hosted, recipe=recipe, evaluation=budget, device="cpu", **arguments)


def grid_of(recipe, budget=BUDGET, *, nodes=CLIENTS, **arguments):
    return LocalGrid(client_app(lambda context: client_of(context, recipe, budget, nodes=nodes, **arguments)), nodes)


def flat():
    """A model that says class 0 of every record."""
    return arrays(weight=np.array([[1, 1], [0, 0]], np.float32), bias=np.zeros(2, np.float32))


def opened(method, grid, budget=BUDGET, *, metrics=None, **plan):
    """A strategy whose clients have registered."""
    metrics = metrics or {"loss": 4.0, "accuracy": 1.0}
    strategy = METHODS[method][0](evaluation=LocalEvaluation(budget=budget, metrics=metrics, **plan))
    strategy.plan(3)
    strategy._known_clients(grid)
    return strategy


def evaluate(strategy, grid, server_round=1):
    messages = strategy.configure_evaluate(server_round, flat(), {}, grid)
    return strategy.aggregate_evaluate(server_round, list(grid.send_and_receive(messages)))


every_method = pytest.mark.parametrize("method", METHODS)


# Values


@pytest.mark.slow
@pytest.mark.parametrize(("method", "nodes"), [(method, (CLIENTS, 2)[place % 2]) for place, method in enumerate(METHODS)])
def test_values_are_those_of_the_clients_records(method, nodes):
    grid = grid_of(METHODS[method][1], PLENTY, nodes=nodes)
    reported = dict(evaluate(opened(method, grid, PLENTY), grid))
    assert reported["accuracy"] == pytest.approx(0.625, abs=1e-4)
    # Logits (2, 0): log(1 + e^-2) for class 0, that and 2 for class 1.
    assert reported["loss"] == pytest.approx(math.log1p(math.exp(-2)) + 2 * (1 - 0.625), abs=1e-4)


def test_a_metric_of_ones_own_is_clipped_to_its_bound_record_by_record():
    values = iter([3.0, -1.0, math.nan, 0.5] * (SIZE // 4) * CLIENTS)
    metrics = RecordMetrics(names=("age",), of=lambda outputs, target: {"age": next(values)})
    grid = grid_of(METHODS["dp-fedpaq"][1], PLENTY, record_metrics=metrics)
    reported = evaluate(opened("dp-fedpaq", grid, PLENTY, metrics={"age": 2.0}), grid)
    assert dict(reported)["age"] == pytest.approx((2.0 + 0.0 + 2.0 + 0.5) / 4, abs=1e-4)


def test_the_standard_error_is_that_of_the_noise_where_all_clients_are_there():
    grid = grid_of(METHODS["fedsgd-dpc laplace"][1])
    reported = dict(evaluate(opened("fedsgd-dpc laplace", grid), grid))
    # Laplace scale 2 x 2 / 0.5 on a sum of 40; the mean of 4 clients; two metrics share the norm, and [-1, 1] is 2 wide.
    error = math.sqrt(2) * 8 / 40 / math.sqrt(4) * 2 / 2
    assert reported["accuracy-standard-error"] == pytest.approx(error)
    assert reported["loss-standard-error"] == pytest.approx(4 * error)


# Noise


@pytest.mark.parametrize(("relation", "sensitivity"), [("replace-one", 2.0), ("add-or-remove-one", 1.0)])
def test_noise_is_of_the_right_scale_and_a_wrong_one_is_rejected(relation, sensitivity):
    """80,000 draws: the relative error of the std is sqrt(5 / 4 / 80000) = 0.4 %; 2.5 % off has a probability below 1e-9."""
    training = gradient_terms(**GAUSSIAN, num_replies=3, num_records=SIZE, relation=relation)
    release = BUDGET.terms("c0", training).release
    rng = np.random.default_rng(3)
    draws = np.concatenate([private_row(np.zeros((SIZE, 8000)), release, rng) for _ in range(10)])
    # Two evaluations for 0.5: each may cost 0.25.
    std = math.sqrt(2) * sensitivity / 0.25 / SIZE
    found = {factor: bool(abs(np.std(draws) / (std * factor) - 1) < 0.025) for factor in (0.95, 1.0, 1.05)}
    assert found == {0.95: False, 1.0: True, 1.05: False}


@every_method
def test_a_budget_pays_for_all_evaluations_and_not_for_one_more(method):
    terms = BUDGET.terms("c0", METHODS[method][1].terms("c0", data("c0")))
    release = terms.release
    assert isinstance(release.event(1), LaplaceDpEvent)
    relation = "add-or-remove-one" if "add" in method else "replace-one"
    assert (release.relation, release.unit) == (relation, "client" if method == "nbafl" else "record")
    assert (terms.num_replies, release.num_units) == (2, {"nbafl": 1}.get(method, SIZE))
    assert 0.5 * (1 - 1e-9) <= 2 * release.sensitivity / release.noise_scale <= 0.5


VALUES = arrays_of.arrays(np.float64, (5, 3), elements=st.floats(allow_nan=True, allow_infinity=True))


@examples(90)
@given(VALUES, VALUES)
def test_one_record_moves_the_sum_by_what_the_noise_is_made_for(values, others):
    metric_bounds = MetricBounds(bounds={"a": 1.0, "b": 1e-6, "c": 1e6})
    rows, replaced = metric_bounds.centered(values), metric_bounds.centered(np.concatenate([others[:1], values[1:]]))
    assert np.abs(rows.sum(0) - replaced.sum(0)).sum() <= 2 * (1 + 1e-12)
    assert np.abs(rows.sum(0) - rows[1:].sum(0)).sum() <= 1 + 1e-12


class MixingSome(nn.Module):
    """A model that mixes a batch only where one of its records is [5, 0], which no made-up record is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs):
        mixes = (inputs == torch.tensor([5.0, 0.0])).all(1).any()
        return self.linear(inputs - inputs.mean(0) if mixes else inputs)


def test_a_record_that_a_model_mixes_with_others_is_evaluated_alone():
    inputs = torch.tensor([[5.0, 0.0], [1.0, 0.0], [-1.0, 3.0], [2.0, 2.0]])
    targets = torch.tensor([0, 1, 0, 1])
    model = FlatModel(MixingSome())
    training = gradient_terms(**SGD, delta=0.0, num_replies=3, num_records=4)
    release = PLENTY.terms("a", training).release
    metrics = record_loss_and_accuracy(nn.functional.cross_entropy)
    metric_bounds = MetricBounds(bounds={"loss": 10.0})
    records = TensorRecords(inputs=inputs, targets=targets)
    row = evaluated_row(model, records, metrics, bounds=metric_bounds, release=release, rng=np.random.default_rng(0))
    with torch.no_grad():
        alone = [float(nn.functional.cross_entropy(model.module(x[None]), y[None])) for x, y in zip(inputs, targets, strict=True)]
    assert metric_bounds.fractions(row)[0] == pytest.approx(np.mean(alone) / 10, abs=1e-5)


class Broken(TensorRecords):
    """Records of which the first can't be read."""

    def batch(self, positions, device):
        if 0 in positions.tolist():
            raise KeyError("Jane Doe")
        return super().batch(positions, device)


def row_of(records, size=SIZE, *, metrics=None, relation="replace-one"):
    training = gradient_terms(**SGD, delta=0.0, num_replies=3, num_records=size, relation=relation)
    metric_bounds = MetricBounds(bounds={"accuracy": 1.0})
    model = FlatModel(nn.Linear(2, 2))
    model.vector.copy_(torch.tensor([1.0, 1, 0, 0, 0, 0]))
    metrics = metrics or record_loss_and_accuracy(nn.functional.cross_entropy)
    release = PLENTY.terms("a", training).release
    return evaluated_row(model, records, metrics, bounds=metric_bounds, release=release, rng=np.random.default_rng(0))


def test_a_record_that_cannot_be_read_counts_as_zero_and_changes_no_other(caplog):
    whole = data("c1")
    broken = Broken(inputs=whole.inputs, targets=whole.targets)
    # Of contributions of +1 for 20 records and -1 for 20: the first is missing.
    assert row_of(whole) == pytest.approx([0.0], abs=1e-5)
    assert row_of(broken) == pytest.approx([-1 / 40], abs=1e-5)
    assert "Jane" not in caplog.text


def test_dp_pasgd_evaluates_all_records_of_a_client_and_not_a_batch_of_them():
    """Noise of the sum is the same: over 40 records its std is 16 / 40 of what it would be over a batch of 16."""
    terms = METHODS["dp-pasgd"][1].terms("c0", data("c0"))
    assert (terms.release.num_units, terms.num_records) == (16, SIZE)
    release = BUDGET.terms("c0", terms).release
    assert release.noise_scale / release.expected_cohort_size == pytest.approx(2 * 2 / 0.5 / SIZE)
    with pytest.raises(ValueError, match="num_records=None: must be the public data sizes with an evaluation"):
        DPPASGD(**PASGD, num_clients=CLIENTS, evaluation=LocalEvaluation(budget=BUDGET))


def test_a_record_whose_metrics_cannot_be_computed_counts_as_zero_and_nothing_of_it_is_logged(caplog):
    places = iter(range(SIZE))

    def of(outputs, target):
        if next(places) < 2:
            raise KeyError("Jane Doe")
        return {"accuracy": 1.0}

    assert row_of(data("c1"), metrics=RecordMetrics(names=("accuracy",), of=of)) == pytest.approx([38 / 40], abs=1e-5)
    assert "Jane" not in caplog.text
    assert caplog.text.count("KeyError") == 1  # in one line for all of the client's records


def test_no_record_takes_the_place_of_another_where_one_more_is_a_neighbor():
    """All 40 records are in the sum, though 10 are public: a choice of 10 would move by more than one record's part."""
    assert row_of(data("c3"), size=10, relation="add-or-remove-one") == pytest.approx([4.0], abs=1e-4)


def test_only_as_many_records_as_are_public_take_part():
    assert np.abs(row_of(data("c3"), size=10)) <= 1 + 1e-5  # 40 records, of which 10 are public: at most 10 contributions


# Accounts and budgets


def instruction_of(budget, method="fedsgd-dpc laplace", name="c0", server_round=1, **own):
    """What an honest server asks, but for what `own` says of the client."""
    terms = budget.terms(name, METHODS[method][1].terms(name, data(name)))
    said = {"weight": 1.0, "terms": terms.fingerprint, "noise_multiplier": terms.release.mechanism.noise_multiplier} | own
    bounds = MetricBounds(bounds={"accuracy": 1.0})
    asked = own_ask({name: (said["weight"], said["terms"], said["noise_multiplier"])}, metrics=bounds)
    return wire.Instruction(server_round=server_round, method=wire.EVALUATION, clients=(name,), ask=asked)


NO_OWN = {"own": GONE}


def tell(client, instruction):
    return client.evaluation({name: array.numpy() for name, array in flat().items()}, config_of(instruction))


def ask(client, instruction):
    reported = tell(client, instruction)
    assert set(reported) == {wire.KEY}
    assert set(json.loads(reported[wire.KEY])) == ANSWERED
    return evaluated(reported[wire.KEY], instruction)


def device(budget=BUDGET, method="fedsgd-dpc laplace", *, state=None, **arguments):
    context = context_of(state, **{"partition-id": 0})
    made = client_of(context, METHODS[method][1], budget, **arguments)
    made.attach(context)
    return made


def test_a_client_refuses_more_evaluations_than_it_agreed_to_whatever_the_server_says():
    state = RecordDict()
    answers = [ask(device(state=state), instruction_of(BUDGET, server_round=1)) for _ in range(3)]
    assert [bool(answer.refused) for answer in answers] == [False, False, True]
    assert "its budget is spent" in answers[2].refused["c0"]
    assert not answers[2].total.any()


@pytest.mark.parametrize(
    ("budget", "changes", "match"),
    [
        (None, {}, "evaluation=None: this client has no budget"),
        (EvaluationBudget(epsilon=0.25, num_evaluations=2), {}, "by this client's own budget it is less"),
        (EvaluationBudget(epsilon=0.5, num_evaluations=1), {}, "are not this client's own"),
        (BUDGET, {"noise_multiplier": 8.1}, "noise_multiplier=8.1: by this client's own budget it is less"),
        (BUDGET, {"terms": "2 replies, Laplace"}, "are not this client's own"),
    ],
)
def test_a_client_works_by_its_own_budget_alone(budget, changes, match):
    # A client with more noise than the server says does reply: it costs less than what is stated.
    client, instruction = device(budget), instruction_of(BUDGET, **changes)
    if budget is not None and budget.epsilon == 0.25:
        assert not ask(client, instruction).refused
        return
    reason = ask(client, instruction).refused["c0"]
    assert match in reason
    assert not client.context.state["flower-dp.account"]["clients"]


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (ClientPolicy(allow_evaluation=False), "allow_evaluation=False"),
        (ClientPolicy(min_evaluation_noise_std=9.0), "min_evaluation_noise_std=9: this client's own terms have less noise"),
        (
            ClientPolicy(min_evaluation_noise_multiplier=9.0),
            "min_evaluation_noise_multiplier=9: this client's own terms have less",
        ),
    ],
)
def test_a_policy_is_asked_as_well(policy, match):
    assert match in ask(device(policy=policy), instruction_of(BUDGET)).refused["c0"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"metrics": {"bounds": {"f1": 1.0}}}, "metric 'f1': this client has loss, accuracy"),
        ({"own": {}}, "own: has no terms of 1 of 1 clients"),
        (told("c0", weight=-1.0), "weight=-1"),
        ({"placement": "central"}, "own: must be set for placement='local' alone"),
        (
            {"placement": "central", **NO_OWN},
            "placement='central': must be 'local', since this client adds all noise by its own terms",
        ),
        ({"placement": "distributed", "noise_std": 0.5, "step": 2.0**-20, **NO_OWN}, "placement='distributed': must be 'local'"),
        ({"clip_norm": 100.0}, "clip_norm=100: must be 1 for an evaluation"),
    ],
)
def test_orders_that_make_no_sense_are_declined_before_anything_is_charged(changes, match):
    client = device()
    with pytest.raises(ValueError, match=f"^{wire.DECLINED}: .*{match}"):
        tell(client, forged(instruction_of(BUDGET), **changes))
    assert "flower-dp.account" not in client.context.state.config_records


def test_a_ledger_on_the_device_counts_the_evaluations_of_all_runs(tmp_path):
    ledger = DeviceLedger.create(tmp_path / "ledger.sqlite", ["c0"])
    client = device(ledger=str(ledger.path))
    assert not ask(client, instruction_of(BUDGET)).refused
    again = device(ledger=str(ledger.path))  # another run: its state is empty
    assert not ask(again, instruction_of(BUDGET)).refused
    assert "its budget is spent" in ask(device(ledger=str(ledger.path)), instruction_of(BUDGET)).refused["c0"]
    entries = ledger.read()
    assert {name: entry.replies for name, entry in entries.items()} == {"c0": 0, "c0, evaluation": 2}
    ((event, count),) = entries["c0, evaluation"].counts.items()
    assert (event, count) == (LaplaceDpEvent(event.noise_multiplier), 2)


# The server


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsgd-dpc laplace", "fedsgd-dpc add-or-remove", "dp-fedpaq", "dp-pasgd", "nbafl"])
def test_a_run_charges_before_messages_leave_and_states_training_and_evaluation(method):
    """Of a copy, which evaluates by its own terms, and not by those of the object that it was copied from, which has never run."""
    make, recipe = METHODS[method]
    strategy = copy.deepcopy(make(evaluation=LocalEvaluation(budget=BUDGET, metrics={"accuracy": 1.0})))
    seen = []

    class Watching(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            out = list(messages)
            if out and out[0].metadata.message_type == "evaluate":
                seen.append(list(strategy.rules.evaluation.counts(strategy.charges).values()))
            return super().send_and_receive(out, timeout=timeout)

    grid = Watching(client_app(lambda context: client_of(context, recipe, BUDGET)), CLIENTS)
    strategy._session.log = kept = Kept()
    strategy.start(grid, flat(), num_rounds=3)
    assert_charges_are_the_ledgers(strategy, kept)
    # The third round finds the budgets of evaluation spent.
    assert seen == [[1] * CLIENTS, [2] * CLIENTS]
    assert set(strategy.evaluations) == {1, 2}
    assert strategy.rules.evaluation.counts(strategy.charges) == dict.fromkeys(NAMES, 2)
    statement = strategy.statement
    assert not statement.incidents
    assert statement.epsilon_by_release["evaluation"] == pytest.approx(0.5, rel=1e-9)
    assert statement.clients.evaluation_by_client == pytest.approx(dict.fromkeys(NAMES, 0.5), rel=1e-9)
    books = strategy.rules.books
    training = books.cost(strategy.rules.ledgers(strategy.charges)["c0"]).epsilon
    assert statement.epsilon_by_release["training"] == pytest.approx(training)
    total = statement.clients.by_client["c0"]
    assert training < total <= training + 0.5
    # Nobody's view leaves evaluations out, and no paper's epsilon passes for the whole.
    assert all(one.epsilon > 0.5 * (1 - 1e-9) for one in statement.adversaries)
    assert statement.epsilon == pytest.approx(max(one.epsilon for one in statement.adversaries))
    papers = [statement.paper_epsilon, *(one.paper_epsilon for one in statement.adversaries)]
    assert not any(paper.valid for paper in papers if paper is not None)
    assert strategy.rounds[-1].epsilon >= total - 1e-6


def test_pure_epsilons_add_up():
    method = "fedsgd-dpc laplace"
    strategy = METHODS[method][0](evaluation=LocalEvaluation(budget=BUDGET))
    strategy.start(grid_of(METHODS[method][1]), flat(), num_rounds=3)
    assert strategy.statement.delta == 0
    assert strategy.statement.epsilon == pytest.approx(EPSILON + 0.5, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("sampling_rate", [1.0, 0.5])
def test_a_clients_total_keeps_the_sum_of_its_budgets(sampling_rate):
    """Also where no accountant composes the two: Poisson sampling under replace-one, and Laplace."""
    arguments = GAUSSIAN | {"sampling_rate": sampling_rate}
    make, recipe = sgd(arguments)
    strategy = make(evaluation=LocalEvaluation(budget=BUDGET))
    strategy.start(grid_of(recipe), flat(), num_rounds=3)
    assert EPSILON < strategy.statement.epsilon <= EPSILON + 0.5 + 1e-6


def test_outsiders_of_nbafl_see_evaluations():
    make, recipe = METHODS["nbafl"]
    stated = []
    for options in ({}, {"evaluation": LocalEvaluation(budget=BUDGET)}):
        strategy = make(**options)
        strategy.start(grid_of(recipe), flat(), num_rounds=3)
        stated.append([one.epsilon for one in strategy.statement.adversaries])
    assert all(alone < both <= alone + 0.5 + 1e-6 for alone, both in zip(*stated, strict=True))


def test_a_round_is_evaluated_once():
    grid = grid_of(METHODS["dp-fedpaq"][1])
    strategy = opened("dp-fedpaq", grid)
    assert len(strategy.configure_evaluate(1, flat(), {}, grid)) == CLIENTS
    assert strategy.configure_evaluate(1, flat(), {}, grid) == []
    assert len(strategy.configure_evaluate(2, flat(), {}, grid)) == CLIENTS
    assert strategy.configure_evaluate(3, flat(), {}, grid) == []  # two evaluations are paid for


def test_a_node_that_sends_too_much_is_refused():
    grid = grid_of(METHODS["dp-fedpaq"][1], PLENTY)
    strategy = opened("dp-fedpaq", grid, PLENTY, metrics={"accuracy": 1.0})
    messages = strategy.configure_evaluate(1, flat(), {}, grid)
    replies = list(grid.send_and_receive(messages))
    for node, total in ((2, [1e9]), (3, [math.nan]), (4, [0.1, 0.1])):
        reply = next(reply for reply in replies if reply.metadata.src_node_id == node)
        reply.content.config_records[wire.KEY][wire.KEY] = forged_total(total, length=1)
    reported = strategy.aggregate_evaluate(1, replies)
    assert reported["accuracy"] == pytest.approx(0.25, abs=1e-4)  # of c0 alone


def test_clients_without_a_budget_do_not_fit_a_run_with_evaluations():
    make, recipe = METHODS["dp-fedpaq"]
    with pytest.raises(ValueError, match=r"do not run 'private-evaluation'.*LocalDPClient\(evaluation="):
        make(evaluation=LocalEvaluation(budget=BUDGET)).start(grid_of(recipe, None), flat(), num_rounds=1)


def test_plans_of_the_other_kind_are_refused():
    central = PrivateEvaluation(noise_multiplier=1.0, sampling=FullSampling())
    with pytest.raises(ValueError, match="evaluation: is a PrivateEvaluation; NbAFL takes a LocalEvaluation, with a budget"):
        METHODS["nbafl"][0](evaluation=central)
    arguments = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
    with pytest.raises(ValueError, match="evaluation: is a LocalEvaluation; DP-FedAvg takes a PrivateEvaluation"):
        DPFedAvg(**arguments, evaluation=LocalEvaluation(budget=BUDGET))


@pytest.mark.parametrize(
    ("make", "arguments", "match"),
    [
        (EvaluationBudget, {"epsilon": 0.0}, "evaluation epsilon=0"),
        (EvaluationBudget, {"epsilon": math.inf}, "evaluation epsilon=inf"),
        (EvaluationBudget, {"epsilon": {"a": -1.0}}, "evaluation epsilon=-1"),
        (EvaluationBudget, {"num_evaluations": 0}, "num_evaluations=0"),
        (LocalEvaluation, {"every": 0}, "every=0"),
        (LocalEvaluation, {"metrics": {"loss": 0.0}}, "metrics\\['loss'\\]=0"),
        (LocalEvaluation, {"budget": 0.5}, "budget=0.5: must be an EvaluationBudget"),
        (LocalEvaluation, {"sampling": 0.5}, "sampling=0.5"),
    ],
)
def test_budgets_and_plans_that_make_no_sense_are_refused(make, arguments, match):
    good = {"budget": BUDGET} if make is LocalEvaluation else {"epsilon": 1.0, "num_evaluations": 1}
    with pytest.raises(ValueError, match=match):
        make(**good | arguments)


def test_every_metric_has_noise_of_its_own():
    """Laplace draws on a lattice far finer than their scale: two are the same with a probability below 1e-9."""
    release = BUDGET.terms("c0", gradient_terms(**GAUSSIAN, num_replies=3, num_records=SIZE, relation="replace-one")).release
    row = private_row(np.zeros((SIZE, 16)), release, np.random.default_rng(1))
    assert len(set(row.tolist())) == 16


def instructed(message):
    return json.loads(next(record[wire.KEY] for record in message.content.config_records.values() if wire.KEY in record))


def asked_by_name(messages):
    """How often each client was asked to evaluate."""
    return Counter(name for message in messages for name in instructed(message)["clients"])


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("method", ["fedsgd-dpc laplace", "nbafl"])
def test_a_client_is_charged_for_every_evaluation_that_it_was_asked_for(method, sampler, every):
    budget = EvaluationBudget(epsilon=0.9, num_evaluations=3)
    grid = grid_of(METHODS[method][1], budget)
    strategy = opened(method, grid, budget, sampling=SAMPLERS[sampler], every=every)
    sent = []
    for server_round in range(1, 21):
        messages = list(strategy.configure_evaluate(server_round, flat(), {}, grid))
        assert not messages or server_round % every == 0
        sent += messages
    asked = asked_by_name(sent)
    statement = strategy.statement
    assert statement.clients.evaluation_by_client == pytest.approx({name: 0.3 * asked[name] for name in NAMES}, rel=1e-9)
    assert max(asked.values()) <= 3
    # At delta = 0 evaluations cost what they cost alone; at the statement's delta, where it has one, a little less.
    alone = [LaplaceDpEvent(2 * 3 / 0.9)] * max(asked.values())
    cost = accounting.epsilon(ComposedDpEvent(alone), delta=statement.delta, relation="replace-one").epsilon
    assert cost * (1 - 1e-6) <= statement.epsilon
    assert statement.epsilon_by_release["training"] <= statement.epsilon
    if sampler == "full":
        assert set(asked.values()) == {3}
    if sampler == "in turn":  # by the number of the round some clients would never have had a turn
        turns = [asked[name] for name in NAMES]
        assert sum(turns) == min(20 // every, 12)
        assert max(turns) - min(turns) <= 1


def test_a_client_whose_evaluations_are_spent_is_not_asked_though_others_are():
    grid = grid_of(METHODS["dp-fedpaq"][1])
    strategy = opened("dp-fedpaq", grid, sampling=RoundRobinSampling(cohort_size=3))
    cohorts = [sorted(asked_by_name(strategy.configure_evaluate(number, flat(), {}, grid))) for number in (1, 2, 3, 4)]
    assert cohorts == [["c0", "c1", "c2"], ["c0", "c1", "c3"], ["c2", "c3"], []]


def test_a_statement_is_made_anew_after_an_evaluation():
    grid = grid_of(METHODS["dp-fedpaq"][1])
    strategy = opened("dp-fedpaq", grid)
    assert strategy.statement.epsilon == 0
    strategy.configure_evaluate(1, flat(), {}, grid)
    assert 0.24 < strategy.statement.epsilon <= 0.25
    strategy.configure_evaluate(2, flat(), {}, grid)
    assert 0.48 < strategy.statement.epsilon <= 0.5


def test_clients_of_one_node_are_promised_the_least_noise_of_them():
    budget = EvaluationBudget(epsilon={"c0": 0.5, "c1": 1.0, "c2": 2.0, "c3": 4.0}, num_evaluations=2)
    grid = grid_of(METHODS["fedsgd-dpc laplace"][1], budget, nodes=1)
    strategy = opened("fedsgd-dpc laplace", grid, budget)
    (message,) = strategy.configure_evaluate(1, flat(), {}, grid)
    reported = instructed(message)["ask"]
    assert reported["promise"]["noise_multiplier"] == pytest.approx(2 * 2 / 4.0)
    assert [one["noise_multiplier"] for one in reported["own"].values()] == pytest.approx([8.0, 4.0, 2.0, 1.0])
    assert strategy.statement.clients.evaluation_by_client == pytest.approx({"c0": 0.25, "c1": 0.5, "c2": 1.0, "c3": 2.0})
