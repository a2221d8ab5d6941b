"""The roll call: nodes say which clients they host, and which methods they run.

All nodes of a run execute the same ClientApp, so one node's answer tells whether nodes can be asked for names; where they can't,
as with stock clients, every node is one client.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.strategies.held_errors import HeldErrors
from flower_dp.strategies.replies import APP_RAISED
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Dialect

log = logging.getLogger("flwr")

# Node id -> the message that asks whom it hosts.
_Question = Callable[[int], Message]

_ANSWER_SECONDS = 600.0
_MOST_RECORDS, _MOST_CHARACTERS = 8, 2**27
# What Flower says for a ClientApp that does not answer a question: one of the Message API, and one around a client_fn.
_NO_QUERIES, _NO_SUCH_MESSAGE = "No query function registered", "Invalid message type"


def _properties_query(node: int) -> Message:
    return Message(RecordDict({"getpropertiesins.config": ConfigRecord({})}), node, "get_properties")


# In the order in which an app is asked them, and what it speaks if it answers. Only a `NumPyClient` has properties. Flower has no
# way to answer a query for an app without a query function, but a mod sees what its train function is asked: a stock one finds no
# model in that message and raises.
_QUESTIONS: tuple[tuple[_Question, Dialect], ...] = (
    (partial(wire.roll_call, message_type="query"), MESSAGE_API),
    (_properties_query, NUMPY_CLIENT),
    (partial(wire.roll_call, message_type="train"), MESSAGE_API),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """What a node says of itself."""

    names: tuple[str, ...]
    methods: frozenset[str]


class RollCall:
    """Asks nodes whom they host, in the one way that the run's ClientApp understands.

    Attributes:
        dialect: what the nodes' app speaks; None until a node has answered at all.
        hosting: whether nodes name the clients that they host; else every node is one stock client.
    """

    def __init__(self) -> None:
        self.dialect: Dialect | None = None
        self._question: _Question | None = None

    @property
    def hosting(self) -> bool:
        """Whether nodes name their clients."""
        return self._question is not None

    def ask(self, grid: Grid, nodes: Iterable[int]) -> dict[int, Hosted]:
        """Return what these nodes say of themselves; who does not answer now is not in it, and can be asked again.

        Raises:
            ValueError: if a node can't say whom it hosts.
        """
        new = sorted(nodes)
        if new and self.dialect is None:
            log.info(
                "Asking nodes whom they host; a stock client knows no such question, and its SuperNode may log that as an error"
            )
            self._question, self.dialect = _kind(grid, new)
        if not new or self.dialect is None:
            return {}
        if self._question is None:
            return {node: Hosted(names=(f"node-{node}",), methods=frozenset()) for node in new}
        return _ask(grid, new, self._question)


def _kind(grid: Grid, nodes: list[int]) -> tuple[_Question | None, Dialect | None]:
    """Find out what the run's ClientApp speaks from the first node that answers at all, and the question that it answers."""
    for node in nodes:
        message_api = False
        for question, dialect in _QUESTIONS:
            if message_api and dialect is NUMPY_CLIENT:
                continue
            with HeldErrors() as held:
                reply = next(iter(_send(grid, [question(node)])), None)
                reason = reply.error.reason or "" if reply is not None and reply.has_error() else ""
                if _NO_QUERIES in reason or _NO_SUCH_MESSAGE in reason or (reason and question is _QUESTIONS[-1][0]):
                    held.drop()
            if reply is None:
                break
            if not reply.has_error():
                if _told(reply) is not None:
                    return question, dialect
                if dialect is NUMPY_CLIENT:
                    return None, NUMPY_CLIENT
                # A stock app may answer queries of its own; its train function may have a mod of ours.
                message_api = True
            elif reply.error.code not in APP_RAISED:
                log.warning("node %s: %s", node, reason)
                break
            elif _NO_QUERIES in reason:
                message_api = True
        else:
            return None, MESSAGE_API
    return None, None


def _ask(grid: Grid, nodes: list[int], question: _Question) -> dict[int, Hosted]:
    """Ask nodes whom they host; who does not answer now is asked again."""
    hosted = {}
    for reply in _send(grid, [question(node) for node in nodes]):
        node = reply.metadata.src_node_id
        if reply.has_error():
            log.warning("node %s: %s", node, reply.error.reason)
            continue
        told = _told(reply)
        if told is None:
            raise ValueError(f"node {node} does not say which clients it hosts")
        hosted[node] = told
    return hosted


def _send(grid: Grid, messages: list[Message]) -> list[Message]:
    return list(grid.send_and_receive(messages, timeout=_ANSWER_SECONDS))


def _told(reply: Message) -> Hosted | None:
    """Read the names of hosted clients and their methods off either kind of answer; None if the node has no such thing."""
    for record in list(reply.content.config_records.values())[:_MOST_RECORDS]:
        text = record.get(wire.KEY)
        if isinstance(text, str):
            node = reply.metadata.src_node_id
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"node {node}: its list of clients has {len(text)} characters: at most {_MOST_CHARACTERS}")
            data = json.loads(text)
            if not isinstance(data, dict) or "error" in data or not isinstance(data.get("clients"), list):
                reason = str(data.get("error", "a malformed answer"))[:500] if isinstance(data, dict) else "a malformed answer"
                raise ValueError(f"node {node} has no clients: {reason}")
            names, methods = data["clients"], data.get("methods")
            if not all(isinstance(name, str) and name for name in names):
                raise ValueError(f"node {node}: clients={str(names)[:500]}: must be names that are not empty")
            if not isinstance(methods, list) or not all(isinstance(method, str) for method in methods):
                raise ValueError(f"node {node}: methods={str(methods)[:500]}: must be names; is its flower-dp an older release?")
            return Hosted(names=tuple(names), methods=frozenset(methods))
    return None
