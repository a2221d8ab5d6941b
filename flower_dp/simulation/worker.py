"""The worker: a Ray actor that imports an app and runs its ClientApp for nodes.

A worker holds no state of a run alone: it sends a node's state along with the reply. A worker draws noise from its own operating
system, as a device does. No state of a generator is sent to it.
"""

import faulthandler
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_dp.running import flower_log, modules
from flower_dp.simulation.cluster import differences, installed
from flower_dp.simulation.flwr_internals import CLIENT_APP_RAISED, LOAD_CLIENT_APP, identify

Value = bool | int | float | str
# The id of the first node; Flower's server is node 1.
FIRST_NODE = 2
# The pickled state of a node that has had no message.
EMPTY = pickle.dumps(RecordDict())
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The facts about a run that a worker needs.

    Attributes:
        run_id: id of the run.
        app: pickle of a function that returns the ClientApp. It is loaded after `folder` and `path` are set.
        run_config: settings of the run.
        node_config: further settings of nodes, by partition.
        folder: working directory; "" if the worker's own has the app's files.
        path: folders in which Python looks for modules.
        bytecode: whether imports may write files beside the modules.
        versions: versions that every machine must have installed (`cluster.installed`); empty on the server's own machine.
        log_file: file for all output; "" for no change.
    """

    run_id: int
    app: bytes
    run_config: Mapping[str, Value]
    node_config: Mapping[int, Mapping[str, Value]]
    folder: str
    path: tuple[str, ...]
    bytecode: bool
    versions: Mapping[str, str]
    log_file: str = ""

    def load(self) -> ClientApp:
        """Prepare this process for the run, and return its ClientApp.

        Raises:
            RuntimeError: if this machine has other versions installed.
            Exception: any error of the app's import.
        """
        if self.log_file:
            flower_log.write_to(self.log_file)
        if other := differences(self.versions, installed() if self.versions else {}):
            raise RuntimeError(f"machine {socket.gethostname()}: {other}")
        os.chdir(self.folder or ".")
        sys.path += [place for place in self.path if place not in sys.path]
        modules.forget_changed()
        sys.dont_write_bytecode = not self.bytecode
        app = pickle.loads(self.app)()  # noqa: S301  (made by this run's own server)
        if not isinstance(app, ClientApp):
            raise TypeError(f"the app is a {type(app).__name__}: must be a ClientApp")
        return app

    def context(self, node: int, num_nodes: int) -> Context:
        """Return the context of a node with an empty state, among so many nodes: FIRST_NODE, FIRST_NODE + 1, ..."""
        partition = node - FIRST_NODE
        config = {"partition-id": partition, "num-partitions": num_nodes, **self.node_config.get(partition, {})}
        return Context(run_id=self.run_id, node_id=node, node_config=config, state=RecordDict(), run_config=dict(self.run_config))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """A reply, the node's state after it, and the app's log lines for the screen.

    Attributes:
        reply: reply of the node; an error reply if the app raised.
        state: pickled state; None if the message did not change it.
        trace: traceback of an error; "" without one.
        shown: level and text of the log lines for the screen (`root_logger.SHOWN`).
    """

    reply: Message
    state: bytes | None = None
    trace: str = ""
    shown: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class _Node:
    context: Context
    state: bytes  # of the context, after the last reply


@dataclass(slots=True, repr=False)  # Ray writes its repr before every line of its log
class Worker:
    """A worker that runs a ClientApp on messages to nodes, one at a time."""

    _setup: WorkerSetup | None = None
    _app: ClientApp | None = None
    _failure: str = "no run has begun"
    _nodes: dict[int, _Node] = field(default_factory=dict)

    def begin(self, setup: bytes) -> None:
        """Begin a run, and import its app. If that fails, every reply carries the error."""
        self._setup, self._app, self._failure, self._nodes = None, None, "", {}
        try:
            loaded: WorkerSetup = pickle.loads(setup)  # noqa: S301
            self._app, self._setup = loaded.load(), loaded
        except KeyboardInterrupt:
            raise
        except BaseException:  # an app may end the process when it is imported
            self._failure = traceback.format_exc()

    def run(self, message: Message, state: bytes | None, num_nodes: int, patience: float | None = None) -> WorkerResult:
        """Run the app on a message.

        Args:
            message: message to one of the run's nodes.
            state: pickled state of the node; None if this worker made the node's last reply.
            num_nodes: number of nodes of the run.
            patience: seconds after which this process writes its stack to its log, and ends; None for never.
        """
        if patience is not None:
            faulthandler.dump_traceback_later(patience, exit=True, file=_STDERR)
        try:
            with flower_log.kept_to_be_shown() as shown:
                result = self._run(message, state, num_nodes)
            return replace(result, shown=tuple(shown))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _run(self, message: Message, state: bytes | None, num_nodes: int) -> WorkerResult:
        if self._setup is None or self._app is None:
            last = self._failure.strip().splitlines()[-1]
            return WorkerResult(reply=Message(Error(LOAD_CLIENT_APP, last), reply_to=message), trace=self._failure)
        number = message.metadata.dst_node_id
        node = self._node(self._setup.context(number, num_nodes), state)
        identify(self._setup.run_id, number)
        try:
            reply = self._app(message, node.context)
            if not isinstance(reply, Message):
                raise TypeError(f"the ClientApp returned a {type(reply).__name__}: must be a Message")
            after = pickle.dumps(node.context.state)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # As if the message had not arrived: half of a change of the state would be worse than none.
            node.context.state = pickle.loads(node.state)  # noqa: S301
            reply = Message(Error(CLIENT_APP_RAISED, str(error)), reply_to=message)
            return WorkerResult(reply=reply, trace=traceback.format_exc())
        changed, node.state = after != node.state, after
        return WorkerResult(reply=reply, state=after if changed else None)

    def _node(self, fresh: Context, state: bytes | None) -> _Node:
        """Return a node with the given state, or with its own if none is given."""
        node = self._nodes.setdefault(fresh.node_id, _Node(context=fresh, state=EMPTY))
        if state is not None:
            node.context.state, node.state = pickle.loads(state), state  # noqa: S301
        return node
