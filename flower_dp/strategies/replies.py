"""Replies: what came back from the nodes of a round, checked, as one row each.

A refused reply counts as if its clients had sent zeros: the sum lacks it, the denominator does not change.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message

from flower_dp import compression, wire
from flower_dp.clipping import clip_l2
from flower_dp.vectors import Layout

log = logging.getLogger("flwr")


@dataclass(slots=True, kw_only=True)
class Collected:
    """The sum of a round's accepted updates, and who is in it."""

    total: np.ndarray
    clients: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    seeded_noise: bool = False


def collect(
    replies: Iterable[Message],
    *,
    asked: Mapping[int, tuple[str, ...]],
    vector: np.ndarray,
    layout: Layout,
    clip_norm: float | None,
) -> Collected:
    """Add up the replies of a round.

    Args:
        replies: as they came, errors among them.
        asked: the clients that were asked, by node.
        vector: the global model that was sent [d], float32.
        layout: its layout.
        clip_norm: L2 bound that the server enforces on every client's update; None where updates carry their own noise, so
            that only the client can have clipped.
    """
    collected = Collected(total=np.zeros(layout.size, np.float64))
    open_nodes = dict(asked)
    for reply in replies:
        node = reply.metadata.src_node_id
        names = open_nodes.pop(node, None)
        if names is None:
            log.warning("node %s: reply refused: it was not asked this round, or has replied already", node)
            continue
        try:
            if reply.has_error():
                raise ValueError(f"error reply: {_last_words(reply.error.reason)}")
            collected.num_bytes += wire.content_bytes(reply.content)
            _add(collected, reply, names, vector, layout, clip_norm)
        except Exception as error:  # whatever a forged reply may raise, it must not end the run
            log.warning("node %s: reply refused: %s", node, error)
            collected.refused |= dict.fromkeys(names, str(error))
    for node, names in open_nodes.items():
        log.warning("node %s: no reply", node)
        collected.refused |= dict.fromkeys(names, "no reply")
    return collected


def _add(
    collected: Collected,
    reply: Message,
    names: tuple[str, ...],
    vector: np.ndarray,
    layout: Layout,
    clip_norm: float | None,
) -> None:
    """Add one node's reply, or raise ValueError and change nothing."""
    record = wire.arrays_of(reply.content)
    answer = wire.answer_of(reply.content)
    if answer is None:
        update, clients = wire.model_vector(record, layout) - vector, names
    else:
        clients = answer.clients
        if not set(clients) | set(answer.refused) <= set(names):
            raise ValueError("answer names clients that were not asked")
        update = compression.decode(wire.payload_of(record, answer.payload, layout.size), layout.size)
    if not np.isfinite(update).all():
        raise ValueError("update has NaN or infinite entries")
    if answer is None and len(clients) != 1:
        raise ValueError("a stock client's reply can stand for one client only")
    if clients and clip_norm is not None:
        # Clients are not trusted to have clipped. A node's sum of n clipped updates is at most n clip norms long.
        update = clip_l2(update, len(clients) * clip_norm)
    if clients:
        collected.total += update
    collected.clients.extend(clients)
    collected.refused |= dict.fromkeys(set(names) - set(clients), "not in the node's answer")
    if answer is not None:
        collected.refused |= answer.refused
        collected.seeded_noise |= answer.seeded_noise
        for name, value in answer.metrics.items():
            collected.metrics[name] = collected.metrics.get(name, 0.0) + value


def _last_words(reason: str | None) -> str:
    """Return what an exception said, out of the traceback that Flower's simulation sends along."""
    lines = [line.strip() for line in (reason or "").splitlines() if line.strip()]
    return lines[-1].rpartition(" Message: ")[2].removesuffix("'>") if len(lines) > 1 else str(reason)
