"""Devices whose replies Flower's grid can't unpack, or which cost much to read: the run of the others goes on as without them."""

import sys
import time
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id  # noqa: TID251

from flower_dp import wire
from flower_dp.clients import model_arrays
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg
from tests.grids import LocalGrid
from tests.http_grids import LocalHttpGrid
from tests.local_grids import CLASSES, FEATURES, linear, shared_noise_app


class HttpGrid(LocalHttpGrid):
    """Flower's own grid, with a SuperLink in this process that passes on what devices have packed; node 4 forges it.

    `honest_queries`: it has named its client honestly.
    """

    def __init__(self, forge, *, honest_queries):
        super().__init__(LocalGrid(shared_noise_app(), 4))
        self.forge, self.honest_queries = forge, honest_queries

    def reply(self, message, reply, objects):
        number = reply.object_id
        if message.metadata.dst_node_id == 4 and not (self.honest_queries and message.metadata.message_type == "query"):
            number, objects = self.forge(number, objects, reply)
        return number, objects, objects


def strategy_of(num_clients):
    return DPFedAvg(clip_norm=0.5, noise_multiplier=1.0, sampling=FullSampling(), num_clients=num_clients, delta=1e-3)


def garbage(number, objects, reply):
    content = b"Message  3\x00\xff\xff\xff"
    return get_object_id(content), {get_object_id(content): content}


def array(number, objects, reply):
    part = Array(np.zeros(2, np.float32))
    return part.object_id, {name: one.deflate() for name, one in get_all_nested_objects(part).items()}


def without_content(number, objects, reply):
    return number, {number: objects[number].replace(b"\x00", b"", 1)}


def of_another(number, objects, reply):
    """The SuperLink has it for one message, and its device has written another's id into it, and another node's."""
    reply.metadata.__dict__["_src_node_id"], reply.metadata.__dict__["_reply_to_message_id"] = 1, "another"
    return honest(reply.object_id, objects, reply)


def to_another(number, objects, reply):
    reply.metadata.__dict__["_reply_to_message_id"] = "another"
    return honest(reply.object_id, objects, reply)


def honest(number, objects, reply):
    return number, {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}


@pytest.mark.parametrize(("forge", "replies"), [(garbage, 3), (array, 3), (without_content, 3), (of_another, 3), (honest, 4)])
def test_a_reply_that_flowers_grid_cant_unpack_ends_no_run(forge, replies):
    strategy = strategy_of(3)
    strategy.start(HttpGrid(forge, honest_queries=False), model_arrays(linear()), num_rounds=2, timeout=20.0)
    assert [report.replies for report in strategy.rounds] == [replies] * 2


@pytest.mark.parametrize("forge", [garbage, array, of_another, to_another])
def test_an_update_that_flowers_grid_cant_unpack_counts_as_missing(forge):
    strategy, begun = strategy_of(4), time.monotonic()
    strategy.start(HttpGrid(forge, honest_queries=True), model_arrays(linear()), num_rounds=2, timeout=20.0)
    assert [report.replies for report in strategy.rounds] == [3, 3]
    assert strategy.missing.no_reply == 2
    assert time.monotonic() - begun < 15  # it is not waited for


# Replies that cost much to read

HONEST = ArrayRecord([np.zeros(FEATURES * CLASSES, np.float32)])
HEAD = f'{{"protocol":{wire.PROTOCOL},"payload":{{"encoding":"dense","length":18}},"payload_bytes":0,"seeded_noise":false,'
# Replies of some 16 MB.
HOSTILE = {
    "deep": lambda: {"flower-dp": ConfigRecord({wire.KEY: HEAD + '"metrics":{},"refused":' + "[" * 10**7})},
    "metrics": lambda: {
        "flower-dp": ConfigRecord(
            {wire.KEY: HEAD + '"refused":{},"metrics":{' + ",".join(f'"{i}":1' for i in range(10**6)) + "}}"}
        )
    },
    "arrays": lambda: {"arrays": ArrayRecord({str(i): Array(np.zeros(0, np.float32)) for i in range(5000)})},
    "huge array": lambda: {"arrays": ArrayRecord([np.zeros(2**22, np.float32)])},
    "metric record": lambda: {"m": MetricRecord({str(i): 1.0 for i in range(10**5)})},
    "list of texts": lambda: {"m": ConfigRecord({"x": ["ab"] * 5_000_000})},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_reply_costs_little(kind):
    """Counted in calls and in memory, beyond the reply itself, which Flower has read."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in {"call", "c_call"}

    def forge(node, reply):
        reply.content = RecordDict({"arrays": HONEST} | HOSTILE[kind]()) if node == 1 else reply.content
        return [reply]

    strategy, grid = strategy_of(4), LocalGrid(shared_noise_app(), 4, tamper=forge)
    replies = grid.send_and_receive(strategy.configure_train(1, model_arrays(linear()), ConfigRecord(), grid))
    tracemalloc.start()
    sys.setprofile(count)
    try:
        strategy.aggregate_train(1, replies)
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert strategy.rounds[0].replies == 3
    assert peak < 10e6
    assert calls < 10_000
