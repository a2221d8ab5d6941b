"""A Grid in this process that calls a ClientApp at once, one node after another, and keeps the replies."""

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
    """The base of simulated grids: one run, whose nodes all exist from the start.

    After construction, all messages that this process makes belong to this run.

    Args:
        run_id: id of the run.
        run_config: settings of the run.
    """

    # Strategies read it: all nodes exist from the start, so a strategy need not wait for others.
    simulated = True

    def __init__(self, run_id: int, run_config: Mapping[str, Value]) -> None:
        identify(run_id, SERVER_NODE)
        self._run, self._run_config = run_of(run_id), dict(run_config)

    def server_context(self) -> Context:
        """Return the context of a ServerApp that runs with this grid."""
        config = dict(self._run_config)
        return Context(run_id=self._run.run_id, node_id=SERVER_NODE, node_config={}, state=RecordDict(), run_config=config)

    def close(self) -> None:
        """End what still runs; nothing here."""

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
    """A grid of nodes 2, 3, ... in this process, each with a context of its own. Replies are Flower's own messages.

    Attributes:
        silent: nodes whose replies to training never arrive.
        exchanged: last training message and its reply, by node.

    Args:
        app: ClientApp of all nodes.
        num_nodes: number of nodes; 0 to send nothing, as for a statement from a run folder.
        run_config: settings for the ServerApp and the nodes.
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
        """Send messages, keep the replies, and return the ids of the messages."""
        sent = list(messages)
        self._waiting.extend(self.send_and_receive(sent))
        return [str(message.metadata.message_id) for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each once."""
        ids = set(message_ids)
        replies = [reply for reply in self._waiting if reply.metadata.reply_to_message_id in ids]
        self._waiting = [reply for reply in self._waiting if reply.metadata.reply_to_message_id not in ids]
        return replies

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
    """Return whether a message belongs to a round of training. A client query may be a train message too."""
    return message.metadata.message_type == "train" and not wire.is_client_query(message)
