"""`privacy_mod` in a private evaluation: a stock app's own metrics leave as one protected vector, and in no other way."""

import json
import math
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flower_dp import wire
from flower_dp.clients import ClientPolicy, NbAFLTerms, privacy_mod
from flower_dp.clients.account import LEDGER_PATH
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedSAM, PrivateEvaluation
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Instruction
from tests.asks import ANSWERED, GONE, Evaluated, answered, evaluated, forged, saying, told
from tests.asks import ask as made
from tests.grids import LocalGrid
from tests.stock import arrays

BOUNDS = {"loss": 4.0, "acc": 1.0}
TOLD = {"loss": 8.0, "acc": 0.3, "num-examples": 1234, "age": 57.0}
# (loss clipped to 4) / 4, accuracy, 1; over the square root of 3
CLIPPED = np.array([1.0, 0.3, 1.0]) / math.sqrt(3)


class Stock(NumPyClient):
    def evaluate(self, parameters: Any, config: Any) -> Any:
        return TOLD["loss"], 1234, {"acc": TOLD["acc"], "age": 57.0}


def app_of(mod: Any, metrics: Any = TOLD, *, seen: list[Message] | None = None) -> ClientApp:
    app = ClientApp(mods=[mod])

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if seen is not None:
            seen.append(message)
        if isinstance(metrics, Exception):
            raise metrics
        if metrics is None:
            return Message(Error(code=7, reason="Jane Doe"), reply_to=message)
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def numpy_app(mod: Any) -> ClientApp:
    return ClientApp(client_fn=lambda context: Stock().to_client(), mods=[mod])


def ask_for(placement: str = "central", noise_std: float = 0.0, clients: tuple[str, ...] = ("a",)) -> Instruction:
    asked = made(placement=placement, noise_std=noise_std, metrics=MetricBounds(bounds=BOUNDS), size=3)
    return Instruction(server_round=1, method=wire.EVALUATION, clients=clients, ask=asked)


def context_of(**config: Any) -> Context:
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})


def message_of(instruction: Instruction | str, record_names: Any = MESSAGE_API) -> Message:
    if isinstance(instruction, str):
        return saying(message_of(ask_for(), record_names), instruction)
    return wire.evaluate_message(1, record_names, arrays(w=np.zeros(3, np.float32)), {"lr": 0.5}, instruction)


def ask(app: ClientApp, instruction: Instruction, record_names: Any = MESSAGE_API, **config: Any) -> Evaluated:
    reply = answered(app(message_of(instruction, record_names), context_of(**config)))
    # Nothing but the answer: no metric, no example count, no record of the app's.
    assert set(reply.content) == {wire.KEY}
    assert set(reply.content[wire.KEY]) == {wire.KEY}
    text = reply.content[wire.KEY][wire.KEY]
    assert set(json.loads(text)) == ANSWERED
    return evaluated(text, instruction)


@pytest.mark.parametrize(("make", "record_names"), [(app_of, MESSAGE_API), (numpy_app, NUMPY_CLIENT)])
def test_what_leaves_is_the_clipped_vector_of_the_metrics_that_are_named(make: Any, record_names: Any) -> None:
    answer = ask(make(privacy_mod(name="a")), ask_for(), record_names)
    assert answer.total == pytest.approx(CLIPPED, abs=0.01)  # on the lattice of the noise, toward zero
    assert np.linalg.norm(answer.total) <= 1
    assert (answer.refused, answer.seeded_noise) == ({}, False)


def test_the_device_adds_its_share_of_the_noise_afresh_every_time() -> None:
    """Std of 1,500 draws: 5 % off with a probability below 1e-6; the fixed seeds of the draws make it none."""
    draws = [ask(app_of(privacy_mod(name="a", noise_seed=seed)), ask_for("distributed", 0.25)).total for seed in range(500)]
    assert np.std(np.array(draws) - CLIPPED) == pytest.approx(0.25, rel=0.025)
    assert abs(np.mean(np.array(draws) - CLIPPED)) < 5 * 0.25 / math.sqrt(1500)
    mod = privacy_mod(name="a")
    first, second = (ask(app_of(mod), ask_for("distributed", 0.25)).total for _ in range(2))
    assert not np.any(first == second)


SHARE = ask_for("distributed", 0.4)
AS_TRAINING = json.dumps({**json.loads(ask_for().to_json()), "method": "dp-fedavg"})
TRAINING = Instruction(server_round=1, method="dp-fedavg", clients=("a",), ask=made())


@pytest.mark.parametrize(
    ("policy", "instruction", "config", "match"),
    [
        (ClientPolicy(allow_evaluation=False), ask_for(), {}, "allow_evaluation=False"),
        (ClientPolicy(min_evaluation_noise_multiplier=2.0), ask_for(), {}, "noise_multiplier=1 of an evaluation"),
        (ClientPolicy(min_evaluation_noise_std=0.5), ask_for("distributed", 0.4), {}, "noise_std=0.4 of an evaluation"),
        (ClientPolicy(max_clip_norm=1.0, min_noise_std=0.5), ask_for(), {}, "noise_std=0 of an evaluation"),
        (ClientPolicy(), forged(SHARE, noise_std=0.0), {}, "noise_std=0: does not go with noise_multiplier=1"),
        (ClientPolicy(), forged(SHARE, noise_multiplier=0.0), {}, "noise_std=0.4: does not go with noise_multiplier=0"),
        (ClientPolicy(), forged(ask_for(), clip_norm=10.0), {}, "clip_norm=10: must be 1"),
        (ClientPolicy(), forged(ask_for(), metrics=GONE), {}, "metrics: must be asked for"),
        (ClientPolicy(), AS_TRAINING, {}, "metrics: must be asked for by method='private-evaluation' and by no other"),
        (ClientPolicy(), TRAINING, {}, "method='dp-fedavg': a message to evaluate must be of 'private-evaluation'"),
        (ClientPolicy(), forged(SHARE, step=2.0**-11), {}, "must be a power of two, at most 1/1024 of the noise scale 0.4"),
        (ClientPolicy(), forged(SHARE, step=GONE), {}, "must be a power of two, at most 1/1024"),
        (ClientPolicy(), forged(SHARE, step=2.0**-48), {}, "is too small"),
        (ClientPolicy(), forged(SHARE, keep_ratio=0.5), {}, "metrics: does not go with"),
        (ClientPolicy(), forged(ask_for(), mask={"type": "seed", "seed": 1, "keep_ratio": 0.5}), {}, "metrics: do not go with"),
        (ClientPolicy(), forged(ask_for(), placement="local", step=GONE, **told("a")), {}, "has no terms of its own"),
        (ClientPolicy(), ask_for(), {LEDGER_PATH: "ledger.sqlite"}, "keeps no account"),
    ],
)
@pytest.mark.parametrize("allow_metrics", [False, True])
def test_what_a_device_does_not_allow_never_reaches_its_app(
    policy: ClientPolicy, instruction: Instruction | str, config: Any, match: str, allow_metrics: bool
) -> None:
    seen: list[Message] = []
    arguments = {name: getattr(policy, name) for name in policy.__dataclass_fields__} | {"allow_metrics": allow_metrics}
    app = app_of(privacy_mod(name="a", policy=ClientPolicy(**arguments)), seen=seen)
    with pytest.raises(ValueError, match=f"^{wire.DECLINED}: .*{match}"):
        answered(app(message_of(instruction), context_of(**config)))
    assert seen == []


def test_a_client_with_terms_of_its_own_does_not_evaluate_without_counting() -> None:
    seen: list[Message] = []
    terms = NbAFLTerms(clip_norm=1.5, paper_epsilon=0.8, delta=0.01, uplink_exposures=3, min_records=8, num_records=8)
    asked = ask_for()
    own = told("a", terms=terms.terms().kind)
    instruction = Instruction.from_json(forged(asked, placement="local", step=GONE, **own))
    answer = ask(app_of(privacy_mod(name="a", terms=terms), seen=seen), instruction)
    assert "evaluation=None: this client has no budget of private evaluations" in answer.refused["a"]
    assert not answer.total.any()
    assert seen == []


def test_an_order_to_evaluate_is_never_answered_as_training() -> None:
    app = app_of(privacy_mod(name="a"))
    app.train()(lambda message, context: Message(RecordDict({"metrics": MetricRecord(TOLD)}), reply_to=message))
    message = wire.train_message(1, MESSAGE_API, arrays(w=np.zeros(3, np.float32)), {}, ask_for())
    with pytest.raises(ValueError, match="declined: method='private-evaluation'"):
        answered(app(message, context_of()))


@pytest.mark.parametrize("metrics", [KeyError("Jane Doe"), None, {"acc": 0.3}, {"loss": [1.0], "acc": 0.3}])
def test_what_goes_wrong_in_the_app_stays_on_the_device(metrics: Any) -> None:
    answer = ask(app_of(privacy_mod(name="a"), metrics), ask_for("distributed", 0.25))
    assert not answer.total.any()
    assert answer.refused["a"] == "training failed; the node's own log says why"


def test_only_this_nodes_client_is_in_the_answer() -> None:
    answer = ask(app_of(privacy_mod(name="a")), ask_for(clients=("b", "c")))
    assert answer.refused == {"b": "not hosted here", "c": "not hosted here"}
    assert not answer.total.any()


def test_a_nan_counts_as_the_bound() -> None:
    assert ask(app_of(privacy_mod(name="a"), {"loss": math.nan, "acc": 0.3}), ask_for()).total == pytest.approx(CLIPPED, abs=0.01)


def test_a_stock_app_trains_and_evaluates_under_one_ledger() -> None:
    """Least squares on 50 clients: the private loss falls as the clients' own, with noise on the clients."""
    app = ClientApp(mods=[privacy_mod(policy=ClientPolicy(min_noise_multiplier=1.0, min_evaluation_noise_std=0.14))])

    def data(context: Context) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.random.default_rng(context.node_id).normal(size=(30, 2))
        return inputs, inputs @ np.array([1.0, -1.0])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (weights,), (inputs, targets) = message.content["arrays"].to_numpy_ndarrays(), data(context)
        for _ in range(10):
            weights = weights - 0.2 * inputs.T @ (inputs @ weights - targets) / len(targets)
        content = {"arrays": ArrayRecord([weights]), "metrics": MetricRecord({"num-examples": 30})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        (weights,), (inputs, targets) = message.content["arrays"].to_numpy_ndarrays(), data(context)
        mse = float(np.mean((inputs @ weights - targets) ** 2))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 30, "test_mse": mse})}), reply_to=message)

    arguments = {"sampling": FullSampling(), "noise_multiplier": 1.0}
    plan = PrivateEvaluation(**arguments, metrics={"test_mse": 4.0}, every=3)
    strategy = DPFedSAM(**arguments, clip_norm=1.0, num_clients=50, delta=1e-3, placement="distributed", evaluation=plan)
    initial = ArrayRecord([np.zeros(2)])
    result = strategy.start(LocalGrid(app, 50), initial, num_rounds=3)
    (weights,) = result.arrays.to_numpy_ndarrays()
    assert np.linalg.norm(weights - [1.0, -1.0]) < 0.5
    reported = strategy.evaluations[3]
    assert abs(reported["test_mse"] - np.sum((weights - [1.0, -1.0]) ** 2)) < 5 * reported["test_mse-standard-error"]
    assert set(strategy.statement.parts) == {"training", "evaluation"}
    assert strategy.rules.ledger(strategy.charges).num_charges == 4
