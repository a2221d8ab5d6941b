"""Nodes that lie about whom they host, stay silent, fail or crowd in: the run of the others is as without them."""

import json
import logging
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Context, Error, Message, RecordDict
from torch import nn

from flower_dp import record_run, wire
from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays, privacy_mod
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy.charges import EVERY_CLIENT
from flower_dp.running.run_folder import read_metrics
from flower_dp.strategies import DPFedAvg, PrivateEvaluation
from flower_dp.strategies.population.client_manager import ClientManager, KnownClients
from flower_dp.strategies.population.client_query import ClientQuery
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.replies import Collected, Missing, StockReply, collect
from tests.grids import LocalGrid, asks_to_train
from tests.limits import accepted
from tests.stock import arrays, shifted, stock_app

WORDS = {"clip_norm": 0.5, "noise_multiplier": 1e-9, "sampling": FullSampling(), "num_clients": 3, "delta": 1e-3}
RECORDS = TensorRecords(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64))
METHODS = ["dp-fedavg", wire.EVALUATION]
SILENT = "silent"


def app():
    def client_fn(context):
        clients = dict.fromkeys(str(context.node_config["names"]).split(","), RECORDS)
        return DPClient(model=nn.Linear(2, 2), clients=clients, training=Training(learning_rate=0.1))

    return client_app(client_fn)


def naming(*names, methods=METHODS):
    return json.dumps({"protocol": wire.PROTOCOL, "clients": list(names), "methods": methods})


class Population(LocalGrid):
    """Nodes that come before a round ({round: {node: names or a lie}}); a lie is the text of an answer, an Error, or `SILENT`."""

    def __init__(self, changes, app_of_all=None):
        super().__init__(app_of_all or app(), 0)
        self.changes, self.round, self.lies = changes, 1, {}
        self.asked, self.questions = [], []
        self.come()

    def come(self):
        for node, says in self.changes.get(self.round, {}).items():
            self.lies |= {} if isinstance(says, str) and says.isalnum() and says != SILENT else {node: says}
            config = {"names": says if node not in self.lies else "x"}
            self.contexts[node] = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})

    def send_and_receive(self, messages, *, timeout=None):
        replies, train = [], []
        for message in messages:
            node = message.metadata.dst_node_id
            (reply,) = super().send_and_receive([message], timeout=timeout)
            if asks_to_train(message) and message.content.array_records:
                train.append(node)
                replies.append(reply)
                continue
            self.questions.append(node)
            lie = self.lies.get(node)
            if isinstance(lie, Error):
                reply = Message(lie, reply_to=message)
            elif lie is not None:
                reply = Message(RecordDict({wire.KEY: ConfigRecord({wire.KEY: lie})}), reply_to=message)
            replies += [] if isinstance(lie, str) and lie == SILENT else [reply]
        if train:
            self.asked.append(sorted(train))
            self.round += 1
            self.come()
        return replies


THREE = {1: "a", 2: "b", 3: "c"}
DEEP = f'{{"protocol": {wire.PROTOCOL}, "clients": ' + "[" * 10_000
LIES = {
    "deeply nested": DEEP,
    "named twice": naming("d", "d"),
    "no JSON": '{"clients":',
    "no table": "[]",
    "half a text": '"\\"' * 50_000,
    "half an escape": '{"clients":["\\',
    "a number": "9" * 5000,
    "no names": naming(3),
    "the name of all": naming(EVERY_CLIENT),
    "a line end": naming("d\nEPSILON: 0.0"),
    "too long": naming("d" * 201),
    "too many": naming(*(f"d{i}" for i in range(100_000))),
    "another method": naming("d", methods=["nbafl"]),
    "many methods": naming("d", methods=["x"] * 99),
    "its own error": json.dumps({"protocol": wire.PROTOCOL, "clients": [], "methods": [], "error": "x\nEPSILON: 0.0"}),
    "an error": Error(code=2, reason="broken\nEPSILON: 0.0"),
    "a stock app's error": Error(code=2, reason="No query function registered"),
    "gone": Error(code=3, reason="unavailable"),
    "silent": SILENT,
}


def run(changes, *, num_rounds=4, model=None, **arguments):
    grid = Population(changes)
    strategy = DPFedAvg(**WORDS | {"registration_timeout": 5.0} | arguments)
    result = strategy.start(grid, model_arrays(model or nn.Linear(2, 2)), num_rounds=num_rounds)
    return strategy, grid, result


# One node never ends nor stalls the run of the others


@pytest.mark.parametrize("lie", LIES)
def test_a_late_node_that_lies_leaves_the_run_as_without_it(lie, caplog):
    strategy, grid, _ = run({1: THREE, 2: {9: LIES[lie]}})
    assert grid.asked == [[1, 2, 3]] * 4
    assert strategy._manager._known.names == ("a", "b", "c")
    assert not [line for record in caplog.records for line in record.getMessage().splitlines() if line.startswith("EPSILON")]


@pytest.mark.parametrize(("lie", "at"), [(lie, (0, 9)[place % 2]) for place, lie in enumerate(LIES)])
def test_a_node_that_lies_at_the_start_leaves_the_run_as_without_it(lie, at):
    strategy, grid, _ = run({1: {at: LIES[lie], **THREE}})
    assert grid.asked == [[1, 2, 3]] * 4
    assert strategy._manager._known.names == ("a", "b", "c")


def test_a_node_that_is_waited_for_is_named_by_the_error():
    with pytest.raises(TimeoutError, match=r"only 3 clients on 3 nodes.*node 9: .* text has \d+ characters: at most"):
        run({1: {**THREE, 9: naming(*(f"d{i}" for i in range(10_000)))}}, num_clients=4, registration_timeout=0.3)


@pytest.mark.parametrize("crowd", [False, True], ids=["one", "a new one in every round"])
def test_a_silent_node_is_asked_once_in_many_rounds_and_one_round_waits_for_it(crowd, monkeypatch, clock):
    """No round waits again for new nodes for many times as long, so that a crowd of silent nodes takes a small share of the time."""
    waited = set()
    pause = clock.sleep
    monkeypatch.setattr(clock, "sleep", lambda seconds: (waited.add(len(grid.asked)), pause(seconds)))
    late = {node - 7: {node: SILENT} for node in range(9, 15 if crowd else 10)}
    grid = Population({1: THREE} | late)
    DPFedAvg(**WORDS).start(grid, model_arrays(nn.Linear(2, 2)), num_rounds=8)
    assert [grid.questions.count(node) for (node,) in late.values()] == [1] * len(late)
    assert grid.asked == [[1, 2, 3]] * 8
    assert waited == {1}


def test_a_late_node_that_answers_within_the_wait_takes_part_in_the_next_round():
    polls = []

    class Slow(Population):
        def pull_messages(self, message_ids):
            polls.append(len(self.asked))
            return [] if self.asked and polls.count(1) < 4 else super().pull_messages(message_ids)

    grid = Slow({1: THREE, 2: {9: "d"}})
    DPFedAvg(**WORDS).start(grid, model_arrays(nn.Linear(2, 2)), num_rounds=3)
    assert grid.asked == [[1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 9]]


def test_a_silent_node_is_asked_again_after_longer_and_longer_pauses_and_a_late_answer_counts(clock):
    clock.now = 0.0
    grid, client_query, asked = Population({1: {1: "a"}}), ClientQuery(), []
    client_query.ask(grid, [1], most_names=3)
    grid.come()
    grid.lies[2] = SILENT
    grid.contexts[2] = grid.contexts[1]
    while clock.now < 500:
        before = len(grid.questions)
        assert client_query.ask(grid, [2], most_names=3, late=True) == {}
        asked += [clock.now] * (len(grid.questions) - before)
        clock.now += 1
    assert asked == [0, 31, 92, 213, 454]
    first = next(sent for sent, (_, question) in client_query._sent.items() if question.since == 0)
    answer = Message(RecordDict({wire.KEY: ConfigRecord({wire.KEY: naming("b")})}), reply_to=grid.sent[0])
    answer.metadata.__dict__["_reply_to_message_id"] = first
    grid.waiting.append(answer)
    assert client_query.ask(grid, [2], most_names=3, late=True)[2].names == ("b",)
    assert not client_query.silent


def test_one_node_does_not_decide_that_the_app_is_a_stock_one():
    """A stock client has no name, no policy and no budget: clients of this package would all decline."""
    for changes in ({1: {0: LIES["a stock app's error"], **THREE}}, {1: {0: LIES["a stock app's error"], 1: "a"}}):
        strategy, _, _ = run(changes, num_clients=len(changes[1]) - 1)
        assert strategy._manager._known.hosting
        assert strategy.rounds[0].replies == len(changes[1]) - 1


# A name stands once, and is drawn as often as it is charged


def test_two_newcomers_with_one_name_are_one_client(caplog):
    strategy, grid, _ = run({1: THREE, 2: {8: "d", 9: "d"}})
    assert strategy._manager._known.names == ("a", "b", "c", "d")
    assert grid.asked[1:] == [[1, 2, 3, 8]] * 3
    assert "client 'd' is hosted by nodes 8 and 9" in caplog.text


def test_two_nodes_with_one_name_at_the_start_are_one_client():
    _, grid, _ = run({1: {**THREE, 8: "c"}})
    assert grid.asked == [[1, 2, 3]] * 4


def test_a_roster_has_no_name_twice():
    with pytest.raises(ValueError, match="'a' stands 2 times: client names"):
        KnownClients(names=("a", "b", "a"), nodes=(1, 2, 3), record_names=wire.MESSAGE_API, hosting=True)
    with pytest.raises(ValueError, match="'a' is named twice"):
        wire.Hosted(names=("a", "b", "a"), methods=frozenset())


def test_a_name_that_many_nodes_claim_is_drawn_at_its_rate():
    """2,000 Poisson cohorts: a rate 5 standard deviations (0.05) from 0.3 has a probability below 1e-6."""
    grid = Population({1: THREE})
    manager = ClientManager(3, timeout=1, newcomers=True)
    manager.known_clients(grid)
    grid.changes = {1: dict.fromkeys(range(10, 20), "d")}
    grid.come()
    known_clients = manager.known_clients(grid)
    strategy = DPFedAvg(**WORDS | {"sampling": PoissonSampling(sampling_rate=0.3)}, noise_seed=1)
    counts = dict.fromkeys(known_clients.names, 0)
    for server_round in range(2000):
        for index in strategy.rules.training.cohort(known_clients.names, strategy._run.generator("cohort", server_round)):
            counts[known_clients.names[index]] += 1
    assert all(abs(count / 2000 - 0.3) < 0.05 for count in counts.values())


# Crowds


def test_a_crowd_of_newcomers_moves_the_mean_at_most_as_far_as_the_cap_says(caplog):
    """Every newcomer's update has the clip norm: without a cap 300 devices moved the mean 100 times as far as three do."""
    grid = LocalGrid(stock_app(shifted(lambda node: 1e6)), 300)
    late = {node: grid.contexts.pop(node) for node in range(4, 301)}
    for most, factor in ((None, 2.0), (0, 1.0), (5, 8 / 3)):
        for node in late:
            grid.contexts.pop(node, None)
        strategy = DPFedAvg(**WORDS, most_newcomers=most)
        start = arrays(w=np.zeros(2, np.float32))
        strategy.aggregate_train(1, grid.send_and_receive(strategy.configure_train(1, start, ConfigRecord(), grid)))
        grid.contexts |= late
        messages = strategy.configure_train(2, start, ConfigRecord(), grid)
        after, _ = strategy.aggregate_train(2, grid.send_and_receive(messages))
        assert np.linalg.norm(after["w"].numpy()) == pytest.approx(0.5 * factor, rel=1e-3)
    assert "num_clients and most_newcomers" in caplog.text


def test_a_crowd_at_the_start_is_capped_too_and_nodes_that_name_few_come_first():
    strategy, grid, _ = run({1: {0: naming("x1", "x2", "x3", "x4"), **THREE, 5: naming("e", "f", "g")}}, most_newcomers=3)
    assert strategy._manager._known.names == ("a", "b", "c", "e", "f", "g")
    assert 0 not in grid.asked[0]


@pytest.mark.parametrize(("most", "joins"), [(None, False), (1, False), (2, True)])
def test_a_late_node_names_no_more_clients_than_nodes_of_the_start_or_as_the_setting_says(most, joins):
    strategy, _, _ = run({1: THREE, 2: {9: naming("d", "e")}}, most_clients_per_node=most)
    assert strategy._manager._known.names == ("a", "b", "c") + (("d", "e") if joins else ())


def test_a_setting_caps_the_nodes_of_the_start():
    strategy, grid, _ = run({1: {0: naming("x", "y"), **THREE}}, most_clients_per_node=1)
    assert strategy._manager._known.names == ("a", "b", "c")
    assert grid.asked[0] == [1, 2, 3]


@pytest.mark.parametrize("arguments", [{"most_clients_per_node": 0}, {"most_newcomers": -1}, {"most_newcomers": 1.5}])
def test_caps_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        DPFedAvg(**WORDS, **arguments)


def test_a_method_without_newcomers_takes_none_whatever_the_setting():
    strategy, _, _ = run({1: THREE, 2: {9: "d"}}, sampling=RoundRobinSampling(cohort_size=1), most_newcomers=9)
    assert strategy._manager._known.names == ("a", "b", "c")


HEAD = f'{{"protocol":{wire.PROTOCOL},"methods":[],"clients":['


@pytest.mark.parametrize("most_names", [3, 10_000])
@pytest.mark.parametrize(
    "text",
    [
        *(HEAD + one * 50_000 for one in ("{},", '"",', '"a",', "[", "0,")),
        HEAD + "]," + '"a":[' * 50_000,
        HEAD + '"' + "d" * 3_000_000,
        "[" * 50_000,
        '{"a":' * 5000,
    ],
)
def test_an_answer_that_no_honest_node_sends_costs_nothing(text, most_names):
    content = RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it has no clients: "):
            wire.hosted_of(content, most_names=most_names)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_an_answer_that_is_too_long_is_not_parsed(monkeypatch):
    monkeypatch.setattr(wire.structs, "_decoder", None)
    content = RecordDict({wire.KEY: ConfigRecord({wire.KEY: naming("d" * 5000)})})
    with pytest.raises(ValueError, match=r"has 50\d\d characters: at most 4864"):
        wire.hosted_of(content, most_names=3)


@pytest.mark.parametrize("changes", [{"protocol": 4}, {"protocol": None}, {"protocol": "5"}])
def test_an_answer_of_another_protocol_names_nobody(changes):
    table = json.loads(naming("a"))
    del table["protocol"]
    for changed in (table, table | changes):
        content = RecordDict({wire.KEY: ConfigRecord({wire.KEY: json.dumps(changed)})})
        with pytest.raises(
            ValueError, match=f"it has no clients: .*not of protocol {wire.PROTOCOL}: server and client need the same"
        ):
            wire.hosted_of(content, most_names=3)


def test_the_longest_honest_answers_are_read():
    for names in (("\U0001f40c" * 200,), tuple(f'client-{i:06} [Kraków, "北京"]' for i in range(1000))):
        content = RecordDict({wire.KEY: ConfigRecord({wire.KEY: naming(*names)})})
        reported = wire.hosted_of(content, most_names=len(names))
        assert reported == wire.Hosted(names=names, methods=frozenset(METHODS))


def test_a_reply_slightly_longer_than_its_bound_is_clipped():
    """By a part in 2,000 of the clip norm: charged are sums of rows within it."""
    limits = Limits(length=2, clip_norm=0.5, honest_norm=lambda names: 0.0)
    for excess in (2.0**-11, 2.0**-30, 2.0**-45, 0.0):
        update = np.array([0.3, 0.4]) * (1 + excess)
        assert np.linalg.norm(accepted(limits, update, ["a"])) <= 0.5
        assert np.linalg.norm(accepted(limits, update * 3, ["a", "b", "c"])) <= 1.5 * (1 + 1e-15)


def test_a_row_off_the_lattice_does_not_make_the_sums_last_bits_tell_of_single_rows():
    """Where clients add shares of the noise, a single row has its share alone; the sum is all that anybody may learn."""
    limits = Limits(length=8, step=2.0**-20, honest_norm=lambda names: 100.0)
    honest = np.array([np.full(8, 4 - 2.0**-9), np.full(8, 1.0)])
    moved = np.array([np.full(8, 2.0**-8), np.full(8, -(2.0**-8))])  # another pair of rows with this sum, beyond 4
    forged = np.pi * np.arange(1, 9) * 2.0**-22
    sums = []
    for rows in (honest, honest + moved):
        total = np.zeros(8)
        for row in (rows[0], forged, rows[1]):
            total += accepted(limits, row, ["a"])
        sums.append(total)
    np.testing.assert_array_equal(*sums)
    np.testing.assert_array_equal(accepted(limits, honest[0], ["a"]), honest[0])


def test_a_node_of_several_clients_is_clipped_to_as_many_clip_norms():
    def forge(node, reply):
        record = next(iter(reply.content.array_records.values()))
        record["0"] = Array(np.full(6, 100.0, np.float32))
        return [reply]

    def client_fn(context):
        clients = dict.fromkeys(("a", "b") if context.node_id == 1 else ("c", "d"), RECORDS)
        return DPClient(model=nn.Linear(2, 2), clients=clients, training=Training(learning_rate=0.1))

    strategy = DPFedAvg(**WORDS | {"num_clients": 4, "noise_multiplier": 0})
    start = model_arrays(nn.Linear(2, 2))
    result = strategy.start(LocalGrid(client_app(client_fn), 2, tamper=forge), start, num_rounds=1)
    moved = [(result.arrays[name].numpy() - start[name].numpy()).ravel() for name in start]
    assert np.linalg.norm(np.concatenate(moved)) == pytest.approx(0.5, rel=1e-4)


def test_the_reply_of_a_stock_client_stands_for_one_client():
    """A node that is asked for two clients and sends a plain model, under a strategy that takes its clients for stock ones."""
    model = wire.Model.of(arrays(w=np.zeros(2, np.float32)), frozen=())
    limits = Limits(length=2, clip_norm=0.5, honest_norm=lambda names: 0.0)
    for names, counted in ((("a",), 1), (("a", "b"), 0)):
        message = Message(RecordDict(), 7, "train")
        reply = Message(RecordDict({"arrays": arrays(w=np.ones(2, np.float32))}), reply_to=message)
        stock = StockReply(read=lambda content: model.read(wire.arrays_of(content)), num_arrays=1)
        reported = collect([reply], asked={7: names}, sent=[message.metadata], limits=limits, stock=stock)
        assert len(reported.clients) == counted
        assert np.linalg.norm(reported.total) == pytest.approx(0.5 * counted)


@pytest.mark.parametrize(("code", "failed", "declined"), [("failed", 2, 0), ("declined", 0, 2), ("repeated", 0, 2)])
def test_what_a_node_sends_beside_its_refusal_moves_nothing(code, failed, declined):
    limits = Limits(length=2, clip_norm=0.5, honest_norm=lambda names: 0.0)
    message = Message(RecordDict(), 7, "train")
    answer = wire.Answer(refused={}, payload={"encoding": "dense", "length": 2}, seeded_noise=False, metrics={"loss": 9.0})
    refusal = wire.Refusal(code=code, reason="no\nEPSILON: 0.0")
    said = ConfigRecord({wire.KEY: answer.to_json(("a", "b")), wire.REFUSED: refusal.to_json()})
    reply = Message(RecordDict({"arrays": arrays(w=np.ones(2, np.float32)), "any": said}), reply_to=message)
    reported = collect([reply], asked={7: ("a", "b")}, sent=[message.metadata], limits=limits, stock=None)
    assert (reported.clients, reported.metrics, reported.total.tolist()) == ([], {}, [0.0, 0.0])
    assert reported.missing == Missing(failed=failed, declined=declined)
    assert (reported.refused, reported.repeated) == (dict.fromkeys(("a", "b"), "no EPSILON: 0.0"), code == "repeated")


def test_a_late_reply_counts_in_no_later_round():
    """A node of several clients: those that were asked then are others than now, and have other shares of the noise."""
    grid = LocalGrid(app(), 2)
    for node, names in ((1, "a,b"), (2, "c")):
        grid.contexts[node].node_config["names"] = names
    strategy = DPFedAvg(**WORDS | {"sampling": OneThenAll()}, placement="distributed")
    model = model_arrays(nn.Linear(2, 2))
    late = grid.send_and_receive(strategy.configure_train(1, model, ConfigRecord(), grid))
    messages = strategy.configure_train(2, model, ConfigRecord(), grid)
    strategy.aggregate_train(2, [*late, *grid.send_and_receive(messages)[1:]])
    # The reply of one client with one share of the noise counted as that of two.
    assert strategy.rounds[-1].replies == 1
    messages = strategy.configure_train(3, model, ConfigRecord(), grid)
    strategy.aggregate_train(3, [*late, *grid.send_and_receive(messages)])
    assert strategy.rounds[-1].replies == 3


def test_a_late_reply_counts_in_no_later_round_of_a_grid_that_sends_when_the_first_reply_is_awaited():
    """Its messages have no id before: every reply in a node's name was taken for the one to this round."""
    grid, strategy = LocalGrid(stock_app(shifted(lambda node: 0.1)), 3), DPFedAvg(**WORDS)
    model = arrays(w=np.zeros(1, np.float32))
    late = grid.send_and_receive(strategy.configure_train(1, model, ConfigRecord(), grid))
    strategy.aggregate_train(1, [])
    messages = strategy.configure_train(2, model, ConfigRecord(), grid)

    def sent():
        for message in messages:
            yield from late
            yield from grid.send_and_receive([message])[: message.metadata.dst_node_id - 1]

    strategy.aggregate_train(2, sent())
    assert strategy.rounds[-1].replies == 2  # not that of node 1, of which the grid has only the late one


class OneThenAll(FullSampling):
    """One client in the first round, and all in the others."""

    def choose(self, round_number, num_clients, rng):
        return np.arange(1 if round_number == 1 else num_clients)


@pytest.mark.parametrize("is_error", [False, True])
def test_a_reply_in_the_name_of_another_node_does_not_take_its_place(is_error):
    """Flower's grid returns the metadata that a device has packed with its reply; the SuperLink compares those beside it."""
    grid = LocalGrid(stock_app(shifted(lambda node: -1e6 if node == 3 else 0.1)), 3)
    strategy, start = DPFedAvg(**WORDS), arrays(w=np.zeros(1, np.float32))
    one, two, three = grid.send_and_receive(strategy.configure_train(1, start, ConfigRecord(), grid))
    forged = Message(Error(code=0, reason="no"), reply_to=grid.sent[-1]) if is_error else three
    forged.metadata.__dict__["_src_node_id"] = 1
    after, _ = strategy.aggregate_train(1, [forged, one, two])
    assert strategy.rounds[0].replies == 2
    assert after["w"].numpy()[0] == pytest.approx(0.2 / 3, rel=1e-3)


# What is published does not tell who takes part


class TwoOfThree(FullSampling):
    """A user's own sampling: whether its cost counts on a secret is not known."""

    def choose(self, server_round, num_clients, rng):
        return rng.permutation(num_clients)[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "secret"),
    [
        ({"sampling": PoissonSampling(sampling_rate=0.5)}, True),
        ({"evaluation": PrivateEvaluation(sampling=PoissonSampling(sampling_rate=0.5), noise_multiplier=1.0)}, True),
        ({"sampling": FixedSizeSampling(cohort_size=2), "relation": "replace-one"}, True),
        ({"sampling": TwoOfThree()}, True),
        ({"sampling": FixedSizeSampling(cohort_size=3)}, False),
        ({}, False),
    ],
)
def test_times_are_published_only_where_cohorts_are_no_secret(arguments, secret, tmp_path):
    strategy = DPFedAvg(**WORDS | arguments)
    record_run(strategy, Population({1: THREE}), model_arrays(nn.Linear(2, 2)), num_rounds=3, config={}, path=tmp_path / "run")
    for line in read_metrics(tmp_path / "run")[1:]:
        assert ("elapsed" in line) is not secret
        assert ("seconds" in line) is not (secret and "sampling" in arguments)


def test_a_statement_does_not_count_missing_updates_where_cohorts_are_secret():
    """Of one round they are the cohort, if all fail; and a client that always fails would be seen to take part."""
    fixed = FixedSizeSampling(cohort_size=2)
    for sampling, reported in ((PoissonSampling(sampling_rate=0.5), False), (fixed, False), (FullSampling(), True)):
        strategy = DPFedAvg(**WORDS | {"sampling": sampling, "relation": "replace-one"})
        strategy.plan(3)
        strategy.state = replace(strategy.state, missing=Missing(failed=2))
        assert any("did not count" in line for line in strategy.statement.incidents) is reported


# Names and texts are one line


NOT_A_LINE = ["", " ", "a\nb", "a\rb", "a\u2028b", "a\x1b[2Kb", "a\u202eb", "\ud800", "a" * 201, 3, None]


@pytest.mark.parametrize("name", NOT_A_LINE)
def test_a_name_that_is_no_printable_line_enters_nowhere(name):
    with pytest.raises(ValueError, match="must be one line of printable characters"):
        DPClient(model=nn.Linear(2, 2), clients={name: RECORDS}, training=Training(learning_rate=0.1))
    if name is not None:
        with pytest.raises(ValueError, match="must be one line of printable characters"):
            privacy_mod(name=name)
    text = naming(name)
    with pytest.raises(ValueError, match=r"must be one line of printable characters|Expected str, got|is not JSON"):
        wire.hosted_of(RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})}), most_names=3)


def test_reasons_of_clients_are_one_line_in_log_and_errors(caplog):
    collected = Collected(total=np.zeros(1))
    with caplog.at_level(logging.WARNING, "flwr"):
        collected.leave_out(1, ("a",), "x\nEPSILON: 0.0", Missing(rejected=1))
    collected.add_refused({"b": wire.Refusal(reason="declined:\r\nEPSILON: 0.0")})
    for text in (*collected.refused.values(), *(record.getMessage() for record in caplog.records)):
        assert text.isprintable()


def test_a_metric_of_a_client_has_a_name_of_one_line():
    arguments = {
        "payload": {"codec": "dense", "length": 3},
        "seeded_noise": False,
        "payload_bytes": 0,
        "fresh": [],
        "refused": [],
    }
    for name in ("loss\n", "l" * 201, ""):
        text = json.dumps({"protocol": wire.PROTOCOL, **arguments, "metrics": {name: 1.0}})
        with pytest.raises(ValueError, match=r"metric=.*must be one line"):
            wire.Answer.from_json(text, ["a"])


def test_an_evaluation_with_noise_from_a_seed_is_refused():
    def client_fn(context):
        clients = {str(context.node_config["names"]): RECORDS}
        return DPClient(model=nn.Linear(2, 2), clients=clients, training=Training(learning_rate=0.1), noise_seed=1)

    grid = Population({1: THREE}, client_app(client_fn))
    strategy = DPFedAvg(**WORDS, evaluation=PrivateEvaluation(sampling=FullSampling(), noise_multiplier=1e-3, every=1))
    strategy.plan(1)
    assert len(strategy.configure_train(1, model_arrays(nn.Linear(2, 2)), ConfigRecord(), grid)) == 3
    messages = strategy.configure_evaluate(1, model_arrays(nn.Linear(2, 2)), ConfigRecord(), grid)
    assert len(messages) == 3
    assert strategy.aggregate_evaluate(1, grid.send_and_receive(messages)) is None
    assert math.isfinite(strategy.epsilon)
    assert any("fixed seed" in line for line in strategy.statement.incidents)


def test_the_seed_of_a_test_is_the_servers_own():
    """A client's word does not make a run count as a test."""
    collected = Collected(total=np.zeros(1))
    with pytest.raises(ValueError, match="fixed seed"):
        collected.check_seed(True)
    collected.check_seed(False)
    Collected(total=np.zeros(1), seeded=True).check_seed(True)
    assert math.isinf(DPFedAvg(**WORDS, noise_seed=1).epsilon)
