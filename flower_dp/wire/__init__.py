"""The wire: vectors, payloads and instructions <-> Flower records and messages.

A train message carries the global model under the record names that its receiver reads (the Message API's or those of a
`NumPyClient`) and, inside the config record, one JSON string with the instruction. A reply carries payload arrays and one JSON
string; a reply without that string is a stock client's model. Nothing here trusts a sender: sizes are checked before any
memory is taken, and every refusal is a ValueError that says why.
"""

from flower_dp.wire.answer import DECLINED, FAILED, LARGEST_METRIC, MOST_REASON, MOST_REASONS, Answer, most_answer_characters
from flower_dp.wire.arrays import Model, numpy_arrays, payload_of, with_vectors
from flower_dp.wire.ask import Ask, Indicator, OwnAsk, Promise
from flower_dp.wire.hosted import Hosted, hosted_of
from flower_dp.wire.instruction import EVALUATION, Instruction
from flower_dp.wire.mask import PublicMask, RoundMask, SentMask
from flower_dp.wire.messages import (
    MESSAGE_API,
    NUMPY_CLIENT,
    RecordNames,
    answer_of,
    arrays_of,
    check_content,
    client_query,
    content_bytes,
    evaluate_message,
    instruction_of,
    is_client_query,
    reported_metrics,
    train_message,
)
from flower_dp.wire.structs import BASE, KEY, PROTOCOL

__all__ = [
    "BASE",
    "DECLINED",
    "EVALUATION",
    "FAILED",
    "KEY",
    "LARGEST_METRIC",
    "MESSAGE_API",
    "MOST_REASON",
    "MOST_REASONS",
    "NUMPY_CLIENT",
    "PROTOCOL",
    "Answer",
    "Ask",
    "Hosted",
    "Indicator",
    "Instruction",
    "Model",
    "OwnAsk",
    "Promise",
    "PublicMask",
    "RecordNames",
    "RoundMask",
    "SentMask",
    "answer_of",
    "arrays_of",
    "check_content",
    "client_query",
    "content_bytes",
    "evaluate_message",
    "hosted_of",
    "instruction_of",
    "is_client_query",
    "most_answer_characters",
    "numpy_arrays",
    "payload_of",
    "reported_metrics",
    "train_message",
    "with_vectors",
]
