"""Changed replies of a node, handed to every strategy: the round goes on, and its other clients count as without it."""

# ruff: noqa: PT017 (a refusal is as good as a right answer)
import copy
import json
import zlib
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from flower_dp import wire
from flower_dp.clients import FedSGDDPCRecipe, LocalDPClient, client_app, model_arrays
from flower_dp.core import compression
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedSAM, DPStrategy, FedSGDDPC, LocalEvaluation, PrivateEvaluation
from flower_dp.wire import HostedClients, hosted_of
from tests.adversaries.fuzzing import TEXTS, THOROUGH, bounded, contents, examples, npy, texts, values
from tests.adversaries.test_fuzz_device import BOUNDS, BUDGET, data_of
from tests.contracts import METHODS, Method, Words, dp_client
from tests.grids import LocalGrid
from tests.local_grids import linear
from tests.stock import shifted, stock_app

LENGTH = 18
SEED = 5
WORDS = Words(num_rounds=3, noise_seed=SEED)
# The longest line that a reply may put into the server's log.
LONGEST = 700
LAPLACE = {"mechanism": "laplace", "clip_norm": 0.5, "epsilon": 1.0, "num_replies": 3}


def evaluating(**own: Any) -> tuple[Any, Any]:
    evaluation = PrivateEvaluation(noise_multiplier=0.1, sampling=FullSampling(), metrics=BOUNDS)
    words = {"clip_norm": 0.5, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
    return lambda: DPFedSAM(**words | own, noise_seed=SEED, evaluation=evaluation), dp_client


def own_evaluation() -> DPStrategy:
    evaluation = LocalEvaluation(budget=BUDGET, metrics=BOUNDS)
    words = {"num_clients": 4, "cohort_size": 4, "num_records": 8, "learning_rate": 0.1, "noise_seed": SEED}
    return FedSGDDPC(**LAPLACE, **words, evaluation=evaluation)


def own_client(_: Words, **words: Any) -> LocalDPClient:
    return LocalDPClient(**words, recipe=FedSGDDPCRecipe(**LAPLACE), evaluation=BUDGET)


# Private evaluations, and whose client answers.
EVALUATIONS: dict[str, tuple[Any, Any]] = {
    "an evaluation with the server's noise": evaluating(placement="central"),
    "an evaluation without a trusted server": evaluating(placement="distributed", server_completes_noise=False),
    "an evaluation of single clients": (own_evaluation, own_client),
}
BY_LABEL = {method.label: method for method in METHODS}
LABELS = [one.label for one in METHODS if THOROUGH or not one.variant or one.label == "dp-fedsam central"]
with_methods = pytest.mark.parametrize("label", [*LABELS, *EVALUATIONS])


def app_of(make: Any) -> tuple[ClientApp, int]:
    """An app and its number of nodes; of those that name clients, node 1 hosts two."""
    if make is None:
        return stock_app(shifted(lambda node: 0.02 * node)), 4

    def client_fn(context: Context) -> Any:
        part = int(context.node_config["partition-id"])
        hosted = {name: data_of(name, False) for name in ("c0", "c1", "c2", "c3")[part::2]}
        return make(WORDS, model=linear(), clients=hosted, noise_seed=3)

    return client_app(client_fn), 2


class Round:
    """A round of training, or an evaluation after one, whose messages are answered; all noise is from fixed seeds."""

    def __init__(self, label: str) -> None:
        made, make = EVALUATIONS.get(label) or (lambda: BY_LABEL[label].strategy(WORDS), BY_LABEL[label].client)
        self.strategy, self.trains = made(), label not in EVALUATIONS
        app, num_nodes = app_of(make)
        grid, self.mine = LocalGrid(app, num_nodes), 4 // num_nodes
        self.strategy.plan(WORDS.num_rounds)
        messages = list(self.strategy.configure_train(1, model_arrays(linear()), ConfigRecord(), grid))
        if not self.trains:
            arrays, _ = self.strategy.aggregate_train(1, grid.send_and_receive(messages))
            messages = list(self.strategy.configure_evaluate(1, arrays, ConfigRecord(), grid))
        self.honest, *self.others = grid.send_and_receive(messages)
        assert len(self.others) == num_nodes - 1

    def ended(self, mine: list[Message], *, first: bool = True) -> np.ndarray:
        """End it with these replies in the place of node 1's; return the model, or the metrics."""
        replies = [*mine, *self.others] if first else [*self.others, *mine]
        if not self.trains:
            values = self.strategy.aggregate_evaluate(1, replies) or {}
            return np.array(list(dict(values).values()), float)
        arrays, metrics = self.strategy.aggregate_train(1, replies)
        # Noise from a seed protects nobody.
        assert all(np.isfinite(value) for name, value in metrics.items() if name != "epsilon")
        return np.concatenate([array.numpy().ravel() for array in arrays.values()]).astype(float)


@cache
def without(label: str) -> np.ndarray:
    """The model where node 1 is silent."""
    return Round(label).ended([])


@cache
def honest_content(label: str) -> RecordDict:
    return Round(label).honest.content


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
            table = json.loads(record[wire.KEY]) | {"payload": {**made.header, **other}} | draw(st.sampled_from(OTHER_WORDS))
            content[name] = ConfigRecord({wire.KEY: json.dumps(table)})
    return content


@np.errstate(over="ignore")
def longer(honest: RecordDict, factor: float) -> RecordDict:
    """The honest content with so many times larger values."""
    found = RecordDict(dict(honest.items()))
    for name, record in honest.array_records.items():
        arrays = {key: array.numpy() for key, array in record.items()}
        found[name] = ArrayRecord({key: Array((one * factor).astype(one.dtype)) for key, one in arrays.items()})
    return found


@st.composite
def forged(draw: st.DrawFn, label: str) -> list[Any]:
    """Draw what node 1 sends in the place of its honest reply: contents, errors, or the honest one in the name of a node."""
    honest, out = honest_content(label), list[Any]()
    other = honest_content(draw(st.sampled_from([*LABELS, *EVALUATIONS])))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        how = draw(st.sampled_from(["content"] * 5 + ["payload"] * 5 + ["long"] * 3 + ["error", "other", "stranger", "honest"]))
        if how == "content":
            out.append(draw(contents(honest, texts)))
        elif how == "payload":
            out.append(answered(draw, honest))
        elif how == "long":
            out.append(longer(honest, draw(st.sampled_from([2.0, 10.0, 1e6, 1e30]))))
        elif how == "error":
            code = draw(st.sampled_from([0, 1, 2, 3, 200, -1, 2**40]))
            out.append(Error(code=code, reason=draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=40), st.none()))))
        else:
            strangers = st.sampled_from([0, 3**30, -1, 99])
            out.append({"other": other, "stranger": draw(strangers), "honest": 1}[how])
    return out


def clips(method: Method) -> bool:
    """Whether the server clips, and its noise is the same whoever replies, so that a model tells what was added up."""
    same = len({method.server_noise(WORDS, heard) for heard in (2, 3, 4)}) == 1
    return same and method.unit == "client" and not method.message_noise(WORDS)


@pytest.mark.slow
@examples(20)
@with_methods
@given(data=st.data())
def test_no_reply_ends_a_round_or_counts_for_more_than_its_clients(label: str, data: st.DataObject) -> None:
    one, sent = Round(label), data.draw(forged(label))
    replies = [from_node(one.honest, to) if isinstance(to, int) else reply_with(to, one.honest) for to in sent]
    first = data.draw(st.booleans())
    with bounded() as lines:
        found = one.ended(replies, first=first)
        statement = str(one.strategy.statement)
    assert [line for line in lines.texts if not line.isprintable() or len(line) > LONGEST] == []
    assert np.isfinite(found).all()
    assert all(line.isprintable() for line in statement.splitlines())
    if not one.trains:
        return
    counted = one.strategy.rounds[-1].replies
    assert 4 - one.mine <= counted <= 4
    assert one.strategy.missing.total == 4 - counted
    if clips(BY_LABEL[label]):  # the mean is over four clients
        assert np.linalg.norm(4 * (found - without(label))) <= (counted - 4 + one.mine) * WORDS.clip_norm * (1 + 1e-3)


@pytest.mark.slow
@with_methods
def test_the_honest_replies_count(label: str) -> None:
    """Else the tests of this file would try nothing."""
    one = Round(label)
    found = one.ended([one.honest])
    assert found.size
    assert one.strategy.rounds[-1].replies == 4
    assert not np.array_equal(found, without(label))
    assert sum(clips(BY_LABEL[name]) for name in LABELS) >= 2


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


ANSWER = HostedClients(names=("c0", "c1"), methods=frozenset({"dp-fedavg", "private-evaluation"})).to_json()


@st.composite
def told(draw: st.DrawFn) -> RecordDict:
    text = ANSWER
    if draw(st.integers(0, 5)) == 0:
        names = draw(st.lists(st.sampled_from(["clients", "methods", "error", "unable", "x"])))
        with suppress(ValueError):  # a number of some thousands of digits
            text = json.dumps(json.loads(ANSWER) | {name: draw(values()) for name in names})
    content = RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})})
    return content if text != ANSWER else draw(contents(content))


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
        assert len(set(hosted.names)) == len(hosted.names) <= most
        assert all(name.isprintable() and 0 < len(name) <= 200 for name in (*hosted.names, *hosted.methods))
        assert not hosted.unable or hosted.unable.isprintable()


def test_a_stream_that_grows_without_end_is_read_no_further_than_its_vector() -> None:
    """As much as a reply may carry, compressed, is more memory than `bounded` leaves."""
    stream = zlib.compressobj(9)
    body = b"".join(stream.compress(bytes(2**20)) for _ in range(2**8 + 1)) + stream.flush()
    header = {"encoding": "qsgd", "length": LENGTH, "levels": 1, "coding": "deflate"}
    payload = compression.Payload(arrays=(np.frombuffer(np.float32(1.0).tobytes() + body, np.uint8),), header=header)
    with bounded(), pytest.raises(ValueError, match="are not a zlib stream of 18 bytes and no more"):
        compression.decode(payload, LENGTH)
