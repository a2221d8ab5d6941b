"""A server's ledger in a file: the charges of all runs on one population, over crashes and restarts.

The file is an SQLite database, to which charges are added and in which nothing is ever changed. A charge is on the disk (WAL,
synchronous FULL) before it returns, and so before a message of its round leaves. One process writes: it holds a lock (flock) on
the file PATH.lock as long as the ledger is open. That file also has number and digest of the last charge: an older copy of the
ledger alone, or one that has lost its -wal file, is noticed. An older copy of all files together can't be noticed. Anyone who may
write the files can change what they say.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from flower_dp.core import checks, dp
from flower_dp.privacy import ledger_database
from flower_dp.privacy.charge import EVERY_CLIENT, Charge
from flower_dp.privacy.joint_cost import EVERYONE, Accounts, Scope
from flower_dp.privacy.ledger_database import Database, naming
from flower_dp.privacy.ledger_lock import Mark
from flower_dp.privacy.private_file import BudgetSpentError, LedgerError
from flower_dp.privacy.server_ledger_format import (
    Content,
    Entry,
    JointBudget,
    LedgerRun,
    charge_of,
    check_last,
    digest_of,
    read,
    release_of,
    row_of,
    run_id,
    text_of,
)

__all__ = ["BudgetSpentError", "JointBudget", "LedgerError", "ServerLedger"]


class ServerLedger:
    """The charges of all runs on one population, in a file that one process at a time writes.

    It is an error, and never an empty ledger, if the file is missing, damaged, another program's, of a newer format, an older
    copy, in use by another process, owned by another user, open to others, or can't be written.

    Attributes:
        path: of the file.
        accounts: what every owner was charged with, in all runs.

    Args:
        path: of a ledger that exists; see `create`. Its folder must be writable by this user alone.
        read_only: reads it as it is now, without a lock: another process may be writing.

    Raises:
        LedgerError: if the ledger can't be used.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.privacy.charge import EVERY_CLIENT, Charge
        >>> from flower_dp.privacy.server_ledger import ServerLedger
        >>> charge = Charge(
        ...     release="dp-fedavg",
        ...     number=1,
        ...     kind="noise multiplier 2",
        ...     unit="client",
        ...     relation="add-or-remove-one",
        ...     owners=(EVERY_CLIENT,),
        ...     events=(GaussianDpEvent(noise_multiplier=2.0),),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ServerLedger.create(Path(folder) / "ledger.sqlite")
        ...     with ServerLedger(Path(folder) / "ledger.sqlite") as ledger:
        ...         run = ledger.begin_run(method="DP-FedAvg", delta=1e-5)
        ...         ledger.charge(run, charge, server_round=1)
        ...         [(number, one.events) for number, one in ledger.charges(run)]
        [(1, (GaussianDpEvent(noise_multiplier=2.0),))]
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.accounts = Accounts()
        self._content = Content()
        self._everyone: int | None = None  # the id, in the file, of `EVERY_CLIENT`
        with naming(self.path):
            self._files = Database(self.path, read_only=read_only)
            try:
                for entry in self._entries():
                    self._count(entry)
                self._files.remember(Mark(number=self._content.num_charges, digest=self._content.digest))
            except BaseException:
                self._files.close()
                raise

    @staticmethod
    def create(path: str | os.PathLike[str], budget: JointBudget | None = None) -> None:
        """Create the file, without any charge, readable and writable by this user alone.

        Args:
            path: of the file; its folder must exist.
            budget: what all runs together may cost any client; None for no limit. It can't be changed.

        Raises:
            LedgerError: if the file exists, or can't be written.
        """
        with naming(Path(path)):
            ledger_database.create(Path(path), budget)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and let other processes write."""
        self._files.close()

    @property
    def budget(self) -> JointBudget | None:
        """What all runs together may cost any client; None without a limit."""
        return self._content.budget

    @property
    def runs(self) -> tuple[LedgerRun, ...]:
        """All runs, in the order in which they began."""
        return tuple(self._content.runs.values())

    @property
    def has_charges(self) -> bool:
        """Whether any run was charged."""
        return any(self.charges(run.name) for run in self.runs)

    @property
    def num_runs_by_scope(self) -> dict[Scope, int]:
        """How many runs were charged, by what their costs add up with."""
        found: dict[Scope, set[int]] = {}
        for release in self._content.releases.values():
            found.setdefault(Scope(unit=release.unit, relation=release.relation), set()).add(release.run)
        return {scope: len(runs) for scope, runs in found.items()}

    @property
    def owners(self) -> dict[str, int]:
        """The id, in `accounts`, of everyone who was ever charged, by name."""
        with naming(self.path):
            return {name: self._id(key) for key, name in self._files.db.execute("SELECT id, name FROM owners ORDER BY id")}

    # Writing

    def begin_run(self, *, method: str, delta: float, private: bool = True) -> str:
        """Open a run, and return its id.

        Args:
            method: its title.
            delta: of its statement.
            private: whether its noise is drawn afresh; with noise from a fixed seed, its charges count as without any noise.
        """
        run = LedgerRun(
            name=uuid.uuid4().hex,
            method=checks.line("method", method, most=checks.MOST_NAME),
            delta=float(delta),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            private=private,
        )
        with naming(self.path), self._files.transaction() as db:
            values = (run.name, run.method, run.delta, run.started, run.private)
            cursor = db.execute("INSERT INTO runs (name, method, delta, started, private) VALUES (?, ?, ?, ?, ?)", values)
        self._content.runs[cursor.lastrowid or 0] = run
        return run.name

    def charge(self, run: str, charge: Charge, server_round: int) -> None:
        """Write a charge down; it is on the disk when this returns.

        Args:
            run: its id.
            charge: the next one of its release.
            server_round: 1, 2, ...

        Raises:
            BudgetSpentError: if the ledger's budget does not cover it; nothing was written then.
            LedgerError: if it can't be written; nothing may be released then.
        """
        content = self._content
        with naming(self.path), self._files.transaction() as db:
            if len(set(charge.owners)) < len(charge.owners) or (EVERY_CLIENT in charge.owners and len(charge.owners) > 1):
                raise LedgerError(f"charges nobody twice at once, and no client of the name {EVERY_CLIENT!r}")
            check_last(db, content)
            key, of = release_of(db, content, run, charge)
            texts = {event: text_of(event) for event in set(charge.events)}
            said = [texts[event] for event in charge.events]
            terms = {text: row_of(db, "terms", "event", text) for text in texts.values()}
            owners = [row_of(db, "owners", "name", name) for name in charge.owners]
            entry = Entry(
                run=content.runs[of.run],
                release=of,
                number=charge.number,
                server_round=server_round,
                shares=charge.shares,
                owners=owners,
                terms=[terms[text] for text in said],
            )
            everyone = owners[charge.owners.index(EVERY_CLIENT)] if EVERY_CLIENT in charge.owners else self._everyone
            ids = [EVERYONE if owner == everyone else owner for owner in owners]
            scope = Scope(unit=of.unit, relation=of.relation)
            places = {text: self.accounts.of(scope).place(event) for event, text in texts.items()}
            wanted = zip(ids, [places[text] for text in said], strict=True)
            if reason := self.accounts.why_not(content.budget, scope, wanted, private=entry.run.private):
                raise BudgetSpentError(reason)
            number = content.num_charges + 1
            digest = digest_of(content.digest, entry, charge.owners, said)
            columns = (number, key, entry.number, server_round, entry.shares, digest)
            db.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?)", columns)
            rows = ((number, owner, one) for owner, one in zip(owners, entry.terms, strict=True))
            db.executemany("INSERT INTO charged VALUES (?, ?, ?)", rows)
        # It is on the disk: only now does memory follow.
        content.num_charges, content.digest, content.numbers[key], content.releases[key] = number, digest, charge.number, of
        content.events |= {terms[text]: event for event, text in texts.items()}
        self._everyone = everyone
        self._count(entry)
        with naming(self.path):
            self._files.remember(Mark(number=number, digest=digest))

    # Reading

    def charges(self, run: str, beyond: Mapping[str, int] | None = None) -> tuple[tuple[int, Charge], ...]:
        """Return the charges of a run in their order, each with its round.

        Args:
            run: its id.
            beyond: how many charges of a release, by its name, are known already and left out.

        Raises:
            LedgerError: if there is no such run, or it has fewer charges than are known: then this is an older copy.
        """
        known = dict(beyond or {})
        with naming(self.path):
            run_id(self._content, run)
            names = dict(self._files.db.execute("SELECT id, name FROM owners").fetchall())
            found, last = [], dict.fromkeys(known, 0)
            for entry in self._entries():
                if entry.run.name != run:
                    continue
                last[entry.release.name] = entry.number
                if entry.number > known.get(entry.release.name, 0):
                    owners = [names[one] for one in entry.owners]
                    found.append(
                        (entry.server_round, charge_of(entry, owners, [self._content.events[one] for one in entry.terms]))
                    )
            for release, number in known.items():
                if last[release] < number:
                    raise LedgerError(f"is an older copy: it has {last[release]} charges of {release}, and there were {number}")
        return tuple(found)

    def accounts_by_run(self) -> dict[str, Accounts]:
        """Return what every owner was charged with in each run alone, by the runs' ids."""
        found = {run.name: Accounts() for run in self.runs}
        with naming(self.path):
            for entry in self._entries():
                self._count(entry, found[entry.run.name])
        return found

    def numbers_by_run(self) -> dict[str, dict[str, int]]:
        """Return how often each release of each run was charged, by the runs' ids and the releases' names."""
        content = self._content
        found: dict[str, dict[str, int]] = {run.name: {} for run in self.runs}
        for key, release in content.releases.items():
            found[content.runs[release.run].name][release.name] = content.numbers.get(key, 0)
        return found

    # Parts

    def _entries(self) -> Iterator[Entry]:
        """Yield every charge, checked, as of one moment; what the mark has seen must be there."""
        db, mark, self._content = self._files.db, self._files.marked, Content()
        db.execute("BEGIN")
        try:
            row = db.execute("SELECT id FROM owners WHERE name = ?", (EVERY_CLIENT,)).fetchone()
            self._everyone = None if row is None else row[0]
            yield from read(db, self._content, None if mark is None else mark.number)
            if mark is not None and self._content.num_charges < mark.number:
                raise LedgerError(
                    f"has {self._content.num_charges} charges of {mark.number}: it is an older copy, or its -wal file is gone"
                )
            if mark is not None and self._content.marked != mark.digest:
                raise LedgerError("is not the one of its .lock file, which remembers the last charge: it is another copy")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, LedgerError):
                raise
            raise LedgerError(f"is damaged ({type(error).__name__}: {error})") from error
        finally:
            db.execute("ROLLBACK")

    def _id(self, owner: int) -> int:
        return EVERYONE if owner == self._everyone else owner

    def _count(self, entry: Entry, accounts: Accounts | None = None) -> None:
        """Add a charge to what owners were charged with."""
        scope = Scope(unit=entry.release.unit, relation=entry.release.relation)
        events, private = self._content.events, entry.run.private
        histories = (self.accounts if accounts is None else accounts).of(scope)
        places = {one: histories.place(events[one] if private else dp.NonPrivateDpEvent()) for one in set(entry.terms)}
        for owner, one in zip(entry.owners, entry.terms, strict=True):
            histories.charge(self._id(owner), places[one])
