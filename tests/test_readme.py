"""The README's own examples run."""

import logging
import re
from pathlib import Path

import pytest
import torch
from flwr.app import Context
from torch import nn

from tests.grids import LocalGrid

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def make_model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_drop_in_server_and_the_client_run_together(caplog):
    server, client = blocks()
    inputs, targets = torch.randn(8, 3), torch.randint(0, 2, (8,))
    names = {"make_model": make_model, "inputs": inputs, "targets": targets}
    exec(server.replace("num_clients=100", "num_clients=1"), server_names := dict(names))  # noqa: S102
    exec(client, client_names := dict(names))  # noqa: S102
    grid = LocalGrid(client_names["app"], 1)
    with caplog.at_level(logging.INFO):
        server_names["main"](grid, Context)
    shown = [record.getMessage() for record in caplog.records]
    assert shown.count("Privacy statement: DP-FedAvg") == 1
    assert sum("over 50 rounds" in line for line in shown) == 1
