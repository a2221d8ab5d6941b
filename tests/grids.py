"""A Grid in this process: it calls a ClientApp with one Context a node, so that strategies can be tested without a simulation."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity  # noqa: TID251

from flower_dp import wire

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def asks_to_train(message: Message) -> bool:
    """Whether a message is of a round of training; a client query may come as a train message too, without a model."""
    return message.metadata.message_type == "train" and not wire.is_client_query(message)


class LocalGrid(Grid):
    """Nodes 1 to n, each with its own context; `tamper` may change, drop or multiply a node's replies.

    `sent` has all messages but roll calls that come as train messages, `received` the replies of rounds of training.
    """

    def __init__(
        self,
        app: ClientApp,
        num_nodes: int,
        *,
        tamper: Callable[[int, Message], Iterable[Message]] | None = None,
        **run_config: Any,
    ) -> None:
        self.app = app
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=run_config,
            )
            for node in range(1, num_nodes + 1)
        }
        self.tamper = tamper
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.waiting: list[Message] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)  # what Flower's old server API asks for

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Ask at once; a message that `send_and_receive` loses has an id as well."""
        ids = []
        for message in messages:
            self.waiting.extend(self.send_and_receive([message], timeout=0.0))
            ids.append(message.metadata.message_id or str(uuid4()))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = set(message_ids)
        out = [reply for reply in self.waiting if reply.metadata.reply_to_message_id in asked]
        self.waiting = [reply for reply in self.waiting if reply not in out]
        return out

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            train = asks_to_train(message)
            if train or message.metadata.message_type != "train":
                self.sent.append(message)
            message.metadata.__dict__["_message_id"] = str(uuid4())  # as Flower's own grids do
            node = message.metadata.dst_node_id
            try:
                reply = self.app(message, self.contexts[node])
            except Exception as error:
                reply = Message(Error(code=2, reason=str(error)), reply_to=message)
            out = list(self.tamper(node, reply)) if self.tamper and train else [reply]
            if train:
                self.received.extend(out)
            replies.extend(out)
        return replies
