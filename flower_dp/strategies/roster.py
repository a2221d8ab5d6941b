"""The roster: which clients there are, and on which node each lives.

A client is not a SuperNode: a device hosts one client, a simulation worker many. Clients have stable names, node ids change with
every run. All nodes of a run execute the same ClientApp, so one node's answer tells whether nodes can be asked for names;
where they can't, as with stock clients, every node is one client.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.strategies.held_errors import HeldErrors
from flower_dp.strategies.replies import APP_RAISED
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Dialect

log = logging.getLogger("flwr")

# Node id -> the message that asks whom it hosts.
_Question = Callable[[int], Message]

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 600.0
_SETTLED_SECONDS = 3.0
_MOST_RECORDS, _MOST_CHARACTERS = 8, 2**27
# What Flower says for a ClientApp that does not answer a question: one of the Message API, and one around a client_fn.
_NO_QUERIES, _NO_SUCH_MESSAGE = "No query function registered", "Invalid message type"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """All clients, in the order of their names, and the node that hosts each.

    Attributes:
        names: of all clients.
        nodes: the node of each client.
        dialect: what the nodes' app speaks.
        hosting: whether nodes name the clients that they host; else every node is one stock client.
        methods: the methods that every node runs; empty for stock clients.
    """

    names: tuple[str, ...]
    nodes: tuple[int, ...]
    dialect: Dialect
    hosting: bool
    methods: frozenset[str] = frozenset()

    def by_node(self, indices: np.ndarray) -> dict[int, tuple[str, ...]]:
        """Group the clients of a cohort by the nodes that host them."""
        groups: dict[int, list[str]] = {}
        for index in indices:
            groups.setdefault(self.nodes[index], []).append(self.names[index])
        return {node: tuple(names) for node, names in groups.items()}


def call_roll(grid: Grid, num_clients: int, *, timeout: float) -> Roster:
    """Wait until exactly `num_clients` clients have registered, and return them.

    Starting with fewer would make the true sampling rate, and so the cost, another than the accounted one.

    Raises:
        TimeoutError: if fewer have registered after `timeout` seconds.
        ValueError: if there are more, or two clients have the same name, or a node can't say whom it hosts.
    """
    deadline = time.monotonic() + timeout
    hosted: dict[int, _Hosted] = {}
    dialect: Dialect | None = None
    question: _Question | None = None
    seen, settled = -1, 0.0
    while True:
        new = sorted(set(grid.get_node_ids()) - set(hosted))
        if new and dialect is None:
            log.info("Asking nodes whom they host; a stock client knows no such question, and its SuperNode may log that as an error")
            question, dialect = _kind(grid, new)
        if new and dialect is not None:
            stock = {node: _Hosted(names=(f"node-{node}",), methods=frozenset()) for node in new}
            hosted |= stock if question is None else _ask(grid, new, question)
        count = sum(len(node.names) for node in hosted.values())
        if count >= num_clients:
            break
        if count != seen:
            seen, settled = count, time.monotonic()
            log.info("%s of %s clients registered", count, num_clients)
        # In a simulation all nodes are there from the start, a moment after the server.
        if type(grid).__name__ == "InMemoryGrid" and hosted and time.monotonic() > settled + _SETTLED_SECONDS:
            raise ValueError(f"num_clients={num_clients}: the simulation has {count} clients on {len(hosted)} nodes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"num_clients={num_clients}: only {count} clients on {len(hosted)} nodes after {timeout:g} s")
        time.sleep(_POLL_SECONDS)
    pairs = sorted((name, node) for node, told in hosted.items() for name in told.names)
    names = tuple(name for name, _ in pairs)
    if len(set(names)) != len(names):
        twice = next(name for name, after in itertools.pairwise(names) if name == after)
        raise ValueError(f"client name {twice!r} is hosted twice: names must be unique")
    if len(names) != num_clients:
        raise ValueError(f"num_clients={num_clients}: {len(names)} clients have registered; set num_clients={len(names)}")
    return Roster(
        names=names,
        nodes=tuple(node for _, node in pairs),
        dialect=dialect or MESSAGE_API,
        hosting=question is not None,
        methods=frozenset.intersection(*(told.methods for told in hosted.values())),
    )


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
class _Hosted:
    """What a node says of itself."""

    names: tuple[str, ...]
    methods: frozenset[str]


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


def _ask(grid: Grid, nodes: list[int], question: _Question) -> dict[int, _Hosted]:
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


def _told(reply: Message) -> _Hosted | None:
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
            return _Hosted(names=tuple(names), methods=frozenset(methods))
    return None
