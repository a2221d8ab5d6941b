"""The Grid on Ray: the same bits as in one process, and what becomes of errors, dead workers, late replies and states."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_dp.clients import client_app
from flower_dp.simulation import RayGrid
from flower_dp.strategies import DPStrategy
from tests.contracts import METHODS, Words
from tests.grids import LocalGrid, asks_to_train
from tests.test_contract import SEED, SMALL, STILL, WatchedGrid, app_of, still_data, still_model, start

pytestmark = pytest.mark.flwr_run


def to(node, **what):
    return Message(RecordDict({"ask": ConfigRecord(what)}), node, "train")


def told(reply):
    return dict(reply.content["told"])


def app_that(act):
    """An app that counts its messages in its state, and tells what `act(ask, count)` returns."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        count = context.state["count"]["n"] if "count" in context.state else 0
        context.state["count"] = ConfigRecord({"n": count + 1})
        ask = dict(message.content["ask"])
        answer = act(ask, count + 1)
        if not isinstance(answer, dict):
            return answer
        node = {"node": context.node_id, "part": context.node_config["partition-id"], "process": os.getpid()}
        return Message(RecordDict({"told": ConfigRecord({"count": count + 1} | node | answer)}), reply_to=message)

    return app


def obey(ask, count):
    """Do what a message says."""
    match ask.get("do"):
        case "raise":
            raise ValueError(f"no {ask['what']}")
        case "exit":
            raise SystemExit("the app ends its process")
        case "die":
            os._exit(1)
        case "sleep":
            time.sleep(ask["seconds"])
        case "return nothing":
            return None
    return {}


@pytest.fixture
def grid(workers):
    with RayGrid(app_that(obey), workers, num_nodes=4, run_config={"rounds": 3}) as made:
        yield made


# The same run


def renumbered(grid):
    """A grid in this process whose nodes have the ids of a RayGrid's."""
    for node in sorted(grid.contexts, reverse=True):
        context = grid.contexts.pop(node)
        context.node_id = node + 1
        grid.contexts[node + 1] = context
    grid.contexts = dict(sorted(grid.contexts.items()))
    return grid


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 4])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_every_method_releases_the_bits_of_the_grid_in_this_process(workers, method, num_nodes):
    if method.client is None and num_nodes != 4:
        pytest.skip("a stock client is a node")
    words = Words(noise_seed=SEED)
    app = app_of(method, words, SMALL, num_nodes=num_nodes, noise_seed=SEED)
    local = start(method.strategy(words), renumbered(WatchedGrid(app, num_nodes)), words)
    with RayGrid(app, workers, num_nodes=num_nodes) as grid:
        ray = start(method.strategy(words), grid, words)
    assert len(set(local.bits)) == 4
    assert ray.bits == local.bits
    assert str(ray.strategy.statement) == str(local.strategy.statement)


# Noise


@pytest.mark.slow
def test_no_worker_repeats_noise(workers):
    """The same app and message: from two workers, from one of them again, and from one that has replaced another."""
    (method,) = [method for method in METHODS if method.label == "dp-fedsam distributed"]
    words = Words(num_rounds=1)
    app = app_of(method, words, STILL, num_nodes=2)
    local = WatchedGrid(app, 2)
    start(method.strategy(words), local, words, STILL)
    (message, _) = local.train_messages
    rows = []

    def ask(grid, node):
        sent = Message(message.content, node, "train")
        (reply,) = grid.send_and_receive([sent])
        record = next(iter(reply.content.array_records.values()))
        rows.append(list(record.values())[-1].numpy().astype(np.float64))

    for again in range(2):
        with RayGrid(one_client(method, words), workers, num_nodes=2) as grid:
            for node in (2, 3, 2, 3):
                ask(grid, node)
        workers.replace(again)
    assert len(rows) == 8
    assert np.abs(np.corrcoef(np.stack(rows)) - np.eye(8)).max() < 5 / np.sqrt(rows[0].size)
    assert all(row.std() > 0 for row in rows)


def one_client(method, words):
    """Every node hosts c0: a client made once, which is copied into every worker."""
    client = method.client(words, model=still_model(), clients={"c0": still_data("c0")}, noise_seed=None)
    return client_app(lambda context: client)
