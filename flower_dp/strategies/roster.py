"""The roster: which clients there are, and on which node each lives.

A client is not a SuperNode: a device hosts one client, a simulation worker many. Clients have stable names, node ids change with
every run. All nodes of a run execute the same ClientApp, so one node's answer tells whether nodes can be asked for names;
where they can't, as with stock clients, every node is one client.
"""

import itertools
import json
import logging
import time
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.strategies.replies import APP_RAISED
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Dialect

log = logging.getLogger("flwr")

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 600.0
_SETTLED_SECONDS = 3.0
_MOST_RECORDS, _MOST_CHARACTERS = 8, 2**27


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
    hosting = False
    seen, settled = -1, 0.0
    while True:
        new = sorted(set(grid.get_node_ids()) - set(hosted))
        if new and dialect is None:
            log.info("Asking nodes whom they host; a stock client knows no such question, and Flower may log that as an error")
            hosting, dialect = _kind(grid, new)
        if new and dialect is not None:
            stock = {node: _Hosted(names=(f"node-{node}",), methods=frozenset()) for node in new}
            hosted |= _ask(grid, new, dialect) if hosting else stock
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
        hosting=hosting,
        methods=frozenset.intersection(*(told.methods for told in hosted.values())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hosted:
    """What a node says of itself."""

    names: tuple[str, ...]
    methods: frozenset[str]


def _kind(grid: Grid, nodes: list[int]) -> tuple[bool, Dialect | None]:
    """Find out what the run's ClientApp speaks from the first node that answers at all."""
    for node in nodes:
        for reply in _send(grid, [_hosts_query(node)]):
            if not reply.has_error():
                # A stock app may answer queries of its own.
                return _told(reply) is not None, MESSAGE_API
            if reply.error.code not in APP_RAISED:
                log.warning("node %s: %s", node, reply.error.reason)
                continue
            for properties in _send(grid, [_properties_query(node)]):
                if properties.has_error():
                    return False, MESSAGE_API
                return _told(properties) is not None, NUMPY_CLIENT
    return False, None


def _ask(grid: Grid, nodes: list[int], dialect: Dialect) -> dict[int, _Hosted]:
    """Ask nodes whom they host; who does not answer now is asked again."""
    query = _hosts_query if dialect is MESSAGE_API else _properties_query
    hosted = {}
    for reply in _send(grid, [query(node) for node in nodes]):
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


def _hosts_query(node: int) -> Message:
    return Message(RecordDict({wire.KEY: ConfigRecord({"protocol": wire.PROTOCOL})}), node, "query")


def _properties_query(node: int) -> Message:
    return Message(RecordDict({"getpropertiesins.config": ConfigRecord({})}), node, "get_properties")


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
