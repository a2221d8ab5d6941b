"""Reply headers and refusals: what a node sends back besides the payload."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from msgspec.structs import replace

from flower_dp.core import checks
from flower_dp.core.compression import Header
from flower_dp.wire import structs

Code = Literal["failed", "declined", "repeated"]
FAILED: Final = "failed"
DECLINED: Final = "declined"
REPEATED: Final = "repeated"
# Of a reply: characters of one reason, and number of different refusals.
MOST_REASON, MOST_REASONS = 200, 16
# Characters of the refusal of a whole node.
_MOST_REFUSAL = 4096
_MOST_METRICS = _MOST_HEADER = 16
# Larger than any sum of honest metrics, even of squared norms of float32 vectors. Sums of such values over all nodes are finite.
LARGEST_METRIC = 1e100


class Refusal(structs.Part, frozen=True, kw_only=True):
    """The refusal of a client, or of a whole node, to reply.

    Attributes:
        code: cause, for the server. `failed`: training fails or diverges. `repeated`: the client's account already has a reply of
            this number. `declined`: any other cause.
        reason: sentence for people; no code reads it.

    Example:
        >>> from flower_dp.wire import Refusal
        >>> Refusal.from_json(Refusal(code="failed", reason="the disk is full").to_json()).code
        'failed'
    """

    code: Code = DECLINED
    reason: str

    def to_json(self) -> str:
        """Return the refusal of a whole node as one string."""
        return structs.write(self)

    @classmethod
    def from_json(cls, text: str) -> "Refusal":
        """Read the refusal of a whole node.

        Raises:
            ValueError: if it is not one of this protocol.
        """
        return structs.read(cls, text, most=_MOST_REFUSAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHeader:
    """The part of one node's reply besides the payload.

    Attributes:
        refused: refusals by client. The payload's sum has every other requested client.
        payload: header of the payload.
        seeded_noise: whether the noise came from a fixed seed, as in a test; the run is not private then.
        metrics: requested training metrics, summed over the clients in the payload's sum; empty unless the server requests
            them and the client's policy allows them.
        payload_bytes: size of all rows in the payload's sum, as if each client had sent its own row.
        fresh: clients in the payload's sum that had no vector of an earlier round, in methods whose clients keep one.

    Example:
        >>> from flower_dp.wire import ReplyHeader, Refusal
        >>> header = {"codec": "dense", "length": 10}
        >>> refused = {"b": Refusal(code="failed", reason="training failed")}
        >>> reply = ReplyHeader(refused=refused, payload=header, seeded_noise=False, metrics={})
        >>> ReplyHeader.from_json(reply.to_json(asked=["a", "b"]), asked=["a", "b"]) == reply
        True
    """

    refused: Mapping[str, Refusal]
    payload: Header
    seeded_noise: bool
    metrics: Mapping[str, float]
    payload_bytes: int = 0
    fresh: tuple[str, ...] = ()

    def to_json(self, asked: Sequence[str]) -> str:
        """Return the header of the reply to an instruction for these clients as one string."""
        fresh = set(self.fresh)
        sent = _Answer(
            refused=_by_reason(self.refused, asked),
            payload=self.payload,
            seeded_noise=self.seeded_noise,
            metrics=self.metrics,
            payload_bytes=self.payload_bytes,
            fresh=tuple(position for position, name in enumerate(asked) if name in fresh),
        )
        return structs.write(sent)

    @classmethod
    def from_json(cls, text: str, asked: Sequence[str]) -> "ReplyHeader":
        """Read the header of a reply to an instruction for these clients.

        Raises:
            ValueError: if the text is not of this protocol, or longer than an honest one can be.
        """
        sent = structs.read(_Answer, text, most=most_answer_characters(len(asked)))
        refused = _names_at("refused", [position for refusal in sent.refused for position in refusal.clients], asked)
        alike = [(Refusal(code=group.code, reason=group.reason), len(group.clients)) for group in sent.refused]
        refusals = [refusal for refusal, count in alike for _ in range(count)]
        length = sent.payload.get("length")
        # A forged length is found later: the decoder of the payload compares it with the model's.
        most = (64 + 16 * length) * (len(asked) - len(refused)) if isinstance(length, int) and length >= 0 else 0
        return cls(
            refused=dict(zip(refused, refusals, strict=True)),
            payload=sent.payload,
            seeded_noise=sent.seeded_noise,
            metrics=sent.metrics,
            payload_bytes=checks.integer("payload_bytes", sent.payload_bytes, at_least=0, at_most=most),
            fresh=_names_at("fresh", sent.fresh, asked),
        )


class _Refused(Refusal, frozen=True, kw_only=True):
    """A refusal, and the positions of its clients."""

    clients: tuple[int, ...]


class _Answer(structs.Part, frozen=True, kw_only=True):
    """A reply header as it is sent. Clients are positions among the requested ones, which bounds the length of an honest text."""

    refused: tuple[_Refused, ...]
    payload: Header
    seeded_noise: bool
    metrics: Mapping[str, float]
    payload_bytes: int
    fresh: tuple[int, ...]

    def __post_init__(self) -> None:
        for items, values, most in (
            ("reasons", self.refused, MOST_REASONS + len(get_args(Code))),
            ("metrics", self.metrics, _MOST_METRICS),
            ("header words", self.payload, _MOST_HEADER),
        ):
            if len(values) > most:
                raise ValueError(f"{len(values)} {items}: at most {most}")
        if any(len(refusal.reason) > MOST_REASON for refusal in self.refused):
            raise ValueError(f"a reason has more than {MOST_REASON} characters")
        for name, value in self.metrics.items():
            checks.number(f"metric {checks.line('metric', name)}", value, at_least=-LARGEST_METRIC, at_most=LARGEST_METRIC)


def _names_at(field: str, positions: Sequence[int], asked: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the requested clients at these positions.

    Raises:
        ValueError: if a position occurs twice or is out of range.
    """
    if len(set(positions)) != len(positions):
        raise ValueError(f"answer: {field} has a client twice")
    last = len(asked) - 1
    return tuple(
        asked[checks.integer(f"answer: position in {field}", position, at_least=0, at_most=last)] for position in positions
    )


def _by_reason(refused: Mapping[str, Refusal], asked: Sequence[str]) -> tuple[_Refused, ...]:
    """Return every refusal once, with the positions of its clients among the requested ones.

    A reason is cut to `MOST_REASON` printable characters. After the first `MOST_REASONS` refusals, those of one code become one.
    """
    lines = {
        refusal: replace(refusal, reason=checks.one_line(refusal.reason, most=MOST_REASON)) for refusal in set(refused.values())
    }
    positions: dict[Refusal, list[int]] = {}
    for position, name in enumerate(asked):
        if name in refused:
            refusal = lines[refused[name]]
            if refusal not in positions and len(positions) >= MOST_REASONS:
                refusal = replace(refusal, reason="another reason")
            positions.setdefault(refusal, []).append(position)
    return tuple(
        _Refused(code=refusal.code, reason=refusal.reason, clients=tuple(clients)) for refusal, clients in positions.items()
    )


def most_answer_characters(num_clients: int) -> int:
    """Return the number of characters that an honest header for so many clients can have."""
    # Attack: a text that exhausts the server's memory. JSON takes at most 2 characters for a printable one. Each client occurs at
    # most once, by a position of 8 characters with its comma. Keys, metrics and payload header take less than 2^14.
    return 2**14 + 2 * MOST_REASON * (MOST_REASONS + 1) + 8 * num_clients
