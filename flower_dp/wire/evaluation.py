"""Private evaluation on the wire: the metrics that a stock client reports, and a node's sum of vectors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import RecordDict

from flower_dp.core import checks
from flower_dp.wire.answer import most_answer_characters, positions_of, refused_at
from flower_dp.wire.messages import check_content
from flower_dp.wire.text import KEY, PROTOCOL, check_keys, load

# Rounding toward zero is a bias. On a lattice that much finer than that of updates it is negligible beside the noise.
FINER_LATTICE = 2.0**12


def reported_metrics(content: RecordDict) -> dict[str, float]:
    """Return all numbers of a stock client's reply to an evaluation, by name: those of its metric and config records."""
    told: dict[str, float] = {}
    records: list[Any] = [*content.metric_records.values(), *content.config_records.values()]
    for record in records:
        told |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return told


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
