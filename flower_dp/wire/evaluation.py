"""Private evaluation on the wire: the metrics that a client reports, as one vector of bounded norm, and a node's sum."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import RecordDict

from flower_dp.core import checks
from flower_dp.wire.answer import most_answer_characters, positions_of, refused_at
from flower_dp.wire.instruction import Instruction
from flower_dp.wire.messages import check_content
from flower_dp.wire.orders import LocalOrder
from flower_dp.wire.text import KEY, PROTOCOL, check_keys, load

# The name under which instructions of private evaluation go, and which nodes name among their methods.
EVALUATION = "private-evaluation"
# Rounding toward zero is a bias. On a lattice that much finer than that of updates it is negligible beside the noise.
FINER_LATTICE = 2.0**12
_MOST_METRICS = 16


def reported_metrics(content: RecordDict) -> dict[str, float]:
    """Return all numbers of a stock client's reply to an evaluation, by name: those of its metric and config records."""
    told: dict[str, float] = {}
    records: list[Any] = [*content.metric_records.values(), *content.config_records.values()]
    for record in records:
        told |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOrder:
    """The table of private evaluation.

    A client's vector has an entry a metric, clipped to [0, bound] and divided by the bound, and an entry 1 that counts the
    client; all are divided by the square root of their number, so that its L2 norm is at most 1.

    Attributes:
        placement: who adds the noise: `central`, the server; `distributed`, each client its share.
        noise_std: standard deviation of the share that each client adds to its own vector; 0 when the server adds it.
        bounds: the public upper bound of every metric, by its name, in the order of the vector.

    Example:
        >>> from flower_dp.wire import EvaluationOrder
        >>> order = EvaluationOrder(placement="central", bounds={"loss": 4.0, "accuracy": 1.0, "f1": 1.0})
        >>> order.vector({"loss": 8.0, "accuracy": 0.5, "f1": 0.0}).tolist()
        [0.5, 0.25, 0.0, 0.5]
    """

    placement: str
    noise_std: float = 0.0
    bounds: Mapping[str, float]

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, ("central", "distributed"))
        checks.number("noise_std", self.noise_std, at_least=0)
        _check_bounds(self.bounds)

    @property
    def dimension(self) -> int:
        """The number of entries of a client's vector."""
        return len(self.bounds) + 1

    def vector(self, metrics: Mapping[str, float]) -> np.ndarray:
        """Return one client's vector [dimension], float64; a metric that is NaN counts as its bound.

        Raises:
            ValueError: if a metric is missing or is no number.
        """
        entries = []
        for name, bound in self.bounds.items():
            if not isinstance(metrics.get(name), int | float):
                raise ValueError(f"metric {name!r} is missing; there are {', '.join(map(repr, metrics)) or 'none'}")
            value = float(metrics[name])
            entries.append(1.0 if math.isnan(value) else min(max(value / bound, 0.0), 1.0))
        return np.asarray([*entries, 1.0]) / math.sqrt(self.dimension)

    @classmethod
    def of(cls, instruction: Instruction) -> "EvaluationOrder":
        """Read the table of an instruction.

        Raises:
            ValueError: if it has other keys, or values that make no sense.
        """
        check_keys(instruction.method, instruction.order, ("placement", "noise_std", "bounds"))
        order = cls(**instruction.order)
        distributed = order.placement == "distributed" and instruction.noise_multiplier > 0
        if instruction.clip_norm != 1 or distributed != (order.noise_std > 0):
            raise ValueError(
                f"clip_norm={instruction.clip_norm:g}, noise_std={order.noise_std:g}: do not go with private evaluation under "
                f"placement={order.placement!r} and noise_multiplier={instruction.noise_multiplier:g}"
            )
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEvaluationOrder:
    """The table of private evaluation where every message is private on its own; each tuple has one entry a client.

    A contribution, of one record or of a whole client, has an entry a metric: its value is clipped to [0, bound], mapped to
    [-1, 1] and divided by the number of metrics, so that its L1 norm is at most 1.

    Attributes:
        bounds: the public upper bound of every metric, by its name, in the order of the vector.
        weights: what each client's private row counts in the node's sum.
        terms: what the server takes each client's own terms of evaluation to be (`Terms.kind`).
        noise_multipliers: the noise multipliers that go with them, by which the server charges.

    Example:
        >>> import numpy as np
        >>> from flower_dp.wire import LocalEvaluationOrder
        >>> order = LocalEvaluationOrder(bounds={"loss": 4.0, "accuracy": 1.0}, weights=(), terms=(), noise_multipliers=())
        >>> order.contributions(np.array([[8.0, 0.5], [1.0, 0.0]])).tolist()
        [[0.5, 0.0], [-0.25, -0.5]]
        >>> order.fractions(np.array([0.5, 0.0])).tolist()  # of the bounds
        [1.0, 0.5]
    """

    bounds: Mapping[str, float]
    weights: tuple[float, ...]
    terms: tuple[str, ...]
    noise_multipliers: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_bounds(self.bounds)
        LocalOrder(weights=self.weights, terms=self.terms, noise_multipliers=self.noise_multipliers)

    @property
    def dimension(self) -> int:
        """The number of entries of a contribution."""
        return len(self.bounds)

    def contributions(self, values: np.ndarray) -> np.ndarray:
        """Return contributions of L1 norm at most 1 of metrics [n, dimension], float64; one that is NaN counts as its bound."""
        with np.errstate(over="ignore"):
            fractions = np.asarray(values, np.float64) / np.asarray(list(self.bounds.values()))
        clipped = np.clip(np.where(np.isnan(fractions), 1.0, fractions), 0.0, 1.0)
        return np.asarray((2 * clipped - 1) / self.dimension)

    def fractions(self, mean: np.ndarray) -> np.ndarray:
        """Return what part of its bound every metric is [dimension], of a mean of contributions."""
        return np.asarray((mean * self.dimension + 1) / 2)

    @classmethod
    def of(cls, instruction: Instruction) -> "LocalEvaluationOrder":
        """Read the table of an instruction.

        Raises:
            ValueError: if it has other keys, lists of another length, or values that make no sense.
        """
        names = ("weights", "terms", "noise_multipliers")
        check_keys(instruction.method, instruction.order, ("bounds", *names))
        for name in names:
            values = instruction.order[name]
            if not isinstance(values, list | tuple) or len(values) != len(instruction.clients):
                raise ValueError(f"{name}: must have one value for each of {len(instruction.clients)} clients")
        return cls(bounds=instruction.order["bounds"], **{name: tuple(instruction.order[name]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationAnswer:
    """What the clients of one node send back.

    Attributes:
        refused: why clients that were asked are not in the sum; all others that were asked are.
        total: the sum of the clients' vectors [dimension], each with its own share of the noise if clients add it.
        seeded_noise: whether the noise came from a fixed seed, as in a test.

    Example:
        >>> import numpy as np
        >>> from flower_dp.wire import EvaluationAnswer
        >>> answer = EvaluationAnswer(refused={}, total=np.array([0.5, 0.5]), seeded_noise=False)
        >>> EvaluationAnswer.from_json(answer.to_json(asked=["a"]), asked=["a"], dimension=2).total.tolist()
        [0.5, 0.5]
    """

    refused: Mapping[str, str]
    total: np.ndarray
    seeded_noise: bool

    def to_json(self, asked: Sequence[str]) -> str:
        """Return the answer to an instruction for these clients as one string."""
        words = {"refused": positions_of(self.refused, asked), "total": self.total.tolist(), "seeded_noise": self.seeded_noise}
        return json.dumps({"protocol": PROTOCOL, **words}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, asked: Sequence[str], dimension: int) -> "EvaluationAnswer":
        """Read an answer to an instruction for these clients.

        Raises:
            ValueError: if it is not one of this protocol, or longer than an honest one can be.
        """
        data = load(text, most_answer_characters(len(asked)))
        check_keys("answer", data, ("refused", "total", "seeded_noise"))
        values = data["total"]
        if not isinstance(values, list) or len(values) != dimension:
            raise ValueError(f"answer: total must have {dimension} entries")
        total = np.asarray([checks.number("total", value) for value in values])
        refused = refused_at(data["refused"], asked)
        return cls(refused=refused, total=total, seeded_noise=checks.flag("seeded_noise", data["seeded_noise"]))


def evaluation_answer_of(content: RecordDict, asked: Sequence[str], dimension: int) -> EvaluationAnswer:
    """Return the answer of a client of this package to an instruction for these clients.

    Raises:
        ValueError: if there is none, it is malformed, or the message is larger than an honest one can be.
    """
    check_content(content, most_entries=1000, most_bytes=4096 + 6 * most_answer_characters(len(asked)))
    texts = [record[KEY] for record in content.config_records.values() if KEY in record]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("it has no answer to its instruction, though the node has named its clients")
    return EvaluationAnswer.from_json(texts[0], asked, dimension)


def _check_bounds(bounds: Mapping[str, float]) -> None:
    if not isinstance(bounds, Mapping) or not 0 < len(bounds) <= _MOST_METRICS:
        raise ValueError(f"bounds={bounds!r}: must have 1 to {_MOST_METRICS} metrics, each with its upper bound")
    for name, bound in bounds.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"bounds: {name!r} is not the name of a metric")
        checks.number(f"bounds[{name!r}]", bound, above=0)
