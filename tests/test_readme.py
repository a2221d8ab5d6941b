"""The README's own examples run, with the client of docs/your-own-app.md."""

import logging
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from flwr.app import Context
from flwr.cli.config_utils import load_and_validate
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn

from flower_dp.running.apps import own_module, read_app
from flower_dp.running.new_app import write_app
from tests.grids import LocalGrid

REPOSITORY = Path(__file__).resolve().parent.parent
README, OWN_APP = REPOSITORY / "README.md", REPOSITORY / "docs" / "your-own-app.md"


def make_model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def block(page, word):
    """Return the first block of Python on a page that has a word."""
    return next(code for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL) if word in code)


@pytest.mark.slow
def test_the_drop_in_server_and_the_client_run_together(caplog):
    server, client = block(README, "DPFedAvg("), block(OWN_APP, "DPClient(")
    inputs, targets = torch.randn(8, 3), torch.randint(0, 2, (8,))
    names = {"make_model": make_model, "inputs": inputs, "targets": targets}
    exec(server.replace("num_clients=1000", "num_clients=1"), server_names := dict(names))  # noqa: S102
    exec(client, client_names := dict(names))  # noqa: S102
    grid = LocalGrid(client_names["app"], 1)
    with caplog.at_level(logging.INFO):
        server_names["main"](grid, Context)
    shown = [record.getMessage() for record in caplog.records]
    assert shown.count("Privacy statement: DP-FedAvg") == 1
    page = re.search(r"^```\n(Privacy statement: .*?)\n```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    start = shown.index("Privacy statement: DP-FedAvg")
    assert shown[start:][: len(page.splitlines())] == page.splitlines()


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """The app that `flower-dp new digits` makes."""
    write_app(tmp_path / "digits")
    monkeypatch.syspath_prepend(tmp_path / "digits")
    own = types.ModuleType("my_model")
    own.make_model, own.evaluate, own.load_records = make_model, lambda model: {}, lambda client, num_clients: None
    monkeypatch.setitem(sys.modules, "my_model", own)
    yield tmp_path / "digits"
    for name in [name for name in sys.modules if name.partition(".")[0] == "digits"]:
        del sys.modules[name]


@pytest.mark.parametrize("page", [README, OWN_APP])
def test_the_lines_for_a_model_and_data_of_ones_own_make_a_whole_app(page, on_path):
    code, project = block(page, "flower_dp.app("), on_path / "pyproject.toml"
    if page == README:  # it shows what `flower-dp new` writes
        assert (on_path / "digits" / "app.py").read_text().endswith(code)
    else:
        (settings,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        project.write_text(settings)
    exec(code, answer := {})  # noqa: S102
    assert (type(answer["app"].server), type(answer["app"].client)) == (ServerApp, ClientApp)
    assert load_and_validate(project, check_module=page == README)[1] == []
    own_module("methods").ParsedRunConfig.of(read_app(on_path).defaults, own_model=True).strategy(lambda: {})


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", README.read_text(encoding="utf-8"))
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://") and not (REPOSITORY / link).exists()] == []
