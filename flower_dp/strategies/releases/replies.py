"""The replies of the nodes in a round: checked, and added up as one row each.

A refused reply counts as if its clients had sent zeros: the sum lacks it, the denominator does not change.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from flower_dp import wire
from flower_dp.core import checks, compression
from flower_dp.core.stored import stored
from flower_dp.strategies.releases.limits import Limits

log = logging.getLogger("flwr")

# Codes of error replies in which the app itself raised an error: unknown, and an exception in the ClientApp.
APP_RAISED = (0, 2)
# The longest text of an exception in a reply that is kept.
MOST_REASON = 500
# Of a reply, besides a stock client's arrays: its metrics, for example.
_MOST_ENTRIES = 1000


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Missing:
    """The number of requested updates that do not count, by reason.

    Attributes:
        silent: the node did not reply; it has left, or is too slow.
        failed: training failed or diverged, or the app raised an error.
        declined: the client refused the instruction, because of its policy, its budget or its version of this package.
        rejected: the server refused the reply: it was malformed, not finite, or larger than any honest one.
    """

    silent: int = 0
    failed: int = 0
    declined: int = 0
    rejected: int = 0

    @property
    def total(self) -> int:
        """The number for all reasons together."""
        return self.silent + self.failed + self.declined + self.rejected

    def __add__(self, other: "Missing") -> "Missing":
        return Missing(
            silent=self.silent + other.silent,
            failed=self.failed + other.failed,
            declined=self.declined + other.declined,
            rejected=self.rejected + other.rejected,
        )

    def __str__(self) -> str:
        counts = {
            "from nodes that did not reply": self.silent,
            "whose training failed or diverged": self.failed,
            "declined by clients": self.declined,
            "refused by the server": self.rejected,
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


@dataclass(slots=True, kw_only=True)
class Collected:
    """The sum of a round's accepted updates, and the clients whose updates are in it.

    Attributes:
        seeded: whether the server's own noise is from a fixed seed, as in a test; the run is not private then, and replies with
            noise from a fixed seed count.
        seeded_clients: whether a client has said that its noise is from a fixed seed, and was refused for that.
        fresh: clients that had kept nothing from an earlier round, in methods whose clients keep a vector.
    """

    total: np.ndarray
    clients: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    missing: Missing = field(default_factory=Missing)
    metrics: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    payload_bytes: int = 0
    seeded: bool = False
    seeded_clients: bool = False
    fresh: list[str] = field(default_factory=list)

    def check_seed(self, seeded_noise: bool) -> None:
        """Refuse a reply with noise from a fixed seed, which is no noise, as one without its share of the noise.

        Raises:
            ValueError: if it is one, and this is no test with a fixed seed of the server's own.
        """
        if seeded_noise and not self.seeded:
            self.seeded_clients = True
            raise ValueError("its noise is from a fixed seed (noise_seed), which is for tests only")

    def leave_out(self, node: int, names: tuple[str, ...], reason: str, missing: Missing) -> None:
        """Record why a node's clients do not count."""
        reason = checks.one_line(reason, most=MOST_REASON)
        log.warning("node %s: %s", node, reason)
        self.refused |= dict.fromkeys(names, reason)
        self.missing += missing

    def add_refused(self, refused: Mapping[str, str]) -> None:
        """Record the clients that a node itself has left out."""
        self.refused |= {name: checks.one_line(reason, most=MOST_REASON) for name, reason in refused.items()}
        failed = sum(reason.startswith(wire.FAILED) for reason in refused.values())
        self.missing += Missing(failed=failed, declined=len(refused) - failed)


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
    sent: Sequence[Message],
    limits: Limits,
    stock: StockReply | None,
    seeded: bool = False,
) -> Collected:
    """Add up the replies of a round; exactly, where they lie on a lattice.

    Args:
        replies: the replies as received, including errors.
        asked: the clients that were asked, by node.
        sent: the messages, with the ids that Flower gave them.
        limits: those that the server enforces.
        stock: how replies are read, where the nodes are stock clients. None: a reply without an answer is refused, since its
            sender has not followed the instruction and may have added no noise.
        seeded: whether the server's own noise is from a fixed seed: see `Collected`.
    """
    collected = Collected(total=np.zeros(limits.length, np.float64), seeded=seeded)
    for node, names, reply in _answering(collected, replies, asked, sent):
        try:
            _add(collected, reply, names, limits, stock)
        except Exception as error:  # a forged reply may raise any error, and must not end the run
            collected.leave_out(node, names, f"reply refused: {error}", Missing(rejected=len(names)))
    return collected


def _answering(
    collected: Collected, replies: Iterable[Message], asked: Mapping[int, tuple[str, ...]], sent: Sequence[Message]
) -> Iterator[tuple[int, tuple[str, ...], Message]]:
    """Yield every node that replies without an error, its clients and its reply; record the others.

    A reply counts by the message that it answers. A late one to an earlier message may be of other clients of the node, clipped
    and noised for another round; and whom a reply is from is what the device says, which Flower's grid passes on as it is.
    """
    nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    # Without the messages that went through no grid, as in a loop of a test: they have no id.
    ids = {node: message_id for message_id, node in nodes.items() if message_id}
    open_nodes = dict(asked)
    for reply in replies:
        node, answers = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
        if reply.has_error() and node not in asked:
            # The SuperLink replies for a node that has left.
            node = nodes.get(answers, node)
        names = open_nodes.pop(node, None) if ids.get(node, answers) == answers else None
        if names is None:
            log.warning("node %s: reply refused: it answers no message to it of this round, or one that has a reply", node)
        elif reply.has_error():
            _leave_out_error(collected, node, names, reply)
        else:
            yield node, names, reply
    for node, names in open_nodes.items():
        collected.leave_out(node, names, "no reply", Missing(silent=len(names)))


def _leave_out_error(collected: Collected, node: int, names: tuple[str, ...], reply: Message) -> None:
    counts = _end_of(reply.error.reason)
    if reply.error.code not in APP_RAISED:
        collected.leave_out(node, names, f"no reply: {counts}", Missing(silent=len(names)))
    elif f"{wire.DECLINED}: " in counts:
        collected.leave_out(node, names, f"error reply: {counts}", Missing(declined=len(names)))
    else:
        collected.leave_out(node, names, f"error reply: {counts}", Missing(failed=len(names)))


def _add(collected: Collected, reply: Message, names: tuple[str, ...], limits: Limits, stock: StockReply | None) -> None:
    """Add one node's reply, or raise ValueError and change nothing."""
    content, length = reply.content, limits.length
    arrays, others = (stock.num_arrays, stock.num_bytes) if stock else (0, 0)
    # Twice the vector in float64, and what an array's name and header take.
    most = 16 * length + others + 2048 * arrays + 6 * wire.most_answer_characters(len(names))
    num_bytes = wire.check_content(content, most_entries=arrays + _MOST_ENTRIES, most_bytes=most)
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
        record = wire.arrays_of(content) if content.array_records else ArrayRecord()
        update = compression.decode(wire.payload_of(record, answer.payload, length), length, mask=limits.mask)
    if clients:
        collected.total += limits.accepted(update, clients)
    collected.num_bytes += num_bytes
    collected.payload_bytes += update.nbytes if answer is None else answer.payload_bytes
    collected.clients.extend(clients)
    if answer is not None:
        collected.add_refused(answer.refused)
        collected.fresh.extend(name for name in answer.fresh if name not in answer.refused)
        for name, value in answer.metrics.items():
            collected.metrics[name] = collected.metrics.get(name, 0.0) + value


def _end_of(reason: str | None) -> str:
    """Return the text of an exception, from the traceback that Flower's simulation sends."""
    tail = (reason or "")[-4 * MOST_REASON :]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1].rpartition(" Message: ")[2].removesuffix("'>") if len(lines) > 1 else tail
