"""The folder of a sweep: what is left to do, and what it must not be used for."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from flower_dp.core.checks import SettingsError
from flower_dp.privacy.store import Store
from flower_dp.strategies.checkpoint import PREVIOUS
from flower_dp.sweeps.cost import has_charges
from flower_dp.sweeps.folder import SweepFolder, runs_in
from flower_dp.sweeps.results import Results
from tests.sweeps.conftest import checkpoint, finish
from tests.sweeps.test_cost import charge


def test_finished_runs_are_left_alone_and_others_go_on_or_begin(folder, runs):
    three = runs("seeds = 3")
    finish(folder.of(three[0]), three[0].config)
    begun = finish(folder.of(three[1]), three[1].config, finished=False)
    three[1].launched.write(begun)
    checkpoint(begun)
    (folder.of(three[2]) / "rubbish").mkdir(parents=True)
    found = folder.left([replace(run, launched=replace(run.launched, workers=7)) for run in three])
    assert [(run.seed, goes_on) for run, _, goes_on in found] == [(1, True), (2, False)]
    assert found[0][0].launched == replace(three[1].launched, workers=7)
    assert (begun / "metrics.jsonl").exists()
    assert [entry.name for entry in folder.of(three[2]).iterdir()] == ["checkpoint"]
    assert json.loads((folder.of(three[2]) / "checkpoint" / "launch.json").read_text())["overrides"] == {"seed": 2}
    assert oct(folder.of(three[2]).stat().st_mode)[-3:] == "700"


def charged(run, *, damaged):
    """Leave a ledger with a charge and no checkpoint, as where the disk was full and the run went on."""
    path = run / "checkpoint" / "ledger.sqlite"
    path.parent.chmod(0o700)
    Store.create(path)
    assert not has_charges(run)
    with Store(path) as ledger:
        ledger.append(ledger.begin(method="DP-FedAvg", delta=1e-3, private=True), charge(1))
    if damaged:
        path.write_bytes(b"no ledger")


@pytest.mark.parametrize(
    ("leave", "goes_on"),
    [
        (checkpoint, True),
        (lambda run: checkpoint(run).rename(run / "checkpoint" / PREVIOUS), True),
        # Before its model was written: its result is returned, also where its strategy has a loop of its own.
        (lambda run: checkpoint(run, ended=True), True),
        (lambda run: checkpoint(run, {}, ended=True), True),
        (lambda run: checkpoint(run, {}), False),  # a loop of its own begins anew
        (lambda run: charged(run, damaged=False), False),
        (lambda run: charged(run, damaged=True), False),
        (lambda run: shutil.rmtree(run / "checkpoint"), False),  # its folder says that there were rounds
    ],
    ids=["newest", "previous", "ended", "own loop, ended", "own loop", "charged", "damaged ledger", "deleted"],
)
def test_a_run_with_charges_goes_on_or_stays_in_the_statement(folder, runs, leave, goes_on):
    (run,) = runs("")
    run.launched.write(finish(folder.of(run), run.config, finished=False))
    leave(folder.of(run))
    folder.check([run])
    assert [(place.name, on) for _, place, on in folder.left([run])] == [(run.name, goes_on)]
    aside = [one for one in folder.runs() if one.name != run.name]
    assert [one.name for one in aside] == ([] if goes_on else [f"{run.name}-not-resumable-1"])
    assert all(has_charges(one) for one in aside)
    assert (folder.of(run) / "metrics.jsonl").exists() == goes_on


@pytest.mark.parametrize("why", ["damaged", "writable by others"])
def test_a_run_whose_checkpoint_cant_be_read_is_refused_until_its_folder_is_renamed(folder, runs, why):
    """To begin it anew would charge its clients again."""
    one, other = runs("seeds = 2")
    for run in (one, other):
        run.launched.write(finish(folder.of(run), run.config, finished=False))
        written = checkpoint(folder.of(run))
    if why == "damaged":
        written.write_bytes(written.read_bytes()[:-1])
    else:
        written.chmod(0o666)
    with pytest.raises(
        SettingsError, match=f"{other.name}: can't be resumed: .*rename the folder to (.*): then .* again"
    ) as refused:
        folder.check([one, other])
    assert folder.of(one).name + ":" not in str(refused.value)
    folder.of(other).rename(folder.of(other).with_name(f"{other.name}-not-resumable-1"))
    folder.check([one, other])
    assert [(run.seed, goes_on) for run, _, goes_on in folder.left([one, other])] == [(0, True), (1, False)]
    assert len(folder.runs()) == 2  # what was charged stays in the statement


def test_settings_of_finished_runs_cant_change(folder, runs):
    (run,) = runs("[settings]\nnum-rounds = 2")
    finish(folder.of(run), run.config)
    folder.check(runs("seeds = [5, 0]\n[grid]\nnum-rounds = [3, 2]"))  # seeds and points may be added
    with pytest.raises(SettingsError, match=r"was made with num-rounds=2 \(now 4\); put that back, or take another folder"):
        folder.check(runs("[settings]\nnum-rounds = 4"))
    with pytest.raises(SettingsError, match=r"was made with seed=0 \(now 1\)"):
        folder.check(runs("seeds = [1]\n[settings]\nnum-rounds = 2"))
    # One that has not finished may be given up; its cost stays in the statement.
    finish(folder.of(run), run.config, finished=False)
    folder.check(runs("[settings]\nnum-rounds = 4"))
    assert folder.runs() == [folder.of(run)]


@pytest.mark.parametrize("kind", ["file", "other", "under a file"])
def test_a_folder_with_something_else_is_refused(tmp_path, kind):
    place = tmp_path / "there"
    if "file" in kind:
        place.write_text("")
    else:
        place.mkdir()
        (place / "thesis.tex").write_text("")
    place = place / "out" if kind == "under a file" else place
    with (
        pytest.raises(ValueError, match=r"can't be written: (File exists|Not a directory)|already holds thesis.tex; must be"),
        SweepFolder(place).locked(),
    ):
        pass


def test_one_sweep_at_a_time_until_the_last_of_its_processes_has_ended(folder):
    with folder.locked() as lock:
        with pytest.raises(ValueError, match="another sweep runs there"), folder.locked():
            pass
        code = f"import fcntl; file = open({str(lock)!r}); fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB); print(1, flush=True); input()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
    with pytest.raises(ValueError, match="another sweep runs there"), folder.locked():
        pass
    child.communicate(os.linesep.encode())
    with folder.locked():
        pass


def test_the_folder_of_a_sweep_stands_for_its_runs_in_the_order_of_its_file(folder, runs, write):
    """Names of folders are hashes; and points that were taken out of the file are not compared."""
    assert runs_in(str(folder.path)) == [str(folder.path)]
    planned = runs("[grid]\n'dp-fedsam.epsilon' = [2.0, 8.0, 1.0]")
    folder.keep(write(""))
    with pytest.raises(ValueError, match="is the folder of a sweep without any run yet"):
        runs_in(str(folder.path))
    for run in planned:
        finish(folder.of(run), run.config)
    (folder.of(run).parent / "not-begun").mkdir()
    Results(folder=folder, runs=planned[:2], metric="accuracy").write_rows()
    assert runs_in(str(folder.path)) == [str(folder.of(run)) for run in planned[:2]]
