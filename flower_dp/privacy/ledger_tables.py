"""The tables of a ledger's file: their content, charges as rows, and integrity checks."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_dp.core import checks, dp_events
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import Charge, CostScope
from flower_dp.privacy.events import as_json
from flower_dp.privacy.private_file import BudgetSpentError, LedgerError, Lock, check_folder, create_private, sync_folder

APPLICATION, FORMAT = int.from_bytes(b"fldp", "big"), 4
TABLES = {
    "about": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "runs": "id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, about TEXT NOT NULL",
    "owners": "id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE",
    "events": "id INTEGER PRIMARY KEY, event TEXT NOT NULL UNIQUE",
    "charges": "id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs, about TEXT NOT NULL, owners BLOB NOT NULL, "
    "which BLOB NOT NULL, events BLOB NOT NULL, digest BLOB NOT NULL",
}
SCHEMA = tuple(f"CREATE TABLE {table} ({columns})" for table, columns in TABLES.items()) + tuple(
    f"CREATE TRIGGER {table}_{change.lower()} BEFORE {change} ON {table} "
    "BEGIN SELECT RAISE(ABORT, 'a ledger is never changed'); END"
    for table in TABLES
    for change in ("UPDATE", "DELETE")
)
# Keys of a charge in the file, and the attributes that they store.
_SAID = {"release": "release", "number": "number", "round": "server_round", "fingerprint": "fingerprint"}
# Seconds to wait for another process that creates the same ledger, and for one that reads or commits.
_CREATE_SECONDS = 2.0
_BUSY_SECONDS = 60.0
# Room for the names of a million clients, so that a round's names are looked up in memory.
_CACHE_KIB = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run on a ledger.

    Attributes:
        name: a random id.
        method: title of the method.
        delta: delta of the run's statement.
        started: start time, in UTC.
        private: whether its noise is drawn afresh; with noise from a fixed seed, as in a test, its events protect nobody.
    """

    name: str
    method: str = ""
    delta: float = 0.0
    started: str = ""
    private: bool = True


def text_of(event: dp_events.DpEvent) -> str:
    """Return an event as the file's text; equal events have equal text."""
    return json.dumps(as_json(event), allow_nan=False, default=lambda number: number.item())


def words_of(charge: Charge) -> str:
    """Return a charge without owners and events, as the file's text."""
    fields = {key: getattr(charge, attribute) for key, attribute in _SAID.items()}
    return json.dumps({**fields, "unit": charge.scope.unit, "relation": charge.scope.relation, "views": list(charge.views)})


def charge_of(words: str, owners: tuple[str, ...], which: bytes, events: list[dp_events.DpEvent]) -> Charge:
    """Return the charge that was written."""
    about = json.loads(words)
    fields = {attribute: about[key] for key, attribute in _SAID.items()}
    unit = checks.one_of("unit", about["unit"], ("client", "record"))
    scope = CostScope(unit=unit, relation=accounting.parse_relation(about["relation"]))
    size = len(events) // (1 + len(about["views"]))
    seen = [tuple(events[size * view : size * (view + 1)]) for view in range(1 + len(about["views"]))]
    views = dict(zip(about["views"], seen[1:], strict=True))
    places = tuple(np.frombuffer(which, "<i4").tolist())
    return Charge(**fields, scope=scope, owners=owners, events=seen[0], which=places, views=views)


def about_of(run: RunRow) -> str:
    """Return a run without its name, as the file's text."""
    return json.dumps({key: value for key, value in asdict(run).items() if key != "name"}, allow_nan=False)


def digest_of(before: bytes, run: RunRow, about: str, owners: Sequence[str], which: bytes, events: Sequence[str]) -> bytes:
    """Return the digest of a charge: of all that the file says of it, and of the digest before it."""
    content = json.dumps([run.name, about_of(run), about, list(owners), which.hex(), list(events)])
    return hashlib.sha256(before + content.encode()).digest()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a database that exists, in SQLite's mode `rw` or `ro`."""
    name = f"{path.as_uri()}?mode={mode}"
    db = sqlite3.connect(name, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)
    db.execute("PRAGMA trusted_schema = OFF")
    return db


def open_database(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open a ledger and check its tables; if `read_only`, a copy in memory of its present content.

    Raises:
        LedgerError: if it is not a ledger, has another format, or is damaged so that SQLite notices it.
    """
    db = _snapshot(path) if read_only else _connect(path, "rw")
    try:
        _check_database(db)
        if not read_only:
            _make_durable(db)
    except BaseException:
        db.close()
        raise
    return db


def _snapshot(path: Path) -> sqlite3.Connection:
    """Return a copy in memory of a ledger's present content, so that readers do not block a writer."""
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    # The next connection undoes what a killed process left unfinished, but only one that may write.
    with closing(_connect(path, "rw" if os.access(path.parent, os.W_OK) and os.access(path, os.W_OK) else "ro")) as db:
        db.execute("BEGIN")
        db.execute("SELECT * FROM sqlite_master LIMIT 1").fetchone()
        db.backup(copy)
    return copy


def _make_durable(db: sqlite3.Connection) -> None:
    """Make commits durable: the rollback journal is on the disk first, and so are the names in the folder."""
    if db.execute("PRAGMA journal_mode = TRUNCATE").fetchone()[0] != "truncate":
        raise LedgerError("can't be written safely: another process has it open in another mode")
    db.execute("PRAGMA synchronous = EXTRA")
    db.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves it in the drive's cache
    db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")


def _check_database(db: sqlite3.Connection) -> None:
    """Refuse a database that is not a ledger, has another format, or is damaged so that SQLite notices it."""
    (application,), (version,) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version"))
    if application != APPLICATION:
        raise LedgerError("is not a ledger: it is another program's database, or an empty file")
    if version != FORMAT:
        raise LedgerError(f"has format {version}; this release of flower-dp reads format {FORMAT}")
    if (result := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        raise LedgerError(f"is damaged: {result}")
    tables = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    if sorted(text for (text,) in tables) != sorted(SCHEMA):
        raise LedgerError("is damaged: its tables are not those of a ledger")


def create_file(path: Path, about: Mapping[str, Any]) -> None:
    """Create a ledger without charges, readable and writable by this user alone: whole, or not at all.

    Raises:
        LedgerError: if the file exists, or its folder can't be used.
    """
    with naming(path):
        if not path.parent.is_dir():
            raise LedgerError("its folder does not exist")
        check_folder(path.parent)
        resolved = path.parent.resolve() / path.name
        _check_absent(resolved)
        with closing(Lock(resolved, seconds=_CREATE_SECONDS)) as lock:
            _check_absent(resolved)
            lock.forget()
            _write_new(resolved, about)
            sync_folder(resolved.parent)


def _check_absent(place: Path) -> None:
    if os.path.lexists(place):
        raise LedgerError("exists already")


def _write_new(path: Path, about: Mapping[str, Any]) -> None:
    """Write an empty ledger: whole, or not at all."""
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    os.close(create_private(new))
    try:
        with closing(_connect(new, "rw")) as db:
            _make_durable(db)
            db.execute("BEGIN")
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            for statement in SCHEMA:
                db.execute(statement)
            rows = [(key, json.dumps(value, allow_nan=False)) for key, value in {**about, "id": uuid.uuid4().hex}.items()]
            db.executemany("INSERT INTO about VALUES (?, ?)", rows)
            db.execute("COMMIT")
        new.rename(path)
    finally:
        for left in (new, new.with_name(new.name + "-journal")):
            with suppress(OSError):
                left.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn every error into a `LedgerError` that names the file."""
    try:
        yield
    except BudgetSpentError:
        raise  # public statements quote it, and must hold no path
    except LedgerError as error:
        raise LedgerError(f"ledger {path}: {error}") from None
    except FileNotFoundError as error:
        how = f"`flower-dp ledger create-server {path}`, that of a device with `flower-dp ledger create-device {path} NAME`"
        raise LedgerError(f"ledger {path}: does not exist; create it with {how}") from error
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"ledger {path}: {getattr(error, 'strerror', '') or error}") from error
