"""Device ledgers: what was paid stays paid, whatever happens to processes; and whatever is wrong with a file is an error."""

import json
import multiprocessing
import os
import shutil
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from flower_dp.core import dp_events
from flower_dp.core.sampling import FixedSizeSampling
from flower_dp.privacy import device_store, ledger_tables, store
from flower_dp.privacy.device_store import ClientAccount, DeviceLedger, ReplyNumber
from flower_dp.privacy.mechanisms import Gaussian, Laplace
from flower_dp.privacy.private_file import LedgerError
from tests.charges import device_terms

FORK = multiprocessing.get_context("fork")


def terms(num_replies=3, mechanism=None, *, noise=4.0, relation="add-or-remove-one", **words):
    return device_terms(num_replies, mechanism or Laplace(noise_multiplier=noise), relation=relation, **words)


@pytest.fixture
def path(tmp_path):
    return DeviceLedger.create(tmp_path / "ledger.sqlite", ["a", "b"]).path


def replies(path, name="a"):
    return DeviceLedger(path).read()[name].replies


def pay(path, asked, **named):
    """Charge one reply each, which the server numbers as the ledger does; an own number for each reply of a killed process."""
    pay.number += 1
    return DeviceLedger(path).charge(
        asked, {name: ReplyNumber(run=f"process {os.getpid()}", number=pay.number) for name in asked}, **named
    )


pay.number = 0


def test_what_was_paid_stays_paid_for_every_object_that_is_made_anew(path):
    assert [pay(path, {"a": terms()}) for _ in range(3)] == [({}, {"a": count}) for count in (1, 2, 3)]
    refused, counts = pay(path, {"a": terms(), "b": terms()})
    assert {name: reason.public for name, reason in refused.items()} == {
        "a": "its budget is spent: num_replies=3, all of them sent"
    }
    assert counts == {"b": 1}
    assert (replies(path, "a"), replies(path, "b")) == (3, 1)


def test_an_account_keeps_its_terms(path):
    pay(path, {"a": terms(3)})
    for other in (terms(100), terms(noise=0.1), terms(mechanism=Gaussian(noise_multiplier=4.0))):
        refused, _ = pay(path, {"a": other})
        assert refused["a"].public == "its account was opened on other terms"
        assert refused["a"].own.startswith("its account was opened on other terms (3 replies, Laplace")
    assert replies(path) == 1
    # Of a damaged account, in a node's state: this client alone is refused.
    assert terms().refusal_reason(1, terms().text + "?").public == "its account was opened on other terms"


SAMPLED = {"mechanism": Gaussian(noise_multiplier=1.1), "sampler": FixedSizeSampling(cohort_size=10), "relation": "replace-one"}
STEPS = {"mechanism": Gaussian(noise_multiplier=2.0), "num_releases": 4}


@pytest.mark.parametrize(
    ("keywords", "event"),
    [
        ({}, dp_events.LaplaceDpEvent(4.0)),
        (SAMPLED, dp_events.SampledWithoutReplacementDpEvent(100, 10, dp_events.GaussianDpEvent(1.1))),
        (STEPS, dp_events.SelfComposedDpEvent(dp_events.GaussianDpEvent(2.0), 4)),  # a reply of several noised steps: all of them
    ],
)
def test_the_file_says_what_was_spent(path, keywords, event):
    for count in (1, 2):
        assert pay(path, {"a": terms(**keywords)}) == ({}, {"a": count})
    entry = DeviceLedger(path).read()["a"]
    assert (entry.counts, entry.spent.num_charges) == ({event: 2}, 2)
    assert entry.relation == keywords.get("relation", "add-or-remove-one")
    assert (entry.num_replies, entry.terms) == (3, terms(**keywords).text)
    assert DeviceLedger(path).read()["b"].counts == {}


def changed(path, change):
    """Change what the last charge says, and its digest with it, as anyone can."""
    db = sqlite3.connect(path)
    key, run, about, digest = db.execute("SELECT id, run, about, digest FROM charges ORDER BY id DESC LIMIT 1").fetchone()
    said = json.dumps(json.loads(about) | change)
    (before,) = db.execute("SELECT digest FROM charges WHERE id = ?", (key - 1,)).fetchone()
    with store.Store(path, read_only=True) as ledger:
        of = list(ledger.runs.values())[run - 1]
        charge = ledger.each[-1][1]
    own = ledger_tables.digest_of(before, of, said, charge.owners, bytes(4), [ledger_tables.text_of(charge.events[0])])
    assert own != digest
    db.execute("DROP TRIGGER charges_update")
    db.execute("UPDATE charges SET about = ?, digest = ? WHERE id = ?", (said, own, key))
    db.execute(next(one for one in ledger_tables.SCHEMA if "TRIGGER charges_update" in one))
    db.commit()
    db.close()
    path.with_name(path.name + ".mark").unlink()


FAULTS = {
    "missing": (Path.unlink, "does not exist"),
    "empty": (lambda path: path.write_bytes(b""), "is not a ledger"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "malformed|is damaged"),
    "another digit": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"3 replies", b"4 replies")),
        "is damaged: charge 1",
    ),
    "a reply twice": (lambda path: changed(path, {"number": 1}), "reply 2 of training is missing"),
    "other terms": (lambda path: changed(path, {"fingerprint": "9 replies"}), "reply 2 of training has other terms"),
    "an older copy": (lambda path: shutil.copy(path.with_name("old"), path), "is an older copy"),
    "a server's": (lambda path: (path.unlink(), store.Store.create(path)), "is a server's ledger, not a device's"),
    "foreign": (
        lambda path: (path.unlink(), DeviceLedger.create(path, ["b"])),
        "has no account of client 'a'; it is the ledger of b",
    ),
    "for all to write": (lambda path: path.chmod(0o622), "is open to others .mode 622"),
    "for all to read": (lambda path: path.chmod(0o604), "is open to others .mode 604"),
    "in a folder for all to write": (lambda path: path.parent.chmod(0o777), "its folder: others can write to it .mode 777"),
    "two links": (lambda path: os.link(path, path.with_name("second")), "has 2 hard links"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_does_not_look_right_pays_nothing(path, fault):
    pay(path, {"a": terms()})
    shutil.copy2(path, path.with_name("old"))
    pay(path, {"a": terms()})
    break_it, why = FAULTS[fault]
    break_it(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(LedgerError, match=why):
        pay(path, {"a": terms(), "b": terms()})
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_folder_for_all_to_write_is_refused_but_for_a_sticky_one(tmp_path):
    tmp_path.chmod(0o775)
    with pytest.raises(LedgerError, match="its folder: others can write"):
        DeviceLedger.create(tmp_path / "ledger.sqlite", ["a"])
    tmp_path.chmod(0o1777)
    assert pay(DeviceLedger.create(tmp_path / "ledger.sqlite", ["a"]).path, {"a": terms()})[1] == {"a": 1}


def test_a_file_of_another_user_pays_nothing(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(LedgerError, match=f"belongs to user {os.getuid()}; this process is user {os.getuid() + 1}"):
        pay(path, {"a": terms()})
    assert replies(path) == 0


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (4, os.geteuid() + 1, f"its folder: belongs to user {os.geteuid() + 1}"),
        (2, -1, "is mounted without its folder"),  # what SQLite must write beside it would be lost with the container
    ],
)
def test_a_folder_of_another_user_or_disk_pays_nothing(path, monkeypatch, field, value, why):
    """Its owner can rename an older copy over the file, sticky bit or not."""
    stat_of = Path.stat

    def stat(self, **keywords):
        values = list(stat_of(self, **keywords))
        values[field] = value if self == path.parent else values[field]
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(LedgerError, match=why):
        pay(path, {"a": terms()})
    monkeypatch.undo()
    assert replies(path) == 0


def test_a_locked_file_pays_nothing(path, monkeypatch):
    monkeypatch.setattr(device_store, "_LOCK_SECONDS", 0.05)
    with store.Store(path), pytest.raises(LedgerError, match="is in use: another process writes to it"):
        pay(path, {"a": terms()})
    assert pay(path, {"a": terms()}) == ({}, {"a": 1})


def test_a_reply_waits_for_another_process(path, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.0)
    held = store.Store(path)
    timer = threading.Timer(0.3, held.close)
    timer.start()
    assert pay(path, {"a": terms()}) == ({}, {"a": 1})
    timer.join()


def _charge_many(path, times, results):
    try:
        results.put(sum(not pay(path, {"a": terms(60)})[0] for _ in range(times)))
    except Exception:  # of whatever kind: the test must not wait for it
        results.put(-1000)


def test_two_processes_at_once_never_pay_with_one_reply_twice(path):
    """Three times 30 replies are asked for, 60 can be paid: each is paid once."""
    results = FORK.Queue()
    children = [FORK.Process(target=_charge_many, args=(path, 30, results)) for _ in range(3)]
    for child in children:
        child.start()
    try:
        assert sum(results.get(timeout=90) for _ in children) == 60
    finally:
        for child in children:
            child.kill()
    assert replies(path) == 60


def test_a_copy_put_back_is_noticed_by_who_remembers_and_by_nobody_else(path, tmp_path):
    pay(path, {"a": terms()})
    shutil.copy(path, tmp_path / "copy")
    pay(path, {"a": terms()})
    shutil.copy(tmp_path / "copy", path)
    with pytest.raises(LedgerError, match="holds 1 of 2 charges: it is an older copy"):
        pay(path, {"a": terms()})
    path.with_name(path.name + ".mark").unlink()
    with pytest.raises(LedgerError, match="counts 1 replies of client 'a': it is an older copy, for there were 2"):
        pay(path, {"a": terms()}, at_least={"a": 2})
    # What the docs say: a file alone can't tell.
    assert pay(path, {"a": terms()})[1] == {"a": 2}


def test_a_ledger_is_created_once_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "ledger.sqlite"
    assert DeviceLedger.create(path, ["a"]).read() == {"a": ClientAccount()}
    assert path.stat().st_mode & 0o777 == 0o600
    pay(path, {"a": terms()})
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(LedgerError, match="exists already"):
        DeviceLedger.create(path, ["a"])
    assert replies(path) == 1
    for names in ([], [""], [" "], ["a", "a"]):
        with pytest.raises(ValueError, match="must be names of clients"):
            DeviceLedger.create(tmp_path / "other.sqlite", names)
    with pytest.raises(ValueError, match="names='b, evaluation': must not end with ', evaluation'"):
        DeviceLedger.create(tmp_path / "other.sqlite", ["a", "b, evaluation"])
    assert not (tmp_path / "other.sqlite").exists()


# What others on the machine can do


def test_a_link_where_the_new_file_is_to_be_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_tables.uuid, "uuid4", lambda: SimpleNamespace(hex="0" * 32))
    target, path = tmp_path / "target", tmp_path / "ledger.sqlite"
    target.write_text("the owner's")
    path.with_name(f"{path.name}.{'0' * 32}.new").symlink_to(target)
    with pytest.raises(LedgerError, match="File exists"):
        DeviceLedger.create(path, ["a"])
    assert target.read_text() == "the owner's"
    assert not path.exists()


# Terms that another library computes


@pytest.mark.parametrize("factor", [1 - 1e-10, 1 + 1e-10, 1 + 9e-4, 1 - 1e-8, 1 + 1e-2, 2.0])
def test_an_account_goes_on_with_the_noise_of_its_opening_and_charges_every_reply_its_own(path, factor):
    """The last digits of a calibration may change with a library; a smaller budget is another one, which old replies exceed."""
    goes_on = 1 - 1e-9 < factor < 1 + 1e-3
    pay(path, {"a": terms()})
    opened = DeviceLedger(path).read()["a"].terms
    refused, _ = pay(path, {"a": terms(noise=4.0 * factor)})
    assert bool(refused) != goes_on
    if refused:
        assert opened in refused["a"].own
        assert str(4.0 * factor) in refused["a"].own
    entry = DeviceLedger(path).read()["a"]
    assert (entry.replies, entry.terms) == (1 + goes_on, opened)
    assert entry.counts == {dp_events.LaplaceDpEvent(4.0): 1} | ({dp_events.LaplaceDpEvent(4.0 * factor): 1} if goes_on else {})


def test_many_small_differences_never_add_up(path):
    """Each is compared with the terms of the opening, not with the last."""
    results = [bool(pay(path, {"a": terms(50, noise=4.0 * (1 - step * 4e-10))})[0]) for step in range(9)]
    assert results == [False] * 3 + [True] * 6


# The server's own count


def charged(path, run, number, name="a", num_replies=20):
    """Charge one reply; return why it is refused, if it is."""
    refused, _ = DeviceLedger(path).charge({name: terms(num_replies)}, {name: ReplyNumber(run=run, number=number)})
    return refused[name] if refused else None


def test_a_number_that_is_not_larger_is_refused_and_not_charged(path):
    assert [charged(path, "r", number) for number in (1, 2, 5)] == [None] * 3  # 3 and 4 never arrived
    for number in (5, 4, 1):
        assert charged(path, "r", number).public == (
            f"reply {number} of run r was charged before; the server's ledger is an older copy, or the message came twice"
        )
    assert DeviceLedger(path).read()["a"].runs == {"r": 5}
    assert replies(path) == 3
    assert charged(path, "r", 6) is None
    assert replies(path) == 4


def test_runs_and_clients_are_counted_apart(path):
    for number in (1, 2):
        assert [charged(path, run, number, name) for run in ("r", "s") for name in ("a", "b")] == [None] * 4
    assert charged(path, "r", 2) is not None
    assert {name: entry.runs for name, entry in DeviceLedger(path).read().items()} == {name: {"r": 2, "s": 2} for name in "ab"}


def test_who_is_refused_for_its_budget_keeps_no_number_and_is_told_of_a_repeated_one(path):
    refused = [charged(path, "r", number, num_replies=1) for number in (1, 2, 1)]
    assert "its budget is spent" in refused[1].public
    assert refused[2].repeated
    assert DeviceLedger(path).read()["a"].runs == {"r": 1}


def test_a_refused_number_beside_a_charge_is_not_charged(path):
    charged(path, "r", 1)
    numbered = {name: ReplyNumber(run="r", number=1) for name in "ab"}
    refused, counts = DeviceLedger(path).charge({name: terms(20) for name in "ab"}, numbered)
    assert (set(refused), counts) == ({"a"}, {"b": 1})
    assert (replies(path, "a"), replies(path, "b")) == (1, 1)


@pytest.mark.parametrize("number", [0, -1, 2, "3", None])
def test_a_number_that_the_server_cannot_have_told_is_damage(path, number):
    for one in (1, 2, 3):
        charged(path, "r", one)
    changed(path, {"round": number})
    with pytest.raises(LedgerError, match="is damaged"):
        charged(path, "r", 9)


def test_clients_that_are_charged_alike_share_one_row(path):
    """And those that are not have their own; nobody is charged in the place of another."""
    with pytest.raises(KeyError):
        DeviceLedger(path).charge({"a": terms()}, {})
    for number, names in enumerate((("a", "b"), ("a", "b"), ("b",), ("a", "b")), start=1):
        numbered = {name: ReplyNumber(run="r", number=number) for name in names}
        DeviceLedger(path).charge({name: terms(9) for name in names}, numbered)
    with store.Store(path, read_only=True) as ledger:
        rows = [(charge.number, "".join(charge.owners)) for _, charge in ledger.each]
    assert rows == [(1, "ab"), (2, "ab"), (3, "b"), (3, "a"), (4, "b")]
    assert {name: entry.replies for name, entry in DeviceLedger(path).read().items()} == {"a": 3, "b": 4}
