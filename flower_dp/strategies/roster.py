"""The roster: which clients are known, and which node hosts each now.

A client is not a SuperNode: a device hosts one client, a simulation worker many. Clients have stable names; node ids change with
every run, and with every restart of a SuperNode without a registered key.
"""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.serverapp import Grid

from flower_dp.strategies.roll_call import Hosted, RollCall
from flower_dp.wire import MESSAGE_API, RecordNames

log = logging.getLogger("flwr")

_POLL_SECONDS = 0.1
_SETTLED_SECONDS = 3.0
_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """All known clients, and the node that hosts each.

    Attributes:
        names: of all clients that have registered in this run.
        nodes: the node of each client; None for a client whose node is not connected now.
        record_names: the record names that the nodes' app uses.
        hosting: whether nodes name the clients that they host; else every node is one stock client.
        methods: the methods that every node runs; empty for stock clients.
    """

    names: tuple[str, ...]
    nodes: tuple[int | None, ...]
    record_names: RecordNames
    hosting: bool
    methods: frozenset[str] = frozenset()

    def by_node(self, indices: np.ndarray) -> dict[int, tuple[str, ...]]:
        """Group the clients of a cohort by the nodes that host them, without clients whose node is not connected now."""
        groups: dict[int, list[str]] = {}
        for index in indices:
            if (node := self.nodes[index]) is not None:
                groups.setdefault(node, []).append(self.names[index])
        return {node: tuple(names) for node, names in groups.items()}


class Register:
    """Keeps the roster of a run, while nodes join, leave and come back under another id.

    A client is known by its name. If its node has left and another node hosts the name, that node has the client from now on.
    While its node is connected, no other node can take the name, so that no client is asked twice in a round.

    Args:
        num_clients: how many clients must have registered before the first round; cohorts and cost are computed for this number.
        timeout: seconds to wait for them.
        newcomers: whether clients that register later take part. If not, there must be exactly `num_clients`.
        unfit: why a node that runs these methods can't take part, None if it can; of later nodes only.
    """

    def __init__(
        self, num_clients: int, *, timeout: float, newcomers: bool, unfit: Callable[[frozenset[str]], str | None] = lambda _: None
    ) -> None:
        self._num_clients, self._timeout, self._newcomers, self._unfit = num_clients, timeout, newcomers, unfit
        self._roll_call = RollCall()
        # The answers of nodes, in the order in which they registered.
        self._hosted: dict[int, Hosted] = {}
        self._there: set[int] = set()
        self._roster: Roster | None = None

    def roster(self, grid: Grid) -> Roster:
        """Return the current roster: at first wait for `num_clients`, later check which nodes have joined and left.

        Raises:
            TimeoutError: if too few clients have registered in time, or no client is connected any more.
            ValueError: if a node can't say whom it hosts, or two clients have the same name, or there are more clients than
                `num_clients` and newcomers can't take part.
        """
        if self._roster is None:
            self._wait(grid)
            self._roster = self._first(grid)
        else:
            self._roster = self._next(grid, self._roster)
        return self._roster

    def _wait(self, grid: Grid) -> None:
        """Wait until at least `num_clients` clients have registered.

        With fewer clients the true sampling rate, and so the cost, would differ from what is accounted.
        """
        deadline, seen, settled = time.monotonic() + self._timeout, -1, 0.0
        while True:
            self._there = set(grid.get_node_ids())
            self._hosted |= self._roll_call.ask(grid, self._there - set(self._hosted))
            count = sum(len(told.names) for node, told in self._hosted.items() if node in self._there)
            if count >= self._num_clients:
                return
            if count != seen:
                seen, settled = count, time.monotonic()
                log.info("%s of %s clients registered", count, self._num_clients)
            # In a simulation all nodes are there from the start, a moment after the server.
            failing = len(self._roll_call.failures)
            complete = self._hosted or failing if _is_simulation(grid) else failing >= max(self._num_clients, len(self._there))
            if complete and time.monotonic() > settled + _SETTLED_SECONDS:
                where = "simulation has" if _is_simulation(grid) else "nodes have"
                raise ValueError(
                    f"num_clients={self._num_clients}: the {where} {count} clients on {len(self._hosted)} nodes{self._failures()}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"num_clients={self._num_clients}: only {count} clients on {len(self._hosted)} nodes after "
                    f"{self._timeout:g} s{self._failures()}"
                )
            time.sleep(_POLL_SECONDS)

    def _failures(self) -> str:
        """Return how many nodes failed to name their clients, and the reason of one of them."""
        failures = self._roll_call.failures
        return next(
            (f"; {len(failures)} can't say which clients they host: node {node}: {why}" for node, why in failures.items()), ""
        )

    def _first(self, grid: Grid) -> Roster:
        names = sorted(name for node in self._there for name in self._names(node))
        for name, after in itertools.pairwise(names):
            if name == after:
                raise ValueError(f"client name {name!r} is hosted twice: names must be unique")
        if len(names) != self._num_clients and (_is_simulation(grid) or not self._newcomers):
            raise ValueError(
                f"num_clients={self._num_clients}: {len(names)} clients have registered; set num_clients={len(names)}"
            )
        return self._placed(tuple(names), {})

    def _next(self, grid: Grid, before: Roster) -> Roster:
        there = set(grid.get_node_ids())
        if there == self._there and there <= set(self._hosted):
            return before
        deadline = time.monotonic() + self._timeout
        while not self._ask_new(grid, there):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no client is connected any more, and none has registered within {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)
            there = set(grid.get_node_ids())
        known = dict.fromkeys(before.names)
        come = [name for node in there for name in self._names(node) if name not in known]
        if come and self._newcomers:
            log.info(
                "%s clients have joined: %s; %s are known, num_clients=%s", *_few(come), len(known) + len(come), self._num_clients
            )
        elif come:
            log.warning("%s clients have joined and are not asked: %s; this method has terms for those of its start", *_few(come))
            come = []
        after = self._placed((*before.names, *sorted(come)), dict(zip(before.names, before.nodes, strict=True)))
        gone = [name for name, was, now in zip(before.names, before.nodes, after.nodes, strict=False) if now is None is not was]
        if gone:
            log.info("%s clients have left: %s", *_few(gone))
        return after

    def _ask_new(self, grid: Grid, there: set[int]) -> bool:
        """Ask nodes that are new; return whether any client is there."""
        for node in sorted(there - set(self._hosted)):
            try:
                for one, told in self._roll_call.ask(grid, [node]).items():
                    reason = self._unfit(told.methods) if self._roll_call.hosting else None
                    if reason is not None:
                        log.warning("node %s is not asked: %s", one, reason)
                    self._hosted[one] = told if reason is None else Hosted(names=(), methods=frozenset())
            except ValueError as error:  # a node that comes late must not end the run of the others
                log.warning("node %s is not asked: %s", node, error)
                self._hosted[node] = Hosted(names=(), methods=frozenset())
        self._there = there
        return any(self._names(node) for node in there)

    def _placed(self, names: tuple[str, ...], before: dict[str, int | None]) -> Roster:
        """Return the roster of these clients; a client stays on its node while that is connected."""
        home = {name: node for name, node in before.items() if node in self._there}
        known = set(names)
        for node, told in self._hosted.items():
            for name in told.names if node in self._there else ():
                if name in known and home.setdefault(name, node) != node:
                    log.warning("client %r is hosted by nodes %s and %s: the first one is asked", name, home[name], node)
        hosts = [self._hosted[node].methods for node in self._there if self._names(node)]
        return Roster(
            names=names,
            nodes=tuple(home.get(name) for name in names),
            record_names=self._roll_call.record_names or MESSAGE_API,
            hosting=self._roll_call.hosting,
            methods=frozenset.intersection(*hosts) if hosts else frozenset(),
        )

    def _names(self, node: int) -> tuple[str, ...]:
        return self._hosted[node].names if node in self._hosted else ()


def _few(names: list[str]) -> tuple[int, str]:
    return len(names), ", ".join(sorted(names)[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def _is_simulation(grid: Grid) -> bool:
    # Flower's own grid does not say it.
    return getattr(grid, "simulated", False) or type(grid).__name__ == "InMemoryGrid"
