"""What of a run outlives its process."""

from collections.abc import Sequence
from typing import Protocol

from flower_dp.privacy.charge import Charge


class Durable(Protocol):
    """Keeps the charges of one run where a crash of this process does not reach them."""

    def charge(self, charge: Charge, server_round: int) -> None:
        """Write a charge down; it is on the disk when this returns, and no message of its round has left before.

        Raises:
            LedgerError: if it could not be written; nothing may be released then.
        """

    def of_run(self) -> Sequence[tuple[Charge, int]]:
        """Return all charges of the run, with their rounds, in order."""


class InMemory:
    """Nothing outlives this process."""

    def charge(self, charge: Charge, server_round: int) -> None:
        """Write nothing down: the state of the run alone has the charge."""

    def of_run(self) -> Sequence[tuple[Charge, int]]:
        """Return nothing."""
        return ()
