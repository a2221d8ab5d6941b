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
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tests.grids  # noqa: F401 (messages need the identity that it sets)
from flower_dp import wire
from flower_dp.core import checks
from flower_dp.core.compression import decode, dense, random_mask, top_k
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.vectors import Layout
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Answer, Ask, Instruction, Promise, RecordNames, Refusal, RoundMask, structs
from tests.asks import GONE, ask, forged, masked, own_ask, replace, table_of

NAMES = ("a", "ü 7")
CODES = get_args(wire.Code)
CLIENT_LEVEL = ask(clip_norm=0.3, noise_multiplier=1.1, placement="distributed", noise_std=0.033, keep_ratio=0.4, size=5)
MASKED = masked(clip_norm=0.3, noise_multiplier=1.1, keep_ratio=0.4, seed=11, size=5)
METRICS = ask(noise_multiplier=2.0, metrics=MetricBounds(bounds={"loss": 4.0, "ü": 1.0}), size=3)
OWN = {"a": (0.25, "4 replies, Laplace", 8.0), "ü 7": (0.75, "9 replies, Laplace", 18.0)}
LOCAL = own_ask(OWN, clip_norm=0.3)
INSTRUCTION = Instruction(server_round=3, method="dp-fedsam", clients=NAMES, report_metrics=True, ask=CLIENT_LEVEL)
LOCAL_INSTRUCTION = replace(INSTRUCTION, method="fedsgd-dpc", ask=LOCAL)
EVALUATION = replace(INSTRUCTION, method=wire.EVALUATION, report_metrics=False, ask=METRICS)
INSTRUCTIONS = [INSTRUCTION, LOCAL_INSTRUCTION, EVALUATION, replace(INSTRUCTION, method="fed-smp", ask=MASKED)]
NAN = Refusal(code="failed", reason="NaN")
ANSWER = Answer(
    refused={"ü 7": NAN},
    payload={"encoding": "dense", "length": 5},
    seeded_noise=False,
    metrics={"loss": 0.1 + 0.2},
)


def _text(part: Instruction | Answer) -> str:
    return part.to_json() if isinstance(part, Instruction) else part.to_json(NAMES)


def _read(kind: type, text: str) -> Any:
    """Read a text as an instruction, or as an answer to the clients above."""
    return kind.from_json(text) if kind is Instruction else kind.from_json(text, NAMES)


def is_no_json(value: Any) -> bool:
    """Tell whether Python writes a value as JSON does not have it."""
    return isinstance(value, float) and not math.isfinite(value)


LAYOUT = Layout.of({"w": np.zeros((2, 2), np.float32), "b": np.zeros((), np.float32)})
MODEL = wire.Model(names=LAYOUT.names, layout=LAYOUT, vector=np.zeros(LAYOUT.size, np.float32), frozen={})


def _npy(header: str, body: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text + body


def _header(descr: str = "'<f4'", shape: str = "(2,)", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def _record(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    return ArrayRecord({"x": Array(dtype="float32", shape=(2,), stype=stype, data=data)})


# Instructions and answers


def test_a_refusal_of_a_whole_node_survives_a_reply_and_is_no_answer() -> None:
    asked = Message(RecordDict(), 1, "train")
    refusal = Refusal(code="repeated", reason="ü\n")
    content = wire.refusal_reply(asked, refusal).content
    assert (wire.refusal_of(content), wire.answer_of(content, NAMES)) == (refusal, None)
    assert json.loads(refusal.to_json()) == {"protocol": wire.PROTOCOL, "code": "repeated", "reason": "ü\n"}
    assert wire.refusal_of(RecordDict({"any": ConfigRecord({wire.KEY: ANSWER.to_json(NAMES)})})) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"reason":"no"}',
        '{"protocol":5}',
        '{"protocol":5,"reason":1}',
        '{"protocol":5,"reason":"no","code":"other"}',
        '{"protocol":5,"reason":"no","clients":[0]}',
        json.dumps({"protocol": 5, "reason": "x" * 4096}),
    ],
)
def test_refusals_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"refusal|flower-dp"):
        wire.refusal_of(RecordDict({"any": ConfigRecord({wire.REFUSED: text})}))


@pytest.mark.parametrize("record_names", [MESSAGE_API, NUMPY_CLIENT])
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_instruction_survives_a_message(record_names: RecordNames, instruction: Instruction) -> None:
    arrays = MODEL.record(np.arange(5, dtype=np.float32))
    message = wire.train_message(12, record_names, arrays, {"lr": 0.5, "server-round": 99}, instruction)
    assert message.metadata.dst_node_id == 12
    assert message.metadata.message_type == "train"
    assert list(message.content.array_records) == [record_names.arrays]
    config = dict(message.content.config_records[record_names.config])
    assert (config["lr"], config["server-round"]) == (0.5, 3)
    assert wire.instruction_of(config) == instruction
    assert wire.instruction_of(config).ask == instruction.ask
    vector = MODEL.read(wire.arrays_of(message.content))
    np.testing.assert_array_equal(vector, np.arange(5))


def test_an_answer_survives_a_reply() -> None:
    text = ANSWER.to_json(NAMES)
    content = RecordDict({"arrays": ArrayRecord([np.ones(5, np.float32)]), "any": ConfigRecord({wire.KEY: text})})
    assert wire.answer_of(content, NAMES) == ANSWER
    assert wire.answer_of(RecordDict({"config": ConfigRecord({"num": 1})}), NAMES) is None


@pytest.mark.slow
@settings(max_examples=30)
@given(
    names=st.lists(st.text(min_size=1, max_size=5), max_size=4, unique=True),
    method=st.sampled_from(["dp-fedavg", "dp-fedsam", "another"]),
    clip=st.floats(1e-30, 1e30),
    noise=st.floats(0, 1e30),
    number=st.integers(1, 10**9),
    ratio=st.floats(1e-9, 1),
    step=st.integers(-900, 900).map(lambda exponent: 2.0**exponent) | st.just(0.0),
    metrics=st.booleans(),
)
def test_instructions_round_trip_bit_for_bit(
    names: list[str], method: str, clip: float, noise: float, number: int, ratio: float, step: float, metrics: bool
) -> None:
    promise = Promise(clip_norm=clip, noise_multiplier=noise)
    asked = Ask(promise=promise, placement="distributed", step=step, noise_std=noise, keep_ratio=ratio)
    instruction = Instruction(server_round=number, method=method, clients=tuple(names), report_metrics=metrics, ask=asked)
    read = Instruction.from_json(instruction.to_json())
    assert read == instruction
    assert read.ask == asked


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
    answer = Answer(refused=refused, payload={"encoding": "dense", "length": 7}, seeded_noise=seeded, metrics=metrics)
    assert Answer.from_json(answer.to_json(names), names) == answer


def test_who_is_refused_stands_by_position_and_only_who_was_asked_can() -> None:
    data = json.loads(ANSWER.to_json(NAMES))
    assert data["refused"] == [{"code": "failed", "reason": "NaN", "clients": [1]}]
    # A name that was not asked has no position.
    stray = replace(ANSWER, refused={"ü 7": NAN, "stranger": NAN})
    assert Answer.from_json(stray.to_json(NAMES), NAMES).refused == {"ü 7": NAN}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("server_round", 0),
        ("server_round", 2**63),  # far greater ones are beyond floats, with which a device computes
        ("server_round", 1.5),
        ("method", ""),
        ("method", None),
        ("method", 5),
        ("method", ["dp-fedsam"]),
        ("method", wire.EVALUATION),  # its ask is of training
        ("report_metrics", None),
        ("report_metrics", "no"),
        ("report_metrics", 0),
        ("clients", "a"),
        ("clients", None),
        ("clients", {"a": 1}),
        ("clients", [1]),
        ("clients", [["a"]]),
        ("clients", [""]),
        ("clients", ["a", "a"]),
        ("ask", None),
        ("ask", []),
        ("ask", "noise_std"),
        ("ask", 1),
        ("ask", {}),
        ("extra", 1),
        ("noise_multiplier", 1.0),  # stands in the ask
    ],
)
def test_instructions_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    data = {**json.loads(INSTRUCTION.to_json()), field: value}
    with pytest.raises(ValueError, match=field):
        Instruction.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_norm", 0),
        ("clip_norm", float("nan")),
        ("clip_norm", float("inf")),
        ("clip_norm", "1"),
        ("clip_norm", None),
        ("clip_norm", [1.0]),
        ("clip_norm", True),
        ("noise_multiplier", -1),
        ("noise_multiplier", float("nan")),
        ("noise_multiplier", None),
        ("placement", "edge"),
        ("placement", None),
        ("placement", ["central"]),
        ("placement", "central"),  # with noise on clients
        ("placement", "local"),  # without what is asked of each client
        ("noise_std", -1e-9),
        ("noise_std", 0.0),  # with a noise multiplier
        ("noise_std", float("nan")),
        ("noise_std", "0.1"),
        ("noise_std", None),
        ("keep_ratio", 0),
        ("keep_ratio", 1.1),
        ("keep_ratio", None),
        ("quantization_levels", -1),
        ("quantization_levels", 1.5),
        ("quantization_levels", 2**15),
        ("quantization_levels", True),
        ("quantization_levels", None),
        ("step", -(2.0**-12)),
        ("step", float("nan")),
        ("step", float("inf")),
        ("step", "0.25"),
        ("step", None),
        ("step", 3 * 2.0**-12),  # no power of two
        ("step", 0.1),
    ],
)
def test_asks_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match="not JSON" if is_no_json(value) else field if field != "placement" else "placement|central"
    ):
        Instruction.from_json(forged(INSTRUCTION, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("seed", None),
        ("keep_ratio", 0),
        ("keep_ratio", 1.1),
        ("keep_ratio", float("nan")),
        ("keep_ratio", None),
        ("type", "another"),
        ("type", "bits"),
        ("bits", "/w=="),
    ],
)
def test_masks_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    mask = table_of(INSTRUCTIONS[3])["mask"]
    assert mask == {"type": "seed", "seed": 11, "keep_ratio": 0.4}
    with pytest.raises(ValueError, match=r"mask|JSON"):
        Instruction.from_json(forged(INSTRUCTIONS[3], mask=mask | {field: value}))
    with pytest.raises(ValueError, match="mask"):
        Instruction.from_json(forged(INSTRUCTIONS[3], mask={"seed": 11, "keep_ratio": 0.4}))


@pytest.mark.parametrize(
    "bounds", [None, [], {}, "loss", {"loss": 0.0}, {"loss": None}, {"": 1.0}, {str(i): 1.0 for i in range(17)}]
)
def test_metrics_that_make_no_sense_are_refused(bounds: Any) -> None:
    with pytest.raises(ValueError, match="metric"):
        Instruction.from_json(forged(EVALUATION, metrics={"bounds": bounds}))
    with pytest.raises(ValueError, match="metric"):
        Instruction.from_json(forged(EVALUATION, metrics=bounds))


def test_an_evaluation_asks_for_metrics_of_clip_norm_1_and_training_for_none() -> None:
    with pytest.raises(ValueError, match=r"clip_norm=0\.5: must be 1 for an evaluation"):
        Instruction.from_json(forged(EVALUATION, clip_norm=0.5))
    with pytest.raises(ValueError, match="clip_norm=2: must be 1 for an evaluation"):
        Instruction.from_json(forged(EVALUATION, clip_norm=2.0))
    with pytest.raises(ValueError, match="metrics: must be asked for by method='private-evaluation' and by no other"):
        Instruction.from_json(forged(EVALUATION, metrics=GONE))
    with pytest.raises(ValueError, match="metrics: must be asked for by method='private-evaluation' and by no other"):
        Instruction.from_json(forged(replace(INSTRUCTION, ask=ask()), metrics={"bounds": {"loss": 4.0}}))
    with pytest.raises(ValueError, match="method='dp-fedsam': is no evaluation"):
        _ = INSTRUCTION.bounds


@pytest.mark.parametrize(
    "key", [{"mask": {"type": "seed", "seed": 7, "keep_ratio": 0.5}}, {"keep_ratio": 0.5}, {"quantization_levels": 3}]
)
def test_the_vectors_of_an_evaluation_are_sent_whole(key: dict[str, Any]) -> None:
    """A mask might leave out the entry that counts the clients, and the estimate of a sum would rest on values of none."""
    distributed = {"placement": "distributed", "noise_std": 2.0}
    assert Instruction.from_json(forged(EVALUATION, **distributed)).ask.noise_std == 2.0
    with pytest.raises(ValueError, match=r"metrics: do(es)? not go with"):
        Instruction.from_json(forged(EVALUATION, **distributed, **key))


@pytest.mark.parametrize("key", [{"keep_ratio": 0.5}, {"quantization_levels": 3}])
def test_a_mask_goes_with_no_other_way_to_send_less(key: dict[str, Any]) -> None:
    """The client would do the one and leave out the other, and the server wait for both."""
    asked = replace(INSTRUCTIONS[3], ask=masked(placement="distributed", keep_ratio=0.4, seed=11, size=5))
    assert Instruction.from_json(forged(asked)) == asked
    with pytest.raises(ValueError, match="mask: does not go with"):
        Instruction.from_json(forged(asked, **key))


def test_what_nobody_sets_is_not_sent() -> None:
    promised = {"promise", "placement"}
    assert set(table_of(replace(INSTRUCTION, ask=ask()))) == {*promised, "step"}
    assert set(table_of(INSTRUCTION)) == {*promised, "step", "noise_std", "keep_ratio"}
    assert set(table_of(INSTRUCTIONS[3])) == {*promised, "step", "mask"}
    assert set(table_of(EVALUATION)) == {*promised, "step", "metrics"}
    own = {*promised, "own"}
    assert set(table_of(LOCAL_INSTRUCTION)) == own
    assert set(table_of(replace(LOCAL_INSTRUCTION, ask=replace(LOCAL, vectors=VECTORS)))) == {*own, "vectors"}


def test_what_is_asked_of_one_client_is_sent_to_its_node_alone() -> None:
    sent = replace(LOCAL_INSTRUCTION, clients=("ü 7",))
    told = table_of(sent)["own"]
    assert {name: (one["weight"], one["terms"], one["noise_multiplier"]) for name, one in told.items()} == {"ü 7": OWN["ü 7"]}
    assert set(Instruction.from_json(sent.to_json()).ask.own) == {"ü 7"}


@pytest.mark.parametrize("arguments", [{"noise_std": 0.1}, {"keep_ratio": 0.5}, {"quantization_levels": 3}])
@pytest.mark.parametrize("placement", ["central", "local"])
def test_where_clients_add_no_share_they_add_and_choose_nothing(arguments: dict[str, Any], placement: str) -> None:
    ask(placement=placement)
    with pytest.raises(ValueError, match=f"must be 0, 1 and 0 for placement='{placement}'"):
        ask(placement=placement, step=0.0, **arguments)


@pytest.mark.parametrize("arguments", [{"step": 2.0**-12}, {"mask": RoundMask(seed=1, keep_ratio=0.5)}])
def test_under_local_placement_lattice_and_coordinates_are_the_clients_own(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="step, mask: must not be there for placement='local'"):
        ask(placement="local", **arguments)


@pytest.mark.parametrize("placement", ["central", "distributed"])
def test_own_terms_go_with_local_placement_alone(placement: str) -> None:
    with pytest.raises(ValueError, match="own: must be there for placement='local' alone"):
        ask(placement=placement, own=LOCAL.own)


VECTORS = {"control": np.linspace(-1, 1, 5, dtype=np.float32), "ü 2": np.zeros(5, np.float32)}


@pytest.mark.parametrize("record_names", [MESSAGE_API, NUMPY_CLIENT])
def test_vectors_of_an_ask_travel_behind_the_model_and_their_names_in_its_text(record_names: RecordNames) -> None:
    instruction = replace(LOCAL_INSTRUCTION, ask=replace(LOCAL, vectors=VECTORS))
    sent = MODEL.record(np.arange(5, dtype=np.float32))
    message = wire.train_message(12, record_names, sent, {}, instruction)
    arrays = wire.numpy_arrays(wire.arrays_of(message.content), limit=100)
    assert list(arrays) == ["w", "b", "flower-dp.control", "flower-dp.ü 2"]
    config = dict(message.content.config_records[record_names.config])
    text = str(config[wire.KEY])
    assert json.loads(text)["ask"]["vectors"] == {"control": None, "ü 2": None}
    assert len(text) == len(LOCAL_INSTRUCTION.to_json()) + len(',"vectors":{"control":null,"ü 2":null}')
    read = wire.instruction_of(config, list(arrays.values())).ask.vectors
    assert list(read) == ["control", "ü 2"]
    for name, vector in VECTORS.items():
        assert (read[name].dtype, read[name].tobytes()) == (np.dtype(np.float32), vector.tobytes())
    assert list(sent) == ["w", "b"]  # the server's own record is as it was
    # A client that works with no vectors does not look for them, and refuses.
    with pytest.raises(ValueError, match=r"vectors=.*must be names of vectors that came with the model"):
        wire.instruction_of(config)


@pytest.mark.parametrize(
    "vector",
    [
        np.array([0, 0, 0, 0, np.nan], np.float32),
        np.array([0, 0, 0, 0, np.inf], np.float32),
        np.zeros(5),
        np.zeros(5, np.int32),
        np.zeros((5, 1), np.float32),
        np.zeros((), np.float32),
    ],
)
def test_vectors_that_make_no_sense_are_refused(vector: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"vector 'control' is .*must be finite float32"):
        replace(LOCAL, vectors={"control": vector})
    sent = replace(LOCAL_INSTRUCTION, ask=replace(LOCAL, vectors={"control": np.zeros(5, np.float32)})).to_json()
    with pytest.raises(ValueError, match=r"vector 'control' is .*must be finite float32"):
        Instruction.from_json(sent, [np.zeros(5, np.float32), vector])


@pytest.mark.parametrize(
    "names", [None, [], ["control"], "control", {"a": None, "b": None, "c": None}, {"a": [0.0] * 5}, {"a\nb": None}, {"": None}]
)
def test_names_of_vectors_that_make_no_sense_are_refused(names: Any) -> None:
    arrays = [np.zeros(5, np.float32)] * 2
    with pytest.raises(ValueError, match="vectors"):
        Instruction.from_json(forged(LOCAL_INSTRUCTION, vectors=names), arrays)
    with pytest.raises(ValueError, match="metrics: do not go with vectors"):
        replace(METRICS, vectors=VECTORS)


@pytest.mark.parametrize(
    ("names", "length", "why"),
    [
        (["control"], 5, "came with the model: this method works with"),
        (["control", "ü 2", "c"], 5, "came with the model: this method works with"),
        ([], 5, "came with the model: this method works with"),
        (["ü 2", "control"], 4, r"vector 'control' is of shape \(5,\): must be finite float32 of shape \(4,\)"),
    ],
)
def test_a_client_works_with_the_vectors_of_its_method_alone(names: list[str], length: int, why: str) -> None:
    asked = replace(LOCAL, vectors=VECTORS)
    asked.check_vectors(["ü 2", "control"], 5)
    LOCAL.check_vectors([], 5)
    with pytest.raises(ValueError, match=why):
        asked.check_vectors(names, length)


@pytest.mark.parametrize("fresh", [None, {}, "a", [2], [-1], [True], [0.0], [0, 0], ["a"], [[0]]])
def test_who_had_kept_nothing_stands_by_position_once(fresh: Any) -> None:
    answer = replace(ANSWER, refused={}, fresh=("ü 7",))
    data = json.loads(answer.to_json(NAMES))
    assert data["fresh"] == [1]
    assert Answer.from_json(json.dumps(data), NAMES) == answer
    with pytest.raises(ValueError, match="fresh"):
        Answer.from_json(json.dumps(data | {"fresh": fresh}), NAMES)


def test_all_clients_of_a_round_draw_the_mask_from_its_seed() -> None:
    mask = RoundMask(seed=7, keep_ratio=0.3)
    same, other = RoundMask(seed=7, keep_ratio=0.3).indices(1000), RoundMask(seed=8, keep_ratio=0.3).indices(1000)
    assert mask.indices(1000).tolist() == same.tolist() == random_mask(1000, 0.3, np.random.default_rng(7)).tolist()
    assert mask.indices(1000).tolist() != other.tolist()
    assert not mask.indices(1000).flags.writeable


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", -1.0),
        ("weight", None),
        ("weight", "1"),
        ("terms", 1),
        ("terms", None),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", float("nan")),
        ("noise_multiplier", "1"),
        ("noise_multiplier", None),
        ("number", 0),
        ("number", -3),
        ("number", 1.5),
        ("number", True),
        ("number", "2"),
        ("number", 2**53 + 1),
        ("number", None),
        ("run", ""),
        ("run", " "),
        ("run", "b\nEPSILON: 0.1"),
        ("run", "b" * 65),
        ("run", 7),
        ("extra", 1),
    ],
)
def test_local_asks_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    own = table_of(LOCAL_INSTRUCTION)["own"]
    with pytest.raises(ValueError, match="not JSON" if is_no_json(value) else field):
        Instruction.from_json(forged(LOCAL_INSTRUCTION, own=own | {"a": own["a"] | {field: value}}))
    if field != "extra":
        without = {name: one for name, one in own["a"].items() if name != field}
        with pytest.raises(ValueError, match=field):
            Instruction.from_json(forged(LOCAL_INSTRUCTION, own=own | {"a": without}))


@pytest.mark.parametrize("clients", [("a",), (), ("ü 7", "b")])
def test_every_client_that_is_asked_on_its_own_terms_has_some(clients: tuple[str, ...]) -> None:
    own = {name: one for name, one in table_of(LOCAL_INSTRUCTION)["own"].items() if name in clients}
    with pytest.raises(ValueError, match=f"own: has no terms of {2 - len(own)} of 2 clients"):
        Instruction.from_json(forged(LOCAL_INSTRUCTION, own=own))


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_asks_with_missing_or_unknown_keys_are_refused(instruction: Instruction) -> None:
    for name in ("extra", "weights", "mask_seed", "noise_off", "bounds"):
        with pytest.raises(ValueError, match=f"instruction: Object contains unknown field {name} - at ask"):
            Instruction.from_json(forged(instruction, **{name: 1}))
    for name in ("promise", "placement"):
        with pytest.raises(ValueError, match=f"instruction: Object missing required field {name} - at ask"):
            Instruction.from_json(forged(instruction, **{name: GONE}))
    for name in ("clip_norm", "noise_multiplier"):
        with pytest.raises(ValueError, match=f"instruction: Object missing required field {name} - at ask.promise"):
            Instruction.from_json(forged(instruction, **{name: GONE}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("refused", {}),
        ("refused", None),
        ("refused", "a"),
        ("refused", ["a"]),
        ("refused", [{"clients": [1]}]),
        ("refused", [{"reason": 1, "clients": [1]}]),
        ("refused", [{"code": "unknown", "reason": "why", "clients": [1]}]),
        ("refused", [{"code": None, "reason": "why", "clients": [1]}]),
        ("refused", [{"reason": "why", "clients": [1], "more": 1}]),
        *(
            ("refused", [{"reason": "why", "clients": clients}])
            for clients in (None, {"1": 1}, [2], [-1], [0.0], [True], ["a"], [None], [[0]], [10**30], [1, 1])
        ),
        ("refused", [{"reason": "why", "clients": [1]}, {"reason": "why else", "clients": [1]}]),
        ("refused", [{"reason": f"why {i}", "clients": []} for i in range(20)]),
        ("payload", "dense"),
        ("payload", [1]),
        ("payload", None),
        ("payload", {f"word {i}": 1 for i in range(17)}),
        ("metrics", [1]),
        ("metrics", None),
        ("metrics", {"loss": float("nan")}),
        ("metrics", {"loss": float("inf")}),
        ("metrics", {"loss": "0"}),
        ("metrics", {"loss": None}),
        ("metrics", {"loss": True}),
        ("metrics", {f"loss {i}": 1.0 for i in range(17)}),
    ],
)
def test_answers_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    data = {**json.loads(ANSWER.to_json(NAMES)), field: value}
    with pytest.raises(ValueError, match=r"answer|not JSON|reasons: at most 19"):
        Answer.from_json(json.dumps(data), NAMES)


@pytest.mark.parametrize("value", [10**400, 1e308, -1e101])
def test_numbers_beyond_float_are_refused(value: Any) -> None:
    """And those whose sum over nodes might be."""
    with pytest.raises(ValueError, match=r"metric loss|out of range - at metrics"):
        Answer.from_json(json.dumps({**json.loads(ANSWER.to_json(NAMES)), "metrics": {"loss": value}}), NAMES)


@pytest.mark.parametrize("value", [None, "no", 0, [], {}])
def test_seeded_noise_must_be_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match="seeded_noise"):
        Answer.from_json(json.dumps({**json.loads(ANSWER.to_json(NAMES)), "seeded_noise": value}), NAMES)


# The length of an honest answer

MANY_NAMES = [f"client-{i}" for i in range(20)]


@pytest.mark.parametrize(
    "letter", ["x", "ü", "\n", "\x01", "\ud800", "\U0001f600"], ids=["ascii", "umlaut", "\\n", "\\1", "half", "astral"]
)
def test_the_longest_honest_answer_is_not_too_long(letter: str) -> None:
    """As many reasons as clients, each longer than can be told, of letters that take more room in JSON than others."""
    refused = {name: Refusal(code=CODES[i % 3], reason=chr(ord("A") + i) + 300 * letter) for i, name in enumerate(MANY_NAMES)}
    answer = replace(ANSWER, refused=refused)
    read = Answer.from_json(answer.to_json(MANY_NAMES), MANY_NAMES)
    assert set(read.refused) == set(MANY_NAMES)
    assert all(one.code == refused[name].code for name, one in read.refused.items())
    assert all(len(one.reason) <= wire.MOST_REASON for one in read.refused.values())
    lines = {name: checks.one_line(one.reason, most=wire.MOST_REASON) for name, one in refused.items()}
    reported = [read.refused[name].reason == lines[name] for name in MANY_NAMES]
    assert sum(reported) == wire.MOST_REASONS
    assert {read.refused[name].reason for name, said in zip(MANY_NAMES, reported, strict=True) if not said} == {"another reason"}


def test_reasons_longer_than_honest_ones_are_refused() -> None:
    data = {**json.loads(ANSWER.to_json(NAMES)), "refused": [{"reason": "x" * 201, "clients": [0]}]}
    with pytest.raises(ValueError, match="a reason has more than 200 characters"):
        Answer.from_json(json.dumps(data), NAMES)


MALFORMED = [
    "",
    "null",
    "[]",
    "3",
    '"text"',
    "{",
    "not json",
    "\x00",
    '{"protocol": 1}',
    '{"protocol": 2}',
    '{"protocol": 3}',
    '{"protocol": 4}',
    '{"protocol": 5}',
    "[" * 100_000,
    '{"a":' * 50_000,
    "1" * 5000,
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:12])
def test_texts_that_are_no_instruction_or_answer_are_refused(text: str) -> None:
    for kind, arguments in ((Instruction, "flower-dp|instruction: Object missing"), (Answer, "flower-dp|answer: Object missing")):
        with pytest.raises(ValueError, match=arguments):
            _read(kind, text)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 6, 5.5, True, "5", None, [5]])
@pytest.mark.parametrize("part", [INSTRUCTION, ANSWER])
def test_other_protocols_are_refused(protocol: Any, part: Instruction | Answer) -> None:
    with pytest.raises(ValueError, match="not of protocol 5"):
        _read(type(part), json.dumps({**json.loads(_text(part)), "protocol": protocol}))


@pytest.mark.parametrize("part", [INSTRUCTION, ANSWER])
def test_missing_and_unknown_keys_are_refused(part: Instruction | Answer) -> None:
    data = json.loads(_text(part))
    missing = "clients" if part is INSTRUCTION else "metrics"
    with pytest.raises(ValueError, match="unknown field extra"):
        _read(type(part), json.dumps({**data, "extra": 1}))
    with pytest.raises(ValueError, match=f"missing required field {missing}"):
        _read(type(part), json.dumps({key: value for key, value in data.items() if key != missing}))


@pytest.mark.parametrize("part", [INSTRUCTION, ANSWER])
def test_the_protocol_is_no_key_that_may_lack(part: Instruction | Answer) -> None:
    """A tag of a struct would be one: a text without it would be read as of this protocol."""
    data = json.loads(_text(part))
    assert next(iter(data)) == "protocol"  # first, so that a peer of another protocol says so before anything else
    del data["protocol"]
    with pytest.raises(ValueError, match="not of protocol 5"):
        _read(type(part), json.dumps(data))


def test_texts_that_are_too_long_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(kind: type) -> Any:
        raise AssertionError("was parsed")

    monkeypatch.setattr(structs, "_decoder", never)
    with pytest.raises(ValueError, match=f"has {2**28 + 1} characters: at most {2**28}"):
        Instruction.from_json("1" * (2**28 + 1))
    most = wire.most_answer_characters(2)
    with pytest.raises(ValueError, match=f"has {most + 1} characters: at most {most}"):
        Answer.from_json("1" * (most + 1), NAMES)
    with pytest.raises(AssertionError, match="was parsed"):
        Answer.from_json("1" * most, NAMES)
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
    text = replace(LOCAL_INSTRUCTION, ask=replace(LOCAL, vectors=VECTORS)).to_json()
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
    with pytest.raises(ValueError, match="not twice in the list"):
        Instruction.from_json(json.dumps(json.loads(INSTRUCTION.to_json()) | {"clients": [*names, names[-1]]}))
    assert time.process_time() - start < 20


def test_an_error_is_one_short_line_whatever_it_quotes() -> None:
    text = INSTRUCTION.to_json()[:-1] + f',"{"x" * 10_000}\\n":1}}'
    with pytest.raises(ValueError, match=r"^instruction: Object contains unknown field x{400,500}$"):
        Instruction.from_json(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    part=st.sampled_from([*INSTRUCTIONS, ANSWER]),
    changes=st.dictionaries(st.integers(0, 9), _JSON, min_size=1, max_size=3),
    inside=st.booleans(),
)
def test_any_json_is_read_or_refused_with_a_value_error(
    part: Instruction | Answer, changes: dict[int, Any], inside: bool
) -> None:
    data = json.loads(_text(part))
    table = data["ask"] if inside and isinstance(part, Instruction) else data
    keys = list(table)
    for index, value in changes.items():
        table[keys[index % len(keys)]] = value
    try:
        read = _read(type(part), json.dumps(data))
    except ValueError:
        return
    assert set(read.refused) <= set(NAMES) if isinstance(read, Answer) else len(set(read.clients)) == len(read.clients)


@pytest.mark.parametrize("config", [{}, {wire.KEY: 5}, {wire.KEY: b"x"}, {"other": "x"}, {wire.KEY: ["x"]}])
def test_a_config_without_an_instruction_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="works under a flower_dp strategy only"):
        wire.instruction_of(config)


def test_two_answers_or_one_that_is_not_text_are_refused() -> None:
    text = ANSWER.to_json(NAMES)
    two = RecordDict({"a": ConfigRecord({wire.KEY: text}), "b": ConfigRecord({wire.KEY: text})})
    number = RecordDict({"a": ConfigRecord({wire.KEY: 7})})
    for content in (two, number):
        with pytest.raises(ValueError, match="more than one answer, or one that is not text"):
            wire.answer_of(content, NAMES)


# Arrays


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8", "uint16", "uint32", "int64"])
@pytest.mark.parametrize(("shape", "order"), [((), "C"), ((0,), "C"), ((2, 3), "C"), ((2, 3), "F"), ((0, 4), "F")])
def test_honest_arrays_come_through_read_only(dtype: str, shape: tuple[int, ...], order: Any) -> None:
    array = np.asarray(np.random.default_rng(0).uniform(0, 100, shape).astype(dtype), order=order)
    out = wire.numpy_arrays(ArrayRecord({"x": Array(array)}), limit=array.nbytes)["x"]
    assert out.dtype == array.dtype
    assert out.shape == shape
    np.testing.assert_array_equal(out, array)
    assert not out.flags.writeable


BODY = np.ones(2, "<f4").tobytes()
FORGED = {
    "empty": b"",
    "not npy": b"PK\x03\x04" + bytes(100),
    "magic only": b"\x93NUMPY",
    "half a length": b"\x93NUMPY\x01\x00\x10",
    "header cut off": _npy(_header(), BODY)[:30],
    "body cut off": _npy(_header(), BODY[:-1]),
    "no body": _npy(_header()),
    "body too long": _npy(_header(), BODY + b"\0"),
    "huge shape": _npy(_header(shape="(1000000000000,)"), BODY),
    "product overflows": _npy(_header(shape="(4294967296, 4294967296)"), b""),
    "nothing of huge shape": _npy(_header(shape=f"(0, {10**30})"), b""),
    "negative shape": _npy(_header(shape="(-1, -2)"), BODY),
    "minus one": _npy(_header(shape="(-1,)"), BODY),
    "float shape": _npy(_header(shape="(2.0,)"), BODY),
    "shape is no tuple": _npy(_header(shape="2"), BODY),
    "many dimensions": _npy(_header(shape="(" + "1, " * 70 + "2)"), BODY),
    "objects": _npy(_header(descr="'|O'"), BODY * 2),
    "objects inside": _npy(_header(descr="[('a', '|O')]", shape="(1,)"), BODY),
    "objects in an array": _npy(_header(descr="('|O', (2,))", shape="(1,)"), BODY * 2),
    "nothing a value": _npy(_header(descr="'|V0'"), b""),
    "no such type": _npy(_header(descr="'<q9'"), BODY),
    "type is a number": _npy(_header(descr="5"), BODY),
    "type is a table": _npy(_header(descr="{}"), BODY),
    "order is a number": _npy(_header(fortran="1"), BODY),
    "header is a call": _npy("__import__('os').abort()", BODY),
    "header is a list": _npy("[1, 2]", BODY),
    "missing key": _npy("{'descr': '<f4', 'shape': (2,)}", BODY),
    "more keys": _npy(_header()[:-1] + "'x': 1}", BODY),
    "long header": _npy(_header() + " " * 20_000, BODY),
    "zeros": bytes(200),
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED.keys())
def test_forged_arrays_are_refused(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"."):
            wire.numpy_arrays(_record(data), limit=2**20)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


BEYOND = {
    "unclosed bracket": _npy("{'descr': (", BODY),
    "deep brackets": _npy("(" * 5000, BODY),
    "many signs": _npy(_header(shape="(" + "-" * 9000 + "2,)"), BODY),
    "bad indent": _npy("  x\n y", BODY),
    "mixed keys": _npy("{1: 2, 'a': 3}", BODY),
    "type is a comma": _npy(_header(descr="','"), BODY),
    "type is half a call": _npy(_header(descr="'f4,('"), BODY),
    "of Python 2": _npy(_header(shape="(2L,)"), BODY),
}


@pytest.mark.parametrize("data", BEYOND.values(), ids=BEYOND.keys())
def test_forged_headers_raise_nothing_but_value_errors(data: bytes) -> None:
    with pytest.raises(ValueError, match="'x'"):
        wire.numpy_arrays(_record(data), limit=2**20)


_HONEST = _npy(_header() + " " * 10 + "\n", BODY)


@settings(max_examples=200)
@given(position=st.integers(6, len(_HONEST) - 1), value=st.integers(0, 255), cut=st.integers(0, 3))
@example(position=8, value=0, cut=0)
def test_damaged_arrays_are_refused_or_harmless(position: int, value: int, cut: int) -> None:
    data = bytearray(_HONEST)
    data[position] = value
    try:
        out = wire.numpy_arrays(_record(bytes(data[: len(data) - cut])), limit=8)["x"]
    except ValueError:
        return
    except (UserWarning, SyntaxError, TypeError, MemoryError):  # as in the test above
        return
    except Exception as error:
        assert type(error).__name__ == "TokenError"  # noqa: PT017 (as in the test above)
        return
    assert out.nbytes <= 8


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
    with pytest.raises(ValueError, match="bytes"):
        wire.payload_of(ArrayRecord([np.zeros(1000, dtype)] * 2), {"encoding": "dense", "length": 100}, 100)


def test_payloads_of_more_arrays_than_honest_ones_are_refused() -> None:
    arrays = [np.zeros(1, np.float32)] * 5
    with pytest.raises(ValueError, match="payload has 5 arrays: at most 4"):
        wire.payload_of(ArrayRecord(arrays), {"encoding": "dense", "length": 500}, 500)


# Messages


def test_messages_are_measured_before_they_are_parsed() -> None:
    record = ArrayRecord({"x": Array(np.zeros(10, np.float32))})
    content = RecordDict({"a": record, "c": ConfigRecord({"k": "abc"})})
    size = wire.content_bytes(content)
    assert wire.check_content(content, most_entries=2, most_bytes=size) == size
    with pytest.raises(ValueError, match=f"has {size} bytes: at most {size - 1}"):
        wire.check_content(content, most_entries=2, most_bytes=size - 1)
    with pytest.raises(ValueError, match="2 records, 2 entries: at most 8 and 1"):
        wire.check_content(content, most_entries=1, most_bytes=size)


def test_messages_of_very_many_records_or_very_long_texts_are_refused() -> None:
    many = RecordDict({f"{i}": ConfigRecord({"k": 1}) for i in range(9)})
    with pytest.raises(ValueError, match="has 9 records"):
        wire.check_content(many, most_entries=100, most_bytes=10**6)
    for value in ("x" * 5000, b"x" * 5000, [1] * 5000, ["x" * 10] * 5000):
        with pytest.raises(ValueError, match="bytes: at most 4000"):
            wire.check_content(RecordDict({"c": ConfigRecord({"k": value})}), most_entries=10, most_bytes=4000)
    with pytest.raises(ValueError, match="bytes: at most 4000"):
        wire.check_content(RecordDict({"c": ConfigRecord({"k" * 5000: 1})}), most_entries=10, most_bytes=4000)
    with pytest.raises(ValueError, match="bytes: at most 4000"):
        wire.check_content(RecordDict({"m": MetricRecord({"k": [1.0] * 5000})}), most_entries=10, most_bytes=4000)


# Models


def test_a_model_comes_through_by_name_in_any_order() -> None:
    vector = np.arange(5, dtype=np.float32)
    record = MODEL.record(vector)
    assert list(record) == ["w", "b"]
    assert record["w"].shape == (2, 2)
    np.testing.assert_array_equal(MODEL.read(record), vector)
    turned = ArrayRecord({"b": record["b"], "w": record["w"]})
    np.testing.assert_array_equal(MODEL.read(turned), vector)


@pytest.mark.parametrize(
    "arrays",
    [
        {"w": np.zeros((2, 2), np.float32)},
        {"w": np.zeros((2, 2), np.float32), "c": np.zeros((), np.float32)},
        {"w": np.zeros((2, 2), np.float32), "b": np.zeros((), np.float32), "n": np.zeros((), np.float32)},
        {"w": np.zeros((4,), np.float32), "b": np.zeros((), np.float32)},
        {"w": np.zeros((2, 2), np.float32), "b": np.zeros((1,), np.float32)},
        {"0": np.zeros((), np.float32), "1": np.zeros((2, 2), np.float32)},
        {"0": np.zeros((2, 2), np.float32)},
        {"w": np.full((2, 2), b"x"), "b": np.zeros((), np.float32)},
        {"w": np.zeros((20, 20), np.float32), "b": np.zeros((), np.float32)},
    ],
)
def test_other_models_are_refused(arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"."):
        MODEL.read(ArrayRecord({name: Array(array) for name, array in arrays.items()}))


@pytest.mark.parametrize("dtype", ["complex64", "int64", "bool", "datetime64[s]", [("x", "<f4")]])
def test_models_of_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype|float"):
        MODEL.read(ArrayRecord([np.zeros((2, 2), dtype), np.zeros((), dtype)]))


def test_bytes_are_counted_as_sent() -> None:
    record = ArrayRecord({"x": Array(np.zeros(10, np.float32))})
    arguments = ConfigRecord({"k": "abc", "flag": True, "list": [1, 2]})
    assert wire.content_bytes(RecordDict({"a": record})) == 1 + 40 + 128
    # Names count: a forged one may be long.
    assert wire.content_bytes(RecordDict({"a": record, "c": arguments})) == 1 + 40 + 128 + (1 + 3) + (4 + 8) + (4 + 16)
    assert wire.content_bytes(RecordDict({"m": MetricRecord({"loss": 0.5})})) == 4 + 8


# Bytes that clients would have sent alone


@pytest.mark.parametrize("refused", [{}, {NAMES[0]: NAN}])
def test_payload_bytes_survive_the_wire_up_to_the_largest_honest_ones(refused: dict[str, Refusal]) -> None:
    most = (64 + 16 * 5) * (len(NAMES) - len(refused))
    for value in (0, 1, most):
        answer = replace(ANSWER, refused=refused, payload_bytes=value)
        assert Answer.from_json(answer.to_json(NAMES), NAMES).payload_bytes == value
    with pytest.raises(ValueError, match="payload_bytes"):
        Answer.from_json(replace(ANSWER, refused=refused, payload_bytes=most + 1).to_json(NAMES), NAMES)


@pytest.mark.parametrize("value", [-1, 1.5, 1.0, True, None, "7", [7], 10**400])
def test_absurd_payload_bytes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="payload_bytes"):
        Answer.from_json(json.dumps({**json.loads(ANSWER.to_json(NAMES)), "payload_bytes": value}), NAMES)
