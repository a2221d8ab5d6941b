"""Private evaluation: right values, right noise, charged before it leaves, nothing raw. Expected values by hand."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from flower_dp import wire
from flower_dp.clients import ClientPolicy, DPClient, TensorRecords, Training, client_app, privacy_mod
from flower_dp.clients.reply.evaluation import loss_and_accuracy
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.strategies import DPFedAvg, DPFedSAM, PrivateEvaluation
from tests.asks import GONE, config_of, evaluated, forged, forged_total, told
from tests.asks import ask as made
from tests.charges import charge
from tests.grids import LocalGrid
from tests.local_grids import context_of
from tests.stock import arrays, shifted, stock_app

WORDS = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": 40, "delta": 1e-3}
SHARES = {node: node / 40 for node in range(1, 41)}  # the accuracy of every client


def evaluation(**arguments):
    return PrivateEvaluation(
        **{"noise_multiplier": 0.5, "sampling": FullSampling(), "metrics": {"loss": 4.0, "acc": 1.0}} | arguments
    )


def metrics_of(node):
    return {"loss": 8.0 if node % 2 else 1.0, "acc": SHARES[node]}  # half of the losses are clipped to 4


def stock(metrics=metrics_of, *mods):
    """A Message-API app with an evaluate function of its own."""
    app = stock_app(shifted(lambda node: 0.0), mods=mods)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        reported = MetricRecord({"num-examples": 7, **metrics(context.node_id)})
        return Message(RecordDict({"metrics": reported}), reply_to=message)

    return app


def own(context, *, clients_per_node=1, **arguments):
    """Clients whose model says class 0 for every record; client i has i of 40 records of that class."""
    first = (context.node_id - 1) * clients_per_node
    records = {
        f"c{number:02}": TensorRecords(
            inputs=torch.ones(40, 2), targets=torch.cat([torch.zeros(number), torch.ones(40 - number)]).long()
        )
        for number in range(first + 1, first + 1 + clients_per_node)
    }
    return DPClient(model=nn.Linear(2, 2), clients=records, training=Training(learning_rate=1e-9), **arguments)


def flat():
    return arrays(weight=np.array([[1, 1], [0, 0]], np.float32), bias=np.zeros(2, np.float32))


APPS = {
    "stock Message API": (stock(), 40, "acc"),
    "stock Message API, mod": (stock(metrics_of, privacy_mod()), 40, "acc"),
    "ours": (client_app(own), 40, "accuracy"),
    "ours, 10 a node": (client_app(lambda context: own(context, clients_per_node=10)), 4, "accuracy"),
}


def run(app, nodes, metric, *, num_rounds=1, strategy_class=DPFedAvg, arguments=(), **plan):
    bounds = {"loss": 4.0, metric: 1.0}
    strategy = strategy_class(**WORDS | dict(arguments), evaluation=evaluation(**{"metrics": bounds} | plan))
    grid = LocalGrid(app, nodes)
    result = strategy.start(grid, flat(), num_rounds=num_rounds)
    return strategy, grid, result


def charged(strategy, first, last):
    """Charge rounds and their evaluations, without running them; return how many rounds the target has allowed."""
    names, rules = [f"c{number:02}" for number in range(40)], strategy.rules
    for number in range(first, last + 1):
        if rules.stop_reason(strategy.state, number, None):
            break
        charge(strategy, names)
        if rules.evaluation.due(strategy.charges, number):
            charge(strategy, names, release=rules.evaluation)
    return rules.num_rounds(strategy.charges)


def test_evaluations_of_an_earlier_plan_stay_charged():
    """Of a run that goes on with fewer evaluations than it began with: its plan would have counted too few of them."""
    words = WORDS | {"noise_multiplier": 4.0, "target_epsilon": 6.0}
    before = DPFedAvg(**words, evaluation=evaluation(noise_multiplier=4.0))
    before.plan(60)
    assert charged(before, 1, 12) == 12
    after = DPFedAvg(**words, evaluation=evaluation(noise_multiplier=4.0, every=30))
    after.state = before.state
    assert after.epsilon >= after.statement.epsilon == before.statement.epsilon
    charged(after, 13, 60)
    assert 5.8 < after.statement.epsilon <= after.epsilon <= 6.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "placement"),
    [*((name, "central") for name in APPS), ("stock Message API, mod", "distributed"), ("ours, 10 a node", "distributed")],
)
def test_values_are_those_of_the_clients(name, placement):
    app, nodes, metric = APPS[name]
    arguments = {"noise_multiplier": 1e-9, "placement": placement}
    _, _, result = run(app, nodes, metric, arguments=arguments, noise_multiplier=1e-6, strategy_class=DPFedSAM)
    reported = dict(result.evaluate_metrics_clientapp[1])
    assert reported[metric] == pytest.approx(20.5 / 40, abs=1e-3)
    # Of stock clients 1 and, clipped, 4; else logits (2, 0): log(1 + e^-2) for class 0, that and 2 for class 1.
    loss = 2.5 if "stock" in name else math.log1p(math.exp(-2)) + 2 * (1 - 20.5 / 40)
    assert reported["loss"] == pytest.approx(loss, rel=1e-3)
    # sqrt(v (1 - v) / 40), of which the noise is no part here
    assert reported[f"{metric}-standard-error"] == pytest.approx(math.sqrt(0.5125 * 0.4875 / 40), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "mod"), [("central", False), ("distributed", False), ("distributed", True)])
def test_noise_is_of_the_right_scale_and_a_wrong_one_is_rejected(placement, mod):
    """6,400 entries of noised vectors: their std is 2.5 % off with probability 0.005; seeds are fixed."""
    bounds = {f"metric {number}": 1.0 for number in range(15)}
    arguments = WORDS | {"num_clients": 2, "noise_seed": 1}
    strategy = DPFedSAM(**arguments, placement=placement, evaluation=evaluation(metrics=bounds))
    half = dict.fromkeys(bounds, 0.5)
    app = client_app(lambda context: own(context, clients_per_node=2, noise_seed=2, metrics=lambda *_: half))
    grid = LocalGrid(stock(lambda node: half, privacy_mod(noise_seed=2)), 2) if mod else LocalGrid(app, 1)
    session, known_clients = strategy._session, strategy._known_clients(grid)
    made, model = strategy.rules.evaluation, wire.Model.of(flat(), frozen=())
    noiseless = np.array([0.5] * 15 + [1.0]) / 2  # over 2 clients, divided by the norm of sqrt(16)
    draws = []
    for server_round in range(1, 401):
        if placement == "distributed" or server_round == 1:  # else clients add none
            drawn = session.draw_cohort(made, known_clients, server_round)
            sent = {"model": model, "known_clients": known_clients, "arrays": flat(), "config": {}, "grid": grid}
            messages = session.ask(made, server_round, drawn, size=made.length, **sent)
            now, collected = session.total(made, grid.send_and_receive(messages))
            assert len(collected.clients) == 2
        again = replace(collected, total=collected.total.copy())
        mean, _ = made.noised(strategy.state, now, again, session.generator("test", server_round))
        draws.append(mean * 2 - noiseless)
    std = np.std(draws)
    assert [abs(std / (0.5 * factor) - 1) < 0.025 for factor in (0.95, 1.0, 1.05)] == [False, True, False]
    assert abs(np.mean(draws)) < 5 * 0.5 / math.sqrt(6400)
    # Each entry has noise of its own: of noise that is drawn once for all of them nothing would be left.
    of_each = np.array(draws) - np.mean(draws, axis=1, keepdims=True)
    assert np.std(of_each) == pytest.approx(0.5 * math.sqrt(15 / 16), rel=0.025)


@pytest.mark.parametrize(
    ("name", "placement"),
    [("stock Message API", "central"), ("stock Message API, mod", "distributed"), ("ours", "central"), ("ours", "distributed")],
)
def test_rounding_is_no_bias(name, placement, monkeypatch):
    """On the lattice of large noise, with draws of zero in its place, the mean of 40 clients is the true one."""
    monkeypatch.setattr("flower_dp.core.noise.gaussian", lambda like, *_: 0.0 * like)
    app, nodes, metric = APPS[name]
    _, _, result = run(app, nodes, metric, arguments={"placement": placement}, noise_multiplier=5.0, strategy_class=DPFedSAM)
    assert result.evaluate_metrics_clientapp[1][metric] == pytest.approx(20.5 / 40, abs=1e-5)


def test_no_value_before_the_noise_is_told_anywhere(caplog):
    with caplog.at_level("DEBUG", "flwr"):
        strategy, _, result = run(*APPS["ours, 10 a node"], noise_multiplier=0.5)
    reported = dict(result.evaluate_metrics_clientapp[1])
    assert set(reported) == {"loss", "loss-standard-error", "accuracy", "accuracy-standard-error"}
    assert reported["accuracy"] != pytest.approx(20.5 / 40, abs=1e-9)
    assert "0.5125" not in caplog.text + str(strategy.statement)


class Remembering(nn.Module):
    """A model whose outputs depend on the records that it has seen before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs):
        outputs = self.linear(inputs) + self.seen * torch.tensor([1.0, -1.0])
        self.seen += 10 * inputs.abs().sum()
        return outputs


@pytest.mark.parametrize("changes", [False, True], ids=["a buffer", "weights that a metrics function changes"])
def test_what_a_model_keeps_of_one_clients_records_is_not_told_with_anothers(changes):
    def metrics(module, records):
        reported = loss_and_accuracy(nn.functional.cross_entropy)(module, records)
        if changes:
            module.linear.weight.data[0] += 7.0 * records.inputs.sum()  # the same for both classes would change no output
        return reported

    def client(names):
        data = {
            name: TensorRecords(inputs=torch.full((3, 2), 0.3 * index), targets=torch.ones(3, dtype=torch.int64))
            for index, name in enumerate(names_of, 1)
        }
        hosted = {name: data[name] for name in names}
        return DPClient(model=Remembering(), clients=hosted, training=Training(learning_rate=0.1), metrics=metrics, device="cpu")

    names_of = ("c01", "c02", "c03")
    given = {"linear.weight": np.ones((2, 2), np.float32), "linear.bias": np.zeros(2, np.float32)}
    bounds = MetricBounds(bounds={"loss": 50.0, "accuracy": 1.0})

    def total(names):
        instruction = wire.Instruction(
            server_round=1, method=wire.EVALUATION, clients=names, ask=made(noise_multiplier=0.0, metrics=bounds)
        )
        made_of = client(names)
        answers = [made_of.evaluation(given, config_of(instruction)) for _ in range(2)]
        assert answers[0] == answers[1]
        return evaluated(answers[0][wire.KEY], instruction).total

    np.testing.assert_array_equal(total(names_of), sum(total((name,)) for name in names_of))


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_leaves_every_layer_in_its_mode(fails):
    """A part that is kept in evaluation mode would have dropout from then on, and training another gradient."""
    seen = []

    def metrics(module, records):
        seen.append([layer.training for layer in module.modules()])
        module.train()  # as many functions end
        if fails:
            raise ValueError("no metrics")
        return {"loss": 1.0}

    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    module[1].eval()
    records = TensorRecords(inputs=torch.ones(3, 2), targets=torch.ones(3, dtype=torch.int64))
    client = DPClient(model=module, clients={"a": records}, training=Training(learning_rate=0.1), metrics=metrics, device="cpu")
    ask = made(noise_multiplier=0.0, metrics=MetricBounds(bounds={"loss": 50.0}))
    instruction = wire.Instruction(server_round=1, method=wire.EVALUATION, clients=("a",), ask=ask)
    client.evaluation({name: one.numpy(force=True) for name, one in module.named_parameters()}, config_of(instruction))
    assert seen == [[False] * 5]
    assert [layer.training for layer in module.modules()] == [True, True, False, False, False]


def test_a_clients_vector_is_never_longer_than_one():
    bounds = MetricBounds(bounds={"a": 1.0, "b": 0.5})
    for reported in ({"a": 1e300, "b": math.inf}, {"a": math.nan, "b": -5.0}, {"a": 1, "b": 0.5}):
        assert np.linalg.norm(bounds.counted(reported)) <= 1 + 1e-12
    assert bounds.counted({"a": math.nan, "b": -5.0}) == pytest.approx(np.array([1, 0, 1]) / math.sqrt(3))


class Changed(LocalGrid):
    """Replies to evaluations are changed, or get lost."""

    change = None

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        return [one for one in replies if one.metadata.message_type != "evaluate" or self.change(one) is not False]


def forging(num_nodes, *given, **answer):
    """The first nodes say something else."""

    def change(reply):
        if reply.metadata.src_node_id <= num_nodes:
            reply.content.config_records[wire.KEY][wire.KEY] = forged_total(*given, **answer)

    return change


@pytest.mark.parametrize("total", [[1e9, 0.0, 0.0], [math.nan, 0, 0], [0.1, 0.1], "!" * 32, None, [math.inf, 0, 0], "?", 5])
def test_lying_nodes_are_clipped_or_refused(total):
    arguments = WORDS | {"noise_multiplier": 1e-9, "num_clients": 10}
    strategy = DPFedAvg(**arguments, evaluation=evaluation(noise_multiplier=1e-6, metrics={"loss": 4.0, "accuracy": 1.0}))
    grid = Changed(client_app(own), 10)
    grid.change = forging(1, total, length=3)
    reported = strategy.start(grid, flat(), num_rounds=1).evaluate_metrics_clientapp[1]["accuracy"]
    others = sum(SHARES[node] for node in range(2, 11))
    # One client in 10 changes sums of vectors by 1 at most: sqrt(3) in units of the metrics.
    assert others / (9 + math.sqrt(3)) - 1e-3 <= reported <= others / 9 + 1e-3


# What is released, on the whole way


def constant(strategy_class=DPFedAvg, *, num_metrics=15, nodes=4, clients=40, noise_multiplier=0.5, sampling=None, **arguments):
    """A strategy and a grid of clients, all of whose metrics are 0.5, and the metrics' names."""
    bounds = {f"metric {number}": 1.0 for number in range(num_metrics)}
    half = dict.fromkeys(bounds, 0.5)
    app = client_app(lambda context: own(context, clients_per_node=clients // nodes, metrics=lambda *_: half))
    plan = evaluation(metrics=bounds, noise_multiplier=noise_multiplier, sampling=sampling or FullSampling())
    return strategy_class(**WORDS | {"num_clients": clients} | arguments, evaluation=plan), LocalGrid(app, nodes), bounds


def values_by_round(strategy, grid, bounds, num_rounds):
    strategy.start(grid, flat(), num_rounds=num_rounds)
    return np.array([[reported[name] for name in bounds] for reported in strategy.evaluations.values()])


@pytest.mark.parametrize("placement", ["central", "distributed"])
def test_a_sum_of_vectors_crosses_the_wire_without_losing_a_bit(placement):
    """Vectors lie on a lattice that float32 can't hold: on the server the sum is that of the vectors, in whole steps."""
    metrics = dict.fromkeys("abc", 1.0)
    values = iter([0.1, 0.7, 1 / 3] * 100)

    def client_fn(context):
        return own(context, metrics=lambda model, data: {name: next(values) for name in metrics})

    strategy = DPFedSAM(**WORDS, placement=placement, evaluation=evaluation(metrics=metrics, noise_multiplier=1e3))
    grid = LocalGrid(client_app(client_fn), 40)
    strategy.plan(1)
    strategy.configure_train(1, flat(), ConfigRecord(), grid)
    messages = strategy.configure_evaluate(1, flat(), ConfigRecord(), grid)
    replies = list(grid.send_and_receive(messages))
    asked = [wire.instruction_of(dict(one.content.config_records["config"])) for one in messages]
    each = [evaluated(one.content[wire.KEY][wire.KEY], ask).total for one, ask in zip(replies, asked, strict=True)]
    _, collected = strategy._session.total(strategy.rules.evaluation, replies)
    step = asked[0].ask.step
    whole = [sum(Fraction(float(row[entry])) for row in each) for entry in range(4)]
    assert [Fraction(float(one)) for one in collected.total] == whole
    assert all((one / Fraction(step)).denominator == 1 for one in whole)
    if placement == "distributed":
        assert any(float(np.float32(one)) != one for row in each for one in row.tolist())


@pytest.mark.parametrize("placement", ["central", "distributed"])
def test_no_two_runs_tell_the_same_and_no_round_repeats_another(placement):
    """Under distributed placement all noise is the clients': none of them is missing."""
    few = {"clients": 8, "nodes": 1, "num_metrics": 3}
    first, second = (values_by_round(*constant(DPFedSAM, placement=placement, **few), 3) for _ in range(2))
    draws = [row.tobytes() for row in np.concatenate([first, second])]
    assert len(set(draws)) == 6
    # Errors of one run are not those of another: over 9 values 20 equal bits have a probability below 1e-50.
    assert not np.isclose(first, second, rtol=1e-6).any()


@pytest.mark.slow
def test_no_two_runs_ask_the_same_cohorts():
    """2 cohorts of 40 clients, each with probability 1/2: two draws are the same with probability 2^-80."""

    def cohorts():
        strategy, grid, _ = constant(nodes=40, num_metrics=1, sampling=PoissonSampling(sampling_rate=0.5))
        drawn = []
        for number in (1, 2):
            strategy.configure_train(number, flat(), ConfigRecord(), grid)
            messages = strategy.configure_evaluate(number, flat(), ConfigRecord(), grid)
            drawn.append({one.metadata.dst_node_id for one in messages})
        return drawn

    first, second = cohorts(), cohorts()
    assert first != second
    assert first[0] != first[1]


def test_replies_to_an_evaluation_with_noise_from_a_seed_are_refused_and_the_run_stays_private():
    strategy = DPFedSAM(**WORDS, placement="distributed", evaluation=evaluation(metrics={"accuracy": 1.0}))
    grid = LocalGrid(client_app(lambda context: own(context, noise_seed=1)), 40)
    strategy.plan(1)
    strategy.configure_train(1, flat(), ConfigRecord(), grid)
    assert strategy.statement.private
    messages = strategy.configure_evaluate(1, flat(), ConfigRecord(), grid)
    metrics = strategy.aggregate_evaluate(1, grid.send_and_receive(messages))
    # In one of 740 runs noise alone passes for two clients; 40 replies have a standard error of 0.02.
    assert metrics is None or metrics["accuracy-standard-error"] > 0.1
    assert strategy.statement.private
    assert math.isfinite(strategy.epsilon)


def asks_of(strategy, grid):
    """What the clients were asked in the evaluation of a round."""
    strategy.start(grid, flat(), num_rounds=1)
    sent = [one.content.config_records["config"][wire.KEY] for one in grid.sent if one.metadata.message_type == "evaluate"]
    return [json.loads(text)["ask"] for text in sent]


@pytest.mark.parametrize(("trusted", "shares"), [(True, 40), (False, 30)])
def test_where_clients_add_their_shares_they_add_them_to_evaluations_as_well(trusted, shares):
    strategy, grid, _ = constant(DPFedSAM, placement="distributed", server_completes_noise=trusted, noise_multiplier=2.0)
    for asked in asks_of(strategy, grid):
        assert (asked["placement"], asked["noise_std"]) == ("distributed", pytest.approx(2.0 / math.sqrt(shares)))


def test_an_evaluation_has_the_shares_of_whole_messages_whatever_training_sends():
    few = PoissonSampling(sampling_rate=0.1)  # with coarse messages the shares would be those of the 4 expected clients
    strategy, _, _ = constant(DPFedSAM, placement="distributed", keep_ratio=0.5, noise_multiplier=2.0, sampling=few)
    assert strategy.rules.evaluation.noise.share_std(4) == pytest.approx(2.0 / math.sqrt(few.max_cohort_size(40)))


def asked(names=("c01",), **arguments):
    """An instruction to evaluate the accuracy."""
    bounds = MetricBounds(bounds={"accuracy": 1.0})
    return wire.Instruction(server_round=1, method=wire.EVALUATION, clients=names, ask=made(metrics=bounds, size=2, **arguments))


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_norm": 2.0},
        {"noise_std": 0.0},
        {"noise_std": GONE},
        {"noise_multiplier": 0.0},
        {"placement": "central"},
        {"placement": "local", "noise_std": GONE, "step": GONE, **told("c01")},
        {"metrics": {"bounds": {"accuracy": 0.0}}},
        {"metrics": GONE},
        {"keep_ratio": 0.5},
        {"step": 2.0**-11},
    ],
)
def test_a_device_declines_an_order_whose_noise_and_placement_do_not_go_together(changes):
    client = own(context_of())
    honest = asked(placement="distributed", noise_std=0.4)
    given = {name: array.numpy() for name, array in flat().items()}
    assert client.evaluation(given, config_of(honest))
    with pytest.raises(ValueError, match=f"^{wire.DECLINED}: "):
        client.evaluation(given, config_of(forged(honest, **changes)))


def test_a_run_that_is_not_private_states_no_part_that_is():
    strategy, grid, _ = constant(num_metrics=1, noise_seed=1)
    strategy.start(grid, flat(), num_rounds=1)
    assert not strategy.statement.private
    assert strategy.statement.epsilon_by_release == {}


def test_what_clients_are_promised_is_the_noise_of_the_plan():
    asked = [one["promise"] for one in asks_of(*constant(noise_multiplier=2.0)[:2])]
    assert {(one["noise_multiplier"], one["clip_norm"]) for one in asked} == {(2.0, 1.0)}


def test_too_few_replies_without_a_trusted_server_tell_nothing():
    """Nobody tops up the noise of missing clients: 29 of 40 have less than was charged."""
    for silent, reported in ((11, False), (10, True)):
        arguments = {"placement": "distributed", "server_completes_noise": False}
        strategy, like, _ = constant(DPFedSAM, nodes=40, noise_multiplier=0.01, **arguments)
        grid = Changed(like.app, 40)
        grid.change = lambda reply, silent=silent: reply.metadata.src_node_id > silent
        strategy.start(grid, flat(), num_rounds=1)
        assert bool(strategy.evaluations) == reported


def test_what_a_refusing_client_sends_beside_its_refusal_moves_nothing():
    """A node of one client that refuses may not use its place in the sum."""
    plan = evaluation(noise_multiplier=1e-6, metrics={"accuracy": 1.0})
    strategy, grid = DPFedAvg(**WORDS | {"noise_multiplier": 1e-9}, evaluation=plan), Changed(client_app(own), 40)
    grid.change = forging(20, [0.7, 0.7], length=2, refused=[{"code": "failed", "reason": "no", "clients": [0]}])
    strategy.start(grid, flat(), num_rounds=1)
    assert strategy.evaluations[1]["accuracy"] == pytest.approx(np.mean([SHARES[node] for node in range(21, 41)]), abs=1e-4)


def test_a_stock_node_stands_for_one_client_and_its_reply_is_no_larger_than_it_needs():
    def huge(node):
        return metrics_of(node) if node > 2 else metrics_of(node) | {f"more {number}": 1.0 for number in range(5000)}

    _, _, result = run(stock(huge), 40, "acc", arguments={"noise_multiplier": 1e-9}, noise_multiplier=1e-6)
    expected = np.mean([SHARES[node] for node in range(3, 41)])
    assert result.evaluate_metrics_clientapp[1]["acc"] == pytest.approx(expected, abs=1e-4)


def test_the_statement_says_that_evaluating_cohorts_are_secret():
    """Its epsilon counts on that, also where everybody trains."""
    strategy, grid, _ = constant(num_metrics=1, sampling=PoissonSampling(sampling_rate=0.5), noise_multiplier=4.0)
    strategy.start(grid, flat(), num_rounds=1)
    statement = strategy.statement
    told = "No outsider or participant learns who evaluates or how many do, whether from logs, from timing or otherwise."
    assert told in statement.assumptions
    assert all("who took part in training" in one.view for one in statement.adversaries if one.name == "outsiders")


# cost


def test_it_is_charged_before_a_message_leaves_and_to_both_ledgers():
    strategy = DPFedAvg(**WORDS, evaluation=evaluation(metrics={"accuracy": 1.0, "loss": 4.0}))
    seen = []

    class Watching(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            out = list(messages)
            if out[0].metadata.message_type == "evaluate":
                rules, charges = strategy.rules, strategy.charges
                seen.append((rules.ledger(charges).num_charges, rules.outside_ledger(charges).num_charges))
            return super().send_and_receive(out, timeout=timeout)

    strategy.start(Watching(client_app(own), 40), flat(), num_rounds=2)
    assert seen == [(2, 2), (4, 4)]


@pytest.mark.slow
def test_epsilon_is_that_of_training_and_evaluations_together():
    poisson = PoissonSampling(sampling_rate=0.5)
    plan = {"noise_multiplier": 2.0, "sampling": PoissonSampling(sampling_rate=0.25), "every": 2}
    arguments = {"sampling": poisson, "noise_multiplier": 4.0}
    strategy, _, _ = run(*APPS["ours, 10 a node"], num_rounds=5, arguments=arguments, **plan)
    training = SelfComposedDpEvent(PoissonSampledDpEvent(0.5, GaussianDpEvent(4.0)), 5)
    evaluations = SelfComposedDpEvent(PoissonSampledDpEvent(0.25, GaussianDpEvent(2.0)), 2)

    def cost(*events):
        return accounting.epsilon(ComposedDpEvent(list(events)), delta=1e-3, relation="add-or-remove-one").epsilon

    statement = strategy.statement
    assert statement.epsilon == pytest.approx(cost(training, evaluations))
    assert statement.epsilon_by_release == pytest.approx({"training": cost(training), "evaluation": cost(evaluations)})
    assert "Each release alone: training " in str(statement)
    assert not statement.paper_epsilon.valid


def test_the_servers_own_view_counts_evaluations_too():
    arguments = {"placement": "distributed", "num_clients": 10}
    plan = {"strategy_class": DPFedSAM, "arguments": arguments, "noise_multiplier": 2.0}
    strategy, _, _ = run(client_app(own), 10, "accuracy", num_rounds=3, **plan)
    server = next(one for one in strategy.statement.adversaries if one.name == "the server")
    # 3 messages with a 10th part of the variance of noise of std 1 x clip norm, and 3 with that of noise of std 2.
    multiplier = 1 / math.sqrt(3 * 10 + 3 * 10 / 4)
    wanted = accounting.epsilon(GaussianDpEvent(multiplier), delta=1e-3, relation="add-or-remove-one").epsilon
    assert server.epsilon == pytest.approx(wanted, rel=1e-6)


def test_a_target_counts_evaluations():
    arguments = {"target_epsilon": 9.0, "num_clients": 4}
    plain = DPFedAvg(**WORDS | arguments)
    plain.start(LocalGrid(client_app(own), 4), flat(), num_rounds=20)
    strategy, _, _ = run(client_app(own), 4, "accuracy", num_rounds=20, arguments=arguments, noise_multiplier=2.0)
    assert 0 < len(strategy.rounds) < len(plain.rounds)
    assert strategy.statement.epsilon <= 9.0


def test_asking_again_in_a_round_is_neither_charged_nor_answered():
    strategy = DPFedAvg(**WORDS, evaluation=evaluation(metrics={"accuracy": 1.0}))
    grid = LocalGrid(client_app(own), 40)
    strategy.plan(3)
    messages = strategy.configure_train(1, flat(), {}, grid)
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    first = strategy.configure_evaluate(1, flat(), {}, grid)
    assert len(first) == 40
    charges = strategy.rules.ledger(strategy.charges).num_charges
    assert strategy.configure_evaluate(1, flat(), {}, grid) == []
    assert strategy.configure_evaluate(7, flat(), {}, grid) == []
    assert strategy.rules.ledger(strategy.charges).num_charges == charges
    replies = list(grid.send_and_receive(first))
    assert [strategy.aggregate_evaluate(1, replies) is None for _ in range(2)] == [False, True]


# refusals


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1"),
        ({"every": 0}, "every=0"),
        ({"metrics": {}}, "metrics="),
        ({"metrics": {"loss": 0.0}}, "metrics\\['loss'\\]=0"),
        ({"metrics": {"loss": math.inf}}, "metrics\\['loss'\\]=inf"),
        ({"sampling": "full"}, "sampling='full'"),
    ],
)
def test_plans_that_make_no_sense_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        evaluation(**arguments)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ({"allow_evaluation": False}, "an evaluation: this client's policy has allow_evaluation=False"),
        ({"min_evaluation_noise_std": 0.5}, "noise_std=0.4 of an evaluation: this client's policy requires at least 0.5"),
        ({"min_evaluation_noise_multiplier": 3.0}, "noise_multiplier=2 of an evaluation"),
        ({"max_clip_norm": 1.0, "min_noise_std": 0.5}, "noise_std=0.4 of an evaluation"),
        ({"min_evaluation_noise_std": 0.4, "min_evaluation_noise_multiplier": 2.0}, None),
    ],
)
def test_a_device_may_insist_on_its_own_share_of_an_evaluations_noise_or_refuse_it(policy, match):
    """The server's word for the noise on the whole sum is no protection."""
    client = own(context_of(), policy=ClientPolicy(**policy))
    instruction = asked(placement="distributed", noise_std=0.4, noise_multiplier=2.0)
    given = {name: array.numpy() for name, array in flat().items()}
    with nullcontext() if match is None else pytest.raises(ValueError, match=f"declined: {match}"):
        assert client.evaluation(given, config_of(instruction))


def test_a_rounds_line_has_its_evaluation_and_its_cost():
    """What a round costs is known when its cohort is drawn."""
    arguments = {"placement": "distributed", "server_completes_noise": False, "sampling": PoissonSampling(sampling_rate=0.9)}
    arguments |= {"noise_multiplier": 2.0}
    plan = {"noise_multiplier": 2.0, "every": 2, "strategy_class": DPFedSAM}
    strategy, _, _ = run(*APPS["ours, 10 a node"], num_rounds=2, arguments=arguments, **plan)
    assert not any(name.startswith("private-") for name in strategy.line_of(1))
    line = strategy.line_of(2)
    assert {name for name in line if name.startswith("private-")} == {
        f"private-{name}{end}" for name in ("loss", "accuracy") for end in ("", "-standard-error")
    }
    assert line["private-accuracy"] == strategy.evaluations[2]["accuracy"]
    assert strategy.statement.epsilon <= line["epsilon"] <= 1.01 * strategy.statement.epsilon
    assert strategy.rounds[0].epsilon < strategy.rounds[1].epsilon


def test_why_an_evaluation_was_left_out_is_logged(caplog):
    with caplog.at_level("WARNING", "flwr"):
        strategy, *_ = run(client_app(lambda context: own(context, metrics=lambda *_: {"loss": 1.0})), 40, "accuracy")
    assert "The evaluation of round 1 was left out" in caplog.text
    (said,) = (line for line in strategy.statement.incidents if "evaluation" in line)  # it is charged, and shows no value
    assert said.startswith("the evaluation of round 1 was charged, and released nothing: about ")
    assert "training failed; the node's own log says why" in caplog.text.partition("was left out")[2]


def test_an_evaluation_is_never_answered_as_training_nor_training_as_evaluation():
    client = own(context_of())
    as_training = asked()
    with pytest.raises(ValueError, match="declined: method='private-evaluation'"):
        client.answer({}, {wire.KEY: as_training.to_json()})
    as_evaluation = wire.Instruction(server_round=1, method="dp-fedavg", clients=("c01",), ask=made())
    with pytest.raises(ValueError, match="declined: method='dp-fedavg'"):
        client.evaluation({}, {wire.KEY: as_evaluation.to_json()})
