"""Ledger files: what was paid stays paid, whatever happens to processes; and whatever is wrong with a file is an error."""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    LaplaceDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)

from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling
from flower_dp.privacy import ledger_file
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.ledger_file import Entry, LedgerError, LedgerFile, Numbered
from flower_dp.privacy.mechanisms import Gaussian, Laplace
from flower_dp.privacy.release import Release

FORK = multiprocessing.get_context("fork")


def terms(num_replies=3, mechanism=None, sampler=None, relation="add-or-remove-one"):
    release = Release(
        what="a reply",
        seen_by="the server",
        unit="record",
        relation=relation,
        clip_norm=1.0,
        mechanism=mechanism or Laplace(noise_multiplier=4.0),
        sampler=sampler or FullSampling(),
        num_clients=100,
    )
    return Terms(release=release, num_replies=num_replies)


@pytest.fixture
def path(tmp_path):
    LedgerFile.create(tmp_path / "ledger.json", ["a", "b"])
    return tmp_path / "ledger.json"


def replies(path, name="a"):
    return LedgerFile(path).read()[name].replies


def test_what_was_paid_stays_paid_for_every_object_that_is_made_anew(path):
    assert [LedgerFile(path).charge({"a": terms()}) for _ in range(3)] == [({}, {"a": count}) for count in (1, 2, 3)]
    refused, counts = LedgerFile(path).charge({"a": terms(), "b": terms()})
    assert {name: reason.public for name, reason in refused.items()} == {
        "a": "its budget is spent: num_replies=3, all of them sent"
    }
    assert counts == {"b": 1}
    assert (replies(path, "a"), replies(path, "b")) == (3, 1)


def test_an_account_keeps_its_terms(path):
    LedgerFile(path).charge({"a": terms(3)})
    for other in (terms(100), terms(3, Laplace(noise_multiplier=0.1)), terms(3, Gaussian(noise_multiplier=4.0))):
        refused, _ = LedgerFile(path).charge({"a": other})
        assert refused["a"].public == "its account was opened on other terms"
        assert refused["a"].own.startswith("its account was opened on other terms (3 replies, Laplace")
    assert replies(path) == 1


@pytest.mark.parametrize(
    ("keywords", "event"),
    [
        ({}, LaplaceDpEvent(4.0)),
        ({"mechanism": Gaussian(noise_multiplier=1.1)}, GaussianDpEvent(1.1)),
        (
            {"mechanism": Gaussian(noise_multiplier=1.1), "sampler": PoissonSampling(sampling_rate=0.25)},
            PoissonSampledDpEvent(0.25, GaussianDpEvent(1.1)),
        ),
        (
            {
                "mechanism": Gaussian(noise_multiplier=1.1),
                "sampler": FixedSizeSampling(cohort_size=10),
                "relation": "replace-one",
            },
            SampledWithoutReplacementDpEvent(100, 10, GaussianDpEvent(1.1)),
        ),
    ],
)
def test_the_file_says_what_was_spent(path, keywords, event):
    for _ in range(2):
        LedgerFile(path).charge({"a": terms(**keywords)})
    entry = LedgerFile(path).read()["a"]
    assert entry.spent == SelfComposedDpEvent(event, 2)
    assert entry.relation == keywords.get("relation", "add-or-remove-one")
    assert (entry.num_replies, entry.terms) == (3, terms(**keywords).text)
    assert LedgerFile(path).read()["b"].spent == NoOpDpEvent()


def tamper(path, change):
    """Change a file, and its checksum with it, as anyone can."""
    data = json.loads(path.read_text())
    change(data)
    answer = json.dumps(data["clients"], sort_keys=True, separators=(",", ":"))
    data["sha256"] = hashlib.sha256(answer.encode()).hexdigest()
    path.write_text(json.dumps(data))


def set_entry(**keywords):
    return lambda data: data["clients"]["a"].update(keywords)


FAULTS = {
    "missing": (Path.unlink, "does not exist"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "is damaged"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is damaged"),
    "no object": (lambda path: path.write_text("[1]"), "is damaged"),
    "another format": (lambda path: tamper(path, lambda data: data.update({"flower-dp-ledger": 3})), "format 3: must be 2"),
    "format true": (lambda path: tamper(path, lambda data: data.update({"flower-dp-ledger": True})), "format True: must be 2"),
    "another digit": (lambda path: path.write_text(path.read_text().replace('"replies": 2', '"replies": 1', 1)), "its checksum"),
    "a checksum, and a format without": (
        lambda path: path.write_text(path.read_text().replace('"flower-dp-ledger": 2', '"flower-dp-ledger": 1')),
        "are not those of format 1",
    ),
    "no checksum": (lambda path: path.write_text(path.read_text().replace('"sha256"', '"sha"')), "are not those of format 2"),
    "no clients": (lambda path: tamper(path, lambda data: data.update(clients={})), "at least one"),
    "negative": (lambda path: tamper(path, set_entry(replies=-1)), "replies"),
    "a float": (lambda path: tamper(path, set_entry(replies=0.5)), "replies"),
    "true": (lambda path: tamper(path, set_entry(replies=True)), "replies"),
    "terms taken away": (lambda path: tamper(path, set_entry(terms=None)), "without terms"),
    "an unknown event": (lambda path: tamper(path, set_entry(event={"kind": "ZCDpEvent", "rho": 1.0})), "is damaged"),
    "foreign": (
        lambda path: tamper(path, lambda data: data["clients"].pop("a")),
        "has no account of client 'a'; it is the ledger of b",
    ),
    "for all to write": (lambda path: path.chmod(0o622), "is open to others .mode 622"),
    "for all to read": (lambda path: path.chmod(0o604), "is open to others .mode 604"),
    "for the group to read": (lambda path: path.chmod(0o640), "is open to others .mode 640"),
    "in a folder for all to write": (lambda path: path.parent.chmod(0o777), "in a folder that others can write to .mode 777"),
    "two links": (lambda path: os.link(path, path.with_name("second")), "has 2 hard links"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "ledger .*: "),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "is no regular file"),
    "a link to nowhere": (lambda path: (path.unlink(), path.symlink_to("nowhere")), "does not exist"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_does_not_look_right_pays_nothing(path, fault):
    LedgerFile(path).charge({"a": terms()})
    LedgerFile(path).charge({"a": terms()})
    break_it, why = FAULTS[fault]
    break_it(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(LedgerError, match=why):
        LedgerFile(path).charge({"a": terms(), "b": terms()})
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_folder_for_all_to_write_is_refused_but_for_a_sticky_one(tmp_path):
    tmp_path.chmod(0o775)
    with pytest.raises(LedgerError, match="in a folder that others can write"):
        LedgerFile.create(tmp_path / "ledger.json", ["a"])
    tmp_path.chmod(0o1777)
    assert LedgerFile.create(tmp_path / "ledger.json", ["a"]).charge({"a": terms()})[1] == {"a": 1}


def test_a_file_of_another_user_pays_nothing(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(LedgerError, match=f"belongs to user {os.getuid()}; this process is user {os.getuid() + 1}"):
        LedgerFile(path).charge({"a": terms()})
    assert replies(path) == 0


def test_a_locked_file_pays_nothing(path, monkeypatch):
    monkeypatch.setattr(ledger_file, "_LOCK_SECONDS", 0.05)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match=r"is locked by another process for 0\.05 s"):
            LedgerFile(path).charge({"a": terms()})
    assert LedgerFile(path).charge({"a": terms()}) == ({}, {"a": 1})


def _charge_many(path, times, results):
    try:
        results.put(sum(not LedgerFile(path).charge({"a": terms(60)})[0] for _ in range(times)))
    except LedgerError:
        results.put(-1000)


def test_two_processes_at_once_never_pay_with_one_reply_twice(path):
    """Three times 30 replies are asked for, 60 can be paid: each is paid once."""
    results = FORK.SimpleQueue()
    children = [FORK.Process(target=_charge_many, args=(path, 30, results)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert sum(results.get() for _ in children) == 60
    assert replies(path) == 60


def test_who_gets_the_lock_of_a_file_that_has_just_been_replaced_reads_the_new_one(path, monkeypatch):
    flock, late = fcntl.flock, []

    def lock(*arguments):
        if not late:
            late.append(True)
            LedgerFile(path).charge({"a": terms()})  # another process, between our open and our lock
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", lock)
    assert LedgerFile(path).charge({"a": terms()})[1] == {"a": 2}


def test_who_has_opened_a_file_that_is_replaced_then_reads_the_new_one(path, monkeypatch):
    """The file that it holds has no link any more, which is no fault of the ledger."""
    opened, late = ledger_file.open_regular, []

    def open_late(*arguments):
        descriptor = opened(*arguments)
        if not late:
            late.append(True)
            LedgerFile(path).charge({"a": terms()})
        return descriptor

    monkeypatch.setattr(ledger_file, "open_regular", open_late)
    assert LedgerFile(path).charge({"a": terms()})[1] == {"a": 2}


def _crash_in(path, owner, function):
    setattr(owner, function, lambda *arguments: os._exit(7))
    LedgerFile(path).charge({"a": terms()})


@pytest.mark.parametrize(
    ("owner", "function", "count"),
    [(ledger_file, "sync", 1), (os, "replace", 1), (ledger_file, "sync_folder", 2)],
    ids=["half written", "between write and rename", "after the rename"],
)
def test_a_crash_leaves_a_whole_file_that_counts_all_that_may_have_left(path, owner, function, count):
    LedgerFile(path).charge({"a": terms()})
    child = FORK.Process(target=_crash_in, args=(path, owner, function))
    child.start()
    child.join(60)
    assert child.exitcode == 7
    assert replies(path) == count
    assert LedgerFile(path).charge({"a": terms()})[1] == {"a": count + 1}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_charge_is_on_the_disk_when_it_returns(path, monkeypatch):
    """File, rename, folder, in this order: what was lost in a power failure could be spent again."""
    done = []
    fsync, replace = os.fsync, os.replace

    def sync(descriptor):
        done.append("folder" if os.path.isdir(f"/dev/fd/{descriptor}") else f"file of {os.fstat(descriptor).st_size > 100}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), replace(*names)))
    LedgerFile(path).charge({"a": terms()})
    assert done == ["file of True", "rename", "folder"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_full_disk_or_a_file_that_is_mounted_by_itself_pays_nothing(path, monkeypatch, function):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(LedgerError, match="No space left on device"):
        LedgerFile(path).charge({"a": terms()})
    monkeypatch.undo()
    assert replies(path) == 0
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_link_and_its_target_are_one_ledger(path, tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(path)
    for count, way in enumerate((link, path, link), 1):
        assert LedgerFile(way).charge({"a": terms()})[1] == {"a": count}
    assert link.is_symlink()


def test_a_copy_put_back_is_noticed_by_who_remembers_and_by_nobody_else(path, tmp_path):
    LedgerFile(path).charge({"a": terms()})
    shutil.copy(path, tmp_path / "copy")
    LedgerFile(path).charge({"a": terms()})
    shutil.copy(tmp_path / "copy", path)
    with pytest.raises(LedgerError, match="counts 1 replies of client 'a': it is an older copy, for there were 2"):
        LedgerFile(path).charge({"a": terms()}, at_least={"a": 2})
    # What the docs say: a file alone can't tell.
    assert LedgerFile(path).charge({"a": terms()})[1] == {"a": 2}


def test_a_ledger_is_created_once_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "ledger.json"
    assert LedgerFile.create(path, ["a"]).read() == {"a": Entry()}
    assert path.stat().st_mode & 0o777 == 0o600
    LedgerFile(path).charge({"a": terms()})
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(LedgerError, match="File exists"):
        LedgerFile.create(path, ["a"])
    assert replies(path) == 1
    for names in ([], [""], [" "], ["a", "a"]):
        with pytest.raises(ValueError, match="must be names of clients"):
            LedgerFile.create(tmp_path / "other.json", names)
    with pytest.raises(LedgerError, match="its folder does not exist"):
        LedgerFile.create(tmp_path / "no" / "ledger.json", ["a"])


# What others on the machine can do


def test_a_pipe_where_the_new_file_was_to_be_does_not_hold_up_a_reply(path):
    """In a folder with the sticky bit anyone could have put it there; to open a pipe for writing waits for a reader."""
    path.parent.chmod(0o1777)
    os.mkfifo(path.with_name(path.name + ".new"))
    # A process of its own: a reply that hangs must not hang the tests.
    child = FORK.Process(target=LedgerFile(path).charge, args=({"a": terms()},))
    child.start()
    child.join(30)
    hung = child.is_alive()
    child.kill()
    assert not hung
    assert replies(path) == 1


def test_a_new_file_has_a_name_that_nobody_can_take_first(path, monkeypatch):
    names, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (names.append(Path(old).name), replace(old, new)))
    for _ in range(2):
        LedgerFile(path).charge({"a": terms()})
    assert len(set(names)) == 2
    assert all(len(name) == len(path.name) + 1 + 32 + len(".new") for name in names)


def test_a_link_where_the_new_file_is_to_be_is_not_followed(path, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_file.secrets, "token_hex", lambda size: "0" * 32)
    monkeypatch.setattr(ledger_file, "_clear", lambda path: None)
    target = tmp_path / "target"
    target.write_text("the owner's")
    path.with_name(f"{path.name}.{'0' * 32}.new").symlink_to(target)
    with pytest.raises(LedgerError, match="File exists"):
        LedgerFile(path).charge({"a": terms()})
    assert target.read_text() == "the owner's"
    assert replies(path) == 0


def test_what_dead_processes_left_is_removed_and_nothing_else(path):
    left = [path.with_name(f"{path.name}{middle}.new") for middle in ("", "." + "a" * 32)]
    kept = [path.with_name(name) for name in ("ledger.jsonx.new", "other.json.new", "ledger.json.txt.new", "ledger.json.bak")]
    for file in left + kept:
        file.write_text("")
    LedgerFile(path).charge({"a": terms()})
    assert [file.exists() for file in left] == [False] * 2
    assert [file.exists() for file in kept] == [True] * 4


def test_reading_does_not_wait_for_a_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)
    child = FORK.Process(target=_read_a_pipe, args=(path,))
    child.start()
    child.join(30)
    hung = child.is_alive()
    child.kill()
    assert not hung
    assert child.exitcode == 5


def _read_a_pipe(path):
    try:
        LedgerFile(path).read()
    except LedgerError as error:
        os._exit(5 if "is no regular file" in str(error) else 6)


def test_a_folder_of_another_user_pays_nothing(path, monkeypatch):
    """Its owner can rename an older copy over the file, sticky bit or not."""
    stat_of = Path.stat

    def stat(self, **keywords):
        found = stat_of(self, **keywords)
        if self == path.parent:
            values = list(found)
            values[4] = os.geteuid() + 1
            return os.stat_result(values)
        return found

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(LedgerError, match=f"is in a folder of user {os.geteuid() + 1}"):
        LedgerFile(path).charge({"a": terms()})
    monkeypatch.undo()
    assert replies(path) == 0


# A file of an earlier release, and terms that another library computes


def test_a_file_without_a_checksum_is_read_once_and_then_has_one(path):
    LedgerFile(path).charge({"a": terms()})
    data = json.loads(path.read_text())
    del data["sha256"]
    path.write_text(json.dumps(data | {"flower-dp-ledger": 1}))
    assert replies(path) == 1
    assert LedgerFile(path).charge({"a": terms()})[1] == {"a": 2}
    data = json.loads(path.read_text())
    assert data["flower-dp-ledger"] == 2
    assert len(data["sha256"]) == 64
    assert replies(path) == 2


@pytest.mark.parametrize(
    ("factor", "goes_on", "charged"),
    [
        (1 - 1e-10, True, 4.0 * (1 - 1e-10)),
        (1 + 1e-10, True, 4.0),
        (1 + 9e-4, True, 4.0),
        (1 - 1e-8, False, 4.0),
        (1 + 1e-2, False, 4.0),
        (2.0, False, 4.0),
    ],
)
def test_an_account_goes_on_with_the_noise_of_its_opening_and_charges_the_least(path, factor, goes_on, charged):
    """The last digits of a calibration may change with a library; a smaller budget is another one, which old replies exceed."""
    LedgerFile(path).charge({"a": terms()})
    opened = LedgerFile(path).read()["a"].terms
    refused, _ = LedgerFile(path).charge({"a": terms(mechanism=Laplace(noise_multiplier=4.0 * factor))})
    assert bool(refused) != goes_on
    if refused:
        assert opened in refused["a"].own
        assert str(4.0 * factor) in refused["a"].own
    entry = LedgerFile(path).read()["a"]
    assert (entry.replies, entry.terms) == (1 + goes_on, opened)
    assert entry.event == LaplaceDpEvent(charged)


def test_many_small_differences_never_add_up(path):
    """Each is compared with the terms of the opening, not with the last."""
    many = 50
    results = [
        bool(LedgerFile(path).charge({"a": terms(many, Laplace(noise_multiplier=4.0 * (1 - step * 4e-10)))})[0])
        for step in range(9)
    ]
    assert results == [False] * 3 + [True] * 6


def test_terms_of_a_numpy_number_are_the_same_line():
    assert terms(mechanism=Laplace(noise_multiplier=np.float64(4.0))).text == terms().text
    assert terms().why_not(1, terms().text.replace("=4.0", "=np.float64(4.0)")) is None
    assert terms().why_not(1, terms().text.replace("=4.0", "=nonsense")).public == "its account was opened on other terms"


def test_a_reply_of_several_releases_is_written_down_as_all_of_them(path):
    """DP-PASGD with several local steps charges each of them; a ledger that could not hold that paid for no reply."""
    steps = Terms(release=terms(mechanism=Gaussian(noise_multiplier=2.0)).release, num_replies=3, num_releases=4)
    assert LedgerFile(path).charge({"a": steps}) == ({}, {"a": 1})
    assert LedgerFile(path).charge({"a": steps}) == ({}, {"a": 2})
    entry = LedgerFile(path).read()["a"]
    assert entry.spent == SelfComposedDpEvent(SelfComposedDpEvent(GaussianDpEvent(2.0), 4), 2)


# The server's own count


def charged(path, run, number, name="a"):
    """Charge one reply; return why it is refused, if it is."""
    refused, _ = LedgerFile(path).charge({name: terms(num_replies=20)}, numbered={name: Numbered(run=run, number=number)})
    return refused[name].public if refused else None


def test_a_number_that_is_not_larger_is_refused_and_not_charged(path):
    assert [charged(path, "r", number) for number in (1, 2, 5)] == [None] * 3  # 3 and 4 never arrived
    for number in (5, 4, 1):
        assert charged(path, "r", number) == (
            f"reply {number} of run r was charged before: the server's ledger is an older copy, or the message came twice"
        )
    assert LedgerFile(path).read()["a"].runs == {"r": 5}
    assert replies(path) == 3
    assert charged(path, "r", 6) is None
    assert replies(path) == 4


def test_runs_and_clients_are_counted_apart(path):
    for number in (1, 2):
        assert [charged(path, run, number, name) for run in ("r", "s") for name in ("a", "b")] == [None] * 4
    assert charged(path, "r", 2) is not None
    assert {name: entry.runs for name, entry in LedgerFile(path).read().items()} == {name: {"r": 2, "s": 2} for name in "ab"}


def test_who_is_refused_for_its_budget_keeps_no_number(path):
    for number in (1, 2):
        refused, _ = LedgerFile(path).charge({"a": terms(1)}, numbered={"a": Numbered(run="r", number=number)})
    assert "its budget is spent" in refused["a"].public
    assert LedgerFile(path).read()["a"].runs == {"r": 1}


def test_a_refused_number_beside_a_charge_is_not_charged(path):
    charged(path, "r", 1)
    numbered = {name: Numbered(run="r", number=1) for name in "ab"}
    refused, counts = LedgerFile(path).charge({name: terms(20) for name in "ab"}, numbered=numbered)
    assert (set(refused), counts) == ({"a"}, {"b": 1})
    assert (replies(path, "a"), replies(path, "b")) == (1, 1)


def test_a_repeated_number_is_told_of_a_spent_budget_too(path):
    charged(path, "r", 1)
    refused, _ = LedgerFile(path).charge({"a": terms(1)}, numbered={"a": Numbered(run="r", number=1)})
    assert "was charged before" in refused["a"].public


def rewritten(path, change):
    """Change the accounts in a file, and give it the checksum of what it says then."""
    data = json.loads(path.read_text())
    change(data["clients"])
    data["sha256"] = hashlib.sha256(json.dumps(data["clients"], sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(data))


def test_a_file_of_an_earlier_release_has_no_numbers_and_goes_on(path):
    charged(path, "r", 1)
    rewritten(path, lambda clients: clients["a"].pop("runs"))
    assert LedgerFile(path).read()["a"].runs == {}
    assert charged(path, "r", 2) is None
    assert LedgerFile(path).read()["a"].runs == {"r": 2}
    assert replies(path) == 2


@pytest.mark.parametrize(
    "runs",
    [
        *(None, [], "r"),
        *({"r": number} for number in (0, -1, 1.5, True, "1", None, 2**53 + 1)),
        *({run: 1} for run in ("", "r\n", "r" * 65)),
        {"r": 1, "s": 1},
    ],
)
def test_numbers_that_make_no_sense_are_damage(path, runs):
    charged(path, "r", 1)
    rewritten(path, lambda clients: clients["a"].update(runs=runs))
    with pytest.raises(LedgerError, match="is damaged"):
        charged(path, "r", 2)
