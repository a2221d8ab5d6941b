"""What tests of sweeps share."""

import json

import pytest
import tomli_w

from flower_dp.strategies.checkpoint import NEWEST, Checkpoint, CheckpointFolder
from flower_dp.strategies.run_state import RunState
from flower_dp.sweeps import plan
from flower_dp.sweeps.file import read
from flower_dp.sweeps.folder import SweepFolder

APP = """
[project]
name = "mine"

[tool.flwr.app.components]
serverapp = "my_app:server"
clientapp = "my_app:client"

[tool.flwr.app.config]
method = "dp-fedavg"
num-clients = 20
num-rounds = 3
sampling = "full"
batch-size = 4
seed = 0
learning-rate = 0.1
dp-fedavg.delta = 1e-3
dp-fedavg.target-epsilon = 0.0
dp-fedavg.noise-multiplier = 2.0
"""
MODULE = """
import flower_dp

app = flower_dp.app(model_fn=print, data_fn=print)
server, client = app.server, app.client
"""


@pytest.fixture
def own_app(tmp_path):
    """The folder of a small app."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(APP)
    (folder / "my_app.py").write_text(MODULE)
    return folder


@pytest.fixture
def write(tmp_path):
    """Write a sweep's file, and return its path."""

    def written(text, name="sweep.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return written


@pytest.fixture
def runs(write):
    """Plan the runs of a sweep's text."""
    return lambda text, cores=1: plan.planned(read(write(text)), cores)


@pytest.fixture
def folder(tmp_path):
    """The folder of a sweep, with nothing in it."""
    found = SweepFolder(tmp_path / "out")
    with found.locked():
        pass
    return found


def finish(folder, config, accuracy=0.5, *, epsilon=2.0, finished=True, **more):
    """Write what a run leaves in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run-config.toml").write_text(tomli_w.dumps(dict(config)))
    rows = [{"round": at, "accuracy": accuracy * at, "epsilon": epsilon * at, "delta": 1e-3} | more for at in (0, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    guarantee = {"private": True, "epsilon": epsilon, "delta": 1e-3, "unit": "client", "relation": "add-or-remove-one"}
    guarantee["protected_against"] = "outsiders"
    (folder / "statement.json").write_text(json.dumps({"format": 2, "guarantee": guarantee}))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "model.json").write_text(json.dumps({} if finished else {"unfinished": "after round 1"}))
    return folder


def checkpoint(run, setting=None, *, ended=False):
    """Write a checkpoint of a run that did not end, and return it."""
    found = CheckpointFolder(run / "checkpoint")
    found.create()
    setting = {"method": "DP-FedAvg"} if setting is None else setting
    found.write(Checkpoint(setting=setting, server_round=1, round_complete=True, state=RunState(), arrays={}, ended=ended))
    return found.path / NEWEST
