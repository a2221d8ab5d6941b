"""The replies of the nodes in a round: checked, and added up as one row each.

A refused reply counts as if its clients had sent zeros: the sum lacks it, the denominator does not change.
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

# Codes of error replies in which the app itself raised an error: unknown, and an exception in the ClientApp.
APP_RAISED = (0, 2)
# The longest text of an exception in a reply that is kept.
MOST_REASON = 500
# Of a reply, besides a stock client's arrays: its metrics, for example.
_MOST_ENTRIES = 1000


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissingReplies:
    """The number of requested updates that do not count, by reason.

    Attributes:
        no_reply: the node did not reply; it has left, or is too slow.
        failed: training failed or diverged, or the app raised an error.
        declined: the client refused the instruction, because of its policy, its budget or its version of this package.
        rejected: the server refused the reply: it was malformed, not finite, or larger than any honest one.
    """

    no_reply: int = 0
    failed: int = 0
    declined: int = 0
    rejected: int = 0

    @property
    def total(self) -> int:
        """The number for all reasons together."""
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
        seeded: whether the server's own noise is from a fixed seed, as in a test; the run is not private then, and replies with
            noise from a fixed seed count.
        seeded_clients: whether a client has said that its noise is from a fixed seed, and was refused for that.
        fresh: clients that had kept nothing from an earlier round, in methods whose clients keep a vector.
        repeated: whether a client has said that its account has the reply already.
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
        """Refuse a reply with noise from a fixed seed, which is no noise, as one without its share of the noise.

        Raises:
            ValueError: if it is one, and this is no test with a fixed seed of the server's own.
        """
        if seeded_noise and not self.seeded:
            self.seeded_clients = True
            raise ValueError("its noise is from a fixed seed (noise_seed), which is for tests only")

    def leave_out(self, node: int, names: tuple[str, ...], reason: str, missing: MissingReplies) -> None:
        """Record why a node's clients do not count."""
        reason = checks.one_line(reason, most=MOST_REASON)
        log.warning("node %s: %s", node, reason)
        self.refused |= dict.fromkeys(names, reason)
        self.missing += missing

    def count(self, reply: "_Read") -> None:
        """Record the clients of an accepted reply, and what it says of them."""
        self.num_bytes += reply.num_bytes
        self.payload_bytes += reply.payload_bytes
        self.clients.extend(reply.clients)
        if (answer := reply.answer) is not None:
            self.add_refused(answer.refused)
            self.fresh.extend(name for name in answer.fresh if name not in answer.refused)
            for name, value in answer.metrics.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value

    def add_refused(self, refused: Mapping[str, wire.Refusal]) -> None:
        """Record the clients that a node itself has left out."""
        self.refused |= {name: checks.one_line(one.reason, most=MOST_REASON) for name, one in refused.items()}
        codes = [one.code for one in refused.values()]
        self.missing += MissingReplies(failed=codes.count(wire.FAILED), declined=len(codes) - codes.count(wire.FAILED))
        self.repeated |= wire.REPEATED in codes


@dataclass(frozen=True, slots=True, kw_only=True)
class StockReply:
    """How the reply of a stock client is read, which stands for one client and has no answer to its instruction.

    Attributes:
        read: its content -> the client's vector.
        num_arrays: how many arrays it has.
        num_bytes: how many bytes these have besides those of the vector, in double precision.
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
    """Add up the replies of a round as they arrive, and keep none. The result is the same in whatever order they arrive.

    On a lattice the sum is exact. Without one it is as if summed in twice the precision of float64, and rounded once.

    A reply counts by the message that it answers. A late one to an earlier message may be of other clients of the node, clipped
    and noised for another round; and whom a reply is from is what the device says, which Flower's grid passes on as it is.

    Args:
        replies: the replies as received, including errors.
        asked: the clients that were asked, by node.
        sent: ids and nodes of the messages.
        limits: those that the server enforces.
        stock: how replies are read, where the nodes are stock clients. None: a reply without an answer is refused, since its
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
            log.warning("node %s: reply refused: it answers no message to it of this round, or one that has a reply", node)
        elif reply.has_error():
            left_out[node] = _of_error(reply, len(names))
        else:
            try:
                read[node] = _add(collected, reply, names, limits, stock, rest)
            except Exception as error:  # a forged reply may raise any error, and must not end the run
                left_out[node] = f"reply refused: {error}", MissingReplies(rejected=len(names))
        del reply  # before the next one arrives
    if rest is not None:
        collected.total += rest
    for node, names in asked.items():
        if isinstance(one := read.get(node), wire.Refusal):
            log.warning("node %s: %s", node, checks.one_line(f"{one.code}: {one.reason}", most=MOST_REASON))
            collected.add_refused(dict.fromkeys(names, one))
        elif one is not None:
            collected.count(one)
        elif node in left_out:
            collected.leave_out(node, names, *left_out[node])
    for node, names in open_nodes.left.items():
        collected.leave_out(node, names, "no reply", MissingReplies(no_reply=len(names)))
    return collected


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What was read of an accepted reply, but for its vector, which is in the sum."""

    clients: tuple[str, ...]
    num_bytes: int
    payload_bytes: int
    answer: wire.ReplyHeader | None


class _OpenNodes:
    """The nodes of a round that have not replied yet.

    Attributes:
        left: their clients.
    """

    def __init__(self, asked: Mapping[int, tuple[str, ...]], sent: Sequence[Metadata]) -> None:
        self.left, self._asked = dict(asked), asked
        # A grid may write a message's id there when it sends it, which may be when the first reply is awaited.
        self._sent = {metadata.dst_node_id: metadata for metadata in sent}

    def closed_by(self, reply: Message) -> tuple[int, tuple[str, ...] | None]:
        """Return the node that replies, and its clients; None if the reply answers no message that is open."""
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
    """Add one node's vector, and return what else its reply has, or its refusal; or raise ValueError and change nothing."""
    content, length = reply.content, limits.length
    arrays, others = (stock.num_arrays, stock.num_bytes) if stock else (0, 0)
    # Twice the vector in float64, and what an array's name and header take.
    most = 16 * length + others + 2048 * arrays + 6 * wire.most_answer_characters(len(names))
    num_bytes = wire.check_content(content, most_entries=arrays + _MOST_ENTRIES, most_bytes=most)
    if (refusal := wire.refusal_of(content)) is not None:
        return refusal
    answer, clients = wire.answer_of(content, names), names
    if answer is None:
        if stock is None:
            raise ValueError("it has no answer to its instruction, though the node has named its clients")
        if len(names) != 1:
            raise ValueError("a stock client's reply can stand for one client only")
        update = stock.read(content)
    else:
        collected.check_seed(answer.seeded_noise)
        clients = tuple(name for name in names if name not in answer.refused)
        # A short vector is inside the answer, without an array.
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
