"""The server's ledger: what was acknowledged is there, whatever happens to processes and files; anything wrong is an error."""

import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)

from flower_dp.privacy import accounting, ledger_lock, server_ledger_format
from flower_dp.privacy.charge import EVERY_CLIENT, Charge
from flower_dp.privacy.joint_cost import EVERYONE, Scope
from flower_dp.privacy.ledger_file import LedgerFile
from flower_dp.privacy.server_ledger import BudgetSpentError, JointBudget, LedgerError, ServerLedger

FORK = multiprocessing.get_context("fork")
GAUSSIAN = GaussianDpEvent(2.0)
CLIENTS = Scope(unit="client", relation="add-or-remove-one")
RECORDS = Scope(unit="record", relation="replace-one")
DELTA = 1e-5


def charge(number=1, owners=(EVERY_CLIENT,), event=GAUSSIAN, **changes):
    words = {"release": "dp-fedavg", "number": number, "kind": "z = 2", "unit": "client", "relation": "add-or-remove-one"}
    return Charge(**words | {"owners": owners, "events": (event,) * len(owners), "shares": 3} | changes)


def local(number=1, owners=("a", "b"), event=GAUSSIAN, **changes):
    return charge(number, owners, event, **{"unit": "record", "relation": "replace-one", "release": "dp-pasgd"} | changes)


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    ServerLedger.create(tmp_path / "ledger.sqlite")
    return tmp_path / "ledger.sqlite"


def filled(path, count=12, **create):
    """A ledger of two runs, and all that was charged."""
    if not path.exists():
        ServerLedger.create(path, **create)
    charges = {}
    with ServerLedger(path) as ledger:
        one, other = ledger.begin_run(method="DP-FedAvg", delta=1e-3), ledger.begin_run(method="DP-PASGD", delta=1e-4)
        for number in range(1, count + 1):
            for run, made in ((one, charge(number)), (other, local(number, (f"c{number % 3}", f"c{3 + number}")))):
                ledger.charge(run, made, number)
                charges.setdefault(run, []).append((number, made))
    return {run: tuple(made) for run, made in charges.items()}


def content(path):
    with ServerLedger(path, read_only=True) as ledger:
        return {run.name: ledger.charges(run.name) for run in ledger.runs}


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
        LaplaceDpEvent(0.1 + 0.2),
        NoOpDpEvent(),
        PoissonSampledDpEvent(1 / 3, GaussianDpEvent(1e-7)),
        SampledWithoutReplacementDpEvent(9, 3, GAUSSIAN),
        SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GAUSSIAN), 4),
        ComposedDpEvent([GAUSSIAN, SelfComposedDpEvent(LaplaceDpEvent(2.0), 2)]),
    )
    names = tuple(f"client {number} «ü» \n\"'" for number in range(len(events)))
    first = local(owners=names, event=GAUSSIAN, events=events, kind="Ω" * 900)
    made = [first, replace(first, number=2, owners=names[::-1]), replace(first, number=3, owners=(), events=(), shares=0)]
    with ServerLedger(path) as ledger:
        run = ledger.begin_run(method="m", delta=0.0)
        for place, one in enumerate(made, start=7):
            ledger.charge(run, one, place)
        assert ledger.charges(run) == tuple(enumerate(made, start=7))
        ledger.charge(run, replace(first, number=4), 10)
        assert [one.number for _, one in ledger.charges(run, {"dp-pasgd": 2})] == [3, 4]
    with ServerLedger(path) as ledger:
        assert [one.number for _, one in ledger.charges(run)] == [1, 2, 3, 4]
        assert ledger.charges(run)[5 - 4 : 3] == tuple(enumerate(made, start=7))[1:]
        assert [(one.method, one.delta, one.private) for one in ledger.runs] == [("m", 0.0, True)]


def test_a_ledger_that_knows_less_than_the_run_is_an_older_copy(path):
    with ServerLedger(path) as ledger:
        run = ledger.begin_run(method="m", delta=DELTA)
        ledger.charge(run, charge(), 1)
        assert ledger.charges(run, {"dp-fedavg": 1}) == ()
        for known in ({"dp-fedavg": 2}, {"dp-fedavg": 1, "private-evaluation": 1}):
            with pytest.raises(LedgerError, match="is an older copy: it has"):
                ledger.charges(run, known)
        with pytest.raises(LedgerError, match="has no run nobody"):
            ledger.charges("nobody")


def test_charges_of_a_release_follow_each_other_and_are_of_one_kind(path):
    with ServerLedger(path) as ledger:
        run, other = ledger.begin_run(method="m", delta=DELTA), ledger.begin_run(method="m", delta=DELTA)
        ledger.charge(run, charge(), 1)
        for wrong in (charge(1), charge(3)):
            with pytest.raises(
                LedgerError, match=f"has 1 charges of dp-fedavg in this run: number {wrong.number} is not the next"
            ):
                ledger.charge(run, wrong, 2)
        for change in ({"kind": "z = 4"}, {"relation": "replace-one"}, {"unit": "record"}):
            with pytest.raises(LedgerError, match="has charges of dp-fedavg in this run for something else: z = 2"):
                ledger.charge(run, charge(2, **change), 2)
        with pytest.raises(LedgerError, match="has no run nobody"):
            ledger.charge("nobody", charge(2), 2)
        for owners in (("a", "a"), ("a", EVERY_CLIENT)):
            with pytest.raises(LedgerError, match="charges nobody twice at once, and no client of the name 'every client'"):
                ledger.charge(run, charge(2, owners), 2)
        ledger.charge(other, charge(1, kind="z = 4"), 1)
        ledger.charge(run, charge(2), 2)
    assert [len(charges) for charges in content(path).values()] == [2, 1]


def test_a_closed_ledger_and_one_that_is_read_take_no_charge(path):
    made = filled(path, 1)
    run = next(iter(made))
    with ServerLedger(path, read_only=True) as ledger, pytest.raises(LedgerError, match="is not open for writing"):
        ledger.charge(run, charge(2), 2)
    ledger = ServerLedger(path)
    ledger.close()
    with pytest.raises(LedgerError, match="is not open for writing"):
        ledger.charge(run, charge(2), 2)
    assert content(path) == made


def test_it_is_written_so_that_a_crash_of_the_machine_loses_nothing(path):
    """WAL with synchronous FULL: SQLite forces every commit onto the disk."""
    with ServerLedger(path) as ledger:
        db = ledger._files.db
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_nothing_that_was_written_can_be_changed_or_removed(path):
    filled(path, 2)
    db = sqlite3.connect(path)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert len(tables) == 7
    for table in tables:
        column = db.execute(f"SELECT name FROM pragma_table_info('{table}')").fetchone()[0]  # noqa: S608
        for statement in (f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"):  # noqa: S608
            with pytest.raises(sqlite3.IntegrityError, match="a ledger is never changed"):
                db.execute(statement)
    db.close()


def test_it_is_its_owners_alone(path):
    filled(path)
    with ServerLedger(path):
        modes = {entry.name: entry.stat().st_mode & 0o777 for entry in path.parent.iterdir()}
    assert modes == {f"ledger.sqlite{suffix}": 0o600 for suffix in ("", "-wal", "-shm", ".lock")}


# Joint cost


def gaussian(*multipliers, relation="add-or-remove-one"):
    """What Gaussian releases cost together, by hand: one release of multiplier 1 / sqrt(sum of z^-2)."""
    together = 1 / math.sqrt(sum(one**-2 for one in multipliers))
    return accounting.epsilon(GaussianDpEvent(together), delta=DELTA, relation=relation).epsilon


def test_what_all_runs_have_cost_every_owner_is_the_composition_of_its_events(path):
    with ServerLedger(path) as ledger:
        for multiplier in (2.0, 3.0):
            run = ledger.begin_run(method="m", delta=DELTA)
            ledger.charge(run, local(1, ("a", "b"), GaussianDpEvent(multiplier)), 1)
            ledger.charge(run, local(2, ("b", "c"), GaussianDpEvent(multiplier)), 2)
        ledger.charge(ledger.begin_run(method="m", delta=DELTA), charge(event=GaussianDpEvent(5.0)), 1)
    with ServerLedger(path) as ledger:
        records, owners = ledger.accounts.of(RECORDS), ledger.owners
        expected = {"a": (2, 3), "b": (2, 2, 3, 3), "c": (2, 3)}
        for name, multipliers in expected.items():
            assert records.cost(owners[name], DELTA).epsilon == pytest.approx(
                gaussian(*multipliers, relation="replace-one"), rel=1e-6
            )
        assert records.worst(DELTA).epsilon == pytest.approx(gaussian(2, 2, 3, 3, relation="replace-one"), rel=1e-6)
        assert ledger.accounts.of(CLIENTS).worst(DELTA).epsilon == pytest.approx(gaussian(5), rel=1e-6)
        assert ledger.accounts.scopes == (RECORDS, CLIENTS)
        assert ledger.num_runs_by_scope == {RECORDS: 2, CLIENTS: 1}
        assert owners[EVERY_CLIENT] == EVERYONE


def test_what_every_client_is_charged_with_costs_each_of_them(path):
    with ServerLedger(path) as ledger:
        ledger.charge(ledger.begin_run(method="m", delta=DELTA), charge(), 1)
        ledger.charge(ledger.begin_run(method="m", delta=DELTA), charge(1, ("a", "b"), GaussianDpEvent(3.0)), 1)
        accounts, owners = ledger.accounts.of(CLIENTS), ledger.owners
        assert accounts.cost(owners["a"], DELTA).epsilon == pytest.approx(gaussian(2, 3), rel=1e-6)
        assert accounts.cost(owners[EVERY_CLIENT], DELTA).epsilon == pytest.approx(gaussian(2), rel=1e-6)
        assert accounts.worst(DELTA).epsilon == pytest.approx(gaussian(2, 3), rel=1e-6)


def test_noise_from_a_fixed_seed_protects_nobody(path):
    with ServerLedger(path) as ledger:
        ledger.charge(ledger.begin_run(method="m", delta=DELTA, private=False), charge(), 1)
        assert ledger.accounts.of(CLIENTS).worst(DELTA).epsilon == math.inf
    with ServerLedger(path) as ledger:
        assert ledger.accounts.of(CLIENTS).event(EVERYONE) == ComposedDpEvent([SelfComposedDpEvent(NonPrivateDpEvent(), 1)])


def test_epsilons_add_up_where_no_accountant_composes(path):
    """Laplace noise on samples of fixed size has a pure bound alone; (e1, delta) and (e2, 0) compose to (e1 + e2, delta)."""
    sampled = SampledWithoutReplacementDpEvent(10, 5, LaplaceDpEvent(4.0))
    with ServerLedger(path) as ledger:
        ledger.charge(ledger.begin_run(method="m", delta=DELTA), local(), 1)
        ledger.charge(ledger.begin_run(method="m", delta=0.0), local(event=sampled), 1)
        found = ledger.accounts.of(RECORDS).worst(DELTA)
    pure = math.log(1 + 0.5 * math.expm1(2 / 4))
    assert found.epsilon <= (gaussian(2, relation="replace-one") + pure) * (1 + 1e-6)
    assert found.epsilon > gaussian(2, relation="replace-one")


# A budget


def affordable(epsilon, event=GAUSSIAN):
    return accounting.affordable(
        lambda count: SelfComposedDpEvent(event, count), epsilon=epsilon, delta=DELTA, relation="add-or-remove-one", limit=1000
    )


@pytest.mark.parametrize("epsilon", [1.9, 2.0, 7.0])
def test_charges_end_where_the_budget_of_all_runs_does(tmp_path, epsilon):
    tmp_path.chmod(0o700)
    path, most = tmp_path / "ledger.sqlite", affordable(epsilon)
    assert most == 0 or gaussian(*[2.0] * most) <= epsilon
    assert gaussian(*[2.0] * (most + 1)) > epsilon
    ServerLedger.create(path, JointBudget(epsilon=epsilon, delta=DELTA))
    charged = 0
    while charged < most:
        with ServerLedger(path) as ledger:
            run = ledger.begin_run(method="m", delta=0.5)
            for number in range(1, min(7, most - charged) + 1):
                ledger.charge(run, charge(number), number)
                charged += 1
    with ServerLedger(path) as ledger:
        run = ledger.begin_run(method="m", delta=0.5)
        for _ in range(2):
            with pytest.raises(
                BudgetSpentError,
                match=f"^it would pass the ledger's budget, epsilon {epsilon:g} at delta 1e-05 for all runs together",
            ):
                ledger.charge(run, charge(), 1)
        # What costs less may still be covered, and nothing of the refused ones was written.
        ledger.charge(run, charge(event=NoOpDpEvent()), 1)
    assert sum(map(len, content(path).values())) == most + 1


def test_a_budget_holds_for_every_client_whoever_else_was_charged(tmp_path):
    tmp_path.chmod(0o700)
    path = tmp_path / "ledger.sqlite"
    budget = gaussian(2, 2, 3) * (1 + 1e-6)
    ServerLedger.create(path, JointBudget(epsilon=budget, delta=DELTA))
    with ServerLedger(path) as ledger:
        run = ledger.begin_run(method="m", delta=DELTA)
        ledger.charge(run, charge(1, ("a", "b"), GaussianDpEvent(3.0)), 1)
        ledger.charge(run, charge(2, ("b", "c")), 2)
        everyone = ledger.begin_run(method="m", delta=DELTA)
        ledger.charge(everyone, charge(), 1)  # b has 3, 2, 2 now, and c has 2, 2
        for owners, event in ((("c", "b"), GaussianDpEvent(30.0)), (("c",), GAUSSIAN), ((EVERY_CLIENT,), GaussianDpEvent(30.0))):
            with pytest.raises(BudgetSpentError):
                ledger.charge(run, charge(3, owners, event), 3)
        ledger.charge(run, charge(3, ("c",), GaussianDpEvent(3.0)), 3)
        ledger.charge(run, charge(4, ("a", "d")), 4)


def test_a_budget_covers_one_kind_of_charges_and_no_noise_from_a_seed(tmp_path):
    tmp_path.chmod(0o700)
    path = tmp_path / "ledger.sqlite"
    ServerLedger.create(path, JointBudget(epsilon=1e6, delta=DELTA))
    with ServerLedger(path) as ledger:
        with pytest.raises(BudgetSpentError, match="noise from a fixed seed is within no budget"):
            ledger.charge(ledger.begin_run(method="m", delta=DELTA, private=False), charge(), 1)
        with pytest.raises(BudgetSpentError, match="would pass"):
            ledger.charge(ledger.begin_run(method="m", delta=DELTA), local(event=NonPrivateDpEvent()), 1)
        ledger.charge(ledger.begin_run(method="m", delta=DELTA), charge(), 1)
        with pytest.raises(
            BudgetSpentError, match=r"charges for each record \(replace-one\) don't add up with those for each client"
        ):
            ledger.charge(ledger.begin_run(method="m", delta=DELTA), local(), 1)


def test_far_from_its_end_a_budget_needs_few_accounts(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    path = tmp_path / "ledger.sqlite"
    ServerLedger.create(path, JointBudget(epsilon=100.0, delta=DELTA))
    calls, epsilon = [], accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda *arguments, **named: calls.append(1) or epsilon(*arguments, **named))
    with ServerLedger(path) as ledger:
        run = ledger.begin_run(method="m", delta=DELTA)
        for number in range(1, 65):
            ledger.charge(run, local(number, tuple(f"c{(number * 7 + place) % 500}" for place in range(100))), number)
    assert len(calls) < 20


@pytest.mark.parametrize("word", ["epsilon", "delta"])
def test_a_budget_that_makes_no_sense_is_refused(word):
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=word):
            JointBudget(**{"epsilon": 1.0, "delta": 1e-5} | {word: value})


def spend(path, attempts, results):
    """Open, charge once, close, and again: as many times as the budget lets it."""
    done = 0
    for _ in range(attempts):
        try:
            with ServerLedger(path) as ledger:
                ledger.charge(ledger.begin_run(method="m", delta=DELTA), charge(), 1)
                done += 1
        except BudgetSpentError:
            break
        except LedgerError as error:
            if "is in use" not in str(error):
                raise
    results.put(done)


@pytest.mark.slow
def test_two_processes_cannot_spend_one_budget_twice(tmp_path):
    tmp_path.chmod(0o700)
    path, most = tmp_path / "ledger.sqlite", affordable(6.0)
    assert most > 5
    ServerLedger.create(path, JointBudget(epsilon=6.0, delta=DELTA))
    results = FORK.Queue()
    children = [FORK.Process(target=spend, args=(path, 60, results)) for _ in range(2)]
    for child in children:
        child.start()
    done = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert sum(done) == most == sum(map(len, content(path).values()))


def test_who_gets_past_the_lock_is_noticed_and_spends_nothing_twice(path):
    """The lock file is removed while it is held: a second process can write then, and the first one can't any more."""
    with ServerLedger(path) as first:
        run = first.begin_run(method="m", delta=DELTA)
        first.charge(run, charge(), 1)
        path.with_name(path.name + ".lock").unlink()
        with ServerLedger(path) as second:
            second.charge(run, charge(2), 2)
        with pytest.raises(LedgerError, match="was changed by another process while this one had its lock"):
            first.charge(run, charge(2), 2)
    assert [len(charges) for charges in content(path).values()] == [2]


# What is no ledger of ours


def refused(path, match, read_only=(False, True)):
    for only in read_only:
        with pytest.raises(LedgerError, match=match):
            ServerLedger(path, read_only=only)


def test_a_missing_ledger_is_an_error_and_is_not_made(tmp_path):
    tmp_path.chmod(0o700)
    refused(tmp_path / "ledger.sqlite", "ledger .*: does not exist; create it with")
    refused(tmp_path / "no" / "ledger.sqlite", "does not exist")
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_no_ledger(path, tmp_path):
    foreign = tmp_path / "foreign.sqlite"
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE charges (id INTEGER PRIMARY KEY)")
    db.commit()
    db.close()
    wal = tmp_path / "wal.sqlite"
    db = sqlite3.connect(wal)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE charges (id INTEGER PRIMARY KEY)")
    db.commit()
    db.close()
    empty, text = tmp_path / "empty.sqlite", tmp_path / "text.sqlite"
    empty.write_bytes(b"")
    text.write_text("flower" * 1000)
    device = LedgerFile.create(tmp_path / "ledger.json", ["a"]).path
    for other in (foreign, wal, empty):
        other.chmod(0o600)
        before = other.read_bytes()
        refused(other, "is no ledger of a server: it is another program's database, or an empty file")
        assert other.read_bytes() == before
    for other in (text, device):
        other.chmod(0o600)
        refused(other, "file is not a database")
    os.mkfifo(tmp_path / "pipe", 0o600)
    refused(tmp_path / "pipe", "is no regular file")
    refused(tmp_path, "is no regular file")


def test_a_newer_format_is_refused(path):
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 3")
    db.close()
    refused(path, "has format 3; this release of flower-dp reads formats up to 2")


def test_a_ledger_is_created_once(path, tmp_path):
    made = filled(path, 2)
    with pytest.raises(LedgerError, match="exists already"):
        ServerLedger.create(path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(LedgerError, match="exists already"):
        ServerLedger.create(tmp_path / "link")
    with pytest.raises(LedgerError, match="its folder does not exist"):
        ServerLedger.create(tmp_path / "no" / "ledger.sqlite")
    assert content(path) == made
    assert [entry.name for entry in tmp_path.iterdir() if ".new" in entry.name] == []


def test_two_names_of_one_ledger_have_one_lock(path, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_lock, "_LOCK_SECONDS", 0.05)
    (tmp_path / "other").symlink_to(path)
    with ServerLedger(path):
        refused(tmp_path / "other", "is in use: another process writes to it", [False])


def test_one_process_writes_and_others_read(path, monkeypatch):
    monkeypatch.setattr(ledger_lock, "_LOCK_SECONDS", 0.05)
    with ServerLedger(path) as ledger:
        run = ledger.begin_run(method="m", delta=DELTA)
        for number in range(1, 4):
            ledger.charge(run, charge(number), number)
            assert in_child(ServerLedger, path) == 3
            refused(path, "is in use: another process writes to it", [False])
            assert len(content(path)[run]) == number
    assert in_child(ServerLedger, path) == 0


@pytest.mark.parametrize("change", ["mode", "folder", "link"])
def test_what_others_can_change_is_refused(path, change):
    if change == "mode":
        path.chmod(0o640)
    elif change == "folder":
        path.parent.chmod(0o777)
    else:
        os.link(path, path.with_name("second"))
    refused(path, "is open to others|is in a folder that others can write to|has 2 hard links", [False])


# Damage


def damaged_or_whole(path, made):
    """Whether it is refused; else it must be complete."""
    try:
        found = content(path)
    except LedgerError:
        with pytest.raises(LedgerError):
            ServerLedger(path)
        return True
    assert found == made
    with ServerLedger(path) as ledger:
        assert {run.name: ledger.charges(run.name) for run in ledger.runs} == made
    return False


def copied(path, folder, *suffixes):
    for suffix in ("", *suffixes):
        shutil.copy2(path.with_name(path.name + suffix), folder / (path.name + suffix))
    return folder / path.name


@pytest.mark.slow
@pytest.mark.parametrize("marked", [True, False], ids=["with its lock file", "without"])
def test_a_byte_that_has_changed_anywhere_is_noticed_or_changes_nothing(path, tmp_path, marked):
    """Every page, 3 places of each, one bit each: a charge is never lost, nor does it become a smaller one."""
    made, rng, noticed, where = filled(path), random.Random(5), 0, []
    size = path.stat().st_size
    for page in range(0, size, 4096):
        places = rng.sample(range(page, page + 4096), 3) + ([*range(page, page + 100, 7)] if page == 0 else [])
        where += [place for place in places if place < size]
    (tmp_path / "copy").mkdir(mode=0o700)
    for place in where:
        copy = copied(path, tmp_path / "copy", *([".lock"] if marked else []))
        spoilt = bytearray(copy.read_bytes())
        spoilt[place] ^= 1 << rng.randrange(8)
        copy.write_bytes(spoilt)
        noticed += damaged_or_whole(copy, made)
        for entry in copy.parent.iterdir():
            entry.unlink()
    assert noticed >= 10


@pytest.mark.parametrize(
    "column", ["kind", "name", "event", "shares", "server_round", "relation", "method", "digest", "terms", "owner"]
)
def test_a_value_that_has_changed_is_noticed(path, column):
    filled(path)
    tables = {"kind": "releases", "relation": "releases", "name": "owners", "event": "terms", "method": "runs"}
    table = tables.get(column, "charged" if column in ("terms", "owner") else "charges")
    values = {"terms": "3 - terms", "owner": "owner + 1", "shares": "shares + 1", "server_round": "server_round + 1"}
    values |= {"event": "replace(event, '2.0', '4.0')", "relation": "'replace-one'", "digest": "zeroblob(32)"}
    db = sqlite3.connect(path)
    db.execute(f"DROP TRIGGER {table}_update")
    db.execute(f"UPDATE {table} SET {column} = {values.get(column, f'{column} || 1')} WHERE rowid = 1")  # noqa: S608
    db.executescript("; ".join(one for one in server_ledger_format._schema(1) if f"{table}_update" in one))
    db.commit()
    db.close()
    refused(path, r"is damaged: charge [12] has changed|is damaged \(KeyError: 2\)")


@pytest.mark.parametrize(
    "what", ["DELETE FROM charges WHERE id = 24", "DELETE FROM charges WHERE id = 5", "DELETE FROM charged WHERE rowid = 4"]
)
def test_a_charge_that_was_removed_is_noticed(path, what):
    filled(path)
    db = sqlite3.connect(path)
    for table in ("charges", "charged"):
        db.execute(f"DROP TRIGGER {table}_delete")
    db.execute(what)
    for table in ("charges", "charged"):
        db.executescript("; ".join(one for one in server_ledger_format._schema(1) if f"{table}_delete" in one))
    db.commit()
    db.close()
    refused(path, "is damaged: charge")


def test_a_ledger_without_its_triggers_is_refused(path):
    db = sqlite3.connect(path)
    db.execute("DROP TRIGGER charges_delete")
    db.commit()
    db.close()
    refused(path, "is damaged: its tables are not those of a ledger")


@pytest.mark.slow
def test_a_ledger_that_was_cut_off_is_refused(path, tmp_path):
    made = filled(path)
    (tmp_path / "copy").mkdir(mode=0o700)
    size = path.stat().st_size
    for length in [*range(0, size, 4096), *range(1, size, 4999), size - 1]:
        copy = copied(path, tmp_path / "copy", ".lock")
        os.truncate(copy, length)
        assert damaged_or_whole(copy, made), length
        for entry in copy.parent.iterdir():
            entry.unlink()


def charge_and_die(path, count):
    """Charge, and end as by kill -9: the charges are in the -wal file."""
    ledger = ServerLedger(path)
    run = ledger.begin_run(method="m", delta=DELTA)
    for number in range(1, count + 1):
        ledger.charge(run, charge(number), number)


def test_a_ledger_that_has_lost_its_wal_file_is_refused(path):
    filled(path, 3)
    assert in_child(charge_and_die, path, 5) == 0
    assert path.with_name(path.name + "-wal").stat().st_size
    whole = {suffix: path.with_name(path.name + suffix).read_bytes() for suffix in ("", "-wal")}
    path.with_name(path.name + "-wal").unlink()
    refused(path, "has 6 charges of 11: it is an older copy, or its -wal file is gone")
    path.with_name(path.name + "-wal").write_bytes(whole["-wal"][:5000])
    refused(path, "is an older copy, or its -wal file is gone|is damaged")
    path.write_bytes(whole[""])
    path.with_name(path.name + "-wal").write_bytes(whole["-wal"])
    assert [len(charges) for charges in content(path).values()] == [3, 3, 5]


@pytest.mark.slow
def test_a_wal_file_that_was_damaged_is_refused_or_complete(path, tmp_path):
    filled(path, 2)
    assert in_child(charge_and_die, path, 6) == 0
    (tmp_path / "copy").mkdir(mode=0o700)
    made, rng, noticed = content(copied(path, tmp_path / "copy", "-wal", ".lock")), random.Random(6), 0
    for entry in (tmp_path / "copy").iterdir():
        entry.unlink()
    size = path.with_name(path.name + "-wal").stat().st_size
    for _ in range(40):
        copy = copied(path, tmp_path / "copy", "-wal", ".lock")
        wal = copy.with_name(copy.name + "-wal")
        spoilt = bytearray(wal.read_bytes())
        spoilt[rng.randrange(size)] ^= 1 << rng.randrange(8)
        wal.write_bytes(spoilt)
        noticed += damaged_or_whole(copy, made)
        for entry in copy.parent.iterdir():
            entry.unlink()
    assert noticed > 20


def test_an_older_copy_is_noticed_by_the_lock_file_and_by_what_a_run_knows(path, tmp_path):
    made = filled(path, 2)
    old = copied(path, Path(tempfile.mkdtemp(dir=tmp_path)))
    with ServerLedger(path) as ledger:
        ledger.charge(next(iter(made)), charge(3), 3)
    shutil.copy2(old, path)
    refused(path, "has 4 charges of 5: it is an older copy")
    # Without the lock file nothing in the folder knows of more.
    path.with_name(path.name + ".lock").unlink()
    assert content(path) == made


def test_another_copy_that_has_gone_on_by_itself_is_noticed(path, tmp_path):
    made = filled(path, 2)
    other = copied(path, Path(tempfile.mkdtemp(dir=tmp_path)), ".lock")
    for one, shares in ((path, 1), (other, 2)):
        with ServerLedger(one) as ledger:
            ledger.charge(next(iter(made)), charge(3, shares=shares), 3)
    shutil.copy2(other, path)
    refused(path, "is not the one of its .lock file, which remembers the last charge: it is another copy")


def test_a_damaged_lock_file_is_no_missing_one(path):
    made = filled(path, 2)
    lock = path.with_name(path.name + ".lock")
    whole = lock.read_bytes()
    for spoilt in (whole[:-1], b"x" + whole[1:], whole + b"0", whole.upper()):
        lock.write_bytes(spoilt)
        refused(path, r"its \.lock file is damaged; remove that if you know that the ledger is no older copy")
    lock.write_bytes(whole)
    assert content(path) == made


def test_a_ledger_that_is_replaced_or_removed_under_a_run_takes_no_more_charges(path, tmp_path):
    made = filled(path, 2)
    run = next(iter(made))
    old = copied(path, Path(tempfile.mkdtemp(dir=tmp_path)))
    with ServerLedger(path) as ledger:
        os.replace(old, path)
        with pytest.raises(LedgerError, match="was moved, replaced or removed while this process was writing to it"):
            ledger.charge(run, charge(3), 3)
    shutil.rmtree(path.parent / old.parent.name)


# A full disk, a folder that can't be written


def fill_up(path, made, acknowledged):
    """Charge until the files may not grow any more: SQLite sees what it sees on a full disk, a write that fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ledger = ServerLedger(path)
    run = next(iter(made))
    most = path.with_name(path.name + "-wal").stat().st_size + 60_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    for number in range(len(made[run]) + 1, 200):
        ledger.charge(run, charge(number), number)
        acknowledged.value = number


def test_on_a_full_disk_a_charge_fails_and_what_was_acknowledged_stays(path):
    made, acknowledged = filled(path, 2), FORK.Value("i", 0)
    run = next(iter(made))
    assert in_child(fill_up, path, made, acknowledged) == 3
    assert 2 < acknowledged.value < 199
    assert len(content(path)[run]) - acknowledged.value in (0, 1)
    with ServerLedger(path) as ledger:
        ledger.charge(run, charge(len(ledger.charges(run)) + 1), 1)


def as_nobody(function, *arguments):
    if os.geteuid() == 0:
        os.setuid(65534)
    function(*arguments)


def test_in_a_folder_that_cannot_be_written_a_ledger_is_read_alone():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        made = filled(path, 2)
        if os.geteuid() == 0:
            for entry in (path.parent, *path.parent.iterdir()):
                os.chown(entry, 65534, 65534)
        path.parent.chmod(0o500)

        def reads():
            assert content(path) == made

        assert in_child(as_nobody, reads) == 0
        assert in_child(as_nobody, ServerLedger, path) == 3
        assert in_child(as_nobody, ServerLedger.create, path.with_name("new")) == 3
        path.parent.chmod(0o700)


# Kill -9


def charge_until_killed(path, out):
    ledger = ServerLedger(path)
    run = ledger.begin_run(method="m", delta=DELTA)
    for number in range(1, 100_000):
        ledger.charge(run, local(number, tuple(f"c{(number * 3 + place) % 50}" for place in range(20))), number)
        os.write(out, b".")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_process_that_is_killed_leaves_all_that_it_has_acknowledged(path, seed):
    rng = random.Random(seed)
    inlet, outlet = os.pipe()
    child = FORK.Process(target=charge_until_killed, args=(path, outlet))
    child.start()
    os.close(outlet)
    acknowledged = sum(len(os.read(inlet, 1)) for _ in range(rng.randrange(30)))
    child.join(rng.random() * 0.01)
    child.kill()
    child.join()
    while found := os.read(inlet, 65536):
        acknowledged += len(found)
    os.close(inlet)
    charges = [len(one) for one in content(path).values()] or [0]
    assert charges[0] - acknowledged in (0, 1)
    with ServerLedger(path) as ledger:
        ledger.begin_run(method="m", delta=DELTA)


def test_the_text_of_a_ledger_is_for_people_too(path):
    made = filled(path, 1)
    db = sqlite3.connect(path)
    rows = db.execute(
        "SELECT runs.method, releases.name, charges.server_round, owners.name, terms.event FROM charged "
        "JOIN charges ON charges.id = charge JOIN releases ON releases.id = release JOIN runs ON runs.id = run "
        "JOIN owners ON owners.id = owner JOIN terms ON terms.id = terms"
    ).fetchall()
    db.close()
    assert rows[0][:4] == ("DP-FedAvg", "dp-fedavg", 1, EVERY_CLIENT)
    assert json.loads(rows[0][4]) == {"kind": "GaussianDpEvent", "noise_multiplier": 2.0}
    assert len(rows) == sum(len(one.owners) for charges in made.values() for _, one in charges)


@pytest.mark.parametrize("owner", ["a", EVERY_CLIENT])
def test_a_budget_counts_down_to_its_end(tmp_path, owner):
    tmp_path.chmod(0o700)
    path, most = tmp_path / "ledger.sqlite", affordable(12.0)
    assert most > 8  # more than are accounted at once
    ServerLedger.create(path, JointBudget(epsilon=12.0, delta=DELTA))
    with ServerLedger(path) as ledger:
        run = ledger.begin_run(method="m", delta=DELTA)
        for number in range(1, most + 1):
            ledger.charge(run, charge(number, (owner,)), number)
        with pytest.raises(BudgetSpentError):
            ledger.charge(run, charge(most + 1, (owner,)), 1)
        if owner == EVERY_CLIENT:
            with pytest.raises(BudgetSpentError):
                ledger.charge(run, charge(most + 1, ("b",)), 1)
        else:
            ledger.charge(run, charge(most + 1, ("b",)), 1)
