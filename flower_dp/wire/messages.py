"""Whole messages: train messages and replies, under the record names of the Message API or of a `NumPyClient`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flower_dp.wire.answer import Answer
from flower_dp.wire.arrays import with_vectors
from flower_dp.wire.instruction import Instruction
from flower_dp.wire.structs import KEY, PROTOCOL

# Records in a message: an honest one has fewer.
_MOST_RECORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordNames:
    """Names of the records in which a client looks for the model and the configuration, to train and to evaluate.

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
        """These record names, with those of an evaluation as `arrays` and `config`."""
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
    """Return the question whom a node hosts: a `query`, or a `train` message without a model for an app that answers none."""
    return Message(RecordDict({KEY: ConfigRecord({"protocol": PROTOCOL})}), node_id, message_type)


def is_client_query(message: Message) -> bool:
    """Tell whether a message asks whom this node hosts."""
    return KEY in message.content.config_records and not message.content.array_records


def train_message(
    node_id: int, record_names: RecordNames, arrays: ArrayRecord, config: Mapping[str, Any], instruction: Instruction
) -> Message:
    """Return the message that asks one node to train in one round."""
    return _message("train", node_id, record_names, arrays, config, instruction)


def evaluate_message(
    node_id: int, record_names: RecordNames, arrays: ArrayRecord, config: Mapping[str, Any], instruction: Instruction
) -> Message:
    """Return the message that asks one node to evaluate the model in one round."""
    return _message("evaluate", node_id, record_names.to_evaluate, arrays, config, instruction)


def _message(
    kind: str, node_id: int, record_names: RecordNames, arrays: ArrayRecord, config: Mapping[str, Any], instruction: Instruction
) -> Message:
    settings = ConfigRecord({**config, "server-round": instruction.server_round, KEY: instruction.to_json()})
    sent = with_vectors(arrays, instruction.ask.vectors)
    content = RecordDict({record_names.arrays: sent, record_names.config: settings})
    return Message(content, node_id, kind, group_id=str(instruction.server_round))


def instruction_of(config: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> Instruction:
    """Return the instruction inside a config record or a NumPyClient's config, with the vectors of its ask.

    They are the last of the message's `arrays`; without these, as for a client that works with no vectors, they are refused.

    Raises:
        ValueError: if there is none; a client of this package answers no other server, since nothing would tell it the clip.
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


def reported_metrics(content: RecordDict) -> dict[str, float]:
    """Return all numbers of a stock client's reply to an evaluation, by name: those of its metric and config records."""
    metrics: dict[str, float] = {}
    records: list[Any] = [*content.metric_records.values(), *content.config_records.values()]
    for record in records:
        metrics |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return metrics


def content_bytes(content: RecordDict) -> int:
    """Return how many bytes of arrays, text and numbers a message carries, names included."""
    arrays = sum(len(name) + len(array.data) for record in content.array_records.values() for name, array in record.items())
    settings = sum(
        len(name) + _value_bytes(value) for record in content.config_records.values() for name, value in record.items()
    )
    numbers = sum(len(name) + _value_bytes(value) for record in content.metric_records.values() for name, value in record.items())
    return arrays + settings + numbers


def _value_bytes(value: Any) -> int:
    if isinstance(value, list):
        return 8 * len(value)  # whatever is in it: a forged list of texts is not worth the walk
    return len(value) if isinstance(value, str | bytes) else 8
