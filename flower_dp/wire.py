"""The wire: vectors, payloads and instructions <-> Flower records and messages.

A train message carries the global model under the record names that its receiver reads (the Message API's or those of a
`NumPyClient`) and, inside the config record, one JSON string with the instruction. A reply carries payload arrays and one JSON
string; a reply without that string is a stock client's model. Nothing here trusts a sender: sizes are checked before any
memory is taken, and every refusal is a ValueError that says why.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flower_dp.core import checks
from flower_dp.core.compression import Header, Payload, random_mask
from flower_dp.core.vectors import Layout

# The one key of ours in a config record, and the name of our record in query messages and replies.
KEY = "flower-dp"
PROTOCOL = 2
_NPY_HEADER_BYTES = 1024
# The one form in which NumPy writes an array of numbers (format 1.0). Nothing else is parsed: a general parser of headers can be
# made to fail in many ways by a forged one.
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)\{'descr': '(?P<dtype>[<>|][fiub][0-9]{1,2})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:[0-9]{1,18}, ?)*(?:[0-9]{1,18})?)\), \} *\n",
    re.DOTALL,
)
_MOST_INSTRUCTION_CHARACTERS = 2**28
# Of an answer: what a client says of a refusal, and how many different things.
MOST_REASON, MOST_REASONS = 200, 16
_MOST_METRICS = 16
# Records in a message, and arrays in a payload: an honest one has fewer.
_MOST_RECORDS, _MOST_PAYLOAD_ARRAYS = 8, 4


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
        method: the name of the method, for example `dp-fedsam`; a client refuses a method that it does not run.
        clients: names of the clients that take part.
        clip_norm: norm bound of what every client sends.
        noise_multiplier: what the server says of the whole release: noise scale / clip norm.
        report_metrics: whether clients are asked for training metrics, which are not private.
        order: the method's own table: `ClientLevelOrder` or `LocalOrder`, or another that the method reads.
    """

    server_round: int
    method: str
    clients: tuple[str, ...]
    clip_norm: float
    noise_multiplier: float
    report_metrics: bool = False
    order: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.integer("server_round", self.server_round, at_least=1)
        if not isinstance(self.method, str) or not self.method:
            raise ValueError(f"method={self.method!r}: must be a method's name")
        _check_names(self.clients)
        checks.number("clip_norm", self.clip_norm, above=0)
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)
        checks.flag("report_metrics", self.report_metrics)

    def to_json(self) -> str:
        """Return the instruction as one string; the method's table stands under the method's name."""
        words = {name: getattr(self, name) for name in _COMMON}
        table = {self.method: dict(self.order)}
        return json.dumps({"protocol": PROTOCOL, **words, **table}, separators=(",", ":"), default=_scalar)

    @classmethod
    def from_json(cls, text: str) -> "Instruction":
        """Read an instruction; tables of other methods in it are passed over.

        Raises:
            ValueError: if it is not one of this protocol.
        """
        data = _load(text, _MOST_INSTRUCTION_CHARACTERS)
        method = data.get("method")
        order = data.pop(method, None) if isinstance(method, str) and method not in _COMMON else None
        if not isinstance(order, dict):
            raise ValueError(f"instruction: has no table for method={method!r}")
        words = {name: value for name, value in data.items() if name in _COMMON or not isinstance(value, dict)}
        _check_keys("instruction", words, _COMMON)
        if not isinstance(words["clients"], list):
            raise ValueError("instruction: clients must be a list")
        return cls(**{**words, "clients": tuple(words["clients"]), "order": order})


_COMMON = ("server_round", "method", "clients", "clip_norm", "noise_multiplier", "report_metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLevelOrder:
    """The table of a method with one noised sum of clipped updates.

    Attributes:
        placement: who adds the noise: `central`, the server; `distributed`, each client its share.
        noise_std: standard deviation of the share that each client adds to its own clipped update; 0 when the server adds it.
        keep_ratio: part of the coordinates that every client sends after its noise; 1 sends all.
    """

    placement: str
    noise_std: float = 0.0
    keep_ratio: float = 1.0

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, ("central", "distributed"))
        checks.number("noise_std", self.noise_std, at_least=0)
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        if self.placement == "central" and (self.noise_std or self.keep_ratio != 1):
            raise ValueError(
                f"noise_std={self.noise_std:g}, keep_ratio={self.keep_ratio:g}: must be 0 and 1 for placement='central', where "
                "the server adds the noise and chooses the coordinates"
            )

    @classmethod
    def of(cls, instruction: Instruction) -> "ClientLevelOrder":
        """Read the table of an instruction.

        Raises:
            ValueError: if it has other keys, or values that make no sense; or if clients are to add noise and it has none.
        """
        _check_keys(instruction.method, instruction.order, ("placement", "noise_std", "keep_ratio"))
        order = cls(**instruction.order)
        _check_share(order.placement, order.noise_std, instruction)
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class FedSMPOrder:
    """The table of Fed-SMP with rand_k: one noised sum of updates under a random mask that all clients of a round share.

    Attributes:
        placement: who adds the noise: `central`, the server; `distributed`, each client its share.
        noise_std: standard deviation of the share that each client adds to its own masked and clipped update; 0 when the server
            adds it.
        keep_ratio: part of the coordinates that the mask keeps; independent of data, so free under either placement.
        mask_seed: public; the mask is `random_mask(length, keep_ratio, numpy.random.default_rng(mask_seed))`.

    Example:
        >>> from flower_dp.wire import FedSMPOrder
        >>> len(FedSMPOrder(placement="central", keep_ratio=0.05, mask_seed=7).mask(1000))
        50
    """

    placement: str
    noise_std: float = 0.0
    keep_ratio: float
    mask_seed: int

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, ("central", "distributed"))
        checks.number("noise_std", self.noise_std, at_least=0)
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        checks.integer("mask_seed", self.mask_seed, at_least=0, at_most=2**63 - 1)
        if self.placement == "central" and self.noise_std:
            raise ValueError(f"noise_std={self.noise_std:g}: must be 0 for placement='central', where the server adds the noise")

    def mask(self, length: int) -> np.ndarray:
        """Return the indices that everyone keeps this round, increasing."""
        return random_mask(length, self.keep_ratio, np.random.default_rng(self.mask_seed))

    @classmethod
    def of(cls, instruction: Instruction) -> "FedSMPOrder":
        """Read the table of an instruction.

        Raises:
            ValueError: if it has other keys, or values that make no sense; or if clients are to add noise and it has none.
        """
        _check_keys(instruction.method, instruction.order, ("placement", "noise_std", "keep_ratio", "mask_seed"))
        order = cls(**instruction.order)
        _check_share(order.placement, order.noise_std, instruction)
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOrder:
    """The table of a method whose every message is private on its own; each tuple has one entry a client.

    Attributes:
        weights: what each client's private row counts in the node's sum.
        terms: what the server takes each client's own terms to be (`Terms.kind`). A client compares them with its own, and
            never works by them.
        noise_multipliers: the noise multipliers that go with them, by which the server charges.
    """

    weights: tuple[float, ...]
    terms: tuple[str, ...]
    noise_multipliers: tuple[float, ...]

    def __post_init__(self) -> None:
        for weight in self.weights:
            checks.number("weights", weight, at_least=0)
        if not all(isinstance(kind, str) for kind in self.terms):
            raise ValueError("terms: must be texts")
        for multiplier in self.noise_multipliers:
            checks.number("noise_multipliers", multiplier, at_least=0)

    @classmethod
    def of(cls, instruction: Instruction) -> "LocalOrder":
        """Read the table of an instruction.

        Raises:
            ValueError: if it has other keys, lists of another length, or values that make no sense.
        """
        names = ("weights", "terms", "noise_multipliers")
        _check_keys(instruction.method, instruction.order, names)
        for name in names:
            values = instruction.order[name]
            if not isinstance(values, list | tuple) or len(values) != len(instruction.clients):
                raise ValueError(f"{name}: must have one value for each of {len(instruction.clients)} clients")
        return cls(**{name: tuple(instruction.order[name]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the clients of one node send back besides the payload.

    Attributes:
        refused: why clients that were asked are not in the payload's sum; all others that were asked are.
        payload: header of the payload.
        seeded_noise: whether the noise came from a fixed seed, as in a test; the run is not private then.
        metrics: training metrics, summed over the clients in the sum, if they were asked for.
        payload_bytes: bytes of arrays that the clients in the sum would have sent had each sent its own row, summed over them.
    """

    refused: Mapping[str, str]
    payload: Header
    seeded_noise: bool
    metrics: Mapping[str, float]
    payload_bytes: int = 0

    def to_json(self, asked: Sequence[str]) -> str:
        """Return the answer to an instruction for these clients as one string.

        Clients stand in it by their position, under the reason of their refusal: the length of an honest answer is known before
        it is read. Reasons are cut to `MOST_REASON` characters, and all after the first `MOST_REASONS` become one.
        """
        reasons: dict[str, list[int]] = {}
        for position, name in enumerate(asked):
            if name in self.refused:
                reason = self.refused[name][:MOST_REASON]
                if reason not in reasons and len(reasons) >= MOST_REASONS:
                    reason = "another reason"
                reasons.setdefault(reason, []).append(position)
        words = {"refused": reasons, "payload": self.payload, "seeded_noise": self.seeded_noise, "metrics": dict(self.metrics)}
        words["payload_bytes"] = self.payload_bytes
        return json.dumps({"protocol": PROTOCOL, **words}, separators=(",", ":"), default=_scalar)

    @classmethod
    def from_json(cls, text: str, asked: Sequence[str]) -> "Answer":
        """Read an answer to an instruction for these clients.

        Raises:
            ValueError: if it is not one of this protocol, or longer than an honest one can be.
        """
        data = _load(text, most_answer_characters(len(asked)))
        _check_keys("answer", data, ("refused", "payload", "seeded_noise", "metrics", "payload_bytes"))
        reasons, payload, metrics = data["refused"], data["payload"], data["metrics"]
        if not all(isinstance(table, dict) for table in (reasons, payload, metrics)):
            raise ValueError("answer: refused, payload and metrics must be tables")
        if len(metrics) > _MOST_METRICS or len(payload) > _MOST_METRICS or len(reasons) > MOST_REASONS + 1:
            raise ValueError(f"answer: has {len(metrics)} metrics, {len(payload)} header words, {len(reasons)} reasons: too many")
        for name, value in metrics.items():
            checks.number(f"metric {name}", value)
        refused: dict[str, str] = {}
        for reason, positions in reasons.items():
            if not isinstance(positions, list):
                raise ValueError("answer: a reason must have a list of positions")
            for position in positions:
                name = asked[checks.integer("position", position, at_least=0, at_most=len(asked) - 1)]
                if name in refused:
                    raise ValueError(f"answer: client {name!r} is refused twice")
                refused[name] = reason[:MOST_REASON]
        length = payload.get("length")
        # Whoever decodes the payload compares this length with the model's.
        most = (64 + 16 * length) * (len(asked) - len(refused)) if type(length) is int and length >= 0 else 0
        return cls(
            refused=refused,
            payload=payload,
            seeded_noise=checks.flag("seeded_noise", data["seeded_noise"]),
            metrics=metrics,
            payload_bytes=checks.integer("payload_bytes", data["payload_bytes"], at_least=0, at_most=most),
        )


def most_answer_characters(num_clients: int) -> int:
    """Return how long an honest answer for so many clients can be."""
    # A character is at most twelve in JSON: two escapes of six.
    return 4096 + 12 * MOST_REASON * (MOST_REASONS + 1) + 8 * num_clients


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


def check_content(content: RecordDict, *, most_entries: int, most_bytes: int) -> int:
    """Return how many bytes of arrays and of text a reply carries, if that is no more than an honest one can.

    Raises:
        ValueError: if there are too many records, entries of them or bytes; found out before anything is parsed.
    """
    entries = sum(len(record) for record in content.values()) if len(content) <= _MOST_RECORDS else 0
    if len(content) > _MOST_RECORDS or entries > most_entries:
        raise ValueError(f"message has {len(content)} records, {entries} entries: at most {_MOST_RECORDS} and {most_entries}")
    size = content_bytes(content)
    if size > most_bytes:
        raise ValueError(f"message has {size} bytes: at most {most_bytes}")
    return size


def answer_of(content: RecordDict, asked: Sequence[str]) -> Answer | None:
    """Return the answer of a client of this package, None for a stock client's reply.

    Raises:
        ValueError: if an answer is malformed.
    """
    texts = [record[KEY] for record in content.config_records.values() if KEY in record]
    if not texts:
        return None
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("reply has more than one answer, or one that is not text")
    return Answer.from_json(texts[0], asked)


def payload_of(record: ArrayRecord, header: Header, length: int) -> Payload:
    """Return the payload of a reply, none of it larger than an honest one of `length` parameters can be.

    Raises:
        ValueError: if an array is oversized or not what its own header says.
    """
    if len(record) > _MOST_PAYLOAD_ARRAYS:
        raise ValueError(f"payload has {len(record)} arrays: at most {_MOST_PAYLOAD_ARRAYS}")
    return Payload(arrays=tuple(numpy_arrays(record, limit=8 * length).values()), header=header)


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
    if len(record) != len(layout.names):
        raise ValueError(f"model has {len(record)} arrays: must be {len(layout.names)}")
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
    """Return how many bytes of arrays, text and numbers a message carries, names included."""
    arrays = sum(len(name) + len(array.data) for record in content.array_records.values() for name, array in record.items())
    words = sum(len(name) + _value_bytes(value) for record in content.config_records.values() for name, value in record.items())
    numbers = sum(len(name) + _value_bytes(value) for record in content.metric_records.values() for name, value in record.items())
    return arrays + words + numbers


def _value_bytes(value: Any) -> int:
    if isinstance(value, list):
        return 8 * len(value)  # whatever is in it: a forged list of texts is not worth the walk
    return len(value) if isinstance(value, str | bytes) else 8


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


def _load(text: str, most: int) -> dict[str, Any]:
    if len(text) > most:
        raise ValueError(f"{KEY!r} text has {len(text)} characters: at most {most}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{KEY!r} text is not JSON") from None
    if not isinstance(data, dict) or data.get("protocol") != PROTOCOL:
        raise ValueError(f"{KEY!r} text is not of protocol {PROTOCOL}: server and client need the same release of flower-dp")
    del data["protocol"]
    return data


def _check_keys(what: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    if set(table) != set(names):
        unknown, missing = sorted(set(table) - set(names))[:8], sorted(set(names) - set(table))
        raise ValueError(f"{what}: unknown keys {unknown}, missing {missing}; must have {', '.join(names)}")


def _check_share(placement: str, noise_std: float, instruction: Instruction) -> None:
    if placement == "distributed" and bool(noise_std) != bool(instruction.noise_multiplier):
        raise ValueError(
            f"noise_std={noise_std:g}: does not go with noise_multiplier={instruction.noise_multiplier:g} under "
            "placement='distributed'"
        )


def _check_names(names: tuple[str, ...]) -> None:
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise ValueError("clients: must be names that are not empty and not twice in the list")


def _scalar(value: Any) -> Any:
    """A NumPy scalar as the Python number that JSON knows."""
    return value.item()
