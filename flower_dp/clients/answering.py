"""What this package's own clients and those of other apps have in common: what they take, and how they answer. Without torch."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.reasons import Declined, reading
from flower_dp.clients.reply import client_level
from flower_dp.clients.reply.pipeline import Job, Train
from flower_dp.clients.reply.work import Sum, Work, add_up
from flower_dp.core import noise
from flower_dp.core.noise import Generator
from flower_dp.core.vectors import Array
from flower_dp.wire import EVALUATION, Instruction, Refusal


class Answering(Protocol):
    """Clients of a node that answer one message together."""

    @property
    def policy(self) -> ClientPolicy:
        """Their limits."""

    @property
    def noise_seed(self) -> int | None:
        """For tests only."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that they run."""

    @property
    def has_own_terms(self) -> bool:
        """Whether each of their messages is private on its own."""


def check(client: Answering, instruction: Instruction, *, evaluates: bool) -> None:
    """Refuse an instruction of another kind than the message, of another method, or one against the policy.

    Where messages are private on their own, the policy is asked later about every client's own noise too.

    Raises:
        Declined: if it is one.
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
    """Return a fresh generator for the noise of one client's reply: see `noise_generator`."""
    purpose = name if instruction.ask.metrics is None else f"evaluation of {name}"
    return noise.noise_generator(client.noise_seed, instruction.server_round, purpose, on=on)


def shared_work(instruction: Instruction, *, train: Train, length: int, jobs: list[Job], refused: dict[str, Refusal]) -> Work:
    """Return the work whose rows [length] are clipped, each with its share of the noise, where no message is private alone.

    Raises:
        Declined: if what is asked can't be done so.
    """
    with reading():
        pipeline = client_level.pipeline(instruction.ask, train=train, length=length)
    return Work(groups=[(pipeline, jobs)], length=instruction.ask.row_length(length), refused=refused)


def answered(
    client: Answering, instruction: Instruction, vector: Array, work: Work, metrics: Callable[[Sum], Mapping[str, Any]]
) -> tuple[Sum, str]:
    """Return the sum of the rows, and the text of the answer, which has the payload of an evaluation inside.

    `metrics` are those of training, without noise: they are sent if both sides allow it, of clients in the sum alone.
    """
    evaluates = instruction.ask.metrics is not None
    made = add_up(vector, work, inline=evaluates)
    allowed = not evaluates and instruction.report_metrics and client.policy.allow_metrics and made.losses
    sent = metrics(made) if allowed else {}
    return made, made.answer(instruction.clients, seeded_noise=client.noise_seed is not None, metrics=sent)
