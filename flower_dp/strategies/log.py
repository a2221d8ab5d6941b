"""The log of a run's charges, where nothing that happens to the run reaches them."""

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
    """Nothing outlives this process, which knows the runs of one strategy.

    Copies of a run share its log, so that of several copies one goes on; before its first charge a copy is another run.

    Attributes:
        run: a random id.
        charges: those of the run.
        all: those of all runs of the strategy, also of those that are on ledgers of their own.
        unknown: the runs that were charged elsewhere, in another process for example, before they went on here by their state.

    Args:
        private: whether its noise is drawn afresh.
        before: the log of the strategy's run before this one; None for its first.
    """

    _of_runs: ClassVar[WeakValueDictionary[str, MemoryLog]] = WeakValueDictionary()
    # A pickle may come back after its strategy has gone on and was deleted.
    _pickled: ClassVar[dict[str, MemoryLog]] = {}

    def __init__(self, *, private: bool, before: MemoryLog | None = None) -> None:
        self.run, self.charges, self._private = uuid.uuid4().hex, Charges(), private
        self._rounds: dict[str, list[int]] = {}  # of the charges that were made here
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
            LedgerError: if it is not the next one of its release, or is of something else than the last one.
        """
        self.charges = self.charges.after(charge)  # first: after an interruption no other charge of this number is taken
        self.count(charge, self.run)
        self._rounds.setdefault(charge.release, []).append(charge.server_round)

    def beyond(self, numbers: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Return release and round of what the run was charged with here beyond so many charges of each release."""
        found = []
        for release, number in self.charges.numbers().items():
            if more := number - numbers.get(release, 0):
                found += [(release, server_round) for server_round in self._rounds.get(release, [])[-more:]]
        return tuple(found)

    def check_state(self, numbers: Mapping[str, int], charges: Charges) -> None:
        """Refuse a state with other charges than this run; one without charges begins another run, and one of no run goes on."""
        own = self.charges.numbers()
        if own and any(numbers.values()) and own != numbers:
            raise _other_state(own, numbers)
        if not own and any(numbers.values()):
            if (has := charges.numbers()) != numbers:  # of a checkpoint, whose ledger has them
                raise _other_state(numbers, has)
            self.unknown |= {self.run}
            self.charges = charges

    def count(self, charge: Charge, run: str) -> None:
        """Count a charge of a run, which may be on a ledger, for the joint epsilon; one that was counted before is not again."""
        if charge.number > self.all.numbers(run).get(charge.release, 0):
            self.all = self.all.after(charge, run=run, private=self._private)

    def joint(self, scope: CostScope, delta: float) -> JointEpsilon | None:
        """Return what this run and the strategy's earlier ones have cost together; None if there were none."""
        return self.joint_of(self.run, scope, delta)

    def joint_of(self, run: str, scope: CostScope, delta: float) -> JointEpsilon | None:
        """Return what a run and the strategy's others have cost together; None if there are none.

        It is infinite if one of them was charged elsewhere: its state says how often, and not with what.
        """
        joint = _joint(self.all, run, scope, delta)
        if self.unknown and (joint is not None or self.unknown != {run}):
            num_runs, apart = len({*self.all.runs(scope), *self.unknown, run}), () if joint is None else joint.runs_not_included
            return JointEpsilon(
                num_runs=num_runs, epsilon=math.inf, delta=delta, accountant="none", runs_not_included=apart, on_ledger=False
            )
        return None if joint is None else replace(joint, on_ledger=False)

    def close(self) -> None:
        """Nothing."""


class StoreLog:
    """A run that begins, or goes on, on a server's ledger.

    Attributes:
        run: its id there.
        charges: those of the run.
        memory: of the strategy's runs, where the ledger is that of this run alone; None on a ledger of several runs.

    Args:
        path: of the ledger, which exists.
        method: the method's title.
        delta: of the run's statement.
        private: whether its noise is drawn afresh.
        run: the id of a run that goes on; empty for a new one.
        memory: of the strategy's runs, where the ledger is that of this run alone: they have a joint epsilon too.

    Raises:
        LedgerError: if the ledger can't be used, or has no such run.
        SettingsError: only one of that run and this has noise from a fixed seed.
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
                raise LedgerError(f"ledger {path}: is a device's ledger, and no server's")
            self.run = run or self._store.begin(method=method, delta=delta, private=private)
            own = self._store.read(self.run)
            if self._store.runs[self.run].private is not private:
                began = (
                    "without one: it goes on so" if not private else "with a fixed one, and is not private: it goes on with one"
                )
                raise checks.SettingsError(f"noise_seed: the run began {began} alone")
            if memory is not None:
                for charge in own:
                    memory.count(charge, self.run)
        except BaseException:
            self.close()
            raise
        # As they were made, also with noise from a fixed seed.
        self.charges, self._all = functools.reduce(Charges.after, own, Charges()), self._store.all
        self._budget: LedgerBudget | None = self._store.budget

    def append(self, charge: Charge) -> None:
        """Write a charge down; it is on the disk when this returns, and no message of its round has left before.

        Raises:
            BudgetSpentError: if all runs together would pass the ledger's budget; nothing was written then.
            LedgerError: if it could not be written; nothing may be released then.
        """
        if self._store is None:
            raise RuntimeError("ledger: the run has ended")
        before, memory = (self.charges, self._all), self.memory
        of_runs = None if memory is None else memory.all
        # First: an interruption leaves no charge on the disk that the joint epsilon lacks.
        if memory is not None:
            memory.count(charge, self.run)
        self.charges = self.charges.after(charge)
        self._all = self._all.after(charge, run=self.run, private=self._private)
        try:
            self._store.append(self.run, charge)
        except Exception:  # an interruption is none: then it may be on the disk
            self.charges, self._all = before
            if memory is not None and of_runs is not None:
                memory.all = of_runs  # else another charge of its number would not count
            raise

    def check_state(self, numbers: Mapping[str, int], charges: Charges) -> None:
        """Refuse a state with other charges than the run has on the ledger, also after that was closed."""
        own = self.charges.numbers()
        if own != numbers:
            raise _other_state(own, numbers)

    def beyond(self, numbers: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Return release and round of what the run was charged with beyond so many charges of each release.

        Raises:
            LedgerError: if it was charged less often: then this is an older copy.
        """
        charges = () if self._store is None else self._store.read(self.run, numbers)
        return tuple((charge.release, charge.server_round) for charge in charges)

    def joint(self, scope: CostScope, delta: float) -> JointEpsilon | None:
        """Return what this run and earlier ones, on the ledger or of the strategy, have cost the client who was charged most."""
        if self.memory is not None:
            return self.memory.joint_of(self.run, scope, delta)
        joint, budget = _joint(self._all, self.run, scope, delta), self._budget
        if joint is None or budget is None or not budget.fully_adaptive:
            return joint
        return replace(joint, filter_epsilon=budget.epsilon, filter_delta=budget.delta)

    def close(self) -> None:
        """Let other processes write."""
        if self._store is not None:
            self._store.close()
            self._store = None


# The charges of one run, and of the runs that it adds up with. Its `run` is the id of the run, the same for all of it: devices
# count its charges under it.
ChargeLog = MemoryLog | StoreLog


def _other_state(own: Mapping[str, int], numbers: Mapping[str, int]) -> LedgerError:
    told = (", ".join(f"{number} x {name}" for name, number in one.items() if number) for one in (own, numbers))
    charged, has = (one or "nothing" for one in told)
    return LedgerError(
        f"state: this run was charged {charged}, and the state has {has}: its statement would lack what was "
        "released; begin() begins a new run, and a new strategy goes on with another one"
    )


def _joint(every: Charges, run: str, scope: CostScope, delta: float) -> JointEpsilon | None:
    """Return what a run and the others have cost together the client who was charged most; None without others."""
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
