"""The plain exchange: one message to every node, and one back."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import Message, RecordDict

from flower_dp import wire
from flower_dp.core import clipping
from flower_dp.strategies.exchange import Asked, Letter, More
from flower_dp.strategies.releases.release import Round
from flower_dp.strategies.releases.replies import Collected, StockReply, collect


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainExchange:
    """One message to every node, and one back with the sum of its clients' rows."""

    def messages(self, now: Round, letter: Letter) -> list[Message]:
        """Return one message for every node."""
        letter = replace(letter, arrays=wire.with_vectors(letter.arrays, now.ask.vectors))  # one copy for all nodes
        return [letter.to(node, names, now) for node, names in now.asked.items()]

    def total(self, asked: Asked, replies: Iterable[Message], more: More, *, seeded: bool) -> Collected:
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
        update = model.read(wire.arrays_of(content))
        update -= model.vector
        if indicator is None:
            return update
        return np.append(update, clipping.indicator(update, indicator.clip_norm, indicator.scale))

    return StockReply(
        read=row,
        num_arrays=len(model.names),
        num_bytes=model.frozen_bytes,
    )
