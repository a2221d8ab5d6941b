"""The wire: honest messages survive, forged ones are refused with a ValueError and take no memory."""

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tests.grids  # noqa: F401 (messages need the identity that it sets)
from flower_dp import wire
from flower_dp.compression import decode, dense, top_k
from flower_dp.vectors import Layout
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Answer, Dialect, Instruction

INSTRUCTION = Instruction(
    server_round=3,
    clients=("a", "ü 7"),
    clip_norm=0.3,
    noise_multiplier=1.1,
    noise_std=0.033,
    keep_ratio=0.4,
    report_metrics=True,
    weights=(0.25, 0.75),
    terms=("4 replies, Laplace", "9 replies, Laplace"),
    noise_multipliers=(8.0, 18.0),
)
ANSWER = Answer(
    clients=("a",),
    refused={"ü 7": "NaN"},
    payload={"encoding": "dense", "length": 5},
    seeded_noise=False,
    metrics={"loss": 0.1 + 0.2},
)
LAYOUT = Layout.of({"w": np.zeros((2, 2), np.float32), "b": np.zeros((), np.float32)})


def _npy(header: str, body: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text + body


def _header(descr: str = "'<f4'", shape: str = "(2,)", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def _record(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    return ArrayRecord({"x": Array(dtype="float32", shape=(2,), stype=stype, data=data)})


# Instructions and answers


@pytest.mark.parametrize("dialect", [MESSAGE_API, NUMPY_CLIENT])
def test_an_instruction_survives_a_message(dialect: Dialect) -> None:
    arrays = wire.model_record(np.arange(5, dtype=np.float32), LAYOUT)
    message = wire.train_message(12, dialect, arrays, {"lr": 0.5, "server-round": 99}, INSTRUCTION)
    assert message.metadata.dst_node_id == 12
    assert message.metadata.message_type == "train"
    assert list(message.content.array_records) == [dialect.arrays]
    config = dict(message.content.config_records[dialect.config])
    assert (config["lr"], config["server-round"]) == (0.5, 3)
    assert wire.instruction_of(config) == INSTRUCTION
    vector = wire.model_vector(wire.arrays_of(message.content), LAYOUT)
    np.testing.assert_array_equal(vector, np.arange(5))


def test_an_answer_survives_a_reply() -> None:
    content = RecordDict({"arrays": ArrayRecord([np.ones(5, np.float32)]), "any": ConfigRecord({wire.KEY: ANSWER.to_json()})})
    assert wire.answer_of(content) == ANSWER
    assert wire.answer_of(RecordDict({"config": ConfigRecord({"num": 1})})) is None


@given(
    names=st.lists(st.text(min_size=1, max_size=5), max_size=4, unique=True),
    clip=st.floats(1e-30, 1e30),
    noise=st.floats(0, 1e30),
    number=st.integers(1, 10**9),
    ratio=st.floats(1e-9, 1),
)
def test_instructions_round_trip_bit_for_bit(names: list[str], clip: float, noise: float, number: int, ratio: float) -> None:
    instruction = Instruction(
        server_round=number, clients=tuple(names), clip_norm=clip, noise_multiplier=noise, noise_std=noise, keep_ratio=ratio
    )
    assert Instruction.from_json(instruction.to_json()) == instruction


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("server_round", 0),
        ("server_round", 1.5),
        ("clip_norm", 0),
        ("clip_norm", float("nan")),
        ("clip_norm", float("inf")),
        ("clip_norm", "1"),
        ("clip_norm", None),
        ("clip_norm", [1.0]),
        ("noise_multiplier", -1),
        ("noise_multiplier", None),
        ("noise_std", -1e-9),
        ("noise_std", float("nan")),
        ("keep_ratio", 0),
        ("keep_ratio", 1.1),
        ("clients", "a"),
        ("clients", None),
        ("clients", {"a": 1}),
        ("clients", [1]),
        ("clients", [["a"]]),
        ("clients", [""]),
        ("clients", ["a", "a"]),
        ("weights", [1.0]),
        ("weights", [1.0, -1.0]),
        ("weights", [1.0, None]),
        ("weights", "ab"),
        ("terms", ["a", "b", "c"]),
        ("terms", ["a", 1]),
        ("terms", None),
        ("noise_multipliers", [1.0]),
        ("noise_multipliers", [1.0, -1.0]),
        ("noise_multipliers", [1.0, float("nan")]),
        ("noise_multipliers", [1.0, "1"]),
        ("noise_multipliers", None),
    ],
)
def test_instructions_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    data = {**json.loads(INSTRUCTION.to_json()), field: value}
    with pytest.raises(ValueError, match=f"{field}|weight|keys"):
        Instruction.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clients", ["a", "a"]),
        ("clients", [None]),
        ("clients", 5),
        ("refused", []),
        ("refused", None),
        ("payload", "dense"),
        ("payload", [1]),
        ("metrics", [1]),
        ("metrics", {"loss": float("nan")}),
        ("metrics", {"loss": float("inf")}),
        ("metrics", {"loss": "0"}),
        ("metrics", {"loss": None}),
        ("metrics", {"loss": True}),
    ],
)
def test_answers_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    data = {**json.loads(ANSWER.to_json()), field: value}
    with pytest.raises(ValueError, match=r"."):
        Answer.from_json(json.dumps(data))


def test_numbers_beyond_float_are_refused() -> None:
    with pytest.raises(ValueError, match="metric loss"):
        Answer.from_json(json.dumps({**json.loads(ANSWER.to_json()), "metrics": {"loss": 10**400}}))


@pytest.mark.parametrize("value", [None, "no", 0, [], {}])
def test_seeded_noise_must_be_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match="seeded_noise"):
        Answer.from_json(json.dumps({**json.loads(ANSWER.to_json()), "seeded_noise": value}))


def test_numpy_scalars_are_numbers() -> None:
    clip_norm: Any = np.float32(0.5)
    instruction = Instruction(server_round=1, clients=("a",), clip_norm=clip_norm, noise_multiplier=1.0)
    assert Instruction.from_json(instruction.to_json()).clip_norm == 0.5


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
    "[" * 100_000,
    '{"a":' * 50_000,
    "1" * 5000,
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:12])
def test_texts_that_are_no_instruction_or_answer_are_refused(text: str) -> None:
    for kind in (Instruction, Answer):
        with pytest.raises(ValueError, match="flower-dp"):
            kind.from_json(text)


@pytest.mark.parametrize("protocol", [0, 2, "1", None, [1]])
@pytest.mark.parametrize("part", [INSTRUCTION, ANSWER])
def test_other_protocols_are_refused(protocol: Any, part: Instruction | Answer) -> None:
    with pytest.raises(ValueError, match="not of protocol 1"):
        type(part).from_json(json.dumps({**json.loads(part.to_json()), "protocol": protocol}))


@pytest.mark.parametrize("part", [INSTRUCTION, ANSWER])
def test_missing_and_unknown_keys_are_refused(part: Instruction | Answer) -> None:
    data = json.loads(part.to_json())
    for changed in ({**data, "extra": 1}, {key: value for key, value in data.items() if key != "clients"}):
        with pytest.raises(ValueError, match="has keys"):
            type(part).from_json(json.dumps(changed))


def test_texts_that_are_too_long_are_refused_unread() -> None:
    with pytest.raises(ValueError, match="too long"):
        Instruction.from_json("1" * (16 * 2**20 + 1))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(part=st.sampled_from([INSTRUCTION, ANSWER]), changes=st.dictionaries(st.integers(0, 9), _JSON, min_size=1, max_size=3))
def test_any_json_is_read_or_refused_with_a_value_error(part: Instruction | Answer, changes: dict[int, Any]) -> None:
    data = json.loads(part.to_json())
    keys = list(data)
    for index, value in changes.items():
        data[keys[index % len(keys)]] = value
    try:
        read = type(part).from_json(json.dumps(data))
    except ValueError:
        return
    assert len(set(read.clients)) == len(read.clients)


@pytest.mark.parametrize("config", [{}, {wire.KEY: 5}, {wire.KEY: b"x"}, {"other": "x"}, {wire.KEY: ["x"]}])
def test_a_config_without_an_instruction_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="works under a flower_dp strategy only"):
        wire.instruction_of(config)


def test_two_answers_or_one_that_is_not_text_are_refused() -> None:
    text = ANSWER.to_json()
    two = RecordDict({"a": ConfigRecord({wire.KEY: text}), "b": ConfigRecord({wire.KEY: text})})
    number = RecordDict({"a": ConfigRecord({wire.KEY: 7})})
    for content in (two, number):
        with pytest.raises(ValueError, match="more than one answer, or one that is not text"):
            wire.answer_of(content)


def test_a_message_has_one_array_record() -> None:
    record = ArrayRecord([np.zeros(1, np.float32)])
    for content, count in ((RecordDict(), 0), (RecordDict({"a": record, "b": record}), 2)):
        with pytest.raises(ValueError, match=f"{count} array records"):
            wire.arrays_of(content)


# Arrays


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8", "uint16", "uint32", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_honest_arrays_come_through_read_only(dtype: str, shape: tuple[int, ...], order: Any) -> None:
    array = np.asarray(np.random.default_rng(0).uniform(0, 100, shape).astype(dtype), order=order)
    out = wire.numpy_arrays(ArrayRecord({"x": Array(array)}), limit=array.nbytes)["x"]
    assert out.dtype == array.dtype
    assert out.shape == shape
    np.testing.assert_array_equal(out, array)
    assert not out.flags.writeable


@pytest.mark.parametrize("version", [(2, 0), (3, 0)])
def test_only_the_version_in_which_numpy_writes_numbers_is_read(version: tuple[int, int]) -> None:
    body = np.array([1, 2], "<f4").tobytes()
    assert wire.numpy_arrays(_record(_npy(_header() + "\n", body, (1, 0))), limit=8)["x"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="format 1"):
        wire.numpy_arrays(_record(_npy(_header() + "\n", body, version)), limit=8)


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


@settings(max_examples=400)
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


def test_other_serialisations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of 'torch\.save'"):
        wire.numpy_arrays(_record(_HONEST, stype="torch.save"), limit=8)


def test_payloads_come_through_and_may_not_be_larger_than_dense_ones() -> None:
    vector = np.random.default_rng(1).standard_normal(500, dtype=np.float32)
    for payload in (dense(vector), top_k(vector, 0.2)):
        read = wire.payload_of(ArrayRecord(list(payload.arrays)), payload.header, 500)
        np.testing.assert_array_equal(decode(read, 500), decode(payload, 500))
    with pytest.raises(ValueError, match="bytes"):
        wire.payload_of(ArrayRecord([np.zeros(1000, np.float32)]), {"encoding": "dense", "length": 500}, 500)


# Models


def test_a_model_comes_through_by_name_in_any_order() -> None:
    vector = np.arange(5, dtype=np.float32)
    record = wire.model_record(vector, LAYOUT)
    assert list(record) == ["w", "b"]
    assert record["w"].shape == (2, 2)
    np.testing.assert_array_equal(wire.model_vector(record, LAYOUT), vector)
    turned = ArrayRecord({"b": record["b"], "w": record["w"]})
    np.testing.assert_array_equal(wire.model_vector(turned, LAYOUT), vector)


def test_a_model_without_names_comes_through_by_position() -> None:
    record = ArrayRecord([np.arange(4, dtype=np.float32).reshape(2, 2), np.array(4, np.float32)])
    assert list(record) == ["0", "1"]
    np.testing.assert_array_equal(wire.model_vector(record, LAYOUT), np.arange(5))


def test_models_of_half_and_double_precision_come_through() -> None:
    for dtype in (np.float16, np.float64):
        record = ArrayRecord([np.arange(4, dtype=dtype).reshape(2, 2), np.array(4, dtype)])
        np.testing.assert_array_equal(wire.model_vector(record, LAYOUT), np.arange(5))


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
        wire.model_vector(ArrayRecord({name: Array(array) for name, array in arrays.items()}), LAYOUT)


@pytest.mark.parametrize("dtype", ["complex64", "int64", "bool", "datetime64[s]", [("x", "<f4")]])
def test_models_of_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype|float"):
        wire.model_vector(ArrayRecord([np.zeros((2, 2), dtype), np.zeros((), dtype)]), LAYOUT)


def test_bytes_are_counted_as_sent() -> None:
    record = ArrayRecord({"x": Array(np.zeros(10, np.float32))})
    assert wire.content_bytes(RecordDict({"a": record, "c": ConfigRecord({"k": "abc"})})) == 40 + 128 + 3
