"""The instruction: a server's request to the clients of one node."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from flower_dp.core import checks
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.wire import structs
from flower_dp.wire.ask import ReleaseRequest

# The method of private evaluation, in instructions and among the methods that a node names.
EVALUATION = "private-evaluation"
_MOST_INSTRUCTION_CHARACTERS = 2**28
# The message also carries the round as an integer of Flower's ConfigRecord, of 64 bits.
_LAST_ROUND = 2**63 - 1
# Characters of a list of names, which may be forged, in an error.
_SHOWN = 80


class Instruction(structs.Part, frozen=True, kw_only=True):
    """A server's request to the clients of one node in one round.

    Attributes:
        server_round: round, 1, 2, ...
        method: name of the method, for example `dp-fedsam`; a client refuses a method that it does not run.
        clients: names of the clients that take part, each once.
        ask: request of the release to these clients.
        report_metrics: whether the server requests training metrics, which are not private.
        frozen: positions of the arrays of the model that are sent and not trained.

    Example:
        >>> from flower_dp.wire import Instruction, Promise, ReleaseRequest
        >>> ask = ReleaseRequest(promise=Promise(clip_norm=0.5, noise_multiplier=1.0), placement="central")
        >>> instruction = Instruction(server_round=1, method="dp-fedavg", clients=("a", "b"), ask=ask)
        >>> Instruction.from_json(instruction.to_json()) == instruction
        True
    """

    server_round: int
    method: str
    clients: tuple[str, ...]
    ask: ReleaseRequest
    report_metrics: bool = False
    frozen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks.integer("server_round", self.server_round, at_least=1, at_most=_LAST_ROUND)
        checks.line("method", self.method)
        if not all(isinstance(name, str) and name for name in self.clients) or len(set(self.clients)) != len(self.clients):
            raise ValueError("clients: must be unique names, none of them empty")
        if self.ask.placement == "local":
            if lacking := [name for name in self.clients if name not in self.ask.own]:
                raise ValueError(f"own: has no terms of {len(lacking)} of {len(self.clients)} clients")
            for name in self.clients:
                checks.line("run", self.ask.own[name].run, most=checks.MOST_ID)
        if (self.method == EVALUATION) != (self.ask.metrics is not None):
            raise ValueError(f"method={self.method!r}: metrics must be set for method={EVALUATION!r} and for no other")
        checks.flag("report_metrics", self.report_metrics)
        checks.integer("frozen", min(self.frozen, default=0), at_least=0)

    @property
    def bounds(self) -> MetricBounds:
        """The metrics that an evaluation requests, with their bounds.

        Raises:
            ValueError: if this instruction is not an evaluation.
        """
        if self.ask.metrics is None:
            raise ValueError(f"method={self.method!r}: must be {EVALUATION!r}, which alone has metrics")
        return self.ask.metrics

    def to_json(self) -> str:
        """Return the instruction as one string. Of all clients' own terms, it has those of this instruction's clients alone."""
        if not self.ask.own:
            return structs.write(self)
        own = {name: self.ask.own[name] for name in self.clients}
        return structs.write(replace(self, ask=replace(self.ask, own=own)))

    @classmethod
    def from_json(cls, text: str, arrays: Sequence[np.ndarray] = ()) -> "Instruction":
        """Read an instruction. The vectors of its request are the last of the message's `arrays`.

        Raises:
            ValueError: if the text is not of this protocol, or has an unknown key or an invalid value.
        """
        read = structs.read(cls, text, most=_MOST_INSTRUCTION_CHARACTERS)
        names = list(read.ask.vectors)
        if len(names) > len(arrays):
            shown = checks.one_line(str(names), most=_SHOWN)
            raise ValueError(f"vectors={shown}: must be names of vectors that came with the model for a method of this client")
        vectors = dict(zip(names, arrays[len(arrays) - len(names) :], strict=True))
        return replace(read, ask=replace(read.ask, vectors=vectors)) if names else read
