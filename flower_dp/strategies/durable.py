"""What of a run outlives its process."""

from __future__ import annotations

import math
import os
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

from flower_dp.core import checks, dp
from flower_dp.privacy.charge import EVERY_CLIENT, Charge
from flower_dp.privacy.events import UnsupportedEventError
from flower_dp.privacy.joint_cost import EVERYONE, Accounts, Scope
from flower_dp.privacy.server_ledger import LedgerError, ServerLedger
from flower_dp.privacy.statement import JointEpsilon


class Durable(Protocol):
    """Keeps the charges of one run where a crash of this process does not reach them.

    Attributes:
        run: the run's id, the same for all of the run: devices count its charges under it.
    """

    @property
    def run(self) -> str: ...  # noqa: D102

    def charge(self, charge: Charge, server_round: int) -> None:
        """Write a charge down; it is on the disk when this returns, and no message of its round has left before.

        Raises:
            BudgetSpentError: if all runs together would pass the ledger's budget; nothing was written then.
            LedgerError: if it could not be written; nothing may be released then.
        """

    def check_state(self, numbers: Mapping[str, int]) -> None:
        """Refuse a state that has not the charges of this run: a statement of it would lack what was released.

        Args:
            numbers: how often the state was charged for every release.

        Raises:
            LedgerError: naming the numbers.
        """

    def joint(self, scope: Scope, delta: float) -> JointEpsilon | None:
        """Return what this run and earlier ones have cost together; None if there were none before."""

    def close(self) -> None:
        """Let other processes write; nothing is charged after that."""


class InMemory:
    """Nothing outlives this process, which knows the runs of one strategy.

    Attributes:
        run: a random id.

    Args:
        private: whether its noise is drawn afresh.
        before: the strategy's run before this one; None for its first.
    """

    def __init__(self, *, private: bool, before: InMemory | None = None) -> None:
        self._own, self._private = _Counts(uuid.uuid4().hex), private
        self._accounts: Accounts = Accounts() if before is None else before._accounts
        self._owners: dict[str, int] = {EVERY_CLIENT: EVERYONE} if before is None else before._owners
        # What was counted of every run of the strategy: its scopes, and how often each release.
        self._scopes: dict[str, set[Scope]] = {} if before is None else {**before._scopes}
        self._numbers: dict[tuple[str, str], int] = {} if before is None else {**before._numbers}

    @property
    def run(self) -> str:  # noqa: D102
        return self._own.run

    def charge(self, charge: Charge, server_round: int) -> None:
        """Count a charge.

        Raises:
            LedgerError: if it was made before: then the state of the run is an older one, or a copy of the strategy has gone on
                with it, and its budget would be spent again.
        """
        last = self._own.numbers.get(charge.release, 0)
        if charge.number <= last:
            raise LedgerError(
                f"state: {charge.release} was charged {last} times in this run, and the state has {charge.number - 1} of them: "
                "it is an older one, or a copy of this strategy has gone on; begin() begins a new run"
            )
        self.count(charge, self.run)
        self._own.numbers[charge.release] = charge.number

    def check_state(self, numbers: Mapping[str, int]) -> None:
        """Refuse a state with other charges than this run; one without charges begins another run, and one of no run goes on."""
        own = self._own.numbers
        if own and any(numbers.values()) and any(own.get(name, 0) != number for name, number in numbers.items()):
            raise _other_state(own, numbers)

    def count(self, charge: Charge, run: str) -> None:
        """Count a charge of a run, which may be on a ledger, for the joint epsilon; one that was counted before is not again."""
        if charge.number <= self._numbers.get((run, charge.release), 0):
            return
        scope = Scope(unit=charge.unit, relation=charge.relation)
        histories = self._accounts.of(scope)
        places = {event: histories.place(event if self._private else dp.NonPrivateDpEvent()) for event in set(charge.events)}
        for owner, event in zip(charge.owners, charge.events, strict=True):
            histories.charge(self._owners.setdefault(owner, len(self._owners)), places[event])
        self._numbers[run, charge.release] = charge.number
        self._scopes[run] = self._scopes.get(run, set()) | {scope}

    def joint(self, scope: Scope, delta: float) -> JointEpsilon | None:
        """Return what this run and the strategy's earlier ones have cost together; None if there were none."""
        return self.joint_of(self.run, scope, delta)

    def joint_of(self, run: str, scope: Scope, delta: float) -> JointEpsilon | None:
        """Return what a run and the strategy's others have cost together; None if there are none."""
        earlier = Counter(one for other, scopes in self._scopes.items() if other != run for one in scopes)
        joint = _joint(self._accounts, earlier, scope, delta)
        return None if joint is None else replace(joint, on_ledger=False)

    def close(self) -> None:
        """Nothing."""


class _Counts:
    """How often the releases of a run were charged in this process. Copies of a run share it: of several one goes on."""

    _of_runs: ClassVar[WeakValueDictionary[str, _Counts]] = WeakValueDictionary()

    def __init__(self, run: str, numbers: Mapping[str, int] | None = None) -> None:
        self.run, self.numbers = run, dict(numbers or {})
        self._of_runs[run] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Counts._copied, (self.run, self.numbers)

    @classmethod
    def _copied(cls, run: str, numbers: Mapping[str, int]) -> _Counts:
        """Return those of a run that was copied or pickled: before its first charge it is another run."""
        if not numbers:
            return cls(uuid.uuid4().hex)
        return cls._of_runs.get(run) or cls(run, numbers)


class OnLedger:
    """A run that begins, or goes on, on a server's ledger.

    Attributes:
        run: its id there.

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
        memory: InMemory | None = None,
    ) -> None:
        self.memory = memory
        self._ledger: ServerLedger | None = ServerLedger(path)
        self._accounts, self._budget = self._ledger.accounts, self._ledger.budget
        self._earlier = self._ledger.num_runs_by_scope
        try:
            self.run = run or self._ledger.begin_run(method=method, delta=delta, private=private)
            own = self.charges({}) if run else ()
            self._numbers = dict(Counter(charge.release for _, charge in own))
            if not all(one.private is private for one in self._ledger.runs if one.name == run):
                began = (
                    "without one: it goes on so" if not private else "with a fixed one, and is not private: it goes on with one"
                )
                raise checks.SettingsError(f"noise_seed: the run began {began} alone")
            for scope in {Scope(unit=charge.unit, relation=charge.relation) for _, charge in own}:
                self._earlier[scope] -= 1  # this run is not before itself
            if memory is not None:
                for _, charge in own:
                    memory.count(charge, self.run)
        except BaseException:
            self.close()
            raise
        self._earlier = {scope: number for scope, number in self._earlier.items() if number}

    def charge(self, charge: Charge, server_round: int) -> None:
        """Write a charge down."""
        if self._ledger is None:
            raise RuntimeError("ledger: the run has ended")
        # First: an interruption leaves no charge on the disk that the joint epsilon lacks.
        if self.memory is not None:
            self.memory.count(charge, self.run)
        self._ledger.charge(self.run, charge, server_round)
        self._numbers[charge.release] = charge.number

    def check_state(self, numbers: Mapping[str, int]) -> None:
        """Refuse a state with other charges than the run has on the ledger, also after that was closed."""
        if any(self._numbers.get(name, 0) != number for name, number in numbers.items()):
            raise _other_state(self._numbers, numbers)

    def charges(self, beyond: Mapping[str, int]) -> tuple[tuple[int, Charge], ...]:
        """Return what the run was charged with beyond so many charges of each release, with the rounds.

        Raises:
            LedgerError: if it was charged less often: then this is an older copy.
        """
        return () if self._ledger is None else self._ledger.charges(self.run, beyond)

    def joint(self, scope: Scope, delta: float) -> JointEpsilon | None:
        """Return what this run and earlier ones, on the ledger or of the strategy, have cost the client who was charged most."""
        if self.memory is not None:
            return self.memory.joint_of(self.run, scope, delta)
        joint, budget = _joint(self._accounts, self._earlier, scope, delta), self._budget
        if joint is None or budget is None or not budget.fully_adaptive:
            return joint
        return replace(joint, filter_epsilon=budget.epsilon, filter_delta=budget.delta)

    def close(self) -> None:
        """Let other processes write."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


def _other_state(own: Mapping[str, int], numbers: Mapping[str, int]) -> LedgerError:
    told = (", ".join(f"{number} x {name}" for name, number in one.items() if number) for one in (own, numbers))
    charged, has = (one or "nothing" for one in told)
    return LedgerError(
        f"state: this run was charged {charged}, and the state has {has}: its statement would lack what was "
        "released; begin() begins a new run, and a new strategy goes on with another one"
    )


def _joint(accounts: Accounts, earlier: Mapping[Scope, int], scope: Scope, delta: float) -> JointEpsilon | None:
    """Return what a run and the earlier ones have cost together the client who was charged most; None without earlier ones."""
    if not earlier:
        return None
    apart = tuple(f"{number} run{'s' * (number > 1)} {other}" for other, number in earlier.items() if other != scope)
    num_runs = earlier.get(scope, 0) + 1
    try:
        cost = accounts.of(scope).worst(delta)
    except UnsupportedEventError:
        return JointEpsilon(num_runs=num_runs, epsilon=math.inf, delta=delta, accountant="none", apart=apart)
    return JointEpsilon(num_runs=num_runs, epsilon=cost.epsilon, delta=delta, accountant=cost.accountant, apart=apart)
