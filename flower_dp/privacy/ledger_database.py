"""The files of a server's ledger: an SQLite database, its -wal file, and the lock beside it."""

import os
import sqlite3
import stat
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from flower_dp.privacy.ledger_lock import Lock, Mark
from flower_dp.privacy.private_file import BudgetSpentError, LedgerError, check_folder, check_owner, create_private, sync_folder
from flower_dp.privacy.server_ledger_format import JointBudget, check_database, create_tables

# The names of a million clients, so that a round's are found in memory.
_CACHE_KIB = 65536


class Database:
    """An open ledger: to write, with its lock, or to be read as it is now, without one.

    Attributes:
        db: the connection.
        marked: what was in the ledger at least, as its lock file remembers; None if that does not know.

    Args:
        path: of the file.
        read_only: whether it is read alone.

    Raises:
        LedgerError: if the files can't be used.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        place = path.resolve(strict=True)
        if not stat.S_ISREG(place.stat().st_mode):
            raise LedgerError("is no regular file")
        self._lock: Lock | None = None
        if read_only:
            self.marked = Lock.mark_of(place)
        else:
            check_owner(place.stat())
            check_folder(place.parent)
            self._lock = Lock(place)
        try:
            if self._lock is not None:
                self.marked = self._lock.mark
            self.db = _connect(place, read_only=read_only)
        except BaseException:
            if self._lock is not None:
                self._lock.close()
            raise
        try:
            check_database(self.db)
            self._paths = [place.with_name(place.name + suffix) for suffix in ("", "-wal", ".lock")]
            self._files = [] if read_only else self._identities()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files, and let other processes write."""
        with suppress(sqlite3.Error):
            self.db.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all or nothing; on the disk when it ends without an error."""
        if self._lock is None:
            raise LedgerError("is not open for writing")
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield self.db
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:
                with suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
            raise
        if self._identities() != self._files:
            raise LedgerError("was moved, replaced or removed while this process was writing to it")

    def remember(self, mark: Mark) -> None:
        """Note in the lock file what is on the disk."""
        if self._lock is not None:
            self._lock.mark = mark

    def _identities(self) -> list[tuple[int, int]]:
        """Return which files are at the ledger's paths now."""
        return [(one.st_dev, one.st_ino) for one in (path.stat() for path in self._paths)]


def create(path: Path, budget: JointBudget | None) -> None:
    """Create a ledger without charges, readable and writable by this user alone.

    Raises:
        LedgerError: if the file exists, or its folder can't be used.
    """
    if not path.parent.is_dir():
        raise LedgerError("its folder does not exist")
    check_folder(path.parent)
    place = path.parent.resolve() / path.name
    _check_absent(place)
    lock = Lock(place)
    try:
        _check_absent(place)
        lock.forget()
        _write_new(place, budget)
        sync_folder(place.parent)
    finally:
        lock.close()


def _check_absent(place: Path) -> None:
    if os.path.lexists(place):
        raise LedgerError("exists already")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn every error into a `LedgerError` that names the file."""
    try:
        yield
    except BudgetSpentError:
        raise  # it says all in public statements, which are no place for a path
    except LedgerError as error:
        raise LedgerError(f"ledger {path}: {error}") from None
    except FileNotFoundError as error:
        raise LedgerError(f"ledger {path}: does not exist; create it with `flower-dp ledger {path} --create-server`") from error
    except OSError as error:
        raise LedgerError(f"ledger {path}: {error.strerror or error}") from error
    except sqlite3.Error as error:
        raise LedgerError(f"ledger {path}: {error}") from error


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open a database that exists."""
    # Where nobody can write, nothing changes while it is read.
    still = read_only and not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    mode = "ro&immutable=1" if still else "rw"
    db = sqlite3.connect(f"{path.as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=5.0, check_same_thread=False)
    try:
        db.execute("PRAGMA query_only = ON" if read_only else "PRAGMA synchronous = FULL")
        db.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves it in the drive's cache
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        if not still and db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            raise LedgerError("is no ledger of a server: it is another program's database, or an empty file")
    except BaseException:
        db.close()
        raise
    return db


def _write_new(path: Path, budget: JointBudget | None) -> None:
    """Write an empty ledger: whole, or not at all."""
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    os.close(create_private(new))
    try:
        with closing(sqlite3.connect(f"{new.as_uri()}?mode=rw", uri=True, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN")
            create_tables(db, uuid.uuid4().hex, budget)
            db.execute("COMMIT")
        new.rename(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
