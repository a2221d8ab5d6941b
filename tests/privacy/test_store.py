"""A ledger's file: what was acknowledged is there, whatever happens to processes and files; anything wrong is an error."""

import fcntl
import json
import math
import multiprocessing
import os
import random
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from flower_dp.core import dp_events
from flower_dp.privacy import accounting, ledger_tables, store
from flower_dp.privacy.budget import LedgerBudget, Remaining
from flower_dp.privacy.charges import ALL_CLIENTS, Charge, Charges, CostScope
from flower_dp.privacy.private_file import BudgetSpentError, LedgerError
from flower_dp.privacy.store import Store
from tests.charges import charge_each, one_charge
from tests.closed_forms import gaussian_epsilon
from tests.crash.points import Points

FORK = multiprocessing.get_context("fork")
GAUSSIAN = dp_events.GaussianDpEvent(2.0)
ADD, REPLACE = "add-or-remove-one", "replace-one"
CLIENTS, RECORDS = CostScope(unit="client", relation=ADD), CostScope(unit="record", relation=REPLACE)
DELTA = 1e-5


def charge(number=1, owners=(ALL_CLIENTS,), event=GAUSSIAN, **changes):
    return one_charge(number, event, owners, **{"release": "dp-fedavg", "fingerprint": "z = 2"} | changes)


def local(number=1, owners=("a", "b"), event=GAUSSIAN, **changes):
    return charge(number, owners, event, **{"scope": RECORDS, "release": "dp-pasgd"} | changes)


def gaussian(*multipliers, relation=ADD):
    """What Gaussian releases cost together, by hand."""
    return gaussian_epsilon(multipliers, relation, DELTA)


def created(folder, epsilon=None):
    """Make a ledger with a budget, or without."""
    folder.chmod(0o700)
    Store.create(folder / "ledger.sqlite", None if epsilon is None else LedgerBudget(epsilon=epsilon, delta=DELTA))
    return folder / "ledger.sqlite"


@pytest.fixture
def path(tmp_path):
    return created(tmp_path)


def begun(ledger, **words):
    return ledger.begin(**{"method": "m", "delta": DELTA} | words)


def filled(path, count=12):
    """A ledger of two runs, and all that was charged."""
    if not path.exists():
        Store.create(path)
    charges = {}
    with Store(path) as ledger:
        one, other = ledger.begin(method="DP-FedAvg", delta=1e-3), ledger.begin(method="DP-PASGD", delta=1e-4)
        for number in range(1, count + 1):
            for run, made in ((one, charge(number)), (other, local(number, (f"c{number % 3}", f"c{3 + number}")))):
                ledger.append(run, made)
                charges.setdefault(run, []).append(made)
    return {run: tuple(made) for run, made in charges.items()}


def content(path):
    with Store(path, read_only=True) as ledger:
        return {run: ledger.read(run) for run in ledger.runs}


def lengths(path):
    return [len(charges) for charges in content(path).values()]


def by_hand(path, *statements):
    """Change a ledger as another program does."""
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def in_child(function, *arguments):
    """Run a function in a process of its own, which ends as if it was killed: nothing is closed. Return its exit status."""

    def body():
        try:
            function(*arguments)
        except LedgerError:
            os._exit(3)
        os._exit(0)

    child = FORK.Process(target=body)
    child.start()
    child.join(60)
    return child.exitcode


# What is written is read back


def test_charges_are_read_back_as_they_were_written(path):
    events = (
        GAUSSIAN,
        dp_events.LaplaceDpEvent(0.1 + 0.2),
        dp_events.NoOpDpEvent(),
        dp_events.PoissonSampledDpEvent(1 / 3, dp_events.GaussianDpEvent(1e-7)),
        dp_events.SampledWithoutReplacementDpEvent(9, 3, GAUSSIAN),
        dp_events.SelfComposedDpEvent(dp_events.PoissonSampledDpEvent(0.1, GAUSSIAN), 4),
        dp_events.ComposedDpEvent([GAUSSIAN, dp_events.SelfComposedDpEvent(dp_events.LaplaceDpEvent(2.0), 2)]),
    )
    names = tuple(f"client {number} «ü» \n\"'" for number in range(len(events)))
    words = {"release": "dp-pasgd", "number": 1, "scope": RECORDS, "fingerprint": "Ω" * 900, "server_round": 7}
    first = charge_each(dict(zip(names, events, strict=True)), **words)
    seen = {"outsiders": (dp_events.GaussianDpEvent(9.0),) * 7}
    made = (
        first,
        replace(first, number=2, server_round=8, owners=names[::-1], views=seen),
        replace(first, number=3, server_round=9, owners=(), events=(), which=()),
    )
    with Store(path) as ledger:
        run = ledger.begin(method="m", delta=0.0)
        for one in made:
            ledger.append(run, one)
        ledger.append(run, replace(first, number=4), replace(first, number=5))
        assert [one.number for one in ledger.read(run, {"dp-pasgd": 2})] == [3, 4, 5]
    with Store(path) as ledger:
        assert ledger.read(run) == (*made, replace(first, number=4), replace(first, number=5))
        assert [(one.method, one.delta, one.private) for one in ledger.runs.values()] == [("m", 0.0, True)]
        outside = ledger.charges[run].history(replace(RECORDS, view="outsiders"), names[0])
        assert outside.counts == {dp_events.GaussianDpEvent(9.0): 1}


def test_a_ledger_that_knows_less_than_the_run_is_an_older_copy(path):
    with Store(path) as ledger:
        run = begun(ledger)
        ledger.append(run, charge())
        assert ledger.read(run, {"dp-fedavg": 1}) == ()
        for known in ({"dp-fedavg": 2}, {"dp-fedavg": 1, "private-evaluation": 1}):
            with pytest.raises(LedgerError, match="is an older copy: it has"):
                ledger.read(run, known)
        with pytest.raises(LedgerError, match="has no run nobody"):
            ledger.read("nobody")


def test_charges_of_a_release_follow_each_other_and_are_of_one_kind(path):
    others = {"fingerprint": "z = 4"}, {"scope": replace(CLIENTS, relation=REPLACE)}, {"scope": replace(CLIENTS, unit="record")}
    wrong = [
        *((charge(number), f"has 1 charges of dp-fedavg in this run: number {number} is not the next") for number in (1, 3)),
        *((charge(2, **one), "has charges of dp-fedavg in this run for something else: z = 2") for one in others),
        (charge(2, release="other"), "has 0 charges of other in this run: number 2 is not the next"),
    ]
    with Store(path) as ledger:
        run, other = begun(ledger), begun(ledger)
        ledger.append(run, charge())
        for one, why in wrong:
            with pytest.raises(LedgerError, match=why):
                ledger.append(run, one)
        with pytest.raises(LedgerError, match="has no run nobody"):
            ledger.append("nobody", charge(2))
        ledger.append(other, charge(1, fingerprint="z = 4"))
        ledger.append(run, charge(2))
    assert lengths(path) == [2, 1]


def test_of_several_charges_all_are_written_or_none(path):
    with Store(path) as ledger:
        run = begun(ledger)
        ledger.append(run, charge(1), charge(2))
        for wrong in (charge(5), charge(4, fingerprint="another")):
            with pytest.raises(LedgerError):
                ledger.append(run, charge(3, ("a",)), wrong)
        ledger.append(run, charge(3), local(1, ("a", "b")))
        assert ledger.all.owners(CLIENTS) == [ALL_CLIENTS]
    assert lengths(path) == [4]


def test_a_closed_ledger_and_one_that_is_read_take_no_charge(path):
    made = filled(path, 1)
    closed, read = Store(path), Store(path, read_only=True)
    closed.close()
    for ledger in (closed, read):
        with pytest.raises(LedgerError, match="is not open for writing"):
            ledger.append(next(iter(made)), charge(2))
    assert content(path) == made


def test_it_is_written_so_that_a_crash_of_the_machine_loses_nothing_and_is_its_owners_alone(path):
    """A rollback journal that is on the disk first; with EXTRA its name and its end are, too."""
    filled(path)
    with Store(path) as ledger:
        modes = [ledger._db.execute(f"PRAGMA {name}").fetchone() for name in ("journal_mode", "synchronous", "fullfsync")]
        assert modes == [("truncate",), (3,), (1,)]
        files = {entry.name: entry.stat().st_mode & 0o777 for entry in path.parent.iterdir()}
    assert files == {f"ledger.sqlite{suffix}": 0o600 for suffix in ("", "-journal", ".mark")}


def test_nothing_that_was_written_can_be_changed_or_removed(path):
    filled(path, 2)
    db = sqlite3.connect(path)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert len(tables) == 5
    for table in tables:
        column = db.execute(f"SELECT name FROM pragma_table_info('{table}')").fetchone()[0]  # noqa: S608
        for statement in (f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"):  # noqa: S608
            with pytest.raises(sqlite3.IntegrityError, match="a ledger is never changed"):
                db.execute(statement)
    db.close()


# Joint cost


def test_what_all_runs_have_cost_every_owner_is_the_composition_of_its_events(path):
    with Store(path) as ledger:
        for multiplier in (2.0, 3.0):
            run = begun(ledger)
            ledger.append(run, local(1, ("a", "b"), dp_events.GaussianDpEvent(multiplier)))
            ledger.append(run, local(2, ("b", "c"), dp_events.GaussianDpEvent(multiplier)))
        ledger.append(begun(ledger), charge(event=dp_events.GaussianDpEvent(5.0)))
    with Store(path) as ledger:
        for name, multipliers in {"a": (2, 3), "b": (2, 2, 3, 3), "c": (2, 3)}.items():
            found = ledger.all.history(RECORDS, name).cost(DELTA).epsilon
            assert found == pytest.approx(gaussian(*multipliers, relation=REPLACE), rel=1e-6)
        assert ledger.all.cost_of_most_charged(RECORDS, DELTA).epsilon == pytest.approx(
            gaussian(2, 2, 3, 3, relation=REPLACE), rel=1e-6
        )
        assert ledger.all.cost_of_most_charged(CLIENTS, DELTA).epsilon == pytest.approx(gaussian(5), rel=1e-6)
        assert {scope: len(ledger.all.runs(scope)) for scope in ledger.all.scopes} == {RECORDS: 2, CLIENTS: 1}
        assert [ledger.all.owners(scope) for scope in (RECORDS, CLIENTS)] == [["a", "b", "c"], [ALL_CLIENTS]]


def test_noise_from_a_fixed_seed_protects_nobody(path):
    with Store(path) as ledger:
        ledger.append(begun(ledger, private=False), charge())
        assert ledger.all.cost_of_most_charged(CLIENTS, DELTA).epsilon == math.inf
    with Store(path) as ledger:
        assert ledger.all.history(CLIENTS).counts == {dp_events.NonPrivateDpEvent(): 1}


# A budget


def test_what_a_budget_does_not_cover_is_not_written(tmp_path):
    """Where a budget ends, for each client and over all runs: tests/privacy/test_generated_ledgers.py."""
    path = created(tmp_path, gaussian(2, 2) * (1 + 1e-6))
    said = "^it would exceed the ledger's budget, epsilon [0-9.]+ at delta 1e-05 for all runs together"
    for _ in range(2):
        with Store(path) as ledger:
            ledger.append(begun(ledger), charge())
    with Store(path) as ledger:
        run = begun(ledger)
        for _ in range(2):
            with pytest.raises(BudgetSpentError, match=said):
                ledger.append(run, charge(event=dp_events.GaussianDpEvent(30.0)))
        ledger.append(run, charge(event=dp_events.NoOpDpEvent()))  # what costs less may still be covered
    assert lengths(path) == [1, 1, 1]


def test_a_budget_covers_one_kind_of_charges_and_no_noise_from_a_seed(tmp_path):
    with Store(created(tmp_path, 1e6)) as ledger:
        with pytest.raises(
            BudgetSpentError, match="noise from a fixed seed protects nobody: it would exceed the ledger's budget"
        ):
            ledger.append(begun(ledger, private=False), charge())
        with pytest.raises(BudgetSpentError, match="would exceed"):
            ledger.append(begun(ledger), local(event=dp_events.NonPrivateDpEvent()))
        ledger.append(begun(ledger), charge())
        why = r"charges for each record \(replace-one\) can't be composed with those for each client"
        with pytest.raises(BudgetSpentError, match=why):
            ledger.append(begun(ledger), local())


def test_far_from_its_end_a_budget_needs_few_accounts(tmp_path, monkeypatch):
    path, calls, epsilon = created(tmp_path, 100.0), [], accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda *arguments, **named: calls.append(1) or epsilon(*arguments, **named))
    with Store(path) as ledger:
        run = begun(ledger)
        for number in range(1, 65):
            ledger.append(run, local(number, tuple(f"c{(number * 7 + place) % 500}" for place in range(100))))
    assert len(calls) < 20


# One process writes


def refused(path, match, read_only=(False, True)):
    for only in read_only:
        with pytest.raises(LedgerError, match=match):
            Store(path, read_only=only)


def test_who_writes_without_the_lock_is_noticed(path):
    """Another program may know nothing of it, and a disk that several machines share may have none."""
    filled(path, 2)
    with Store(path) as ledger:
        run = next(iter(ledger.runs))
        ledger.append(run, charge(3, ("else",)))
        by_hand(path, "INSERT INTO charges SELECT id + 1, run, about, owners, which, events, digest FROM charges WHERE id = 5")
        for _ in range(2):
            with pytest.raises(LedgerError, match="was changed by another process while this one had its lock"):
                ledger.append(run, charge(4, ("somebody",)))


def test_who_gets_past_the_lock_is_noticed_and_spends_nothing_twice(path):
    """The lock file is removed while it is held: a second process can write then, and the first one can't any more."""
    with Store(path) as first:
        run = begun(first)
        first.append(run, charge())
        path.with_name(path.name + ".mark").unlink()
        with Store(path) as second:
            second.append(run, charge(2))
        with pytest.raises(LedgerError, match="was moved, replaced or removed while this process was writing to it"):
            first.append(run, charge(2))
    assert lengths(path) == [2]


def test_who_gets_the_lock_of_a_mark_that_has_just_been_removed_takes_the_new_one(path, monkeypatch):
    """Else two processes would hold the locks of two files."""
    flock, late = fcntl.flock, []

    def lock(*arguments):
        if not late:
            late.append(True)
            path.with_name(path.name + ".mark").unlink()  # another process, between our open and our lock
        flock(*arguments)

    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.2)
    monkeypatch.setattr(fcntl, "flock", lock)
    with Store(path):
        monkeypatch.undo()
        monkeypatch.setattr(store, "_LOCK_SECONDS", 0.05)
        assert in_child(Store, path) == 3


def test_one_process_writes_and_others_read(path, tmp_path, monkeypatch):
    """Also by another name of the file."""
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.05)
    (tmp_path / "other").symlink_to(path)
    with Store(path) as ledger:
        run = begun(ledger)
        for number in range(1, 4):
            ledger.append(run, charge(number))
            assert in_child(Store, path) == 3
            for name in (path, tmp_path / "other"):
                refused(name, "is in use: another process writes to it", [False])
            assert lengths(path) == [number]
    assert in_child(Store, path) == 0


# What is no ledger of ours


def test_a_missing_ledger_is_an_error_and_is_not_made(tmp_path):
    tmp_path.chmod(0o700)
    refused(tmp_path / "ledger.sqlite", "ledger .*: does not exist; create it with")
    refused(tmp_path / "no" / "ledger.sqlite", "does not exist")
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_no_ledger(tmp_path):
    for mode in ("DELETE", "WAL", ""):
        other = tmp_path / f"foreign {mode}"
        other.touch(0o600)
        if mode:
            by_hand(other, f"PRAGMA journal_mode = {mode}", "CREATE TABLE charges (id INTEGER PRIMARY KEY)")
        before = other.read_bytes()
        refused(other, "is not a ledger: it is another program's database, or an empty file")
        assert other.read_bytes() == before
    (tmp_path / "text").touch(0o600)
    (tmp_path / "text").write_text("flower" * 1000)
    refused(tmp_path / "text", "file is not a database")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in (tmp_path / "pipe", tmp_path):
        refused(other, "is not a regular file")


def test_another_format_or_a_ledger_without_its_triggers_is_refused(path):
    by_hand(path, "DROP TRIGGER charges_delete")
    refused(path, "is damaged: its tables are not those of a ledger")
    by_hand(path, "PRAGMA user_version = 5")
    refused(path, "has format 5; this release of flower-dp reads format 4")


def test_a_ledger_is_created_once(path, tmp_path):
    made = filled(path, 2)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for there in (path, tmp_path / "link"):
        with pytest.raises(LedgerError, match="exists already"):
            Store.create(there)
    with pytest.raises(LedgerError, match="its folder does not exist"):
        Store.create(tmp_path / "no" / "ledger.sqlite")
    assert content(path) == made
    assert [entry.name for entry in tmp_path.iterdir() if ".new" in entry.name] == []


# Damage


def damaged_or_whole(path, made):
    """Whether it is refused; else it must be complete."""
    try:
        found = content(path)
    except LedgerError:
        refused(path, "ledger", [False])
        return True
    assert found == made
    with Store(path) as ledger:
        assert {run: ledger.read(run) for run in ledger.runs} == made
    return False


def copied(path, folder, *suffixes):
    for suffix in ("", *suffixes):
        shutil.copy2(path.with_name(path.name + suffix), folder / (path.name + suffix))
    return folder / path.name


@pytest.mark.slow
@pytest.mark.parametrize("marked", [True, False], ids=["with its lock file", "without"])
def test_a_byte_that_has_changed_anywhere_is_noticed_or_changes_nothing(path, tmp_path, marked):
    """Every page, 3 places of each, one bit each: a charge is never lost, nor does it become a smaller one."""
    made, rng, noticed = filled(path), random.Random(5), 0
    size = path.stat().st_size
    where = [place for page in range(0, size, 4096) for place in rng.sample(range(page, page + 4096), 3)]
    (tmp_path / "copy").mkdir(mode=0o700)
    for place in [*range(0, 100, 7), *where]:
        copy = copied(path, tmp_path / "copy", *([".mark"] if marked else []))
        spoilt = bytearray(copy.read_bytes())
        spoilt[place] ^= 1 << rng.randrange(8)
        copy.write_bytes(spoilt)
        noticed += damaged_or_whole(copy, made)
        for entry in copy.parent.iterdir():
            entry.unlink()
    assert noticed >= 10


CHANGES = {
    "number": ("charges", "about", "replace(about, '\"number\": 1', '\"number\": 2')"),
    "relation": ("charges", "about", "replace(about, 'add-or-remove-one', 'replace-one')"),
    "owners": ("charges", "owners", "x'02000000'"),
    "nobody": ("charges", "owners", "x''"),
    "events of the charge": ("charges", "events", "x'0100000001000000'"),
    "which": ("charges", "which", "x'01000000'"),
    "digest": ("charges", "digest", "zeroblob(32)"),
    "run of the charge": ("charges", "run", "2"),
    "name": ("owners", "name", "name || 1"),
    "event": ("events", "event", "replace(event, '2.0', '4.0')"),
    "private": ("runs", "about", "replace(about, 'true', 'false')"),
    "run": ("runs", "name", "name || 1"),
    "budget": ("about", "value", '\'{"epsilon": 99.0, "delta": 0.001}\''),
}


def changed(path, table, statement):
    """Change a ledger as nobody should, and put its triggers back."""
    triggers = (one for one in ledger_tables.SCHEMA if f"TRIGGER {table}_" in one)
    by_hand(path, *(f"DROP TRIGGER {table}_{change}" for change in ("update", "delete")), statement, *triggers)


@pytest.mark.parametrize("what", CHANGES)
def test_a_value_that_has_changed_is_noticed(path, what):
    table, column, value = CHANGES[what]
    filled(path)
    before = path.read_bytes()
    changed(path, table, f"UPDATE {table} SET {column} = {value} WHERE rowid = 1")  # noqa: S608
    assert path.read_bytes() != before
    refused(path, "is damaged")


@pytest.mark.parametrize(("which", "why"), [(24, "holds 23 of 24 charges: it is an older copy"), (5, "charge 5 is missing")])
def test_a_charge_that_was_removed_is_noticed(path, which, why):
    filled(path)
    changed(path, "charges", f"DELETE FROM charges WHERE id = {which}")  # noqa: S608
    refused(path, why)


@pytest.mark.parametrize(
    "words",
    [{"number": 3}, {"number": "x"}, {"unit": "person"}, {"relation": "none"}, {"views": ["a", "b"]}, {"fingerprint": "other"}],
)
def test_a_charge_that_was_written_by_hand_is_refused(path, words):
    """Anyone can compute digests; what can't be a charge is refused even so, and is no error of another kind."""
    filled(path, 1)
    db = sqlite3.connect(path)
    about, digest = db.execute("SELECT about, digest FROM charges WHERE id = 2").fetchone()
    said = json.dumps(json.loads(about) | {"number": 2} | words)
    with Store(path, read_only=True) as ledger:
        run = list(ledger.runs.values())[1]
    own = ledger_tables.digest_of(digest, run, said, ("c1", "c4"), bytes(8), [ledger_tables.text_of(GAUSSIAN)])
    db.execute("INSERT INTO charges SELECT 3, run, ?, owners, which, events, ? FROM charges WHERE id = 2", (said, own))
    db.commit()
    db.close()
    refused(path, "is damaged")


def die_in_a_transaction(path, run, number):
    """End as by kill -9 when half of a transaction is in the file: what was there before is in the journal."""
    ledger = Store(path)
    ledger._db.execute("PRAGMA cache_size = 1")
    ledger_tables.digest_of = lambda *said: os._exit(7)
    ledger.append(run, local(number, tuple(f"new-{place}" for place in range(3000))))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 0.25, 0.75, "spoilt", 1])
def test_what_a_killed_process_has_left_half_written_is_undone_or_refused(path, kept):
    """Its journal is whole, or so much of it was lost, or a bit of it has changed: no charge is taken away."""
    made, journal, size = filled(path, 3), path.with_name(path.name + "-journal"), path.stat().st_size
    assert in_child(die_in_a_transaction, path, list(made)[1], 4) == 7
    assert path.stat().st_size > size
    whole = bytearray(journal.read_bytes())
    assert whole
    if kept == "spoilt":
        whole[random.Random(5).randrange(len(whole))] ^= 1
    journal.write_bytes(whole if kept == "spoilt" else whole[: int(len(whole) * kept)])
    damaged = damaged_or_whole(path, made)
    if kept == 1:
        assert not damaged
        with Store(path) as ledger:
            ledger.append(list(made)[1], local(4))
        assert lengths(path) == [3, 4]


def test_an_older_copy_is_noticed_by_the_lock_file_and_by_what_a_run_knows(path, tmp_path):
    made = filled(path, 2)
    old = copied(path, Path(tempfile.mkdtemp(dir=tmp_path)))
    with Store(path) as ledger:
        ledger.append(next(iter(made)), charge(3))
    shutil.copy2(old, path)
    refused(path, "holds 4 of 5 charges: it is an older copy")
    # Without the lock file nothing in the folder knows of more.
    path.with_name(path.name + ".mark").unlink()
    assert content(path) == made


def test_another_copy_that_has_gone_on_by_itself_is_noticed(path, tmp_path):
    made = filled(path, 2)
    other = copied(path, Path(tempfile.mkdtemp(dir=tmp_path)), ".mark")
    for one, server_round in ((path, 3), (other, 4)):
        with Store(one) as ledger:
            ledger.append(next(iter(made)), charge(3, server_round=server_round))
    shutil.copy2(other, path)
    refused(path, "is not the one of its .mark file, which remembers the last charge: it is another copy")


def test_a_damaged_lock_file_is_no_missing_one(path):
    made = filled(path, 2)
    lock = path.with_name(path.name + ".mark")
    whole = lock.read_bytes()
    for spoilt in (whole[:-1], b"x" + whole[1:], whole + b"0", whole.upper()):
        lock.write_bytes(spoilt)
        refused(path, r"its \.mark file is damaged; remove that if you know the ledger is not an older copy")
    lock.write_bytes(whole)
    assert content(path) == made


# Kill -9, Ctrl-C


def charge_under(path, at, out):
    """Two runs and some charges, by a process that is killed at a point; it says what it goes on from."""
    points = Points(path.parent, at, lambda kind: None)
    points.install()
    with Store(path) as ledger:
        for number in (1, 2):
            run = begun(ledger)
            for place in (1, 3):
                ledger.append(run, local(place, (f"c{number}", "d")), local(place + 1, ("d", f"e{place}")))
                os.write(out, b"..")
    os.write(out, b"" if at else bytes([points.passed.total()]))


def killed_at(path, at):
    """Return what the process went on from, and how many points it has."""
    inlet, outlet = os.pipe()
    child = FORK.Process(target=charge_under, args=(path, at, outlet))
    child.start()
    os.close(outlet)
    child.join(60)
    said = os.read(inlet, 100)
    os.close(inlet)
    return said.count(b"."), said[-1] if at is None else 0


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_statement_leaves_whole_charges(path):
    """Before and after each statement of SQLite and each call of the system: never fewer charges than it went on from."""
    whole = path.read_bytes()
    gone_on, points = killed_at(path, None)
    assert (gone_on, points > 50) == (8, True)
    for at in range(1, points + 1):
        for name in ("", ".mark", "-journal"):
            path.with_name(path.name + name).unlink(missing_ok=True)
        path.touch(0o600)
        path.write_bytes(whole)
        gone_on, _ = killed_at(path, at)
        found = sum(lengths(path))
        assert found - gone_on in (0, 2), at
        with Store(path) as ledger:
            ledger.append(begun(ledger), local(1))
        assert sum(lengths(path)) == found + 1


def test_an_interruption_while_names_are_written_leaves_no_charge_of_a_name_that_is_not(path):
    """The process went on with numbers of names that the file had forgotten again: it could not be read any more."""

    class Interrupted(dict):
        def update(self, names):
            super().update(names)
            if len(self) == 2:
                raise KeyboardInterrupt

    with Store(path) as ledger:
        run = begun(ledger)
        ledger._owners = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            ledger.append(run, local(1, ("a", "b")))
        ledger.append(run, local(1, ("b", "c", "d")))
    assert [one.owners for one in content(path)[run]] == [("b", "c", "d")]


def test_what_a_budget_affords_under_one_relation_it_does_not_under_another():
    """A charge that was allowed, and then not written, said the same of one that costs twice as much."""
    left = Remaining(LedgerBudget(epsilon=1.0, delta=1e-5))
    allowed = {}
    for relation in ("add-or-remove-one", "replace-one"):
        scope = CostScope(unit="client", relation=relation)
        words = {"release": "r", "number": 1, "server_round": 1, "fingerprint": "k", "scope": scope, "owners": (ALL_CLIENTS,)}
        one = Charge(**words, events=(dp_events.GaussianDpEvent(5.0),))
        cost = accounting.epsilon(dp_events.GaussianDpEvent(5.0), delta=1e-5, relation=relation).epsilon
        allowed[relation] = left.refusal_reason(Charges(), one, private=True) is None
        assert allowed[relation] == (cost <= 1.0)
    assert list(allowed.values()) == [True, False]
