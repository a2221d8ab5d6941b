"""Apps and nodes that are not this package's: constant arrays, dead nodes, evaluation of their own, the client query, old APIs."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from torch import nn

from flower_dp import wire
from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays, privacy_mod
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg, DPFedSAM
from flower_dp.strategies.legacy import LegacyAppError
from flower_dp.strategies.population.client_manager import ClientManager
from flower_dp.strategies.population.client_query import ClientQuery
from flower_dp.strategies.releases import replies
from tests.grids import LocalGrid, asks_to_train
from tests.stock import arrays, shifted, stock_app

MASK = np.array([0.0, -np.inf, np.nan], np.float32)
WORDS = {"clip_norm": 1e6, "noise_multiplier": 1e-9, "sampling": FullSampling(), "num_clients": 2, "delta": 1e-3}


def model(**more):
    return arrays(weight=np.zeros((2, 2), np.float32), mask=MASK, **more)


def trained(change=None):
    """Clients that add 1 to the weight and leave the mask as it is, but for what `change` does to it."""

    def train(node, named):
        mask = named["mask"] if change is None else change(node, named["mask"])
        return {**named, "weight": named["weight"] + 1, "mask": mask}

    return stock_app(train)


def device(context):
    records = TensorRecords(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64))
    name = f"device-{context.node_id}"
    return DPClient(model=nn.Linear(2, 2), clients={name: records}, training=Training(learning_rate=1.0))


# arrays that are sent and never trained


def test_frozen_arrays_are_sent_and_never_trained_clipped_or_noised():
    grid = LocalGrid(trained(), 2)
    strategy = DPFedAvg(**WORDS | {"noise_multiplier": 1.0}, frozen_arrays=["mask"])
    result = strategy.start(grid, model(), num_rounds=2)
    assert list(result.arrays) == ["weight", "mask"]
    np.testing.assert_array_equal(result.arrays["mask"].numpy(), MASK)
    assert result.arrays["mask"].numpy().dtype == np.float32
    assert abs(result.arrays["weight"].numpy()).max() > 1e3  # noise of 1e6 / 2
    sent = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert all(list(message.content["arrays"]) == ["weight", "mask"] for message in sent)


@pytest.mark.parametrize("change", [lambda mask: mask + 1, lambda mask: mask[:2], np.zeros_like])
def test_a_reply_that_changes_a_frozen_array_is_refused(change):
    grid = LocalGrid(trained(lambda node, mask: change(mask) if node == 1 else mask), 2)
    strategy = DPFedAvg(**WORDS, frozen_arrays=["mask"])
    result = strategy.start(grid, model(), num_rounds=1)
    assert strategy.rounds[0].replies == 1
    assert strategy.missing == replies.MissingReplies(rejected=1)
    np.testing.assert_allclose(result.arrays["weight"].numpy(), 0.5, atol=0.01)


def test_frozen_arrays_of_the_wrong_name_are_refused():
    with pytest.raises(ValueError, match="frozen_arrays: the model has no array 'masks'"):
        DPFedAvg(**WORDS, frozen_arrays=["masks"]).start(LocalGrid(trained(), 2), model())


def test_a_model_that_is_not_finite_is_refused_before_any_client_is_asked():
    grid = LocalGrid(trained(), 2)
    strategy = DPFedAvg(**WORDS)
    with pytest.raises(ValueError, match=r"array 'mask' has NaN or infinite entries.*frozen_arrays"):
        strategy.start(grid, model())
    assert not grid.sent
    assert strategy.rules.ledger(strategy.charges).num_charges == 0


def test_frozen_arrays_of_clients_without_names_go_by_position():
    one = wire.Model.of(model(), frozen=["mask"])
    reply = ArrayRecord([np.full((2, 2), 3, np.float32), MASK])
    np.testing.assert_array_equal(one.read(reply), [3, 3, 3, 3])
    with pytest.raises(ValueError, match="array 'mask' was changed"):
        one.read(ArrayRecord([np.full((2, 2), 3, np.float32), -MASK]))


class Tied(nn.Module):
    """A head that shares the table's weight, beside two layers that begin alike and share nothing."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
        self.head.weight = self.table.weight
        self.norms = nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)])


def test_tied_weights_of_a_stock_state_dict_are_named_with_what_to_do(caplog):
    def warned(record):
        caplog.clear()
        app = stock_app(lambda node, arrays: arrays)
        with caplog.at_level(logging.WARNING, "flwr"):
            strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=0.0, sampling=FullSampling(), num_clients=1, delta=1e-3)
            strategy.start(LocalGrid(app, 1), record, num_rounds=2)
        return [line.getMessage() for line in caplog.records if "tied weights" in line.getMessage()]

    model = Tied()
    (line,) = warned(ArrayRecord(model.state_dict()))
    assert line.startswith("Arrays 'table.weight', 'head.weight' have the same values")
    assert "model_arrays(model)" in line
    record = model_arrays(model)
    assert list(record) == ["table.weight", *[f"norms.{i}.{part}" for i in (0, 1) for part in ("weight", "bias")]]
    assert not warned(record)


def test_arrays_that_no_reply_changes_are_named_in_the_log(caplog):
    initial = arrays(weight=np.zeros(3, np.float32), scale=np.ones(2, np.float32))
    app = stock_app(lambda node, named: {**named, "weight": named["weight"] + 1})
    with caplog.at_level(logging.WARNING, "flwr"):
        DPFedAvg(**WORDS).start(LocalGrid(app, 2), initial, num_rounds=3)
    said = [record.getMessage() for record in caplog.records if "frozen_arrays" in record.getMessage()]
    assert len(said) == 1
    assert "'scale'" in said[0]
    assert "'weight'" not in said[0]


# who did not answer, and why


def gone(message):
    """What the SuperLink replies for a node that no longer reports."""
    from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message  # half a second

    return create_message_error_unavailable_res_message(message.metadata, "node_unavail")


def test_a_node_that_is_gone_counts_as_silent_and_is_named(caplog):
    """The SuperLink says so in its own name."""
    grid, strategy = LocalGrid(stock_app(shifted(lambda node: 1.0)), 2), DPFedAvg(**WORDS)
    grid.tamper = lambda node, reply: [gone(grid.sent[-1]) if node == 1 else reply]
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.start(grid, arrays(weight=np.zeros(4, np.float32)), num_rounds=1)
    assert strategy.missing == replies.MissingReplies(no_reply=1)
    assert any("Node 1: no reply: Error: Node Unavailable" in record.getMessage() for record in caplog.records)
    assert not any("gets no requests" in record.getMessage() for record in caplog.records)


def test_failures_dead_nodes_and_refused_replies_are_counted_apart():
    def tamper(node, reply):
        if node == 2:
            return [Message(metadata=reply.metadata, error=Error(code=2, reason="RuntimeError: out of memory"))]
        if node == 3:
            refusal = ConfigRecord({wire.REFUSED: wire.Refusal(reason="clip_norm=2: too much").to_json()})
            reply.content = RecordDict({"any": refusal})
        return [reply] if node != 4 else []

    grid = LocalGrid(stock_app(shifted(lambda node: np.nan if node == 5 else 1.0)), 6, tamper=tamper)
    strategy = DPFedAvg(**WORDS | {"num_clients": 6})
    strategy.start(grid, arrays(weight=np.zeros(4, np.float32)), num_rounds=1)
    assert strategy.missing == replies.MissingReplies(no_reply=1, failed=1, declined=1, rejected=1)
    said = " ".join(str(strategy.statement).split())
    assert (
        "4 requested updates did not count: 1 from nodes that did not reply, 1 whose training failed or diverged, "
        "1 declined by clients, 1 refused by the server" in said
    )


# waiting for clients


@pytest.mark.parametrize(("name", "simulated"), [("InMemoryGrid", False), ("LocalGrid", True)])
def test_a_simulation_with_too_few_clients_fails_at_once(name, simulated):
    """Told by its name, as Flower's is; or it says so, as this package's does."""
    grid = type(name, (LocalGrid,), {"simulated": simulated})(stock_app(shifted(lambda node: 1.0)), 3)
    with pytest.raises(ValueError, match="num_clients=5: the simulation has 3 clients on 3 nodes"):
        ClientManager(5, timeout=30, newcomers=True).known_clients(grid)


# evaluation


STILL = LocalGrid(stock_app(shifted(lambda node: 1.0)), 2), arrays(weight=np.zeros(4, np.float32))


class Evaluating(DPFedAvg):
    def configure_evaluate(self, server_round, arrays, config, grid):
        self.asked = [server_round, dict(config)]
        return []

    def aggregate_evaluate(self, server_round, replies):
        return MetricRecord({"accuracy": 0.5})


def test_evaluation_of_a_subclass_runs_and_the_statement_says_that_it_is_not_covered():
    strategy = Evaluating(**WORDS)
    result = strategy.start(*STILL, num_rounds=2, evaluate_config=ConfigRecord({"batch-size": 8}))
    assert strategy.asked == [2, {"batch-size": 8}]
    assert dict(result.evaluate_metrics_clientapp[2]) == {"accuracy": 0.5}
    assert any("configure_evaluate" in line for line in strategy.statement.not_covered)
    assert not any("configure_evaluate" in line for line in DPFedAvg(**WORDS).statement.not_covered)


def test_an_evaluate_config_that_nobody_reads_is_refused():
    with pytest.raises(ValueError, match="evaluate_config: no client evaluates"):
        DPFedAvg(**WORDS).start(*STILL, evaluate_config=ConfigRecord({"batch-size": 8}))


def test_clients_of_this_package_pass_over_frozen_arrays():
    app = ClientApp(client_fn=lambda context: device(context).to_client())
    initial = arrays(mask=MASK, weight=np.zeros((2, 2), np.float32), bias=np.zeros(2, np.float32))
    strategy = DPFedAvg(**WORDS, frozen_arrays=["mask"])
    result = strategy.start(LocalGrid(app, 2), initial, num_rounds=1)
    assert strategy.rounds[0].replies == 2
    assert list(result.arrays) == ["mask", "weight", "bias"]
    np.testing.assert_array_equal(result.arrays["mask"].numpy(), MASK)
    assert result.arrays["bias"].numpy()[0] > 0.4  # the only label


# will it learn?


# the client query: their refusal of a question is an answer, not an error to show


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
    strategy = DPFedAvg(**WORDS)
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

    return {
        "ours": client_app(device),
        "mod": theirs,
        "mod and client_fn": ClientApp(client_fn=lambda context: Stock().to_client(), mods=[mod]),
        "numpy": ClientApp(client_fn=lambda context: device(context).to_client()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["central", "distributed"])
@pytest.mark.parametrize("kind", hosting_apps())
def test_a_client_that_fails_at_first_is_not_taken_for_a_stock_one(kind, placement):
    """Else a policy, a budget or a share of the noise would be skipped, or a run would be paid for in which all decline."""
    strategy = DPFedSAM(**WORDS, placement=placement)
    grid = LocalGrid(faltering(hosting_apps()[kind], failures=3), 2)
    strategy.start(grid, arrays(weight=np.zeros((2, 2), np.float32), bias=np.zeros(2, np.float32)), num_rounds=1)
    assert strategy.rounds[0].replies == 2
    trained = [message.content.config_records for message in grid.sent if asks_to_train(message)]
    asked = [wire.instruction_of(record).clients for records in trained for record in records.values()]
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


# Flower's old server API


def test_server_fn_is_told_what_to_write():
    strategy = DPFedAvg(**WORDS)
    app = ServerApp(server_fn=lambda context: ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2)))
    grid = LocalGrid(ClientApp(), 2)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(LegacyAppError) as answer:
        app(grid, context)
    text = str(answer.value)
    assert text.startswith("DPFedAvg runs on Flower's Message API; ServerApp(server_fn=...)")
    for line in ("app = ServerApp()", "@app.main()", "DPFedAvg(...).start(grid, ArrayRecord("):
        assert line in text
    assert not grid.sent
    assert not strategy.rounds
