"""What a server asks of the clients of a node."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flower_dp.core import checks
from flower_dp.wire.text import PROTOCOL, check_keys, load, scalar

_MOST_INSTRUCTION_CHARACTERS = 2**28
_COMMON = ("server_round", "method", "clients", "clip_norm", "noise_multiplier", "report_metrics", "frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """What a server asks of the clients of one node in one round.

    Attributes:
        server_round: 1, 2, ...
        method: the name of the method, for example `dp-fedsam`; a client refuses a method that it does not run.
        clients: names of the clients that take part.
        clip_norm: norm bound of what every client sends.
        noise_multiplier: what the server says of the whole release: noise scale / clip norm.
        report_metrics: whether clients are asked for training metrics, which are not private.
        frozen: positions of the arrays of the model that are sent and not trained.
        order: the method's own table: `ClientLevelOrder` or `LocalOrder`, or another that the method reads.

    Example:
        >>> from flower_dp.wire import Instruction
        >>> order = {"placement": "central", "noise_std": 0.0, "keep_ratio": 1.0}
        >>> instruction = Instruction(
        ...     server_round=1, method="dp-fedavg", clients=("a", "b"), clip_norm=0.5, noise_multiplier=1.0, order=order
        ... )
        >>> Instruction.from_json(instruction.to_json()) == instruction
        True
    """

    server_round: int
    method: str
    clients: tuple[str, ...]
    clip_norm: float
    noise_multiplier: float
    report_metrics: bool = False
    frozen: tuple[int, ...] = ()
    order: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.integer("server_round", self.server_round, at_least=1)
        if not isinstance(self.method, str) or not self.method:
            raise ValueError(f"method={self.method!r}: must be a method's name")
        _check_names(self.clients)
        checks.number("clip_norm", self.clip_norm, above=0)
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)
        checks.flag("report_metrics", self.report_metrics)
        for position in self.frozen:
            checks.integer("frozen", position, at_least=0)

    def to_json(self) -> str:
        """Return the instruction as one string; the method's table stands under the method's name."""
        words = {name: getattr(self, name) for name in _COMMON}
        table = {self.method: dict(self.order)}
        return json.dumps({"protocol": PROTOCOL, **words, **table}, separators=(",", ":"), default=scalar)

    @classmethod
    def from_json(cls, text: str) -> "Instruction":
        """Read an instruction; tables of other methods in it are passed over.

        Raises:
            ValueError: if it is not one of this protocol.
        """
        data = load(text, _MOST_INSTRUCTION_CHARACTERS)
        method = data.get("method")
        order = data.pop(method, None) if isinstance(method, str) and method not in _COMMON else None
        if not isinstance(order, dict):
            raise ValueError(f"instruction: has no table for method={method!r}")
        words = {name: value for name, value in data.items() if name in _COMMON or not isinstance(value, dict)}
        check_keys("instruction", words, _COMMON)
        for name in ("clients", "frozen"):
            if not isinstance(words[name], list):
                raise ValueError(f"instruction: {name} must be a list")
        return cls(**{**words, "clients": tuple(words["clients"]), "frozen": tuple(words["frozen"]), "order": order})


def _check_names(names: tuple[str, ...]) -> None:
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise ValueError("clients: must be names that are not empty and not twice in the list")
