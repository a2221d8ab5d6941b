"""The runs of a sweep: names, labels, commands, and the check of all of them."""

import shlex
from contextlib import nullcontext

import pytest

from flower_dp.cli import main as cli
from flower_dp.core.checks import SettingsError
from flower_dp.sweeps import plan

GRID = "seeds = 2\n[grid]\nmethod = ['dp-fedavg', 'dp-fedsam']\n'METHOD.noise-multiplier' = [0.8, 1.6]\n"


def test_all_points_are_run_with_the_first_seed_and_then_with_the_next(runs):
    found = runs(GRID)
    points = [(method, noise) for method in ("dp-fedavg", "dp-fedsam") for noise in (0.8, 1.6)]
    told = [f"{method}, noise-multiplier={noise}, seed {seed}" for seed in (0, 1) for method, noise in points]
    assert [run.description for run in found] == told
    assert len({run.name for run in found}) == 8
    assert found[5].config["dp-fedavg.noise-multiplier"] == 1.6
    assert (found[5].config["seed"], found[5].launched.overrides["seed"]) == (1, 1)
    assert not found[0].launched.app


def test_a_run_keeps_its_name_however_the_file_says_it(runs):
    names = [run.name for run in runs(GRID)]
    more = "seeds = [7, 1, 0]\n[[points]]\nmethod = 'dp-fedavg'\nlearning-rate = 0.15\n'dp-fedavg.noise-multiplier' = [0.4, 1.6]"
    again = {run.description: run.name for run in runs(more)}
    assert again["noise-multiplier=1.6, seed 1"] == names[5]
    assert again["noise-multiplier=0.4, seed 1"] not in names
    # They would be made at once, in one folder.
    with pytest.raises(SettingsError, match="are the same run; leave one of them out"):
        runs("[[points]]\n[[points]]\nmethod = 'dp-fedsam'")


def test_the_command_makes_the_same_run(runs, tmp_path, monkeypatch):
    (run,) = runs(
        "seeds = [3]\nworkers = 2\ngpus-per-worker = 0.0\napp = 'mnist-dp-fedavg'\n"
        "[settings]\nmodel-bias = false\npartition = 'dirichlet'\nnum-rounds = 3\nlearning-rate = 1"
    )
    given = {}
    monkeypatch.setattr("flower_dp.cli.launch.launch", lambda begun, folder, *, check: given.update(begun=begun))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        cli.main(shlex.split(run.command)[1:])
    assert given["begun"] == run.launched
    assert run.config["learning-rate"] == 1.0


def test_workers_of_a_run(runs):
    assert [run.launched.workers for run in runs("seeds = 3", cores=2)] == [1, 1, 1]
    assert [run.launched.workers for run in runs("seeds = 3", cores=13)] == [4, 4, 4]
    assert runs("seeds = 3\nworkers = 2\nsupernodes = 5", cores=13)[0].launched.supernodes == 5


def test_settings_that_the_app_does_not_have(runs, own_app):
    with pytest.raises(SettingsError) as caught:
        runs("[settings]\nnum-round = 3\n[grid]\n'METHOD.clip' = [1.0]\nmethod = ['dp-fedavg', 'nbafl']")
    lines = str(caught.value).splitlines()
    assert lines[0] == "num-round: unknown setting of flower-dp; did you mean num-rounds?"
    assert lines[1].startswith("dp-fedavg.clip: unknown setting of flower-dp; did you mean dp-fedavg.clip-norm? (point dp-fedavg")
    text = (own_app / "pyproject.toml").read_text()
    (own_app / "pyproject.toml").write_text(text.replace("seed = 0\n", ""))
    (own_app / "my_app.py").write_text("server = client = None")
    with pytest.raises(SettingsError, match="seeds: mine has no setting `seed`"):
        runs("app = 'mine'")


def test_every_point_is_checked_before_a_run_starts(runs):
    with pytest.raises(SettingsError) as caught:
        plan.check(runs("seeds = 2\n[settings]\nbatch-size = 0\n[grid]\n'dp-fedsam.clip-norm' = [-1.0, 1.0, -2.0]"))
    of_all, first, second = str(caught.value).splitlines()
    assert of_all.startswith("batch-size=0: ")
    assert "(point" not in of_all
    assert first.startswith("dp-fedsam.clip-norm=-1.0: ")
    assert first.endswith(" (point dp-fedsam.clip-norm=-1.0)")
    assert second.endswith(" (point dp-fedsam.clip-norm=-2.0)")
    plan.check(runs("[grid]\n'dp-fedsam.clip-norm' = [0.5, 1.0]"))


def test_a_forecast_refuses_what_a_run_refuses_when_it_begins(runs, monkeypatch):
    def cost(config):
        raise ValueError(f"num-rounds={config['num-rounds']}: no round can be run")

    loaded = plan.plugins.load_plugin
    monkeypatch.setattr(
        plan.plugins, "load_plugin", lambda app, name: nullcontext(cost) if name == app.cost else loaded(app, name)
    )
    with pytest.raises(SettingsError) as caught:
        plan.check(runs("[settings]\nmethod = 'dp-fedavg'\n[grid]\nbatch-size = [0, 4]"), forecast=True)
    first, second = str(caught.value).splitlines()
    assert first.startswith("batch-size=0: ")
    assert second == "num-rounds=150: no round can be run (point batch-size=4)"
