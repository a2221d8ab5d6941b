"""The round, the same for every method: roll call, sampling, messages, checks, ledger before message, model, report.

A method says what it releases: it charges its ledgers, writes the instruction of a node, and makes the next model of what
came back. It never touches messages or the loop.
"""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_dp import checks, wire
from flower_dp.mechanisms import noise_generator
from flower_dp.sampling import Sampler
from flower_dp.statement import PrivacyStatement
from flower_dp.strategies.replies import Collected, collect
from flower_dp.strategies.roster import Roster, call_roll
from flower_dp.vectors import Layout

log = logging.getLogger("flwr")

# A grid in this process answers at once; the default of 0.1 s would be most of a simulated round.
_PULL_SECONDS = 0.002
# Flower sends the log to the SuperLink while rounds run: a line for every quick round would slow them down.
_LOG_SECONDS = 1.0
_FRUITLESS_ROUNDS, _FRUITLESS_CLIENTS = 3, 10
_LARGEST_ARRAY = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What a round did, in numbers: clients asked and heard, bytes of arrays and text sent, seconds from request to model.

    `epsilon` is an upper bound of the cost of all rounds so far; the statement has the tight value.
    """

    server_round: int
    cohort_size: int
    replies: int
    bytes_down: int
    bytes_up: int
    seconds: float
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round under way: the model that was sent [d], and the clients that were asked, by node."""

    server_round: int
    layout: Layout
    vector: np.ndarray
    asked: dict[int, tuple[str, ...]]
    bytes_down: int
    started: float

    @property
    def cohort_size(self) -> int:
        """How many clients were asked."""
        return sum(len(names) for names in self.asked.values())


class RoundStrategy(Strategy):
    """A Flower strategy whose rounds go as in the design; methods fill in the seven hooks below.

    Args:
        sampling: who takes part in a round: a sampler of `flower_dp.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated, in [0, 1).
        report_client_metrics: ask clients for training metrics, which are not private; the statement says so then.
        registration_timeout: seconds to wait for the clients.
        noise_seed: for tests only: fixed noise and sampling, which makes the run not private.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.
    """

    method = "differential privacy"

    def __init__(
        self,
        *,
        sampling: Sampler,
        num_clients: int,
        delta: float,
        report_client_metrics: bool = False,
        registration_timeout: float = 600.0,
        noise_seed: int | None = None,
    ) -> None:
        if not hasattr(sampling, "choose"):
            raise ValueError(f"sampling={sampling!r}: must be a sampler of flower_dp.sampling, such as PoissonSampling")
        self.sampling = sampling
        self.num_clients = checks.integer("num_clients", num_clients, at_least=1)
        self.expected_cohort = sampling.expected_cohort(num_clients)
        self.delta = checks.number("delta", delta, at_least=0, below=1)
        self.report_client_metrics = checks.flag("report_client_metrics", report_client_metrics)
        self.registration_timeout = checks.number("registration_timeout", registration_timeout, above=0)
        self.noise_seed = noise_seed
        self._begin()

    def _begin(self) -> None:
        """Forget the last run."""
        self.rounds: list[RoundReport] = []
        self.incidents: list[str] = []
        self.num_missing = 0
        self._refusal = "no reply"
        self.seeded_noise = self.noise_seed is not None
        self.rng = noise_generator(self.noise_seed)
        self._roster: Roster | None = None
        self._round: Round | None = None

    # What a method says

    @abstractmethod
    def _plan(self, num_rounds: int) -> None:
        """Prepare for up to `num_rounds` rounds, while clients are still registering."""

    @abstractmethod
    def _why_stop(self, server_round: int) -> str | None:
        """Return why this round can't be paid for, None if it can."""

    @abstractmethod
    def _charge(self, server_round: int, names: tuple[str, ...]) -> None:
        """Charge the round's releases, before any message of the round leaves."""

    @abstractmethod
    def _instruction(self, server_round: int, names: tuple[str, ...], cohort_size: int) -> wire.Instruction:
        """Return what the clients of one node are asked to do."""

    @abstractmethod
    def _next_vector(self, now: Round, collected: Collected) -> np.ndarray:
        """Return the next global model [d], float32, with all noise that the server owes."""

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute; the statement has the tight value."""

    @property
    @abstractmethod
    def statement(self) -> PrivacyStatement:
        """The privacy statement of all that was released so far."""

    def _server_clip_norm(self) -> float | None:
        """L2 bound that the server enforces on a client's update; None where updates carry their own noise."""
        return None

    def _fits(self, roster: Roster) -> str | None:
        """Return why these clients can't run this method, None if they can."""
        return None

    def _cohort(self, server_round: int, roster: Roster) -> np.ndarray:
        """Return the indices of the clients that are asked in a round."""
        return self.sampling.choose(server_round, self.num_clients, self.rng)

    # Flower's Strategy

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run up to `num_rounds` rounds, fewer where the target epsilon ends the run first; arguments as Flower's.

        `evaluate_fn(round, arrays)` sees the initial model as round 0; give it public data. `timeout` bounds each round.

        Raises:
            ValueError: for a model with arrays that can't be made private, or clients that don't fit `num_clients`.
            TimeoutError: if the clients don't register in time.
            RuntimeError: if no client answers usefully in the first rounds, or in all of a short run.
        """
        checks.integer("num_rounds", num_rounds, at_least=0)
        self._begin()
        layout = Layout.of(wire.numpy_arrays(initial_arrays, limit=_LARGEST_ARRAY))
        if type(grid).__name__ == "InMemoryGrid":
            setattr(grid, "pull_interval", _PULL_SECONDS)  # noqa: B010
        result = Result(arrays=initial_arrays)
        self._plan(num_rounds)
        roster = self._call_roll(grid)
        self.summary()
        log.info("%s parameters, %s clients on %s nodes", layout.size, len(roster.names), len(set(roster.nodes)))
        self._evaluate(evaluate_fn, 0, result)
        try:
            self._run(grid, num_rounds, timeout, train_config or ConfigRecord(), evaluate_fn, result)
            self._check_fruit(ended=True)
        finally:  # what was released before a failure stays released
            for line in str(self.statement).splitlines():
                log.info("%s", line)
        return result

    def _run(
        self,
        grid: Grid,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        result: Result,
    ) -> None:
        """Run the rounds; what they give is in the result as they come."""
        due = 0.0
        for server_round in range(1, num_rounds + 1):
            if reason := self._why_stop(server_round):
                self.incidents.append(f"ended before round {server_round}: {reason}")
                log.info("%s", self.incidents[-1])
                break
            if time.monotonic() >= due or server_round == num_rounds:
                log.info("[ROUND %s/%s]", server_round, num_rounds)
                due = time.monotonic() + _LOG_SECONDS
            messages = self.configure_train(server_round, result.arrays, train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, metrics = self.aggregate_train(server_round, replies)
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            self._evaluate(evaluate_fn, server_round, result)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Draw the cohort, charge the round's release to the ledger, and return one message a node."""
        roster = self._call_roll(grid)
        started = time.monotonic()
        layout = Layout.of(wire.numpy_arrays(arrays, limit=_LARGEST_ARRAY))
        asked = roster.by_node(self._cohort(server_round, roster))
        cohort = tuple(name for names in asked.values() for name in names)
        self._charge(server_round, cohort)
        messages = [
            wire.train_message(node, roster.dialect, arrays, config, self._instruction(server_round, names, len(cohort)))
            for node, names in asked.items()
        ]
        self._round = Round(
            server_round=server_round,
            layout=layout,
            vector=wire.model_vector(arrays, layout),
            asked=asked,
            bytes_down=sum(wire.content_bytes(message.content) for message in messages),
            started=started,
        )
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and add up the replies, add the server's noise, and return the next global model and the round's numbers."""
        now = self._round
        if now is None or now.server_round != server_round:
            raise RuntimeError(f"server_round={server_round}: aggregate_train needs configure_train of the same round first")
        self._round = None
        collected = collect(
            replies,
            asked=now.asked,
            vector=now.vector,
            layout=now.layout,
            clip_norm=self._server_clip_norm(),
        )
        self.seeded_noise |= collected.seeded_noise
        vector = self._next_vector(now, collected)
        report = self._report(now, collected)
        self._refusal = next(iter(collected.refused.values()), self._refusal)
        self._check_fruit()
        metrics = MetricRecord(
            {
                "cohort-size": report.cohort_size,
                "replies": report.replies,
                "bytes-down": report.bytes_down,
                "bytes-up": report.bytes_up,
                "seconds": report.seconds,
                "epsilon": report.epsilon,
            }
        )
        if self.report_client_metrics and collected.clients:
            metrics.update({f"client-{name}": value / len(collected.clients) for name, value in collected.metrics.items()})
        return wire.model_record(vector, now.layout), metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask no client: metrics on private data would leave without protection. Use `evaluate_fn` with public data."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: no client was asked."""
        return None

    def summary(self) -> None:
        """Log what the run will do."""
        log.info("%s: %s, %g of %s clients expected a round", self.method, self.sampling, self.expected_cohort, self.num_clients)

    # Small things

    def _call_roll(self, grid: Grid) -> Roster:
        """Return the roster, made once a run."""
        if self._roster is None:
            roster = call_roll(grid, self.num_clients, timeout=self.registration_timeout)
            if reason := self._fits(roster):
                raise ValueError(reason)
            self._roster = roster
        return self._roster

    def _report(self, now: Round, collected: Collected) -> RoundReport:
        self.num_missing += now.cohort_size - len(collected.clients)
        report = RoundReport(
            server_round=now.server_round,
            cohort_size=now.cohort_size,
            replies=len(collected.clients),
            bytes_down=now.bytes_down,
            bytes_up=collected.num_bytes,
            seconds=time.monotonic() - now.started,
            epsilon=self.epsilon,
        )
        self.rounds.append(report)
        return report

    def _told(self) -> tuple[object, ...]:
        """Return what a statement tells besides the ledger's charges."""
        return (self.seeded_noise, self.num_missing, *self.incidents)

    def _sane(self, vector: np.ndarray, before: np.ndarray, server_round: int) -> np.ndarray:
        """Return the next model as float32, or the last one if a client's huge update has pushed it out of float32's range."""
        if (np.abs(vector) <= np.finfo(np.float32).max).all():
            return vector.astype(np.float32)
        self.incidents.append(f"round {server_round} was left out: the replies' sum is beyond the range of float32")
        log.warning("%s", self.incidents[-1])
        return before

    def _check_fruit(self, *, ended: bool = False) -> None:
        """Fail a run in which no client ever answers usefully: it would only spend budget."""
        if any(report.replies for report in self.rounds):
            return
        asked = [report for report in self.rounds if report.cohort_size]
        tries = min(_FRUITLESS_CLIENTS, _FRUITLESS_ROUNDS * self.num_clients)
        enough = len(asked) >= _FRUITLESS_ROUNDS and sum(report.cohort_size for report in asked) >= tries
        if asked and (enough or ended):
            rounds = f"the first {len(asked)} rounds" if enough else "any round"
            raise RuntimeError(f"no client has sent a usable update in {rounds}; the last reason: {self._refusal}")

    @staticmethod
    def _evaluate(
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None, server_round: int, result: Result
    ) -> None:
        metrics = evaluate_fn(server_round, result.arrays) if evaluate_fn else None
        if metrics is not None:
            result.evaluate_metrics_serverapp[server_round] = metrics
