"""flower-dp new: an app that Flower accepts, and that flower-dp runs."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from flwr.cli.config_utils import load_and_validate

from flower_dp.running import apps
from flower_dp.running.new_app import write_app


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An app on sys.path, as in a run."""
    folder = tmp_path / "try-this"
    assert write_app(folder) == "try_this"
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "try_this"]:
        del sys.modules[name]


def test_flower_and_flower_dp_accept_it(folder):
    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert (config["project"]["name"], warnings) == ("try-this", [])
    app = apps.read_app(folder)
    assert (app.name, app.server, app.client) == ("try-this", "try_this.app:app.server", "try_this.app:app.client")


def test_its_clients_share_no_record_with_each_other_nor_with_the_test(folder):
    data = importlib.import_module("try_this.data")
    parts = [data.load_records(client, 200) for client in range(200)]
    test = data.public_records()
    assert sum(len(targets) for _, targets in parts) + len(test[1]) == 1797
    assert {len(targets) for _, targets in parts} == {7, 8}
    rows = torch.cat([inputs for inputs, _ in parts] + [test[0]])
    assert len(torch.unique(rows, dim=0)) == 1797
    assert rows.abs().max() <= 1
    model = importlib.import_module("try_this.model")
    assert set(model.evaluate(model.make_model())) == {"loss", "accuracy"}


@pytest.mark.parametrize("name", ["torch", "my_app", "class", "flower-dp", ""])
def test_a_name_that_is_no_apps_name_is_refused_and_nothing_is_written(name, tmp_path):
    with pytest.raises(ValueError, match=r"must be lowercase letters|is the name of an installed package"):
        write_app(tmp_path / "in" / name if name else Path("/"))
    assert not (tmp_path / "in").exists()


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "mine").mkdir()
    write_app(tmp_path / "mine")
    (tmp_path / "mine" / "mine" / "model.py").write_text("my own")
    with pytest.raises(ValueError, match="mine: exists already"):
        write_app(tmp_path / "mine")
    assert (tmp_path / "mine" / "mine" / "model.py").read_text() == "my own"
