"""The content of a server's ledger: its tables, what an entry means, and the checks that it is whole.

SQLite notices a page that can't be read, not a digit that has changed. So every charge has a SHA-256 digest of all that it says
and of the digest before it. That is against damage, not against people: anyone can compute it.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from flower_dp.core import checks, dp
from flower_dp.privacy.charge import Charge
from flower_dp.privacy.events import RELATIONS, Relation, as_json, of_json
from flower_dp.privacy.private_file import LedgerError

APPLICATION = int.from_bytes(b"fldp", "big")
# The second one is of ledgers with a fully adaptive budget, which an earlier release would take for a plain one.
PLAIN, ADAPTIVE = FORMATS = (1, 2)
_LEDGER = {PLAIN: "id TEXT NOT NULL, epsilon REAL, delta REAL"}
_LEDGER[ADAPTIVE] = f"{_LEDGER[PLAIN]}, renyi_order REAL NOT NULL"
_TABLES = {
    "runs": "id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, method TEXT NOT NULL, delta REAL NOT NULL, "
    "started TEXT NOT NULL, private INTEGER NOT NULL",
    "releases": "id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs, name TEXT NOT NULL, kind TEXT NOT NULL, "
    "unit TEXT NOT NULL, relation TEXT NOT NULL, UNIQUE (run, name)",
    "owners": "id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE",
    "terms": "id INTEGER PRIMARY KEY, event TEXT NOT NULL UNIQUE",
    "charges": "id INTEGER PRIMARY KEY, release INTEGER NOT NULL REFERENCES releases, number INTEGER NOT NULL, "
    "server_round INTEGER NOT NULL, shares INTEGER NOT NULL, digest BLOB NOT NULL",
    "charged": "charge INTEGER NOT NULL REFERENCES charges, owner INTEGER NOT NULL REFERENCES owners, "
    "terms INTEGER NOT NULL REFERENCES terms",
}
_UNITS = ("client", "record")
Unit = Literal["client", "record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointBudget:
    """What all runs on a ledger together may cost any client.

    Attributes:
        epsilon: what they may cost, at delta.
        delta: in [0, 1).
        fully_adaptive: whether this holds also if mechanism, noise, sampling, or number of runs are chosen by what earlier ones
            released. Fewer rounds fit: a filter adds up Renyi divergences at one order (`flower_dp.privacy.renyi_filter`).
        renyi_order: that order; None for the one at which most Gaussian releases without sampling fit. `renyi_filter.order_for`
            returns a better one, if it is known what will be charged. A ledger keeps the one it was created with.

    Raises:
        ValueError: for a value that makes no sense.
    """

    epsilon: float
    delta: float
    fully_adaptive: bool = False
    renyi_order: float | None = None

    def __post_init__(self) -> None:
        checks.number("epsilon", self.epsilon, above=0)
        checks.number("delta", self.delta, at_least=0, below=1)
        if not checks.flag("fully_adaptive", self.fully_adaptive):
            if self.renyi_order is not None:
                raise ValueError(f"renyi_order={self.renyi_order!r}: is of a fully adaptive budget alone")
            return
        if self.delta == 0:
            raise ValueError("delta=0: a fully adaptive budget needs a delta above 0")
        if self.renyi_order is not None:
            checks.number("renyi_order", self.renyi_order, above=1)
            return
        from flower_dp.privacy import renyi_filter  # noqa: PLC0415  (slow to import)

        object.__setattr__(self, "renyi_order", renyi_filter.order_for(self.epsilon, self.delta))

    def __str__(self) -> str:
        adaptive = ", fully adaptive," if self.fully_adaptive else ""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g}{adaptive} for all runs together"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRun:
    """One run on a ledger.

    Attributes:
        name: a random id.
        method: its title.
        delta: the delta of its statement.
        started: when, in UTC.
        private: whether its noise was drawn afresh; with noise from a fixed seed, as in a test, its events protect nobody.
    """

    name: str
    method: str
    delta: float
    started: str
    private: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRelease:
    """One release of a run: see `Charge`."""

    run: int
    name: str
    kind: str
    unit: Unit
    relation: Relation


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One charge as the tables have it: owners and events by their ids."""

    run: LedgerRun
    release: LedgerRelease
    number: int
    server_round: int
    shares: int
    owners: Sequence[int]
    terms: Sequence[int]


@dataclass(slots=True)
class Content:
    """What of a ledger is read into memory: all but who was charged.

    Attributes:
        budget: of all runs; None without one.
        num_charges: how many there are.
        digest: of the last one.
        runs: by id.
        releases: by id.
        events: by id.
        texts: of the events, by id.
        numbers: how often each release was charged, by its id.
        marked: the digest of the charge that `read` was to remember; None if there is no such charge.
    """

    budget: JointBudget | None = None
    num_charges: int = 0
    digest: bytes = b""
    runs: dict[int, LedgerRun] = field(default_factory=dict)
    releases: dict[int, LedgerRelease] = field(default_factory=dict)
    events: dict[int, dp.DpEvent] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    marked: bytes | None = None


def create_tables(db: sqlite3.Connection, name: str, budget: JointBudget | None) -> None:
    """Make an empty database a ledger."""
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    version = _version_for(budget)
    db.execute(f"PRAGMA user_version = {version}")
    for statement in _schema(version):
        db.execute(statement)
    values = (name, *((None, None) if budget is None else _limits(budget)))
    db.execute(f"INSERT INTO ledger VALUES ({', '.join('?' * len(values))})", values)  # noqa: S608


def _version_for(budget: JointBudget | None) -> int:
    return ADAPTIVE if budget is not None and budget.fully_adaptive else PLAIN


def _limits(budget: JointBudget) -> list[float | None]:
    return [budget.epsilon, budget.delta, *([budget.renyi_order] if budget.fully_adaptive else [])]


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _schema(version: int) -> Iterator[str]:
    for table, columns in {"ledger": _LEDGER[version], **_TABLES}.items():
        yield f"CREATE TABLE {table} ({columns})"
        for change in ("UPDATE", "DELETE"):
            refusal = "SELECT RAISE(ABORT, 'a ledger is never changed')"
            yield f"CREATE TRIGGER {table}_{change.lower()} BEFORE {change} ON {table} BEGIN {refusal}; END"


def check_database(db: sqlite3.Connection) -> None:
    """Refuse a database that is no ledger, is of a newer format, or is damaged so that SQLite notices it.

    Raises:
        LedgerError: saying so.
    """
    (application,), version = db.execute("PRAGMA application_id").fetchone(), _version(db)
    if application != APPLICATION:
        raise LedgerError("is no ledger of a server: it is another program's database, or an empty file")
    if version not in FORMATS:
        raise LedgerError(f"has format {version}; this release of flower-dp reads formats up to {FORMATS[-1]}")
    if (found := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        raise LedgerError(f"is damaged: {found}")
    tables = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    if sorted(text for (text,) in tables) != sorted(_schema(version)):
        raise LedgerError("is damaged: its tables are not those of a ledger")


def read(db: sqlite3.Connection, content: Content, marked: int | None = None) -> Iterator[Entry]:
    """Yield every charge in order, checked, and fill `content`: at the end it has all.

    Args:
        db: the database, which `check_database` has passed.
        content: is filled.
        marked: the number of the charge whose digest it is to remember; 0: that of a ledger without charges.

    Raises:
        LedgerError: if an entry is missing, or has changed.
    """
    ((name, epsilon, delta, *order),) = db.execute("SELECT * FROM ledger").fetchall()
    if epsilon is not None:
        adaptive = {"fully_adaptive": True, "renyi_order": order[0]} if order else {}
        content.budget = JointBudget(epsilon=epsilon, delta=delta, **adaptive)
    content.digest = first_digest(name, content.budget)
    content.marked = content.digest if marked == 0 else None
    for key, *values in db.execute("SELECT id, name, method, delta, started, private FROM runs"):
        content.runs[key] = LedgerRun(**dict(zip(LedgerRun.__slots__, values, strict=True)) | {"private": bool(values[-1])})
    for key, run, name, kind, unit, relation in db.execute("SELECT id, run, name, kind, unit, relation FROM releases"):
        checks.one_of("unit", unit, _UNITS)
        checks.one_of("relation", relation, RELATIONS)
        found = LedgerRelease(run=run, name=name, kind=kind, unit=cast("Unit", unit), relation=cast("Relation", relation))
        content.releases[key] = found
    for key, text in db.execute("SELECT id, event FROM terms"):
        content.texts[key], content.events[key] = text, of_json(json.loads(text))
    names = dict(db.execute("SELECT id, name FROM owners").fetchall())
    charged = db.execute("SELECT charge, owner, terms FROM charged ORDER BY rowid")
    ahead = charged.fetchone()
    columns = "id, release, number, server_round, shares, digest"
    for key, release, number, server_round, shares, digest in db.execute(f"SELECT {columns} FROM charges ORDER BY id"):  # noqa: S608
        owners, terms = [], []
        while ahead is not None and ahead[0] == key:
            owners.append(ahead[1])
            terms.append(ahead[2])
            ahead = charged.fetchone()
        if key != content.num_charges + 1 or number != content.numbers.get(release, 0) + 1:
            raise LedgerError(f"is damaged: charge {content.num_charges + 1} is missing")
        of = content.releases[release]
        run = content.runs[of.run]
        entry = Entry(run=run, release=of, number=number, server_round=server_round, shares=shares, owners=owners, terms=terms)
        own = digest_of(content.digest, entry, [names[one] for one in owners], [content.texts[one] for one in terms])
        if own != digest:
            raise LedgerError(f"is damaged: charge {key} has changed since it was written")
        content.num_charges, content.digest, content.numbers[release] = key, own, number
        content.marked = own if key == marked else content.marked
        yield entry
    if ahead is not None:
        raise LedgerError(f"is damaged: charge {ahead[0]} is missing")


def first_digest(name: str, budget: JointBudget | None) -> bytes:
    """Return the digest of a ledger without charges."""
    limits = None if budget is None else _limits(budget)
    return hashlib.sha256(json.dumps([APPLICATION, _version_for(budget), name, limits]).encode()).digest()


def digest_of(before: bytes, entry: Entry, owners: Sequence[str], events: Sequence[str]) -> bytes:
    """Return the digest of a charge: of all that it says, and of the digest before it."""
    places = {event: place for place, event in enumerate(dict.fromkeys(events))}
    run, release = entry.run, entry.release
    said = [
        [run.name, run.method, run.delta, run.started, run.private],
        [release.name, release.kind, release.unit, release.relation],
        [entry.number, entry.server_round, entry.shares],
        [list(owners), list(places), [places[event] for event in events]],
    ]
    return hashlib.sha256(before + json.dumps(said).encode()).digest()


def charge_of(entry: Entry, owners: Sequence[str], events: Sequence[dp.DpEvent]) -> Charge:
    """Return an entry as the charge that was written."""
    return Charge(
        release=entry.release.name,
        number=entry.number,
        kind=entry.release.kind,
        unit=entry.release.unit,
        relation=entry.release.relation,
        owners=tuple(owners),
        events=tuple(events),
        shares=entry.shares,
    )


def text_of(event: dp.DpEvent) -> str:
    """Return an event as the tables have it: equal ones are equal text."""
    return json.dumps(as_json(event), allow_nan=False, default=lambda number: number.item())


def check_last(db: sqlite3.Connection, content: Content) -> None:
    """Refuse to go on if another process has written, although this one has the lock."""
    last = db.execute("SELECT id, digest FROM charges ORDER BY id DESC LIMIT 1").fetchone()
    if (last or (0, content.digest)) != (content.num_charges, content.digest):
        raise LedgerError("was changed by another process while this one had its lock")


def run_id(content: Content, run: str) -> int:
    """Return the row of a run."""
    for key, one in content.runs.items():
        if one.name == run:
            return key
    raise LedgerError(f"has no run {run}")


def release_of(db: sqlite3.Connection, content: Content, run: str, charge: Charge) -> tuple[int, LedgerRelease]:
    """Return the release that is charged, and its row, written down if it is new.

    Raises:
        LedgerError: if this is not its next charge, or one of something else.
    """
    of = LedgerRelease(
        run=run_id(content, run), name=charge.release, kind=charge.kind, unit=charge.unit, relation=charge.relation
    )
    known = {(one.run, one.name): key for key, one in content.releases.items()}
    key = known.get((of.run, of.name))
    if (count := 0 if key is None else content.numbers.get(key, 0)) != charge.number - 1:
        raise LedgerError(f"has {count} charges of {of.name} in this run: number {charge.number} is not the next")
    if key is None:
        values = (of.run, of.name, of.kind, of.unit, of.relation)
        key = db.execute("INSERT INTO releases (run, name, kind, unit, relation) VALUES (?, ?, ?, ?, ?)", values).lastrowid or 0
    elif content.releases[key] != of:
        raise LedgerError(f"has charges of {of.name} in this run for something else: {content.releases[key].kind}")
    return key, of


def row_of(db: sqlite3.Connection, table: str, column: str, value: str) -> int:
    """Return the id of the row with this value, written down if it is new."""
    row = db.execute(f"SELECT id FROM {table} WHERE {column} = ?", (value,)).fetchone()  # noqa: S608
    if row is not None:
        return int(row[0])
    return db.execute(f"INSERT INTO {table} ({column}) VALUES (?)", (value,)).lastrowid or 0  # noqa: S608
