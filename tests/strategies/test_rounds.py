"""The round: client query, messages, refusals, early end. Expected models are computed by hand."""

import inspect
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import nn

import flower_dp
from flower_dp import wire
from flower_dp.clients import ClientPolicy, DPClient, FlatModel, TensorRecords, Training, client_app, model_arrays
from flower_dp.core.sampling import FixedSizeSampling, FullSampling
from flower_dp.strategies import DPFedAvg, DPFedSAM
from flower_dp.strategies.releases.limits import ReplyLimits
from flower_dp.strategies.releases.replies import MOST_REASON, CollectedReplies, MissingReplies
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app


def fedavg(num_clients, **arguments):
    settings = {"clip_norm": 1e6, "noise_multiplier": 0.0, "sampling": FullSampling(), "delta": 1e-3} | arguments
    return DPFedAvg(num_clients=num_clients, **{"registration_timeout": 5} | settings)


def start(strategy, grid, record=None, num_rounds=1, **arguments):
    return strategy.start(grid, record or arrays(w=np.zeros(4, np.float32)), num_rounds=num_rounds, **arguments)


# Drop-in: stock clients, and the clients of this package through both of Flower's client APIs


def test_a_stock_app_with_a_query_of_its_own_works():
    app = stock_app(shifted(float))

    @app.query()
    def query(message, context):
        return Message(RecordDict({"answer": ConfigRecord({"temperature": 21.0})}), reply_to=message)

    result = start(fedavg(3), LocalGrid(app, 3))
    assert np.allclose(result.arrays["w"].numpy(), 2.0)


def make_model():
    torch.default_generator.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(60, 6, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (60,), generator=GENERATOR)


def hosted(num_clients, **arguments):
    """A client_fn whose nodes host the clients i with i mod nodes = partition-id, 60 / num_clients records each."""
    each = 60 // num_clients

    def client_fn(context):
        part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
        clients = {
            f"c{i:02}": TensorRecords(inputs=INPUTS, targets=TARGETS, indices=torch.arange(i * each, (i + 1) * each))
            for i in range(part, num_clients, parts)
        }
        settings = {"training": Training(learning_rate=0.5, batch_size=3, momentum=0.5, sam_radius=0.05)} | arguments
        return DPClient(model=make_model(), clients=clients, **settings)

    return client_fn


def test_user_config_and_round_reach_the_clients_and_the_user_config_is_left_alone():
    grid = LocalGrid(stock_app(shifted(lambda node: 0.0)), 2)
    config = ConfigRecord({"lr": 0.5})
    start(fedavg(2), grid, train_config=config, num_rounds=2)
    train = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert [message.content["config"]["server-round"] for message in train] == [1, 1, 2, 2]
    assert all(message.content["config"]["lr"] == 0.5 for message in train)
    assert dict(config) == {"lr": 0.5}


# Client query


def test_a_node_that_cannot_make_its_clients_says_so_without_a_word_of_its_data(caplog):
    def client_fn(context):
        raise ValueError("could not convert 'Jane Doe' to float")

    grid = LocalGrid(client_app(client_fn), 2)
    with pytest.raises(ValueError, match="client_fn failed; the node's own log says why") as reported:
        start(fedavg(2), grid, model_arrays(make_model()))
    assert "Jane" not in str(reported.value)
    assert "Jane Doe" in caplog.text
    # The same where it fails later, on a train message.
    train = Message(RecordDict({"arrays": model_arrays(make_model())}), dst_node_id=1, message_type="train")
    (reply,) = grid.send_and_receive([train])
    assert wire.refusal_of(reply.content).reason == "client_fn failed; the node's own log says why"


def test_distributed_noise_with_stock_clients_is_refused_before_any_client_trains():
    grid = LocalGrid(stock_app(shifted(lambda node: 1.0)), 3)
    strategy = DPFedSAM(clip_norm=1, noise_multiplier=1, sampling=FullSampling(), num_clients=3, delta=1e-3)
    with pytest.raises(ValueError, match=r"placement='distributed': stock clients add no noise"):
        start(strategy, grid)
    assert not [message for message in grid.sent if message.metadata.message_type == "train"]


# Failing closed: replies


TRACE = (
    "<class 'ray.RayTaskError'>:<'ray::run()\n  File x\nClientAppException: \nException OSError occurred. Message: disk gone'>"
)


@pytest.mark.parametrize(
    ("reason", "num_rounds", "match"),
    [
        ("driver too old", 10, r"in the first 3 rounds.*driver too old"),
        ("driver too old", 2, r"in any round; the last reason.*driver too old"),
        (TRACE, 3, r"the last reason: error reply: disk gone$"),  # as Flower's simulation sends it
    ],
)
def test_a_run_in_which_nobody_ever_answers_usefully_ends_with_the_reason(reason, num_rounds, match):
    def train(node, values):
        raise RuntimeError(reason)

    strategy = fedavg(2)
    with pytest.raises(RuntimeError, match="no client has sent a usable update " + match if reason != TRACE else match):
        start(strategy, LocalGrid(stock_app(train), 2), num_rounds=num_rounds)
    assert strategy.statement.num_charged_rounds == min(num_rounds, 3)


# Failing closed: configuration and models

NONSENSE = [
    ({"clip_norm": -1.0}, "clip_norm=-1.0"),
    ({"clip_norm": 0}, "clip_norm=0"),
    ({"clip_norm": math.nan}, "clip_norm=nan"),
    ({"noise_multiplier": -0.1}, "noise_multiplier=-0.1"),
    ({"noise_multiplier": math.inf}, "noise_multiplier=inf"),
    ({"noise_multiplier": "1"}, "noise_multiplier='1'"),
    ({"delta": 0}, "delta=0"),
    ({"delta": 1.0}, "delta=1.0"),
    ({"target_epsilon": 0}, "target_epsilon=0"),
    ({"noise_multiplier": 0, "target_epsilon": 5}, "noise_multiplier=0"),
    ({"num_clients": 0}, "num_clients=0"),
    ({"num_clients": 2.5}, "num_clients=2.5"),
    ({"sampling": 0.1}, "sampling=0.1"),
    ({"sampling": FixedSizeSampling(cohort_size=11)}, "cohort_size=11"),
    ({"sampling": FixedSizeSampling(cohort_size=2), "relation": "add-or-remove-one"}, "add-or-remove-one"),
    ({"relation": "add"}, "relation='add'"),
    ({"registration_timeout": -1}, "registration_timeout=-1"),
    ({"placement": "edge"}, "placement='edge'"),
    ({"placement": "central", "keep_ratio": 0}, "keep_ratio=0"),
]


@pytest.mark.parametrize(("arguments", "named"), NONSENSE, ids=[named for _, named in NONSENSE])
def test_nonsense_is_refused_by_name(arguments, named):
    good = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": 10, "delta": 1e-5}
    with pytest.raises(ValueError, match=re.escape(named)):
        (DPFedSAM if "placement" in arguments else DPFedAvg)(**(good | arguments))


def test_parameters_without_dimensions_double_precision_and_empty_arrays_are_trained_and_clipped():
    record = arrays(scale=np.float32(1.0), double=np.ones(3, np.float64), none=np.zeros((0, 2), np.float32))
    result = start(fedavg(2, clip_norm=1.0), LocalGrid(stock_app(shifted(lambda node: 5.0)), 2), record)
    assert result.arrays["scale"].numpy().shape == ()
    assert result.arrays["double"].numpy().dtype == np.float64
    # An update of (5, 5, 5, 5) has norm 10 and is clipped to norm 1: every entry moves by 1/2.
    assert float(result.arrays["scale"].numpy()) == pytest.approx(1.5, abs=1e-3)
    assert np.allclose(result.arrays["double"].numpy(), 1.5, atol=1e-2)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (arrays(w=np.zeros(3, np.float32), steps=np.array(5)), r"'steps' has dtype int64"),
        # Ten rounds of an update of 1e-4 each would leave a weight of 1 as it is, and be charged.
        (arrays(half=np.ones(3, np.float16)), r"array 'half' has dtype float16.*start with float32"),
    ],
)
def test_half_precision_is_refused_before_any_client_is_asked(record, match):
    grid = LocalGrid(stock_app(shifted(lambda node: 1e-4)), 2)
    with pytest.raises(ValueError, match=match):
        start(fedavg(2), grid, record)
    assert not grid.sent


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_and_so_is_it_in_every_other_way_to_give_a_model(dtype):
    """A stock client would round a float32 copy back to 16 bits: the server can't see it, and refuses at the start."""
    model = torch.nn.Linear(2, 1).to(dtype)
    for ways in (model_arrays, FlatModel):
        with pytest.raises(ValueError, match=rf"parameter 'weight' is of {dtype}: .*model\.float\(\)"):
            ways(model)
    app = client_app(lambda context: DPClient(model=model, clients={"a": None}, training=Training(learning_rate=0.1)))
    with pytest.raises(ValueError, match=r"client_fn failed: .*model\.float\(\)"):
        start(fedavg(2), LocalGrid(app, 2), model_arrays(torch.nn.Linear(2, 1)))


def test_frozen_parameters_may_have_16_bits():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).to(torch.bfloat16).requires_grad_(False), torch.nn.Linear(2, 1))
    assert set(model_arrays(model)) == {"1.weight", "1.bias"}
    assert FlatModel(model).vector.dtype == torch.float32


# The end of a run, results and metrics


def test_reports_count_bytes_as_they_were_sent():
    strategy = fedavg(4, clip_norm=0.1)
    grid = LocalGrid(client_app(hosted(4)), 2)
    start(strategy, grid, model_arrays(make_model()))
    sent = [message for message in grid.sent if message.metadata.message_type == "train"]

    def size(messages):
        arrays_size = sum(len(k) + len(a.data) for m in messages for r in m.content.array_records.values() for k, a in r.items())
        arguments = [item for m in messages for r in m.content.config_records.values() for item in r.items()]
        return arrays_size + sum(len(k) + (len(v) if isinstance(v, str) else 8) for k, v in arguments)

    assert strategy.rounds[0].bytes_down == size(sent)
    assert strategy.rounds[0].bytes_up == size(grid.received)
    # 6 x 5 + 5 + 5 x 3 + 3 = 53 parameters of 4 bytes, down to and up from each of two nodes.
    assert min(strategy.rounds[0].bytes_down, strategy.rounds[0].bytes_up) >= 2 * 53 * 4
    assert strategy.rounds[0].bytes_per_client == 53 * 4


def test_metrics_that_nobody_has_asked_for_are_not_told():
    """A client may send what it likes: its training loss is no part of the result unless the server has asked for it."""

    def talkative(node, reply):
        record = next(record for record in reply.content.config_records.values() if wire.KEY in record)
        record[wire.KEY] = json.dumps(json.loads(record[wire.KEY]) | {"metrics": {"loss": 0.125}})
        return [reply]

    result = start(fedavg(4), LocalGrid(client_app(hosted(4)), 2, tamper=talkative), model_arrays(make_model()))
    assert result.train_metrics_clientapp[1]["replies"] == 4
    assert not any(name.startswith("client-") for name in result.train_metrics_clientapp[1])


def test_client_metrics_are_sent_only_when_server_and_client_agree_and_the_statement_says_so():
    for asks, allows in ((False, True), (True, False), (True, True)):
        app = client_app(hosted(4, policy=ClientPolicy(allow_metrics=allows)))
        strategy = fedavg(4, clip_norm=0.1, report_client_metrics=asks)
        result = start(strategy, LocalGrid(app, 2), model_arrays(make_model()))
        assert ("client-loss" in result.train_metrics_clientapp[1]) == (asks and allows)
        told = "CLIENT METRICS: they include the norms of clients' updates before the clip"
        assert any(line.startswith(told) for line in strategy.statement.not_covered) == asks
        reported = {name for name in strategy.line_of(1) if name.startswith("client-")}
        assert reported == ({"client-loss", "client-update-norm", "client-update-norm-squared"} if asks and allows else set())


def test_client_metrics_are_means_over_the_clients_that_replied_and_a_new_run_forgets_them():
    """Updates in proportion to 1, 2, 3, 4, on nodes of several clients; every one of them is clipped."""

    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, inputs):
            return (self.weight * inputs).sum(-1)

    rows = {f"c{i}": TensorRecords(inputs=torch.full((1, 4), i / 2), targets=torch.zeros(1)) for i in (1, 2, 3, 4)}

    def client_fn(context):
        part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
        mine = dict(list(rows.items())[part::parts])
        training = Training(learning_rate=1.0, loss=lambda outputs, targets: -outputs.mean())
        return DPClient(model=Shifts(), clients=mine, training=training, policy=ClientPolicy(allow_metrics=True))

    strategy = fedavg(4, clip_norm=0.1, report_client_metrics=True)
    result = start(strategy, LocalGrid(client_app(client_fn), 2), model_arrays(Shifts()))
    line = strategy.line_of(1)
    assert line["client-update-norm"] == result.train_metrics_clientapp[1]["client-update-norm"] == pytest.approx(2.5)
    assert line["client-update-norm-squared"] == pytest.approx((1 + 4 + 9 + 16) / 4)
    start(strategy, LocalGrid(client_app(client_fn), 2), model_arrays(Shifts()), num_rounds=0)
    assert strategy.client_metrics == {}


@pytest.mark.parametrize("clip_norm", [0.5, None])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_not_added(value, clip_norm):
    limits, total = ReplyLimits(length=2, clip_norm=clip_norm, honest_norm=lambda names: 1.0), np.zeros(2)
    with pytest.raises(ValueError, match="NaN or infinite entries"):
        limits.add(total, np.array([0.1, value]), ["a"])
    assert total.tolist() == [0.0, 0.0]


def test_a_reason_of_a_single_client_is_one_short_line():
    collected = CollectedReplies(total=np.zeros(1))
    collected.add_refused(
        {"a": wire.Refusal(code="failed", reason="x\nEPSILON: 0.0"), "b": wire.Refusal(code="declined", reason="y" * 2**20)}
    )
    assert collected.refused["a"] == "x EPSILON: 0.0"
    assert len(collected.refused["b"]) <= MOST_REASON
    assert collected.missing == MissingReplies(failed=1, declined=1)


# Faults of Flower's own differential privacy


def test_example_counts_do_not_raise_one_clients_influence_above_c_over_m():
    for count in (1, 10**9):
        app = stock_app(shifted(lambda node: 100.0 * (node == 1)), num_examples=lambda node, count=count: count ** (node == 1))
        norm = np.linalg.norm(start(fedavg(4, clip_norm=1.0), LocalGrid(app, 4)).arrays["w"].numpy())
        assert 0.25 * (1 - 1e-6) <= norm <= 0.25


def test_missing_replies_do_not_raise_the_weight_of_the_others():
    grid = LocalGrid(stock_app(shifted(lambda node: 100.0)), 4, tamper=lambda node, reply: [reply] if node == 1 else [])
    assert np.linalg.norm(start(fedavg(4, clip_norm=1.0), grid).arrays["w"].numpy()) <= 0.25


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_batch_statistics_are_refused_on_both_sides(norm):
    model = nn.Sequential(nn.Linear(4, 4), norm)
    if any("running" in name for name in model.state_dict()):
        with pytest.raises(ValueError, match="GroupNorm"):
            start(fedavg(4), LocalGrid(stock_app(shifted(float)), 4), ArrayRecord(model.state_dict()))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\).*GroupNorm"):
        FlatModel(model)


def test_no_module_uses_a_global_generator():
    """One module lends them to a user's data set, seeded for one record, and gives them back as they were."""
    lends = Path(flower_dp.__file__).parent / "clients" / "training" / "training_rng.py"
    for path in set(Path(flower_dp.__file__).parent.rglob("*.py")) - {lends}:
        text = path.read_text(encoding="utf-8")
        for word in ("np.random.seed", "np.random.normal", "np.random.rand", "torch.manual_seed", "random.seed"):
            # There, what apps draw from the global generators is seeded for a while, and the generators are put back.
            lent = path.name == "training_rng.py" and word in ("np.random.seed", "random.seed")
            assert lent or word not in text, f"{path.name} uses {word}"


def test_all_hooks_have_flowers_signatures():
    for name in ("start", "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary"):
        ours = inspect.signature(getattr(DPFedAvg, name)).parameters
        own = ["checkpoint_dir", "resume"] if name == "start" else []  # behind Flower's, with defaults
        assert list(ours) == [*inspect.signature(getattr(Strategy, name)).parameters, *own]
