"""A lying server, and an app that goes wrong, against a device with limits and a budget of its own."""

import json
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_dp import wire
from flower_dp.clients import (
    ClientPolicy,
    DatasetRecords,
    DPClient,
    FedSGDDPCRecipe,
    LocalDPClient,
    NbAFLTerms,
    TensorRecords,
    Training,
    client_app,
    model_arrays,
    privacy_mod,
)
from flower_dp.clients.account import KEY, LEDGER_PATH, NodeStateAccounts, refusal_reason
from flower_dp.clients.refusal_messages import Declined
from flower_dp.clients.reply import parts
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.sampling import PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.device_store import DeviceLedger, ReplyNumber
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.events import Relation
from flower_dp.privacy.fedsgd_dpc import gradient_terms
from flower_dp.privacy.mechanisms import Gaussian, Laplace
from flower_dp.wire import Instruction, LocalRequest, Promise, ReleaseRequest, ReplyHeader
from tests.asks import answered, ask, config_of, evaluated, forged, own_ask, own_instruction, reasons, replace
from tests.grids import LocalGrid
from tests.local_grids import context_of, linear, records

BUDGET = FedSGDDPCRecipe(mechanism="laplace", clip_norm=0.5, epsilon=3.0, num_replies=3)
TRAINING = Training(learning_rate=0.1)


ACCURACY = MetricBounds(bounds={"accuracy": 1.0})


def instruction_of(method: str, asked: ReleaseRequest, **keywords: Any) -> Instruction:
    return Instruction(**{"server_round": 1, "method": method, "clients": ("c0",), "ask": asked} | keywords)


def evaluation(noise_std: float = 1e-9, step: float = 2.0**-40) -> Instruction:
    return instruction_of(wire.EVALUATION, ask(placement="distributed", noise_std=noise_std, step=step, metrics=ACCURACY))


def training(noise_std: float = 0.5, noise_multiplier: float = 1.0) -> Instruction:
    asked = ask(placement="distributed", noise_std=noise_std, noise_multiplier=noise_multiplier, size=18)
    return instruction_of("dp-fedavg", asked)


def local(*, noise_multiplier: float = 0.0, name: str = "c0") -> Instruction:
    """What an honest server says of the budget above, but for its promise."""
    return own_instruction("fedsgd-dpc", {name: BUDGET.terms("c0", records("c0"))}, noise_multiplier=noise_multiplier)


def model() -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in model_arrays(linear()).items()}


def device(policy: ClientPolicy | None, **keywords: Any) -> DPClient:
    words = {"clients": {"c0": records("c0")}} | keywords
    return DPClient(model=linear(), training=TRAINING, device="cpu", policy=policy, **words)


def own_device(**keywords: Any) -> LocalDPClient:
    """A device with terms of its own."""
    words = {"clients": {"c0": records("c0")}, "recipe": BUDGET, "context": context_of()} | keywords
    return LocalDPClient(model=linear(), device="cpu", **words)


def paid(made: LocalDPClient) -> int:
    """How many replies such a device has been charged for."""
    assert made.context is not None
    return NodeStateAccounts(made.context.state).replies("c0")


# What a policy does not name


LIMITS = {
    "noise on the device": ClientPolicy(max_clip_norm=1.0, min_noise_std=0.1),
    "a clip": ClientPolicy(max_clip_norm=1.0),
    "an evaluation in all": ClientPolicy(min_noise_multiplier=2.0),
}


@pytest.mark.parametrize("limits", LIMITS)
def test_limits_of_training_hold_for_evaluations(limits: str) -> None:
    """Three evaluations with noise of std 1e-9 told a record exactly."""
    with pytest.raises(
        Declined, match=r"of an evaluation: this client's policy requires at least|an evaluation: this client's policy has"
    ):
        device(LIMITS[limits]).evaluation(model(), config_of(evaluation()))


def test_a_policy_without_limits_trusts_the_server_and_a_limit_of_0_says_so() -> None:
    for policy in (None, ClientPolicy(), ClientPolicy(max_clip_norm=1.0, min_noise_multiplier=0.0)):
        device(policy).answer(model(), config_of(training(1e-9)))
        device(policy).evaluation(model(), config_of(evaluation()))


@pytest.mark.parametrize("limit", ["min_noise_multiplier", "min_evaluation_noise_multiplier"])
def test_a_policy_of_a_client_with_its_own_terms_is_compared_with_its_own_noise(limit: str) -> None:
    """Not with the noise multiplier that the server names."""
    trained, budget = BUDGET.terms("c0", records("c0")), EvaluationBudget(epsilon=3.0, num_evaluations=1)
    least = 1.5 * trained.release.mechanism.noise_multiplier
    made = own_device(policy=ClientPolicy(**{limit: least}), evaluation=budget)
    if limit == "min_noise_multiplier":
        _, answer = made.answer(model(), config_of(local(noise_multiplier=1e9)))
    else:
        asked = own_instruction(wire.EVALUATION, {"c0": budget.terms("c0", trained)}, noise_multiplier=1e9, metrics=ACCURACY)
        answer = made.evaluation(model(), config_of(asked))
    assert f"{limit}={least:g}: this client's own terms have less noise" in answer[wire.KEY]
    assert not paid(made)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e39])
def test_a_model_that_is_not_finite_is_refused_and_nothing_is_charged(value: float) -> None:
    """Every record would count as zero, and the budget be spent on noise; 1e39 is none of float32."""
    made = own_device()
    arrays = {name: array.astype(np.float64) for name, array in model().items()}
    last = arrays[max(arrays)]
    last[(-1,) * last.ndim] = value
    with pytest.raises(Declined, match="the server's model has NaN or infinite entries"):
        made.answer(arrays, config_of(local()))
    assert not paid(made)
    with pytest.raises(Declined, match="NaN or infinite"):
        device(None).answer(arrays, config_of(training()))


def test_a_row_that_stands_for_two_records_is_refused_and_nothing_is_charged() -> None:
    """To replace it would move the sum by twice as much as the noise is made for."""
    whole = records("c0")
    rows = torch.arange(len(whole))
    for repeated in (False, True):
        rows[1] = 0 if repeated else 1
        own = TensorRecords(inputs=whole.inputs, targets=whole.targets, indices=rows.clone())
        made = own_device(clients={"c0": own})
        _, answer = made.answer(model(), config_of(local()))
        assert ("one row stands for several" in answer[wire.KEY]) == repeated
        assert paid(made) == (not repeated)


# The ledger of the device's owner, whichever way a client is hosted


def numpy_message(instruction: Instruction) -> Message:
    arrays = ArrayRecord({str(place): Array(array) for place, array in enumerate(model().values())})
    return wire.train_message(1, wire.NUMPY_CLIENT, arrays, {}, instruction)


def run_of_a_numpy_client(path: Any, with_context: bool) -> Message:
    """One message of a new run, through Flower's own ClientApp; a new run's state is empty."""

    def client_fn(context: Context) -> Any:
        return own_device(context=context if with_context else None).to_client()

    grid = LocalGrid(ClientApp(client_fn=client_fn), 1)
    grid.contexts[1].node_config[LEDGER_PATH] = str(path)
    (reply,) = grid.send_and_receive([numpy_message(local())])
    return reply


def test_a_client_that_does_not_know_what_the_owner_has_set_does_not_reply(tmp_path: Any) -> None:
    """With the context every run spends the same ledger; five replies once left in five runs on a budget of three."""
    ledger = DeviceLedger.create(tmp_path / "ledger.sqlite", ["c0"])
    for _ in range(5):
        answered(run_of_a_numpy_client(ledger.path, with_context=True))
    assert ledger.read()["c0"].replies == 3
    reply = run_of_a_numpy_client(ledger.path, with_context=False)
    with pytest.raises(Declined, match="context: this client has no account; pass context=context"):
        answered(reply)


def test_a_client_object_that_is_kept_does_not_reply_with_the_context_of_an_earlier_message() -> None:
    """Its charges went to a context that Flower had read before, or to that of another node: no later message knew of them."""
    kept: list[Any] = []

    def client_fn(context: Context) -> Any:
        if not kept:
            kept.append(own_device(context=context))
        return kept[0].to_client()

    grid = LocalGrid(ClientApp(client_fn=client_fn), 1)
    replies = []
    for _ in range(2):
        replies += grid.send_and_receive([numpy_message(local())])
        context = grid.contexts[1]
        grid.contexts[1] = Context(1, 1, {}, RecordDict(dict(context.state)), {})  # as Flower makes one of what it has stored
    assert answered(replies[0])
    with pytest.raises(Declined, match="context: is of an earlier message; make the client in client_fn"):
        answered(replies[1])
    kept[0].attach(grid.contexts[1])
    assert answered(grid.send_and_receive([numpy_message(local())])[0])


def test_a_client_is_not_named_as_an_account_of_evaluations(tmp_path: Any) -> None:
    """Its replies would be charged to another client's evaluations."""
    name = "c0, evaluation"
    made = own_device(clients={name: records("c0")})
    with pytest.raises(Declined, match="its name is that of another account of a client"):
        made.answer(model(), config_of(local(name=name)))


# An app that spoils the account


OWN = NbAFLTerms(clip_norm=1.5, paper_epsilon=0.8, delta=0.01, uplink_exposures=2, min_records=8, num_records=8)
ZEROS = ArrayRecord({"w": Array(np.zeros(3, np.float32))})


def lower(context: Context) -> None:
    if KEY in context.state.config_records:
        context.state.config_records[KEY]["replies"][0] = 1  # type: ignore[index]


def another_kind(context: Context) -> None:
    context.state.clear()
    context.state[KEY] = MetricRecord({"replies": 0})


def fail(context: Context) -> None:
    context.state.clear()
    raise ValueError("Jane Doe")


FORGED = {"clients": ["a"], "replies": [-20], "terms": [OWN.terms().text]}
SPOILS: dict[str, Callable[[Context], Any]] = {
    "another state": lambda context: setattr(context, "state", RecordDict()),
    "an empty state": lambda context: context.state.clear(),
    "a lower count": lower,
    "a forged account": lambda context: context.state.update({KEY: ConfigRecord(FORGED)}),  # type: ignore[dict-item]
    "no state": lambda context: setattr(context, "state", None),
    "another kind of record": another_kind,
    "an error": fail,
    "no ledger": lambda context: (context.node_config.pop(LEDGER_PATH, None), context.state.clear()),
}


def spoiling_app(spoils: Any) -> ClientApp:
    """An app that spoils its context in whatever it does."""
    app = ClientApp(mods=[privacy_mod(name="a", terms=OWN, policy=ClientPolicy(allow_metrics=True))])

    def serve(message: Message, context: Context) -> Message:
        spoils(context)
        return Message(RecordDict({"arrays": ZEROS, "metrics": MetricRecord({"loss": 0.5})}), reply_to=message)

    for register in (app.train(), app.evaluate(), app.query(), app.query("anything")):
        register(serve)
    return app


def nbafl() -> Message:
    return wire.train_message(1, wire.MESSAGE_API, ZEROS, {}, own_instruction("nbafl", {"a": OWN.terms()}))


@pytest.mark.parametrize("on_device", [False, True], ids=["the node's state", "a ledger"])
@pytest.mark.parametrize("kind", ["train", "evaluate", "query", "query.anything"])
@pytest.mark.parametrize("what", SPOILS)
def test_no_message_lets_an_app_change_the_account(what: str, kind: str, on_device: bool, tmp_path: Any) -> None:
    """An app that cleared its state in an evaluation sent 20 replies on a budget of 2."""
    ledger = DeviceLedger.create(tmp_path / "ledger.sqlite", ["a"])
    app, context, sent = spoiling_app(SPOILS[what]), context_of(**{LEDGER_PATH: str(ledger.path)} if on_device else {}), 0
    for _ in range(4):
        if kind != "train":
            with suppress(RuntimeError):
                app(Message(RecordDict({"arrays": ZEROS}), 1, kind), context)
        content = app(nbafl(), context).content
        sent += not wire.ReplyHeader.from_json(str(content[wire.KEY][wire.KEY]), ("a",)).refused
    assert sent == 2
    assert (ledger.read()["a"].replies if on_device else NodeStateAccounts(context.state).replies("a")) == 2


@pytest.mark.parametrize(
    "record",
    [
        {"clients": ["c0"], "replies": [-5], "terms": ["x"]},
        {"clients": ["c0", "c0"], "replies": [3, 1], "terms": ["x", "x"]},
        {"clients": ["c0"], "replies": [], "terms": []},
        {},
    ],
)
def test_a_damaged_account_pays_nothing(record: Any) -> None:
    context = context_of()
    context.state[KEY] = ConfigRecord(record)
    made = own_device(context=context)
    with pytest.raises(Declined, match="is damaged"):
        made.answer(model(), config_of(local()))


# What is told of errors


SEE = "; the node's own log says why"


def jane(text: str = "Jane Doe") -> Exception:
    """An error that data have chosen, its class and its text."""
    made: Exception = type("JaneDoeError", (ValueError,), {})(text)
    return made


# A class that inherits from the package's own refusal may hold any text.
OWN_REFUSAL = type("JaneRoeError", (Declined,), {})
ENDINGS = [SystemExit, type("Ending", (BaseException,), {})]


def ending(kind: type[BaseException]) -> Any:
    """A function of an app that ends by an error that is no `Exception`, with a text that data have chosen."""

    def end(*_: Any, **__: Any) -> Any:
        raise kind("Jane Doe")

    return end


def recipe_of(**parts: Any) -> FedSGDDPCRecipe:
    """The budget above, with some functions of its recipe replaced."""
    made: FedSGDDPCRecipe = type("Own", (FedSGDDPCRecipe,), parts)(mechanism="laplace", clip_norm=0.5, epsilon=3.0, num_replies=3)
    return made


class Exiting:
    """Records that end the process."""

    def __init__(self, end: Any) -> None:
        self.end = end

    def __len__(self) -> int:
        return 8

    def __getattr__(self, name: str) -> Any:
        return self.end


class Ending(list[Any]):
    """A data set that ends the process after some batches."""

    def __init__(self, kind: type[BaseException], pairs: list[Any]) -> None:
        super().__init__(pairs)
        self.end, self.left = ending(kind), 600

    def __getitem__(self, position: Any) -> Any:
        self.left -= 1
        return super().__getitem__(position) if self.left > 0 else self.end()


def message_of(kind: str) -> Message:
    if kind == "train":
        return wire.train_message(1, wire.MESSAGE_API, ZEROS, {}, training())
    if kind == "evaluate":
        return wire.evaluate_message(1, wire.MESSAGE_API, ZEROS, {}, evaluation())
    return Message(RecordDict({"config": ConfigRecord({})}), 1, kind)


def answers(app: Any, kinds: Any) -> list[Any]:
    return [lambda kind=kind: app(message_of(kind), context_of()).content for kind in kinds]


def under_the_mod(end: Any, **keywords: Any) -> list[Any]:
    """Questions to an app under the mod; what is not made by `end` is the app."""
    mod = privacy_mod(**{"name": "c0", "policy": ClientPolicy(allow_metrics=True)} | keywords)
    app = ClientApp(mods=[mod])
    for register in (app.train(), app.evaluate(), app.query(), app.query("anything")):
        register(end)
    properties = [lambda: mod(message_of("get_properties"), context_of(), app).content] if keywords else []
    return [*answers(app, ["train", "evaluate", "query", "query.anything"]), *properties]


def questions(make: Callable[[], Any], instruction: Instruction) -> list[Any]:
    """All that a device is asked."""
    parameters = list(model().values())
    return [
        lambda: make().answer(model(), config_of(instruction)),
        lambda: make().fit(parameters, config_of(instruction)),
        lambda: make().get_properties({}),
        lambda: make().evaluation(model(), config_of(evaluation())),
        lambda: make().evaluate(parameters, config_of(evaluation())),
    ]


class OwnTerms:
    """Terms of an app that can't be made."""

    method = "nbafl"
    pipeline = None

    def __init__(self, end: Any) -> None:
        self.terms = end


def own_terms(end: Any) -> list[Any]:
    budget = EvaluationBudget(epsilon=1.0, num_evaluations=1)
    app = ClientApp(mods=[privacy_mod(name="a", terms=OwnTerms(end), evaluation=budget)])  # type: ignore[arg-type]
    app.train()(lambda message, context: pytest.fail("the app was called"))
    app.evaluate()(lambda message, context: pytest.fail("the app was called"))
    own = own_ask({"a": (1.0, "x", 1.0)}, metrics=MetricBounds(bounds={"loss": 1.0}))
    asked = instruction_of(wire.EVALUATION, own, clients=("a",))
    messages = nbafl(), wire.evaluate_message(1, wire.MESSAGE_API, ZEROS, {}, asked)
    return [lambda message=message: app(message, context_of()).content for message in messages]


# Where it is raised, what asks then, and what the server is told.
PLACES: dict[str, tuple[Callable[[Any], list[Any]], str]] = {
    "a recipe's terms": (
        lambda end: questions(lambda: own_device(recipe=recipe_of(terms=end)), local())[:1],
        "this client's terms can't be made" + SEE,
    ),
    "a reply": (lambda end: questions(lambda: own_device(recipe=recipe_of(pipeline=end)), local())[:2], "training failed" + SEE),
    "client_fn": (lambda end: answers(client_app(end), ["query", "train", "evaluate"]), "client_fn failed" + SEE),
    "records": (lambda end: questions(lambda: device(None, clients={"c0": Exiting(end)}), training()), ""),
    "records of a client with noise of its own": (
        lambda end: questions(lambda: own_device(clients={"c0": Exiting(end)}), local()),
        "",
    ),
    "an app": (under_the_mod, SEE),
    "an app's name": (lambda end: under_the_mod(end, name=end), SEE),
    "an app's terms": (lambda end: under_the_mod(end, terms=end), SEE),
    "an app's own terms": (own_terms, "this client's terms can't be made" + SEE),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ends", [type(jane()), OWN_REFUSAL, *ENDINGS], ids=lambda kind: kind.__name__)
def test_an_error_that_data_have_chosen_tells_the_server_nothing(ends: type[BaseException], place: str, caplog: Any) -> None:
    """Neither its text nor its class, whether it is an error, an exit or an end of another kind; the device's own log has it."""
    asks, words = PLACES[place]
    for question in asks(ending(ends)):
        try:
            text = str(question()).replace("\\", "")
        except (RuntimeError, Declined) as error:  # Flower sends class and text of whatever leaves
            text = f"{type(error).__name__}: {error} {error.__cause__}"
        assert words in text
        assert "Jane" not in text
    assert "Jane" in caplog.text


@pytest.mark.parametrize("engine", ["one_by_one", "batched"])
@pytest.mark.parametrize("ends", [*ENDINGS, GeneratorExit], ids=lambda kind: kind.__name__)
def test_an_exit_in_one_clients_data_decides_nothing_for_its_neighbors(ends: type[BaseException], engine: str) -> None:
    """In the first query, in training and in a private evaluation; at the first record that is read, or after some."""
    pairs = [(torch.ones(6), 1)] * 1024  # twice as many as are read at once
    late = DatasetRecords(dataset=Ending(ends, pairs))
    clients: Any = {"c0": Exiting(ending(ends)), "c1": DatasetRecords(dataset=pairs), "c2": late}
    made = DPClient(
        model=linear(), clients=clients, training=replace(TRAINING, batch_size=64), device="cpu", training_engine=engine
    )
    assert "unable" not in json.loads(made.get_properties({})[wire.KEY])
    names = tuple(clients)
    for answer in (
        made.answer(model(), config_of(replace(training(), clients=names)))[1],
        made.evaluation(model(), config_of(replace(evaluation(), clients=names))),
    ):
        assert set(ReplyHeader.from_json(answer[wire.KEY], names).refused) == {"c0", "c2"}


def test_an_interruption_is_no_failure_of_the_app_and_has_no_text() -> None:
    for call in (
        lambda: client_app(ending(KeyboardInterrupt))(Message(RecordDict(), 1, "query"), context_of()),
        lambda: device(None).get_properties.__func__(Exiting(ending(KeyboardInterrupt)), {}),
    ):
        with pytest.raises(KeyboardInterrupt) as raised:
            call()
        assert raised.value.args == ()


def test_a_client_does_not_tell_its_own_terms() -> None:
    """They follow from how many records it has, which is no public number under add-or-remove-one."""
    context = context_of()
    made = own_device(clients={"c0": records("c0", size=7)}, context=context)
    _, answer = made.answer(model(), config_of(local()))  # of 8 records
    (reason,) = reasons(wire.ReplyHeader.from_json(answer[wire.KEY], ("c0",))).values()
    assert "are not this client's own" in reason
    assert " of 7" not in reason
    account = NodeStateAccounts(context.state)
    account.note({"c0": (1, BUDGET.terms("c0", records("c0")).text, 1)})
    own = BUDGET.terms("c0", records("c0", size=7))
    numbered = {"c0": ReplyNumber(run="r", number=2)}
    assert account.charge({"c0": own}, numbered) == {"c0": wire.Refusal(reason="its account was opened on other terms")}


# An app's metrics are no sums over records


def test_an_app_with_terms_of_a_record_does_not_evaluate() -> None:
    """Its metrics are means over records, and noise for one record of such a mean is not known."""

    class OfRecords:
        method = "nbafl"
        pipeline = None

        def terms(self) -> ClientTerms:
            return BUDGET.terms("c0", records("c0"))

    budget, seen = EvaluationBudget(epsilon=1.0, num_evaluations=1), []
    app = ClientApp(mods=[privacy_mod(name="c0", terms=OfRecords(), evaluation=budget)])  # type: ignore[arg-type]
    app.evaluate()(lambda message, context: seen.append(message))  # type: ignore[arg-type, func-returns-value]
    terms = budget.terms("c0", BUDGET.terms("c0", records("c0")))
    assert isinstance(terms.release.mechanism, Laplace)
    asked = own_instruction(wire.EVALUATION, {"c0": terms}, metrics=MetricBounds(bounds={"loss": 1.0}))
    context = context_of()
    reply = app(wire.evaluate_message(1, wire.MESSAGE_API, ZEROS, {}, asked), context)
    answer = evaluated(str(reply.content[wire.KEY][wire.KEY]), asked)
    assert "an app's metrics are means over records" in answer.refused["c0"]
    assert seen == []
    assert KEY not in context.state.config_records


def test_the_traceback_of_a_failing_reply_is_in_the_devices_log_once_and_never_told(monkeypatch: Any, caplog: Any) -> None:
    """The log had the error and its line alone. Of errors at one place, which data may make often, it has one traceback."""
    monkeypatch.setattr("flower_dp.clients.refusal_messages._traced", set())
    texts = iter(("Jane Doe", "Jane Roe"))

    def clip(*arguments: Any) -> Any:
        raise jane(next(texts))

    monkeypatch.setattr(parts, "clip_l2", clip)
    for _ in range(2):
        _, answer = device(None).answer(model(), config_of(training()))
        assert reasons(wire.ReplyHeader.from_json(answer[wire.KEY], ("c0",))) == {
            "c0": "training failed; the node's own log says why"
        }
        assert "raceback" not in answer[wire.KEY]
    lines = [line for line in caplog.text.splitlines() if line.startswith("traceback | ")]
    assert lines[0] == "traceback | Traceback (most recent call last):"
    assert lines[-1].endswith("JaneDoeError: Jane Doe")
    assert any("raise jane(next(texts))" in line for line in lines)
    assert sum("Traceback (most recent call last)" in line for line in lines) == 1
    assert "JaneDoeError: Jane Roe (test_device.py:" in caplog.text


# What must stand on every line


def test_training_refuses_vectors_that_its_method_does_not_work_with() -> None:
    """Of any kind of client; and its account pays for none of them."""
    vector = np.zeros(18, np.float32)
    for made, asked in ((device(None), training()), (own_device(), local())):
        reported = forged(asked, vectors={"control": None})
        with pytest.raises(Declined, match=r"vectors=\['control'\] came with the model: this method works with \[\]"):
            made.answer(model() | {"flower-dp.control": vector}, config_of(reported))
        with pytest.raises(Declined, match="must be finite float32"):
            made.answer(model() | {"flower-dp.control": vector + np.nan}, config_of(reported))
        assert made.context is None or KEY not in made.context.state
        assert made.answer(model(), config_of(asked))
    app = ClientApp(mods=[privacy_mod(name="c0")])
    app.train()(lambda message, context: pytest.fail("the app was called"))
    sent = replace(training(), ask=replace(training().ask, vectors={"control": vector}))
    with pytest.raises(Declined, match=r"vectors=\['control'\]: must be names of vectors that .* a method of this client"):
        answered(app(wire.train_message(1, wire.MESSAGE_API, ZEROS, {}, sent), context_of()))


def test_terms_that_differ_in_one_word_are_other_terms() -> None:
    """An account that was opened on the one does not pay for the other."""
    opened = BUDGET.terms("c0", records("c0"))
    assert opened.refusal_reason(1, opened.text) is None
    for change in (
        {"unit": "client"},
        {"relation": "add-or-remove-one"},
        {"clip_norm": 2.0},
        {"mechanism": Gaussian(noise_multiplier=opened.release.mechanism.noise_multiplier)},
        {"sampler": PoissonSampling(sampling_rate=0.5)},
        {"num_units": 9},
    ):
        other = replace(opened, release=replace(opened.release, **change))
        assert other.refusal_reason(1, opened.text) is not None, change
        if "mechanism" not in change:
            promise = Promise(clip_norm=other.release.clip_norm, noise_multiplier=0.0)
            assert refusal_reason(
                other, promise, LocalRequest(weight=1.0, terms=opened.fingerprint, noise_multiplier=0.0, number=1)
            ), change


@pytest.mark.parametrize("relation", ["replace-one", "add-or-remove-one"])
@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1.0, 3.0, 7.7])
def test_replies_and_evaluations_never_cost_more_than_their_budget(epsilon: float, relation: Relation) -> None:
    """The exact sum of what the float64 scales cost, and what the accountant makes of it: no float64 sum of budgets."""
    for count in [*range(1, 50), 199, 1000]:
        terms = gradient_terms(
            mechanism="laplace", clip_norm=1.0, epsilon=epsilon, delta=0.0, num_replies=count, num_records=8, relation=relation
        )
        evaluations = EvaluationBudget(epsilon=epsilon, num_evaluations=count).terms("c0", terms)
        for release in (terms.release, evaluations.release):
            scale = Fraction(release.mechanism.noise_multiplier)
            assert count * (2 if relation == "replace-one" else 1) / scale <= Fraction(epsilon)
        cost = accounting.epsilon(accounting.repeated(terms.event, count), delta=0.0, relation=relation)
        assert cost.epsilon <= epsilon


@pytest.mark.parametrize("text", ["2 replies\nWARNING: client c0: its ledger was deleted", "\x1b[2J", "x" * 10**6])
def test_a_servers_words_come_back_in_one_line_of_bounded_length(text: str, caplog: Any) -> None:
    """A server's text in a device's error ended the line in the log of the SuperNode, which could forge others."""
    said = [Declined(text).reason]
    for make in (lambda: device(None), own_device):
        honest = json.loads(instruction_of(make().methods[0], ask()).to_json())
        for arrays, table in (
            ({text: next(iter(model().values()))}, honest),
            (model(), honest | {"ask": honest["ask"] | {text: 1}}),
            (model(), honest | {"method": text, "ask": {}}),
        ):
            with pytest.raises(Declined) as declined:
                make().answer(arrays, {wire.KEY: json.dumps(table)})
            said.append(str(declined.value))
    terms = BUDGET.terms("c0", records("c0"))
    asked = LocalRequest(weight=1.0, terms=text, noise_multiplier=1.0, number=1)
    said.append(refusal_reason(terms, Promise(clip_norm=0.5, noise_multiplier=1.0), asked) or "\n")
    for one in (*said, *caplog.messages):
        assert one.isprintable()
        assert len(one) <= 1500
    assert terms.fingerprint in caplog.text  # which the device's owner has to see


@pytest.mark.parametrize("seeded", [None, 7])
def test_seeded_noise_of_an_evaluation_is_told(seeded: int | None) -> None:
    budget = EvaluationBudget(epsilon=1.0, num_evaluations=3)
    own = LocalDPClient(
        model=linear(),
        clients={"c0": records("c0")},
        recipe=BUDGET,
        device="cpu",
        context=context_of(),
        evaluation=budget,
        noise_seed=seeded,
    )
    terms = budget.terms("c0", BUDGET.terms("c0", records("c0")))
    locally = own_instruction(wire.EVALUATION, {"c0": terms}, metrics=ACCURACY)
    assert f'"seeded_noise":{str(seeded is not None).lower()}' in own.evaluation(model(), config_of(locally))[wire.KEY]
    plain = device(None, noise_seed=seeded)
    assert f'"seeded_noise":{str(seeded is not None).lower()}' in plain.evaluation(model(), config_of(evaluation()))[wire.KEY]
    app = ClientApp(mods=[privacy_mod(name="c0", noise_seed=seeded)])
    app.evaluate()(lambda message, context: Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5})}), reply_to=message))
    reply = app(wire.evaluate_message(1, wire.MESSAGE_API, ZEROS, {}, evaluation()), context_of())
    assert f'"seeded_noise":{str(seeded is not None).lower()}' in str(reply.content[wire.KEY][wire.KEY])


def test_metrics_leave_if_a_bool_allows_them() -> None:
    with pytest.raises(ValueError, match="allow_metrics='no': must be True or False"):
        ClientPolicy(allow_metrics="no")  # type: ignore[arg-type]
