"""Changed replies of a node, handed to every strategy: the round goes on, and its other clients count as without it."""

# ruff: noqa: PT017 (a refusal is as good as a right answer)
import copy
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from flower_dp import wire
from flower_dp.clients import client_app, model_arrays
from flower_dp.core import compression
from flower_dp.strategies import DPStrategy, LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.exchange import Asked, More
from flower_dp.strategies.exchange.plain import PlainExchange
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import Hosted, hosted_of
from tests.adversaries.fuzzing import TEXTS, THOROUGH, Lines, bounded, contents, examples, npy, texts, values
from tests.adversaries.test_fuzz_device import BOUNDS, BUDGET, data_of
from tests.contracts import METHODS, SAMPLERS, Method, Words
from tests.grids import LocalGrid
from tests.local_grids import linear
from tests.stock import shifted, stock_app

LENGTH = 18
WORDS = Words(num_rounds=3, noise_seed=5)
# The longest line that a reply may put into the server's log.
LONGEST = 700
BY_LABEL = {method.label: method for method in METHODS}
with_methods = pytest.mark.parametrize("label", [one.label for one in METHODS if THOROUGH or not one.variant])


class Keeping(PlainExchange):
    """An exchange that keeps what it has added up."""

    __slots__ = ()
    kept: list[Collected] = []  # noqa: RUF012

    def total(self, asked: Asked, replies: Iterable[Message], more: More, *, seeded: bool) -> Collected:
        collected = super().total(asked, replies, more, seeded=seeded)
        self.kept.append(replace(collected, total=collected.total.copy()))  # the release adds noise to it
        return collected


@dataclass
class Round:
    """A round whose messages are out, of one kind, and the honest replies to them, by node."""

    kind: str
    strategy: DPStrategy
    state: RunState
    asked: dict[str, Asked]
    honest: dict[int, Message]
    without: Collected = field(init=False)

    def __post_init__(self) -> None:
        self.without, _ = self.total([reply for node, reply in self.honest.items() if node != 1])

    @property
    def now(self) -> Asked:
        return next(iter(self.asked.values()))

    def total(self, replies: list[Message]) -> tuple[Collected, Any]:
        """Return what was added up, and what the strategy makes of it."""
        self.strategy._run.asked = {}  # of an example that added up nothing
        self.strategy.state, self.strategy._run.asked = self.state, dict(self.asked)
        Keeping.kept.clear()
        aggregate = self.strategy.aggregate_train if self.kind == "train" else self.strategy.aggregate_evaluate
        result = aggregate(1, replies)
        (collected,) = Keeping.kept
        return collected, result


def app_of(method: Method) -> tuple[ClientApp, int]:
    if method.client is None:
        app = stock_app(shifted(lambda node: 0.02 * node))

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5, "loss": 1.0})}), reply_to=message)

        return app, 4

    def client_fn(context: Context) -> Any:
        part = int(context.node_config["partition-id"])
        hosted = {name: data_of(name, False) for name in ("c0", "c1", "c2", "c3")[part::2]}
        client = method.client(WORDS, model=linear(), clients=hosted, noise_seed=3)
        if not method.target:
            client.evaluation_budget = BUDGET
        return client

    return client_app(client_fn), 2


@cache
def rounds_of(label: str) -> tuple[Round, ...]:
    """A round of training, and an evaluation, of a method."""
    method = BY_LABEL[label]
    found = []
    for kind in ("train", "evaluate"):
        if kind == "evaluate" and method.name == "dp-pasgd":
            continue
        strategy = method.strategy(WORDS)
        if kind == "evaluate":
            private = PrivateEvaluation(noise_multiplier=8.0, sampling=SAMPLERS["full"], metrics=BOUNDS)
            strategy.rules.evaluate(private if method.target else LocalEvaluation(budget=BUDGET, metrics=BOUNDS))
            strategy._run._initial = strategy._run.state
        strategy.plan(WORDS.num_rounds)
        strategy._run.exchange = Keeping()
        app, num_nodes = app_of(method)
        grid = LocalGrid(app, num_nodes)
        messages = list(strategy.configure_train(1, model_arrays(linear()), ConfigRecord(), grid))
        if kind == "evaluate":
            arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
            messages = list(strategy.configure_evaluate(1, arrays, ConfigRecord(), grid))
        assert len(messages) == num_nodes
        replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages)}
        found.append(Round(kind, strategy, strategy.state, dict(strategy._run.asked), replies))
    return tuple(found)


# Forged replies

VECTORS = st.one_of(
    st.sampled_from([0.0, 1.0, -1e3, 1e6, 1e30, 1e38, 1e150, 1e300, np.nan, np.inf, 1e-300, 5e-324]).map(
        lambda one: np.full(LENGTH, one)
    ),
    st.lists(st.floats(width=32), min_size=LENGTH, max_size=LENGTH).map(lambda row: np.asarray(row, np.float32)),
    st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).standard_normal(LENGTH) * 10.0 ** (seed % 9)),
)


@st.composite
def payloads(draw: st.DrawFn) -> compression.Payload:
    """Draw a payload of any codec, right or almost right."""
    vector = draw(VECTORS)
    finite = np.nan_to_num(vector, posinf=1e30, neginf=-1e30).clip(-1e30, 1e30)
    levels = draw(st.sampled_from([1, 2, 10, 127, 128, 32767]))

    def digits() -> compression.Payload:
        scale = np.float32(draw(st.sampled_from([0.0, 1.0, 3e38, np.nan, -1.0])))
        body = draw(st.one_of(st.binary(max_size=60), st.just(zlib.compress(bytes(10**7), 9))))
        header = {"encoding": "qsgd", "length": LENGTH, "levels": levels, "coding": draw(st.sampled_from(["packed", "deflate"]))}
        return compression.Payload(arrays=(np.frombuffer(scale.tobytes() + body, np.uint8),), header=header)

    codecs = {
        "dense": lambda: compression.dense(vector),
        "inline": lambda: compression.inline(vector),
        "top-k": lambda: compression.top_k(vector, draw(st.sampled_from([0.1, 0.5, 1.0]))),
        "rand-k": lambda: compression.rand_k(vector, np.arange(draw(st.integers(1, LENGTH)))),
        "qsgd": lambda: compression.qsgd(finite, levels, np.random.default_rng(1)),
        "digits": digits,
    }
    with np.errstate(all="ignore"):
        return codecs[draw(st.sampled_from(sorted(codecs)))]()


def reply_with(content: RecordDict | Error, honest: Message) -> Message:
    reply = copy.copy(honest)
    fails = isinstance(content, Error)
    reply.__dict__["_error"], reply.__dict__["_content"] = (content, None) if fails else (None, content)
    return reply


def from_node(reply: Message, node: int) -> Message:
    moved = copy.copy(reply)
    moved.__dict__["_metadata"] = copy.copy(reply.metadata)
    moved.metadata.__dict__["_src_node_id"] = node
    return moved


OTHER_WORDS: list[dict[str, Any]] = [
    *({}, {}, {"fresh": [0]}, {"fresh": [0, 1]}, {"refused": {"training failed: a\nb": [0]}}, {"payload_bytes": 72}),
    *({"metrics": {"loss": 1e308}}, {"metrics": {"m\n": 1.0}}, {"metrics": {"a": 10**300}}),
]


def answered(draw: st.DrawFn, honest: RecordDict) -> RecordDict:
    """The honest answer with another payload, and perhaps other words."""
    made = draw(payloads())
    arrays = {str(at): Array(np.ascontiguousarray(array)) for at, array in enumerate(made.arrays)}
    content = RecordDict({"arrays": ArrayRecord(arrays)} if arrays else {})
    for name, record in honest.config_records.items():
        if wire.KEY in record:
            other = draw(st.sampled_from([{}, {}, {}, {"length": LENGTH + 1}, {"mask": 0}, {"values": ""}]))
            table = json.loads(record[wire.KEY]) | {"payload": {**made.header, **other}}
            content[name] = ConfigRecord({wire.KEY: json.dumps(table | draw(st.sampled_from(OTHER_WORDS)))})
    return content


@st.composite
def forged(draw: st.DrawFn, label: str, kind: int) -> list[Message]:
    """Draw what node 1 sends in the place of its honest reply: one or several messages."""
    honest = rounds_of(label)[kind].honest[1]
    other = rounds_of(label)[1 - kind].honest[1] if len(rounds_of(label)) > 1 else honest
    out = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        how = draw(st.sampled_from(["content"] * 5 + ["payload"] * 5 + ["error", "other", "stranger", "honest", "nothing"]))
        if how == "content":
            out.append(reply_with(draw(contents(honest.content, texts)), honest))
        elif how == "payload":
            out.append(reply_with(answered(draw, honest.content), honest))
        elif how == "error":
            reason = draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=40), st.none()))
            out.append(reply_with(Error(code=draw(st.sampled_from([0, 1, 2, 3, 200, -1, 2**40])), reason=reason), honest))
        elif how == "other":
            out.append(reply_with(other.content, honest))
        elif how == "stranger":
            out.append(from_node(honest, draw(st.sampled_from([0, 3**30, -1, 99]))))
        elif how == "honest":
            out.append(honest)
    return out


def assert_told_well(lines: Lines) -> None:
    for line in lines.texts:
        assert line.isprintable(), line
        assert len(line) <= LONGEST, line


def assert_bounded(one: Round, collected: Collected) -> None:
    """What node 1 has added to the sum of the others is no more than its clients may."""
    limits, names = one.now.limits, one.now.now.asked[1]
    added = collected.total - one.without.total
    assert np.isfinite(collected.total).all()
    if limits.clip_norm is not None:
        update = added if limits.honest_indicator is None else added[:-1]
        assert np.linalg.norm(update) <= len(names) * limits.clip_norm * (1 + 1e-9)
    else:
        assert np.linalg.norm(added) <= 2 * limits.honest_norm(names) * (1 + 1e-9)
    if limits.honest_indicator is not None:
        assert abs(added[-1]) <= limits.honest_indicator(names) * (1 + 1e-9)
    if limits.mask is not None:
        assert not np.delete(added, limits.mask).any()


@pytest.mark.slow
@examples(20)
@with_methods
@given(data=st.data())
def test_no_reply_ends_a_round_or_counts_for_more_than_its_clients(label: str, data: st.DataObject) -> None:
    kind = data.draw(st.integers(0, len(rounds_of(label)) - 1))
    one = rounds_of(label)[kind]
    replies = data.draw(forged(label, kind))
    others = [reply for node, reply in one.honest.items() if node != 1]
    with bounded() as lines:
        collected, result = one.total([*replies, *others] if data.draw(st.booleans()) else [*others, *replies])
        statement = str(one.strategy.statement)
    assert_told_well(lines)
    assert_bounded(one, collected)
    theirs = {name for node, names in one.now.now.asked.items() if node != 1 for name in names}
    assert theirs <= set(collected.clients)
    assert len(collected.clients) == len(set(collected.clients))
    mine = set(one.now.now.asked[1])
    assert set(collected.clients) - theirs <= mine
    assert set(collected.refused) <= mine
    assert not set(collected.clients) & set(collected.refused)
    assert collected.missing.total == len(mine - set(collected.clients))
    assert all(line.isprintable() for line in statement.splitlines())
    if one.kind == "train":
        arrays, metrics = result
        assert all(np.isfinite(array.numpy()).all() for array in arrays.values())
        # Noise from a seed protects nobody.
        assert all(np.isfinite(value) for name, value in metrics.items() if name != "epsilon")
        assert one.strategy.rounds[-1].replies == len(collected.clients)
    elif result is not None:
        assert all(np.isfinite(value) for value in result.values())


@pytest.mark.slow
@with_methods
def test_the_honest_replies_count(label: str) -> None:
    """Else the tests of this file would try nothing."""
    for one in rounds_of(label):
        collected, _ = one.total(list(one.honest.values()))
        assert set(collected.clients) == {name for names in one.now.now.asked.values() for name in names}
        assert_bounded(one, collected)


# Headers that claim much


@pytest.mark.parametrize("descr", ["'<f3'", "'<f0'", "'<b7'", "'<i99'", "'<u16'", "'|f4'", "'>b1'"])
def test_an_array_of_a_dtype_that_does_not_exist_is_refused_with_a_reason(descr: str) -> None:
    array = Array("float32", (18,), "numpy.ndarray", npy(descr, "(18,)", bytes(72)))
    try:
        made = wire.numpy_arrays(ArrayRecord({"a": array}), limit=10_000)["a"]
    except ValueError as error:
        assert "array 'a'" in str(error)
    else:
        assert made.size == 18


# The client query


ANSWER = Hosted(names=("c0", "c1"), methods=frozenset({"dp-fedavg", "private-evaluation"})).to_json()


@st.composite
def told(draw: st.DrawFn) -> RecordDict:
    content = RecordDict({wire.KEY: ConfigRecord({wire.KEY: ANSWER})})
    if draw(st.integers(0, 5)) == 0:
        table = json.loads(ANSWER) | {
            name: draw(values()) for name in draw(st.lists(st.sampled_from(["clients", "methods", "error", "unable", "x"])))
        }
        try:
            return RecordDict({wire.KEY: ConfigRecord({wire.KEY: json.dumps(table)})})
        except ValueError:  # a number of some thousands of digits
            return content
    return draw(contents(content))


@examples(80)
@given(content=told(), most=st.integers(1, 50))
def test_no_answer_to_the_query_names_more_or_other_than_lines(content: RecordDict, most: int) -> None:
    with bounded():
        try:
            hosted = hosted_of(content, most_names=most)
        except ValueError as error:
            assert len(str(error)) < 2000
            return
    if hosted is not None:
        assert len(hosted.names) <= most
        assert len(set(hosted.names)) == len(hosted.names)
        for name in (*hosted.names, *hosted.methods):
            assert name.isprintable()
            assert 0 < len(name) <= 200
        assert not hosted.unable or hosted.unable.isprintable()


def test_a_stream_that_grows_without_end_is_read_no_further_than_its_vector() -> None:
    """As much as a reply may carry, compressed, is more memory than `bounded` leaves."""
    stream = zlib.compressobj(9)
    body = b"".join(stream.compress(bytes(2**20)) for _ in range(2**8 + 1)) + stream.flush()
    header = {"encoding": "qsgd", "length": LENGTH, "levels": 1, "coding": "deflate"}
    payload = compression.Payload(arrays=(np.frombuffer(np.float32(1.0).tobytes() + body, np.uint8),), header=header)
    with bounded(), pytest.raises(ValueError, match="are not a zlib stream of 18 bytes and no more"):
        compression.decode(payload, LENGTH)
