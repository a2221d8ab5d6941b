"""A run chosen by private results: what is drawn, which run is shown, and that nothing else is."""

import json
import math
import os
import shutil
import tomllib
from collections import Counter

import pytest
from typer.testing import CliRunner

from flower_dp.cli.main import app
from flower_dp.privacy import selection
from flower_dp.privacy.selection import NegativeBinomialRunCount, PoissonRunCount
from flower_dp.running.plugins import event_against_outsiders
from flower_dp.running.signals import Interrupted
from flower_dp.sweeps import private_selection
from flower_dp.sweeps.folder import SweepFolder
from flower_dp.sweeps.pool import LaunchError, RunOutcome
from flower_dp.sweeps.private_selection import PrivateSelection
from flower_dp.sweeps.sweep import Sweep
from flower_dp.sweeps.trials import SelectionTrials
from tests.sweeps.conftest import checkpoint, finish

FILE = """
app = "mnist-dp-fedavg"
select = {metric = "private-accuracy", mode = "max"}
[private-selection]
mean = 4
[settings]
num-rounds = 2
num-clients = 200
sampling = "full"
private-evaluation.every = 1
dp-fedavg.target-epsilon = 0.0
[grid]
learning-rate = [0.1, 0.2, 0.3]
"""


class Runs:
    """Stands for the pool: runs end at once, with scores in their order; some fail, cost more, or are interrupted."""

    def __init__(self, sweep, scores, *, interrupt_after=math.inf, dear=()):
        self.sweep, self.scores, self.dear = sweep, list(scores), dear
        self.interrupt_after = interrupt_after
        self.made = []

    def __call__(self, left, lock, jobs, place):
        for run, folder, goes_on in left:
            assert not goes_on
            if len(self.made) >= self.interrupt_after:
                checkpoint(folder)  # from which it could go on
                raise Interrupted(2)
            score = self.scores[len(self.made)]
            self.made.append(run)
            if score == "fails":
                (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
                (folder / "checkpoint" / "ledger.sqlite").write_bytes(b"which may have charges")
                place.ended(RunOutcome(run=run, status="failed", details="for a reason", seconds=1.0))
                continue
            statement = next(one.statement for one in self.sweep.candidates if one.run.point == run.point).to_dict()
            if len(self.made) - 1 in self.dear:
                statement["adversaries"][0]["epsilon"] *= 1.01
            last, first = ({}, {}) if score is None else ({"private-accuracy": score}, {"private-accuracy": 0.99})
            rows = [{"round": 1} | first, {"round": 2, "seconds": 3.0, "elapsed": 9.0, "epsilon": 0.1} | last]
            finish(folder, {**run.config, "output-dir": str(folder)})
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "statement.json").write_text(json.dumps(statement | {"incidents": ["round 1 was left out"]}))
            (folder / "flower.log").write_text("secret")
            (folder / "model.safetensors").write_bytes(str(score).encode())
            place.ended(RunOutcome(run=run, status="completed", details="", seconds=1.0))


@pytest.fixture
def made(write, tmp_path, monkeypatch):
    """Make a choice among runs with some scores; return what was told, the folder, and the runs."""
    monkeypatch.setattr(private_selection.plan, "check", lambda _: None)
    sweep = PrivateSelection.read(write(FILE))

    def choose(scores, *, again=False, runs=None, **more):
        found = runs or Runs(sweep, scores, **more)
        monkeypatch.setattr(PrivateSelection, "_make", found)
        sample = NegativeBinomialRunCount.sample

        def drawn(self, rng):
            assert not again, "K is drawn again"
            sample(self, rng)
            return len(scores)

        monkeypatch.setattr(NegativeBinomialRunCount, "sample", drawn)
        told = []
        sweep.make(SweepFolder(tmp_path / "out"), told.append)
        return told, tmp_path / "out", found

    choose.sweep = sweep
    return choose


def shown(folder):
    return sorted(str(place.relative_to(folder)) for place in folder.rglob("*") if place.is_file())


CHOSEN = [f"runs/chosen/{name}" for name in ("run-config.toml", "metrics.jsonl", "model.json", "model.safetensors")]
STATEMENTS = ["statement.json", "statement.txt"]
ALWAYS = [*STATEMENTS, "choice.json", "sweep.lock", "sweep.toml"]
WITH_A_RUN = sorted([*CHOSEN, *(f"runs/chosen/{name}" for name in STATEMENTS), *ALWAYS])


@pytest.mark.parametrize(
    ("scores", "dear", "best"),
    [
        ([0.7], [], 0),
        ([0.2, 0.6, 0.6], [], 1),
        ([None, "fails", 0.1], [], 2),
        ([0.3, 0.9, 0.4], [1], 2),  # one has cost more than its plan
        ([], [], None),
        (["fails", None], [], None),
    ],
)
def test_the_best_run_alone_is_shown(made, scores, dear, best):
    _, folder, runs = made(scores, dear=dear)
    if best is None:
        assert shown(folder) == sorted(ALWAYS)
        told = json.loads((folder / "statement.json").read_text())
        guarantee = told["guarantee"]
        assert told["method"] == "The best of K runs: nothing was released"
        assert (guarantee["num_charged_rounds"], guarantee["private"]) == (0, True)
        return
    assert shown(folder) == WITH_A_RUN
    assert (folder / "runs/chosen/model.safetensors").read_bytes() == str(scores[best]).encode()
    config = tomllib.loads((folder / "runs/chosen/run-config.toml").read_text())
    assert config["seed"] == runs.made[best].seed
    assert "output-dir" not in config


def test_nothing_that_is_told_or_left_depends_on_how_many_runs_there_were(write, made, tmp_path):
    told, folder, runs = made(["fails", 0.1, 0.9, 0.5, 0.3])
    assert len({place.stat().st_mtime for place in [*folder.rglob("*"), folder]}) == 1
    text = "".join(place.read_text() for place in folder.rglob("*") if place.is_file() and place.suffix != ".safetensors")
    for run in runs.made:
        assert run.name not in text
        assert (str(run.seed) in text) == (run is runs.made[2])
    first = shown(folder)
    folder.rename(tmp_path / "before")
    again, folder, _ = made([0.9])
    assert (again, shown(folder)) == (told, first)
    assert (folder / "statement.txt").read_text() == (tmp_path / "before" / "statement.txt").read_text()


def test_the_statement_is_that_of_the_choice(made):
    _, folder, _ = made([0.3, 0.4])
    sweep = made.sweep
    event, statement = event_against_outsiders(sweep.candidates[0].run.target)
    cost = selection.epsilon([event], NegativeBinomialRunCount(mean=4), delta=statement.delta, relation=statement.relation)
    for place in (folder, folder / "runs" / "chosen"):
        told = json.loads((place / "statement.json").read_text())
        guarantee = told["guarantee"]
        assert (guarantee["epsilon"], guarantee["accountant"]) == (cost.epsilon, cost.accountant)
        assert guarantee["epsilon"] > 1.2 * statement.epsilon
        assert [(one["name"], one["epsilon"]) for one in told["adversaries"]] == [("outsiders", cost.epsilon)]
        assert any("Participants and the server: they see every run" in line for line in told["not_covered"])
        assert "another choice of settings" in " ".join(told["not_covered"])
        assert "the another" not in " ".join(told["not_covered"])
        assert told["incidents"] == ["round 1 was left out"]
        assert guarantee["num_charged_rounds"] == 2
        assert (guarantee["epsilon_by_release"], told["mechanism"]["paper_epsilon"]) == ({}, None)
    rows = [json.loads(line) for line in (folder / "runs/chosen/metrics.jsonl").read_text().splitlines()]
    assert rows[-1] == {"round": 2, "private-accuracy": 0.4}


def test_an_interrupted_choice_goes_on_with_what_was_drawn(made, capsys):
    scores, sweep = [0.3, "fails", 0.2, 0.1], made.sweep
    with pytest.raises(Interrupted):
        made(scores, interrupt_after=3)
    assert capsys.readouterr().out == ""
    private = sweep.path.parent / "out" / "private"
    first = SelectionTrials(private).trials()
    assert len(first) == 4
    assert not (private.parent / "statement.json").exists()
    assert oct(private.stat().st_mode & 0o777) == "0o700"
    _, folder, runs = made(scores, again=True, runs=Runs(sweep, [0.8]))
    # The fourth run alone is made: those that ended are not made again, the failed one neither.
    wanted = (first[3].name, sweep.candidates[first[3].point].run.point, first[3].seed)
    assert [(run.name, run.point, run.seed) for run in runs.made] == [wanted]
    assert (folder / "runs/chosen/model.safetensors").read_bytes() == b"0.8"


def test_a_run_that_fails_before_any_client_is_asked_ends_the_choice_loudly_and_the_same_runs_are_made_later(made):
    """As where Ray can't start: else nothing was chosen, with a statement that costs nothing and an exit status of 0."""

    class Unstarted(Runs):
        def __call__(self, left, lock, jobs, place):
            run, _, _ = left[0]
            self.asked = [run.name for run, _, _ in left]
            place.ended(RunOutcome(run=run, status="lost", details="Ray could not start", seconds=1.0))

    first = Unstarted(made.sweep, [])
    with pytest.raises(LaunchError, match="before any client was asked to train: Ray could not start"):
        made([0.3, 0.5], runs=first)
    _, folder, found = made([0.3, 0.5], again=True)
    assert first.asked == [run.name for run in found.made]
    assert (folder / "runs" / "chosen").is_dir()


class Killed(BaseException):
    """What no handler of this package may take for an error."""


def kill(patch, count):
    """End the process before its count-th change of a name in a folder."""
    changes = iter(range(1, 10**6))

    def dying(change):
        def changed(*arguments, **keywords):
            if next(changes) == count:
                raise Killed
            return change(*arguments, **keywords)

        return changed

    for name in ("unlink", "rmdir", "mkdir", "replace"):
        patch.setattr(os, name, dying(getattr(os, name)))


def test_a_choice_that_is_killed_anywhere_shows_one_run(made, tmp_path, monkeypatch):
    """Killed while its private folder was removed, a choice was made again: two models were shown, each for the price of one."""
    folder, steps, was_visible = tmp_path / "out", 0, 0

    def models():
        return {place.read_bytes() for place in folder.glob("runs/*/model.safetensors")}

    while True:
        steps += 1
        shutil.rmtree(folder, ignore_errors=True)
        with monkeypatch.context() as patch:
            kill(patch, steps)
            try:
                made([0.3, 0.5])
            except Killed:
                pass
            else:
                break
        seen = models()
        visible = bool(seen) or (folder / "statement.json").exists()
        was_visible += visible
        _, _, again = made([0.3, 0.5], runs=Runs(made.sweep, [0.91, 0.92]))
        assert len(seen | models()) == 1
        assert not (visible and again.made)
        assert shown(folder) == WITH_A_RUN
        assert len({place.stat().st_mtime for place in [*folder.rglob("*"), folder]}) == 1
    assert steps > 50
    assert was_visible > 30


def test_a_choice_is_made_once_and_what_was_deleted_says_nothing_of_it(made):
    """A choice is open, made or shown as its mark says, whatever else is there or gone."""
    scores = [0.3, 0.4]
    _, folder, _ = made(scores)
    before = (folder / "statement.json").read_bytes()
    made_before = (["The choice was made before; it is not made again."], [])
    told, _, runs = made([0.9], again=True)
    assert (told, runs.made) == made_before
    assert (folder / "statement.json").read_bytes() == before
    for name in STATEMENTS:
        (folder / name).unlink()
    shutil.rmtree(folder / "runs")
    told, _, runs = made([0.9], again=True)
    assert (told, runs.made) == made_before
    assert shown(folder) == ["choice.json", "sweep.lock", "sweep.toml"]
    gone = "with its runs is gone"
    for content, message in (('{"best": null}', gone), ('{"best": "abc"}', gone), ("{}", gone), ("", "choice.json")):
        (folder / "choice.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            made(scores, again=True)
    (folder / "choice.json").unlink()
    (folder / "private" / "runs" / "abc").mkdir(parents=True)
    with pytest.raises(ValueError, match="may have been looked at"):
        made(scores)
    (folder / "private" / "drawn.json").write_text('[{"name": "abc", "point": 0, "seed": 1}]')
    (folder / "choice.json").write_text('{"best": "def"}')
    with pytest.raises(ValueError, match="is damaged"):
        made(scores, again=True)


def test_another_file_and_a_folder_with_runs_are_refused(made, write):
    _, folder, _ = made([0.3])
    write(FILE.replace("0.3]", "0.4]"))
    with pytest.raises(ValueError, match="was made with another"):
        made([0.3])
    (folder / "choice.json").unlink()
    write(FILE)
    with pytest.raises(ValueError, match="may have been looked at"):
        made([0.3])
    shutil.rmtree(folder / "runs")
    with pytest.raises(ValueError, match="may have been looked at"):
        made([0.3])


def test_points_and_seeds_are_drawn_uniformly(tmp_path):
    # 4.5 standard errors: false alarms below 1e-5 for each point.
    place = SelectionTrials(tmp_path / "private")
    trials = [trial for _ in range(30) for trial in place.draw(PoissonRunCount(mean=100), 3)]
    counts = Counter(trial.point for trial in trials)
    for point in range(3):
        assert abs(counts[point] - len(trials) / 3) < 4.5 * math.sqrt(len(trials) * 2 / 9)
    assert len({trial.seed for trial in trials}) > 0.99 * len(trials)
    assert len({trial.name for trial in trials}) == len(trials)
    assert place.trials() == trials[-len(place.trials()) :]


PRIVATE = "[private-selection]\nmean = 4"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (PRIVATE, "", "private-selection: is missing"),
        ("mean = 4", "shape = 1", "private-selection.mean: is missing"),
        ("mean = 4", "mean = 0.5", "private-selection.mean=0.5"),
        ("mean = 4", "mean = 4\nk = 2", "private-selection.k: is not a key"),
        ("mean = 4", 'mean = 4\npublic-test-data = "yes"', "must be True or False"),
        ('select = {metric = "private-accuracy", mode = "max"}', "", "select: is missing"),
        ("private-accuracy", "accuracy", "is on test records"),
        ("private-accuracy", "client-train-loss", "must be a result of a run"),
        ('app = "', 'seeds = 2\napp = "', "which draws a seed for every run"),
        ("num-rounds = 2", 'num-rounds = 2\nserver-ledger = "/tmp/ledger.sqlite"', "would reveal the number of runs"),
        ("learning-rate = [0.1, 0.2, 0.3]", "dp-fedavg.relation = ['replace-one', 'add-or-remove-one']", "differ in relation"),
        ("learning-rate = [0.1, 0.2, 0.3]", "dp-fedavg.delta = [1e-4, 1e-3]", "differ in delta"),
        ("learning-rate = [0.1, 0.2, 0.3]", "dp-fedavg.noise-multiplier = [1.0, 0.0]", "is not private"),
    ],
)
def test_what_a_choice_can_not_cover_is_refused(write, old, new, message):
    with pytest.raises(ValueError, match=message):
        PrivateSelection.read(write(FILE.replace(old, new)))


def test_a_choice_of_local_methods_hides_nothing_from_the_server(write):
    with pytest.raises(ValueError, match="which sees every run"):
        PrivateSelection.read(write(f'app = "mnist-nbafl"\nselect = {{metric = "private-accuracy"}}\n{PRIVATE}'))


def test_public_test_data_and_another_law_are_taken_at_their_word(write):
    text = FILE.replace("private-accuracy", "accuracy")
    sweep = PrivateSelection.read(write(text.replace("mean = 4", 'mean = 4\nshape = "poisson"\npublic-test-data = true')))
    assert sweep.number == PoissonRunCount(mean=4)
    assert "on test records that are public" in str(sweep._statement(sweep.candidates[0], {}, chosen=True))


def test_a_dry_run_tells_the_cost_and_starts_nothing(write, tmp_path):
    arguments = ["--private-selection", "--output-dir", str(tmp_path / "out"), "--dry-run"]
    result = CliRunner().invoke(app, ["sweep", str(write(FILE)), *arguments])
    assert result.exit_code == 0
    assert result.stdout.startswith("The best of K runs by private-accuracy (max), each with one of 3 points")
    assert result.stdout.count("flower-dp run mnist-dp-fedavg") == 3
    with pytest.raises(ValueError, match="shows one run alone; add --private-selection"):
        Sweep.read(tmp_path / "sweep.toml")
    assert not (tmp_path / "out").exists()
