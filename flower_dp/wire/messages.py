"""Whole messages: train messages and replies, under the record names of the Message API or of a `NumPyClient`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flower_dp.wire.answer import Refusal, ReplyHeader
from flower_dp.wire.arrays import with_vectors
from flower_dp.wire.instruction import Instruction
from flower_dp.wire.structs import KEY, PROTOCOL, REFUSED

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

# Records in a message: an honest message has fewer.
_MOST_RECORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordNames:
    """Names of the records that hold the model and the configuration, in training and in evaluation.

    Example:
        >>> from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT
        >>> MESSAGE_API.arrays, NUMPY_CLIENT.arrays
        ('arrays', 'fitins.parameters')
    """

    name: str
    arrays: str
    config: str
    evaluated_arrays: str
    evaluated_config: str

    @property
    def to_evaluate(self) -> "RecordNames":
        """The same names, with the records of an evaluation as `arrays` and `config`."""
        return replace(self, arrays=self.evaluated_arrays, config=self.evaluated_config)


MESSAGE_API = RecordNames(
    name="message-api", arrays="arrays", config="config", evaluated_arrays="arrays", evaluated_config="config"
)
NUMPY_CLIENT = RecordNames(
    name="numpy-client",
    arrays="fitins.parameters",
    config="fitins.config",
    evaluated_arrays="evaluateins.parameters",
    evaluated_config="evaluateins.config",
)


def client_query(node_id: int, message_type: str) -> Message:
    """Return the client query to a node: a `query` message, or a `train` message without a model for apps without queries."""
    return Message(RecordDict({KEY: ConfigRecord({"protocol": PROTOCOL})}), node_id, message_type)


def is_client_query(message: Message) -> bool:
    """Return whether a message is a client query."""
    return KEY in records_of(message.content, ConfigRecord) and not records_of(message.content, ArrayRecord)


def train_message(
    node_id: int, record_names: RecordNames, arrays: ArrayRecord, config: Mapping[str, Any], instruction: Instruction
) -> Message:
    """Return the request to one node to train in one round."""
    settings = ConfigRecord({**config, "server-round": instruction.server_round, KEY: instruction.to_json()})
    sent = with_vectors(arrays, instruction.ask.vectors)
    content = RecordDict({record_names.arrays: sent, record_names.config: settings})
    return Message(content, node_id, "train", group_id=str(instruction.server_round))


def evaluate_message(node_id: int, record_names: RecordNames, *arguments: Any) -> Message:
    """Return the request to one node to evaluate the model in one round; `arguments` are those of `train_message`."""
    message = train_message(node_id, record_names.to_evaluate, *arguments)
    message.metadata.message_type = "evaluate"
    return message


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return the records of one kind, by name."""
    # `array_records` and the like make reference cycles, which keep the arrays in memory until the garbage collector runs.
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def instruction_of(config: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> Instruction:
    """Return the instruction inside a config record or a NumPyClient's config, with the vectors of its request.

    The vectors are the last of the message's `arrays`. Without `arrays`, a request with vectors is refused.

    Raises:
        ValueError: if there is no instruction. A client of this package replies to no other server, as none would name a clip.
    """
    text = config.get(KEY)
    if not isinstance(text, str):
        raise ValueError(f"config has no {KEY!r}: this client works under a flower_dp strategy only")
    return Instruction.from_json(text, arrays)


def arrays_of(content: RecordDict) -> ArrayRecord:
    """Return the only array record of a message.

    Raises:
        ValueError: if there is none or more than one.
    """
    if len(records := records_of(content, ArrayRecord)) != 1:
        raise ValueError(f"message has {len(records)} array records: must be 1")
    return next(iter(records.values()))


def check_content(content: RecordDict, *, most_entries: int, most_bytes: int) -> int:
    """Return the bytes of arrays and text of a reply, before anything in it is parsed.

    Raises:
        ValueError: if the reply has more records, entries or bytes than an honest one can have.
    """
    entries = sum(len(record) for record in content.values()) if len(content) <= _MOST_RECORDS else 0
    if len(content) > _MOST_RECORDS or entries > most_entries:
        raise ValueError(f"message has {len(content)} records, {entries} entries: at most {_MOST_RECORDS} and {most_entries}")
    size = content_bytes(content)
    if size > most_bytes:
        raise ValueError(f"message has {size} bytes: at most {most_bytes}")
    return size


def answer_of(content: RecordDict, asked: Sequence[str]) -> ReplyHeader | None:
    """Return the reply header of a client of this package; None for a stock client's reply.

    Raises:
        ValueError: if the header is malformed.
    """
    texts = [record[KEY] for record in records_of(content, ConfigRecord).values() if KEY in record]
    if not texts:
        return None
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError(f"reply has {len(texts)} entries {KEY!r}: must be one text")
    return ReplyHeader.from_json(texts[0], asked)


def refusal_reply(message: Message, refusal: Refusal) -> Message:
    """Return the reply of a node that declines a request as a whole."""
    return Message(RecordDict({KEY: ConfigRecord({REFUSED: refusal.to_json()})}), reply_to=message)


def refusal_of(content: RecordDict) -> Refusal | None:
    """Return the refusal of a whole node; None for any other reply.

    Raises:
        ValueError: if a refusal is malformed.
    """
    for record in records_of(content, ConfigRecord).values():
        if isinstance(text := record.get(REFUSED), str):
            return Refusal.from_json(text)
    return None


def reported_metrics(content: RecordDict) -> dict[str, float]:
    """Return the numbers in the metric and config records of a stock client's reply to an evaluation, by name."""
    metrics: dict[str, float] = {}
    records: list[Any] = [*records_of(content, MetricRecord).values(), *records_of(content, ConfigRecord).values()]
    for record in records:
        metrics |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return metrics


def content_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's arrays, texts and numbers, names included."""
    entries = [(name, value) for record in content.values() for name, value in record.items()]
    return sum(len(name) + (len(value.data) if isinstance(value, Array) else _value_bytes(value)) for name, value in entries)


def _value_bytes(value: Any) -> int:
    if isinstance(value, list):
        return 8 * len(value)  # whatever it holds: a walk through a forged list of texts would cost too much
    return len(value) if isinstance(value, str | bytes) else 8
