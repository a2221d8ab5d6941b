"""The client query of apps that are not this package's: their refusal of a question is an answer, not an error to show."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flower_dp.clients import DPClient, TensorRecords, Training, client_app, privacy_mod
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg, DPFedSAM
from flower_dp.strategies.population.client_query import ClientQuery
from flower_dp.wire import instruction_of
from tests.grids import LocalGrid, asks_to_train
from tests.stock import arrays, shifted, stock_app


class LoudGrid(LocalGrid):
    """Logs the errors of a ClientApp as Flower's simulation does, in the server's process."""

    def send_and_receive(self, messages, *, timeout=None):
        for reply in super().send_and_receive(messages, timeout=timeout):
            if reply.has_error():
                logging.getLogger("flwr").error("Traceback (most recent call last): %s", reply.error.reason)
            yield reply


class Stock(NumPyClient):
    def fit(self, parameters, config):
        return [value + 1 for value in parameters], 7, {}


def run(app):
    strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=0, sampling=FullSampling(), num_clients=2, delta=1e-3)
    strategy.start(LoudGrid(app, 2), arrays(w=np.zeros(4, np.float32)), num_rounds=1)
    return strategy


@pytest.fixture
def errors(caplog):
    with caplog.at_level(logging.ERROR, "flwr"):
        yield caplog


@pytest.mark.parametrize(
    "app",
    [stock_app(shifted(lambda node: 1.0)), ClientApp(client_fn=lambda context: Stock().to_client())],
    ids=["message", "numpy"],
)
def test_the_roll_call_of_stock_clients_leaves_no_error_in_the_log(app, errors):
    assert run(app).rounds[0].replies == 2
    assert errors.messages == []
    assert logging.getLogger("flwr").filters == []


def test_an_app_that_fails_for_another_reason_is_shown_and_ends_the_run_before_a_round(errors):
    def broken(context):
        raise FileNotFoundError("no data on this node")

    with pytest.raises(
        ValueError, match=r"0 clients on 0 nodes; 2 can't say which clients they host: node 1: its app fails.*no data"
    ):
        run(ClientApp(client_fn=broken))
    assert "no data on this node" in errors.messages[0]


def faltering(app, *, failures):
    """An app whose first calls on node 1 fail, as on a device whose disk is not there yet."""
    left = [failures]

    def call(message, context):
        if context.node_id == 1 and left[0]:
            left[0] -= 1
            raise OSError("the disk is not there yet")
        return app(message, context)

    return call


def hosting_apps():
    """An app of this package, the mod around an app of the Message API, the mod around a client_fn; none has a name for a node."""
    mod = privacy_mod(name=lambda context: f"device-{context.node_id}")
    theirs = ClientApp(mods=[mod])
    theirs.train()(lambda message, context: Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message))

    def client_fn(context):
        records = TensorRecords(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64))
        model = torch.nn.Linear(2, 2)
        return DPClient(model=model, clients={f"device-{context.node_id}": records}, training=Training(learning_rate=0.1))

    return {
        "ours": client_app(client_fn),
        "mod": theirs,
        "mod and client_fn": ClientApp(client_fn=lambda context: Stock().to_client(), mods=[mod]),
        "numpy": ClientApp(client_fn=lambda context: client_fn(context).to_client()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["central", "distributed"])
@pytest.mark.parametrize("kind", hosting_apps())
def test_a_client_that_fails_at_first_is_not_taken_for_a_stock_one(kind, placement):
    """Else a policy, a budget or a share of the noise would be skipped, or a run would be paid for in which all decline."""
    words = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": 2, "delta": 1e-3}
    strategy = DPFedSAM(**words, placement=placement)
    grid = LocalGrid(faltering(hosting_apps()[kind], failures=3), 2)
    strategy.start(grid, arrays(weight=np.zeros((2, 2), np.float32), bias=np.zeros(2, np.float32)), num_rounds=1)
    assert strategy.rounds[0].replies == 2
    trained = [message.content.config_records for message in grid.sent if asks_to_train(message)]
    asked = [instruction_of(record).clients for records in trained for record in records.values()]
    assert sorted(asked) == [("device-1",), ("device-2",)]


@pytest.mark.parametrize("kind", hosting_apps())
def test_an_app_that_fails_at_first_on_its_only_node_is_not_taken_for_a_stock_one(kind, clock):
    """No other node says what the app is."""
    client_query, grid, answer = ClientQuery(), LocalGrid(faltering(hosting_apps()[kind], failures=3), 1), {}
    for _ in range(40):
        if answer := client_query.ask(grid, [1], most_names=9):
            break
        clock.sleep(0.5)
    assert (answer[1].names, client_query.hosting) == (("device-1",), True)


def test_a_node_that_fails_is_asked_again_after_longer_and_longer_pauses(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("flower_dp.strategies.population.client_query.time", SimpleNamespace(monotonic=lambda: clock[0]))
    app = stock_app(shifted(lambda node: 1.0))
    client_query, grid, asked = ClientQuery(), LocalGrid(faltering(app, failures=6), 1), []
    while not (answer := client_query.ask(grid, [1], most_names=9)):
        if len(grid.sent) > len(asked):
            asked += [clock[0]] * (len(grid.sent) - len(asked))
        clock[0] += 0.25
    assert sorted(set(asked)) == [0.0, 0.5]
    assert (clock[0], answer[1].names, client_query.failures) == (1.5, ("node-1",), {})
