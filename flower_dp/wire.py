"""The wire: vectors, payloads and instructions <-> Flower records and messages.

A train message carries the global model under the record names that its receiver reads (the Message API's or those of a
`NumPyClient`) and, inside the config record, one JSON string with the instruction. A reply carries payload arrays and one JSON
string; a reply without that string is a stock client's model. Nothing here trusts a sender: sizes are checked before any
memory is taken, and every refusal is a ValueError that says why.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flower_dp import checks
from flower_dp.compression import Header, Payload
from flower_dp.vectors import Layout

# The one key of ours in a config record, and the name of our record in query messages and replies.
KEY = "flower-dp"
PROTOCOL = 1
_NPY_HEADER_BYTES = 1024
# The one form in which NumPy writes an array of numbers (format 1.0). Nothing else is parsed: a general parser of headers can be
# made to fail in many ways by a forged one.
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)\{'descr': '(?P<dtype>[<>|][fiub][0-9]{1,2})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:[0-9]{1,18}, ?)*(?:[0-9]{1,18})?)\), \} *\n",
    re.DOTALL,
)
_SMALL_STRING_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Names of the records in which a client looks for the model and the configuration."""

    name: str
    arrays: str
    config: str


MESSAGE_API = Dialect(name="message-api", arrays="arrays", config="config")
NUMPY_CLIENT = Dialect(name="numpy-client", arrays="fitins.parameters", config="fitins.config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """What a server asks of the clients of one node in one round.

    Attributes:
        server_round: 1, 2, ...
        clients: names of the clients that take part.
        clip_norm: L2 bound of every client's update.
        noise_multiplier: what the server says of the whole release: noise std / clip norm.
        noise_std: standard deviation of the noise that every client adds to its own clipped update; 0 when the server adds it.
        keep_ratio: part of the coordinates that every client sends after its noise; 1 sends all.
        report_metrics: whether clients are asked for training metrics, which are not private.
        weights: what each client's private row counts in the node's sum, in the order of `clients`; empty for 1 each.
        terms: what the server takes each client's own terms to be (`Terms.kind`), in the order of `clients`; empty where clients
            keep no budget of their own. A client compares them with its own, and never works by them.
        noise_multipliers: the noise multipliers that go with them, by which the server charges.
    """

    server_round: int
    clients: tuple[str, ...]
    clip_norm: float
    noise_multiplier: float
    noise_std: float = 0.0
    keep_ratio: float = 1.0
    report_metrics: bool = False
    weights: tuple[float, ...] = ()
    terms: tuple[str, ...] = ()
    noise_multipliers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        checks.integer("server_round", self.server_round, at_least=1)
        _check_names(self.clients)
        checks.number("clip_norm", self.clip_norm, above=0)
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)
        checks.number("noise_std", self.noise_std, at_least=0)
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        for field in ("weights", "terms", "noise_multipliers"):
            values = getattr(self, field)
            if len(values) not in (0, len(self.clients)):
                raise ValueError(
                    f"{field}: has {len(values)} values: must have none, or one for each of {len(self.clients)} clients"
                )
        for weight in self.weights:
            checks.number("weight", weight, at_least=0)
        if not all(isinstance(kind, str) for kind in self.terms):
            raise ValueError("terms: must be texts")
        for multiplier in self.noise_multipliers:
            checks.number("noise_multipliers", multiplier, at_least=0)

    def to_json(self) -> str:
        """Return the instruction as one string."""
        return json.dumps({"protocol": PROTOCOL, **asdict(self)}, separators=(",", ":"), default=_scalar)

    @classmethod
    def from_json(cls, text: str) -> "Instruction":
        """Read an instruction.

        Raises:
            ValueError: if it is not one of this protocol.
        """
        data = _load(text, {field.name for field in fields(cls)})
        lists = ("clients", "weights", "terms", "noise_multipliers")
        if not all(isinstance(data[name], list) for name in lists):
            raise ValueError(f"instruction: {', '.join(lists)} must be lists")
        return cls(**{**data, **{name: tuple(data[name]) for name in lists}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the clients of one node send back besides the payload.

    Attributes:
        clients: names of the clients whose updates are in the payload's sum.
        refused: why any other client that was asked is not in it.
        payload: header of the payload.
        seeded_noise: whether the noise came from a fixed seed, as in a test; the run is not private then.
        metrics: training metrics, summed over `clients`, if they were asked for.
    """

    clients: tuple[str, ...]
    refused: dict[str, str]
    payload: Header
    seeded_noise: bool
    metrics: dict[str, float]

    def __post_init__(self) -> None:
        _check_names(self.clients)
        if not isinstance(self.refused, dict) or not isinstance(self.payload, dict) or not isinstance(self.metrics, dict):
            raise ValueError("answer: refused, payload and metrics must be tables")
        if not isinstance(self.seeded_noise, bool) or not all(isinstance(reason, str) for reason in self.refused.values()):
            raise ValueError("answer: seeded_noise must be true or false, and reasons text")
        for name, value in self.metrics.items():
            checks.number(f"metric {name}", value)

    def to_json(self) -> str:
        """Return the answer as one string."""
        return json.dumps({"protocol": PROTOCOL, **asdict(self)}, separators=(",", ":"), default=_scalar)

    @classmethod
    def from_json(cls, text: str) -> "Answer":
        """Read an answer.

        Raises:
            ValueError: if it is not one of this protocol.
        """
        data = _load(text, {field.name for field in fields(cls)})
        return cls(**{**data, "clients": tuple(data["clients"])})


def train_message(
    node_id: int, dialect: Dialect, arrays: ArrayRecord, config: Mapping[str, Any], instruction: Instruction
) -> Message:
    """Return the message of one node in one round."""
    words = ConfigRecord({**config, "server-round": instruction.server_round, KEY: instruction.to_json()})
    content = RecordDict({dialect.arrays: arrays, dialect.config: words})
    return Message(content, node_id, "train", group_id=str(instruction.server_round))


def instruction_of(config: Mapping[str, Any]) -> Instruction:
    """Return the instruction inside a config record or a NumPyClient's config.

    Raises:
        ValueError: if there is none; a client of this package answers no other server, since nothing would tell it the clip.
    """
    text = config.get(KEY)
    if not isinstance(text, str):
        raise ValueError(f"config has no {KEY!r}: this client works under a flower_dp strategy only")
    return Instruction.from_json(text)


def arrays_of(content: RecordDict) -> ArrayRecord:
    """Return the only array record of a message.

    Raises:
        ValueError: if there is none or more than one.
    """
    if len(content.array_records) != 1:
        raise ValueError(f"message has {len(content.array_records)} array records: must be 1")
    return next(iter(content.array_records.values()))


def answer_of(content: RecordDict) -> Answer | None:
    """Return the answer of a client of this package, None for a stock client's reply.

    Raises:
        ValueError: if an answer is malformed.
    """
    texts = [record[KEY] for record in content.config_records.values() if KEY in record]
    if not texts:
        return None
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("reply has more than one answer, or one that is not text")
    return Answer.from_json(texts[0])


def payload_of(record: ArrayRecord, header: Header, length: int) -> Payload:
    """Return the payload of a reply, none of it larger than an honest one of `length` parameters can be.

    Raises:
        ValueError: if an array is oversized or not what its own header says.
    """
    return Payload(arrays=tuple(numpy_arrays(record, limit=4 * length).values()), header=header)


def numpy_arrays(record: ArrayRecord, *, limit: int) -> dict[str, np.ndarray]:
    """Return a record's arrays as read-only NumPy views, at most `limit` bytes each.

    Raises:
        ValueError: if an array is larger, or is not a plain .npy array of exactly the size that its header says.
    """
    return {name: _numpy(name, array, limit) for name, array in record.items()}


def model_vector(record: ArrayRecord, layout: Layout) -> np.ndarray:
    """Return a model's arrays as one float32 vector: by name, or by position where the sender has no names.

    Raises:
        ValueError: if count, names or shapes are not the layout's.
    """
    arrays = numpy_arrays(record, limit=8 * max(layout.size, 1))
    if set(arrays) != set(layout.names) and len(arrays) == len(layout.names) and all(name.isdigit() for name in arrays):
        arrays = dict(zip(layout.names, arrays.values(), strict=True))
    with np.errstate(over="ignore"):  # infinite entries are refused by whoever adds them up
        vector: np.ndarray = layout.flatten(arrays)
    return vector


def model_record(vector: np.ndarray, layout: Layout) -> ArrayRecord:
    """Return a vector as a model's array record, under the model's own names, shapes and dtypes."""
    return ArrayRecord({name: FlowerArray(np.asarray(array, order="C")) for name, array in layout.unflatten(vector).items()})


def content_bytes(content: RecordDict) -> int:
    """Return how many bytes of arrays and of text a message carries."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    words = sum(len(str(value)) for record in content.config_records.values() for value in record.values())
    return arrays + words


def _numpy(name: str, array: FlowerArray, limit: int) -> np.ndarray:
    if array.stype != "numpy.ndarray" or len(array.data) > limit + _NPY_HEADER_BYTES:
        raise ValueError(f"array {name!r} has {len(array.data)} bytes of {array.stype!r}: at most {limit} of numpy.ndarray")
    header = _NPY_HEADER.match(array.data[: _NPY_HEADER_BYTES + 10])
    if header is None:
        raise ValueError(f"array {name!r} is not a .npy array (format 1.0) of float, integer or bool dtype")
    dtype, fortran = np.dtype(header["dtype"].decode()), header["fortran"] == b"True"
    shape = tuple(int(size) for size in header["shape"].split(b",") if size.strip())
    start = header.end()
    # Checked before any memory is taken: a forged header may claim any shape.
    if 10 + int.from_bytes(header["length"], "little") != start or math.prod(shape) * dtype.itemsize != len(array.data) - start:
        raise ValueError(f"array {name!r} says {dtype} of shape {shape}, and has {len(array.data) - start} bytes")
    values = np.frombuffer(array.data, dtype=dtype, offset=start)
    return values.reshape(shape, order="F" if fortran else "C")


def _load(text: str, names: set[str]) -> dict[str, Any]:
    if len(text) > _SMALL_STRING_BYTES:
        raise ValueError(f"{KEY!r} text has {len(text)} characters: too long")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{KEY!r} text is not JSON") from None
    if not isinstance(data, dict) or data.get("protocol") != PROTOCOL:
        raise ValueError(f"{KEY!r} text is not of protocol {PROTOCOL}: server and client need the same release of flower-dp")
    del data["protocol"]
    if set(data) != names or not isinstance(data["clients"], list):
        raise ValueError(f"{KEY!r} text has keys {sorted(data)}: must be {sorted(names)}")
    return data


def _check_names(names: tuple[str, ...]) -> None:
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise ValueError("clients: must be names that are not empty and not twice in the list")


def _scalar(value: Any) -> Any:
    """A NumPy scalar as the Python number that JSON knows."""
    return value.item()
