import importlib.metadata

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

from flower_dp.simulation import identity


@pytest.fixture
def afresh():
    """The check is made once a process."""
    identity._identity.cache_clear()
    yield
    identity._identity.cache_clear()
    identity.identify(1, 1)


def test_the_numbers_are_flowers():
    assert identity.SERVER_NODE == SUPERLINK_NODE_ID
    assert identity.LOAD_CLIENT_APP == ErrorCode.LOAD_CLIENT_APP_EXCEPTION
    assert identity.CLIENT_APP_RAISED == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert identity.NODE_UNAVAILABLE == ErrorCode.NODE_UNAVAILABLE
    assert identity.CLIENT_APP_CRASHED == ErrorCode.CLIENT_APP_CRASHED


@pytest.mark.usefixtures("afresh")
def test_messages_are_of_the_run_and_node_and_a_reply_is_told_by_its_number():
    identity.identify(77, 5)
    made = Message(RecordDict(), 9, "train")
    assert (made.metadata.run_id, made.metadata.src_node_id) == (77, 5)
    numbers = {identity.numbered(made) for _ in range(3)}
    assert len(numbers) == 3
    reply = Message(RecordDict(), reply_to=made)
    assert reply.metadata.reply_to_message_id in numbers
    assert identity.run_of(77).run_id == 77


@pytest.mark.usefixtures("afresh")
def test_a_flower_that_keeps_it_elsewhere_is_refused_by_its_version(monkeypatch):
    from flwr.supercore import task_identity  # noqa: TID251

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.99.0")
    with monkeypatch.context() as patch:
        patch.delattr(task_identity, "TaskIdentity")
        with pytest.raises(identity.FlowerVersionError, match=r"flwr 1\.99\.0.*ImportError.*plain `flwr run`"):
            identity.identify(1, 1)
    with monkeypatch.context() as patch:  # it is there, and messages are made without it
        patch.setattr(task_identity, "TaskIdentity", type("Other", (), {"_task_id": 1, "_run_id": 1, "_node_id": 1}))
        with pytest.raises(identity.FlowerVersionError, match="its messages have run, nodes and number"):
            identity.identify(1, 1)
    identity.identify(1, 1)  # one that is as it was is known, whatever its number
