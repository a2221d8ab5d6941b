"""What stands for torch's compiler while `torch.func` differentiates."""

import sys
from types import SimpleNamespace

import pytest
import torch

from flower_dp.clients.training import per_record
from flower_dp.clients.training.per_record import without_compiler


@pytest.fixture
def never_imported(monkeypatch):
    """A process in which nobody has imported the compiler."""
    for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
        monkeypatch.delitem(sys.modules, name)
    before = vars(torch).pop("_dynamo", None)
    yield
    vars(torch).pop("_dynamo", None)
    if before is not None:
        torch._dynamo = before


@pytest.mark.usefixtures("never_imported")
def test_it_is_imported_for_whoever_asks_for_more_than_compiled_autograd_to_be_off(monkeypatch):
    asked = []
    monkeypatch.setattr(per_record.importlib, "import_module", lambda name: asked.append(name) or SimpleNamespace(more=name))
    with without_compiler():
        with torch._dynamo.compiled_autograd._disable():
            assert asked == []
        assert torch._dynamo.more == "torch._dynamo"
        assert torch._dynamo.compiled_autograd.more == "torch._dynamo.compiled_autograd"
    assert "_dynamo" not in vars(torch)


@pytest.mark.usefixtures("never_imported")
def test_one_that_is_imported_meanwhile_stays():
    theirs = SimpleNamespace()
    with without_compiler():
        torch._dynamo = theirs
    assert vars(torch)["_dynamo"] is theirs


@pytest.mark.usefixtures("never_imported")
def test_one_that_is_there_is_left_alone(monkeypatch):
    torch._dynamo = theirs = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch._dynamo", theirs)
    with without_compiler():
        assert torch._dynamo is theirs
    assert torch._dynamo is theirs
