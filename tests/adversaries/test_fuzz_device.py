"""Changed messages of a server, handed to every kind of device: it answers honestly, or in this package's own words.

Two devices get each message whose data differ in one record: where single records are protected, what they say is the same, and
what they noise differs by no more than the noise is made for.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from flower_dp import wire
from flower_dp.clients import (
    ClientPolicy,
    LocalDPClient,
    NbAFLTerms,
    TensorRecords,
    client_app,
    model_arrays,
    privacy_mod,
)
from flower_dp.clients.account import NodeStateAccounts
from flower_dp.clients.refusal_messages import SEE_LOG
from flower_dp.clients.reply import parts
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.device_store import evaluation_account
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.wire import Instruction, ReplyHeader
from tests.adversaries.fuzzing import THOROUGH, bounded, contents, examples, texts
from tests.asks import ask, own_ask, saying
from tests.contracts import METHODS, NUM_RECORDS, Method, Words
from tests.grids import LocalGrid
from tests.local_grids import context_of, linear, records
from tests.stock import shifted, stock_app

SEED = 11
HOSTED = ("c0", "c2")
NODE: dict[str, Any] = {"partition-id": 0, "num-partitions": 2}
ROUNDS = 3
WORDS = Words(num_rounds=ROUNDS)
BUDGET = EvaluationBudget(epsilon=0.5, num_evaluations=2)
BOUNDS = {"accuracy": 1.0, "loss": 4.0}
# Everything that may be told of an error that is not one of `Declined`.
FIXED = re.compile(rf"(training|evaluation|client_fn|reading the message|this client's app) failed; {SEE_LOG}")
OWN = [method for method in METHODS if method.client is not None]
LOCAL = [method for method in OWN if not (method.target or method.whole_run)]
LOOSE = 1 + 1e-9
# The longest text that leaves a device in the place of a reply.
LONGEST = 1100

BY_LABEL = {method.label: method for method in OWN}


# Variants whose devices have code of their own: a regularizer, a public mask, another noise.
MORE = {"dp-fedavg, BLURS", "fed-smp", "fedsgd-dpc gaussian"}


def labels(condition: Callable[[Method], bool] = lambda method: True) -> Any:
    kinds = [one for one in OWN if THOROUGH or not one.variant or one.label in MORE]
    return pytest.mark.parametrize("label", [one.label for one in kinds if condition(one)])


def data_of(name: str, twin: bool) -> TensorRecords:
    """The records of a client; the twin's has another first record, far from all others."""
    made = records(name, NUM_RECORDS)
    if not twin:
        return made
    inputs, targets = made.inputs.clone(), made.targets.clone()
    inputs[0], targets[0] = -30.0 * inputs[0], (targets[0] + 1) % 3
    return TensorRecords(inputs=inputs, targets=targets)


@dataclass(frozen=True)
class Watched:
    """Records that say when they are read."""

    of: TensorRecords
    read: Callable[[], None]

    def __len__(self) -> int:
        return len(self.of)

    def batch(self, positions: Any, device: Any) -> Any:
        self.read()
        return self.of.batch(positions, device)

    def made_up(self, device: Any) -> Any:
        return self.of.batch(torch.zeros(1, dtype=torch.int64), device)


@dataclass
class Device:
    """A node with one context over all of its messages."""

    app: ClientApp
    context: Context

    def ask(self, message: Message) -> tuple[Message | None, str]:
        """Return the reply, or why there is none."""
        reply = self.app(message, self.context)  # no error leaves: Flower would send its class and its text
        if (refusal := wire.refusal_of(reply.content)) is None:
            return reply, ""
        if refusal.code == "failed":
            assert FIXED.fullmatch(refusal.reason)
        assert refusal.reason.isprintable()
        assert len(refusal.reason) <= LONGEST
        return None, refusal.reason


@dataclass
class Row:
    """What was noised: the row without its noise, and the noise."""

    clipped: np.ndarray
    noise: Any


@contextmanager
def watched(look: Callable[[], None] = lambda: None) -> Iterator[list[Row]]:
    """Keep every row as it is directly before its noise, and `look` then."""
    rows: list[Row] = []
    places = [(kind, "add") for kind in (parts.NotPrivate, parts.ServerNoise, parts.GaussianShare, parts.FullNoise)]
    places.append((parts.StepNoise, "step"))
    real = {kind: getattr(kind, name) for kind, name in places}

    def watching(kind: Any) -> Callable[..., Any]:
        def add(self: Any, clipped: Any, step: float, rng: Any) -> Any:
            look()
            rows.append(Row(torch.as_tensor(clipped).detach().to(torch.float64).numpy().copy(), self))
            return real[kind](self, clipped, step, rng)

        return add

    try:
        for kind, name in places:
            setattr(kind, name, watching(kind))
        yield rows
    finally:
        for kind, name in places:
            setattr(kind, name, real[kind])


def instruction_of(message: Message) -> Instruction:
    return Instruction.from_json(message.content["config"][wire.KEY], [np.zeros(18, np.float32)] * 3)


# The real messages


@cache
def sent(method: Method) -> list[Message]:
    """What an honest server sends to node 1, which hosts two clients: two rounds of training with an evaluation between them."""

    def client_fn(context: Context) -> Any:
        part = int(context.node_config["partition-id"])
        hosted = {name: data_of(name, False) for name in ("c0", "c1", "c2", "c3")[part::2]}
        return method.client(WORDS, model=linear(), clients=hosted)

    grid = LocalGrid(client_app(client_fn), 2)
    method.strategy(WORDS).start(grid, model_arrays(linear()), num_rounds=ROUNDS)
    first, second, *_ = [one for one in grid.sent if one.metadata.dst_node_id == 1 and one.metadata.message_type == "train"]
    metrics = MetricBounds(bounds=BOUNDS)
    if method in LOCAL:
        terms = {name: own_terms(method, name)["evaluate"] for name in HOSTED}
        asked = own_ask(
            {name: (1.0, one.fingerprint, one.release.mechanism.noise_multiplier) for name, one in terms.items()}, metrics=metrics
        )
    else:
        asked = ask(
            noise_multiplier=8.0, placement=instruction_of(first).ask.placement, metrics=metrics, size=metrics.num_counted
        )
    instruction = Instruction(server_round=1, method=wire.EVALUATION, clients=HOSTED, ask=asked)
    arrays = ArrayRecord({name: array for name, array in first.content["arrays"].items() if not name.startswith("flower-dp.")})
    return [first, wire.evaluate_message(1, wire.MESSAGE_API, arrays, {}, instruction), second]


FACTORS = st.one_of(
    st.sampled_from([0.0, 0.5, 2.0, 1 - 1e-7, 1 - 1e-12, 1 + 1e-12, 1e-3, 1e3, 1e-9, 1e9, 1e-30, 1e30, 1e-200, 1e200]),
    st.integers(-60, 60).map(lambda power: 2.0**power),
)
OPTIONAL = {
    "keep_ratio": [0.5, 1e-9, 1],
    "quantization_levels": [1, 7, 32767],
    "noise_std": [1e-9, 1.0, 1e9],
    "step": [2.0**-12, 2.0**-40, 1.0, 2.0**40, 2.0**-1000, 0],
    "mask": [
        *({"type": "seed", "seed": 7, "keep_ratio": ratio} for ratio in (0.5, 1.0)),
        *({"type": "bits", "bits": bits} for bits in ("////", "Dw8A", "AAAA")),
    ],
    "indicator": [{"clip_norm": 0.3, "scale": 0.3}, {"clip_norm": 1e-9, "scale": 1e-9}, {"clip_norm": 1e-9, "scale": 0.99}],
    "metrics": [
        {"bounds": bounds}
        for bounds in (
            *({"accuracy": 1.0}, {"accuracy": 1e-300, "loss": 1e300}, {"loss": 4}),
            {f"m{index}": 1.0 for index in range(16)},
        )
    ],
    "vectors": [{"control": None}, {"a": None, "b": None}],
}


@st.composite
def plausible(draw: st.DrawFn, text: str) -> str:
    """Draw an instruction of the right form that asks for something else than the honest one."""
    table = json.loads(text)
    ask = table["ask"]
    for what in draw(
        st.lists(st.sampled_from(["scale"] * 4 + ["add", "add", "drop", "who", "what", "own"]), min_size=1, max_size=4)
    ):
        if what == "scale":
            numbers = [(name, of) for of in (ask, ask["promise"]) for name in sorted(of) if isinstance(of[name], float)]
            factor, places = draw(FACTORS), list(range(len(numbers)))
            for name, table_of in (numbers[place] for place in draw(st.permutations(places))[: draw(st.integers(1, 12))]):
                table_of[name] *= factor
        elif what == "add":
            name = draw(st.sampled_from(sorted(OPTIONAL)))
            ask[name] = draw(st.sampled_from(OPTIONAL[name]))
        elif what == "drop":
            ask.pop(draw(st.sampled_from(sorted(set(ask) & set(OPTIONAL) or {"step"}))), None)
        elif what == "who":
            table["clients"] = draw(st.lists(st.sampled_from(["c0", "c1", "c2", "c0, evaluation", "x"]), unique=True, max_size=4))
            if own := list(ask.get("own", {}).values()):
                ask["own"] = dict(zip(table["clients"], own * 4, strict=False))
        elif what == "what":
            table["server_round"] = draw(st.sampled_from([1, 2, 3, 10**6, 2**70, 10**400]))
            table["report_metrics"] = draw(st.booleans())
            table["frozen"] = draw(st.sampled_from([[], [0], [1], [0, 0], [10**30]]))
            table["method"] = draw(st.sampled_from([table["method"]] * 3 + ["dp-fedavg", "fed-smp", "scaffold", wire.EVALUATION]))
            ask["placement"] = draw(st.sampled_from([ask["placement"]] * 3 + ["central", "distributed", "local"]))
        elif own := list(ask.get("own", {}).values()):
            factor = draw(FACTORS)
            name = draw(st.sampled_from(["weight", "noise_multiplier"]))
            for one, terms in zip(own, [one["terms"] for one in own][::-1], strict=True):
                one |= {name: one[name] * factor, "terms": terms}
    return json.dumps(table)


PROTECTING = ("noise_std", "noise_multiplier", "clip_norm")
LESS = (0.999, 0.5, 1e-2, 2.0**-20)


def with_less(text: str, name: str, factor: float) -> str:
    """An instruction with so much less protection in one number; the same where it has no such number."""
    table = json.loads(text)
    ask = table["ask"]["promise"] if name in table["ask"]["promise"] else table["ask"]
    if isinstance(ask.get(name), float):
        ask[name] = ask[name] / factor if name == "clip_norm" else ask[name] * factor
    return json.dumps(table)


def instructions(text: str) -> st.SearchStrategy[Any]:
    table = json.loads(text)
    if not isinstance(table, dict) or not isinstance(table.get("ask"), dict) or not isinstance(table["ask"].get("promise"), dict):
        return texts(text)
    return st.one_of(plausible(text), plausible(text), texts(text))


@st.composite
def changed(draw: st.DrawFn, label: str, most: int = 3) -> list[Message]:
    """Draw changed forms of a method's messages in any order, with honest ones between them."""
    messages, out = sent(BY_LABEL[label]), []
    for _ in range(draw(st.integers(1, most))):
        honest = messages[draw(st.integers(0, len(messages) - 1))]
        message = copy.copy(honest)
        message.content = honest.content if draw(st.integers(0, 4)) == 0 else draw(contents(honest.content, instructions))
        out.append(message)
    return out


def answer_in(reply: Message, message: Message) -> ReplyHeader:
    """The answer of a reply, read as its server would."""
    answer = wire.answer_of(reply.content, instruction_of(message).clients)
    assert answer is not None
    return answer


# Devices whose noise is the server's to name, within limits of their own


def limits(method: Method) -> ClientPolicy:
    """A policy that asks for exactly what the honest server offers."""
    train, evaluation, _ = (instruction_of(message).ask for message in sent(method))
    share = {"min_noise_std": train.noise_std, "min_evaluation_noise_std": evaluation.noise_std} if train.noise_std else {}
    return ClientPolicy(
        max_clip_norm=train.promise.clip_norm,
        min_noise_multiplier=train.promise.noise_multiplier,
        min_evaluation_noise_multiplier=evaluation.promise.noise_multiplier,
        **share,
    )


def policed(method: Method) -> Device:
    def client_fn(context: Context) -> Any:
        hosted = {name: data_of(name, False) for name in HOSTED}
        return method.client(WORDS, model=linear(), clients=hosted, policy=limits(method))

    return Device(client_app(client_fn), context_of(**NODE))


def train_and_evaluate(mods: Any) -> ClientApp:
    app = stock_app(shifted(lambda node: 0.3), mods=mods)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5, "loss": 1.0})}), reply_to=message)

    return app


def modded(method: Method) -> Device:
    return Device(train_and_evaluate([privacy_mod(name="c0", policy=limits(method))]), context_of(**NODE))


def assert_within(policy: ClientPolicy, row: Row, message: Message) -> None:
    """What leaves has a norm and a noise that the device's own policy allows, and so has the release, by the server's word."""
    kind, ask = message.metadata.message_type, instruction_of(message).ask
    promised = policy.least_evaluation_multiplier if kind == "evaluate" else policy.min_noise_multiplier
    assert ask.promise.noise_multiplier >= (promised or 0.0) / LOOSE
    norm = float(np.linalg.norm(row.clipped))
    if kind == "evaluate":
        most, least = 1.0, policy.least_evaluation_std
    else:
        most, least = policy.max_clip_norm or np.inf, policy.min_noise_std
    assert norm <= min(most, ask.promise.clip_norm) * LOOSE
    assert not isinstance(row.noise, parts.NotPrivate)
    if least:
        assert isinstance(row.noise, parts.GaussianShare)
        # An adaptive clip norm may be smaller than the largest, and its noise smaller in proportion.
        part = 1.0 if ask.indicator is None else ask.promise.clip_norm / most
        assert row.noise.noise_std >= part * least / LOOSE


@examples(16)
@pytest.mark.parametrize("make", [policed, modded])
@labels(lambda method: method.target)
@given(data=st.data())
def test_no_message_makes_a_device_send_more_than_its_policy_allows(label: str, make: Any, data: st.DataObject) -> None:
    policy, device = limits(BY_LABEL[label]), make(BY_LABEL[label])
    messages = data.draw(changed(label))
    for message in messages:
        with bounded(), watched() as rows:
            reply, _ = device.ask(message)
        for row in rows:
            assert_within(policy, row, message)
        if reply is not None:
            assert not answer_in(reply, message).metrics  # the policy allows none


@labels(lambda method: method.target)
def test_a_device_refuses_less_protection_in_any_number(label: str) -> None:
    method = BY_LABEL[label]
    device = policed(method)
    for message in sent(method)[:2]:
        for name in PROTECTING:
            for factor in LESS:
                asked = copy.deepcopy(message)
                saying(asked, with_less(str(message.content["config"][wire.KEY]), name, factor))
                with watched() as rows:
                    device.ask(asked)
                for row in rows:
                    assert_within(limits(method), row, asked)


@pytest.mark.slow
@labels()
def test_the_honest_messages_are_answered(label: str) -> None:
    """Else the tests of this file would try nothing."""
    method = BY_LABEL[label]
    device = policed(method) if method.target else local(method)
    for message in sent(method):
        with watched() as rows:
            reply, why = device.ask(message)
        assert reply is not None, why
        assert not answer_in(reply, message).refused
        assert rows
        for row in rows if method.target else ():
            assert_within(limits(method), row, message)


# Devices with terms of their own


def local(
    method: Method, *, twin: bool = False, read: Callable[[], None] = lambda: None, context: Context | None = None
) -> Device:
    def client_fn(context: Context) -> LocalDPClient:
        hosted = {name: Watched(data_of(name, twin and name == "c0"), read) for name in HOSTED}
        client: LocalDPClient = method.client(WORDS, model=linear(), clients=hosted, noise_seed=SEED)
        client.evaluation_budget = BUDGET
        return client

    return Device(client_app(client_fn), context_of(**NODE) if context is None else context)


@cache
def own_terms(method: Method, name: str) -> dict[str, ClientTerms]:
    """A client's own terms of training and of evaluation."""
    client = method.client(WORDS, model=linear(), clients={name: data_of(name, False)})
    train = client.recipe.terms(name, data_of(name, False))
    return {"train": train, "evaluate": BUDGET.terms(name, train)}


def spent(context: Context) -> dict[str, int]:
    account = NodeStateAccounts(context.state)
    names = [one for name in HOSTED for one in (name, evaluation_account(name))]
    return {name: account.replies(name) for name in names}


def norm_of(values: np.ndarray, kind: str) -> float:
    return float(np.abs(values).sum() if kind == "l1" else np.linalg.norm(values))


def assert_neighbors(rows: list[Row], others: list[Row]) -> None:
    """What neighbors noise differs by no more than the noise is made for: half of that is a release's clip norm.

    Steps with noise of their own move two runs apart, so only the first of each reply is compared.
    """
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        release = row.noise.release
        assert norm_of(row.clipped - other.clipped, release.mechanism.norm) <= release.sensitivity * LOOSE
        if isinstance(row.noise, parts.StepNoise):
            return


@pytest.mark.slow
@examples(16)
@labels(lambda method: not (method.target or method.whole_run))
@given(data=st.data())
def test_no_message_moves_a_device_from_its_own_terms(label: str, data: st.DataObject) -> None:
    method = BY_LABEL[label]
    charged: list[int] = []

    def paid() -> int:
        return sum(spent(device.context).values())

    def look() -> None:
        charged.append(paid())

    device = local(method, read=look)
    twin = local(method, twin=True)
    terms = own_terms(method, "c0")
    if already := data.draw(st.integers(0, WORDS.replies)):
        for one in (device, twin):
            NodeStateAccounts(one.context.state).note(
                {name: (already, own_terms(method, name)["train"].text, already) for name in HOSTED}
            )
    messages = data.draw(changed(label))
    for message in messages:
        kind, before = message.metadata.message_type, spent(device.context)
        charged.clear()
        with bounded(), watched(look) as rows:
            reply, why = device.ask(message)
        with bounded(), watched() as others:
            twins, twins_why = twin.ask(message)
        after = spent(device.context)
        num_paid = sum(after.values()) - sum(before.values())
        assert all(0 <= after[name] - before[name] <= 1 for name in after)
        assert all(now > sum(before.values()) for now in charged)  # no record is read, and nothing noised, before the charge
        limit = {"train": terms["train"].num_replies, "evaluate": BUDGET.num_evaluations}
        assert all(after[name] <= limit["train"] and after[evaluation_account(name)] <= limit["evaluate"] for name in HOSTED)
        for row in rows:
            own = terms["train" if kind == "train" else "evaluate"].release
            assert row.noise.release == own
            assert row.noise.noise_std >= own.noise_scale
        assert (reply is None, why) == (twins is None, twins_why)  # no record decides what is told
        assert spent(twin.context) == after
        assert_neighbors(rows, others)
        if reply is not None and twins is not None:
            answer = answer_in(reply, message)
            assert answer.refused == answer_in(twins, message).refused
            assert not answer.metrics
            replies = len(instruction_of(message).clients) - len(answer.refused)
            assert replies <= num_paid
            assert rows or not replies


# Somebody's own app behind the mod


NBAFL = NbAFLTerms(clip_norm=0.5, paper_epsilon=0.2, delta=1e-3, uplink_exposures=1, min_records=8, num_records=8, num_replies=3)


@examples(20)
@given(data=st.data())
def test_no_message_gets_past_the_mod(data: st.DataObject) -> None:
    """With terms of its own; with limits alone it is one of the devices above."""
    device = Device(train_and_evaluate([privacy_mod(name="c0", terms=NBAFL, evaluation=BUDGET)]), context_of(**NODE))
    for message in data.draw(changed("nbafl")):
        kind, before = message.metadata.message_type, spent(device.context)["c0"]
        with bounded(), watched() as rows:
            reply, _ = device.ask(message)
        assert len(rows) <= 1
        for row in rows:
            release = NBAFL.terms().release if kind == "train" else BUDGET.terms("c0", NBAFL.terms()).release
            assert row.noise.release == release
            assert norm_of(row.clipped, release.mechanism.norm) <= release.clip_norm * LOOSE
            assert spent(device.context)["c0"] == before + (kind == "train") <= NBAFL.terms().num_replies
        if reply is not None:
            assert not answer_in(reply, message).metrics
