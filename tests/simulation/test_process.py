"""The process of `flower-dp run --engine ray`, without Ray: what is checked, and when."""

import json

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


def test_what_an_apps_own_check_refuses_is_the_outcome(steps, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "pyproject.toml").write_text(APP + '[tool.flower-dp]\ncheck = "refusing_app:check"\n')
    (tmp_path / "refusing_app.py").write_text(
        "def check(config):\n    raise ValueError(f'rounds={config[\"rounds\"]}: must be less')\n"
    )
    request = request_of(tmp_path, rounds=9) | {"folder": str(tmp_path), "outcome": str(tmp_path / "outcome.json")}
    (tmp_path / "request.json").write_text(json.dumps(request))
    process.main(str(tmp_path / "request.json"))
    assert json.loads((tmp_path / "outcome.json").read_text()) == {"status": "refused", "details": "rounds=9: must be less"}
    assert not list(tmp_path.glob("**/__pycache__"))
