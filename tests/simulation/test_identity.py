import importlib.metadata

import pytest

from flower_dp.simulation import flwr_internals


@pytest.fixture
def afresh():
    """The check is made once a process."""
    flwr_internals._identity.cache_clear()
    yield
    flwr_internals._identity.cache_clear()
    flwr_internals.identify(1, 1)


@pytest.mark.usefixtures("afresh")
def test_a_flower_that_keeps_it_elsewhere_is_refused_by_its_version(monkeypatch):
    from flwr.supercore import task_identity  # noqa: TID251

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.99.0")
    with monkeypatch.context() as patch:
        patch.delattr(task_identity, "TaskIdentity")
        with pytest.raises(flwr_internals.FlowerVersionError, match=r"flwr 1\.99\.0.*ImportError.*plain `flwr run`"):
            flwr_internals.identify(1, 1)
    with monkeypatch.context() as patch:  # it is there, and messages are made without it
        patch.setattr(task_identity, "TaskIdentity", type("Other", (), {"_task_id": 1, "_run_id": 1, "_node_id": 1}))
        with pytest.raises(flwr_internals.FlowerVersionError, match="its messages have run, nodes and number"):
            flwr_internals.identify(1, 1)
    flwr_internals.identify(1, 1)  # one that is as it was is known, whatever its number
