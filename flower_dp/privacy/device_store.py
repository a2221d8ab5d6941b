"""A client's account in a file on its device: the number of replies that it was charged for, over all runs and crashes.

The file is a ledger like a server's (`flower_dp.privacy.store`), for the device's own clients. Each charge stores the server's
own number of the reply: a server that resumes from an older copy of its ledger repeats a number, and is refused.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from flower_dp.core import dp_events
from flower_dp.privacy.charges import Charge, CostScope, History
from flower_dp.privacy.client_terms import ChargeRefusal, ReplyTerms, num_replies_of
from flower_dp.privacy.events import Relation
from flower_dp.privacy.ledger_tables import naming
from flower_dp.privacy.private_file import LedgerError
from flower_dp.privacy.store import Store

_TRAINING, _EVALUATION = "training", "evaluation"
_SUFFIX = f", {_EVALUATION}"
# The ends of the names of accounts beside a client's own for training.
_ACCOUNT = re.compile(r", (evaluation|run [0-9a-f]+)$")
# Seconds that a reply waits for other processes of its device.
_LOCK_SECONDS = 10.0


def evaluation_account(name: str) -> str:
    """Return the name of a client's account for evaluations, which is separate from that for training."""
    return name + _SUFFIX


def participation_account(name: str, run: str) -> str:
    """Return the name of a client's account for the participations in one run, whose noise is not the client's own."""
    return f"{name}, run {run}"


def owner_of(account: str) -> str:
    """Return the name of an account's client."""
    return _ACCOUNT.sub("", account)


class ReplyNumber(NamedTuple):
    """The number of a client's reply by the server's count: the id of the run, and 1, 2, ... in it.

    `separation` is the least difference from the number of the client's last reply in the run; 0 if there is none to keep.
    """

    run: str
    number: int
    separation: int = 0

    def early_reason(self, last: int) -> ChargeRefusal | None:
        """Return the reason why a reply comes too early after the client's reply `last`; None if it does not, or `last` is 0."""
        if not last < self.number < last + self.separation or not last:
            return None
        reason = f"reply in round {self.number} of run {self.run} would be the second within {self.separation} rounds"
        return ChargeRefusal(public=reason, own=f"{reason}; the last one was in round {last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAccount:
    """One client's account.

    Attributes:
        replies: number of replies that the client was charged for.
        terms: terms that opened the account, as one line; None before the first reply. They can't change.
        relation: neighboring relation of the terms.
        counts: number of charges by event.
        runs: largest number of a reply by the server's count, by the run's id.
    """

    replies: int = 0
    terms: str | None = None
    relation: Relation = "add-or-remove-one"
    counts: Mapping[dp_events.DpEvent, int] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_replies(self) -> int:
        """Largest number of replies that the terms allow; 0 without terms."""
        return 0 if self.terms is None else num_replies_of(self.terms)

    @property
    def spent(self) -> History:
        """History of all charges."""
        return History(relation=self.relation, counts=self.counts)

    def repeat_reason(self, asked: ReplyNumber) -> ChargeRefusal | None:
        """Return the reason why a reply is not new by the server's own count; None if it is new.

        A round that was charged and never arrived makes the next number larger, never smaller.
        """
        if asked.number > self.runs.get(asked.run, 0):
            return asked.early_reason(self.runs.get(asked.run, 0))
        cause = "the server's ledger is an older copy, or the message came twice"
        reason = f"reply {asked.number} of run {asked.run} was charged before; {cause}"
        return ChargeRefusal(public=reason, own=f"{reason}; the last one was {self.runs[asked.run]}", repeated=True)

    def after(self, run: str, charge: Charge, event: dp_events.DpEvent) -> "ClientAccount":
        """Return the account with one more charge.

        Raises:
            LedgerError: if it does not follow the previous charge.
        """
        if charge.number != self.replies + 1:
            raise LedgerError(f"is damaged: reply {self.replies + 1} of {charge.release} is missing")
        if self.repeat_reason(ReplyNumber(run=run, number=charge.server_round)):
            raise LedgerError(f"is damaged: reply {charge.number} of {charge.release} repeats a number of the server")
        if self.terms not in (None, charge.fingerprint):
            raise LedgerError(f"is damaged: reply {charge.number} of {charge.release} has other terms")
        counts, runs = {**self.counts, event: self.counts.get(event, 0) + 1}, {**self.runs, run: charge.server_round}
        return ClientAccount(
            replies=charge.number, terms=charge.fingerprint, relation=charge.scope.relation, counts=counts, runs=runs
        )


class DeviceLedger:
    """The accounts of a device's clients in one file, which the device's owner creates.

    It is an error, and never a new account, if the file is missing, unreadable, damaged or an older copy. The same holds if
    another process locks it for 10 seconds, another user owns it, others can open it, or a requested client has no account in it.

    Args:
        path: path of the file. Its folder must be writable by this user alone: others could restore an older copy.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from flower_dp.privacy.device_store import DeviceLedger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = DeviceLedger.create(Path(folder) / "ledger.sqlite", ["hospital-7"])
        ...     ledger.read()["hospital-7"].replies
        0
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | os.PathLike[str], names: Sequence[str]) -> "DeviceLedger":
        """Create the file with an empty account for each client, readable and writable by this user alone.

        Raises:
            LedgerError: if the file exists, or can't be written.
            ValueError: if there is no name, an empty one, one twice, or the name of an account beside a client's own.
        """
        listed = list(names)
        if not listed or not all(isinstance(name, str) and name.strip() for name in listed) or len(set(listed)) != len(listed):
            raise ValueError(f"names={listed}: must be names of clients, at least one, none of them empty or twice")
        if of_evaluation := [name for name in listed if owner_of(name) != name]:  # its charges would count for another client
            raise ValueError(f"names={of_evaluation[0]!r}: must not end with {_SUFFIX!r} or ', run ...', as other accounts do")
        Store.create(path, clients=listed)
        return cls(path)

    def read(self) -> dict[str, ClientAccount]:
        """Return every client's account, and that of its evaluations if there were any. It takes no lock.

        Raises:
            LedgerError: if the file is missing, unreadable or damaged.
        """
        with Store(self.path, read_only=True) as store:
            return _entries(store)

    def charge(
        self, asked: Mapping[str, ReplyTerms], numbered: Mapping[str, ReplyNumber], *, at_least: Mapping[str, int] | None = None
    ) -> tuple[dict[str, ChargeRefusal], dict[str, int]]:
        """Charge one reply to each account whose terms allow it. The charges are on the disk when this returns.

        Call it before anything is computed from the clients' records.

        Args:
            asked: terms by requested account.
            numbered: number of each account's reply by the server's count. A number that is not larger than the last one is
                refused and not charged; a larger one is stored with the charge.
            at_least: number of replies that accounts are known to have been charged for; a file with fewer is an older copy.

        Returns:
            The refusals of accounts that can't be charged, and for each other account its number of replies, this one included.

        Raises:
            LedgerError: if the file can't be used; no client may reply then.
        """
        refused: dict[str, ChargeRefusal] = {}
        counts: dict[str, int] = {}
        # Charges by run; accounts with equal charges share one.
        alike: dict[str, dict[Charge, list[str]]] = {}
        with Store(self.path, seconds=_LOCK_SECONDS) as store:
            entries = _entries(store)
            with naming(self.path):
                for account in asked:
                    if owner_of(account) not in store.clients:
                        names = ", ".join(sorted(store.clients))
                        raise LedgerError(f"has no account of client {owner_of(account)!r}; it is the ledger of {names}")
                    replies, known = entries.get(account, _EMPTY).replies, (at_least or {}).get(account, 0)
                    if replies < known:
                        older = f"it is an older copy, for there were {known}"
                        raise LedgerError(f"counts {replies} replies of client {account!r}: {older}")
            for account, terms in asked.items():
                entry, of = entries.get(account, _EMPTY), numbered[account]
                if reason := entry.repeat_reason(of) or terms.refusal_reason(entry.replies, entry.terms):
                    refused[account] = reason
                    continue
                counts[account] = entry.replies + 1
                charge = _charge(account, terms, entry, of.number)
                alike.setdefault(of.run, {}).setdefault(charge, []).append(owner_of(account))
            for run, charges in alike.items():
                if run not in store.runs:
                    store.begin(run)
                store.append(run, *(replace(shared, owners=tuple(owners), which=()) for shared, owners in charges.items()))
        return refused, counts


_EMPTY = ClientAccount()


def _charge(account: str, terms: ReplyTerms, entry: ClientAccount, number: int) -> Charge:
    """Return the charge of one more reply, without its owner.

    The charge has the terms that opened the account, so that many small differences never add up to a large one, and the event of
    its own noise.
    """
    return Charge(
        release=_TRAINING if (owner := owner_of(account)) == account else account.removeprefix(f"{owner}, "),
        number=entry.replies + 1,
        server_round=number,
        fingerprint=entry.terms or terms.text,
        scope=CostScope(unit=terms.release.unit, relation=terms.release.relation),
        owners=(),
        events=(terms.event_of(entry.replies + 1),),
    )


def _entries(store: Store) -> dict[str, ClientAccount]:
    """Return every account in a file.

    Raises:
        LedgerError: if the file is a server's ledger, or a reply is missing.
    """
    with naming(store.path):
        if not store.clients:
            raise LedgerError("is a server's ledger, not a device's")
        entries = dict.fromkeys(store.clients, _EMPTY)
        for run, charge in store.each:
            for owner, event in charge.by_owner.items():
                account = owner if charge.release == _TRAINING else f"{owner}, {charge.release}"
                entries[account] = entries.get(account, _EMPTY).after(run, charge, event)
        return entries
