"""The roll call: the server asks nodes which clients they host and which methods they run.

All nodes of a run execute the same ClientApp, so the answer of one node shows whether nodes can be asked for names. If they
can't, as with stock clients, every node is one client.
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

# Node id -> the message that asks which clients it hosts.
_Question = Callable[[int], Message]

_ANSWER_SECONDS = 600.0
_MOST_RECORDS, _MOST_CHARACTERS = 8, 2**27
# Flower's error texts for a ClientApp that does not know the question: one of the Message API, and one around a client_fn.
_NO_QUERIES, _NO_SUCH_MESSAGE = "No query function registered", "Invalid message type"


def _properties_query(node: int) -> Message:
    return Message(RecordDict({"getpropertiesins.config": ConfigRecord({})}), node, "get_properties")


# The questions in the order in which they are asked, and the dialect of an app that answers. Only a `NumPyClient` has properties.
# An app without a query function can't answer a query, but a mod sees messages to its train function: a stock train function
# finds no model in that message and raises.
_QUESTIONS: tuple[tuple[_Question, Dialect], ...] = (
    (partial(wire.roll_call, message_type="query"), MESSAGE_API),
    (_properties_query, NUMPY_CLIENT),
    (partial(wire.roll_call, message_type="train"), MESSAGE_API),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """A node's answer: the clients that it hosts, and the methods that they run."""

    names: tuple[str, ...]
    methods: frozenset[str]


class RollCall:
    """Asks nodes which clients they host, by the question that the run's ClientApp can answer.

    Attributes:
        dialect: the record names that the nodes' app uses; None until a node has answered.
        hosting: whether nodes name the clients that they host; otherwise every node is one stock client.
    """

    def __init__(self) -> None:
        self.dialect: Dialect | None = None
        self._question: _Question | None = None

    @property
    def hosting(self) -> bool:
        """Whether nodes name their clients."""
        return self._question is not None

    def ask(self, grid: Grid, nodes: Iterable[int]) -> dict[int, Hosted]:
        """Return the answers of these nodes. A node that does not answer now is left out, and can be asked again.

        Raises:
            ValueError: if a node's answer is malformed.
        """
        new = sorted(nodes)
        if new and self.dialect is None:
            log.info(
                "Asking nodes for their clients; a stock client does not know this question, and its SuperNode may log an error"
            )
            self._question, self.dialect = _kind(grid, new)
        if not new or self.dialect is None:
            return {}
        if self._question is None:
            return {node: Hosted(names=(f"node-{node}",), methods=frozenset()) for node in new}
        return _ask(grid, new, self._question)


def _kind(grid: Grid, nodes: list[int]) -> tuple[_Question | None, Dialect | None]:
    """Find the question that the run's ClientApp answers, and its dialect, from the first node that replies."""
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
                if _read_hosted(reply) is not None:
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
    """Ask nodes which clients they host; a node that does not answer is asked again."""
    hosted = {}
    for reply in _send(grid, [question(node) for node in nodes]):
        node = reply.metadata.src_node_id
        if reply.has_error():
            log.warning("node %s: %s", node, reply.error.reason)
            continue
        answer = _read_hosted(reply)
        if answer is None:
            raise ValueError(f"node {node} does not say which clients it hosts")
        hosted[node] = answer
    return hosted


def _send(grid: Grid, messages: list[Message]) -> list[Message]:
    return list(grid.send_and_receive(messages, timeout=_ANSWER_SECONDS))


def _read_hosted(reply: Message) -> Hosted | None:
    """Read the names of hosted clients and their methods from either kind of answer; None if it has none."""
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
