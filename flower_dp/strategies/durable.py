"""What of a run outlives its process."""

import math
import os
import uuid
from collections.abc import Mapping
from typing import Protocol

from flower_dp.privacy.charge import Charge
from flower_dp.privacy.events import UnsupportedEventError
from flower_dp.privacy.joint_cost import Scope
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

    def joint(self, scope: Scope, delta: float) -> JointEpsilon | None:
        """Return what this run and earlier ones have cost together; None if there were none before."""

    def close(self) -> None:
        """Let other processes write; nothing is charged after that."""


class InMemory:
    """Nothing outlives this process.

    Attributes:
        run: a random id.
    """

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex

    def charge(self, charge: Charge, server_round: int) -> None:
        """Write nothing down: the state of the run alone has the charge."""

    def joint(self, scope: Scope, delta: float) -> JointEpsilon | None:
        """Return None: no other run is known."""
        return None

    def close(self) -> None:
        """Nothing."""


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

    Raises:
        LedgerError: if the ledger can't be used, has no such run, or that had noise from a fixed seed and this one has not.
    """

    def __init__(self, path: str | os.PathLike[str], *, method: str, delta: float, private: bool, run: str = "") -> None:
        self._ledger: ServerLedger | None = ServerLedger(path)
        self._accounts = self._ledger.accounts
        self._earlier = self._ledger.num_runs_by_scope
        try:
            self.run = run or self._ledger.begin_run(method=method, delta=delta, private=private)
            own = self.charges({}) if run else ()
            if private and not all(one.private for one in self._ledger.runs if one.name == run):
                raise LedgerError("noise_seed: the run began with a fixed one, and is not private: it goes on with one alone")
            for scope in {Scope(unit=charge.unit, relation=charge.relation) for _, charge in own}:
                self._earlier[scope] -= 1  # this run is not before itself
        except BaseException:
            self.close()
            raise
        self._earlier = {scope: number for scope, number in self._earlier.items() if number}

    def charge(self, charge: Charge, server_round: int) -> None:
        """Write a charge down."""
        if self._ledger is None:
            raise RuntimeError("ledger: the run has ended")
        self._ledger.charge(self.run, charge, server_round)

    def charges(self, beyond: Mapping[str, int]) -> tuple[tuple[int, Charge], ...]:
        """Return what the run was charged with beyond so many charges of each release, with the rounds.

        Raises:
            LedgerError: if it was charged less often: then this is an older copy.
        """
        return () if self._ledger is None else self._ledger.charges(self.run, beyond)

    def joint(self, scope: Scope, delta: float) -> JointEpsilon | None:
        """Return what this run and earlier ones on the ledger have cost the client who was charged most."""
        if not self._earlier:
            return None
        apart = tuple(f"{number} run{'s' * (number > 1)} {other}" for other, number in self._earlier.items() if other != scope)
        num_runs = self._earlier.get(scope, 0) + 1
        try:
            cost = self._accounts.of(scope).worst(delta)
        except UnsupportedEventError:
            return JointEpsilon(num_runs=num_runs, epsilon=math.inf, delta=delta, accountant="none", apart=apart)
        return JointEpsilon(num_runs=num_runs, epsilon=cost.epsilon, delta=delta, accountant=cost.accountant, apart=apart)

    def close(self) -> None:
        """Let other processes write."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
