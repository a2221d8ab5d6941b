"""The file of a ledger, on a server or a device: charges are added and never changed, over crashes and restarts.

It is an SQLite database. A charge is on the disk (synchronous EXTRA, no -wal file that could be lost) before `append`
returns, and so before a message of its round leaves. SQLite notices a page that can't be read, not a changed digit; so each
charge has a SHA-256 digest of all that it says and of the digest before it. That is against damage, not against people: anyone
can compute it. One process writes: it holds a lock on PATH.mark, which also has number and digest of the last charge, so
that an older or another copy is noticed. An older copy of both files together can't be noticed. Anyone who may write the files
can change what they say.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from flower_dp.core import checks
from flower_dp.privacy import ledger_tables as tables
from flower_dp.privacy.budget import LedgerBudget, Remaining
from flower_dp.privacy.charges import Charge, Charges
from flower_dp.privacy.events import of_json
from flower_dp.privacy.ledger_tables import RunRow, naming
from flower_dp.privacy.private_file import BudgetSpentError, LastCharge, LedgerError, Lock, check_folder, check_owner

# Seconds to wait for another process that writes.
_LOCK_SECONDS = 2.0


class Store:
    """The charges of all runs on one population, in a file that one process at a time writes.

    It is an error, and never an empty ledger, if the file is missing, damaged, another program's, of another format or an older
    copy. The same holds if another process uses it, another user owns it, others can open it, or it can't be written.

    Attributes:
        path: path of the file.
        budget: budget of all runs together, for any client; None without a limit.
        clients: clients with an account in a device's ledger; empty in a server's.
        runs: all runs by name, in the order in which they began.
        charges: charges of each run in a server's ledger.
        all: charges of all runs together in a server's ledger.
        each: charges of a device's ledger in their order, each with the name of its run.
        num_charges: number of charges of all runs.

    Args:
        path: path of an existing ledger; see `create`. Its folder must be writable by this user alone.
        read_only: whether to read its present content without a lock: another process may be writing.
        seconds: longest wait for another process that writes; None for two.

    Raises:
        LedgerError: if the ledger can't be used.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.privacy.charges import ALL_CLIENTS, Charge, CostScope
        >>> from flower_dp.privacy.store import Store
        >>> charge = Charge(
        ...     release="dp-fedavg",
        ...     number=1,
        ...     server_round=1,
        ...     fingerprint="noise multiplier 2",
        ...     scope=CostScope(unit="client", relation="add-or-remove-one"),
        ...     owners=(ALL_CLIENTS,),
        ...     events=(GaussianDpEvent(noise_multiplier=2.0),),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Store.create(Path(folder) / "ledger.sqlite")
        ...     with Store(Path(folder) / "ledger.sqlite") as store:
        ...         run = store.begin(method="DP-FedAvg", delta=1e-5)
        ...         store.append(run, charge)
        ...         [one.events for one in store.read(run)]
        [(GaussianDpEvent(noise_multiplier=2.0),)]
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, seconds: float | None = None) -> None:
        self.path = Path(path)
        self.all = Charges()
        self.each: list[tuple[str, Charge]] = []
        self._lock: Lock | None = None
        self.num_charges, self._digest = 0, b""
        with naming(self.path), ExitStack() as opened:
            resolved = self.path.resolve(strict=True)
            status = resolved.stat()
            if not stat.S_ISREG(status.st_mode):
                raise LedgerError("is not a regular file")
            if not read_only:
                check_owner(status)
                check_folder(resolved.parent)
                if status.st_dev != resolved.parent.stat().st_dev:
                    raise LedgerError("is mounted without its folder, where SQLite must write too; mount the folder")
                if not os.access(resolved.parent, os.W_OK):
                    raise LedgerError("is in a folder that this process can't write to, and SQLite must")
                self._lock = Lock(resolved, seconds=_LOCK_SECONDS if seconds is None else seconds)
                opened.callback(self._lock.close)
            mark = Lock.mark_of(resolved) if self._lock is None else self._lock.mark
            self._db = tables.open_database(resolved, read_only=read_only)
            opened.callback(self._db.close)
            self._load(mark)
            if self._lock is not None:
                self._lock.mark = LastCharge(number=self.num_charges, digest=self._digest)
            self._paths = (resolved, resolved.with_name(resolved.name + ".mark"))
            self._files = [] if read_only else self._identities()
            self._opened = opened.pop_all()

    @staticmethod
    def create(path: str | os.PathLike[str], budget: LedgerBudget | None = None, *, clients: Sequence[str] = ()) -> None:
        """Create the file, without any charge, readable and writable by this user alone.

        Args:
            path: path of the file; its folder must exist.
            budget: budget of all runs together, for any client; None for no limit. It can't be changed.
            clients: clients of a device; they can't be changed.

        Raises:
            LedgerError: if the file exists, or can't be written.
        """
        tables.create_file(Path(path), {"budget": None if budget is None else asdict(budget), "clients": list(clients)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and let other processes write."""
        self._lock = None
        with suppress(sqlite3.Error):
            self._opened.close()

    # Writing

    def begin(self, name: str = "", *, method: str = "", delta: float = 0.0, private: bool = True) -> str:
        """Open a run, and return its name.

        Args:
            name: name of the run; empty for a random one.
            method: title of the method.
            delta: delta of the run's statement.
            private: whether its noise is drawn afresh; with noise from a fixed seed, its charges count as without any noise.
        """
        if method:
            checks.line("method", method)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        run = RunRow(name=name or uuid.uuid4().hex, method=method, delta=float(delta), started=started, private=private)
        with naming(self.path), self._transaction() as db:
            number = len(self.runs) + 1
            db.execute("INSERT INTO runs VALUES (?, ?, ?)", (number, run.name, tables.about_of(run)))
        self._run_ids[run.name] = number
        self.runs[run.name], self.charges[run.name] = run, Charges()
        return run.name

    def append(self, run: str, *charges: Charge) -> None:
        """Append charges, all of them or none; they are on the disk when this returns.

        Args:
            run: name of the run.
            charges: next charges of their releases.

        Raises:
            BudgetSpentError: if the ledger's budget does not cover them; nothing was written then.
            LedgerError: if they can't be written; nothing may be released then.
        """
        with naming(self.path):
            of, of_run, total = self._run(run), self.charges[run], self.all
            for charge in () if self.clients else charges:
                if self._remaining is not None and (why := self._remaining.refusal_reason(total, charge, private=of.private)):
                    raise BudgetSpentError(why)
                of_run, total = _after(of_run, total, of, charge)
            digest = self._digest
            with self._transaction() as db:
                for number, charge in enumerate(charges, start=self.num_charges + 1):
                    row, texts = self._row(db, charge)
                    digest = tables.digest_of(digest, of, row[0], charge.owners, row[2], texts)
                    db.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?)", (number, self._run_ids[run], *row, digest))
            # The charges are on the disk: only now does memory follow, and the mark last. After a crash the file may hold more
            # charges than memory or the mark, never fewer.
            self._digest, self.num_charges = digest, self.num_charges + len(charges)
            self.charges[run], self.all = of_run, total
            self.each += [(run, charge) for charge in charges] if self.clients else []
            if self._lock is not None:
                self._lock.mark = LastCharge(number=self.num_charges, digest=digest)

    # Reading

    def read(self, run: str, beyond: Mapping[str, int] | None = None) -> tuple[Charge, ...]:
        """Return the charges of a run in their order.

        Args:
            run: name of the run.
            beyond: number of charges of each release that are known already, and left out.

        Raises:
            LedgerError: if there is no such run, or it has fewer charges than are known: then this is an older copy.
        """
        known = beyond or {}
        with naming(self.path):
            self._run(run)
            numbers = self.charges[run].numbers()
            for release, number in known.items():
                if (has := numbers.get(release, 0)) < number:
                    raise LedgerError(f"is an older copy: it has {has} charges of {release}, and there were {number}")
            rows = self._rows("WHERE run = ?", self._run_ids[run])
            return tuple(charge for _, _, charge in rows if charge.number > known.get(charge.release, 0))

    # Parts

    def _load(self, mark: LastCharge | None) -> None:
        """Read and check a whole ledger; the charges that the mark counts must be there."""
        try:
            about = {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM about")}
            self.budget = None if about["budget"] is None else LedgerBudget(**about["budget"])
            self._remaining = None if self.budget is None else Remaining(self.budget)
            self.clients = tuple(about["clients"])
            self._owners = {name: key for key, name in self._db.execute("SELECT id, name FROM owners")}
            self._events = {text: key for key, text in self._db.execute("SELECT id, event FROM events")}
            rows = self._db.execute("SELECT id, name, about FROM runs ORDER BY id").fetchall()
            self._run_ids = {name: key for key, name, _ in rows}
            self.runs = {name: RunRow(name=name, **json.loads(text)) for _, name, text in rows}
            self.charges = {name: Charges() for name in self.runs}
            self.num_charges, self._digest = 0, hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
            marked = self._digest if mark is not None and mark.number == 0 else b""
            for number, run, charge in self._rows(check=True):
                if self.clients:
                    self.each.append((run, charge))
                else:
                    own, self.all = _after(self.charges[run], self.all, self.runs[run], charge)
                    self.charges[run] = own
                if mark is not None and mark.number == number:
                    marked = self._digest
        except LedgerError as error:
            raise LedgerError(f"is damaged: {error}") from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            raise LedgerError(f"is damaged ({type(error).__name__}: {error})") from error
        if mark is not None and self.num_charges < mark.number:
            raise LedgerError(f"holds {self.num_charges} of {mark.number} charges: it is an older copy")
        if mark is not None and marked != mark.digest:
            raise LedgerError("is not the one of its .mark file, which remembers the last charge: it is another copy")

    def _rows(self, where: str = "", *values: object, check: bool = False) -> Iterator[tuple[int, str, Charge]]:
        """Yield number, run and content of charges; with `check`, of all of them, compared with their digests."""
        names = {key: name for name, key in self._owners.items()}
        texts = {key: text for text, key in self._events.items()}
        events = {key: of_json(json.loads(text)) for key, text in texts.items()}
        runs = {key: name for name, key in self._run_ids.items()}
        rows = self._db.execute(f"SELECT * FROM charges {where} ORDER BY id", values)  # noqa: S608
        for number, run, about, owners, which, keys, digest in rows:
            who = tuple(names[key] for key in np.frombuffer(owners, "<i4").tolist())
            places = np.frombuffer(keys, "<i4").tolist()
            if check:
                if number != self.num_charges + 1:
                    raise LedgerError(f"charge {self.num_charges + 1} is missing")
                now = tables.digest_of(self._digest, self.runs[runs[run]], about, who, which, [texts[key] for key in places])
                if now != digest:
                    raise LedgerError(f"charge {number} has changed since it was written")
                self.num_charges, self._digest = number, now
            yield number, runs[run], tables.charge_of(about, who, which, [events[key] for key in places])

    def _row(self, db: sqlite3.Connection, charge: Charge) -> tuple[tuple[str, bytes, bytes, bytes], list[str]]:
        """Return the columns of a charge, and its events as text; insert its owners and events if they are new."""
        self._number(db, "owners", self._owners, charge.owners)
        texts = [tables.text_of(event) for events in charge.by_scope.values() for event in events]
        self._number(db, "events", self._events, texts)
        numbers = [self._owners[name] for name in charge.owners], charge.which, [self._events[text] for text in texts]
        owners, which, events = (np.asarray(column, "<i4").tobytes() for column in numbers)
        return (tables.words_of(charge), owners, which, events), texts

    def _number(self, db: sqlite3.Connection, table: str, known: dict[str, int], texts: Iterable[str]) -> None:
        """Give every text a number, inserted if it is new; without a commit the number is forgotten again."""
        new = [text for text in dict.fromkeys(texts) if text not in known]
        rows = list(enumerate(new, start=len(known) + 1))
        db.executemany(f"INSERT INTO {table} VALUES (?, ?)", rows)  # noqa: S608
        self._uncommitted += [(known, text) for text in new]  # first: an interruption must leave no number that the file lacks
        known.update({text: number for number, text in rows})

    def _run(self, name: str) -> RunRow:
        if name not in self.runs:
            raise LedgerError(f"has no run {name}")
        return self.runs[name]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all or nothing; it is on the disk if the block ends without an error."""
        if self._lock is None:
            raise LedgerError("is not open for writing")
        self._check_place()
        self._uncommitted: list[tuple[dict[str, int], str]] = []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            last = self._db.execute("SELECT id, digest FROM charges ORDER BY id DESC LIMIT 1").fetchone()
            if (last or (0, self._digest)) != (self.num_charges, self._digest):
                raise LedgerError("was changed by another process while this one had its lock")
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            for known, text in self._uncommitted:
                known.pop(text, None)
            if self._db.in_transaction:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise
        self._check_place()

    def _check_place(self) -> None:
        if self._identities() != self._files:
            raise LedgerError("was moved, replaced or removed while this process was writing to it")

    def _identities(self) -> list[tuple[int, int]]:
        """Return the identities of the files that are at the ledger's paths now."""
        return [(status.st_dev, status.st_ino) for status in (path.stat() for path in self._paths)]


def _after(own: Charges, every: Charges, run: RunRow, charge: Charge) -> tuple[Charges, Charges]:
    """Return a run's charges and those of all runs, each with one more."""
    if charge.release not in own.numbers() and charge.number != 1:
        raise LedgerError(f"has 0 charges of {charge.release} in this run: number {charge.number} is not the next")
    return own.after(charge, private=run.private), every.after(charge, run=run.name, private=run.private)
