"""Replies are added up as they arrive and dropped; an exchange may have further stages."""

import dataclasses
import json
import random
import time
import tracemalloc
from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flower_dp import wire
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg
from flower_dp.strategies.exchange import Letter, More, PendingRound
from flower_dp.strategies.releases.limits import ReplyLimits
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies, collect
from tests.grids import LocalGrid


def naming(message, node):
    text = json.dumps({"protocol": wire.PROTOCOL, "clients": [f"c{node}"], "methods": ["dp-fedavg", "banded"], "unable": ""})
    return Message(RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})}), reply_to=message)


def reply_to(message, node, row, metrics=None, encoded=None):
    header = {"encoding": "dense", "length": row if encoded else row.size}
    size = 4 * header["length"]
    answer = wire.ReplyHeader(refused={}, payload=header, seeded_noise=False, metrics=metrics or {}, payload_bytes=size)
    array = Array(row) if encoded is None else Array(dtype="float32", shape=(row,), stype="numpy.ndarray", data=encoded)
    answered = ConfigRecord({wire.KEY: answer.to_json(asked=[f"c{node}"])})
    return Message(RecordDict({"payload": ArrayRecord({"0": array}), "answer": answered}), reply_to=message)


class Streaming(LocalGrid):
    """Every node replies when it is its turn, with bytes of its own, as a network would bring them."""

    def __init__(self, num_nodes, length):
        super().__init__(lambda message, context: naming(message, context.node_id), num_nodes)
        self.length, self.row = length, Array(np.full(length, 2.0**-20, np.float32)).data

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if wire.is_client_query(messages[0]):
            return super().send_and_receive(messages)
        for number, message in enumerate(messages):
            vars(message.metadata)["_message_id"] = str(number)
        nodes = ((message, message.metadata.dst_node_id) for message in messages)
        return (reply_to(message, node, self.length, encoded=bytes(memoryview(self.row))) for message, node in nodes)


def peak_of_rounds(num_nodes, length, num_rounds):
    """Return the most memory that a run has taken, in models of float32, and the strategy that has run."""
    strategy = DPFedAvg(num_clients=num_nodes, clip_norm=1.0, noise_multiplier=1.0, sampling=FullSampling(), delta=1e-3)
    grid, arrays = Streaming(num_nodes, length), ArrayRecord({"w": Array(np.zeros(length, np.float32))})
    tracemalloc.start()
    try:
        strategy.start(grid, arrays, num_rounds=num_rounds)
        return tracemalloc.get_traced_memory()[1] / (4 * length), strategy
    finally:
        tracemalloc.stop()


def test_a_round_holds_few_rows_whatever_the_number_of_nodes():
    """Kept replies alone would be 60 rows. The first run imports what any run needs."""
    peak_of_rounds(2, 10, 1)
    peak, strategy = peak_of_rounds(60, 2_000_000, 3)
    assert [report.replies for report in strategy.rounds] == [60] * 3
    # Of the model: the caller's, that of the run, what is sent of it twice, the sum in float64, a reply; and small things.
    assert peak < 8.5


@pytest.mark.parametrize("step", [2.0**-20, 0.0], ids=["lattice", "no lattice"])
def test_the_order_of_replies_changes_nothing(step):
    """Sums, metrics and names are the same to the last bit. Values of very different sizes: a float64 sum alone would differ."""
    rng, nodes = np.random.default_rng(3), range(1, 41)
    messages = {node: Message(RecordDict(), node, "train") for node in nodes}
    replies = []
    for node, message in messages.items():
        vars(message.metadata)["_message_id"] = str(node)
        row = (rng.standard_normal(50) * 10.0 ** rng.integers(-12, 9, 50)).astype(np.float32)
        replies.append(reply_to(message, node, row, metrics={"loss": float(rng.standard_normal())}))
    limits = ReplyLimits(length=50, step=step, honest_norm=lambda names: 1e12)
    asked, sent = {node: (f"c{node}",) for node in nodes}, [message.metadata for message in messages.values()]
    first = collect(replies[:-1], asked=asked, sent=sent, limits=limits, stock=None)
    for seed in range(5):
        other = replies[:-1]
        random.Random(seed).shuffle(other)
        again = collect(iter(other), asked=asked, sent=sent, limits=limits, stock=None)
        assert again.total.tobytes() == first.total.tobytes()
        assert (again.clients, again.metrics, again.refused) == (first.clients, first.metrics, first.refused)
    assert len(first.clients) == 39
    assert first.missing.no_reply == 1


# Three stages

MODULUS = 2**32
STEP = 2.0**-12


class Masked:
    """Three stages as in secure aggregation: seeds of masks, masked rows modulo 2^32, and the masks of those that sent no row."""

    def messages(self, now: RoundRequest, letter: Letter) -> Iterable[Message]:
        return [self.ask(now, node, {"stage": "seed"}) for node in now.asked]

    def ask(self, now, node, words):
        return Message(RecordDict({"stage": ConfigRecord(words)}), node, "query", group_id=str(now.server_round))

    def total(self, asked: PendingRound, replies: Iterable[Message], more: More, *, seeded: bool) -> CollectedReplies:
        now, collected = asked.now, CollectedReplies(total=np.zeros(asked.limits.length), seeded=seeded)
        seeds = {reply.metadata.src_node_id: reply.content["stage"]["seed"] for reply in replies if reply.has_content()}
        second = []
        for node in seeds:
            message = asked.letter.to(node, now.asked[node], now)
            message.content["stage"] = ConfigRecord({"stage": "row"})
            second.append(message)
        total, rows = np.zeros(asked.limits.length, np.int64), []
        for reply in more(second):
            if reply.has_content():
                rows.append(reply.metadata.src_node_id)
                total += reply.content["payload"]["0"].numpy()
        third = [self.ask(now, node, {"stage": "unmask", "nodes": rows}) for node in rows]
        for reply in more(third):
            total -= reply.content["payload"]["0"].numpy()
        centered = (total + MODULUS // 2) % MODULUS - MODULUS // 2
        return dataclasses.replace(collected, total=centered * STEP, clients=[name for node in rows for name in now.asked[node]])


class Party(LocalGrid):
    """Nodes of that exchange; some leave after a stage."""

    def __init__(self, num_nodes, leaves=None):
        super().__init__(self.answer, num_nodes)
        self.leaves, self.stages, self.charged, self.strategy = leaves or {}, [], [], None

    def answer(self, message, context):
        node = context.node_id
        if wire.is_client_query(message):
            return naming(message, node)
        stage = message.content["stage"]
        mask = np.random.default_rng(node).integers(0, MODULUS, 3)
        if stage["stage"] == "seed":
            return Message(RecordDict({"stage": ConfigRecord({"seed": node})}), reply_to=message)
        value = mask if stage["stage"] == "unmask" else (np.full(3, round(node * 0.01 / STEP)) + mask) % MODULUS
        return Message(RecordDict({"payload": ArrayRecord({"0": Array(value)})}), reply_to=message)

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        if wire.is_client_query(messages[0]):
            return replies
        stage = messages[0].content["stage"]["stage"]
        self.stages.append((stage, len(messages), timeout))
        self.charged.append(sum(self.strategy.charges.numbers().values()))
        return [reply for reply in replies if self.leaves.get(reply.metadata.src_node_id) != stage]


def masked_run(grid, *, own_loop=False, exchange=None, timeout=60.0):
    strategy = DPFedAvg(num_clients=4, clip_norm=1.0, noise_multiplier=1e-7, sampling=FullSampling(), delta=1e-3)
    strategy._session.exchange, grid.strategy = exchange or Masked(), strategy
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    if not own_loop:
        return strategy, strategy.start(grid, arrays, num_rounds=2, timeout=timeout).arrays["w"].numpy()
    for server_round in (1, 2):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
    return strategy, arrays["w"].numpy()


@pytest.mark.parametrize("own_loop", [False, True])
def test_an_exchange_of_three_stages_gives_the_sum_and_is_charged_once_a_round(own_loop):
    grid = Party(4)
    strategy, model = masked_run(grid, own_loop=own_loop)
    np.testing.assert_allclose(model, 2 * sum(round(node * 0.01 / STEP) * STEP for node in (1, 2, 3, 4)) / 4, atol=1e-5)
    assert [stage[:2] for stage in grid.stages] == [("seed", 4), ("row", 4), ("unmask", 4)] * 2
    assert grid.charged == [1, 1, 1, 2, 2, 2]
    assert strategy.statement.num_charged_rounds == 2
    if not own_loop:  # the stages of a round share its time
        times = [left for *_, left in grid.stages]
        assert 60 >= times[0] > times[1] > times[2] > 0


def test_a_node_that_leaves_between_two_stages_is_missing_in_the_sum():
    grid = Party(4, leaves={2: "row"})
    strategy, model = masked_run(grid)
    np.testing.assert_allclose(model, 2 * sum(round(node * 0.01 / STEP) * STEP for node in (1, 3, 4)) / 4, atol=1e-5)
    assert [report.replies for report in strategy.rounds] == [3, 3]


def test_after_the_deadline_no_stage_is_sent():
    class Late(Masked):
        def total(self, asked, replies, more, *, seeded):
            time.sleep(0.3)
            return super().total(asked, replies, more, seeded=seeded)

    grid = Party(4)
    with pytest.raises(RuntimeError, match="usable update"):
        masked_run(grid, exchange=Late(), timeout=0.2)
    assert {stage for stage, *_ in grid.stages} == {"seed"}


@pytest.mark.parametrize("clip_norm", [2.0, None])
def test_every_entry_of_a_long_vector_is_added_once_and_clipped_as_a_whole(clip_norm: float | None) -> None:
    """It is added in blocks."""
    vector = np.random.default_rng(3).standard_normal(2**16 + 7)
    total = np.ones(vector.size)
    limits = ReplyLimits(length=vector.size, clip_norm=clip_norm, step=2.0**-20, honest_norm=lambda names: 1e3)
    limits.add(total, vector, ("a", "b"))
    norm = np.linalg.norm(vector) if clip_norm is None else 2 * clip_norm  # of two clients
    expected = vector * (norm / np.linalg.norm(vector))
    assert np.abs(total - 1 - expected).max() <= 2.0**-19  # a step, and what the clip stays below its bound
