"""The privacy statement: what was protected, against whom, with which epsilon and delta, and what was not covered.

It has two epsilons, each with its label. The statement's own is an upper bound that is proved for the code that ran. The paper's
is the value of the paper's formula, with a flag that says whether the formula's assumptions held.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flower_dp.core.formatting import finite_or_none, format_delta, format_epsilon, format_epsilon_at_delta
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.events import Relation

_NO_GUARANTEE = "DELTA IS NO GUARANTEE"
# The version of `PrivacyStatement.to_dict`.
FORMAT = 2
# Which attributes `to_dict` puts into one group.
_GROUPS = {
    "guarantee": (
        *("private", "epsilon", "delta", "unit", "relation", "accountant", "protected_against"),
        *("num_charged_rounds", "num_rounds_of_event", "epsilon_by_release", "joint"),
    ),
    "mechanism": ("sampling", "noise", "paper_epsilon", "events"),
}
# Columns of a line of text, and of the titles at its left.
_WIDTH, _TITLE_WIDTH = 130, 15


def delta_warning(delta: float, num_units: int, unit: str) -> tuple[str, ...]:
    """Return a warning about a delta that guarantees nothing, or no line: delta must be far below 1 / the number of units.

    Args:
        delta: delta of the guarantee.
        num_units: clients, or records of one client.
        unit: `client` or `record`.

    Example:
        >>> from flower_dp.privacy.statement import delta_warning
        >>> delta_warning(1e-5, 100, "client")
        ()
    """
    if delta * num_units < 1:
        return ()
    at_least = f"{_NO_GUARANTEE}: {format_delta(delta)} is at least 1/{num_units} for {num_units} {unit}s"
    return (f"{at_least}. A mechanism that publishes one {unit}'s data in full can have such a delta.",)


def delta_warnings(lines: Iterable[str]) -> list[str]:
    """Return the lines that `delta_warning` has made."""
    return [line for line in lines if line.startswith(_NO_GUARANTEE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEpsilon:
    """A paper's own epsilon.

    Attributes:
        epsilon: value of the paper's formula.
        formula: name of the formula, or of its theorem or equation.
        valid: whether the formula's assumptions held in this run.
        reason: the assumptions that held, or those that did not.
    """

    epsilon: float
    formula: str
    valid: bool
    reason: str

    def __str__(self) -> str:
        state = "valid here" if self.valid else "NOT VALID here"
        return f"{format_epsilon(self.epsilon)} ({self.formula}; {state}: {self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adversary:
    """One adversary: what it sees, and the epsilon against it, the largest over clients.

    Attributes:
        name: the adversary, in one or two words.
        view: the data that it is assumed to see.
        epsilon: proved upper bound against this adversary.
        accountant: the accountant that proves it.
        lowest_noise_std: lowest noise std on a number of the training release that this adversary sees, or from which its view
            is computed. The number is a coordinate of a sum, a message or a broadcast.
        paper_epsilon: the paper's epsilon against this adversary, or None.
        trusted: whether the statement trusts it: no protection is claimed against it.
    """

    name: str
    view: str
    epsilon: float
    accountant: str
    lowest_noise_std: float
    paper_epsilon: PaperEpsilon | None = None
    trusted: bool = False

    @classmethod
    def of(cls, name: str, cost: PrivacyCost, **fields: Any) -> "Adversary":
        """Return an adversary against whom this cost is proved; `fields` are the other attributes."""
        return cls(name=name, epsilon=cost.epsilon, accountant=cost.accountant, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEpsilons:
    """The epsilons of clients with their own ledgers.

    Attributes:
        count: number of clients.
        minimum: smallest epsilon.
        median: median epsilon.
        maximum: largest epsilon.
        worst: name of the client with the largest epsilon.
        by_client: epsilon by client, for up to 100 clients.
        evaluation_by_client: epsilon of each client's private evaluations alone.
    """

    count: int
    minimum: float
    median: float
    maximum: float
    worst: str
    by_client: dict[str, float]
    evaluation_by_client: dict[str, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the epsilons as text: of all clients, of single clients, and of their evaluations."""
        least, middle, most = map(format_epsilon, (self.minimum, self.median, self.maximum))
        if least == most:
            lines = [f"{self.count} clients: epsilon {most} for each of them."]
        else:
            spread = f"at least {least}, median {middle}, at most {most} ({self.worst})"
            lines = [f"{self.count} clients: epsilon {spread}.", *_by_client("Each client", self.by_client)]
        return lines + _by_client("Each client's evaluations alone", self.evaluation_by_client)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointEpsilon:
    """The joint epsilon of this run and earlier runs, for the client who was charged most.

    Attributes:
        num_runs: number of runs, this one included.
        epsilon: upper bound of the composition of all their events, if no run's settings depend on another run's results.
        delta: the delta at which `epsilon` holds.
        accountant: the accountant that proves it.
        on_ledger: whether the runs share a server's ledger. If not, they are runs of one strategy in this process.
        runs_not_included: runs not included because their unit or neighboring relation differs, as text.
        filter_epsilon: epsilon of the ledger's fully adaptive budget, or None. It holds even if results of some runs chose the
            settings of others; `epsilon` does not.
        filter_delta: the delta at which `filter_epsilon` holds.
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
        text = f"All {self.num_runs} runs {which} together: {format_epsilon_at_delta(self.epsilon, self.delta)}"
        text += f" (accountant {self.accountant}), for the client who was charged most."
        if self.runs_not_included:
            text += f" Not included, since no accountant composes them with these: {', '.join(self.runs_not_included)}."
        if self.filter_epsilon is not None and self.filter_delta is not None:
            filtered = format_epsilon_at_delta(self.filter_epsilon, self.filter_delta)
            text += f" If results of some runs chose the settings of others: at most {filtered}, the ledger's budget."
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyStatement:
    """(epsilon, delta)-differential privacy of everything that a run released, with all assumptions and exceptions.

    Attributes:
        method: the method's name.
        unit: unit of privacy: `client` or `record`.
        relation: neighboring relation.
        protected_against: the adversaries against whom `epsilon` holds.
        delta: the delta at which every epsilon here holds, in [0, 1).
        epsilon: proved upper bound; infinite if the run was not private.
        accountant: the accountant that proves it.
        paper_epsilon: the paper's epsilon, if the method has one.
        num_charged_rounds: number of rounds whose release was charged.
        noise: clip norm and noise, by name.
        sampling: rule that sampled the cohorts, as text.
        events: the events of the ledger, as text.
        assumptions: conditions of the guarantee.
        not_covered: data from clients or the server that the guarantee does not cover.
        incidents: dropouts, refused replies and early stops, as text.
        unlisted_incidents: text on what `incidents` leave out: what could reveal a cohort, and replies to evaluations, which
            are not counted; empty for nothing.
        adversaries: the epsilon against each adversary, if they see different things. `epsilon` is the largest over those that
            are not trusted.
        epsilon_by_release: if several kinds of releases were charged, an upper bound for each kind alone.
        clients: if every client has its own ledger, the epsilons of all clients; `epsilon` is the largest of them.
        joint: joint epsilon with earlier runs on the same server's ledger, or of the same strategy; None if there are none.
        num_rounds_of_event: number of rounds that one event covers, charged with the first; 0 if each round has its own.

    Example:
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.strategies import DPFedAvg
        >>> strategy = DPFedAvg(
        ...     clip_norm=0.5, noise_multiplier=1.0, sampling=PoissonSampling(sampling_rate=0.1), num_clients=100, delta=1e-4
        ... )
        >>> statement = strategy.statement
        >>> statement.unit, statement.relation, statement.private
        ('client', 'add-or-remove-one', True)
        >>> print(str(statement).splitlines()[2])
        GUARANTEE      Each client has (0.0000, 0.0001)-differential privacy (add-or-remove-one).
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
    unlisted_incidents: str = ""
    adversaries: tuple[Adversary, ...] = ()
    epsilon_by_release: Mapping[str, float] = field(default_factory=dict)
    clients: ClientEpsilons | None = None
    joint: JointEpsilon | None = None
    num_rounds_of_event: int = 0

    @property
    def private(self) -> bool:
        """Whether there is any guarantee at all."""
        return math.isfinite(self.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as JSON-ready values, in the groups of its text.

        An infinite epsilon is None. `guarantee.private` is False if that of the guarantee is infinite.
        """
        flat: dict[str, Any] = {"private": self.private, **finite_or_none(asdict(self))}
        grouped = {title: {name: flat.pop(name) for name in names} for title, names in _GROUPS.items()}
        return {"format": FORMAT, "method": flat.pop("method"), **grouped, **flat}

    def __str__(self) -> str:
        unlisted = [f"Not listed: {self.unlisted_incidents}"] if self.unlisted_incidents else []
        happened = [*self.incidents, *unlisted] if self.incidents else [" ".join(["None.", *unlisted])]
        groups = {
            "GUARANTEE": _paragraphs(self._guarantee()),
            "AGAINST WHOM": _table(self.adversaries),
            "HOW": _paragraphs(self._how()),
            "CLIENTS": _paragraphs([] if self.clients is None else self.clients.lines()),
            "ASSUMPTIONS": _paragraphs([line for line in self.assumptions if not line.startswith(_NO_GUARANTEE)], mark="{}. "),
            "NOT COVERED": _paragraphs(self.not_covered, mark="- "),
            "INCIDENTS": _paragraphs(happened, mark="- " if self.incidents else ""),
        }
        texts = [f"{title:{_TITLE_WIDTH}}" + f"\n{'':{_TITLE_WIDTH}}".join(lines) for title, lines in groups.items() if lines]
        return "\n\n".join([f"Privacy statement: {self.method}", *texts])

    def _guarantee(self) -> list[str]:
        if self.private:
            promise = f"({format_epsilon(self.epsilon)}, {format_delta(self.delta)})-differential privacy ({self.relation})"
            charged = f"{self.num_charged_rounds} charged round{'s' * (self.num_charged_rounds != 1)}"
            if self.num_rounds_of_event and self.num_charged_rounds:
                charged = f"the whole run of {self.num_rounds_of_event} rounds, {self.num_charged_rounds} of them charged so far"
            if self.accountant.startswith("selection-"):  # it covers the choice, not the rounds of the chosen run alone
                charged = f"the choice among K runs; the chosen run has {charged}"
            proof = f"Upper bound (accountant {self.accountant}) for {charged}."
            lines = [f"Each {self.unit} has {promise}.", proof, *delta_warnings(self.assumptions)]
        else:
            lines = [f"NOT PRIVATE. Epsilon is infinite: no guarantee is stated for any {self.unit}."]
        if not self.adversaries:  # else their table says it
            lines.append(f"Protected against: {self.protected_against}.")
        if self.epsilon_by_release:
            alone = ", ".join(f"{name} {format_epsilon(value)}" for name, value in self.epsilon_by_release.items())
            lines.append(f"Each release alone: {alone}; together {format_epsilon(self.epsilon)}.")
        return lines if self.joint is None else [*lines, str(self.joint)]

    def _how(self) -> list[str]:
        noise = ", ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in self.noise.items())
        papers = {f" against {each.name}": each.paper_epsilon for each in self.adversaries if each.paper_epsilon is not None}
        if not papers and self.paper_epsilon is not None:
            papers = {"": self.paper_epsilon}
        shown = [f"Paper's epsilon{against}: {paper}." for against, paper in papers.items()]
        return [f"Sampling: {self.sampling}.", f"Noise: {noise}.", *shown]


def _paragraphs(texts: Iterable[str], *, mark: str = "") -> list[str]:
    """Return texts as wrapped lines; `mark` stands before each text, with its number in place of braces."""
    return [line for number, text in enumerate(texts, 1) for line in _wrapped(text, mark.format(number))]


def _wrapped(text: str, before: str) -> list[str]:
    """Return the lines of a text, the first one behind `before`, the others below it."""
    width = max(20, _WIDTH - _TITLE_WIDTH - len(before))  # numbers of many digits may leave less
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return [f"{' ' * len(before) if number else before}{line}" for number, line in enumerate(lines)]


def _table(adversaries: Sequence[Adversary]) -> list[str]:
    """Return a row for each adversary: epsilon, noise, accountant and view."""
    if not adversaries:
        return []
    rows = [("", "epsilon", "noise std", "accountant", "sees")] + [
        (
            f"{adversary.name}{' (TRUSTED)' * adversary.trusted}",
            format_epsilon(adversary.epsilon),
            f"{adversary.lowest_noise_std:.6g}",
            adversary.accountant,
            adversary.view,
        )
        for adversary in adversaries
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = [
        line
        for *cells, view in rows
        for line in _wrapped(view, "".join(f"{cell:{width}}  " for cell, width in zip(cells, widths, strict=True)))
    ]
    trusted = [adversary for adversary in adversaries if adversary.trusted]
    return lines + [line for adversary in trusted for line in _wrapped(_trust_in(adversary), "")]


def _trust_in(adversary: Adversary) -> str:
    """Return what an adversary is trusted with. Its own epsilon, if it is finite, is no part of the guarantee."""
    if not math.isfinite(adversary.epsilon):
        return f"TRUSTED: no protection is claimed against {adversary.name}."
    alone = "its row is what a noise share alone proves"
    return f"TRUSTED not to look at single messages: no guarantee covers {adversary.name}; {alone}."


def _by_client(title: str, epsilons: Mapping[str, float]) -> list[str]:
    """Return a line of the clients' epsilons, with one number if all are shown alike; no line without clients."""
    shown = {name: format_epsilon(value) for name, value in epsilons.items()}
    if len(shown) > 1 and len(set(shown.values())) == 1:
        return [f"{title}: {next(iter(shown.values()))}."]
    return [f"{title}: " + ", ".join(f"{name} {value}" for name, value in shown.items()) + "."] if shown else []
