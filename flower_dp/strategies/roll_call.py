"""The roll call: nodes say which clients they host, and which methods they run.

All nodes of a run execute the same ClientApp, so one node's answer tells whether nodes can be asked for names; where they can't,
as with stock clients, every node is one client.
"""

import json
import logging
import time
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
# Seconds until a node that could not say whom it hosts is asked again: doubled each time, since a question starts a process.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
# What Flower itself says for a ClientApp that has no answer to a question: one of the Message API, and one around a client_fn.
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


class NoAnswerError(Exception):
    """A node can't say now whom it hosts, and is not known for a stock client either; the text says why."""


class RollCall:
    """Asks nodes whom they host, in the one way that the run's ClientApp understands.

    An app counts as stock only where Flower itself says that it has nothing to answer with. An app that fails is not taken for a
    stock one: its clients may have policies, budgets and names of their own.

    Attributes:
        dialect: what the nodes' app speaks; None until a node has answered.
        hosting: whether nodes name the clients that they host; else every node is one stock client.
        failures: why nodes can't say now whom they host.
    """

    def __init__(self) -> None:
        self.dialect: Dialect | None = None
        self.failures: dict[int, str] = {}
        self._question: _Question | None = None
        # Node id -> the pause after its last failure, and when that ends.
        self._pauses: dict[int, tuple[float, float]] = {}

    @property
    def hosting(self) -> bool:
        """Whether nodes name their clients."""
        return self._question is not None

    def ask(self, grid: Grid, nodes: Iterable[int]) -> dict[int, Hosted]:
        """Return what these nodes say of themselves; who does not answer now is not in it, and can be asked again.

        Raises:
            ValueError: if a node can't say whom it hosts.
        """
        new = sorted(node for node in nodes if self._pauses.get(node, (0.0, 0.0))[1] <= time.monotonic())
        if new and self.dialect is None:
            self._find_out(grid, new)
            new = [node for node in new if node not in self.failures]
        if not new or self.dialect is None:
            return {}
        if self._question is None:
            self.failures.clear()  # all nodes run the same app
            return {node: Hosted(names=(f"node-{node}",), methods=frozenset()) for node in new}
        return self._ask(grid, new, self._question)

    def _find_out(self, grid: Grid, nodes: list[int]) -> None:
        """Learn what the run's ClientApp speaks from the first node that tells."""
        if not self._pauses:
            log.info(
                "Asking nodes whom they host; a stock client knows no such question, and its SuperNode may log that as an error"
            )
        for node in nodes:
            try:
                self._question, self.dialect = _kind(grid, node)
            except NoAnswerError as error:
                self._failed(node, str(error))
            else:
                self.failures.pop(node, None)
                return

    def _ask(self, grid: Grid, nodes: list[int], question: _Question) -> dict[int, Hosted]:
        hosted = {}
        for reply in _send(grid, [question(node) for node in nodes]):
            node = reply.metadata.src_node_id
            if reply.has_error():
                self._failed(node, reply.error.reason or "an error without words")
                continue
            told = _told(reply)
            if told is None:
                raise ValueError(f"node {node} does not say which clients it hosts")
            hosted[node] = told
            self.failures.pop(node, None)
        return hosted

    def _failed(self, node: int, reason: str) -> None:
        """Write down that a node can't answer now; it is asked again after a pause."""
        log.warning("node %s can't say whom it hosts: %s", node, reason)
        pause = min(2 * self._pauses.get(node, (_FIRST_PAUSE_SECONDS / 2, 0.0))[0], _LONGEST_PAUSE_SECONDS)
        self._pauses[node] = pause, time.monotonic() + pause
        self.failures[node] = reason


def _kind(grid: Grid, node: int) -> tuple[_Question | None, Dialect]:
    """Find out what a node's app speaks, and the question that it answers; None for a stock client, which answers none.

    Raises:
        NoAnswerError: if the node does not answer, or its app fails in a way that a stock client does not.
    """
    message_api, reasons = False, []
    for question, dialect in _QUESTIONS:
        if message_api and dialect is NUMPY_CLIENT:
            continue
        with HeldErrors() as held:
            reply = next(iter(_send(grid, [question(node)])), None)
            if reply is None:
                raise NoAnswerError("no answer")
            reason = reply.error.reason or "" if reply.has_error() else ""
            if any(words in reason for words in (_NO_QUERIES, _NO_SUCH_MESSAGE, wire.DECLINED)) or message_api:
                held.drop()
        if reply.has_error():
            if reply.error.code not in APP_RAISED:
                raise NoAnswerError(reason)
            message_api |= _NO_QUERIES in reason
            reasons.append(reason)
        elif _told(reply) is not None:
            return question, dialect
        elif dialect is NUMPY_CLIENT:
            return None, NUMPY_CLIENT
        else:  # a stock app may answer queries of its own; its train function may have a mod of ours
            message_api = True
    if message_api:
        return None, MESSAGE_API
    telling = next((reason for reason in reasons if _NO_SUCH_MESSAGE not in reason), reasons[0])
    raise NoAnswerError(f"its app fails, and not as a stock client's does: {telling}")


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
