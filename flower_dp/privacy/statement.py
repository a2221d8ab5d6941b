"""The privacy statement: what was protected, against whom, with which epsilon and delta, and what was not covered.

Two epsilons, always labelled: `tight` is what can be proved for the code that ran; `paper` is the paper's own formula, with a
flag that says whether its assumptions held.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from flower_dp.core.formatting import finite_or_none, format_delta, format_epsilon, format_epsilon_at_delta
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.events import Relation

_NO_GUARANTEE = "DELTA IS NO GUARANTEE"


def delta_warning(delta: float, num_units: int, unit: str) -> tuple[str, ...]:
    """Return a line about a delta that promises nothing, or none: it must be far below 1 / the number of units.

    Args:
        delta: of the guarantee.
        num_units: clients, or records of one client.
        unit: `client` or `record`.

    Example:
        >>> from flower_dp.privacy.statement import delta_warning
        >>> delta_warning(1e-5, 100, "client")
        ()
    """
    if delta * num_units < 1:
        return ()
    at_least = f"{_NO_GUARANTEE}: {format_delta(delta)} is at least 1 / {num_units} {unit}s"
    return (f"{at_least}, and a mechanism that publishes one {unit}'s data outright can have such a delta",)


def delta_warnings(lines: Iterable[str]) -> list[str]:
    """Return those of a statement's lines that `delta_warning` has made."""
    return [line for line in lines if line.startswith(_NO_GUARANTEE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEpsilon:
    """A paper's own epsilon: the formula's value, whether the formula is valid here, and why (not)."""

    epsilon: float
    formula: str
    valid: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adversary:
    """What one kind of adversary sees, and the tight epsilon against it, the largest over clients.

    Attributes:
        name: who it is, in one or two words.
        sees: what it is assumed to see.
        epsilon: the tight epsilon against it.
        accountant: what proves it.
        noise_std: the smallest standard deviation of the noise on any number that it sees, or that what it sees is made of.
        paper: the paper's epsilon against it, if there is one.
        trusted: whether the statement trusts it, and guarantees nothing against it.
    """

    name: str
    view: str
    epsilon: float
    accountant: str
    lowest_noise_std: float
    paper_epsilon: PaperEpsilon | None = None
    trusted: bool = False

    @classmethod
    def of(cls, name: str, cost: PrivacyCost, **words: Any) -> "Adversary":
        """Return an adversary against whom this cost is proved; `words` are the other attributes."""
        return cls(name=name, epsilon=cost.epsilon, accountant=cost.accountant, **words)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEpsilons:
    """The tight epsilons of clients with their own ledgers: the distribution, the largest, and up to 100 one by one.

    `evaluation` has the epsilon of each client's private evaluations alone.
    """

    count: int
    minimum: float
    median: float
    maximum: float
    worst: str
    by_client: dict[str, float]
    evaluation_by_client: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointEpsilon:
    """What this run and earlier ones have cost together the client who was charged most.

    Attributes:
        num_runs: how many, this one included.
        epsilon: of the composition of all their events.
        delta: at which it holds.
        accountant: what proves it.
        on_ledger: whether these are the runs on one server's ledger; else those that this process knows of one strategy.
        apart: runs among these that are not in it, in words: their unit or relation is another one.
        filter_epsilon: of the ledger's fully adaptive budget, which bounds all runs together also if the settings of some were
            chosen by the results of others. `epsilon` does not: it is that of settings that were known. None without one.
        filter_delta: at which it holds.
    """

    num_runs: int
    epsilon: float
    delta: float
    accountant: str
    on_ledger: bool = True
    runs_not_included: tuple[str, ...] = ()
    filter_epsilon: float | None = None
    filter_delta: float | None = None

    def __str__(self) -> str:
        which = "on this ledger" if self.on_ledger else "of this strategy"
        line = f"All {self.num_runs} runs {which} together: {format_epsilon_at_delta(self.epsilon, self.delta)}"
        line += f", accountant {self.accountant}, for the client who was charged most"
        if self.runs_not_included:
            line += f"; not in it, since no accountant adds them up: {', '.join(self.runs_not_included)}"
        if self.filter_epsilon is not None and self.filter_delta is not None:
            filtered = format_epsilon_at_delta(self.filter_epsilon, self.filter_delta)
            line += f"; at most {filtered}, the ledger's budget, if settings of runs were chosen by the results of others"
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyStatement:
    """(epsilon, delta)-differential privacy of everything that a run released, with all assumptions and exceptions.

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
        assumptions: what the guarantee depends on.
        not_covered: what clients or the server sent that the guarantee does not cover.
        incidents: dropouts, refused replies and early stops, in words.
        adversaries: the epsilon against each adversary, if they see different things; `epsilon` is the largest over those not
            trusted.
        parts: if several kinds of releases were charged, an upper bound of the cost of each kind alone.
        clients: if every client has its own ledger, the epsilons of all clients; `epsilon` is the largest of them.
        joint: what it has cost together with earlier runs on the same server's ledger, or of the same strategy; None without any.

    Example:
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.strategies import DPFedAvg
        >>> strategy = DPFedAvg(
        ...     clip_norm=0.5, noise_multiplier=1.0, sampling=PoissonSampling(sampling_rate=0.1), num_clients=100, delta=1e-4
        ... )
        >>> statement = strategy.statement
        >>> statement.unit, statement.relation, statement.private
        ('client', 'add-or-remove-one', True)
        >>> print(str(statement).splitlines()[1])
        (0.0000, 0.0001)-differential privacy for each client (add-or-remove-one; tight, accountant none), over 0 rounds.
    """

    method: str
    unit: str
    relation: Relation
    protected_against: str
    delta: float
    epsilon: float
    accountant: str
    paper_epsilon: PaperEpsilon | None
    num_charged_rounds: int
    noise: dict[str, float]
    sampling: str
    events: tuple[str, ...]
    assumptions: tuple[str, ...]
    not_covered: tuple[str, ...]
    incidents: tuple[str, ...]
    adversaries: tuple[Adversary, ...] = ()
    epsilon_by_release: Mapping[str, float] = field(default_factory=dict)
    clients: ClientEpsilons | None = None
    joint: JointEpsilon | None = None

    @property
    def private(self) -> bool:
        """Whether there is any guarantee at all."""
        return math.isfinite(self.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as JSON-ready values; an infinite epsilon is None, and `private` is False then."""
        return {"private": self.private, **finite_or_none(asdict(self))}

    def __str__(self) -> str:
        if self.private:
            tight = "" if self.accountant.startswith("selection-") else "tight, "  # of a choice it is a bound
            spent = f"({format_epsilon(self.epsilon)}, {format_delta(self.delta)})-differential privacy for each {self.unit}"
            promise = f"{spent} ({self.relation}; {tight}accountant {self.accountant}), over {self.num_charged_rounds} rounds."
        else:
            promise = f"NOT PRIVATE. No differential-privacy guarantee holds for any {self.unit}: epsilon is infinite."
        lines = [
            f"Privacy statement: {self.method}",
            promise,
            f"Protected against: {self.protected_against}",
            f"Sampling: {self.sampling}",
            "Noise: " + ", ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in self.noise.items()),
        ]
        if self.paper_epsilon is not None and not any(adversary.paper_epsilon for adversary in self.adversaries):
            lines.append(_paper_line(self.paper_epsilon))
        if self.epsilon_by_release:
            alone = ", ".join(f"{name} {format_epsilon(value)}" for name, value in self.epsilon_by_release.items())
            lines.append(f"Each part alone: {alone}; together {format_epsilon(self.epsilon)}")
        for alike in _alike(self.adversaries):
            one = alike[0]
            seen = "; ".join(f"{entry.name}{' (trusted)' if one.trusted else ''}: {entry.view}" for entry in alike)
            proved = f"tight epsilon {format_epsilon(one.epsilon)}, accountant {one.accountant}"
            lines.append(f"Against {seen}: {proved}, noise std {one.lowest_noise_std:.6g}")
            if one.paper_epsilon is not None:
                lines.append("  " + _paper_line(one.paper_epsilon))
        if self.clients is not None:
            costs = self.clients
            least, middle, most = (format_epsilon(one) for one in (costs.minimum, costs.median, costs.maximum))
            if least == most:
                lines.append(f"Over {costs.count} clients: epsilon {most} for each of them")
            else:
                spread = f"at least {least}, median {middle}, at most {most} ({costs.worst})"
                lines.append(f"Over {costs.count} clients: epsilon {spread}")
                lines += _by_client("Each client", costs.by_client)
            lines += _by_client("Each client's evaluations alone", costs.evaluation_by_client)
        if self.joint is not None:
            lines.append(str(self.joint))
        lists = {"Assumes": self.assumptions, "Not covered": self.not_covered, "Happened": self.incidents}
        return "\n".join([*lines, *(f"{title}: {item}" for title, items in lists.items() for item in items)])


def _by_client(title: str, epsilons: Mapping[str, float]) -> list[str]:
    """Return a line of the clients' epsilons, with one number if all are shown alike; no line without clients."""
    shown = {name: format_epsilon(value) for name, value in epsilons.items()}
    if len(shown) > 1 and len(set(shown.values())) == 1:
        return [f"{title}: {next(iter(shown.values()))}"]
    return [f"{title}: " + ", ".join(f"{name} {value}" for name, value in shown.items())] if shown else []


def _alike(adversaries: Sequence[Adversary]) -> list[list[Adversary]]:
    """Return adversaries in groups against whom the same is proved, in order."""
    return [list(alike) for _, alike in groupby(adversaries, key=lambda one: replace(one, name="", view=""))]


def _paper_line(paper: PaperEpsilon) -> str:
    state = "valid here" if paper.valid else "NOT VALID here"
    return f"The paper's own epsilon: {format_epsilon(paper.epsilon)} ({paper.formula}; {state}: {paper.reason})"
