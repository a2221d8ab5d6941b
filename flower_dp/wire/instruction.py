"""What a server asks of the clients of a node."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flower_dp.core import checks
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.wire.ask import Ask
from flower_dp.wire.text import PROTOCOL, check_keys, load, scalar

# The name under which instructions of private evaluation go, and which nodes name among their methods.
EVALUATION = "private-evaluation"
_MOST_INSTRUCTION_CHARACTERS = 2**28
# The message says the round a second time, as a whole number of Flower's ConfigRecord: this is its largest one.
_LAST_ROUND = 2**63 - 1
_FIELDS = ("server_round", "method", "clients", "report_metrics", "frozen", "ask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """What a server asks of the clients of one node in one round.

    Attributes:
        server_round: 1, 2, ...
        method: the name of the method, for example `dp-fedsam`; a client refuses a method that it does not run.
        clients: names of the clients that take part.
        ask: what the release asks of them.
        report_metrics: whether clients are asked for training metrics, which are not private.
        frozen: positions of the arrays of the model that are sent and not trained.

    Example:
        >>> from flower_dp.wire import Ask, Instruction, Promise
        >>> ask = Ask(promise=Promise(clip_norm=0.5, noise_multiplier=1.0), placement="central")
        >>> instruction = Instruction(server_round=1, method="dp-fedavg", clients=("a", "b"), ask=ask)
        >>> Instruction.from_json(instruction.to_json()) == instruction
        True
    """

    server_round: int
    method: str
    clients: tuple[str, ...]
    ask: Ask
    report_metrics: bool = False
    frozen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks.integer("server_round", self.server_round, at_least=1, at_most=_LAST_ROUND)
        checks.line("method", self.method)
        _check_names(self.clients)
        if not isinstance(self.ask, Ask):
            raise ValueError(f"ask={self.ask!r}: must be an Ask")
        if (self.method == EVALUATION) != (self.ask.metrics is not None):
            raise ValueError(f"metrics: must be asked for by method={EVALUATION!r} and by no other, and method={self.method!r}")
        checks.flag("report_metrics", self.report_metrics)
        for position in self.frozen:
            checks.integer("frozen", position, at_least=0)

    @property
    def bounds(self) -> MetricBounds:
        """The metrics that an evaluation asks for.

        Raises:
            ValueError: if this is none.
        """
        if self.ask.metrics is None:
            raise ValueError(f"method={self.method!r}: is no evaluation")
        return self.ask.metrics

    def to_json(self) -> str:
        """Return the instruction as one string."""
        table = {name: getattr(self, name) for name in _FIELDS[:-1]} | {"ask": self.ask.to_table(self.clients)}
        return json.dumps({"protocol": PROTOCOL, **table}, separators=(",", ":"), default=scalar)

    @classmethod
    def from_json(cls, text: str, arrays: Sequence[np.ndarray] = ()) -> "Instruction":
        """Read an instruction; the vectors of its ask are the last of the message's `arrays`.

        Raises:
            ValueError: if it is not one of this protocol, has a key that is unknown, or a value that makes no sense.
        """
        table = load(text, _MOST_INSTRUCTION_CHARACTERS)
        check_keys("instruction", table, _FIELDS)
        for name, kind in (("clients", list), ("frozen", list), ("ask", dict)):
            if not isinstance(table[name], kind):
                raise ValueError(f"instruction: {name} must be a {'table' if kind is dict else 'list'}")
        clients = tuple(table["clients"])
        _check_names(clients)
        ask = Ask.from_table(table["ask"], clients, arrays)
        return cls(**{**table, "clients": clients, "frozen": tuple(table["frozen"]), "ask": ask})


def _check_names(names: tuple[str, ...]) -> None:
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise ValueError("clients: must be names that are not empty and not twice in the list")
