"""What tests on a pretend device share."""

from dataclasses import replace
from typing import Any

import array_api_compat.torch
import pytest
import torch

from flower_dp.clients import TensorRecords
from flower_dp.clients.training import devices
from tests.contract_runs import SEED, SMALL, Problem, Run, run_of
from tests.contracts import Method, Words
from tests.pretended import device
from tests.pretended.device import DEVICE, Pretend


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.Generator` makes generators on the pretend device as well."""
    for module in (torch, array_api_compat.torch):
        monkeypatch.setattr(module, "Generator", device.Generator)


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is as Apple's GPUs are."""
    monkeypatch.setattr(Pretend, "float64", False)
    monkeypatch.setattr(devices, "_SINGLE_PRECISION", frozenset({device.NAME}))


def moved(own: TensorRecords, *, indices: bool = False) -> TensorRecords:
    """The same records on the device; which rows they are, too, if asked for."""
    rows = own.indices.to(DEVICE) if indices and own.indices is not None else own.indices
    return replace(own, inputs=own.inputs.to(DEVICE), targets=own.targets.to(DEVICE), indices=rows)


def on(problem: Problem, *, here: bool, **node: Any) -> Problem:
    """The same problem for clients that train on the device, whose records are there as well if `here`."""
    data = (lambda name: moved(problem.data(name))) if here else problem.data
    return replace(problem, data=data, node={"device": DEVICE, **node})


def seeded(method: Method, problem: Problem = SMALL, **arguments: Any) -> Run:
    return run_of(method, Words(noise_seed=SEED), problem, noise_seed=SEED, **arguments)
