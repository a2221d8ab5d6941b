"""A Grid in this process that calls a ClientApp at once, one node after another, and keeps what was sent back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.simulation.flwr_internals import CLIENT_APP_RAISED, SERVER_NODE, identify, numbered, run_of
from flower_dp.simulation.worker import FIRST_NODE, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message to a node, and the node's reply."""

    message: Message
    reply: Message


class SimulatedGrid(Grid):
    """What simulations share of Flower's Grid: one run, whose nodes are all there from the start.

    From here on messages that this process makes are of this run.

    Args:
        run_id: the run.
        run_config: its settings.
    """

    # What a strategy may ask a grid: all nodes are there from the start, and none will come later.
    simulated = True

    def __init__(self, run_id: int, run_config: Mapping[str, Value]) -> None:
        identify(run_id, SERVER_NODE)
        self._run, self._run_config = run_of(run_id), dict(run_config)

    def server_context(self) -> Context:
        """Return the context of a ServerApp that runs with this grid."""
        config = dict(self._run_config)
        return Context(run_id=self._run.run_id, node_id=SERVER_NODE, node_config={}, state=RecordDict(), run_config=config)

    def close(self) -> None:
        """End what is still at work."""

    def set_run(self, run: Any) -> None:
        """Set the run; for Flower's own programs."""
        self._run = run

    @property
    def run(self) -> Any:
        """Flower's record of the run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


class LocalGrid(SimulatedGrid):
    """Nodes 2, 3, ..., each with a context of its own; what they send are Flower's own messages.

    Attributes:
        silent: nodes whose replies to training never arrive.
        exchanged: the messages of training and their replies, the last of each node.

    Args:
        app: the ClientApp of all nodes.
        num_nodes: how many there are. Without any, as where a statement is made from a run folder, nothing is sent.
        run_config: the settings that the ServerApp and the nodes get.
    """

    def __init__(self, app: ClientApp, num_nodes: int, run_config: Mapping[str, Value] | None = None) -> None:
        super().__init__(1, run_config or {})
        self._app, self._waiting = app, list[Message]()
        self._contexts = {
            FIRST_NODE + part: Context(
                run_id=1,
                node_id=FIRST_NODE + part,
                node_config={"partition-id": part, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(self._run_config),
            )
            for part in range(num_nodes)
        }
        self.silent: frozenset[int] = frozenset()
        self.exchanged: dict[int, Sent] = {}

    def forget(self) -> None:
        """Give every node an empty state, as in a new run."""
        for context in self._contexts.values():
            context.state = RecordDict()
        self.exchanged.clear()

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes, in the order of their partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Ask at once, and return the ids of the messages."""
        asked = list(messages)
        self._waiting.extend(self.send_and_receive(asked))
        return [str(message.metadata.message_id) for message in asked]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages; each is returned once."""
        asked = set(message_ids)
        found = [reply for reply in self._waiting if reply.metadata.reply_to_message_id in asked]
        self._waiting = [reply for reply in self._waiting if reply.metadata.reply_to_message_id not in asked]
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the nodes' replies."""
        replies = []
        for message in messages:
            numbered(message)
            node, trains = message.metadata.dst_node_id, _trains(message)
            if trains and node in self.silent:
                continue
            try:
                reply = self._app(message, self._contexts[node])
            except Exception as error:
                reply = Message(Error(code=CLIENT_APP_RAISED, reason=str(error)), reply_to=message)
            if trains:
                self.exchanged[node] = Sent(message=message, reply=reply)
            replies.append(reply)
        return replies


def _trains(message: Message) -> bool:
    """Return whether a message is of a round of training; a client query may come as a train message too."""
    return message.metadata.message_type == "train" and not wire.is_client_query(message)
