"""What the clients of a node send back besides the payload."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flower_dp.core import checks
from flower_dp.core.compression import Header
from flower_dp.wire.text import PROTOCOL, check_keys, load, scalar

# How a reason begins: of a client that can't train, or whose training diverges, and of one that does not do what is asked.
FAILED, DECLINED = "training failed", "declined"
# Of an answer: what a client says of a refusal, and how many different things.
MOST_REASON, MOST_REASONS = 200, 16
_MOST_METRICS = 16
# No sum of honest metrics is larger, not even one of squares of norms of float32 vectors; and sums of these are finite.
LARGEST_METRIC = 1e100


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the clients of one node send back besides the payload.

    Attributes:
        refused: why clients that were asked are not in the payload's sum; all others that were asked are.
        payload: header of the payload.
        seeded_noise: whether the noise came from a fixed seed, as in a test; the run is not private then.
        metrics: training metrics, summed over the clients in the sum, if they were asked for.
        payload_bytes: bytes of arrays that the clients in the sum would have sent had each sent its own row, summed over them.
        fresh: clients in the sum that had kept nothing from an earlier round, in methods whose clients keep a vector.

    Example:
        >>> from flower_dp.wire import Answer
        >>> header = {"codec": "dense", "length": 10}
        >>> answer = Answer(refused={"b": "training failed"}, payload=header, seeded_noise=False, metrics={})
        >>> Answer.from_json(answer.to_json(asked=["a", "b"]), asked=["a", "b"]) == answer
        True
    """

    refused: Mapping[str, str]
    payload: Header
    seeded_noise: bool
    metrics: Mapping[str, float]
    payload_bytes: int = 0
    fresh: tuple[str, ...] = ()

    def to_json(self, asked: Sequence[str]) -> str:
        """Return the answer to an instruction for these clients as one string."""
        header = {
            "refused": positions_of(self.refused, asked),
            "payload": self.payload,
            "seeded_noise": self.seeded_noise,
            "metrics": dict(self.metrics),
        }
        header["payload_bytes"] = self.payload_bytes
        fresh = set(self.fresh)
        header["fresh"] = [position for position, name in enumerate(asked) if name in fresh]
        return json.dumps({"protocol": PROTOCOL, **header}, separators=(",", ":"), default=scalar)

    @classmethod
    def from_json(cls, text: str, asked: Sequence[str]) -> "Answer":
        """Read an answer to an instruction for these clients.

        Raises:
            ValueError: if it is not one of this protocol, or longer than an honest one can be.
        """
        data = load(text, most_answer_characters(len(asked)))
        check_keys("answer", data, ("refused", "payload", "seeded_noise", "metrics", "payload_bytes", "fresh"))
        payload, metrics = data["payload"], data["metrics"]
        if not all(isinstance(table, dict) for table in (payload, metrics)):
            raise ValueError("answer: payload and metrics must be tables")
        if len(metrics) > _MOST_METRICS or len(payload) > _MOST_METRICS:
            raise ValueError(f"answer: has {len(metrics)} metrics, {len(payload)} header words: too many")
        for name, value in metrics.items():
            checks.number(f"metric {checks.line('metric', name)}", value, at_least=-LARGEST_METRIC, at_most=LARGEST_METRIC)
        refused = refused_at(data["refused"], asked)
        length = payload.get("length")
        # Whoever decodes the payload compares this length with the model's.
        most = (64 + 16 * length) * (len(asked) - len(refused)) if type(length) is int and length >= 0 else 0
        return cls(
            refused=refused,
            payload=payload,
            seeded_noise=checks.flag("seeded_noise", data["seeded_noise"]),
            metrics=metrics,
            fresh=tuple(_names_at("fresh", data["fresh"], asked)),
            payload_bytes=checks.integer("payload_bytes", data["payload_bytes"], at_least=0, at_most=most),
        )


def _names_at(what: str, positions: object, asked: Sequence[str]) -> list[str]:
    """Return the names at some positions.

    Raises:
        ValueError: if these are not a list of positions, each at most once.
    """
    if not isinstance(positions, list):
        raise ValueError(f"answer: {what} must have a list of positions")
    names = [asked[checks.integer("position", position, at_least=0, at_most=len(asked) - 1)] for position in positions]
    if len(set(names)) != len(names):
        raise ValueError(f"answer: {what} has a client twice")
    return names


def positions_of(refused: Mapping[str, str], asked: Sequence[str]) -> dict[str, list[int]]:
    """Return the positions of refused clients among those that were asked, under the reason of their refusal.

    The length of an honest answer is so known before it is read. Reasons are cut to `MOST_REASON` characters, and all after the
    first `MOST_REASONS` become one.
    """
    reasons: dict[str, list[int]] = {}
    for position, name in enumerate(asked):
        if name in refused:
            reason = refused[name][:MOST_REASON]
            if reason not in reasons and len(reasons) >= MOST_REASONS:
                reason = "another reason"
            reasons.setdefault(reason, []).append(position)
    return reasons


def refused_at(reasons: object, asked: Sequence[str]) -> dict[str, str]:
    """Return the reason of every refused client, by its name.

    Raises:
        ValueError: if this is no table of reasons and positions as `positions_of` makes it.
    """
    if not isinstance(reasons, dict):
        raise ValueError("answer: refused must be a table")
    if len(reasons) > MOST_REASONS + 1:
        raise ValueError(f"answer: has {len(reasons)} reasons: too many")
    refused: dict[str, str] = {}
    for reason, positions in reasons.items():
        for name in _names_at("a reason", positions, asked):
            if name in refused:
                raise ValueError(f"answer: client {name!r} is refused twice")
            refused[name] = reason[:MOST_REASON]
    return refused


def most_answer_characters(num_clients: int) -> int:
    """Return how long an honest answer for so many clients can be."""
    # A character is at most twelve in JSON: two escapes of six.
    return 4096 + 12 * MOST_REASON * (MOST_REASONS + 1) + 8 * num_clients
