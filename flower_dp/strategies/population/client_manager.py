"""The known clients of a run, and the node that hosts each.

A client is not a SuperNode: a device hosts one client, a simulation worker many. Clients have stable names. Node ids change with
every run, and with every restart of a SuperNode without a registered key.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.serverapp import Grid

from flower_dp.core.root_logger import SHOWN
from flower_dp.strategies.population.client_query import ClientQuery, is_simulation
from flower_dp.wire import MESSAGE_API, HostedClients, RecordNames

log = logging.getLogger("flwr")

# Seconds between two looks for nodes and answers.
_POLL_SECONDS = 0.1
# Seconds that the start still waits once enough clients are there, or once no more seem to come.
_SETTLED_SECONDS = 3.0
# Seconds between two lines of the log while the run waits for clients.
_TOLD_SECONDS = 30.0
_LISTED = 5
# Seconds that a round waits for the answers of new nodes. After a wait in vain, no round waits for `_REST` times as long, so that
# silent nodes slow a run down by at most a tenth.
_LATE_SECONDS, _REST = 20.0, 10.0
# Flower's node ids are random numbers of 64 bits; a name may contain a small number by chance.
_NO_CHANCE = 10**9
# Seconds that a round without waiting looks for answers at most.
_LOOK_SECONDS = 1.0
# The answer in place of a node's that can't take part.
_NOBODY = HostedClients(names=(), methods=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownClients:
    """The known clients, and the node that hosts each.

    Attributes:
        names: names of all clients that have registered in this run, each once; a repeated name would be drawn twice as often.
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

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            name, count = Counter(self.names).most_common(1)[0]
            raise ValueError(f"names: {name!r} occurs {count} times: client names must be unique")

    @property
    def named_by_node(self) -> tuple[str, ...]:
        """The clients whose names contain their node's id, which changes when a SuperNode without a registered key restarts."""
        pairs = ((name, node) for name, node in zip(self.names, self.nodes, strict=True) if node is not None)
        return tuple(name for name, node in pairs if name == f"node-{node}" or (node >= _NO_CHANCE and str(node) in name))

    def connected(self, *, by_name: bool) -> np.ndarray:
        """Return the indices of the connected clients; with `by_name` without those whose names change with their nodes' ids."""
        unnamed = set(self.named_by_node) if by_name else set()
        pairs = enumerate(zip(self.names, self.nodes, strict=True))
        return np.array([place for place, (name, node) in pairs if node is not None and name not in unnamed], int)

    def by_node(self, indices: np.ndarray) -> dict[int, tuple[str, ...]]:
        """Group the clients of a cohort by node, without clients whose node is not connected now."""
        groups: dict[int, list[str]] = {}
        for index in indices:
            if (node := self.nodes[index]) is not None:
                groups.setdefault(node, []).append(self.names[index])
        return {node: tuple(names) for node, names in groups.items()}


class ClientManager:
    """The registry of a run's known clients, while nodes join, leave and return under another id.

    The name identifies a client. If its node has left and another node hosts the name, that node has the client from now on.
    While its node is connected, no other node can take the name, so that no client gets two requests in a round.

    The answer of one node never ends the run of the others: a useless answer leaves only that node out.

    Args:
        num_clients: number of clients that must register before the first round; cohorts and cost are computed for this number.
        timeout: seconds to wait for them.
        newcomers: whether more clients than `num_clients` may take part. If not, exactly `num_clients` do: those of the start.
        accumulates: whether clients that have left again count as registered. Only for cohorts that are drawn from the connected
            clients alone.
        unfit: function that returns why a node with these methods can't take part; None if it can.
        max_clients_per_node: see `StrategyOptions`.
        max_new_clients: see `StrategyOptions`.
    """

    def __init__(
        self,
        num_clients: int,
        *,
        timeout: float,
        newcomers: bool,
        accumulates: bool = False,
        unfit: Callable[[frozenset[str]], str | None] = lambda _: None,
        max_clients_per_node: int | None = None,
        max_new_clients: int | None = None,
    ) -> None:
        self._num_clients, self._timeout, self._newcomers, self._unfit = num_clients, timeout, newcomers, unfit
        self._most_clients = num_clients + (num_clients if max_new_clients is None else max_new_clients) * newcomers
        self._most_per_node = max_clients_per_node
        self._query = ClientQuery()
        # The answers of nodes, in the order in which they registered.
        self._hosted: dict[int, HostedClients] = {}
        self._there: set[int] = set()
        # The time from which a round may wait for new nodes again.
        self._waits_from = 0.0
        # Nodes that were left out because they name too many clients.
        self._left_out: set[int] = set()
        self._known: KnownClients | None = None
        # Clients that have registered before the first round, if they accumulate.
        self._accumulates, self._registered = accumulates, list[str]()

    def known_clients(self, grid: Grid) -> KnownClients:
        """Return the clients as they are now: at first wait for `num_clients`, later check which nodes have joined and left.

        Raises:
            TimeoutError: if too few clients have registered in time, or no client is connected any more.
            ValueError: if no node can name its clients, or none runs the method, or a simulation has not exactly `num_clients`.
            RuntimeError: if all nodes report that their clients can't train.
        """
        try:
            if self._known is None:
                self._wait(grid)
                self._known = self._first(grid)
            else:
                self._known = self._next(grid, self._known)
        finally:
            self._query.close()
        return self._known

    # The start

    def _wait(self, grid: Grid) -> None:
        """Wait until at least `num_clients` clients have registered that can take part.

        A node that is left out does not count: with fewer clients the true sampling rate, and so the cost, would differ from the
        accounting.
        """
        simulation = is_simulation(grid)
        if callable(expect := getattr(grid, "expect", None)):  # a simulation that makes as many nodes
            expect(self._num_clients)
        # In a simulation all nodes are the user's own, so one of them may name any number of clients.
        most_names = self._most_per_node or (2**19 if simulation else self._most_clients)
        deadline, seen, settled, enough = time.monotonic() + self._timeout, -1, 0.0, math.inf
        logged = 0.0
        while True:
            self._there = set(grid.get_node_ids())
            before = self._query.kind
            answers = self._query.ask(grid, self._there - set(self._hosted), most_names=most_names, until=deadline)
            if self._query.kind != before:
                self._hosted.clear()  # these answers were read for another kind of app
            self._note(answers)
            names = self._names_there() if simulation else self._admitted(self._registered)
            self._registered = names if self._accumulates and not simulation else []
            count, now = len(names), time.monotonic()
            if count >= self._num_clients:
                enough = min(enough, now)
                # A short wait for nodes that have not answered yet, so that all clients of a start are in the first round.
                if not self._query.silent or (not simulation and now > enough + _SETTLED_SECONDS):
                    return
            elif (reason := self._none_fits()) is not None:
                raise ValueError(reason)
            if count != seen or now >= logged + _TOLD_SECONDS:
                settled = settled if count == seen else now
                seen, logged = count, now
                self._tell(names, deadline - now)
            # In a simulation all nodes connect at the start, a moment after the server.
            failing = len(self._query.failures)
            complete = self._hosted or failing if simulation else failing >= max(self._num_clients, len(self._there))
            waits = self._query.silent or self._query.retrying
            if complete and not waits and count < self._num_clients and now > settled + _SETTLED_SECONDS:
                where = "simulation has" if simulation else "nodes have"
                raise ValueError(
                    f"num_clients={self._num_clients}: the {where} {count} clients on {self._num_hosts} nodes{self._failures()}"
                )
            if now > deadline:
                raise TimeoutError(
                    f"num_clients={self._num_clients}: only {count} clients on {self._num_hosts} nodes after "
                    f"{self._timeout:g} s{self._failures()}"
                )
            time.sleep(_POLL_SECONDS)

    def _tell(self, names: list[str], seconds_left: float) -> None:
        """Log how many clients have registered; while some are missing, also their names and the time left, in seconds."""
        registered = f"{len(names)} of {self._num_clients} clients registered"
        if len(names) >= self._num_clients:
            log.info("%s", registered)
            return
        left = f"registration_timeout={self._timeout:g}: {max(0.0, seconds_left):.0f} s left{self._failures()}"
        listed = f": {_few(names)[1]}" if names else ""
        log.info("%s%s; %s nodes are connected; %s", registered, listed, len(self._there), left)

    @property
    def _num_hosts(self) -> int:
        return sum(bool(self._names(node)) for node in self._there)

    def _names_there(self) -> list[str]:
        """Return the names of all clients on connected nodes that can take part, each once."""
        return sorted({name for node in self._there for name in self._names(node)})

    def _none_fits(self) -> str | None:
        """Return why no connected node can take part, if all have answered and would be enough."""
        answers = [self._hosted[node] for node in self._there if node in self._hosted]
        reasons = [self._reason(answer) for answer in answers]
        if self._query.silent or None in reasons or sum(len(answer.names) for answer in answers) < self._num_clients:
            return None
        return self._reason(HostedClients(names=(), methods=frozenset.intersection(*(answer.methods for answer in answers))))

    def _reason(self, answer: HostedClients) -> str | None:
        """Return why a node can't take part; None if it can."""
        return self._unfit(answer.methods) if self._query.hosting else None

    def _failures(self) -> str:
        """Return why clients are missing: nodes that can't take part, are silent, host a name twice, or are left out."""
        failures, silent = self._query.failures, sorted(self._query.silent - set(self._query.failures))
        failed = (f"; {len(failures)} can't say which clients they host: node {node}: {why}" for node, why in failures.items())
        unfit = [(node, reason) for node in self._there if node in self._hosted and (reason := self._reason(self._hosted[node]))]
        others = (f"; {len(unfit)} can't take part: node {node}: {reason}" for node, reason in unfit)
        counts = Counter(name for node in self._there for name in self._names(node))
        twice = next((name for name, count in counts.items() if count > 1), None)
        text = next(failed, "") + next(others, "")
        if silent:
            text += f"; {len(silent)} do not answer: node {', '.join(map(str, silent[:_LISTED]))}"
        text += f"; client name {twice!r} is hosted twice: names must be unique" if twice is not None else ""
        for node in sorted(self._left_out & self._there)[:1]:
            count = len(self._names_there())
            text += (
                f"; node {node} is left out: with its {len(self._names(node))} clients there would be more than "
                f"{self._most_clients}; set num_clients={count} if all {count} that have registered shall take part"
            )
        return text

    def _first(self, grid: Grid) -> KnownClients:
        for node in self._there & set(self._hosted):
            if reason := self._reason(self._hosted[node]):
                log.warning("Node %s gets no requests: %s", node, reason)
                self._hosted[node] = _NOBODY
        names = self._names_there()
        if len(names) != self._num_clients and is_simulation(grid):
            raise ValueError(
                f"num_clients={self._num_clients}: {len(names)} clients have registered; set num_clients={len(names)}"
            )
        unable = [self._hosted[node].unable for node in self._there if self._names(node)]
        if unable and all(unable):
            raise RuntimeError(f"no client can train: {Counter(unable).most_common(1)[0][0]}")
        names = self._admitted(self._registered)
        if self._most_per_node is None:
            # A later node may name as many clients as the largest node of the start.
            known = set(names)
            self._most_per_node = max((len(known & set(self._names(node))) for node in self._there), default=1)
        return self._placed(tuple(sorted(names)), {})

    # Later

    def _next(self, grid: Grid, before: KnownClients) -> KnownClients:
        there = set(grid.get_node_ids())
        if there == self._there and there <= set(self._hosted):
            return before
        deadline, logged = time.monotonic() + self._timeout, 0.0
        while not self._ask_new(grid, there, deadline, before.names):
            if (now := time.monotonic()) > deadline:
                raise TimeoutError(f"no client is connected any more, and none has registered within {self._timeout:g} s")
            if now >= logged + _TOLD_SECONDS:
                logged = now
                log.info("No client is connected; registration_timeout=%g: %.0f s left", self._timeout, deadline - now)
            time.sleep(_POLL_SECONDS)
            there = set(grid.get_node_ids())
        known = set(before.names)
        come = sorted({name for node in there for name in self._names(node)} - known)
        if come and (come := self._admitted(list(before.names))[len(before.names) :]):
            log.info(
                "%s clients have joined: %s; %s are known, num_clients=%s", *_few(come), len(known) + len(come), self._num_clients
            )
        after = self._placed((*before.names, *sorted(come)), dict(zip(before.names, before.nodes, strict=True)))
        gone = [name for name, was, now in zip(before.names, before.nodes, after.nodes, strict=False) if now is None is not was]
        if gone:
            log.info("%s clients have left: %s", *_few(gone))
        return after

    def _ask_new(self, grid: Grid, there: set[int], deadline: float, known: Sequence[str]) -> bool:
        """Query new nodes, and wait a little for their answers; return whether any client is connected that may take part."""
        begun, most_names = time.monotonic(), self._most_per_node or self._num_clients
        new = there - set(self._hosted)
        until = min(deadline, begun + (_LATE_SECONDS if begun >= self._waits_from else _LOOK_SECONDS))
        answers = self._query.ask(grid, new, most_names=most_names, until=until, late=True)
        while begun >= self._waits_from and self._query.awaited(_LATE_SECONDS) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            answers |= self._query.ask(grid, new - set(answers), most_names=most_names, until=until, late=True)
            if (waited := time.monotonic() - begun) > _LATE_SECONDS:
                self._waits_from = time.monotonic() + _REST * waited
                break
        self._note(answers)
        for node, answer in answers.items():
            reason = self._reason(answer)
            if reason is not None:
                log.warning("Node %s gets no requests: %s", node, reason)
                self._hosted[node] = _NOBODY
        self._there = there
        admitted = set(self._admitted(list(known)))
        return any(not admitted.isdisjoint(self._names(node)) for node in there)

    # Both

    def _note(self, answers: dict[int, HostedClients]) -> None:
        """Store the answers of nodes; log which of them can't train.

        Their clients stay in the population, and cohorts are drawn and charged as if they could: the answer of one node changes
        nothing for the others.
        """
        self._hosted |= answers
        for node, answer in answers.items():
            if answer.unable:
                text = "Node %s can't train: %s; its %s clients send no update"
                log.warning(text, node, answer.unable, len(answer.names), extra=SHOWN)

    def _admitted(self, known: list[str]) -> list[str]:
        """Return the known names and those of connected nodes, up to the maximum."""
        names = dict.fromkeys(known)
        # Nodes with few clients first, so that one node that names many cannot displace the others.
        for node in sorted(self._there, key=lambda node: (len(self._names(node)), node)):
            new = [name for name in self._names(node) if name not in names]
            if len(names) + len(new) <= self._most_clients:
                names |= dict.fromkeys(new)
            elif node not in self._left_out:
                self._left_out.add(node)
                limit = f"{self._most_clients} (num_clients{' and max_new_clients' * self._newcomers})"
                text = "%s clients of node %s get no requests: %s; with them there would be more than %s"
                log.warning(text, len(new), node, _few(new)[1], limit)
        return list(names)

    def _placed(self, names: tuple[str, ...], before: dict[str, int | None]) -> KnownClients:
        """Return these clients with their nodes; a client stays on its node while that node is connected."""
        home = {name: node for name, node in before.items() if node in self._there}
        known = set(names)
        for node, answer in self._hosted.items():
            for name in answer.names if node in self._there else ():
                if name in known and home.setdefault(name, node) != node:
                    log.warning("Client %r is hosted by nodes %s and %s: the first one gets its requests", name, home[name], node)
        hosts = [self._hosted[node].methods for node in self._there if self._names(node)]
        return KnownClients(
            names=names,
            nodes=tuple(home.get(name) for name in names),
            record_names=self._query.record_names or MESSAGE_API,
            hosting=self._query.hosting,
            methods=frozenset.intersection(*hosts) if hosts else frozenset(),
        )

    def _names(self, node: int) -> tuple[str, ...]:
        """Return the clients of a node that can take part."""
        answer = self._hosted.get(node, _NOBODY)
        return answer.names if self._reason(answer) is None else ()


def _few(names: list[str]) -> tuple[int, str]:
    return len(names), ", ".join(sorted(names)[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
