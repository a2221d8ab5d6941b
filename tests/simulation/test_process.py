"""The process of `flower-dp run --engine ray`, without Ray: what is checked, and when."""

import pytest

from flower_dp.running import preflight
from flower_dp.running.apps import own_app, read_app
from flower_dp.simulation import grid, process, workers

APP = '[project]\nname = "mine"\n[tool.flwr.app.components]\nserverapp = "my_server:app"\n[tool.flwr.app.config]\nrounds = 3\n'


@pytest.fixture
def steps(monkeypatch):
    """The steps of a run in their order, none of which is taken."""
    taken = []
    monkeypatch.setattr(workers, "start_ray", lambda *_: taken.append("Ray"))
    monkeypatch.setattr(workers, "Workers", lambda **_: taken.append("workers"))
    monkeypatch.setattr(grid, "RayGrid", lambda *_, **__: taken.append("grid"))
    return taken


def request_of(folder, **overrides):
    numbers = {"num_workers": 2, "num_nodes": 2, "gpus_per_worker": 0.0}
    rest = {"given": list(overrides), "ray_folder": str(folder), "only_state": False}
    return {"overrides": overrides, **numbers, **rest}


def test_the_workers_import_the_app_while_the_settings_are_checked(steps, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(APP)
    check = preflight.check_settings

    def checked(target):
        steps.append("check")
        assert (target.overrides, target.given) == ({"rounds": -1}, ("rounds",))
        check(target)
        raise ValueError("rounds=-1: must be >= 0")

    monkeypatch.setattr(preflight, "check_settings", checked)
    assert process._run(read_app(tmp_path), request_of(tmp_path, rounds=-1)) == ("refused", "rounds=-1: must be >= 0")
    assert steps == ["Ray", "workers", "grid", "check"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"dp-fedsam.clip-norm": -1.0}, "dp-fedsam.clip-norm=-1.0"),
        ({"data-dir": "/nowhere"}, "data-dir='/nowhere'"),
        ({"nbafl.delta": 0.1}, "nbafl.delta=0.1: is not read by method='dp-fedsam'; set method=nbafl with it"),
    ],
)
def test_the_apps_own_settings_are_refused(steps, tmp_path, overrides, named):
    status, why = process._run(own_app(), request_of(tmp_path, **overrides))
    assert status == "refused"
    assert named in why
    assert len(why.splitlines()) == 1
