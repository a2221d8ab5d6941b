"""One release's exchange with the nodes in a round: messages out, replies in, and the sum of the clients' rows.

The server adds up replies as they arrive, and drops them: it needs memory for one reply, whatever the number of nodes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, Message, Metadata, RecordDict
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.core import clipping
from flower_dp.strategies.releases.limits import ReplyLimits
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies, StockReply, collect

# Sends the messages of a further stage, with the time that the round has left, and yields the replies as they arrive.
More = Callable[[Iterable[Message]], Iterator[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """The common content of a round's messages; all of them share one record of arrays.

    Attributes:
        record_names: names of the records in which nodes look for the model.
        arrays: the model as it is sent.
        config: config record that is sent with the model.
        fields: further fields of the instruction.
    """

    record_names: wire.RecordNames
    arrays: ArrayRecord
    config: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to(self, node: int, names: tuple[str, ...], now: RoundRequest) -> Message:
        """Return the message that requests the rows of some clients from their node."""
        make = wire.train_message if now.ask.metrics is None else wire.evaluate_message
        fields = {"server_round": now.server_round, "method": now.method, **self.fields}
        instruction = wire.Instruction(clients=names, ask=now.ask, **fields)
        return make(node, self.record_names, self.arrays, self.config, instruction)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRound:
    """A round whose messages are out.

    Attributes:
        now: the request of the round.
        limits: limits that the server enforces on the replies.
        sent: metadata of the messages, without their content. The grid writes an id there when it sends a message.
        number: number of the charge, among those of the release.
        letter: common content, for messages of further stages.
        grid: grid that sends the messages.
    """

    now: RoundRequest
    limits: ReplyLimits
    sent: tuple[Metadata, ...]
    number: int
    letter: Letter
    grid: Grid


class Exchange(Protocol):
    """The way of the rows of a round's clients to the server, as one sum.

    It may have several stages. The charge of the round is in the log, and with a ledger on the disk, before the messages of
    the first stage are made. Data that
    one stage needs from another stay within `total`, or in the exchange for the round: the run's state has nothing of a round.
    """

    def messages(self, now: RoundRequest, letter: Letter) -> Iterable[Message]:
        """Return the messages of the first stage, one per node."""

    def total(self, asked: PendingRound, replies: Iterable[Message], more: More, *, seeded: bool) -> CollectedReplies:
        """Check replies and return their sum; an invalid one is left out, as if its clients had sent zeros.

        Args:
            asked: the open round.
            replies: replies to the first stage, as they arrive: each is added up, and dropped.
            more: function that sends a further stage.
            seeded: whether the server's own noise is from a fixed seed: see `CollectedReplies`.

        Raises:
            RoundDiscarded: if the stages give no sum.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainExchange:
    """One message to every node, and one back with the sum of its clients' rows."""

    def messages(self, now: RoundRequest, letter: Letter) -> list[Message]:
        """Return one message for every node."""
        letter = replace(letter, arrays=wire.with_vectors(letter.arrays, now.ask.vectors))  # one copy for all nodes
        return [letter.to(node, names, now) for node, names in now.asked.items()]

    def total(self, asked: PendingRound, replies: Iterable[Message], more: More, *, seeded: bool) -> CollectedReplies:
        """Check the replies and add them up."""
        now, stock = asked.now, _stock(asked.now) if asked.now.stock else None
        return collect(replies, asked=now.asked, sent=asked.sent, limits=asked.limits, stock=stock, seeded=seeded)


def _stock(now: RoundRequest) -> StockReply:
    """Return the format of a stock client's reply."""
    model, bounds, indicator = now.model, now.ask.metrics, now.ask.indicator
    if bounds is not None:
        return StockReply(read=lambda content: bounds.counted(wire.reported_metrics(content)))

    def row(content: RecordDict) -> np.ndarray:
        update = model.read(wire.arrays_of(content))
        update -= model.vector
        if indicator is None:
            return update
        return np.append(update, clipping.indicator(update, indicator.clip_norm, indicator.scale))

    return StockReply(read=row, num_arrays=len(model.names), num_bytes=model.frozen_bytes)
