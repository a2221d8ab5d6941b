"""`privacy_mod`: apps that know nothing of this package, under its strategies; and what it lets out of them."""

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flower_dp import wire
from flower_dp.clients import (
    ClientPolicy,
    DPClient,
    LocalDPClient,
    NbAFLRecipe,
    NbAFLTerms,
    TensorRecords,
    client_app,
    privacy_mod,
)
from flower_dp.clients.account import NodeStateAccounts
from flower_dp.core.compression import decode
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Instruction, ReleaseRequest, ReplyHeader, SentMask
from tests.asks import GONE, answered, forged, masked, own_instruction, reasons, replace, saying, told
from tests.asks import ask as made
from tests.grids import LocalGrid
from tests.local_grids import TRAINING, Direct, context_of
from tests.stock import arrays, shifted, stock_app
from tests.test_extras import without

SIZE = 40_000
NBAFL = NbAFLTerms(clip_norm=1.5, paper_epsilon=0.8, delta=0.01, uplink_exposures=3, min_records=8, num_records=8)

App = Callable[[Any], ClientApp]


def added(value: Any) -> App:
    """An app, but for its mod, that adds a value to every array of the model."""
    return lambda mod: stock_app(shifted(lambda node: value), mods=[mod])


def replying(reply: Callable[[Message], Message]) -> App:
    """An app, but for its mod, with this train function."""

    def make(mod: Any) -> ClientApp:
        app = ClientApp(mods=[mod])
        app.train()(lambda message, context: reply(message))
        return app

    return make


def instruction_of(
    placement: str = "distributed",
    noise_std: float = 0.5,
    *,
    size: int = SIZE,
    asked: ReleaseRequest | None = None,
    **changes: Any,
) -> Instruction:
    arguments = {"server_round": 1, "method": "dp-fedsam", "clients": ("a",)}
    arguments |= {
        name: changes.pop(name) for name in ("server_round", "method", "clients", "frozen", "report_metrics") if name in changes
    }
    return Instruction(ask=asked or made(placement=placement, noise_std=noise_std, size=size, **changes), **arguments)


CENTRAL = instruction_of("central", 0.0)
LOCAL_TO_OTHERS = forged(CENTRAL, placement="local", step=GONE, **told("a"))
NO_NOISE = instruction_of("distributed", 0.0, noise_multiplier=0.0)


def local_instruction(own: NbAFLTerms = NBAFL, **changes: Any) -> Instruction:
    return own_instruction("nbafl", {"a": own.terms()}, **changes)


def message_of(instruction: Instruction | str, model: ArrayRecord, record_names: Any = MESSAGE_API, **config: Any) -> Message:
    """The message of a server; a text is what no honest one can send."""
    if isinstance(instruction, str):
        return saying(message_of(CENTRAL, model, record_names, **config), instruction)
    return wire.train_message(1, record_names, model, config, instruction)


def ask(
    app: ClientApp,
    instruction: Instruction,
    model: ArrayRecord,
    *,
    context: Context | None = None,
    record_names: Any = MESSAGE_API,
):
    """Send one message; return the decoded row and the answer."""
    reply = app(message_of(instruction, model, record_names), context or context_of())
    return read(reply, instruction, sum(array.numpy().size for array in model.values()))


def read(reply: Message, instruction: Instruction, size: int) -> tuple[np.ndarray, ReplyHeader]:
    assert {type(record) for record in reply.content.values()} <= {ArrayRecord, ConfigRecord}
    answer = wire.answer_of(answered(reply).content, instruction.clients)
    assert answer is not None
    payload = wire.payload_of(wire.arrays_of(reply.content), answer.payload, size)
    mask = instruction.ask.mask
    return decode(payload, size, mask=None if mask is None else mask.indices(size)), answer


def zeros(size: int = SIZE) -> ArrayRecord:
    return arrays(w=np.zeros(size, np.float32))


# Whole runs


def numpy_app(mod: Any) -> ClientApp:
    class Stock(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            assert wire.KEY not in config
            return [value + 0.1 for value in parameters], 77, {"loss": 1.0}

    return ClientApp(client_fn=lambda context: Stock().to_client(), mods=[mod])


@pytest.mark.slow
def test_a_real_sklearn_app() -> None:
    """The lines of docs/client-mod.md: four clients learn two clouds by logistic regression; arrays are float64, as sklearn's are."""
    pytest.importorskip("sklearn")
    page = (Path(__file__).resolve().parents[2] / "docs" / "client-mod.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    client, server, local = (
        next(code for code in blocks if words in code)
        for words in ("mods=[privacy_mod()]", "strategy.start(", "privacy_mod(terms=")
    )
    rng = np.random.default_rng(5)
    labels = rng.integers(2, size=(5, 60))
    inputs = rng.standard_normal((5, 60, 3)) + 3.0 * (2 * labels[..., None] - 1)

    def load_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
        part = context.node_config["partition-id"]
        return inputs[part], labels[part]

    names: dict[str, Any] = {"load_data": load_data}
    exec(local, names)  # noqa: S102
    exec(client, names)  # noqa: S102
    for old, new in (("num_clients=100", "num_clients=4, noise_seed=1"), ("noise_multiplier=1.0", "noise_multiplier=0.3")):
        server = server.replace(old, new)
    exec(server, names | {"grid": LocalGrid(names["app"], 4)}, names)  # noqa: S102
    assert [report.replies for report in names["strategy"].rounds] == [4] * 4
    coef, intercept = names["result"].arrays.to_numpy_ndarrays()
    assert (coef.shape, coef.dtype, intercept.shape) == ((1, 3), np.float64, (1,))
    assert np.mean(((inputs[4] @ coef[0] + intercept[0]) > 0) == labels[4]) > 0.9


# The client query


@pytest.mark.parametrize(
    ("arguments", "config", "name"),
    [
        ({}, {"partition-id": 7, "num-partitions": 100}, "client-07"),
        ({}, {"partition-id": 7}, "client-7"),
        ({}, {}, "node-1"),
        ({"name": "hospital-7"}, {"partition-id": 7, "num-partitions": 100}, "hospital-7"),
        ({"name": lambda context: f"device-{context.node_config['serial']}"}, {"serial": "x1"}, "device-x1"),
    ],
)
def test_a_node_says_its_clients_name_and_the_methods_that_it_runs(arguments: Any, config: Any, name: str) -> None:
    for app, question in ((added(0), wire.client_query(1, "train")), (numpy_app, properties())):
        for terms, methods in (
            (None, ["dp-fedavg", "dp-fedsam", "dp-ftrl", "fed-smp", "private-evaluation"]),
            (NBAFL, ["nbafl"]),
        ):
            reply = app(privacy_mod(terms=terms, **arguments))(question, context_of(**config))
            hosted = wire.hosted_of(reply.content, most_names=1)
            assert hosted == wire.HostedClients(names=(name,), methods=frozenset(methods))


def properties() -> Message:
    return Message(RecordDict({"getpropertiesins.config": ConfigRecord({})}), 1, "get_properties")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": ""}, "name=''"),
        ({"terms": 3}, "terms=3: must be a client's terms"),
        ({"policy": 1.0}, "policy=1.0: must be a ClientPolicy"),
        ({"noise_seed": -1}, "noise_seed=-1"),
    ],
)
def test_nonsense_is_refused_when_the_mod_is_made(arguments: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        privacy_mod(**arguments)


# What the app gets


@pytest.mark.parametrize("record_names", [MESSAGE_API, NUMPY_CLIENT], ids=lambda record_names: record_names.name)
def test_the_app_gets_what_a_stock_server_sends(record_names: Any) -> None:
    seen: list[RecordDict] = []

    def train(message: Message) -> Message:
        seen.append(message.content)
        return Message(RecordDict({"x": ArrayRecord(dict(message.content[record_names.arrays]))}), reply_to=message)

    message = message_of(CENTRAL, arrays(w=np.arange(6, dtype=np.float64).reshape(2, 3)), record_names, **{"lr": 0.1})
    replying(train)(privacy_mod(name="a"))(message, context_of())
    (content,) = seen
    assert set(content) == {record_names.arrays, record_names.config}
    assert dict(content[record_names.config]) == {"lr": 0.1, "server-round": 1}
    np.testing.assert_array_equal(content[record_names.arrays]["w"].numpy(), np.arange(6.0).reshape(2, 3))
    assert wire.KEY in message.content[record_names.config]  # the message itself is left alone


def test_an_app_that_changes_what_it_was_given_does_not_change_its_update() -> None:
    """The update is taken against what the server sent, and no other node in this process sees the change."""

    def train(message: Message) -> Message:
        record = message.content["arrays"]
        record["w"].data = arrays(w=np.full(4, 0.25, np.float32))["w"].data
        message.content["config"]["lr"] = 7.0
        return Message(RecordDict({"arrays": record}), reply_to=message)

    model = zeros(4)
    row, _ = ask(replying(train)(privacy_mod(name="a")), CENTRAL, model)
    assert row.tolist() == [0.25] * 4
    assert model["w"].numpy().tolist() == [0.0] * 4


FROZEN = {"mask": np.array([-np.inf, 0.0, -np.inf]), "step": np.array(3)}


@pytest.mark.parametrize("changed", [False, True])
def test_frozen_arrays_reach_the_app_and_do_not_come_back(changed: bool) -> None:
    """As the server does with a stock client's: an app that changes one is refused."""

    def train(message: Message) -> Message:
        named = {name: array.numpy() for name, array in message.content["arrays"].items()}
        np.testing.assert_array_equal(named["mask"], FROZEN["mask"])
        named |= {"w": named["w"] + 0.25, "step": named["step"] + changed}
        return Message(RecordDict({"arrays": arrays(**named)}), reply_to=message)

    instruction, app = replace(CENTRAL, frozen=(0, 2)), replying(train)(privacy_mod(name="a"))
    model = arrays(mask=FROZEN["mask"], w=np.zeros(4, np.float32), step=FROZEN["step"])
    reply = app(message_of(instruction, model), context_of())
    row, answer = read(reply, instruction, 4)
    assert reasons(answer) == ({"a": "training failed; the node's own log says why"} if changed else {})
    assert row.tolist() == ([0.0] * 4 if changed else [0.25] * 4)


# What leaves: as DPClient's


SMP = masked(placement="distributed", noise_std=0.25, keep_ratio=0.3, seed=11, size=500)
SENT = SentMask.of(SMP.mask.indices(500), length=500)
INSTRUCTIONS = {
    "central": CENTRAL,
    "distributed": instruction_of(),
    "top-k": instruction_of(keep_ratio=0.1),
    "no noise": NO_NOISE,
    "fed-smp": instruction_of(method="fed-smp", asked=SMP),
    "fed-smp, a mask that is sent": instruction_of(method="fed-smp", asked=replace(SMP, mask=SENT)),
    "local": local_instruction(weight=0.3),
}


@pytest.mark.parametrize("norm", [0.3, 30.0])
@pytest.mark.parametrize("kind", INSTRUCTIONS)
def test_a_reply_is_that_of_this_packages_client_to_the_last_bit(kind: str, norm: float) -> None:
    rng = np.random.default_rng(3)
    start, update = (rng.standard_normal(500).astype(np.float32) for _ in range(2))
    update *= np.float32(norm / np.linalg.norm(update))
    instruction, model = INSTRUCTIONS[kind], arrays(weight=start)
    arguments: Any = {
        "model": Direct(start),
        "clients": {"a": TensorRecords(inputs=torch.from_numpy(update)[None].repeat(8, 1), targets=torch.zeros(8))},
        "device": "cpu",
        "noise_seed": 9,
    }
    if kind == "local":
        recipe = NbAFLRecipe(training=TRAINING, clip_norm=1.5, paper_epsilon=0.8, delta=0.01, uplink_exposures=3, min_records=8)
        ours: ClientApp = client_app(lambda context: LocalDPClient(recipe=recipe, **arguments))
    else:
        ours = client_app(lambda context: DPClient(training=TRAINING, **arguments))
    trained = torch.from_numpy(start) - 1.0 * -torch.from_numpy(update)[None].repeat(8, 1).mean(0)

    def train(message: Message) -> Message:
        return Message(RecordDict({"arrays": arrays(weight=trained.numpy())}), reply_to=message)

    theirs = replying(train)(privacy_mod(name="a", noise_seed=9, terms=NBAFL if kind == "local" else None))
    message = message_of(instruction, model)
    expected, got = ours(message, context_of()), theirs(message, context_of())
    assert got.content[wire.KEY] == expected.content[wire.KEY]
    assert [array.data for array in got.content["arrays"].values()] == [
        array.data for array in expected.content["arrays"].values()
    ]
    row, answer = read(got, instruction, 500)
    assert answer.seeded_noise
    assert np.any(row)


@pytest.mark.parametrize("kind", ["distributed", "local"])
def test_noise_never_repeats_whatever_is_asked_twice_copied_or_pickled(kind: str) -> None:
    """A server that sends one round twice learns no more of the noise; a local account pays twice."""
    own = replace(NBAFL, num_replies=100, uplink_exposures=3)
    mod = privacy_mod(name="a", terms=own if kind == "local" else None)
    instruction = local_instruction(own) if kind == "local" else instruction_of()
    mods = [
        mod,
        mod,
        copy.deepcopy(mod),
        copy.copy(mod),
        pickle.loads(pickle.dumps(mod)),  # noqa: S301 (our own)
        cloudpickle.loads(cloudpickle.dumps(mod)),
    ]
    context = context_of()
    rows = []
    for one in mods:
        np.random.seed(0)  # noqa: NPY002
        row, answer = ask(added(0.0)(one), instruction, zeros(50), context=context)
        assert not answer.seeded_noise
        rows.append(row.tobytes())
    assert len(set(rows)) == len(mods)
    assert NodeStateAccounts(context.state).replies("a") == (len(mods) if kind == "local" else 0)


def test_nothing_else_of_the_reply_leaves() -> None:
    """Not metrics, example counts, nor records that the app adds."""

    def reply(message: Message) -> Message:
        metrics = MetricRecord({"num-examples": 1234, "train_loss": 0.25, "per_class": [1.0, 2.0], "bad": math.nan})
        note = ConfigRecord({"patient": "Jane Doe"})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics, "note": note}), reply_to=message)

    asking = replace(CENTRAL, report_metrics=True)
    for policy, instruction in ((ClientPolicy(), asking), (ClientPolicy(allow_metrics=True), CENTRAL)):
        app = replying(reply)(privacy_mod(name="a", policy=policy))
        content = app(message_of(instruction, zeros(4)), context_of()).content
        assert set(content) == {"arrays", wire.KEY}
        assert list(content[wire.KEY]) == [wire.KEY]
        assert not any(word in str(content[wire.KEY]) for word in ("Jane", "1234", "train_loss"))
    mod = privacy_mod(name="a", policy=ClientPolicy(allow_metrics=True))
    assert ask(replying(reply)(mod), asking, zeros(4))[1].metrics == {"train_loss": 0.25}
    assert ask(numpy_app(mod), asking, zeros(4), record_names=NUMPY_CLIENT)[1].metrics == {"loss": 1.0}
    assert ask(added(np.nan)(mod), asking, zeros(4))[1].metrics == {}  # it is not in the sum


# Refusals


def raised(message: Message) -> Message:
    raise KeyError("Jane Doe")


def model_of(**named: np.ndarray) -> RecordDict:
    return RecordDict({"arrays": arrays(**named)})


FAILED, NOT_FINITE = "the node's own log says why", "update has NaN or infinite entries: it can't be clipped"
# What an app replies, and what the server is told.
FAILURES: dict[str, tuple[Any, str]] = {
    "raises": (raised, FAILED),
    "error reply": (lambda message: Message(Error(code=7, reason="Jane Doe"), reply_to=message), FAILED),
    "nothing": (lambda message: None, FAILED),
    "no model": (RecordDict(), FAILED),
    "two models": (RecordDict({"arrays": zeros(4), "other": zeros(4)}), FAILED),
    "status": (RecordDict({"arrays": zeros(4), "fitres.status": ConfigRecord({"code": 3, "message": "Jane Doe"})}), FAILED),
    "shape": (model_of(w=np.zeros((2, 2), np.float32)), FAILED),
    "whole numbers": (model_of(w=np.zeros(4, np.int64)), FAILED),
    "NaN": (model_of(w=np.full(4, np.nan, np.float32)), NOT_FINITE),
    "beyond float32": (model_of(w=np.full(4, 1e300)), NOT_FINITE),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_what_cannot_be_an_update_is_refused_with_the_kind_of_error_alone(kind: str) -> None:
    """With noise of its own a client replies nonetheless: of the global model, as NbAFL's own, and no one can tell."""
    reply, told_of = FAILURES[kind]
    failing = replying(reply if callable(reply) else lambda message: Message(reply, reply_to=message))
    row, answer = ask(failing(privacy_mod(name="a")), instruction_of(), zeros(4))
    assert reasons(answer) == {"a": f"training failed{': ' if told_of is NOT_FINITE else '; '}{told_of}"}
    assert not row.any()
    assert answer.payload_bytes == 0
    model = arrays(w=np.full(4, 0.5, np.float32))
    row, answer = ask(failing(privacy_mod(name="a", terms=NBAFL, noise_seed=3)), local_instruction(), model)
    same, _ = ask(added(0.0)(privacy_mod(name="a", terms=NBAFL, noise_seed=3)), local_instruction(), model)
    assert answer.refused == {}
    np.testing.assert_array_equal(row, same)


@pytest.mark.parametrize(
    ("policy", "instruction", "reason"),
    [
        ({"max_clip_norm": 0.5}, instruction_of(), "clip_norm=1: this client's policy allows at most 0.5"),
        ({}, replace(CENTRAL, method="nbafl"), "method='nbafl': this client runs dp-fedavg, dp-fedsam, dp-ftrl, fed-smp"),
        ({}, forged(CENTRAL, noise_multiplier=GONE), "missing"),
        ({}, forged(instruction_of(), noise_std=0.0), "does not go with noise_multiplier=1"),
        ({}, forged(CENTRAL, metrics={"bounds": {"loss": 1.0}}), "metrics must be set for method='private-evaluation'"),
        ({}, LOCAL_TO_OTHERS, "placement='local': this client has no terms of its own"),
        ({}, replace(CENTRAL, frozen=(0,)), "the model has no arrays"),
        ({}, replace(CENTRAL, frozen=(1,)), r"frozen=\[1\]: must be below the model's number of arrays, 1"),
    ],
)
def test_a_lying_server_gets_no_reply_and_the_app_is_not_called(policy: Any, instruction: Any, reason: str) -> None:
    app = replying(lambda message: pytest.fail("the app was called"))(privacy_mod(name="a", policy=ClientPolicy(**policy)))
    with pytest.raises(ValueError, match=f"^declined: .*{reason}"):
        ask(app, instruction, zeros(4))


def test_a_client_with_local_noise_answers_no_other_method() -> None:
    app = replying(lambda message: pytest.fail("the app was called"))(privacy_mod(name="a", terms=NBAFL))
    for instruction in (CENTRAL, NO_NOISE, instruction_of()):
        with pytest.raises(ValueError, match="method='dp-fedsam': this client runs nbafl"):
            ask(app, instruction, zeros(4))
    strict = privacy_mod(name="a", terms=NBAFL, policy=ClientPolicy(max_clip_norm=NBAFL.clip_norm, min_noise_std=0.1))
    with pytest.raises(ValueError, match=r"min_noise_std=0.1: this client's noise follows from its own budget alone"):
        ask(added(0)(strict), local_instruction(), zeros(4))


@pytest.mark.parametrize("asked", [CENTRAL.ask, NO_NOISE.ask, instruction_of().ask])
def test_a_client_with_local_noise_sends_nothing_that_another_is_to_noise(asked: ReleaseRequest) -> None:
    """Under its own method's name, too: the server would state what another placement costs."""
    context, app = context_of(), replying(lambda message: pytest.fail("the app was called"))
    with pytest.raises(
        ValueError,
        match=f"declined: placement='{asked.placement}': must be 'local', since this client adds all noise by its own terms",
    ):
        ask(app(privacy_mod(name="a", terms=NBAFL)), instruction_of(method="nbafl", asked=asked), zeros(4), context=context)
    assert NodeStateAccounts(context.state).replies("a") == 0


def test_clients_that_live_elsewhere_are_named() -> None:
    row, answer = ask(added(0.1)(privacy_mod(name="a")), replace(CENTRAL, clients=("b", "a")), zeros(4))
    assert reasons(answer) == {"b": "not hosted here"}
    np.testing.assert_allclose(row, 0.1, atol=1e-3)
    app = replying(lambda message: pytest.fail("the app was called"))
    for terms, instruction in ((None, CENTRAL), (NBAFL, local_instruction())):
        row, answer = ask(app(privacy_mod(name="c", terms=terms)), instruction, zeros(4))
        assert reasons(answer) == {"a": "not hosted here"}
        assert not row.any()


def edited(message: Message, change: Callable[[RecordDict], None]) -> Message:
    change(message.content)
    return message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content["config"].pop(wire.KEY), "config has no 'flower-dp'"),
        (lambda content: content.update({"fitins.config": content["config"]}), "config records"),
        (lambda content: content.update({"fitins.parameters": content["arrays"]}), "2 array records"),
        (lambda content: content["config"].update({wire.KEY: '{"protocol":1}'}), "not of protocol"),
        (lambda content: content.update({"arrays": arrays(n=np.zeros(4, np.int64))}), "only floating-point arrays"),
        (lambda content: content.update({"arrays": arrays(**{"bn.running_mean": np.zeros(4)})}), "GroupNorm"),
    ],
)
def test_a_message_that_no_honest_server_sends_is_refused(change: Any, reason: str) -> None:
    app = replying(lambda message: pytest.fail("the app was called"))(privacy_mod(name="a"))
    with pytest.raises(ValueError, match=reason):
        answered(app(edited(message_of(CENTRAL, zeros(4)), change), context_of()))


@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_replies_that_nothing_protects_do_not_leave_unless_the_policy_allows_metrics(kind: str) -> None:
    def app_of(policy: ClientPolicy) -> ClientApp:
        app = added(0.1)(privacy_mod(name="a", policy=policy))
        answer = RecordDict({"metrics": MetricRecord({"accuracy": 0.5})})
        getattr(app, kind)()(lambda message, context: Message(answer, reply_to=message))
        return app

    message = Message(RecordDict({"arrays": zeros(4)}), 1, kind)
    with pytest.raises(ValueError, match=f"declined: message type '{kind}': its reply would not be private"):
        answered(app_of(ClientPolicy())(message, context_of()))
    reply = app_of(ClientPolicy(allow_metrics=True))(message, context_of())
    assert reply.content["metrics"]["accuracy"] == 0.5


def test_properties_and_first_weights_of_a_numpy_client_do_not_leave() -> None:
    class Open(NumPyClient):
        def get_properties(self, config: Any) -> Any:
            return {"patient": "Jane Doe"}

        def get_parameters(self, config: Any) -> Any:
            return [np.ones(4)]

    app = ClientApp(client_fn=lambda context: Open().to_client(), mods=[privacy_mod(name="a")])
    assert wire.hosted_of(app(properties(), context_of()).content, most_names=1).names == ("a",)
    message = Message(RecordDict({"getparametersins.config": ConfigRecord({})}), 1, "get_parameters")
    with pytest.raises(ValueError, match="its reply would not be private"):
        answered(app(message, context_of()))


# The account


def test_replies_are_charged_before_the_app_is_called_and_refused_when_the_budget_is_spent() -> None:
    context, seen = context_of(), []

    def train(message: Message) -> Message:
        seen.append(NodeStateAccounts(context.state).replies("a"))
        return Message(RecordDict({"arrays": zeros(4)}), reply_to=message)

    for number in range(5):  # a new app and mod for every message; the state is the node's
        app = replying(train)(privacy_mod(name="a", terms=NBAFL))
        _, answer = ask(app, local_instruction(server_round=number + 1), zeros(4), context=context)
        assert bool(answer.refused) == (number >= 3)
    assert seen == [1, 2, 3]
    assert reasons(answer) == {"a": "its budget is spent: num_replies=3, all of them sent"}


@pytest.mark.parametrize(
    ("own", "server", "reason"),
    [
        ({}, {"clip_norm": 1.6}, "clip_norm=1.6: is not this client's own"),
        ({}, {"num_replies": 2}, "the server's terms"),
        ({"paper_epsilon": 0.9}, {}, "noise_multiplier="),
        ({"num_records": 7}, {}, "this client's terms can't be made; the node's own log says why"),
    ],
)
def test_a_client_whose_terms_the_server_misstates_does_not_reply_and_pays_nothing(own: Any, server: Any, reason: str) -> None:
    context = context_of()
    app = replying(lambda message: pytest.fail("the app was called"))
    mod = privacy_mod(name="a", terms=lambda context: replace(NBAFL, **own))
    _, answer = ask(app(mod), local_instruction(replace(NBAFL, **server)), zeros(4), context=context)
    assert reason in answer.refused["a"].reason
    assert NodeStateAccounts(context.state).replies("a") == 0


# Without torch

WITHOUT_TORCH = """
import sys
from flower_dp.clients import ClientPolicy, NbAFLTerms, privacy_mod
privacy_mod(name="a", policy=ClientPolicy(max_clip_norm=1.0, min_noise_std=0.1))
print("torch" in sys.modules)
try:
    from flower_dp.clients import DPClient
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_device_needs_no_torch() -> None:
    """`lint-imports` checks that nothing imports it later either."""
    done = without(["torch", "opacus"], WITHOUT_TORCH)
    assert done.stderr == ""
    needs = "DPClient needs torch: pip install 'flower-dp[torch]'; privacy_mod works without it"
    assert done.stdout.splitlines() == ["False", needs]
