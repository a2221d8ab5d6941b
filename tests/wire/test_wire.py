"""The wire: honest messages survive, forged ones are refused with a ValueError and take no memory."""

import json
import math
import resource
import struct
import time
import tracemalloc
from typing import Any, get_args

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.grids  # noqa: F401 (messages need the identity that it sets)
from flower_dp import wire
from flower_dp.core import checks
from flower_dp.core.compression import decode, dense, random_mask, top_k
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.vectors import Layout
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Instruction, RecordNames, Refusal, ReplyHeader, RoundMask, structs
from tests.asks import GONE, ask, forged, masked, own_ask, replace, table_of

NAMES = ("a", "ü 7")
CODES = get_args(wire.Code)
NAN, INF = math.nan, math.inf
CLIENT_LEVEL = ask(clip_norm=0.3, noise_multiplier=1.1, placement="distributed", noise_std=0.033, keep_ratio=0.4, size=5)
METRICS = ask(noise_multiplier=2.0, metrics=MetricBounds(bounds={"loss": 4.0, "ü": 1.0}), size=3)
OWN = {"a": (0.25, "4 replies, Laplace", 8.0), "ü 7": (0.75, "9 replies, Laplace", 18.0)}
LOCAL = own_ask(OWN, clip_norm=0.3)
INSTRUCTION = Instruction(server_round=3, method="dp-fedsam", clients=NAMES, report_metrics=True, ask=CLIENT_LEVEL)
LOCAL_INSTRUCTION = replace(INSTRUCTION, method="fedsgd-dpc", ask=LOCAL)
EVALUATION = replace(INSTRUCTION, method=wire.EVALUATION, report_metrics=False, ask=METRICS)
MASKED = replace(INSTRUCTION, method="fed-smp", ask=masked(clip_norm=0.3, noise_multiplier=1.1, keep_ratio=0.4, seed=11, size=5))
INSTRUCTIONS = [INSTRUCTION, LOCAL_INSTRUCTION, EVALUATION, MASKED]
VECTORS = {"control": np.linspace(-1, 1, 5, dtype=np.float32), "ü 2": np.zeros(5, np.float32)}
WITH_VECTORS = replace(LOCAL_INSTRUCTION, ask=replace(LOCAL, vectors=VECTORS))
FAILED = Refusal(code="failed", reason="NaN")
PAYLOAD = {"encoding": "dense", "length": 5}
ANSWER = ReplyHeader(refused={"ü 7": FAILED}, payload=PAYLOAD, seeded_noise=False, metrics={"loss": 0.1 + 0.2})
LAYOUT = Layout.of({"w": np.zeros((2, 2), np.float32), "b": np.zeros((), np.float32)})
MODEL = wire.Model(names=LAYOUT.names, layout=LAYOUT, vector=np.zeros(LAYOUT.size, np.float32), frozen={})


def every(**values: list[Any]) -> Any:
    """Give a test each of these values for each of these fields."""
    return pytest.mark.parametrize(("field", "value"), [(field, value) for field, many in values.items() for value in many])


def _text(part: Instruction | ReplyHeader) -> str:
    return part.to_json() if isinstance(part, Instruction) else part.to_json(NAMES)


def _read(kind: type, text: str) -> Any:
    """Read a text as an instruction, or as an answer to the clients above."""
    return kind.from_json(text) if kind is Instruction else kind.from_json(text, NAMES)


def answer_with(**changes: Any) -> str:
    """Return an answer's text with other values of some keys."""
    return json.dumps(json.loads(ANSWER.to_json(NAMES)) | changes)


def place(value: Any, field: str) -> str:
    """Return what an error says of a bad value: its field, or that JSON does not have it."""
    return "not JSON" if isinstance(value, float) and not math.isfinite(value) else field


# Instructions and answers


def test_a_refusal_of_a_whole_node_survives_a_reply_and_is_no_answer() -> None:
    refusal = Refusal(code="repeated", reason="ü\n")
    content = wire.refusal_reply(Message(RecordDict(), 1, "train"), refusal).content
    assert (wire.refusal_of(content), wire.answer_of(content, NAMES)) == (refusal, None)
    assert json.loads(refusal.to_json()) == {"protocol": wire.PROTOCOL, "code": "repeated", "reason": "ü\n"}
    assert wire.refusal_of(RecordDict({"any": ConfigRecord({wire.KEY: ANSWER.to_json(NAMES)})})) is None


@pytest.mark.parametrize("words", [None, {}, {"reason": 1}, {"reason": "no", "code": "other"}, {"reason": "x" * 4096}])
def test_refusals_that_make_no_sense_are_refused(words: Any) -> None:
    text = "" if words is None else json.dumps({"protocol": 5} | words)
    with pytest.raises(ValueError, match=r"refusal|flower-dp"):
        wire.refusal_of(RecordDict({"any": ConfigRecord({wire.REFUSED: text})}))


@pytest.mark.parametrize("record_names", [MESSAGE_API, NUMPY_CLIENT])
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_instruction_survives_a_message(record_names: RecordNames, instruction: Instruction) -> None:
    arrays = MODEL.record(np.arange(5, dtype=np.float32))
    message = wire.train_message(12, record_names, arrays, {"lr": 0.5, "server-round": 99}, instruction)
    assert (message.metadata.dst_node_id, message.metadata.message_type) == (12, "train")
    assert list(message.content.array_records) == [record_names.arrays]
    config = dict(message.content.config_records[record_names.config])
    assert (config["lr"], config["server-round"]) == (0.5, 3)
    assert wire.instruction_of(config) == instruction
    np.testing.assert_array_equal(MODEL.read(wire.arrays_of(message.content)), np.arange(5))


def test_an_answer_survives_a_reply_and_is_the_only_one_and_text() -> None:
    text = ANSWER.to_json(NAMES)
    content = RecordDict({"arrays": ArrayRecord([np.ones(5, np.float32)]), "any": ConfigRecord({wire.KEY: text})})
    assert wire.answer_of(content, NAMES) == ANSWER
    assert wire.answer_of(RecordDict({"config": ConfigRecord({"num": 1})}), NAMES) is None
    for texts in ((text, text), (7,)):
        wrong = RecordDict({f"{i}": ConfigRecord({wire.KEY: one}) for i, one in enumerate(texts)})
        with pytest.raises(ValueError, match="must be one text"):
            wire.answer_of(wrong, NAMES)


@settings(max_examples=40)
@given(
    names=st.lists(st.text(min_size=1, max_size=5), max_size=6, unique=True),
    reasons=st.lists(st.text('aü"\\ /', max_size=5), min_size=6, max_size=6),
    kept=st.sets(st.integers(0, 5)),
    metrics=st.dictionaries(
        st.text("aü-_/", min_size=1, max_size=4), st.floats(-wire.LARGEST_METRIC, wire.LARGEST_METRIC), max_size=3
    ),
    seeded=st.booleans(),
)
def test_answers_round_trip_bit_for_bit(
    names: list[str], reasons: list[str], kept: set[int], metrics: dict[str, float], seeded: bool
) -> None:
    pairs = enumerate(zip(names, reasons, strict=False))
    refused = {name: Refusal(code=CODES[i % 3], reason=reason) for i, (name, reason) in pairs if i not in kept}
    answer = ReplyHeader(refused=refused, payload=PAYLOAD, seeded_noise=seeded, metrics=metrics)
    assert ReplyHeader.from_json(answer.to_json(names), names) == answer


def test_who_is_refused_stands_by_position_and_only_who_was_asked_can() -> None:
    assert json.loads(ANSWER.to_json(NAMES))["refused"] == [{"code": "failed", "reason": "NaN", "clients": [1]}]
    # A name that was not asked has no position.
    stray = replace(ANSWER, refused={"ü 7": FAILED, "stranger": FAILED})
    assert ReplyHeader.from_json(stray.to_json(NAMES), NAMES).refused == {"ü 7": FAILED}


@every(
    server_round=[0, 2**63, 1.5],  # far greater ones are beyond floats, with which a device computes
    method=["", None, ["dp-fedsam"], wire.EVALUATION],  # the ask is one of training
    report_metrics=[None, "no", 0],
    clients=["a", None, {"a": 1}, [1], [["a"]], [""], ["a", "a"]],
    ask=[None, [], "noise_std", {}],
    extra=[1],
    noise_multiplier=[1.0],  # stands in the ask
)
def test_instructions_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Instruction.from_json(json.dumps(json.loads(INSTRUCTION.to_json()) | {field: value}))


@every(
    clip_norm=[0, NAN, INF, "1", None, [1.0], True],
    noise_multiplier=[-1, NAN, None],
    placement=["edge", None, ["central"], "central", "local"],  # central: with noise on clients; local: without own asks
    noise_std=[-1e-9, 0.0, NAN, "0.1", None],  # 0: with a noise multiplier
    keep_ratio=[0, 1.1, None],
    quantization_levels=[-1, 1.5, 2**15, True, None],
    step=[-(2.0**-12), NAN, INF, "0.25", None, 3 * 2.0**-12, 0.1],  # the last two are no powers of two
)
def test_asks_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=place(value, field if field != "placement" else "placement|central")):
        Instruction.from_json(forged(INSTRUCTION, **{field: value}))


@every(
    seed=[-1, 2**63, 1.0, None],
    keep_ratio=[0, 1.1, NAN, None],
    type=["another", "bits", GONE],
    bits=["/w=="],
)
def test_masks_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    mask = table_of(MASKED)["mask"]
    assert mask == {"type": "seed", "seed": 11, "keep_ratio": 0.4}
    changed = {name: one for name, one in (mask | {field: value}).items() if one is not GONE}
    with pytest.raises(ValueError, match=r"mask|JSON"):
        Instruction.from_json(forged(MASKED, mask=changed))


@pytest.mark.parametrize(
    "bounds", [None, [], {}, "loss", {"loss": 0.0}, {"loss": None}, {"": 1.0}, {str(i): 1.0 for i in range(17)}]
)
def test_metrics_that_make_no_sense_are_refused(bounds: Any) -> None:
    for metrics in ({"bounds": bounds}, bounds):
        with pytest.raises(ValueError, match="metric"):
            Instruction.from_json(forged(EVALUATION, metrics=metrics))


def test_an_evaluation_asks_for_metrics_of_clip_norm_1_and_training_for_none() -> None:
    for clip_norm in (0.5, 2.0):
        with pytest.raises(ValueError, match=f"clip_norm={clip_norm:g}: must be 1 for an evaluation"):
            Instruction.from_json(forged(EVALUATION, clip_norm=clip_norm))
    training = replace(INSTRUCTION, ask=ask())
    for wrong in (forged(EVALUATION, metrics=GONE), forged(training, metrics={"bounds": {"loss": 4.0}})):
        with pytest.raises(ValueError, match="metrics must be set for method='private-evaluation' and for no other"):
            Instruction.from_json(wrong)
    with pytest.raises(ValueError, match="method='dp-fedsam': must be 'private-evaluation'"):
        _ = INSTRUCTION.bounds


SHORTER = [{"keep_ratio": 0.5}, {"quantization_levels": 3}]


@pytest.mark.parametrize("key", [*SHORTER, {"mask": {"type": "seed", "seed": 7, "keep_ratio": 0.5}}])
def test_a_mask_or_an_evaluation_goes_with_no_other_way_to_send_less(key: dict[str, Any]) -> None:
    """Else entries that count clients would rest on values of none, and the server wait for rows that nobody sends."""
    distributed = {"placement": "distributed", "noise_std": 2.0}
    assert Instruction.from_json(forged(EVALUATION, **distributed)).ask.noise_std == 2.0
    with pytest.raises(ValueError, match=r"metrics: do(es)? not go with"):
        Instruction.from_json(forged(EVALUATION, **distributed, **key))
    if "mask" not in key:
        asked = replace(MASKED, ask=masked(placement="distributed", keep_ratio=0.4, seed=11, size=5))
        assert Instruction.from_json(forged(asked)) == asked
        with pytest.raises(ValueError, match="mask: does not go with"):
            Instruction.from_json(forged(asked, **key))


def test_what_nobody_sets_is_not_sent() -> None:
    whole = {"promise", "placement"}
    for asked, also in (
        (replace(INSTRUCTION, ask=ask()), {"step"}),
        (INSTRUCTION, {"step", "noise_std", "keep_ratio"}),
        (MASKED, {"step", "mask"}),
        (EVALUATION, {"step", "metrics"}),
        (LOCAL_INSTRUCTION, {"own"}),
        (WITH_VECTORS, {"own", "vectors"}),
    ):
        assert set(table_of(asked)) == whole | also


def test_what_is_asked_of_one_client_is_sent_to_its_node_alone() -> None:
    sent = replace(LOCAL_INSTRUCTION, clients=("ü 7",))
    told = table_of(sent)["own"]
    assert {name: (one["weight"], one["terms"], one["noise_multiplier"]) for name, one in told.items()} == {"ü 7": OWN["ü 7"]}
    assert set(Instruction.from_json(sent.to_json()).ask.own) == {"ü 7"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        *(
            ({"placement": placement, "step": 0.0, **one}, f"must be 0, 1 and 0 for placement='{placement}'")
            for placement in ("central", "local")
            for one in ({"noise_std": 0.1}, *SHORTER)
        ),
        ({"placement": "edge", "noise_multiplier": 0.0}, "placement='edge': must be one of central, distributed, local"),
        ({"placement": "local", "step": 2.0**-12}, "step, mask: must not be set for placement='local'"),
        ({"placement": "local", "mask": RoundMask(seed=1, keep_ratio=0.5)}, "step, mask: must not be set"),
        ({"placement": "central", "own": LOCAL.own}, "own: must be set for placement='local' alone"),
        ({"placement": "distributed", "own": LOCAL.own}, "own: must be set for placement='local' alone"),
    ],
)
def test_what_a_placement_does_not_have_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ask(**arguments)


@pytest.mark.parametrize("record_names", [MESSAGE_API, NUMPY_CLIENT])
def test_vectors_of_an_ask_travel_behind_the_model_and_their_names_in_its_text(record_names: RecordNames) -> None:
    sent = MODEL.record(np.arange(5, dtype=np.float32))
    message = wire.train_message(12, record_names, sent, {}, WITH_VECTORS)
    arrays = wire.numpy_arrays(wire.arrays_of(message.content), limit=100)
    assert list(arrays) == ["w", "b", "flower-dp.control", "flower-dp.ü 2"]
    config = dict(message.content.config_records[record_names.config])
    text = str(config[wire.KEY])
    assert json.loads(text)["ask"]["vectors"] == {"control": None, "ü 2": None}
    assert len(text) == len(LOCAL_INSTRUCTION.to_json()) + len(',"vectors":{"control":null,"ü 2":null}')
    read = wire.instruction_of(config, list(arrays.values())).ask.vectors
    assert {name: (one.dtype, one.tolist()) for name, one in read.items()} == {
        name: (np.dtype(np.float32), one.tolist()) for name, one in VECTORS.items()
    }
    assert list(sent) == ["w", "b"]  # the server's own record is as it was
    # A client that works with no vectors does not look for them, and refuses.
    with pytest.raises(ValueError, match=r"vectors=.*must be names of vectors that came with the model"):
        wire.instruction_of(config)


@pytest.mark.parametrize(
    "vector",
    [np.float32([0, 0, 0, 0, NAN]), np.float32([0, 0, 0, 0, INF]), np.zeros(5), np.zeros((5, 1), np.float32), np.float32(0)],
)
def test_vectors_that_make_no_sense_are_refused(vector: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"vector 'control' is .*must be finite float32"):
        replace(LOCAL, vectors={"control": vector})
    with pytest.raises(ValueError, match=r"vector 'ü 2' is .*must be finite float32"):
        Instruction.from_json(WITH_VECTORS.to_json(), [np.zeros(5, np.float32), vector])


@pytest.mark.parametrize(
    "names", [None, [], ["control"], "control", {"a": None, "b": None, "c": None}, {"a": [0.0] * 5}, {"a\nb": None}, {"": None}]
)
def test_names_of_vectors_that_make_no_sense_are_refused(names: Any) -> None:
    with pytest.raises(ValueError, match="vectors"):
        Instruction.from_json(forged(LOCAL_INSTRUCTION, vectors=names), [np.zeros(5, np.float32)] * 2)
    with pytest.raises(ValueError, match="metrics: do not go with vectors"):
        replace(METRICS, vectors=VECTORS)


@pytest.mark.parametrize("names", [["control"], ["control", "ü 2", "c"], []])
def test_a_client_works_with_the_vectors_of_its_method_alone(names: list[str]) -> None:
    asked = WITH_VECTORS.ask
    asked.check_vectors(["ü 2", "control"], 5)
    LOCAL.check_vectors([], 5)
    with pytest.raises(ValueError, match="came with the model: this method works with"):
        asked.check_vectors(names, 5)
    with pytest.raises(ValueError, match=r"vector 'control' is of shape \(5,\): must be finite float32 of shape \(4,\)"):
        asked.check_vectors(["ü 2", "control"], 4)


@pytest.mark.parametrize("fresh", [None, {}, "a", [2], [-1], [True], [0.0], [0, 0], ["a"], [[0]]])
def test_who_had_kept_nothing_stands_by_position_once(fresh: Any) -> None:
    answer = replace(ANSWER, refused={}, fresh=("ü 7",))
    data = json.loads(answer.to_json(NAMES))
    assert data["fresh"] == [1]
    assert ReplyHeader.from_json(json.dumps(data), NAMES) == answer
    with pytest.raises(ValueError, match="fresh"):
        ReplyHeader.from_json(answer_with(fresh=fresh), NAMES)


def test_all_clients_of_a_round_draw_the_mask_from_its_seed() -> None:
    drawn, other = (RoundMask(seed=seed, keep_ratio=0.3).indices(1000) for seed in (7, 8))
    assert drawn.tolist() == random_mask(1000, 0.3, np.random.default_rng(7)).tolist() != other.tolist()
    assert not drawn.flags.writeable


@every(
    weight=[-1.0, None, "1", GONE],
    terms=[1, None, GONE],
    noise_multiplier=[-1.0, NAN, "1", None, GONE],
    number=[0, -3, 1.5, True, "2", 2**53 + 1, None, GONE],
    run=["", " ", "b\nEPSILON: 0.1", "b" * 65, 7, GONE],
    extra=[1],
)
def test_local_asks_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    own = table_of(LOCAL_INSTRUCTION)["own"]
    changed = {name: one for name, one in (own["a"] | {field: value}).items() if one is not GONE}
    with pytest.raises(ValueError, match=place(value, field)):
        Instruction.from_json(forged(LOCAL_INSTRUCTION, own=own | {"a": changed}))


@pytest.mark.parametrize("clients", [("a",), (), ("ü 7", "b")])
def test_every_client_that_is_asked_on_its_own_terms_has_some(clients: tuple[str, ...]) -> None:
    own = {name: one for name, one in table_of(LOCAL_INSTRUCTION)["own"].items() if name in clients}
    with pytest.raises(ValueError, match=f"own: has no terms of {2 - len(own)} of 2 clients"):
        Instruction.from_json(forged(LOCAL_INSTRUCTION, own=own))


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_asks_with_missing_or_unknown_keys_are_refused(instruction: Instruction) -> None:
    for name, value, what in (
        *((name, 1, f"unknown field {name} - at ask") for name in ("extra", "weights", "mask_seed", "noise_off", "bounds")),
        *((name, GONE, f"missing required field {name} - at ask") for name in ("promise", "placement")),
        *((name, GONE, f"missing required field {name} - at ask.promise") for name in ("clip_norm", "noise_multiplier")),
    ):
        with pytest.raises(ValueError, match=f"instruction: Object (contains )?{what}"):
            Instruction.from_json(forged(instruction, **{name: value}))


@every(
    refused=[
        *({}, None, "a", ["a"], [{"clients": [1]}], [{"reason": 1, "clients": [1]}], [{"reason": "x" * 201, "clients": [0]}]),
        *([{"code": code, "reason": "why", "clients": [1]}] for code in ("unknown", None)),
        *(
            [{"reason": "why", "clients": at}]
            for at in (None, {"1": 1}, [2], [-1], [0.0], [True], ["a"], [[0]], [10**30], [1, 1])
        ),
        [{"reason": "why", "clients": [1], "more": 1}],
        [{"reason": "why", "clients": [1]}, {"reason": "why else", "clients": [1]}],
        [{"reason": f"why {i}", "clients": []} for i in range(20)],
    ],
    payload=["dense", [1], None, {f"word {i}": 1 for i in range(17)}],
    metrics=[[1], None, *({"loss": value} for value in (NAN, INF, "0", None, True)), {f"loss {i}": 1.0 for i in range(17)}],
    seeded_noise=[None, "no", 0, []],
    payload_bytes=[-1, 1.5, 1.0, True, None, "7", [7], 10**400],
)
def test_answers_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"answer|payload_bytes|not JSON|reasons: at most 19|more than 200 characters"):
        ReplyHeader.from_json(answer_with(**{field: value}), NAMES)


@pytest.mark.parametrize("value", [10**400, 1e308, -1e101])
def test_numbers_beyond_float_are_refused(value: Any) -> None:
    """And those whose sum over nodes might be."""
    with pytest.raises(ValueError, match=r"metric loss|out of range - at metrics"):
        ReplyHeader.from_json(answer_with(metrics={"loss": value}), NAMES)


@pytest.mark.parametrize("letter", ["x", "ü", "\n", "\x01", "\ud800", "\U0001f600"], ids=ascii)
def test_the_longest_honest_answer_is_not_too_long(letter: str) -> None:
    """As many reasons as clients, each longer than can be told, of letters that take more room in JSON than others."""
    names = [f"client-{i}" for i in range(20)]
    refused = {name: Refusal(code=CODES[i % 3], reason=chr(ord("A") + i) + 300 * letter) for i, name in enumerate(names)}
    read = ReplyHeader.from_json(replace(ANSWER, refused=refused).to_json(names), names).refused
    assert {name: one.code for name, one in read.items()} == {name: one.code for name, one in refused.items()}
    lines = {name: checks.one_line(one.reason, most=wire.MOST_REASON) for name, one in refused.items()}
    others = [one.reason for name, one in read.items() if one.reason != lines[name]]
    assert others == ["another reason"] * (len(names) - wire.MOST_REASONS)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "3", "{", "\x00", '{"protocol": 4}', '{"protocol": 5}', "[" * 100_000, '{"a":' * 50_000, "1" * 5000],
    ids=lambda text: text[:12],
)
def test_texts_that_are_no_instruction_or_answer_are_refused(text: str) -> None:
    for kind, arguments in (
        (Instruction, "flower-dp|instruction: Object missing"),
        (ReplyHeader, "flower-dp|answer: Object missing"),
    ):
        with pytest.raises(ValueError, match=arguments):
            _read(kind, text)


@pytest.mark.parametrize("protocol", [0, 4, 6, 5.5, True, "5", None, [5], GONE])
@pytest.mark.parametrize("part", [INSTRUCTION, ANSWER])
def test_other_protocols_are_refused(protocol: Any, part: Instruction | ReplyHeader) -> None:
    """Also none; it stands first, so that a peer of another protocol says so before anything else."""
    data = json.loads(_text(part))
    assert next(iter(data)) == "protocol"
    changed = {name: one for name, one in (data | {"protocol": protocol}).items() if one is not GONE}
    with pytest.raises(ValueError, match="not of protocol 5"):
        _read(type(part), json.dumps(changed))


@pytest.mark.parametrize(("part", "missing"), [(INSTRUCTION, "clients"), (ANSWER, "metrics")])
def test_missing_and_unknown_keys_are_refused(part: Instruction | ReplyHeader, missing: str) -> None:
    data = json.loads(_text(part))
    with pytest.raises(ValueError, match="unknown field extra"):
        _read(type(part), json.dumps({**data, "extra": 1}))
    with pytest.raises(ValueError, match=f"missing required field {missing}"):
        _read(type(part), json.dumps({key: value for key, value in data.items() if key != missing}))


def test_texts_that_are_too_long_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(kind: type) -> Any:
        raise AssertionError("was parsed")

    monkeypatch.setattr(structs, "_decoder", never)
    with pytest.raises(ValueError, match=f"has {2**28 + 1} characters: at most {2**28}"):
        Instruction.from_json("1" * (2**28 + 1))
    most = wire.most_answer_characters(2)
    with pytest.raises(ValueError, match=f"has {most + 1} characters: at most {most}"):
        ReplyHeader.from_json("1" * (most + 1), NAMES)
    with pytest.raises(AssertionError, match="was parsed"):
        ReplyHeader.from_json("1" * most, NAMES)
    assert most < 50_000  # an answer for two clients


BOMBS = {
    "10^6 levels": "[" * 10**6,
    "10^6 levels that end": "[" * 10**6 + "]" * 10**6,
    "20 MiB of small lists": "[" + "[]," * 7_000_000 + "[]]",
    "20 MiB of small tables": "[" + "{}," * 7_000_000 + "{}]",
}


@pytest.mark.parametrize("place", ["first", "in the ask", "a name of a vector", "last"])
@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_costs_a_device_nothing(kind: str, place: str) -> None:
    """Python's own reader took 8 s and half a GiB."""
    text = WITH_VECTORS.to_json()
    bomb = {
        "first": f'{{"bomb":{BOMBS[kind]},' + text[1:],
        "in the ask": text.replace('"placement":', f'"bomb":{BOMBS[kind]},"placement":'),
        "a name of a vector": text.replace('"control":null', f'"control":{BOMBS[kind]}'),
        "last": text[:-1] + f',"bomb":{BOMBS[kind]}}}',
    }[place]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=r"unknown field bomb|Expected null, got array|not JSON"):
        Instruction.from_json(bomb, [np.zeros(5, np.float32)] * 2)
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_a_million_names_are_read_or_refused_at_once() -> None:
    names = [f"{index:07}" for index in range(10**6)]
    start = time.process_time()
    Instruction.from_json(replace(INSTRUCTION, clients=tuple(names)).to_json())
    with pytest.raises(ValueError, match="must be unique names"):
        Instruction.from_json(json.dumps(json.loads(INSTRUCTION.to_json()) | {"clients": [*names, names[-1]]}))
    assert time.process_time() - start < 20


def test_an_error_is_one_short_line_whatever_it_quotes() -> None:
    text = INSTRUCTION.to_json()[:-1] + f',"{"x" * 10_000}\\n":1}}'
    with pytest.raises(ValueError, match=r"^instruction: Object contains unknown field x{400,500}$"):
        Instruction.from_json(text)


@pytest.mark.parametrize("config", [{}, {wire.KEY: 5}, {wire.KEY: ["x"]}])
def test_a_config_without_an_instruction_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="works under a flower_dp strategy only"):
        wire.instruction_of(config)


# Arrays


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8", "int64"])
@pytest.mark.parametrize(("shape", "order"), [((), "C"), ((0,), "C"), ((2, 3), "C"), ((2, 3), "F"), ((0, 4), "F")])
def test_honest_arrays_come_through_read_only(dtype: str, shape: tuple[int, ...], order: Any) -> None:
    array = np.asarray(np.random.default_rng(0).uniform(0, 100, shape).astype(dtype), order=order)
    out = wire.numpy_arrays(ArrayRecord({"x": Array(array)}), limit=array.nbytes)["x"]
    assert (out.dtype, out.shape, out.flags.writeable) == (array.dtype, shape, False)
    np.testing.assert_array_equal(out, array)


BODY = np.ones(2, "<f4").tobytes()


def _npy(header: str, body: bytes = BODY) -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def _header(descr: str = "'<f4'", shape: str = "(2,)", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


FORGED = [
    *(b"", b"PK\x03\x04" + bytes(100), b"\x93NUMPY\x01\x00\x10", _npy(_header())[:30]),
    *(_npy(_header(), body) for body in (BODY[:-1], BODY + b"\0")),
    *(_npy(_header(shape=shape)) for shape in ("(1000000000000,)", "(-1, -2)", "(" + "1, " * 70 + "2)", "(2L,)")),
    *(_npy(_header(shape=shape), b"") for shape in ("(4294967296, 4294967296)", f"(0, {10**30})")),
    _npy(_header(shape="(" + "-" * 9000 + "2,)")),
    *(_npy(_header(descr=descr), BODY * 2) for descr in ("'|O'", "[('a', '|O')]", "'<q9'", "'f4,('")),
    _npy(_header(descr="'|V0'"), b""),
    _npy(_header(fortran="1")),
    *(_npy(header) for header in ("__import__('os').abort()", "{'descr': '<f4', 'shape': (2,)}", "(" * 5000)),
    *(_npy(header) for header in (_header()[:-1] + "'x': 1}", _header() + " " * 20_000)),
]


@pytest.mark.parametrize("data", FORGED, ids=range(len(FORGED)))
def test_forged_arrays_are_refused(data: bytes) -> None:
    record = ArrayRecord({"x": Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=data)})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="'x'"):
            wire.numpy_arrays(record, limit=2**20)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_oversized_arrays_are_refused_unread() -> None:
    record = ArrayRecord({"x": Array(np.zeros(1000, np.float32))})
    assert wire.numpy_arrays(record, limit=4000)["x"].size == 1000
    with pytest.raises(ValueError, match="'x' has 4128 bytes"):
        wire.numpy_arrays(record, limit=3000)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_payloads_come_through_and_may_not_be_larger_than_dense_ones(dtype: Any) -> None:
    vector = np.random.default_rng(1).standard_normal(500, dtype=dtype)
    for payload in (dense(vector), top_k(vector, 0.2)):
        read = wire.payload_of(ArrayRecord(list(payload.arrays)), payload.header, 500)
        np.testing.assert_array_equal(decode(read, 500), decode(payload, 500))
    # Dense float64 is the largest.
    for arrays, why in (([np.zeros(1000, dtype)] * 2, "bytes"), ([np.zeros(1, dtype)] * 5, "payload has 5 arrays: at most 4")):
        with pytest.raises(ValueError, match=why):
            wire.payload_of(ArrayRecord(arrays), {"encoding": "dense", "length": 100}, 100)


# Messages


def test_messages_are_measured_before_they_are_parsed() -> None:
    """Names count, since a forged one may be long; of a list the length, whatever is in it."""
    record = ArrayRecord({"x": Array(np.zeros(10, np.float32))})
    arguments = ConfigRecord({"k": "abc", "flag": True, "list": [1, 2]})
    content = RecordDict({"a": record, "c": arguments, "m": MetricRecord({"loss": 0.5})})
    size = (1 + 40 + 128) + (1 + 3) + (4 + 8) + (4 + 16) + (4 + 8)
    assert wire.content_bytes(content) == wire.check_content(content, most_entries=5, most_bytes=size) == size
    with pytest.raises(ValueError, match=f"has {size} bytes: at most {size - 1}"):
        wire.check_content(content, most_entries=5, most_bytes=size - 1)
    with pytest.raises(ValueError, match="3 records, 5 entries: at most 8 and 4"):
        wire.check_content(content, most_entries=4, most_bytes=size)
    many = RecordDict({f"{i}": ConfigRecord({"k": 1}) for i in range(9)})
    with pytest.raises(ValueError, match="has 9 records"):
        wire.check_content(many, most_entries=100, most_bytes=10**6)


@pytest.mark.parametrize(
    "record",
    [
        *(ConfigRecord({"k": value}) for value in ("x" * 5000, b"x" * 5000, [1] * 5000, ["x" * 10] * 5000)),
        ConfigRecord({"k" * 5000: 1}),
        MetricRecord({"k": [1.0] * 5000}),
    ],
)
def test_messages_of_very_long_texts_or_lists_are_refused(record: ConfigRecord | MetricRecord) -> None:
    with pytest.raises(ValueError, match="bytes: at most 4000"):
        wire.check_content(RecordDict({"c": record}), most_entries=10, most_bytes=4000)


# Models


def test_a_model_comes_through_by_name_in_any_order() -> None:
    vector = np.arange(5, dtype=np.float32)
    record = MODEL.record(vector)
    assert {name: array.shape for name, array in record.items()} == {"w": (2, 2), "b": ()}
    for sent in (record, ArrayRecord({"b": record["b"], "w": record["w"]})):
        np.testing.assert_array_equal(MODEL.read(sent), vector)


@pytest.mark.parametrize(
    "shapes",
    [
        {"w": (2, 2)},
        {"w": (2, 2), "c": ()},
        {"w": (2, 2), "b": (), "n": ()},
        {"w": (4,), "b": ()},
        {"w": (2, 2), "b": (1,)},
        {"0": (), "1": (2, 2)},
        {"w": (20, 20), "b": ()},
    ],
)
def test_other_models_are_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"model has|names|shape|bytes"):
        MODEL.read(ArrayRecord({name: Array(np.zeros(shape, np.float32)) for name, shape in shapes.items()}))


@pytest.mark.parametrize("dtype", ["complex64", "int64", "bool", "S1", [("x", "<f4")]])
def test_models_of_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype|float"):
        MODEL.read(ArrayRecord([np.zeros((2, 2), dtype), np.zeros((), dtype)]))


@pytest.mark.parametrize("refused", [{}, {NAMES[0]: FAILED}])
def test_payload_bytes_survive_the_wire_up_to_the_largest_honest_ones(refused: dict[str, Refusal]) -> None:
    most = (64 + 16 * 5) * (len(NAMES) - len(refused))
    for value in (0, 1, most):
        answer = replace(ANSWER, refused=refused, payload_bytes=value)
        assert ReplyHeader.from_json(answer.to_json(NAMES), NAMES).payload_bytes == value
    with pytest.raises(ValueError, match="payload_bytes"):
        ReplyHeader.from_json(replace(ANSWER, refused=refused, payload_bytes=most + 1).to_json(NAMES), NAMES)
