"""The wire: vectors, payloads and instructions <-> Flower records and messages.

A train message carries the global model, and the instruction as one JSON string in its config record. Record names are those
that the receiver reads: the Message API's or those of a `NumPyClient`. A reply carries payload arrays and one JSON string, or a
refusal alone. A reply with neither is a stock client's model. No sender is trusted: this package checks sizes before it takes
any memory, and raises a ValueError for malformed content.
"""

from flower_dp.wire.answer import DECLINED as DECLINED
from flower_dp.wire.answer import FAILED as FAILED
from flower_dp.wire.answer import LARGEST_METRIC as LARGEST_METRIC
from flower_dp.wire.answer import MOST_REASON as MOST_REASON
from flower_dp.wire.answer import MOST_REASONS as MOST_REASONS
from flower_dp.wire.answer import REPEATED as REPEATED
from flower_dp.wire.answer import Code as Code
from flower_dp.wire.answer import Refusal as Refusal
from flower_dp.wire.answer import ReplyHeader as ReplyHeader
from flower_dp.wire.answer import most_answer_characters as most_answer_characters
from flower_dp.wire.arrays import Model as Model
from flower_dp.wire.arrays import numpy_arrays as numpy_arrays
from flower_dp.wire.arrays import payload_of as payload_of
from flower_dp.wire.arrays import with_vectors as with_vectors
from flower_dp.wire.ask import Indicator as Indicator
from flower_dp.wire.ask import LocalRequest as LocalRequest
from flower_dp.wire.ask import Promise as Promise
from flower_dp.wire.ask import ReleaseRequest as ReleaseRequest
from flower_dp.wire.ask import Separation as Separation
from flower_dp.wire.hosted import HostedClients as HostedClients
from flower_dp.wire.hosted import hosted_of as hosted_of
from flower_dp.wire.instruction import EVALUATION as EVALUATION
from flower_dp.wire.instruction import Instruction as Instruction
from flower_dp.wire.mask import PublicMask as PublicMask
from flower_dp.wire.mask import RoundMask as RoundMask
from flower_dp.wire.mask import SentMask as SentMask
from flower_dp.wire.messages import MESSAGE_API as MESSAGE_API
from flower_dp.wire.messages import NUMPY_CLIENT as NUMPY_CLIENT
from flower_dp.wire.messages import RecordNames as RecordNames
from flower_dp.wire.messages import answer_of as answer_of
from flower_dp.wire.messages import arrays_of as arrays_of
from flower_dp.wire.messages import check_content as check_content
from flower_dp.wire.messages import client_query as client_query
from flower_dp.wire.messages import content_bytes as content_bytes
from flower_dp.wire.messages import evaluate_message as evaluate_message
from flower_dp.wire.messages import instruction_of as instruction_of
from flower_dp.wire.messages import is_client_query as is_client_query
from flower_dp.wire.messages import records_of as records_of
from flower_dp.wire.messages import refusal_of as refusal_of
from flower_dp.wire.messages import refusal_reply as refusal_reply
from flower_dp.wire.messages import reported_metrics as reported_metrics
from flower_dp.wire.messages import train_message as train_message
from flower_dp.wire.structs import BASE as BASE
from flower_dp.wire.structs import KEY as KEY
from flower_dp.wire.structs import PROTOCOL as PROTOCOL
from flower_dp.wire.structs import REFUSED as REFUSED
