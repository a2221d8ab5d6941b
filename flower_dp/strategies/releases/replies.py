"""The replies of the nodes in a round: checked, and added up as one row each.

A refused reply counts as if its clients had sent zeros: the sum lacks it, and the denominator does not change.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message, Metadata, RecordDict

from flower_dp import wire
from flower_dp.core import checks, compression
from flower_dp.core.serialization import serializable
from flower_dp.strategies.releases.limits import ReplyLimits

log = logging.getLogger("flwr")

# Flower's codes of error replies in which the app itself raised an error: unknown, and an exception in the ClientApp.
APP_RAISED = (0, 2)
# Characters kept of the text of an exception in a reply.
MOST_REASON = 500
# Entries of a reply besides a stock client's arrays, such as its metrics.
_MOST_ENTRIES = 1000


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissingReplies:
    """The number of requested updates that do not count, by reason.

    Attributes:
        no_reply: updates without a reply: the node has left, or is too slow.
        failed: updates whose training failed or diverged, or whose app raised an error.
        declined: updates that the client declined, because of its policy, its budget or its version of this package.
        rejected: updates that the server refused: malformed, not finite, or larger than any honest one.
    """

    no_reply: int = 0
    failed: int = 0
    declined: int = 0
    rejected: int = 0

    @property
    def total(self) -> int:
        """The number of updates for all reasons together."""
        return sum(asdict(self).values())

    def __add__(self, other: "MissingReplies") -> "MissingReplies":
        return MissingReplies(**{name: count + getattr(other, name) for name, count in asdict(self).items()})

    def __str__(self) -> str:
        counts = {
            "from nodes that did not reply": self.no_reply,
            "whose training failed or diverged": self.failed,
            "declined by clients": self.declined,
            "refused by the server": self.rejected,
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


@dataclass(slots=True, kw_only=True)
class CollectedReplies:
    """The sum of a round's accepted updates, and the clients whose updates are in it.

    Attributes:
        seeded: whether the server's own noise is from a fixed seed, as in a test. The run is not private then, and replies with
            noise from a fixed seed count.
        seeded_clients: whether a client reported noise from a fixed seed, and was refused for that.
        fresh: clients that had no vector from an earlier round, in methods whose clients keep one.
        repeated: whether a client reported that its account has the reply already.
    """

    total: np.ndarray
    clients: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    missing: MissingReplies = field(default_factory=MissingReplies)
    metrics: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    payload_bytes: int = 0
    seeded: bool = False
    seeded_clients: bool = False
    fresh: list[str] = field(default_factory=list)
    repeated: bool = False

    def check_seed(self, seeded_noise: bool) -> None:
        """Refuse a reply with noise from a fixed seed, which is no noise, like a reply without its noise share.

        Raises:
            ValueError: if the reply has such noise, unless the server's own noise has a fixed seed too, as in a test.
        """
        if seeded_noise and not self.seeded:
            self.seeded_clients = True
            raise ValueError("its noise is from a fixed seed (noise_seed), which is for tests only")

    def leave_out(self, node: int, names: tuple[str, ...], reason: str, missing: MissingReplies) -> None:
        """Record why a node's clients do not count."""
        reason = checks.one_line(reason, most=MOST_REASON)
        log.warning("Node %s: %s", node, reason)
        self.refused |= dict.fromkeys(names, reason)
        self.missing += missing

    def count(self, reply: "_Read") -> None:
        """Record the clients of an accepted reply, and its report on them."""
        self.num_bytes += reply.num_bytes
        self.payload_bytes += reply.payload_bytes
        self.clients.extend(reply.clients)
        if (answer := reply.answer) is not None:
            self.add_refused(answer.refused)
            self.fresh.extend(name for name in answer.fresh if name not in answer.refused)
            for name, value in answer.metrics.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value

    def add_refused(self, refused: Mapping[str, wire.Refusal]) -> None:
        """Record the clients that the node itself left out."""
        self.refused |= {name: checks.one_line(refusal.reason, most=MOST_REASON) for name, refusal in refused.items()}
        codes = [refusal.code for refusal in refused.values()]
        self.missing += MissingReplies(failed=codes.count(wire.FAILED), declined=len(codes) - codes.count(wire.FAILED))
        self.repeated |= wire.REPEATED in codes


@dataclass(frozen=True, slots=True, kw_only=True)
class StockReply:
    """The format of a stock client's reply, which stands for one client and has no reply header.

    Attributes:
        read: function from the content of the reply to the client's vector.
        num_arrays: number of arrays in the reply.
        num_bytes: bytes of these arrays beyond those of the vector, in double precision.
    """

    read: Callable[[RecordDict], np.ndarray]
    num_arrays: int = 0
    num_bytes: int = 0


def collect(
    replies: Iterable[Message],
    *,
    asked: Mapping[int, tuple[str, ...]],
    sent: Sequence[Metadata],
    limits: ReplyLimits,
    stock: StockReply | None,
    seeded: bool = False,
) -> CollectedReplies:
    """Add up the replies of a round as they arrive, and keep none. The result does not depend on the order of arrival.

    On a lattice the sum is exact. Without one it is as if summed in twice the precision of float64, and rounded once.

    A reply counts only for the message that it answers. A late reply to an earlier message may be from other clients of the node,
    clipped and noised for another round. The sender of a reply is only what the device claims: Flower's grid passes it on
    unchecked.

    Args:
        replies: the replies as received, including errors.
        asked: the cohort, by node.
        sent: ids and nodes of the messages.
        limits: limits that the server enforces.
        stock: format of the replies, if the nodes are stock clients. None: the server refuses a reply without a header, since its
            sender has not followed the instruction and may have added no noise.
        seeded: whether the server's own noise is from a fixed seed: see `CollectedReplies`.
    """
    collected = CollectedReplies(total=np.zeros(limits.length, np.float64), seeded=seeded)
    rest = None if limits.step else np.zeros(limits.length, np.float64)
    open_nodes, left_out = _OpenNodes(asked, sent), dict[int, tuple[str, MissingReplies]]()
    read: dict[int, _Read | wire.Refusal] = {}
    for reply in replies:
        node, names = open_nodes.closed_by(reply)
        if names is None:
            log.warning("Node %s: reply refused: it answers no message of this round to that node, or one with a reply", node)
        elif reply.has_error():
            left_out[node] = _of_error(reply, len(names))
        else:
            try:
                read[node] = _add(collected, reply, names, limits, stock, rest)
            except Exception as error:  # a forged reply may raise any error, and must not end the run
                left_out[node] = f"reply refused: {error}", MissingReplies(rejected=len(names))
        del reply  # so that memory holds one reply at a time
    if rest is not None:
        collected.total += rest
    for node, names in asked.items():
        if isinstance(reading := read.get(node), wire.Refusal):
            log.warning("Node %s: %s", node, checks.one_line(f"{reading.code}: {reading.reason}", most=MOST_REASON))
            collected.add_refused(dict.fromkeys(names, reading))
        elif reading is not None:
            collected.count(reading)
        elif node in left_out:
            collected.leave_out(node, names, *left_out[node])
    for node, names in open_nodes.left.items():
        collected.leave_out(node, names, "no reply", MissingReplies(no_reply=len(names)))
    return collected


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The content of an accepted reply, without its vector, which is in the sum."""

    clients: tuple[str, ...]
    num_bytes: int
    payload_bytes: int
    answer: wire.ReplyHeader | None


class _OpenNodes:
    """The nodes of a round that have not replied yet.

    Attributes:
        left: clients of these nodes, by node.
    """

    def __init__(self, asked: Mapping[int, tuple[str, ...]], sent: Sequence[Metadata]) -> None:
        self.left, self._asked = dict(asked), asked
        # The metadata themselves, not their ids: a grid may set an id only when it sends, or when the first reply is awaited.
        self._sent = {metadata.dst_node_id: metadata for metadata in sent}

    def closed_by(self, reply: Message) -> tuple[int, tuple[str, ...] | None]:
        """Return the node that replies, and its clients; None if the reply answers no open message."""
        node, answers = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
        if reply.has_error() and node not in self._asked:
            # The SuperLink replies for a node that has left.
            node = next((to for to, metadata in self._sent.items() if metadata.message_id == answers != ""), node)
        number = self._sent[node].message_id if node in self._sent else answers
        return node, self.left.pop(node, None) if number == answers else None


def _of_error(reply: Message, num_clients: int) -> tuple[str, MissingReplies]:
    """Return why the clients of an error reply do not count."""
    counts = _end_of(reply.error.reason)
    if reply.error.code not in APP_RAISED:
        return f"no reply: {counts}", MissingReplies(no_reply=num_clients)
    return f"error reply: {counts}", MissingReplies(failed=num_clients)


def _add(
    collected: CollectedReplies,
    reply: Message,
    names: tuple[str, ...],
    limits: ReplyLimits,
    stock: StockReply | None,
    rest: np.ndarray | None,
) -> _Read | wire.Refusal:
    """Add one node's vector; return the rest of its reply, or its refusal; or raise ValueError and change nothing."""
    content, length = reply.content, limits.length
    arrays, others = (stock.num_arrays, stock.num_bytes) if stock else (0, 0)
    # A bound against a reply that exhausts the server's memory, checked before anything is parsed. 16 bytes per coordinate: a
    # vector in float64, twice. 2048 bytes per array: its name and header. 6 per character of the header: a JSON \uXXXX.
    most = 16 * length + others + 2048 * arrays + 6 * wire.most_answer_characters(len(names))
    num_bytes = wire.check_content(content, most_entries=arrays + _MOST_ENTRIES, most_bytes=most)
    if (refusal := wire.refusal_of(content)) is not None:
        return refusal
    answer, clients = wire.answer_of(content, names), names
    if answer is None:
        if stock is None:
            raise ValueError("it has no header, although the node has named its clients")
        if len(names) != 1:
            raise ValueError("a stock client's reply can stand for one client only")
        update = stock.read(content)
    else:
        collected.check_seed(answer.seeded_noise)
        clients = tuple(name for name in names if name not in answer.refused)
        # A short vector is inside the header, without an array.
        record = wire.arrays_of(content) if wire.records_of(content, ArrayRecord) else ArrayRecord()
        update = compression.decode(wire.payload_of(record, answer.payload, length), length, mask=limits.mask)
    if clients:
        limits.add(collected.total, update, clients, rest=rest)
    payload_bytes = update.nbytes if answer is None else answer.payload_bytes
    return _Read(clients=clients, num_bytes=num_bytes, payload_bytes=payload_bytes, answer=answer)


def _end_of(reason: str | None) -> str:
    """Return the text of an exception, from the traceback that Flower's simulation sends."""
    tail = (reason or "")[-4 * MOST_REASON :]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1].rpartition(" Message: ")[2].removesuffix("'>") if len(lines) > 1 else tail
