"""The joint cost of a sweep's runs, composed from the charges in the runs' ledgers.

No client of one run is known to be a client of another run: another seed may deal the records otherwise. So the composition is
that of a client, or record, that was the most expensive one in every run.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_dp.core import checks, dp_events
from flower_dp.core.formatting import format_delta, format_epsilon
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.charges import Charges, CostScope
from flower_dp.privacy.events import UnsupportedEventError
from flower_dp.privacy.private_file import LedgerError
from flower_dp.privacy.store import Store
from flower_dp.running.run_folder import CHECKPOINT, read_metrics

_LEDGER = "ledger.sqlite"
CHOOSING = (
    "choosing among the runs: whoever looks at several runs and publishes one, or takes over its settings, has used all of them; "
    "the epsilon of one run does not cover that"
)
NOT_COVERED = (
    CHOOSING,
    "other runs on the same clients or records: this counts the runs in the sweep's folder alone",
    "metrics on test or validation records that are not public: only private evaluations are charged",
)
Events = Mapping[dp_events.DpEvent, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCharges:
    """The charges of one run in one scope.

    Attributes:
        histories: counts of events per owner, charges to all clients included; equal histories once.
        private: whether the run's noise was drawn afresh, and its epsilon is finite.
    """

    histories: tuple[Events, ...]
    private: bool

    @property
    def worst(self) -> Events | None:
        """The history that has all events of every other history; None if there is none."""
        return next((history for history in self.histories if all(_has(history, other) for other in self.histories)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCost:
    """An upper bound on the cost of private runs together for a client or record.

    Attributes:
        scope: unit and neighboring relation of the cost.
        num_runs: number of composed runs.
        num_others: number of runs of this scope without a finite epsilon.
        cost: cost of the composition.
    """

    scope: CostScope
    num_runs: int
    num_others: int
    cost: PrivacyCost

    def __str__(self) -> str:
        scope, cost = self.scope, self.cost
        others = f"{_runs(self.num_others)} without a finite epsilon"
        if not self.num_runs:
            return f"{others} for a {scope.unit} ({scope.relation}): not private"
        runs = "The one private run costs" if self.num_runs == 1 else f"All {self.num_runs} private runs together cost"
        text = (
            f"{runs} a {scope.unit} that was in each of them epsilon {format_epsilon(cost.epsilon)} at delta "
            f"{format_delta(cost.delta)}, at most ({scope.relation}; accountant {cost.accountant})"
        )
        return f"{text}; {others}: with them epsilon is infinite" if self.num_others else text

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as JSON values; null stands for an infinite epsilon."""
        return {
            "unit": self.scope.unit,
            "relation": self.scope.relation,
            "runs": self.num_runs,
            "runs not private": self.num_others,
            "epsilon": self.cost.epsilon if math.isfinite(self.cost.epsilon) else None,
            "delta": self.cost.delta,
            "accountant": self.cost.accountant,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatement:
    """The statement of a sweep's joint cost.

    Attributes:
        num_runs: number of runs with a ledger.
        together: joint costs, one for each unit and relation.
        without: folders of runs that are not accounted here, each with the reason.
    """

    num_runs: int
    together: tuple[JointCost, ...]
    without: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as JSON values; null stands for an infinite epsilon."""
        return {
            "runs": self.num_runs,
            "together": [cost.to_dict() for cost in self.together],
            "without account": list(self.without),
            "not covered": list(NOT_COVERED),
        }

    def __str__(self) -> str:
        lines = [f"Sweep statement: {_runs(self.num_runs)} with charges in their ledgers, finished or not"]
        lines += map(str, self.together)
        if len(self.together) > 1:
            lines.append("Costs of different units or relations are apart: no accountant adds them up")
        lines += [f"Not accounted: {reason}" for reason in self.without]
        lines += [f"Not covered: {text}" for text in NOT_COVERED]
        return "\n".join(lines)


def statement_of(folders: Sequence[Path]) -> SweepStatement:
    """Return the joint cost of the runs in some folders, from the ledgers beside their checkpoints."""
    charges_by_scope: dict[CostScope, list[tuple[RunCharges, float]]] = {}
    without = []
    for folder in folders:
        ledger = folder / CHECKPOINT / _LEDGER
        if not ledger.is_file():
            without.append(f"{folder.name}: no ledger in its folder (its charges are in the server's ledger, if it has one)")
            continue
        for scope, charged, delta in _charged(ledger):
            charges_by_scope.setdefault(scope, []).append((charged, delta))
    together = []
    for scope, runs in charges_by_scope.items():
        private = [charged for charged, _ in runs if charged.private]
        # At the smallest delta of all: at a larger one, epsilon is no larger. A pure run has delta 0; its epsilon holds at any.
        delta = min((delta for _, delta in runs if delta), default=0.0)
        cost = _least(private, delta, scope)
        together.append(JointCost(scope=scope, num_runs=len(private), num_others=len(runs) - len(private), cost=cost))
    return SweepStatement(num_runs=len(folders) - len(without), together=tuple(together), without=tuple(without))


def _least(runs: Sequence[RunCharges], delta: float, scope: CostScope) -> PrivacyCost:
    """Return the joint cost of runs; infinite if no accountant can compose them."""
    with suppress(UnsupportedEventError):
        if runs:
            return compose(runs, delta, scope)
    return PrivacyCost(epsilon=math.inf, delta=delta, relation=scope.relation, accountant="none")


def compose(runs: Sequence[RunCharges], delta: float, scope: CostScope) -> PrivacyCost:
    """Return the joint cost of runs for a client or record that was the most expensive one in each.

    If every run has a history that contains all its others, the events of these histories are composed. If not, every run gets an
    equal part of delta, and the largest epsilons of the runs add up.
    """
    checks.number("delta", delta, at_least=0, below=1)
    worst = [history for run in runs if (history := run.worst) is not None]
    if len(worst) == len(runs):
        total: Counter[dp_events.DpEvent] = Counter()
        for history in worst:
            total.update(history)
        return accounting.epsilon(_event(total), delta=delta, relation=scope.relation)
    part = delta / len(runs)
    costs = [
        max(accounting.epsilon(_event(history), delta=part, relation=scope.relation).epsilon for history in run.histories)
        for run in runs
    ]
    how = f"sum of the runs' epsilons at delta / {len(runs)}"
    return PrivacyCost(epsilon=sum(costs), delta=delta, relation=scope.relation, accountant=how)


def has_charges(folder: Path) -> bool:
    """Return whether a run was charged: its ledger has charges, can't be read, or is missing although rounds were recorded."""
    ledger = folder / CHECKPOINT / _LEDGER
    if not ledger.is_file():
        return any(row.get("round", 0) > 0 for row in read_metrics(folder))
    try:
        with Store(ledger, read_only=True) as store:
            return store.num_charges > 0
    except LedgerError:
        return True


def _charged(ledger: Path) -> Iterable[tuple[CostScope, RunCharges, float]]:
    """Yield the charges of each run in a ledger, with the delta of the run's statement."""
    with Store(ledger, read_only=True) as store:
        for run in store.runs.values():
            charges = store.charges[run.name]
            for scope in dict.fromkeys(charge.scope for charge in charges.last.values()):
                histories = histories_of(charges, scope)
                alone = _least([RunCharges(histories=histories, private=True)], run.delta, scope)
                private = math.isfinite(alone.epsilon)  # noise from a fixed seed counts as no noise
                yield scope, RunCharges(histories=histories, private=private), run.delta


def histories_of(charges: Charges, scope: CostScope) -> tuple[Events, ...]:
    """Return the counts of events per owner; equal histories once."""
    distinct = {frozenset(history.counts.items()) for history in charges.histories(scope)}
    return tuple(dict(counts) for counts in distinct)


def _has(history: Events, other: Events) -> bool:
    return all(history.get(event, 0) >= count for event, count in other.items())


def _event(counts: Events) -> dp_events.DpEvent:
    return dp_events.ComposedDpEvent([dp_events.SelfComposedDpEvent(event, count) for event, count in counts.items()])


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"
