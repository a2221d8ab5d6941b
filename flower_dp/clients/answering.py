"""Replies of all clients, this package's own and those of other apps: checks of an instruction, and the reply. Without torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from array_api_compat import array_namespace, device

from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.refusal_messages import Declined, decline_invalid
from flower_dp.clients.reply import client_level
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Train
from flower_dp.clients.reply.sending import Lossless
from flower_dp.core import compression, noise
from flower_dp.core.compression import Payload
from flower_dp.core.noise import Generator
from flower_dp.core.vectors import Array
from flower_dp.wire import EVALUATION, Instruction, Refusal, ReplyHeader

NOT_HOSTED = Refusal(reason="not hosted here")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """The work of a node's clients in one round.

    Attributes:
        groups: pipelines, each with its clients; all encode their rows in the same way.
        length: coordinates of a row, before a mask keeps some of them.
        refused: refusals of other requested clients, by name.
    """

    groups: Iterable[tuple[Pipeline, Sequence[ClientJob]]]
    length: int
    refused: dict[str, Refusal]


@dataclass(slots=True, kw_only=True)
class NodeSum:
    """A node's sum of its clients' rows, and what the node keeps.

    Attributes:
        refused: refusals of the clients that are not in the sum, by name.
        payload: encoding of the sum [k], float64.
        payload_bytes: bytes of the rows, had each been sent alone.
        losses: training losses of the clients in the sum.
        norms: L2 norms of their rows before the clip; empty unless the server requests metrics.
        kept: vectors that clients keep until their next round, by name, once the reply leaves.
        fresh: clients that keep a vector and had none from an earlier round.
    """

    refused: dict[str, Refusal]
    payload: Payload = field(init=False)
    payload_bytes: int = 0
    losses: list[Array] = field(default_factory=list)
    norms: list[Array] = field(default_factory=list)
    kept: dict[str, Array] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)


def sum_rows(vector: Array, work: NodeWork, *, inline: bool) -> NodeSum:
    """Return the exact sum of the rows of all clients that reply.

    Args:
        vector: the global model [d].
        work: the node's work in the round.
        inline: whether the sum is short and is sent inside the reply header, in double precision, as an evaluation's vectors are.
    """
    xp = array_namespace(vector)
    total, first = xp.zeros((work.length,), dtype=xp.float64, device=device(vector)), None
    made, alone = NodeSum(refused=dict(work.refused)), list[Payload | None]()
    for pipeline, jobs in work.groups:
        if first is None:
            first, total = pipeline, total[: pipeline.dimension(work.length)]
        elif pipeline.encode != first.encode:
            raise ValueError("pipelines of one node: must send their rows in one way")
        for job, reply in zip(jobs, pipeline.replies(vector, jobs), strict=True):
            if isinstance(reply, Refusal):
                made.refused[job.name] = reply
                continue
            total += reply.row
            alone.append(reply.alone)
            made.losses.append(reply.loss)
            made.norms += [] if reply.norm is None else [reply.norm]
            made.payload_bytes += reply.num_bytes
            if reply.kept is not None:
                made.kept[job.name] = reply.kept
                made.fresh += [] if job.kept is not None else [job.name]
    only = alone[0] if len(alone) == 1 else None
    if inline:
        made.payload = compression.inline(total)
    else:
        made.payload = only or (Lossless().encode(total, None) if first is None else first.payload(total, len(alone)))
    return made


class Answering(Protocol):
    """Clients of a node that reply to one message together."""

    @property
    def policy(self) -> ClientPolicy:
        """The clients' limits."""

    @property
    def noise_seed(self) -> int | None:
        """A seed of the noise, for tests only."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that the clients run."""

    @property
    def has_own_terms(self) -> bool:
        """Whether each client adds its full noise by its own terms (local DP)."""


def check(client: Answering, instruction: Instruction, *, evaluates: bool) -> None:
    """Refuse an instruction of another kind than the message, of another method, or against the policy.

    Under local DP the policy also checks every client's own noise, later: see `verify_terms`.

    Raises:
        Declined: for such an instruction.
    """
    method, policy, ask = instruction.method, client.policy, instruction.ask
    if evaluates and method != EVALUATION:
        raise Declined(f"method={method!r}: a message to evaluate must be of {EVALUATION!r}")
    if not evaluates and (method not in client.methods or method == EVALUATION):
        raise Declined(f"method={method!r}: this client runs {', '.join(client.methods)}")
    if not client.has_own_terms:
        (policy.check_evaluation if evaluates else policy.check)(ask)
    elif not evaluates:
        policy.check_local(ask)


def generator(client: Answering, instruction: Instruction, name: str, *, on: Array | None = None) -> Generator:
    """Return a new generator for the noise of one client's reply: see `noise_generator`."""
    purpose = name if instruction.ask.metrics is None else f"evaluation of {name}"
    return noise.noise_generator(client.noise_seed, instruction.server_round, purpose, on=on)


def shared_work(
    instruction: Instruction, *, train: Train, length: int, jobs: list[ClientJob], refused: dict[str, Refusal]
) -> NodeWork:
    """Return the work whose rows [length] are clipped, each with at most a share of the noise: no single message is private.

    Raises:
        Declined: if the request can't be met so.
    """
    with decline_invalid():
        pipeline = client_level.pipeline(instruction.ask, train=train, length=length)
    return NodeWork(groups=[(pipeline, jobs)], length=instruction.ask.row_length(length), refused=refused)


def answered(
    client: Answering, instruction: Instruction, vector: Array, work: NodeWork, metrics: Callable[[NodeSum], Mapping[str, Any]]
) -> tuple[NodeSum, str]:
    """Return the sum of the rows, and the text of the reply header, which has the payload of an evaluation inside.

    `metrics` are those of training, without noise. They are sent only if both sides allow it, and only of clients in the sum.
    """
    evaluates = instruction.ask.metrics is not None
    made = sum_rows(vector, work, inline=evaluates)
    allowed = not evaluates and instruction.report_metrics and client.policy.allow_metrics and made.losses
    sent = metrics(made) if allowed else {}
    answer = ReplyHeader(
        refused=made.refused,
        payload=made.payload.header,
        payload_bytes=made.payload_bytes,
        seeded_noise=client.noise_seed is not None,
        metrics=sent,
        fresh=tuple(made.fresh),
    )
    return made, answer.to_json(instruction.clients)
