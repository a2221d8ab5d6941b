"""What the clients of a node send back besides the payload."""

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
# Of an answer: what a client says of a refusal, and how many different things.
MOST_REASON, MOST_REASONS = 200, 16
# Characters of the refusal of a whole node.
_MOST_REFUSAL = 4096
_MOST_METRICS = _MOST_HEADER = 16
# No sum of honest metrics is larger, not even one of squares of norms of float32 vectors; and sums of these are finite.
LARGEST_METRIC = 1e100


class Refusal(structs.Part, frozen=True, kw_only=True):
    """Why a client, or a whole node, does not reply.

    Attributes:
        code: for the server. `failed`: training fails, or diverges; `repeated`: the client's account has a reply of this number
            already; `declined`: it does not do what is asked, for any other reason.
        reason: a sentence for people, which no code reads.

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
    """What the clients of one node send back besides the payload.

    Attributes:
        refused: why clients that were asked are not in the payload's sum; all others that were asked are.
        payload: header of the payload.
        seeded_noise: whether the noise came from a fixed seed, as in a test; the run is not private then.
        metrics: training metrics, summed over the clients in the sum, if they were asked for.
        payload_bytes: bytes of arrays that the clients in the sum would have sent had each sent its own row, summed over them.
        fresh: clients in the sum that had kept nothing from an earlier round, in methods whose clients keep a vector.

    Example:
        >>> from flower_dp.wire import ReplyHeader, Refusal
        >>> header = {"codec": "dense", "length": 10}
        >>> refused = {"b": Refusal(code="failed", reason="training failed")}
        >>> answer = ReplyHeader(refused=refused, payload=header, seeded_noise=False, metrics={})
        >>> ReplyHeader.from_json(answer.to_json(asked=["a", "b"]), asked=["a", "b"]) == answer
        True
    """

    refused: Mapping[str, Refusal]
    payload: Header
    seeded_noise: bool
    metrics: Mapping[str, float]
    payload_bytes: int = 0
    fresh: tuple[str, ...] = ()

    def to_json(self, asked: Sequence[str]) -> str:
        """Return the answer to an instruction for these clients as one string."""
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
        """Read an answer to an instruction for these clients.

        Raises:
            ValueError: if it is not one of this protocol, or longer than an honest one can be.
        """
        sent = structs.read(_Answer, text, most=most_answer_characters(len(asked)))
        refused = _names_at("refused", [one for refusal in sent.refused for one in refusal.clients], asked)
        alike = [(Refusal(code=one.code, reason=one.reason), len(one.clients)) for one in sent.refused]
        refusals = [refusal for refusal, count in alike for _ in range(count)]
        length = sent.payload.get("length")
        # Whoever decodes the payload compares this length with the model's.
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
    """A refusal, and the clients that give it."""

    clients: tuple[int, ...]


class _Answer(structs.Part, frozen=True, kw_only=True):
    """An answer as it is sent: clients are positions among those that were asked, so that its honest length is known."""

    refused: tuple[_Refused, ...]
    payload: Header
    seeded_noise: bool
    metrics: Mapping[str, float]
    payload_bytes: int
    fresh: tuple[int, ...]

    def __post_init__(self) -> None:
        for what, values, most in (
            ("reasons", self.refused, MOST_REASONS + len(get_args(Code))),
            ("metrics", self.metrics, _MOST_METRICS),
            ("header words", self.payload, _MOST_HEADER),
        ):
            if len(values) > most:
                raise ValueError(f"{len(values)} {what}: at most {most}")
        if any(len(refusal.reason) > MOST_REASON for refusal in self.refused):
            raise ValueError(f"a reason has more than {MOST_REASON} characters")
        for name, value in self.metrics.items():
            checks.number(f"metric {checks.line('metric', name)}", value, at_least=-LARGEST_METRIC, at_most=LARGEST_METRIC)


def _names_at(what: str, positions: Sequence[int], asked: Sequence[str]) -> tuple[str, ...]:
    """Return the names at some positions.

    Raises:
        ValueError: if a position is there twice, or no client that was asked has it.
    """
    if len(set(positions)) != len(positions):
        raise ValueError(f"answer: {what} has a client twice")
    return tuple(
        asked[checks.integer(f"answer: position in {what}", one, at_least=0, at_most=len(asked) - 1)] for one in positions
    )


def _by_reason(refused: Mapping[str, Refusal], asked: Sequence[str]) -> tuple[_Refused, ...]:
    """Return every refusal once, with the positions of its clients among those that were asked.

    A reason is cut to `MOST_REASON` printable characters, and all of a code after the first `MOST_REASONS` refusals become one.
    """
    lines = {one: replace(one, reason=checks.one_line(one.reason, most=MOST_REASON)) for one in set(refused.values())}
    positions: dict[Refusal, list[int]] = {}
    for position, name in enumerate(asked):
        if name in refused:
            refusal = lines[refused[name]]
            if refusal not in positions and len(positions) >= MOST_REASONS:
                refusal = replace(refusal, reason="another reason")
            positions.setdefault(refusal, []).append(position)
    return tuple(_Refused(code=one.code, reason=one.reason, clients=tuple(places)) for one, places in positions.items())


def most_answer_characters(num_clients: int) -> int:
    """Return how long an honest answer for so many clients can be."""
    # A printable character is at most two in JSON; 2^14 are more than metrics and header take.
    return 2**14 + 2 * MOST_REASON * (MOST_REASONS + 1) + 8 * num_clients
