"""The private parts of Flower that a Grid outside Flower's runtime needs. No other module imports `flwr.supercore`.

Flower's `Message` reads run, node and task from a class in the process, which Flower's own programs fill in. A message gets its
number from the Grid that sends it.
"""

import importlib.metadata
from functools import lru_cache
from typing import Any
from uuid import uuid4

from flwr.app import Message, RecordDict

# The node that a ServerApp runs on.
SERVER_NODE = 1
# Flower's codes of error replies.
LOAD_CLIENT_APP, CLIENT_APP_RAISED, NODE_UNAVAILABLE, CLIENT_APP_CRASHED = 1, 2, 5, 8

_KNOWN = "1.41 or later, below 2"
_TASK = 1


class FlowerVersionError(RuntimeError):
    """An installed Flower that this module does not know."""


def identify(run_id: int, node_id: int) -> None:
    """Set the run and node of all messages that this process makes from now on.

    Raises:
        FlowerVersionError: if this release of Flower sets them in another way.
    """
    identity = _identity()
    identity.task_id, identity.run_id, identity.node_id = _TASK, run_id, node_id


def numbered(message: Message) -> str:
    """Give a message a new number, which its reply will refer to, and return the number."""
    number = str(uuid4())
    message.metadata.__dict__["_message_id"] = number
    return number


def run_of(run_id: int) -> Any:
    """Return Flower's record of a run."""
    from flwr.supercore.run import Run  # noqa: PLC0415, TID251

    return Run.create_empty(run_id)


@lru_cache(maxsize=1)
def _identity() -> Any:
    """Return Flower's class, after a check that messages take run and node from it."""
    try:
        from flwr.supercore.task_identity import TaskIdentity  # noqa: PLC0415, TID251

        before = [getattr(TaskIdentity, name) for name in ("_task_id", "_run_id", "_node_id")]
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 2, 3, 4
        made = Message(RecordDict(), 5, "train")
        number = numbered(made)
        reply = Message(RecordDict(), reply_to=made)
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = before
        got = made.metadata.run_id, made.metadata.src_node_id, reply.metadata.src_node_id, reply.metadata.reply_to_message_id
        if got != (3, 4, 5, number):
            raise ValueError(f"its messages have run, nodes and number {got}")
    except Exception as error:  # any error here means that simulations can't run with this Flower
        raise FlowerVersionError(
            f"flwr {importlib.metadata.version('flwr')}: simulations on Ray without Flower's runtime know flwr {_KNOWN} "
            f"({type(error).__name__}: {error}); install one that this flower-dp knows, or run the app with plain `flwr run`"
        ) from error
    return TaskIdentity
