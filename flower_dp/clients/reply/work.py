"""The work of a node's clients in one round, and the exact sum of their rows; arrays of any library."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from array_api_compat import array_namespace, device

from flower_dp.clients.reply.pipeline import Job, Pipeline, Refusal
from flower_dp.clients.reply.sending import Lossless
from flower_dp.core.compression import Payload
from flower_dp.core.vectors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a node's clients in one round.

    Attributes:
        groups: pipelines, each with the clients for which it is run; all encode their rows in the same way.
        length: of a row, before a mask keeps some of its coordinates.
        refused: why other clients that were asked don't reply.
        restarted: clients without stored data from an earlier round, in methods in which clients store data (SCAFFOLD).
    """

    groups: Iterable[tuple[Pipeline, Sequence[Job]]]
    length: int
    refused: dict[str, str]
    restarted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """The sum that the node sends.

    Attributes:
        total: the sum [k] of the rows, float64.
        payload: encodes it.
        payload_bytes: of the rows, had each been sent alone.
        refused: why clients are not in it.
        losses: of the clients that are in it.
        norms: of their rows before the clip; empty where nobody asks for metrics.
    """

    total: Array
    payload: Payload
    payload_bytes: int
    refused: dict[str, str]
    losses: list[Array]
    norms: list[Array]


def add_up(vector: Array, work: Work) -> Sum:
    """Return the exact sum of the rows of all clients that reply.

    Args:
        vector: the global model [d].
        work: of the round.
    """
    xp = array_namespace(vector)
    total, first = xp.zeros((work.length,), dtype=xp.float64, device=device(vector)), None
    refused, losses, num_bytes = dict(work.refused), [], 0
    alone: list[Payload | None] = []
    norms: list[Array] = []
    for pipeline, jobs in work.groups:
        if first is None:
            first, total = pipeline, total[: pipeline.dimension(work.length)]
        elif pipeline.encode != first.encode:
            raise ValueError("pipelines of one node: must send their rows in one way")
        for job, reply in zip(jobs, pipeline.replies(vector, jobs), strict=True):
            if isinstance(reply, Refusal):
                refused[job.name] = reply.reason
                continue
            total += reply.row
            alone.append(reply.alone)
            losses.append(reply.loss)
            if reply.norm is not None:
                norms.append(reply.norm)
            num_bytes += reply.num_bytes
    only = alone[0] if len(alone) == 1 else None
    payload = only or (Lossless().encode(total) if first is None else first.payload(total))
    return Sum(total=total, payload=payload, payload_bytes=num_bytes, refused=refused, losses=losses, norms=norms)
