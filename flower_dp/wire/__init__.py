"""The wire: vectors, payloads and instructions <-> Flower records and messages.

A train message carries the global model under the record names that its receiver reads (the Message API's or those of a
`NumPyClient`) and, inside the config record, one JSON string with the instruction. A reply carries payload arrays and one JSON
string, or a refusal alone; a reply with neither is a stock client's model. Nothing here trusts a sender: sizes are checked before
any memory is taken, and what is malformed raises a ValueError that says why.
"""

from flower_dp.wire.answer import (
    DECLINED,
    FAILED,
    LARGEST_METRIC,
    MOST_REASON,
    MOST_REASONS,
    REPEATED,
    Answer,
    Code,
    Refusal,
    most_answer_characters,
)
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
    records_of,
    refusal_of,
    refusal_reply,
    reported_metrics,
    train_message,
)
from flower_dp.wire.structs import BASE, KEY, PROTOCOL, REFUSED

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
    "REFUSED",
    "REPEATED",
    "Answer",
    "Ask",
    "Code",
    "Hosted",
    "Indicator",
    "Instruction",
    "Model",
    "OwnAsk",
    "Promise",
    "PublicMask",
    "RecordNames",
    "Refusal",
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
    "records_of",
    "refusal_of",
    "refusal_reply",
    "reported_metrics",
    "train_message",
    "with_vectors",
]
