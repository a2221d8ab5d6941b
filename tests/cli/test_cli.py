import importlib.util
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from flwr.clientapp import ClientApp
from scipy.stats import norm

import flower_dp
from flower_dp.cli import launch
from flower_dp.core.environment import RUN_FOLDER
from flower_dp.running import apps, preflight, progress
from flower_dp.running.run_folder import RunFolder
from flower_dp.running.signals import Interrupted
from flower_dp.simulation.local_grid import LocalGrid
from flower_dp.strategies.checkpoint import NEWEST, Checkpoint, CheckpointFolder
from flower_dp.strategies.run_state import RunState
from tests.own_apps import write_app

TINY = Path(__file__).parents[1] / "foreign" / "tiny"


@pytest.fixture
def answer(call):
    def run(*arguments):
        status, out, err = call(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out, parse_constant=pytest.fail)

    return run


# epsilon and calibrate

D, POISSON = ["--delta", "1e-5"], ["--sampling", "poisson", "--sampling-rate"]
FIXED = ["--sampling", "fixed-size", "--num-clients", "50"]
LAPLACE = ["--mechanism", "laplace", "--delta", "0", "--noise-multiplier"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Balle & Wang 2018, in closed form.
        (["1", *D], (pytest.approx(4.377178, rel=1e-6), "add-or-remove-one", "gaussian-exact")),
        # Everybody: no sampling.
        (["1", *D, *FIXED, "--cohort-size", "50"], (pytest.approx(9.997256, rel=1e-6), "replace-one", "gaussian-exact")),
        # Basic composition: 3 / 2.
        (["2", *LAPLACE[:-1], "--num-rounds", "3"], (pytest.approx(1.5), "add-or-remove-one", "pure")),
        (["0", *D], (None, "add-or-remove-one", "none")),
    ],
)
def test_the_epsilon_of_releases(answer, arguments, expected):
    got = answer("epsilon", "--noise-multiplier", *arguments)
    assert (got["epsilon"], got["relation"], got["accountant"]) == expected
    assert got["private"] == (got["epsilon"] is not None)


@pytest.mark.parametrize(("relation", "sensitivity"), [("add-or-remove-one", 1), ("replace-one", 2)])
def test_what_is_calibrated_is_just_enough_by_the_closed_form(answer, relation, sensitivity):
    def delta(noise_multiplier, rounds, epsilon):  # Balle & Wang 2018, equation 6, of n releases as one with std / sqrt(n)
        z = noise_multiplier / sensitivity / math.sqrt(rounds)
        return norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)

    got = answer("calibrate", "--epsilon", "8", "--noise-multiplier", "2", *D, "--relation", relation)
    assert delta(2, got["num_rounds"], 8) <= 1e-5 < delta(2, got["num_rounds"] + 1, 8)
    assert got["epsilon"] <= got["target_epsilon"] == 8.0
    got = answer("calibrate", "--epsilon", "1", "--num-rounds", "3", *D, "--relation", relation)
    assert delta(got["noise_multiplier"], 3, 1) <= 1e-5 < delta(0.999 * got["noise_multiplier"], 3, 1)
    assert got["epsilon"] <= got["target_epsilon"] == 1.0


def test_calibrated_rounds_of_laplace_noise_by_hand(answer):
    laplace = ["calibrate", "--epsilon", "3.05", *LAPLACE, "10"]
    assert answer(*laplace)["num_rounds"] == 30  # of 1 / 10 each
    turns = ["--sampling", "round-robin", "--cohort-size", "5", "--num-clients", "20"]
    assert answer(*laplace, *turns)["num_rounds"] == 120  # everybody once in four rounds


def test_round_robin_costs_as_many_releases_as_the_client_asked_most_often_takes_part_in(answer):
    one_round = ["--noise-multiplier", "2", "--delta", "1e-5"]
    turns = ["--sampling", "round-robin", "--num-clients", "50", "--cohort-size", "20", "--num-rounds", "6"]
    got = answer("epsilon", *one_round, *turns)  # 6 x 20 / 50 = 2.4: some clients three times
    assert got["epsilon"] == answer("epsilon", *one_round, "--sampling", "full", "--num-rounds", "3")["epsilon"]
    assert (got["sampling"], got["relation"]) == ("round-robin", "add-or-remove-one")


Z = ["--noise-multiplier", "1"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["epsilon", *D], "--noise-multiplier"),
        (["epsilon", *Z], "--delta"),
        (["calibrate", *D, "--epsilon", "1"], "--noise-multiplier and --num-rounds are both missing"),
        (["calibrate", *D, *Z, "--epsilon", "1", "--num-rounds", "3"], "--noise-multiplier and --num-rounds are both given"),
        (["calibrate", *D, "--epsilon", "0", "--num-rounds", "1"], "--epsilon=0.0: must be"),
        (["epsilon", *Z, "--delta", "0"], "--delta=0.0: must be"),
        (["epsilon", *Z, *D, "--sampling", "poisson"], "--sampling-rate is missing"),
        (["epsilon", *Z, *D, *POISSON, "0.1", "--cohort-size", "3"], "--cohort-size=3: belongs"),
        (["epsilon", *Z, *D, *FIXED, "--cohort-size", "3", "--relation", "add-or-remove-one"], "--relation=add-or"),
        ([], "command"),
        (["swep"], "No such command 'swep'. Did you mean 'sweep'?"),
        (["plan", "nbafll", "--estimate-from", "quick"], "method='nbafll': has no planner; did you mean nbafl?"),
        (["plan", "nbafl", "--problem", "nowhere.toml"], "problem='nowhere.toml': can't be read"),
        (["plan", "nbafl", "--problem", "p.toml", "--l2", "0.1"], "--l2=0.1: needs --estimate-from"),
    ],
)
def test_bad_options_get_status_2_and_one_line(call, arguments, named):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


def test_help_is_fast_and_loads_nothing_heavy():
    heavy = "{'numpy', 'flwr', 'torch', 'ray', 'dp_accounting', 'matplotlib', 'scipy'}"
    code = f"import sys\nfrom flower_dp.cli import main as cli\ntry: cli.main(['--help'])\nfinally: print({heavy} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(Path(flower_dp.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.endswith("set()\n")
    for command in ("run", "presets", "compare", "epsilon", "calibrate", "plan"):
        assert command in done.stdout


# targets


def test_of_a_checkout_of_flower_dp_what_differs_is_a_preset(tmp_path):
    text = '[project]\nname = "flower-dp"\n[tool.flwr.app.config]\nnum-rounds = 7\nseed = 0\n'
    (tmp_path / "pyproject.toml").write_text(text)
    target = apps.resolve(str(tmp_path), [])
    assert (target.app, target.name, target.overrides) == (apps.own_app(), "flower-dp", {"num-rounds": 7})
    (tmp_path / "pyproject.toml").write_text(text + "num-round = 3\n")
    with pytest.raises(ValueError, match="num-round: unknown setting of flower-dp; did you mean num-rounds"):
        apps.resolve(str(tmp_path), [])


def test_unknown_settings_are_refused_together_with_at_most_five_suggestions():
    with pytest.raises(ValueError, match="unknown") as caught:
        apps.resolve(None, ["foo=1", "ratio=1", "num-rounds=many"])
    foo, ratio, rounds = str(caught.value).splitlines()
    assert "did you mean" not in foo
    suggested = re.findall(r"[\w.-]+-ratio", ratio)
    assert len(suggested) == 5
    assert suggested[:3] == ["validation-ratio", "test-ratio", "lus-keep-ratio"]
    assert rounds.startswith("num-rounds=many: ")


def test_a_preset_changes_settings_and_set_wins(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"num-rounds": 4, "model": "two words", "report-client-metrics": True, "dp-fedavg.delta": 1.0, "data-dir": "x"}
    preset = apps.resolve("mnist-dp-fedavg", []).overrides
    target = apps.resolve("mnist-dp-fedavg", [f"{key}={value!r}".lower() for key, value in given.items()])
    assert (target.name, target.overrides) == ("mnist-dp-fedavg", {**preset, **given, "data-dir": f"{tmp_path}/x"})
    for text, absolute in (("how:x", f"how:{tmp_path}/x"), ("how:/x", "how:/x"), ("how:", "how:"), ("c:x", f"{tmp_path}/c:x")):
        assert apps.resolve(None, [f"data-dir={text}"]).overrides["data-dir"] == absolute
    assert apps.resolve(None, ["server-ledger=a.sqlite", "dp-fedavg.delta=1"]).overrides == {
        "server-ledger": f"{tmp_path}/a.sqlite",
        "dp-fedavg.delta": 1.0,  # a whole number is a number
    }
    assert re.search("^mnist-dp-fedavg +[A-Z]", call("presets")[1], re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["slow"],
            "slow: is neither a folder of a Flower app, nor a preset, nor a task; `flower-dp presets` lists the presets; ",
        ),
        (["mnits"], "mnits: is neither a folder of a Flower app, nor a preset, nor a task; did you mean mnist?"),
        (["--set", "num-clints=1"], "num-clints: unknown setting of flower-dp; did you mean num-clients?"),
        (["--set", "foo=1"], "foo: unknown setting of flower-dp; the page Settings of the documentation lists all"),
        (["--set", "evaluation.every=1"], "unknown setting of flower-dp; did you mean private-evaluation.every?"),
        (["--set", "num-rounds=1.5"], "num-rounds=1.5: must be a whole number"),
        (["--set", "seed"], "--set seed: must be key=value"),
        (["--set", "output-dir=a", "--output-dir", "b"], "output-dir"),
        (["--output-dir", "."], "already holds a"),
        (["mnist", "--resume", "x"], "[PRESET | TASK | APP_DIR]: can't be used with --resume; a resumed run keeps its app"),
        (["--resume", "x", "--workers", "2", "--ray-address", "auto"], "x: holds no run that `flower-dp run` has begun"),
    ],
)
def test_bad_targets_and_settings(tmp_path, call, monkeypatch, arguments, named):
    (tmp_path / "a").touch()
    monkeypatch.chdir(tmp_path)
    status, out, err = call("run", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert named in err


# what a run gets, and what it leaves


@pytest.fixture
def launched(monkeypatch):
    """Put a function in the place of a ServerApp, and no Ray behind it; it gets what it may look at, and may do what an app does."""
    from flower_dp.simulation import grid, workers

    def replace(act):
        given = {}

        def started(num_workers, *_, **__):
            given["num_workers"] = num_workers

        def nobody(client, workers, *, num_nodes, run_config):
            given["num_nodes"] = num_nodes
            return LocalGrid(ClientApp(), 0, run_config)

        def serve(there, context):
            act(
                **given,
                config=context.run_config,
                output_dir=Path(os.environ[RUN_FOLDER]),
                say=lambda line: os.write(1, f"{line}\n".encode()),
            )

        monkeypatch.setattr(workers, "start_ray", started)
        monkeypatch.setattr(workers, "Workers", lambda **_: None)
        monkeypatch.setattr(workers, "log_unused_gpus", lambda *_: None)
        monkeypatch.setattr(grid, "RayGrid", nobody)
        monkeypatch.setattr(apps.App, "server_app", lambda app: serve)

    return replace


@pytest.fixture
def foreign(tmp_path):
    """Somebody's app, with a key of its own that is called output-dir, and data beside it."""
    app = write_app(tmp_path / "foreign", 'output-dir = "mine"\nrounds = 3')
    (app / "iris.csv").write_text("5.1")
    return app


def test_a_foreign_app_works_in_the_runs_folder_and_keeps_its_own_settings(foreign, tmp_path, call, launched):
    got = {}

    def act(**keywords):
        got.update(keywords)
        Path("final_model.pt").write_text(Path("iris.csv").read_text())
        keywords["say"]("INFO: the app's own line")

    launched(act)
    status, out, err = call("run", str(foreign), "--output-dir", str(tmp_path / "run"))
    assert (status, err) == (0, "")
    assert out == f"INFO: the app's own line\nresults: {tmp_path / 'run'}\n"
    assert got["config"] == {"output-dir": "mine", "rounds": 3}
    assert (got["num_workers"], got["num_nodes"]) == (preflight.default_workers(), None)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["final_model.pt", "flower.log"]
    assert (tmp_path / "run" / "final_model.pt").read_text() == "5.1"
    assert sorted(path.name for path in foreign.iterdir()) == ["iris.csv", "pyproject.toml"]
    call("run", str(foreign), "--set", "output-dir=/there", "--output-dir", str(tmp_path / "second"))
    assert got["config"]["output-dir"] == "/there"


def test_the_log_is_shown_until_metrics_come_and_the_end_counts_its_warnings(foreign, tmp_path, call, launched, monkeypatch):
    # Flower's own handler writes to the standard error of the test that imported Flower first: the line is in the log by hand.
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [])

    def act(*, say, config, **keywords):
        say("INFO: before")
        time.sleep(0.5)  # the log is looked at ten times a second
        RunFolder.create(None, config, "run").append({"round": 1, "num-rounds": 2, "epsilon": 0.5})
        say("WARNING :   node 1: too long\nWARNING :   node 2: too long\nWARNING :   node 7 can't train")
        logging.getLogger("flwr").warning("node %s can't train", 7, extra={"shown": True})

    launched(act)
    _, out, _ = call("run", str(foreign), "--output-dir", str(tmp_path / "run"))
    assert out.splitlines() == [
        *("INFO: before", "round 1/2  epsilon 0.500", "WARNING: node 7 can't train"),
        f"2 warnings, in {tmp_path / 'run'}/flower.log; the first: node 1: too long",
        f"results: {tmp_path / 'run'}",
    ]


def test_flower_dps_own_app_shows_no_log_and_gets_no_links(tmp_path, call, launched, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got, folder = {}, tmp_path / "x"

    def act(**keywords):
        got.update(keywords, here=Path.cwd())
        keywords["say"]("INFO: a line")

    launched(act)
    status, out, _ = call("run", "--set", "output-dir=x", "--workers", "3")
    assert (status, out) == (0, f"results: {folder}\n")
    assert (got["config"], got["output_dir"], got["here"]) == (apps.own_app().defaults, folder, Path.cwd())
    assert (got["num_workers"], got["num_nodes"]) == (3, 3)


@pytest.mark.parametrize("existed", [False, True])
def test_a_refused_launch_leaves_no_folder(foreign, tmp_path, call, monkeypatch, existed):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    folder = tmp_path / "run"
    if existed:
        folder.mkdir()
    status, _, err = call("run", str(foreign), "--output-dir", str(folder))
    assert (status, err) == (1, "error: Ray is not installed: pip install 'flower-dp[simulation]'\n")
    assert folder.exists() == existed  # a folder of somebody's own stays
    assert not existed or list(folder.iterdir()) == []


@pytest.mark.parametrize(("message", "said"), [("rounds=-1: must be >= 0", "error: rounds=-1: must be >= 0\n"), ("", "")])
def test_bad_settings_are_found_before_the_server_app_begins(tmp_path, call, launched, message, said):
    """By the app's own check, while Ray starts; one that refuses without a word refuses, too."""
    launched(lambda **_: pytest.fail("begun"))
    check = f"def check(config):\n    if config['rounds'] < 0:\n        raise ValueError({message!r})\n"
    app = write_app(tmp_path / "app", "rounds = 3", tool='[tool.flower-dp]\ncheck = "checked_app:check"', checked_app=check)
    status, out, err = call("run", str(app), "--set", "rounds=-1", "--output-dir", str(tmp_path / "run"))
    assert (status, out) == (2, "")
    assert err == said
    assert not (tmp_path / "run").exists()


# a run that does not end


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"method": "DP-FedAvg"}, "Resume it with: flower-dp run --resume FOLDER"),
        (None, "The run can't be resumed: FOLDER/checkpoint: checkpoint.state is damaged: its SHA-256 is not the one in it"),
    ],
)
@pytest.mark.parametrize("how", ["failed", "interrupted"])
def test_how_a_run_goes_on_is_said_only_if_it_can(foreign, tmp_path, call, launched, how, setting, told):
    def act(*, output_dir, **keywords):
        kept = CheckpointFolder(output_dir / "checkpoint")
        kept.create()
        kept.write(Checkpoint(setting=setting or {}, server_round=1, round_complete=True, state=RunState(), arrays={}))
        if setting is None:
            (kept.path / NEWEST).write_bytes((kept.path / NEWEST).read_bytes()[:-1])
        (output_dir / "statement.txt").write_text("said")
        raise Interrupted(signal.SIGINT) if how == "interrupted" else ValueError("no data\nfor you")

    launched(act)
    folder = tmp_path / "run"
    if how == "failed":  # with the same settings it may fail again
        told = told.replace("Resume it", "If its settings did not cause the failure, resume it")
    status, _, err = call("run", str(foreign), "--output-dir", str(folder))
    assert status == (130 if how == "interrupted" else 1)
    assert f"The statement of everything released so far is {folder}/statement.txt\n{told.replace('FOLDER', str(folder))}" in err
    assert err.count("\n") == (3 if how == "interrupted" else 4)
    assert how == "interrupted" or err.startswith("error: the run failed: ValueError: no data\n")


def test_a_run_that_has_ended_is_told_and_not_started_again(foreign, tmp_path, call, launched):
    folder = tmp_path / "run"

    def act(**_):
        for name, text in (("run-config.toml", ""), ("model.safetensors", ""), ("model.json", "{}"), ("statement.txt", "said")):
            (folder / name).write_text(text)

    launched(act)
    assert call("run", str(foreign), "--output-dir", str(folder))[0] == 0
    launched(lambda **_: pytest.fail("started"))
    status, out, _ = call("run", "--resume", str(folder))
    assert (status, out) == (0, f"The run has ended; there is nothing to resume.\n\nsaid\nresults: {folder}\n")


def test_a_run_whose_process_has_died_is_told_from_its_folder(tmp_path, capsys):
    (tmp_path / "flower.log").write_text("INFO : Starting\nTraceback (most recent call last)\n  a\nOSError: full\n")
    (tmp_path / "statement.txt").write_text("said")
    assert launch.tell_died(str(tmp_path), 0) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the run failed: the process that ran the app ended before the run did\nOSError: full\n")
    assert (
        f"Flower's log is {tmp_path}/flower.log\nThe statement of everything released so far is {tmp_path}/statement.txt\n" in err
    )
    assert launch.tell_died(str(tmp_path), signal.SIGINT) == 130
    assert (
        f"error: interrupted by SIGINT; nothing is left running; its folder is {tmp_path}\nThe statement of everything"
        in capsys.readouterr().err
    )
    assert launch.tell_died("", 0) == 1
    assert (
        capsys.readouterr().err == "error: the process of the command has died; repeat the command to begin anew or to resume\n"
    )


# progress


def test_a_line_a_round(capsys, monkeypatch):
    now = iter([100.0, 104.0, 108.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.Display() as lines:
        lines.show({"round": 0, "num-rounds": 20, "loss": 2.3026, "accuracy": 0.1, "epsilon": 0.0})
        lines.show({"round": 2, "num-rounds": 20, "epsilon": 0.9312})
        lines.show({"round": 4, "num-rounds": 20, "loss": None, "accuracy": 0.8125, "epsilon": None})
    assert capsys.readouterr().out.splitlines() == [
        "round 0/20  loss 2.3026  accuracy 10.0 %  epsilon 0.000",
        "round 2/20  epsilon 0.932  eta 0:36",  # 2 s a round, 18 to go
        "round 4/20  accuracy 81.2 %  not private  eta 0:32",
    ]


def test_the_bar_shows_the_newest_of_each(monkeypatch):
    import io

    from rich.console import Console

    screen = io.StringIO()
    with progress.Bar(Console(file=screen, force_terminal=True, width=120)) as bar:
        bar.show({"round": 1, "num-rounds": 4, "loss": 0.5, "accuracy": 0.25, "epsilon": 0.1})
        bar.show({"round": 2, "num-rounds": 4, "epsilon": 0.2})
    assert "round 2/4" in screen.getvalue()
    assert "loss 0.5000  accuracy 25.0 %  epsilon 0.200" in screen.getvalue()


CELL = """
from flower_dp.running import progress
with progress.display() as shown:
    for at in range(3):
        shown.show({"round": at, "num-rounds": 2, "accuracy": at / 4, "epsilon": 0.5 * at})
"the cell's result"
"""


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("nbclient") and find_spec("ipykernel")), reason="needs the extra docs")
@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_a_notebook_that_is_executed_keeps_its_results(monkeypatch):
    from nbclient import NotebookClient
    from nbformat import v4

    monkeypatch.setenv("PYTHONPATH", str(TINY.parents[2]))
    notebook = v4.new_notebook(cells=[v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown, result = notebook.cells[0].outputs
    assert shown["data"] == {"text/plain": "round 2/2  accuracy 50.0 %  epsilon 1.000"}
    assert result["data"]["text/plain"] == '"the cell\'s result"'
