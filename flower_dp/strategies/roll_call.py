"""The roll call: the server asks nodes which clients they host and which methods they run.

All nodes of a run execute the same ClientApp, so the answer of one node shows whether nodes can be asked for names. If they
can't, as with stock clients, every node is one client.
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
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, RecordNames

log = logging.getLogger("flwr")

# Node id -> the message that asks which clients it hosts.
_Question = Callable[[int], Message]

_ANSWER_SECONDS = 600.0
_MOST_RECORDS, _MOST_CHARACTERS = 8, 2**27
# Seconds until a node that could not answer is asked again: doubled each time, since every question starts a process.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
# Flower's error texts for a ClientApp that does not know the question: one of the Message API, and one around a client_fn.
_NO_QUERIES, _NO_SUCH_MESSAGE = "No query function registered", "Invalid message type"


def _properties_query(node: int) -> Message:
    return Message(RecordDict({"getpropertiesins.config": ConfigRecord({})}), node, "get_properties")


# The questions in the order in which they are asked, and the record names of an app that answers. Only a `NumPyClient` has
# properties. An app without a query function can't answer a query, but a mod sees messages to its train function: a stock train
# function finds no model in that message and raises.
_QUESTIONS: tuple[tuple[_Question, RecordNames], ...] = (
    (partial(wire.roll_call, message_type="query"), MESSAGE_API),
    (_properties_query, NUMPY_CLIENT),
    (partial(wire.roll_call, message_type="train"), MESSAGE_API),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """A node's answer: the clients that it hosts, and the methods that they run."""

    names: tuple[str, ...]
    methods: frozenset[str]


class NoAnswerError(Exception):
    """A node can't say now which clients it hosts, and is not known to be a stock client; the text says why."""


class RollCall:
    """Asks nodes which clients they host, by the question that the run's ClientApp can answer.

    An app counts as stock only if Flower itself reports that it can't answer. An app that fails in another way is not taken for a
    stock app: its clients may have names, policies and budgets.

    Attributes:
        record_names: the record names that the nodes' app uses; None until a node has answered.
        hosting: whether nodes name the clients that they host; otherwise every node is one stock client.
        failures: why nodes can't say now which clients they host.
    """

    def __init__(self) -> None:
        self.record_names: RecordNames | None = None
        self.failures: dict[int, str] = {}
        self._question: _Question | None = None
        # Node id -> the pause after its last failure, and when that ends.
        self._pauses: dict[int, tuple[float, float]] = {}

    @property
    def hosting(self) -> bool:
        """Whether nodes name their clients."""
        return self._question is not None

    def ask(self, grid: Grid, nodes: Iterable[int]) -> dict[int, Hosted]:
        """Return the answers of these nodes. A node that does not answer now is left out, and can be asked again.

        Raises:
            ValueError: if a node's answer is malformed.
        """
        new = sorted(node for node in nodes if self._pauses.get(node, (0.0, 0.0))[1] <= time.monotonic())
        if new and self.record_names is None:
            self._find_out(grid, new)
            new = [node for node in new if node not in self.failures]
        if not new or self.record_names is None:
            return {}
        if self._question is None:
            self.failures.clear()  # all nodes run the same app
            return {node: Hosted(names=(f"node-{node}",), methods=frozenset()) for node in new}
        return self._ask(grid, new, self._question)

    def _find_out(self, grid: Grid, nodes: list[int]) -> None:
        """Find the question that the run's ClientApp answers, and its record names, from the first node that can tell."""
        if not self._pauses:
            log.info(
                "Asking nodes for their clients; a stock client does not know this question, and its SuperNode may log an error"
            )
        for node in nodes:
            try:
                self._question, self.record_names = _kind(grid, node)
            except NoAnswerError as error:
                self._failed(node, str(error))
            else:
                self.failures.pop(node, None)
                return

    def _ask(self, grid: Grid, nodes: list[int], question: _Question) -> dict[int, Hosted]:
        """Ask nodes which clients they host; a node that does not answer is asked again."""
        hosted = {}
        for reply in _send(grid, [question(node) for node in nodes]):
            node = reply.metadata.src_node_id
            if reply.has_error():
                self._failed(node, reply.error.reason or "an error without a reason")
                continue
            answer = _read_hosted(reply)
            if answer is None:
                raise ValueError(f"node {node} does not say which clients it hosts")
            hosted[node] = answer
            self.failures.pop(node, None)
        return hosted

    def _failed(self, node: int, reason: str) -> None:
        """Record that a node can't answer now; it is asked again after a pause."""
        log.warning("node %s can't say which clients it hosts: %s", node, reason)
        pause = min(2 * self._pauses.get(node, (_FIRST_PAUSE_SECONDS / 2, 0.0))[0], _LONGEST_PAUSE_SECONDS)
        self._pauses[node] = pause, time.monotonic() + pause
        self.failures[node] = reason


def _kind(grid: Grid, node: int) -> tuple[_Question | None, RecordNames]:
    """Find the question that a node's app answers, and its record names; no question for a stock client.

    Raises:
        NoAnswerError: if the node does not answer, or its app fails in a way that a stock client does not.
    """
    message_api, reasons = False, []
    for question, record_names in _QUESTIONS:
        if message_api and record_names is NUMPY_CLIENT:
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
        elif _read_hosted(reply) is not None:
            return question, record_names
        elif record_names is NUMPY_CLIENT:
            return None, NUMPY_CLIENT
        else:  # a stock app may answer queries of its own; its train function may have a mod of ours
            message_api = True
    if message_api:
        return None, MESSAGE_API
    telling = next((reason for reason in reasons if _NO_SUCH_MESSAGE not in reason), reasons[0])
    raise NoAnswerError(f"its app fails, and it is not known to be a stock client: {telling}")


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
