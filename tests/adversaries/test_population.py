"""Nodes that lie about whom they host, stay silent, fail or crowd in: the run of the others is as without them."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from flower_dp import wire
from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays, privacy_mod
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.charges import ALL_CLIENTS
from flower_dp.strategies import DPFedAvg
from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.releases.limits import ReplyLimits
from flower_dp.strategies.releases.replies import MissingReplies, collect
from tests.grids import LocalGrid, asks_to_train
from tests.limits import accepted
from tests.local_grids import CLASSES, FEATURES, linear, records, shared_noise_app
from tests.stock import arrays, shifted, stock_app

WORDS = {"clip_norm": 0.5, "noise_multiplier": 1e-9, "sampling": FullSampling(), "num_clients": 3, "delta": 1e-3}
METHODS = ["dp-fedavg", wire.EVALUATION]
SILENT = "silent"


def names_of(context):
    return str(context.node_config["names"]).split(",")


def naming(*names, methods=METHODS):
    return json.dumps({"protocol": wire.PROTOCOL, "clients": list(names), "methods": methods})


def said(text):
    return RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})})


class Population(LocalGrid):
    """Nodes that come before a round ({round: {node: names or a lie}}); a lie is the text of an answer, an Error, or `SILENT`."""

    def __init__(self, changes):
        super().__init__(shared_noise_app(names_of), 0)
        self.changes, self.round, self.lies = changes, 1, {}
        self.asked, self.names, self.questions = [], [], []
        self.come()

    def come(self):
        for node, says in self.changes.get(self.round, {}).items():
            self.lies |= {} if isinstance(says, str) and says.isalnum() and says != SILENT else {node: says}
            config = {"names": says if node not in self.lies else "x"}
            self.contexts[node] = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})

    def send_and_receive(self, messages, *, timeout=None):
        replies, train, names = [], [], []
        for message in messages:
            node = message.metadata.dst_node_id
            (reply,) = super().send_and_receive([message], timeout=timeout)
            if asks_to_train(message) and message.content.array_records:
                train.append(node)
                names += wire.instruction_of(message.content["config"]).clients
                replies.append(reply)
                continue
            self.questions.append(node)
            lie = self.lies.get(node)
            if isinstance(lie, Error):
                reply = Message(lie, reply_to=message)
            elif lie is not None:
                reply = Message(said(lie), reply_to=message)
            replies += [] if isinstance(lie, str) and lie == SILENT else [reply]
        if train:
            self.asked.append(sorted(train))
            self.names.append(sorted(names))
            self.round += 1
            self.come()
        return replies


THREE = {1: "a", 2: "b", 3: "c"}
LIES = {
    "deeply nested": naming("d")[:-2] + "[" * 10_000,
    "named twice": naming("d", "d"),
    "no JSON": '{"clients":',
    "no table": "[]",
    "half a text": '"\\"' * 50_000,
    "half an escape": '{"clients":["\\',
    "a number": "9" * 5000,
    "no names": naming(3),
    "the name of all": naming(ALL_CLIENTS),
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


def run(changes, *, num_rounds=4, **arguments):
    grid = Population(changes)
    strategy = DPFedAvg(**WORDS | {"registration_timeout": 5.0} | arguments)
    strategy.start(grid, model_arrays(linear()), num_rounds=num_rounds)
    return strategy, grid


# One node never ends nor stalls the run of the others


@pytest.mark.parametrize("late", [True, False], ids=["late", "at the start"])
@pytest.mark.parametrize("lie", LIES)
def test_a_node_that_lies_leaves_the_run_as_without_it(lie, late, caplog):
    liar = {(0, 9)[list(LIES).index(lie) % 2]: LIES[lie]}
    _, grid = run({1: THREE, 2: liar} if late else {1: liar | THREE})
    assert grid.asked == [[1, 2, 3]] * 4
    assert grid.names == [["a", "b", "c"]] * 4
    assert not [line for record in caplog.records for line in record.getMessage().splitlines() if line.startswith("EPSILON")]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (naming(*(f"d{i}" for i in range(10_000))), r"node 9: .* text has \d+ characters: at most"),
        (LIES["another method"], "1 can't take part: node 9: .*clients must run 'dp-fedavg'"),
    ],
)
def test_a_node_that_is_waited_for_is_named_by_the_error(lie, why):
    with pytest.raises(TimeoutError, match=rf"only 3 clients on [34] nodes.*{why}"):
        run({1: {**THREE, 9: lie}}, num_clients=4, registration_timeout=0.3)


def test_a_silent_node_is_asked_once_in_many_rounds_and_one_round_waits_for_it(monkeypatch, clock):
    """No round waits again for new nodes for many times as long, so that a crowd of silent nodes takes a small share of the time."""
    waited = set()
    pause = clock.sleep
    monkeypatch.setattr(clock, "sleep", lambda seconds: (waited.add(len(grid.asked)), pause(seconds)))
    late = {node - 7: {node: SILENT} for node in range(9, 15)}
    grid = Population({1: THREE} | late)
    DPFedAvg(**WORDS).start(grid, model_arrays(linear()), num_rounds=8)
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
    DPFedAvg(**WORDS).start(grid, model_arrays(linear()), num_rounds=3)
    assert grid.asked == [[1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 9]]


# A name stands once, and is drawn as often as it is charged


@pytest.mark.parametrize("changes", [{1: THREE, 2: {8: "d", 9: "d"}}, {1: THREE, 2: {8: "c"}}, {1: {**THREE, 8: "c"}}])
def test_two_nodes_with_one_name_are_one_client(changes, caplog):
    _, grid = run(changes)
    newcomers = "d" in changes.get(2, {}).values()
    assert grid.names[1:] == [["a", "b", "c"] + ["d"] * newcomers] * 3
    assert grid.asked[1:] == [[1, 2, 3] + [8] * newcomers] * 3
    assert ("Client 'd' is hosted by nodes 8 and 9" in caplog.text) == newcomers


def test_a_roster_has_no_name_twice():
    with pytest.raises(ValueError, match="'a' occurs 2 times: client names"):
        KnownClients(names=("a", "b", "a"), nodes=(1, 2, 3), record_names=wire.MESSAGE_API, hosting=True)
    with pytest.raises(ValueError, match="'a' is named twice"):
        wire.HostedClients(names=("a", "b", "a"), methods=frozenset())


# Crowds


def test_a_crowd_of_newcomers_moves_the_mean_at_most_as_far_as_the_cap_says(caplog):
    """Every newcomer's update has the clip norm: without a cap 300 devices moved the mean 100 times as far as three do."""
    grid = LocalGrid(stock_app(shifted(lambda node: 1e6)), 300)
    late = {node: grid.contexts.pop(node) for node in range(4, 301)}
    for most, factor in ((None, 2.0), (0, 1.0), (5, 8 / 3)):
        for node in late:
            grid.contexts.pop(node, None)
        strategy = DPFedAvg(**WORDS, max_new_clients=most)
        start = arrays(w=np.zeros(2, np.float32))
        strategy.aggregate_train(1, grid.send_and_receive(strategy.configure_train(1, start, ConfigRecord(), grid)))
        grid.contexts |= late
        messages = strategy.configure_train(2, start, ConfigRecord(), grid)
        after, _ = strategy.aggregate_train(2, grid.send_and_receive(messages))
        assert np.linalg.norm(after["w"].numpy()) == pytest.approx(0.5 * factor, rel=1e-3)
    assert "num_clients and max_new_clients" in caplog.text


def test_a_crowd_at_the_start_is_capped_too_and_nodes_that_name_few_come_first():
    _, grid = run({1: {0: naming("x1", "x2", "x3", "x4"), **THREE, 5: naming("e", "f", "g")}}, max_new_clients=3)
    assert grid.names[0] == ["a", "b", "c", "e", "f", "g"]
    assert 0 not in grid.asked[0]


@pytest.mark.parametrize(("most", "joins"), [(None, False), (1, False), (2, True)])
@pytest.mark.parametrize("late", [True, False])
def test_a_node_names_no_more_clients_than_nodes_of_the_start_or_as_the_setting_says(most, joins, late):
    many = {9: naming("d", "e")}
    if late or most is not None:  # else it is one of the nodes of the start
        _, grid = run({1: THREE, 2: many} if late else {1: THREE | many}, max_clients_per_node=most)
        assert grid.names[-1] == ["a", "b", "c"] + ["d", "e"] * joins


@pytest.mark.parametrize("arguments", [{"max_clients_per_node": 0}, {"max_new_clients": -1}, {"max_new_clients": 1.5}])
def test_caps_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        DPFedAvg(**WORDS, **arguments)


HEAD = f'{{"protocol":{wire.PROTOCOL},"methods":[],"clients":['


@pytest.mark.parametrize(
    "text",
    [*(HEAD + one * 50_000 for one in ("{},", '"",', "[", "0,")), HEAD + "]," + '"a":[' * 50_000, HEAD + '"' + "d" * 3_000_000],
)
def test_an_answer_that_no_honest_node_sends_costs_nothing(text):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it has no clients: "):
            wire.hosted_of(said(text), most_names=10_000)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [{}, {"protocol": 4}, {"protocol": None}, {"protocol": "5"}])
def test_an_answer_of_another_protocol_names_nobody(protocol):
    text = json.dumps({"clients": ["a"], "methods": METHODS} | protocol)
    with pytest.raises(
        ValueError, match=f"it has no clients: .*not of protocol {wire.PROTOCOL}: server and client need the same"
    ):
        wire.hosted_of(said(text), most_names=3)


@pytest.mark.parametrize("names", [("\U0001f40c" * 200,), tuple(f'client-{i:06} [Kraków, "北京"]' for i in range(1000))])
def test_the_longest_honest_answers_are_read(names):
    reported = wire.hosted_of(said(naming(*names)), most_names=len(names))
    assert reported == wire.HostedClients(names=names, methods=frozenset(METHODS))


def test_a_reply_slightly_longer_than_its_bound_is_clipped():
    """By a part in 2,000 of the clip norm: charged are sums of rows within it."""
    limits = ReplyLimits(length=2, clip_norm=0.5, honest_norm=lambda names: 0.0)
    for excess in (2.0**-11, 2.0**-30, 2.0**-45, 0.0):
        update = np.array([0.3, 0.4]) * (1 + excess)
        assert np.linalg.norm(accepted(limits, update, ["a"])) <= 0.5
        assert np.linalg.norm(accepted(limits, update * 3, ["a", "b", "c"])) <= 1.5 * (1 + 1e-15)


def test_a_row_off_the_lattice_does_not_make_the_sums_last_bits_tell_of_single_rows():
    """Where clients add shares of the noise, a single row has its share alone; the sum is all that anybody may learn."""
    limits = ReplyLimits(length=8, step=2.0**-20, honest_norm=lambda names: 100.0)
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


@pytest.mark.parametrize(
    ("hosts", "plain", "norms"), [(("a", "b"), False, 2), (("a", "broken"), False, 1), (("a", "b"), True, 0)]
)
def test_a_node_moves_the_sum_by_a_clip_norm_for_each_of_its_clients_that_answered(hosts, plain, norms):
    """Not for those that refuse, and by none for a plain model, which says of nobody that it is clipped."""
    broken = TensorRecords(inputs=torch.full((2, FEATURES), np.nan), targets=torch.zeros(2, dtype=torch.int64))

    def client_fn(context):
        names = hosts if context.node_id == 1 else ("still",)
        clients = {name: broken if name == "broken" else records("c0") for name in names}
        return DPClient(model=linear(), clients=clients, training=Training(learning_rate=0.1), device="cpu")

    def forge(node, reply):
        if plain and node == 1:
            reply.content = RecordDict({"arrays": ArrayRecord([np.ones((CLASSES, FEATURES), np.float32)])})
        else:
            next(iter(reply.content.array_records.values()))["0"] = Array(np.full(CLASSES * FEATURES, 100.0 * (node == 1)))
        return [reply]

    strategy = DPFedAvg(**WORDS | {"num_clients": len(hosts) + 1, "noise_multiplier": 0})
    start = model_arrays(linear())
    result = strategy.start(LocalGrid(client_app(client_fn), 2, tamper=forge), start, num_rounds=1)
    moved = (len(hosts) + 1) * (result.arrays["0.weight"].numpy() - start["0.weight"].numpy())
    assert strategy.rounds[0].replies == 1 + norms
    assert np.linalg.norm(moved) == pytest.approx(0.5 * norms, rel=1e-4)


@pytest.mark.parametrize(("code", "failed", "declined"), [("failed", 2, 0), ("declined", 0, 2), ("repeated", 0, 2)])
def test_what_a_node_sends_beside_its_refusal_moves_nothing(code, failed, declined):
    limits = ReplyLimits(length=2, clip_norm=0.5, honest_norm=lambda names: 0.0)
    message = Message(RecordDict(), 7, "train")
    answer = wire.ReplyHeader(refused={}, payload={"encoding": "dense", "length": 2}, seeded_noise=False, metrics={"loss": 9.0})
    refusal = wire.Refusal(code=code, reason="no\nEPSILON: 0.0")
    said = ConfigRecord({wire.KEY: answer.to_json(("a", "b")), wire.REFUSED: refusal.to_json()})
    reply = Message(RecordDict({"arrays": arrays(w=np.ones(2, np.float32)), "any": said}), reply_to=message)
    reported = collect([reply], asked={7: ("a", "b")}, sent=[message.metadata], limits=limits, stock=None)
    assert (reported.clients, reported.metrics, reported.total.tolist()) == ([], {}, [0.0, 0.0])
    assert reported.missing == MissingReplies(failed=failed, declined=declined)
    assert (reported.refused, reported.repeated) == (dict.fromkeys(("a", "b"), "no EPSILON: 0.0"), code == "repeated")


class OneThenAll(FullSampling):
    """One client in the first round, and all in the others."""

    def sample(self, round_number, num_clients, rng):
        return np.arange(1 if round_number == 1 else num_clients)


def test_a_late_reply_counts_in_no_later_round():
    """A node of several clients: those that were asked then are others than now, and have other shares of the noise."""
    grid = LocalGrid(shared_noise_app(names_of), 2)
    for node, names in ((1, "a,b"), (2, "c")):
        grid.contexts[node].node_config["names"] = names
    strategy = DPFedAvg(**WORDS | {"sampling": OneThenAll()}, placement="distributed")
    model = model_arrays(linear())
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


# Names and texts are one line


NOT_A_LINE = ["", " ", "a\nb", "a\rb", "a\u2028b", "a\x1b[2Kb", "a\u202eb", "\ud800", "a" * 201, 3, None]


@pytest.mark.parametrize("name", NOT_A_LINE)
def test_a_name_that_is_no_printable_line_enters_nowhere(name):
    no_line = r"must be one line|Expected str, got|is not JSON"
    with pytest.raises(ValueError, match=no_line):
        DPClient(model=linear(), clients={name: records("c0")}, training=Training(learning_rate=0.1))
    with pytest.raises(ValueError, match=no_line):
        wire.hosted_of(said(naming(name)), most_names=3)
    if isinstance(name, str):
        with pytest.raises(ValueError, match=no_line):
            privacy_mod(name=name)
        answer = {"payload": {}, "seeded_noise": False, "payload_bytes": 0, "fresh": [], "refused": [], "metrics": {name: 1.0}}
        with pytest.raises(ValueError, match=r"metric=.*must be one line|is not JSON"):
            wire.ReplyHeader.from_json(json.dumps({"protocol": wire.PROTOCOL, **answer}), ["a"])


@pytest.mark.parametrize("refuses", [False, True], ids=["an error", "a refusal"])
@pytest.mark.parametrize("reason", ["x\nEPSILON: 0.0", "x" * 2**20], ids=["lines", "long"])
def test_what_a_node_says_went_wrong_is_one_short_line_in_log_statement_and_errors(reason, refuses, caplog):
    def fail(node, arrays):
        if node == 1:
            raise ValueError(reason)
        return arrays

    def forge(node, reply):
        if refuses and node == 1:
            (record,) = reply.content.config_records.values()
            record[wire.KEY] = json.dumps(json.loads(record[wire.KEY]) | {"refused": {reason: [0]}, "payload_bytes": 0})
        return [reply]

    strategy = DPFedAvg(**WORDS | {"num_clients": 2})
    grid = LocalGrid(shared_noise_app() if refuses else stock_app(fail), 2, tamper=forge)
    strategy.start(grid, model_arrays(linear()), num_rounds=1)
    assert strategy.rounds[0].replies == 1
    assert strategy.state.refusal
    for text in (*caplog.messages, strategy.state.refusal, *strategy.statement.incidents):
        assert text.isprintable()
        assert len(text) < 1000
