"""The log of one run's charges, stored so that they survive a failure of the run."""

from __future__ import annotations

import functools
import math
import os
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from flower_dp.core import checks
from flower_dp.privacy.budget import LedgerBudget
from flower_dp.privacy.charges import Charge, Charges, CostScope
from flower_dp.privacy.events import UnsupportedEventError
from flower_dp.privacy.private_file import LedgerError
from flower_dp.privacy.statement import JointEpsilon
from flower_dp.privacy.store import Store


class MemoryLog:
    """The log of one run in the memory of this process, with the other runs of its strategy.

    Copies of a run share its log, so only one copy can continue. Before its first charge a copy is another run.

    Attributes:
        run: a random id.
        charges: charges of the run.
        all: charges of all runs of the strategy, also of those with their own ledgers.
        unknown: runs that were charged elsewhere, in another process for example, before this process took over their state.

    Args:
        private: whether its noise does not come from a fixed seed.
        before: the log of the strategy's previous run; None for its first.
    """

    _of_runs: ClassVar[WeakValueDictionary[str, MemoryLog]] = WeakValueDictionary()
    # Strong references: a pickle may be loaded after its strategy has continued the run and was deleted.
    _pickled: ClassVar[dict[str, MemoryLog]] = {}

    def __init__(self, *, private: bool, before: MemoryLog | None = None) -> None:
        self.run, self.charges, self._private = uuid.uuid4().hex, Charges(), private
        self._rounds: dict[str, list[int]] = {}  # of the charges that were made in this process
        self.all: Charges = Charges() if before is None else before.all
        self.unknown: frozenset[str] = frozenset() if before is None else before.unknown
        self._of_runs[self.run] = self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.charges.last:
            self._pickled[self.run] = self
        return MemoryLog._copied, (self.run, self._private, self.charges, self.all, self.unknown, self._rounds)

    @classmethod
    def _copied(
        cls,
        run: str,
        private: bool,
        charges: Charges,
        every: Charges,
        unknown: frozenset[str],
        rounds: dict[str, list[int]],
    ) -> MemoryLog:
        begun = charges.last or run in unknown
        if begun and (here := cls._of_runs.get(run)) is not None:
            return here
        made = cls(private=private)
        made.charges, made.all, made.unknown, made._rounds = charges, every, unknown, rounds
        if begun:
            made.run = run
            cls._of_runs[run] = made
        return made

    def append(self, charge: Charge) -> None:
        """Count a charge.

        Raises:
            LedgerError: if it is not the next charge of its release, or its fingerprint differs from the previous one.
        """
        # First, so that after an interruption no other charge of this number is accepted.
        self.charges = self.charges.after(charge)
        self.count(charge, self.run)
        self._rounds.setdefault(charge.release, []).append(charge.server_round)

    def beyond(self, numbers: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Return release and round of every charge of this process beyond these numbers of charges per release."""
        charges = []
        for release, number in self.charges.numbers().items():
            if more := number - numbers.get(release, 0):
                charges += [(release, server_round) for server_round in self._rounds.get(release, [])[-more:]]
        return tuple(charges)

    def check_state(self, numbers: Mapping[str, int], charges: Charges) -> None:
        """Refuse a state with other charges than this run.

        A state without charges starts another run. A run without charges takes over the charges that a state has.
        It refuses a checkpoint's state, whose charges are in its ledger.
        """
        charged = self.charges.numbers()
        if charged and any(numbers.values()) and charged != numbers:
            raise _other_state(charged, numbers)
        if not charged and any(numbers.values()):
            if (has := charges.numbers()) != numbers:  # the state is from a checkpoint, whose ledger has the charges
                raise _other_state(numbers, has)
            self.unknown |= {self.run}
            self.charges = charges

    def count(self, charge: Charge, run: str) -> None:
        """Count a charge of a run, which may be on a ledger, for the joint epsilon; no charge counts twice."""
        if charge.number > self.all.numbers(run).get(charge.release, 0):
            self.all = self.all.after(charge, run=run, private=self._private)

    def joint(self, scope: CostScope, delta: float) -> JointEpsilon | None:
        """Return the joint epsilon of this run and the strategy's other runs; None if there are none."""
        return self.joint_of(self.run, scope, delta)

    def joint_of(self, run: str, scope: CostScope, delta: float) -> JointEpsilon | None:
        """Return the joint epsilon of a run and the strategy's other runs; None if there are none.

        It is infinite if one of them was charged in another process too: that process may have charged more.
        """
        joint = _joint(self.all, run, scope, delta)
        if self.unknown and (joint is not None or self.unknown != {run}):
            num_runs, apart = len({*self.all.runs(scope), *self.unknown, run}), () if joint is None else joint.runs_not_included
            return JointEpsilon(
                num_runs=num_runs, epsilon=math.inf, delta=delta, accountant="none", runs_not_included=apart, on_ledger=False
            )
        return None if joint is None else replace(joint, on_ledger=False)

    def close(self) -> None:
        """Do nothing: there is no file to release."""


class StoreLog:
    """The log of one run on a server's ledger.

    Attributes:
        run: the run's id there.
        charges: charges of the run.
        memory: log of the strategy's runs, if the ledger belongs to this run alone; None on a shared ledger.

    Args:
        path: path of the ledger, which exists.
        method: the method's title.
        delta: delta of the run's statement.
        private: whether its noise does not come from a fixed seed.
        run: id of the run to resume; empty for a new run.
        memory: log of the strategy's runs, if the ledger belongs to this run alone: they have a joint epsilon too.

    Raises:
        LedgerError: if the ledger can't be used, or has no such run.
        SettingsError: if only one of that run and this process has noise from a fixed seed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        method: str,
        delta: float,
        private: bool,
        run: str = "",
        memory: MemoryLog | None = None,
    ) -> None:
        self.memory, self._private = memory, private
        self._store: Store | None = Store(path)
        try:
            if self._store.clients:
                raise LedgerError(f"ledger {path}: is a device's ledger; must be a server's")
            self.run = run or self._store.begin(method=method, delta=delta, private=private)
            charges = self._store.read(self.run)
            if self._store.runs[self.run].private is not private:
                began = "without a seed; resume it without one" if not private else "with a seed, so it is not private; pass one"
                raise checks.SettingsError(f"noise_seed: the run began {began}")
            if memory is not None:
                for charge in charges:
                    memory.count(charge, self.run)
        except BaseException:
            self.close()
            raise
        # Events as charged, even if the noise comes from a fixed seed; `_all` counts such a run as not private.
        self.charges, self._all = functools.reduce(Charges.after, charges, Charges()), self._store.all
        self._budget: LedgerBudget | None = self._store.budget

    def append(self, charge: Charge) -> None:
        """Store a charge; it is on the disk when this returns. No message of its round may leave before.

        Raises:
            BudgetSpentError: if all runs together would exceed the ledger's budget; nothing was written then.
            LedgerError: if it could not be written; nothing may be released then.
        """
        if self._store is None:
            raise RuntimeError("ledger: the run has ended")
        before, memory = (self.charges, self._all), self.memory
        of_runs = None if memory is None else memory.all
        # Counted before it is written: an interruption then leaves no charge on the disk that the joint epsilon lacks.
        if memory is not None:
            memory.count(charge, self.run)
        self.charges = self.charges.after(charge)
        self._all = self._all.after(charge, run=self.run, private=self._private)
        try:
            self._store.append(self.run, charge)
        except Exception:  # not a KeyboardInterrupt: after that the charge may be on the disk, so it stays counted
            self.charges, self._all = before
            if memory is not None and of_runs is not None:
                memory.all = of_runs  # else the next charge of the same number would not count
            raise

    def check_state(self, numbers: Mapping[str, int], charges: Charges) -> None:
        """Refuse a state with other charges than the run has on the ledger, also if the ledger is closed."""
        charged = self.charges.numbers()
        if charged != numbers:
            raise _other_state(charged, numbers)

    def beyond(self, numbers: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Return release and round of every charge of the run beyond these numbers of charges per release.

        Raises:
            LedgerError: if the ledger has fewer charges than that: it is an older copy.
        """
        charges = () if self._store is None else self._store.read(self.run, numbers)
        return tuple((charge.release, charge.server_round) for charge in charges)

    def joint(self, scope: CostScope, delta: float) -> JointEpsilon | None:
        """Return the joint epsilon of this run and other runs (same ledger, else same strategy) for the most-charged client."""
        if self.memory is not None:
            return self.memory.joint_of(self.run, scope, delta)
        joint, budget = _joint(self._all, self.run, scope, delta), self._budget
        if joint is None or budget is None or not budget.fully_adaptive:
            return joint
        return replace(joint, filter_epsilon=budget.epsilon, filter_delta=budget.delta)

    def close(self) -> None:
        """Release the ledger, so that other processes can write to it."""
        if self._store is not None:
            self._store.close()
            self._store = None


# The charges of one run, and of the runs that compose with it. The id `run` stays the same when a run is resumed, since devices
# count its charges under that id.
ChargeLog = MemoryLog | StoreLog


def _other_state(charged: Mapping[str, int], numbers: Mapping[str, int]) -> LedgerError:
    texts = (", ".join(f"{number} x {name}" for name, number in counts.items() if number) for counts in (charged, numbers))
    has, state_has = (text or "nothing" for text in texts)
    return LedgerError(
        f"state: this run was charged {has}, and the state has {state_has}: its statement would lack what was "
        "released; begin() starts a new run, and a new strategy resumes another one"
    )


def _joint(every: Charges, run: str, scope: CostScope, delta: float) -> JointEpsilon | None:
    """Return the joint epsilon of a run and all others for the most-charged client; None without others."""
    others = dict.fromkeys((other, charge.scope) for (other, _), charge in every.last.items() if other != run)
    num_others = Counter(of for _, of in others)
    if not num_others:
        return None
    apart = tuple(f"{number} run{'s' * (number > 1)} {other}" for other, number in num_others.items() if other != scope)
    num_runs = num_others[scope] + 1
    try:
        cost = every.cost_of_most_charged(scope, delta)
    except UnsupportedEventError:
        return JointEpsilon(num_runs=num_runs, epsilon=math.inf, delta=delta, accountant="none", runs_not_included=apart)
    return JointEpsilon(num_runs=num_runs, epsilon=cost.epsilon, delta=delta, accountant=cost.accountant, runs_not_included=apart)
