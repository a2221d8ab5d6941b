"""The privacy statement: what was protected, against whom, how well, and what was not covered.

Two epsilons, always labelled: `tight` is what can be proved for the code that ran; `paper` is the paper's own formula, with a
flag that says whether its assumptions held.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from flower_dp.accounting import Relation


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEpsilon:
    """A paper's own epsilon: the formula's value, whether the formula is valid here, and why (not)."""

    epsilon: float
    formula: str
    valid: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyStatement:
    """(epsilon, delta)-differential privacy of everything that a run released, in full words.

    Attributes:
        method: the method's name.
        unit: what is protected: a `client` or a `record`.
        relation: the neighbouring relation.
        adversary: who is assumed to see what.
        delta: the delta of every epsilon here.
        epsilon: the tight epsilon; infinite when the run was not private.
        accountant: what proves the tight epsilon.
        paper: the paper's epsilon, if the method has one.
        num_rounds: rounds whose release was charged.
        noise: clip norm and noise, in numbers.
        sampling: who took part, in words.
        events: the ledger.
        assumptions: what the guarantee leans on.
        not_covered: what left the clients or the server outside the guarantee.
        incidents: dropouts, refused replies and early stops, in words.
    """

    method: str
    unit: str
    relation: Relation
    adversary: str
    delta: float
    epsilon: float
    accountant: str
    paper: PaperEpsilon | None
    num_rounds: int
    noise: dict[str, float]
    sampling: str
    events: tuple[str, ...]
    assumptions: tuple[str, ...]
    not_covered: tuple[str, ...]
    incidents: tuple[str, ...]

    @property
    def private(self) -> bool:
        """Whether there is any guarantee at all."""
        return math.isfinite(self.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as JSON-ready values; an infinite epsilon is None, and `private` is False then."""
        data: dict[str, Any] = {"private": self.private, **asdict(self)}
        for part in (data, data["paper"] or {}):
            if "epsilon" in part and not math.isfinite(part["epsilon"]):
                part["epsilon"] = None
        return data

    def __str__(self) -> str:
        if self.private:
            promise = (
                f"({_up(self.epsilon)}, {self.delta:.3g})-differential privacy for each {self.unit} ({self.relation}; "
                f"tight, accountant {self.accountant}), over {self.num_rounds} rounds."
            )
        else:
            promise = f"NOT PRIVATE. No differential-privacy guarantee holds for any {self.unit}: epsilon is infinite."
        lines = [
            f"Privacy statement: {self.method}",
            promise,
            f"Protected against: {self.adversary}",
            f"Sampling: {self.sampling}",
        ]
        lines.append("Noise: " + ", ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in self.noise.items()))
        if self.paper is not None:
            shown = _up(self.paper.epsilon) if math.isfinite(self.paper.epsilon) else "infinite"
            state = "valid here" if self.paper.valid else "NOT VALID here"
            lines.append(f"The paper's own epsilon: {shown} ({self.paper.formula}; {state}: {self.paper.reason})")
        for title, items in (
            ("Assumes", self.assumptions),
            ("Not covered", self.not_covered),
            ("Happened", self.incidents),
        ):
            lines.extend(f"{title}: {item}" for item in items)
        return "\n".join(lines)


def _up(epsilon: float) -> str:
    """Four decimals, rounded up: a printed epsilon is never smaller than the proved one."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}"
