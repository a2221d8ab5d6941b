"""Mutations of what crosses a boundary, and the bounds that hold whatever crosses it.

`FUZZ=thorough` draws anew in every run, and some 300 times as many examples; a failure then prints how to repeat it.
"""

import copy
import inspect
import json
import logging
import os
import random
import re
import resource
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from flower_dp import wire
from flower_dp.core.compression import CODECS

THOROUGH = os.environ.get("FUZZ") == "thorough"
_MORE, _FEWEST = 100, 6
# Address space that may be taken beyond what the process has at the start of an example, in bytes.
_MEMORY = 2**28
# Seconds of processor time of one example, where these are many.
_SECONDS = 10.0
_NO_MEMORY = re.compile(r"MemoryError|Unable to allocate|can't allocate memory|bad_alloc")


def examples(number: int) -> settings:
    """Settings of a test that tries a third of so many examples, but 6 at least, or 100 times as many when it is thorough."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    more = {"max_examples": _MORE * number, "derandomize": False, "print_blob": True}
    few = {"max_examples": max(min(number, _FEWEST), number // 3)}
    return settings(**more if THOROUGH else few, deadline=None, suppress_health_check=checks)


# Bounds


class Lines(logging.Handler):
    """What Flower's logger has got."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        """The messages."""
        return [record.getMessage() for record in self.records]


@contextmanager
def bounded() -> Iterator[Lines]:
    """Let a block take little memory; return what it logs.

    An allocation far beyond the size of a message fails here, and is found even if the code turns the error into a refusal.
    """
    log, lines = logging.getLogger("flwr"), Lines()
    with open("/proc/self/statm", encoding="ascii") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    others, propagates = log.handlers, log.propagate
    log.handlers, log.propagate = [lines], False
    resource.setrlimit(resource.RLIMIT_AS, (has + _MEMORY, hard))
    started = time.process_time()
    try:
        yield lines
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        log.handlers, log.propagate = others, propagates
    for record in lines.records:
        trouble = f"{record.getMessage()} {record.exc_info and record.exc_info[0]} {record.exc_info and record.exc_info[1]}"
        assert not _NO_MEMORY.search(trouble), trouble
    assert not THOROUGH or time.process_time() - started < _SECONDS


# Values

HUGE = (10**25, 10**400, -(10**400), 2**63, 2**64, -(2**63) - 1, 1e308, -1e308, 1.7976931348623157e308, 2**53 + 1)
SMALL = (0, -1, 1, 2, 0.0, -0.0, 5e-324, -5e-324, 1e-300, 2.0**-1000, 0.5, -0.5)
SPECIAL = (float("nan"), float("inf"), float("-inf"), None, True, False)
TEXTS = (
    *("", "local", "central", "distributed", "private-evaluation", "dp-fedavg", "nbafl", "failed", "declined: \x07"),
    *("qsgd", "top-k", "rand-k", "dense", "inline", "deflate", "packed", "c0", "c1", "a\nb: EPSILON 0", "\x1b[2J\x00", "\ud800"),
    *("\u202e", "ä" * 300, "x" * 5000, "A" * 20_000, "AAAA", "{}"),
)
NESTED = (
    *([], {}, [[]], {"a": {"a": {"a": [1]}}}, [0] * 3000, {str(index): index for index in range(100)}),
    *([None], [{}], ["c0", "c0"]),
)


def values() -> st.SearchStrategy[Any]:
    """Whatever JSON can hold, and more."""
    return st.one_of(
        st.sampled_from(HUGE),
        st.sampled_from(SMALL),
        st.sampled_from(SPECIAL),
        st.sampled_from(TEXTS),
        st.sampled_from(NESTED).map(copy.deepcopy),
        st.floats(),
        st.integers(-(2**40), 2**40),
        st.text(max_size=12),
    )


_FACTORS = (2, 0.5, -1, 1e3, 1e-3, 1 + 1e-12, 1 - 1e-9, 2.0**20, 2.0**-20, 2.0**60)
_NEAR: tuple[Callable[[Any], Any], ...] = (
    *(lambda value, factor=factor: value * factor for factor in _FACTORS),
    *(lambda value, more=more: value + more for more in (1, -1)),
    *(lambda value, to=to: float(np.nextafter(value, to)) for to in (np.inf, -np.inf)),
    *(int, float, str),
)


def _near(value: Any, change: Callable[[Any], Any]) -> Any:
    try:
        with np.errstate(over="ignore"):  # next to the largest float is infinity
            return change(value)
    except (ArithmeticError, ValueError, TypeError):
        return 0


def _places(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield every place in a tree of tables and lists: what it is in, its key there, and its value."""
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in entries:
        yield value, key, one
        yield from _places(one)


@st.composite
def trees(draw: st.DrawFn, table: dict[str, Any], most: int = 3) -> dict[str, Any]:
    """Draw a table with some of its entries replaced, removed, moved or added, at any depth."""
    tree = copy.deepcopy(table)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(tree))
        if not places:
            break
        parent, key, value = draw(st.sampled_from(places))
        what = draw(st.sampled_from(["near", "near", "other", "other", "remove", "add", "twice", "swap"]))
        if what == "near" and isinstance(value, int | float) and not isinstance(value, bool):
            parent[key] = _near(value, draw(st.sampled_from(_NEAR)))
        elif what == "remove":
            del parent[key]
        elif what == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from([*_KEYS, *TEXTS]))] = draw(values())
        elif what == "twice" and isinstance(parent, list):
            parent.extend(copy.deepcopy(parent[:50]))
        elif what == "swap":
            parent[key] = copy.deepcopy(draw(st.sampled_from([value_at for _, _, value_at in places])))
        else:
            parent[key] = draw(values())
    return tree


# Every key that any text of this package has: one that does not belong somewhere may be taken there.
_STRUCTS = (
    wire.Instruction,
    wire.ReleaseRequest,
    wire.Promise,
    wire.LocalRequest,
    wire.RoundMask,
    wire.SentMask,
    wire.Indicator,
    wire.HostedClients,
)
_KEYS = (
    *sorted({name for one in _STRUCTS for name in inspect.signature(one).parameters}),
    *sorted({name for codec in CODECS.values() for name in codec.keys}),
    *("protocol", "type", "bounds", "refused", "code", "reason", "payload", "seeded_noise", "payload_bytes", "fresh", "error"),
    *("encoding", "length"),
)

# Texts that are no change of an honest one.
BOMBS = (
    "[" * 100_000,
    '{"protocol":5,"a":' * 20_000,
    "1" * 5000,
    '{"protocol":5,"server_round":' + "1" * 5000 + "}",
    '{"protocol":5,"protocol":5}',
    '{"protocol":5,"clients": [' + "0," * 100_000 + "0]}",
    '{"protocol":5,"clients":["a"],"methods":["' + "b" * 100_000 + '"]}',
    "",
    "null",
    '"a"',
    "\x00",
)


@st.composite
def texts(draw: st.DrawFn, text: str) -> Any:
    """Draw a changed form of a JSON text: another tree, other characters, or something else altogether."""
    how = draw(st.sampled_from(["tree"] * 12 + ["characters"] * 3 + ["bomb", "value"]))
    if how == "tree":
        return json.dumps(draw(trees(json.loads(text))))
    if how == "bomb":
        return draw(st.sampled_from(BOMBS))
    if how == "value":
        return draw(st.one_of(st.integers(-(2**62), 2**62), st.binary(max_size=40), st.just(["a"]), st.floats(), st.booleans()))
    return cut(text, draw(st.integers(0, 2**32 - 1)))


def cut(content: Any, seed: int) -> Any:
    """Return a text, or bytes, with some parts left out, doubled or changed."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 3)):
        if not content:
            break
        start = rng.randrange(len(content))
        end = min(len(content), start + rng.choice([1, 1, 1, 2, 5, 40, len(content)]))
        part = content[start:end]
        new = rng.choice([content[:0], part * 2, part[::-1], _changed(part, rng)])
        content = content[:start] + new + content[end:]
    return content


def _changed(part: Any, rng: random.Random) -> Any:
    if isinstance(part, str):
        return "".join(rng.choice('0123456789-.eE+"{}[],: truefalsn\\u') for _ in part[:50])
    return bytes(byte ^ (1 << rng.randrange(8)) for byte in part[:50])


# Arrays


def npy(
    descr: str, shape: str, body: bytes, *, version: bytes = b"\x01\x00", length: int | None = None, order: str = "False"
) -> bytes:
    """Return an array's bytes that say this of themselves."""
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode("utf-8", "replace")
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(header) if length is None else length) + header + body


DESCRS = (
    *("'<f4'", "'<f8'", "'<f2'", "'>f4'", "'<f3'", "'<f0'", "'<f16'", "'|b1'", "'<b7'", "'<i4'", "'<u2'", "'|u1'", "'<i99'"),
    *("'|O'", "'<c8'", "'<U10'", "[('a', '<f4')]", "__import__('os')", "'<f4' * 10**9", "'|V8'", "'<M8[s]'"),
)
SHAPES = (
    *("()", "(0,)", "(1,)", "(18,)", "(3, 6)", "(2,)", "(-1,)", "(1000000000000,)", "(999999999999999999, 999999999999999999)"),
    *("(0, 999999999999999999, 999999999999999999)", "(" + "1, " * 60 + ")", "(" + "1, " * 80 + ")", "(0, " + "1, " * 300 + ")"),
    *("(True,)", "(1.5,)", "18", "(18)", "[18]", "(" * 200),
)


@st.composite
def arrays(draw: st.DrawFn, array: Array) -> Array:
    """Draw a changed form of an array: other values, another dtype or shape, or bytes that lie about themselves."""
    how = draw(st.sampled_from(["values"] * 4 + ["dtype", "shape", "header", "header", "bytes", "fields"]))
    if how in ("header", "bytes", "fields"):
        return _lying(draw, array, how)
    try:
        value = np.array(array.numpy())
    except Exception:  # it was changed before
        value = np.zeros(18, np.float32)
    value = np.zeros(18, np.float32) if value.dtype.kind not in "biuf" else value
    if how == "values" and value.size:
        value = value.astype(np.float64) if value.dtype.kind in "biu" else value
        with np.errstate(all="ignore"):
            value = _values(draw, value)
    elif how == "dtype":
        with np.errstate(all="ignore"):
            value = value.astype(draw(st.sampled_from(["f8", "f4", "f2", "i4", "u1", "u2", "u4", "?", "c8", ">f4", "g"])))
    elif how == "shape":
        flat = value.reshape(-1)
        some = [flat, flat[:-1], np.append(flat, flat[:1]), flat[:0], flat[None], flat[:, None, None], value.T]
        value = draw(st.sampled_from([*some, flat[:1].reshape(())] if flat.size else [np.zeros(3, np.float32)]))
    return Array(np.ascontiguousarray(value) if value.ndim else value)


def _values(draw: st.DrawFn, value: np.ndarray) -> np.ndarray:
    number = draw(st.one_of(st.sampled_from([np.nan, np.inf, -np.inf, 1e38, -3e38, 1e300, 1e20, 0.0, 1e-45, -1.0]), st.floats()))
    kind = draw(st.sampled_from(["one", "all", "times", "signs"]))
    out = value.copy()
    if kind == "one":
        out.reshape(-1)[draw(st.integers(0, value.size - 1))] = number
    elif kind == "all":
        out[...] = number
    elif kind == "times":
        out *= draw(st.sampled_from([0.0, -1.0, 1e-3, 2.0, 10.0, 1e6, 1e30, 1e38]))
    else:
        out *= np.resize([1.0, -1.0, 100.0], out.size).reshape(out.shape)
    return out


def _lying(draw: st.DrawFn, array: Array, how: str) -> Array:
    data = array.data
    fields: dict[str, Any] = {"dtype": "float32", "shape": (18,), "stype": "numpy.ndarray"}
    if how == "bytes":
        data = cut(data, draw(st.integers(0, 2**32 - 1)))
    elif how == "fields":
        fields["stype"] = draw(st.sampled_from(["numpy.ndarray", "torch", "", "numpy.ndarray\n", "pickle"]))
        fields["dtype"] = draw(st.sampled_from(["float32", "object", "", "x" * 500]))
        fields["shape"] = draw(st.sampled_from([(), (10**18,), (-1,), (18,) * 100]))
    else:
        body = draw(st.sampled_from([b"", data[-72:], bytes(72), b"\xff" * 72, bytes(18), data[-144:], data * 3]))
        version = draw(st.sampled_from([b"\x01\x00"] * 4 + [b"\x02\x00", b"\x03\x00", b"\x09\x09"]))
        length = draw(st.sampled_from([None] * 4 + [0, 1, 2**16 - 1]))
        data = npy(draw(st.sampled_from(DESCRS)), draw(st.sampled_from(SHAPES)), body, version=version, length=length)
    return Array(**fields, data=data)


# Whole messages


@st.composite
def contents(draw: st.DrawFn, content: RecordDict, texts_of: Callable[[str], st.SearchStrategy[Any]] = texts) -> RecordDict:
    """Draw a changed form of a message's content."""
    changed = RecordDict(
        {name: ArrayRecord(dict(record.items())) for name, record in content.array_records.items()}
        | {name: ConfigRecord(dict(record.items())) for name, record in content.config_records.items()}
        | {name: MetricRecord(dict(record.items())) for name, record in content.metric_records.items()}
    )
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        what = draw(st.sampled_from(["text"] * 6 + ["array"] * 3 + ["records"]))
        if what == "text":
            _say(draw, changed, texts_of)
        elif what == "array":
            _rearrange(draw, changed)
        else:
            _mix(draw, changed)
    return changed


def _say(draw: st.DrawFn, content: RecordDict, texts_of: Callable[[str], st.SearchStrategy[Any]]) -> None:
    for record in content.config_records.values():
        if isinstance(text := record.get(wire.KEY), str):
            try:
                json.loads(text)
            except (ValueError, RecursionError):
                continue
            record[wire.KEY] = draw(texts_of(text))


def _rearrange(draw: st.DrawFn, content: RecordDict) -> None:
    records = [record for record in content.array_records.values() if len(record)]
    if not records:
        content["arrays"] = ArrayRecord({"0": Array(np.zeros(18, np.float32))})
        return
    record = draw(st.sampled_from(records))
    name = draw(st.sampled_from(sorted(record)))
    how = draw(st.sampled_from(["change"] * 6 + ["remove", "rename", "add", "many"]))
    if how == "change":
        record[name] = draw(arrays(record[name]))
    elif how == "remove":
        del record[name]
    elif how == "rename":
        record[draw(st.sampled_from(["0", "1", "", "flower-dp.control", "\ud7ff\n", "x" * 500]))] = record.pop(name)
    elif how == "add":
        record[draw(st.sampled_from(["0", "1", "extra", "flower-dp.control"]))] = draw(arrays(record[name]))
    else:
        for index in range(draw(st.sampled_from([5, 2000]))):
            record[f"x{index}"] = record[name]


def _mix(draw: st.DrawFn, content: RecordDict) -> None:
    how = draw(st.sampled_from(["remove", "rename", "metrics", "config", "twice", "settings", "many"]))
    names = sorted(content)
    if how == "remove" and names:
        del content[draw(st.sampled_from(names))]
    elif how == "rename" and names:
        other = draw(st.sampled_from(["arrays", "config", "fitins.config", "flower-dp", "metrics", "other"]))
        content[other] = content.pop(draw(st.sampled_from(names)))
    elif how == "metrics":
        numbers: dict[str, Any] = {"num-examples": draw(st.sampled_from([0, -1, 1, 2**62, 1e300, float("nan"), float("inf")]))}
        content["metrics"] = MetricRecord(
            numbers | {f"m{index}": [1.0] * 10 for index in range(draw(st.sampled_from([1, 2000])))}
        )
    elif how == "config":
        content["more"] = ConfigRecord({"a": draw(st.sampled_from([1, "x" * 10_000, b"\xff" * 100, [1] * 1000, True, 2.0]))})
    elif how == "twice":
        content["again"] = ConfigRecord({wire.KEY: next((one[wire.KEY] for one in content.config_records.values() if one), "{}")})
    elif how == "settings":
        for record in content.config_records.values():
            record["server-round"] = draw(st.sampled_from([0, -1, 2**62, "1", 1.5, b"1", [1]]))
    else:
        for index in range(20):
            content[f"r{index}"] = ConfigRecord({})
