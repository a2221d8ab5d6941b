"""The client query: the server asks nodes which clients they host and which methods they run.

The server sends all questions at once and reads answers as they arrive, so that no node has to wait for another. All nodes of a
run execute the same ClientApp, so the answers of a few show whether nodes can name their clients. If they can't, as with stock
clients, every node is one client.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.core import checks
from flower_dp.privacy.charges import ALL_CLIENTS
from flower_dp.strategies.population.grid_replies import Pulls
from flower_dp.strategies.releases.replies import APP_RAISED, MOST_REASON
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, HostedClients, RecordNames

log = logging.getLogger("flwr")

# Node id -> the message that asks which clients it hosts.
_Question = Callable[[int], Message]
# The question that a node's app answers (its index, None for a stock client), and its record names.
_Kind = tuple[int | None, RecordNames]

# Number of nodes that vote on the kind of the run's app: a single node could be wrong, or lie.
_VOTERS = 3
# Seconds after which another node replaces a silent voter. In a simulation, which holds errors back meanwhile, the vote waits so
# long for the last voter although the others agree.
_VOTE_SECONDS = 5.0
# Seconds until a node that could not answer is asked again: doubled each time, since every question starts a process.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
# The pause after a third failure, from which on no start waits for that node alone.
_SURE_PAUSE_SECONDS = 2.0
# Seconds until a silent node is asked again: doubled each time. A simulation loses no message, but may take long.
_SILENT_SECONDS, _SILENT_IN_SIMULATION_SECONDS = 30.0, 600.0
_POLL_SECONDS = 0.002
# Flower's own texts for a ClientApp that does not know the question: of the Message API, and around a client_fn. Flower has one
# code for all errors of an app, so only `_unknown` reads these texts; an app with other errors is no stock app.
_UNKNOWN = {"No query function registered": "no queries", "Invalid message type": "no such message"}


# The questions in the order of asking, and the record names of an app that answers each. Only a `NumPyClient` has
# properties. An app without a query function can't answer a query, but a mod sees messages to its train function: a stock train
# function finds no model in that message and raises.
_QUESTIONS: tuple[tuple[_Question, RecordNames], ...] = (
    (partial(wire.client_query, message_type="query"), MESSAGE_API),
    (lambda node: Message(RecordDict({"getpropertiesins.config": ConfigRecord({})}), node, "get_properties"), NUMPY_CLIENT),
    (partial(wire.client_query, message_type="train"), MESSAGE_API),
)


@dataclass(slots=True, kw_only=True)
class _Open:
    """A question that a node has not answered yet.

    Attributes:
        step: index of the question.
        since: time of sending, on the monotonic clock, in seconds.
        patience: seconds after which the node is asked again.
        votes: whether the node votes on the kind of the app; if not, it only names its clients.
        ids: ids of all messages to the node whose answer counts: a slow node may answer the first of several.
        message_api: whether its app is known to use the Message API.
        errors: errors of the node so far: the kind by which Flower reports an unknown question (else None), and the text.
    """

    step: int
    since: float
    patience: float
    votes: bool
    ids: list[str]
    message_api: bool = False
    errors: list[tuple[str | None, str]] = field(default_factory=list)


class ClientQuery:
    """The query for the clients that nodes host, by the question that the run's ClientApp can answer.

    An app counts as stock only if Flower itself reports that it can't answer, for two nodes if more than one answers. An app that
    fails in another way is not treated as stock: its clients may have names, policies and budgets. The majority of the first
    nodes decides the kind of the app for all; if there is a tie, nodes name their clients.

    Attributes:
        failures: reasons why nodes can't name their clients now, by node.
    """

    def __init__(self) -> None:
        self.failures: dict[int, str] = {}
        self._votes: dict[int, _Kind] = {}
        self._open: dict[int, _Open] = {}
        # Message id -> node and question, of all questions that may still be answered.
        self._sent: dict[str, tuple[int, _Open]] = {}
        # Node id -> the pause after its last failure, and when that ends.
        self._pauses: dict[int, tuple[float, float]] = {}
        # Whether an app has failed in a way that no stock app does; then its errors are logged.
        self._strange = False
        self._pulls: Pulls | None = None

    @property
    def kind(self) -> _Kind | None:
        """The kind of the run's app by majority; None before the first vote."""
        if not self._votes:
            return None
        counts = Counter(self._votes.values())
        return max(counts, key=lambda kind: (counts[kind], kind[0] is not None))

    @property
    def record_names(self) -> RecordNames | None:
        """The record names that the nodes' app uses; None before the first vote."""
        return self.kind[1] if self.kind else None

    @property
    def hosting(self) -> bool:
        """Whether nodes name the clients that they host; otherwise every node is one stock client."""
        return self.kind is not None and self.kind[0] is not None

    @property
    def silent(self) -> set[int]:
        """The nodes that have been asked and did not answer yet."""
        return set(self._open)

    @property
    def retrying(self) -> bool:
        """Whether a node that could not answer is asked again soon: its process may have died."""
        return any(self._pauses[node][0] < _SURE_PAUSE_SECONDS for node in self.failures if node in self._pauses)

    def awaited(self, seconds: float) -> bool:
        """Return whether a node that was first asked less than `seconds` ago has not answered yet."""
        end = time.monotonic() - seconds
        return any(len(question.ids) == 1 and question.since > end for question in self._open.values())

    def ask(
        self, grid: Grid, nodes: Iterable[int], *, most_names: int, until: float = math.inf, late: bool = False
    ) -> dict[int, HostedClients]:
        """Ask those of these nodes that are due, and return the answers that have arrived.

        A node whose answer is malformed counts as one that can't answer.

        Args:
            grid: the grid.
            nodes: all nodes whose answer is needed; others are forgotten.
            most_names: maximum number of clients that a node may name.
            until: the deadline, on the clock `time.monotonic`, in seconds.
            late: whether the run has begun: the kind of its app then stays as it is.
        """
        wanted = set(nodes)
        if self._pulls is None:
            self._pulls = Pulls(grid)
        self._open = {node: question for node, question in self._open.items() if node in wanted}
        self._sent = {sent: (node, question) for sent, (node, question) in self._sent.items() if node in wanted}
        hosted: dict[int, HostedClients] = {}
        if late:  # votes that arrive after the start do not count
            for _, question in self._sent.values():
                question.votes = False
        elif len(self._votes) < _VOTERS:
            answers = self._vote(grid, wanted, most_names, until)
            # A voter's answer also has its names, so it counts unless the majority is of another kind.
            hosted = {node: answer for node, answer in answers.items() if self._votes.get(node, self.kind) == self.kind}
        if self.kind is None:
            return {}
        step = self.kind[0]
        if step is None and not late and not self._agree and self.awaited(_SILENT_SECONDS):
            return {}  # a single vote must not decide that the app is stock while other voters may still answer
        if step is None:
            self.failures.clear()  # all nodes run the same app
            return {node: HostedClients(names=(f"node-{node}",), methods=frozenset()) for node in wanted}
        self._push(grid, self._due(wanted - set(hosted)), step=step, votes=False)
        return hosted | self._pull(grid, most_names, until)

    def close(self) -> None:
        """Stop waiting for answers until the next call of `ask`."""
        if self._pulls is not None:
            self._pulls.close()

    def failed(self, node: int, reason: str) -> None:
        """Record that a node can't answer now, or that its answer is useless; it is asked again after a pause."""
        reason = checks.one_line(reason, most=MOST_REASON)
        log.warning("Node %s gets no requests: it can't say which clients it hosts: %s", node, reason)
        pause = min(2 * self._pauses.get(node, (_FIRST_PAUSE_SECONDS / 2, 0.0))[0], _LONGEST_PAUSE_SECONDS)
        self._pauses[node] = pause, time.monotonic() + pause
        self.failures[node] = reason

    def _due(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that may be asked now: their pause is over, and no question is open, or one for too long."""
        now = time.monotonic()
        rested = [node for node in sorted(nodes) if self._pauses.get(node, (0.0, 0.0))[1] <= now]
        return [node for node in rested if node not in self._open or now > self._open[node].since + self._open[node].patience]

    def _vote(self, grid: Grid, nodes: set[int], most_names: int, until: float) -> dict[int, HostedClients]:
        """Let `_VOTERS` nodes vote on the kind of the app, others in place of silent ones; return the clients that some name."""
        if nodes and not self._pauses and not self._votes and not self._open:
            log.info(
                "Asking nodes for their clients; a stock client does not know this question, and its SuperNode may log an error"
            )
        hosted: dict[int, HostedClients] = {}
        # A simulation logs errors of nodes in this process: they are held back until the kind of the app explains them.
        simulation, begun = is_simulation(grid), time.monotonic()
        end = min(until, begun + _SILENT_IN_SIMULATION_SECONDS) if simulation else begun
        self._strange = False
        with DeferredErrors() as held:
            while True:
                self._ask_voters(grid, nodes, patience=math.inf if simulation else _VOTE_SECONDS)
                hosted |= self._pull(grid, most_names, until)
                if self._agree:
                    end = min(end, begun + _VOTE_SECONDS)
                if time.monotonic() >= end or not any(question.votes for question in self._open.values()):
                    break
                time.sleep(_POLL_SECONDS)
            if not self._strange:
                held.drop()
        return hosted

    @property
    def _agree(self) -> bool:
        """Whether no missing vote can change the result."""
        return self.kind is not None and 2 * Counter(self._votes.values())[self.kind] > max(_VOTERS, len(self._votes))

    def _ask_voters(self, grid: Grid, nodes: set[int], *, patience: float) -> None:
        """Ask as many nodes for their vote as votes are missing, first nodes that were not asked yet.

        Args:
            grid: the grid.
            nodes: all nodes whose answer is needed.
            patience: seconds after which a silent voter is replaced.
        """
        since, due = time.monotonic() - patience, self._due(nodes - set(self._votes))
        due.sort(key=lambda node: node in self._open)
        busy = sum(question.votes and question.since > since for node, question in self._open.items() if node not in set(due))
        self._push(grid, due[: max(0, _VOTERS - len(self._votes) - busy)], step=0, votes=True)

    def _push(self, grid: Grid, nodes: list[int], *, step: int, votes: bool) -> None:
        """Send a question to nodes, without waiting for their answers."""
        first = _SILENT_IN_SIMULATION_SECONDS if is_simulation(grid) else _SILENT_SECONDS
        for node in nodes:
            last = self._open.get(node)
            patience, ids = (2 * last.patience, last.ids) if last else (first, [])
            self._open[node] = _Open(step=step, since=time.monotonic(), patience=patience, votes=votes, ids=ids)
        self._send(grid, nodes)

    def _send(self, grid: Grid, nodes: list[int]) -> None:
        """Send these nodes the questions that are open."""
        if not nodes:
            return
        ids = grid.push_messages([_QUESTIONS[self._open[node].step][0](node) for node in nodes])
        for node, sent in zip(nodes, ids, strict=False):
            if sent is not None:  # None: the message could not be sent
                self._sent[sent] = node, self._open[node]
                self._open[node].ids.append(sent)

    def _pull(self, grid: Grid, most_names: int, until: float) -> dict[int, HostedClients]:
        """Return the answers that have arrived; send voters their next question."""
        hosted: dict[int, HostedClients] = {}
        pulls = self._pulls or Pulls(grid)
        while self._sent and (replies := list(pulls.pull(self._sent, until - time.monotonic()))):
            for reply in replies:
                # The node is that of the question, since the SuperLink replies for a node that has left.
                node, question = self._sent.pop(reply.metadata.reply_to_message_id, (None, None))
                if node is None or question is None or node not in self._open:
                    continue
                try:
                    answer = self._next(node, question, reply, most_names)
                except _NoAnswerError as error:
                    self._strange = True
                    self._closed(node)
                    self.failed(node, str(error))
                else:
                    if answer is None and node not in self._votes:
                        self._open[node] = question
                        self._send(grid, [node])
                        continue
                    self._closed(node)
                    self.failures.pop(node, None)
                    hosted |= {} if answer is None else {node: answer}
        return hosted

    def _closed(self, node: int) -> None:
        """Forget the questions to a node."""
        for sent in self._open.pop(node).ids:
            self._sent.pop(sent, None)

    def _next(self, node: int, question: _Open, reply: Message, most_names: int) -> HostedClients | None:
        """Return the clients that a node hosts; None if it has voted for a stock app, or its next question is due.

        Raises:
            _NoAnswerError: if the node can't name its clients now.
        """
        record_names = _QUESTIONS[question.step][1]
        answer = None if reply.has_error() else _query_answer(reply, most_names)
        if not question.votes:
            if not isinstance(answer, HostedClients):
                why = _reason(reply) if answer is None else answer.reason
                raise _NoAnswerError(why or "it does not say which clients it hosts")
            return answer
        if isinstance(answer, HostedClients):
            self._votes[node] = question.step, record_names
            return answer
        if answer is not None:  # a refusal by a client of this package, which may answer another question
            question.errors.append((None, answer.reason))
        elif not reply.has_error():
            if record_names is NUMPY_CLIENT:
                self._votes[node] = None, NUMPY_CLIENT
                return None
            question.message_api = True  # a stock app may answer its own queries; its train function may have our mod
        else:
            self._note_error(question, reply)
        question.step += 1
        if question.message_api and question.step < len(_QUESTIONS) and _QUESTIONS[question.step][1] is NUMPY_CLIENT:
            question.step += 1
        if question.step < len(_QUESTIONS):
            return None
        if question.message_api:
            self._votes[node] = None, MESSAGE_API
            return None
        telling = next((reason for kind, reason in question.errors if kind != "no such message"), question.errors[0][1])
        raise _NoAnswerError(f"its app fails, and it is not known to be a stock client: {telling}")

    def _note_error(self, question: _Open, reply: Message) -> None:
        """Record a voter's error, which may be the way a stock app answers."""
        reason = _reason(reply)
        unknown = _unknown(reason)
        question.message_api |= unknown == "no queries"
        self._strange |= not question.message_api and unknown is None
        if reply.error.code not in APP_RAISED:
            raise _NoAnswerError(reason)
        question.errors.append((unknown, reason))


class DeferredErrors(logging.Filter):
    """A context in which errors on Flower's logger are held back; on leaving it logs them, except dropped ones.

    A simulation logs every error of a ClientApp in the process of the ServerApp.

    Example:
        >>> from flower_dp.strategies.population.client_query import DeferredErrors, log
        >>> with DeferredErrors() as held:
        ...     log.error("No query function registered")
        ...     held.drop()
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[logging.LogRecord] = []

    def __enter__(self) -> Self:
        log.addFilter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        log.removeFilter(self)
        for record in self._waiting:
            log.handle(record)

    def filter(self, record: logging.LogRecord) -> bool:
        """Hold back an error; let everything below it pass."""
        if record.levelno < logging.ERROR:
            return True
        self._waiting.append(record)
        return False

    def drop(self) -> None:
        """Forget the errors held back so far."""
        self._waiting.clear()


class _NoAnswerError(Exception):
    """The error that a node can't name its clients now, and is not known to be a stock client; the text has the reason."""


def _unknown(reason: str) -> str | None:
    """Return the kind of an app's error by Flower's own text; None for any other error."""
    return next((kind for text, kind in _UNKNOWN.items() if text in reason), None)


def _query_answer(reply: Message, most_names: int) -> HostedClients | wire.Refusal | None:
    try:
        if (refusal := wire.refusal_of(reply.content)) is not None:
            return refusal
        hosted = wire.hosted_of(reply.content, most_names=most_names)
        if hosted is not None and ALL_CLIENTS in hosted.names:
            raise ValueError(f"it has no clients: {ALL_CLIENTS!r} must not be a client's name, it stands for all in ledgers")
        return hosted
    except Exception as error:  # a forged answer may raise any error, and must not end the run
        raise _NoAnswerError(str(error)) from None


def _reason(reply: Message) -> str:
    return (reply.error.reason or "an error without a reason") if reply.has_error() else ""


def is_simulation(grid: Grid) -> bool:
    """Return whether all nodes of a grid are simulated in this process, and connected from the start."""
    # Flower's own grid has no such attribute, so its class's name decides.
    return getattr(grid, "simulated", False) or type(grid).__name__ == "InMemoryGrid"
