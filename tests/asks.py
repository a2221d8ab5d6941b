"""Asks and instructions for tests, as a server would make them, and the same with forged keys."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from dataclasses import replace as replaced
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
from flwr.app import ArrayRecord, Message

from flower_dp.clients.refusal_messages import Declined, Failed
from flower_dp.core import compression, noise
from flower_dp.core.metric_bounds import FINER_LATTICE
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.wire import (
    KEY,
    PROTOCOL,
    Instruction,
    LocalRequest,
    Promise,
    ReleaseRequest,
    ReplyHeader,
    RoundMask,
    payload_of,
    refusal_of,
)

GONE = object()
T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """Return a dataclass or a struct with other values in some fields."""
    change: Any = replaced if is_dataclass(value) else msgspec.structs.replace
    changed: T = change(value, **changes)
    return changed


def ask(
    *, clip_norm: float = 1.0, noise_multiplier: float = 1.0, placement: str = "central", size: int = 0, **arguments: Any
) -> ReleaseRequest:
    """Return an ask; its lattice is that of a server whose clients noise and send `size` coordinates."""
    promise = Promise(clip_norm=clip_norm, noise_multiplier=noise_multiplier)
    if placement == "distributed":
        arguments.setdefault("noise_std", clip_norm * noise_multiplier)
    if placement != "local" and "step" not in arguments:
        scale = arguments.get("noise_std", 0.0) or promise.noise_scale
        finer = FINER_LATTICE if arguments.get("metrics") is not None else 1.0
        arguments["step"] = noise.lattice_step(scale, clip_norm=clip_norm, dimension=size) / finer
    return ReleaseRequest(promise=promise, placement=placement, **arguments)


def masked(*, keep_ratio: float, seed: int, size: int, **arguments: Any) -> ReleaseRequest:
    """Return an ask of rows [size] under a mask."""
    mask = RoundMask(seed=seed, keep_ratio=keep_ratio)
    return ask(mask=mask, size=mask.indices(size).size, **arguments)


def own_ask(own: Mapping[str, tuple[float, str, float]], *, clip_norm: float = 1.0, **arguments: Any) -> ReleaseRequest:
    """Return an ask of a run of its own under local placement: weight, terms and noise multiplier of every client."""
    each = {
        name: LocalRequest(weight=weight, terms=terms, noise_multiplier=z, number=1, run=uuid4().hex)
        for name, (weight, terms, z) in own.items()
    }
    least = min((one.noise_multiplier for one in each.values()), default=0.0)
    return ask(
        clip_norm=clip_norm, noise_multiplier=arguments.pop("noise_multiplier", least), placement="local", own=each, **arguments
    )


def own_instruction(
    method: str, terms: Mapping[str, ClientTerms], *, weight: float = 1.0, server_round: int = 1, **asked: Any
) -> Instruction:
    """Return what an honest server asks of clients with these terms of their own, but for what is given here."""
    own = {name: (weight, one.fingerprint, one.release.mechanism.noise_multiplier) for name, one in terms.items()}
    clip_norm = next(iter(terms.values())).release.clip_norm
    ask = own_ask(own, **{"clip_norm": clip_norm} | asked)
    return Instruction(server_round=server_round, method=method, clients=tuple(terms), ask=ask)


def promised(asked: Instruction, **changes: float) -> Instruction:
    """Return an instruction whose promise has other values."""
    return replace(asked, ask=replace(asked.ask, promise=replace(asked.ask.promise, **changes)))


def table_of(asked: Instruction) -> dict[str, Any]:
    """Return the table of the ask, as it is sent."""
    table: dict[str, Any] = json.loads(asked.to_json())["ask"]
    return table


def forged(asked: Instruction, **keys: Any) -> str:
    """Return an instruction's text in which keys of the ask, or of its promise, have other values, or are `GONE`."""
    data = json.loads(asked.to_json())
    for name, value in keys.items():
        table = data["ask"]["promise"] if name in Promise.__struct_fields__ else data["ask"]
        table[name] = value
        if value is GONE:
            del table[name]
    return json.dumps(data)


def config_of(asked: Instruction | str) -> dict[str, str]:
    """Return the config of a message with an instruction."""
    return {KEY: asked if isinstance(asked, str) else asked.to_json()}


def saying(message: Message, text: str) -> Message:
    """Return a message whose instruction has this text instead, whatever an honest server could send."""
    for record in message.content.config_records.values():
        if KEY in record:
            record[KEY] = text
    return message


def told(name: str, **changes: Any) -> dict[str, Any]:
    """Return the keys of an ask of one client with terms of its own."""
    entry = {"weight": 1.0, "terms": "x", "noise_multiplier": 1.0, "number": 1, "run": "r"} | changes
    return {"own": {name: {key: value for key, value in entry.items() if value is not GONE}}}


# The keys of every answer.
ANSWERED = {"protocol", "refused", "payload", "seeded_noise", "metrics", "payload_bytes", "fresh"}


@dataclass(frozen=True)
class Evaluated:
    """An answer to an evaluation, and the vector inside it."""

    refused: Mapping[str, str]
    total: np.ndarray
    seeded_noise: bool


def answered(reply: Message) -> Message:
    """Return a reply; raise what the client has raised where its whole node refuses."""
    if (refusal := refusal_of(reply.content)) is not None:
        raise (Failed if refusal.code == "failed" else Declined)(refusal.reason)
    return reply


def reasons(answer: ReplyHeader) -> dict[str, str]:
    """Return why clients are refused, in words."""
    return {name: one.reason for name, one in answer.refused.items()}


def evaluated(text: str, instruction: Instruction) -> Evaluated:
    """Read an answer to an evaluation as the server does."""
    answer = ReplyHeader.from_json(text, instruction.clients)
    metrics = instruction.bounds
    length = len(metrics.bounds) if instruction.ask.placement == "local" else metrics.num_counted
    total = compression.decode(payload_of(ArrayRecord(), answer.payload, length), length)
    return Evaluated(refused=reasons(answer), total=total, seeded_noise=answer.seeded_noise)


def forged_total(total: Any, *, length: int, **arguments: Any) -> str:
    """Return an answer to an evaluation whose payload has these numbers, or this text in their place."""
    values = base64.b64encode(np.asarray(total, "<f8").tobytes()).decode() if isinstance(total, list) else total
    payload = {"encoding": "inline", "length": length, "values": values}
    table = {"refused": [], "payload": payload, "seeded_noise": False, "metrics": {}, "payload_bytes": 0, "fresh": []}
    return json.dumps({"protocol": PROTOCOL, **table, **arguments})
