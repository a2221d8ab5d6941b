"""Flower's Grid on Ray actors. It delivers messages and replies at once; Flower's own engine polls for them."""

import json
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from flower_dp.clients.account import LEDGER_PATH
from flower_dp.core import checks, root_logger
from flower_dp.simulation import cluster, flwr_internals, local_grid, placement, worker
from flower_dp.simulation.workers import Workers
from flower_dp.wire import KEY

log = logging.getLogger("flwr")

# The longest wait of a thread for Ray before it looks at what other threads have sent.
_SLICE_SECONDS = 0.05
# A worker hangs if it takes longer for a message than this, and than twice the time of its round.
_PATIENCE_SECONDS = 60.0
# After so many more seconds the grid ends a hung worker: one that is stopped, or imports its app for ever, can't end itself.
_GRACE_SECONDS = 10.0
# Clients named in one line of the log.
_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A message that a worker has, or that waits for one.

    Attributes:
        number: id of the message.
        node: id of the receiving node.
        message: the message.
        patience: seconds after which the worker that serves it ends itself; None for never.
        arrived: function that takes the reply.
    """

    number: str
    node: int
    message: Message
    patience: float | None = None
    arrived: Callable[[Message], None]

    def __str__(self) -> str:
        """Return the node and the requested clients, as text for the log."""
        names = clients_of(self.message)
        listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
        return f"node {self.node}" + (f" (clients {listed})" if names else "")


class RayGrid(local_grid.SimulatedGrid):
    """A Grid whose nodes run a ClientApp on Ray actors, on this machine or on those of a cluster.

    Every node has a context of its own, with `partition-id` and `num-partitions` in its config. Between messages the grid holds
    each node's state, so a dead actor loses only the reply that it was computing. That reply becomes an error reply, as Flower's
    runtime sends it for a crashed ClientApp. A new actor replaces the dead one as soon as a machine has room; the other actors
    serve its nodes meanwhile.

    An actor that runs out of memory or hangs is replaced in the same way. An actor hangs if it takes longer for a message than
    twice the time of its round, and than a minute. It then writes its stack to its log, and ends; the grid ends it ten seconds
    later if it can't. An exception of a ClientApp becomes an error reply too, and the node's state is as before the message.

    A node receives one message at a time, in the order of sending. A reply after the timeout is dropped, but its changes to the
    node's state stay. Replies are returned in the order of the messages. Several threads may call the methods.

    After construction, all messages that this process makes belong to this run.

    Args:
        app: ClientApp, or a function that returns it in a worker. It is sent by cloudpickle: definitions of `__main__` or of a
            notebook by value, others by name.
        workers: actors, which serve one grid at a time. They import the app at once, in parallel to this process.
        num_nodes: number of nodes, with ids 2 to num_nodes + 1; node 1 is Flower's server. None: one node per client that the
            run's strategy expects, as in stock apps; without such a strategy, one node per worker.
        run_config: settings of the run, for all nodes.
        node_config: function, partition -> further settings of that node.
        log_file: file to which workers write their logs and the app's; "" for Ray's own log, which this process shows.

    Raises:
        FlowerVersionError: if the installed Flower is not known.
        ValueError: if nodes have a `ledger-path` and the workers are on a cluster. Each machine would have its own file, with a
            part of the node's charges.
        RuntimeError: if messages wait, and no machine runs a worker or starts one within five minutes.

    Example:
        >>> from flower_dp.simulation import RayGrid, Workers
        >>> def run(client_app, strategy, arrays):
        ...     with RayGrid(client_app, Workers(num_workers=2), num_nodes=10) as grid:
        ...         return strategy.start(grid, arrays, num_rounds=3)
    """

    # Seconds that a worker may take for a pushed message; None for no limit. A strategy sets it for its first query.
    patience: float | None = None

    def __init__(
        self,
        app: ClientApp | Callable[[], ClientApp],
        workers: Workers,
        *,
        num_nodes: int | None,
        run_config: Mapping[str, worker.Value] | None = None,
        node_config: Callable[[int], Mapping[str, worker.Value]] | None = None,
        log_file: str = "",
    ) -> None:
        import ray  # noqa: PLC0415  (a third of a second)

        super().__init__(secrets.randbits(62) + 1, run_config or {})
        self._made = None if num_nodes is None else _nodes_of(checks.integer("num_nodes", num_nodes, at_least=1))
        configs = {partition: dict(node_config(partition)) for partition in range(num_nodes or 0)} if node_config else {}
        if workers.away and any(LEDGER_PATH in config for config in configs.values()):
            raise ValueError(
                f"node_config: {LEDGER_PATH} is a file of one machine, and the nodes of a cluster move between machines; "
                "leave it out, or run on this machine alone"
            )
        dumps: Callable[[Any], bytes] = ray.cloudpickle.dumps
        setup = worker.WorkerSetup(
            app=dumps((lambda: app) if isinstance(app, ClientApp) else app),
            run_id=self._run.run_id,
            run_config=self._run_config,
            node_config=configs,
            folder="" if workers.away else str(Path.cwd()),
            path=() if workers.away else tuple(os.path.abspath(place) for place in sys.path),
            bytecode=not sys.dont_write_bytecode,
            log_file=log_file,
            versions=cluster.installed() if workers.away else {},
        )
        # Node -> its pickled state, if a message has changed it, and the actor that has a copy.
        self._states: dict[int, bytes] = {}
        self._holders: dict[int, Any] = {}
        # Ray's reference to a result -> the worker's index, its call, and the time at which the grid ends the worker.
        self._running: dict[Any, tuple[int, _Call, float]] = {}
        self._busy: set[int] = set()
        # Ids of messages whose reply somebody still waits for; replies that were not pulled yet.
        self._awaited: set[str] = set()
        self._replies: dict[str, Message] = {}
        # Two locks, always taken in the order `_waiting`, `_lock`: else two threads could block each other. `_waiting` lets one
        # thread at a time wait for Ray. `_lock` guards the state; no thread holds it during `ray.wait`, so others can send.
        self._lock, self._waiting = threading.RLock(), threading.Lock()
        self._ray, self._workers = ray, workers
        self._queues: list[deque[_Call]] = [deque() for _ in workers.actors]
        self._placement = placement.Placement(
            workers, ray.put(dumps(setup))
        )  # it may hold data: Ray sends it to each machine once

    def __enter__(self) -> "RayGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Replace the actors that are still at work."""
        with self._lock:
            for queue in self._queues:
                queue.clear()
            for index, _, _ in self._running.values():
                self._workers.replace(index)
            self._running.clear()

    def expect(self, num_clients: int) -> None:
        """Make a node for each client that a strategy expects, unless nodes were made already."""
        if self._made is None:
            self._made = _nodes_of(num_clients)
            log.info("Simulating %d SuperNodes, one per client; --supernodes changes that", num_clients)

    @property
    def _nodes(self) -> range:
        if self._made is None:
            self._made = _nodes_of(len(self._workers.actors))
        return self._made

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes, in the order of their partitions."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids."""
        return self._push(
            messages, self.patience, lambda reply: self._replies.update({reply.metadata.reply_to_message_id: reply})
        )

    def _push(self, messages: Iterable[Message], patience: float | None, arrived: Callable[[Message], None]) -> list[str]:
        sent = []
        with self._lock:
            for message in messages:
                number, node = flwr_internals.numbered(message), message.metadata.dst_node_id
                call = _Call(number=number, node=node, message=message, patience=patience, arrived=arrived)
                sent.append(number)
                self._awaited.add(number)
                if call.node in self._nodes:
                    self._queues[(call.node - worker.FIRST_NODE) % len(self._queues)].append(call)
                else:
                    self._settle(
                        call, _failed(message, flwr_internals.NODE_UNAVAILABLE, f"node {call.node} is not one of this run")
                    )
            self._dispatch()
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that have arrived, each once."""
        self._advance(0.0)
        with self._lock:
            return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that arrive within `timeout` seconds, in the order of the messages."""
        messages = list(messages)
        replies = {reply.metadata.reply_to_message_id: reply for reply in self.stream(messages, timeout=timeout)}
        ids = (message.metadata.message_id for message in messages)
        return [replies[number] for number in ids if number in replies]

    def stream(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages and yield the replies that arrive within `timeout` seconds, each as it arrives; the grid keeps none."""
        arrived = deque[Message]()
        ids = self._push(messages, None if timeout is None else max(2 * timeout, _PATIENCE_SECONDS), arrived.append)
        return self._arriving(ids, arrived, math.inf if timeout is None else time.monotonic() + timeout)

    def _arriving(self, ids: list[str], arrived: deque[Message], deadline: float) -> Iterator[Message]:
        try:
            for _ in ids:
                while not arrived:
                    if (left := min(_SLICE_SECONDS, deadline - time.monotonic())) <= 0:
                        return
                    self._advance(left)
                yield arrived.popleft()
        finally:
            self._forget(ids)

    def _forget(self, ids: Iterable[str]) -> None:
        """Stop to wait for these replies. Messages that still wait for a worker are not sent."""
        with self._lock:
            if gone := self._awaited.intersection(ids):
                self._awaited -= gone
                for queue in self._queues:
                    kept = [call for call in queue if call.number not in gone]
                    queue.clear()
                    queue.extend(kept)

    def _dispatch(self) -> None:
        """Hand waiting calls to idle workers."""
        idle, awaited = self._placement.idle, self._placement.awaited_by_their_nodes()
        for index in sorted(idle):
            self._hand(index, self._queues[index])
        # A worker without calls for its own nodes takes one from a worker that is busy or dead.
        others = [queue for index, queue in enumerate(self._queues) if index not in awaited]
        for index in sorted(idle):
            self._hand(index, max(others, key=len))

    def _hand(self, index: int, queue: deque[_Call]) -> None:
        """Hand a worker the first call of a queue whose node is not being served."""
        call = next((call for call in queue if call.node not in self._busy), None)
        if call is None:
            return
        queue.remove(call)
        actor = self._workers.actors[index]
        state = None if self._holders.get(call.node) is actor else self._states.get(call.node, worker.EMPTY)
        self._placement.idle.remove(index)
        self._busy.add(call.node)
        until = math.inf if call.patience is None else time.monotonic() + call.patience + _GRACE_SECONDS
        self._running[actor.run.remote(call.message, state, len(self._nodes), call.patience)] = index, call, until

    def _advance(self, seconds: float) -> None:
        """Take the next result of a worker, or let another thread take it, within so many seconds."""
        if not self._waiting.acquire(timeout=seconds):
            return
        try:
            with self._lock:
                self._end_hung()
                self._dispatch()
                self._placement.check(at_work=bool(self._running), waits=any(self._queues))
                pending = [*self._running, *self._placement.awaited()]
            if not pending:
                return
            for ref in self._ray.wait(pending, num_returns=1, timeout=seconds)[0]:
                with self._lock:
                    if self._placement.arrived(ref):
                        self._dispatch()
                    else:
                        self._finish(ref)
        finally:
            self._waiting.release()

    def _finish(self, ref: Any) -> None:
        """Take a worker's result, and hand the worker its next call."""
        index, call, _ = self._running.pop(ref)
        actor = self._workers.actors[index]
        self._holders.pop(call.node, None)
        try:
            reply = self._taken(call, self._ray.get(ref), actor)
        except Exception as error:
            errors = (
                self._ray.exceptions
            )  # after a RayTaskError, of a method that raised, the worker lives; after others it is dead
            if isinstance(error, errors.RayError) and not isinstance(error, errors.RayTaskError):
                # After an out-of-memory error, Ray's further lines list the memory of other processes.
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reply = self._replaced(index, call, f"{type(error).__name__}: {' '.join(lines[:2])}")
            else:  # for example a result that can't be unpickled here
                log.exception("No result for %s", call)
                self._placement.idle.add(index)
                reply = _failed(call.message, flwr_internals.CLIENT_APP_CRASHED, f"no answer: {type(error).__name__}")
        else:
            self._placement.idle.add(index)
        self._busy.discard(call.node)
        self._settle(call, reply)
        self._dispatch()

    def _end_hung(self) -> None:
        """End the hung workers that have not ended themselves."""
        now = time.monotonic()
        for ref in [ref for ref, (_, _, until) in self._running.items() if until < now]:
            index, call, _ = self._running.pop(ref)
            self._holders.pop(call.node, None)
            self._busy.discard(call.node)
            self._settle(call, self._replaced(index, call, "it does not respond"))

    def _replaced(self, index: int, call: _Call, reason: str) -> Message:
        """Replace a dead worker, and return the error reply to its message."""
        log.error("A worker died while it served %s: %s", call, reason)
        self._placement.replace(index)
        return _failed(call.message, flwr_internals.CLIENT_APP_CRASHED, "ClientApp stopped responding.")

    def _taken(self, call: _Call, answer: worker.WorkerResult, actor: Any) -> Message:
        """Keep the node's state, and return its reply, or an error reply if the reply is to another message."""
        if answer.trace:
            log.error("Error on %s: %s", call, answer.trace)
        for level, text in answer.shown:
            log.log(level, "%s", text, extra=root_logger.SHOWN)
        if answer.state is not None:
            self._states[call.node] = answer.state
        if not answer.reply.has_error():
            self._holders[call.node] = actor
        metadata = answer.reply.metadata
        if (metadata.reply_to_message_id, metadata.src_node_id) != (call.number, call.node):
            return _failed(
                call.message, flwr_internals.CLIENT_APP_CRASHED, "its reply is to another message, or from another node"
            )
        return answer.reply

    def _settle(self, call: _Call, reply: Message) -> None:
        """Hand over a reply, if somebody still waits for it."""
        if call.number in self._awaited:
            self._awaited.remove(call.number)
            flwr_internals.numbered(reply)
            call.arrived(reply)


def _nodes_of(number: int) -> range:
    return range(worker.FIRST_NODE, worker.FIRST_NODE + number)


def clients_of(message: Message) -> tuple[str, ...]:
    """Return the clients that a message requests; none if this package did not write it, or it names none."""
    texts = [record[KEY] for record in message.content.config_records.values() if isinstance(record.get(KEY), str)]
    try:
        return tuple(map(str, json.loads(str(texts[0]))["clients"])) if texts else ()
    except (ValueError, KeyError, TypeError):  # a client query
        return ()


def _failed(message: Message, code: int, reason: str) -> Message:
    return Message(Error(code, reason), reply_to=message)
