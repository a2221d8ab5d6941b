"""One release's exchange with the nodes in a round: the messages out, and the sum of the replies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.core import clipping
from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.population.pulled import received
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.replies import Collected, StockReply, collect
from flower_dp.strategies.releases.round import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A round whose messages are out.

    Attributes:
        now: what was asked of whom.
        limits: those that the server enforces on the replies.
        sent: the messages, with the ids that Flower gave them.
        number: of the charge, among those of the release.
    """

    now: Round
    limits: Limits
    sent: list[Message]
    number: int


class Exchange(Protocol):
    """How the rows of a round's clients get to the server as one sum."""

    def messages(
        self, now: Round, known_clients: KnownClients, arrays: ArrayRecord, config: Mapping[str, Any], **extra: Any
    ) -> list[Message]:
        """Return the messages that begin the exchange, one a node.

        Args:
            now: what is asked of whom.
            known_clients: which app the nodes run.
            arrays: the model as it is sent.
            config: sent with it.
            extra: further fields of the instruction.
        """

    def replies(self, grid: Grid, messages: Iterable[Message], timeout: float) -> Iterable[Message]:
        """Run the exchange up to its last replies, and return these."""

    def total(self, asked: Asked, replies: Iterable[Message], *, seeded: bool) -> Collected:
        """Check the last replies and return their sum; an invalid one is left out, as if its clients had sent zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainExchange:
    """One message to every node, and one back with the sum of its clients' rows."""

    def messages(
        self, now: Round, known_clients: KnownClients, arrays: ArrayRecord, config: Mapping[str, Any], **extra: Any
    ) -> list[Message]:
        """Return one message for every node."""
        evaluates = now.ask.metrics is not None
        message = wire.evaluate_message if evaluates else wire.train_message
        arrays = wire.with_vectors(arrays, now.ask.vectors)  # one copy for all nodes
        return [
            message(
                node,
                known_clients.record_names,
                arrays,
                config,
                wire.Instruction(server_round=now.server_round, method=now.method, clients=names, ask=now.ask, **extra),
            )
            for node, names in now.asked.items()
        ]

    def replies(self, grid: Grid, messages: Iterable[Message], timeout: float) -> Iterable[Message]:
        """Send the messages and wait for the replies."""
        return received(grid, messages, timeout)

    def total(self, asked: Asked, replies: Iterable[Message], *, seeded: bool) -> Collected:
        """Check the replies and add them up."""
        now = asked.now
        return collect(
            replies,
            asked=now.asked,
            sent=asked.sent,
            limits=asked.limits,
            stock=_stock(now) if now.stock else None,
            seeded=seeded,
        )


def _stock(now: Round) -> StockReply:
    """Return how the reply of a stock client is read."""
    model, bounds, indicator = now.model, now.ask.metrics, now.ask.indicator
    if bounds is not None:
        return StockReply(read=lambda content: bounds.counted(wire.reported_metrics(content)))

    def row(content: RecordDict) -> np.ndarray:
        update = model.read(wire.arrays_of(content)) - model.vector
        if indicator is None:
            return np.asarray(update)
        return np.append(update, clipping.indicator(update, indicator.clip_norm, indicator.scale))

    return StockReply(read=row, num_arrays=len(model.names), num_bytes=model.frozen_bytes)
