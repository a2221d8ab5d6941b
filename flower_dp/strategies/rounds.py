"""The round, the same for every method: roll call, sampling, messages, checks, ledger before message, model, report.

A method says what it releases: it charges its ledgers, writes the instruction of a node, and makes the next model of what
came back. It never touches messages or the loop.
"""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_dp.core import checks
from flower_dp import wire
from flower_dp.core.noise import Generator, noise_generator
from flower_dp.core.sampling import Sampler
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.replies import Bounds, Collected, collect
from flower_dp.strategies.roster import Roster, call_roll
from flower_dp.core.vectors import Layout

log = logging.getLogger("flwr")

# A grid in this process answers at once; the default of 0.1 s would be most of a simulated round.
_PULL_SECONDS = 0.002
# Flower sends the log to the SuperLink while rounds run: a line for every quick round would slow them down.
_LOG_SECONDS = 1.0
_FRUITLESS_ROUNDS, _FRUITLESS_CLIENTS = 3, 10
_LARGEST_ARRAY = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What a round did, in numbers.

    Where cohorts are secret (`secret_cohort`), the first four numbers must not leave the server: they tell how many clients took
    part, which the epsilon counts on nobody to know. `public` leaves them out.

    Attributes:
        server_round: 1, 2, ...
        cohort_size: clients that were asked.
        replies: clients whose updates count.
        bytes_down: bytes of arrays and text sent to nodes.
        bytes_up: bytes of arrays and text in the replies that count.
        bytes_per_client: bytes of arrays that one client sends, as far as they follow from public numbers.
        seconds: from request to model.
        epsilon: an upper bound of the cost of all rounds so far; the statement has the tight value.
        secret_cohort: whether the size of the cohort is secret.
    """

    server_round: int
    cohort_size: int
    replies: int
    bytes_down: int
    bytes_up: int
    bytes_per_client: float
    seconds: float
    epsilon: float
    secret_cohort: bool

    def public(self) -> dict[str, int | float]:
        """Return the numbers that may be published, by run-config style names."""
        hidden = ("cohort_size", "replies", "bytes_down", "bytes_up") if self.secret_cohort else ()
        left_out = ("server_round", "secret_cohort", *hidden)
        return {key.replace("_", "-"): value for key, value in asdict(self).items() if key not in left_out}


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
        sampling: who takes part in a round: a sampler of `flower_dp.core.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated, in [0, 1).
        report_client_metrics: ask clients for training metrics, which are not private; the statement says so then.
        registration_timeout: seconds to wait for the clients.
        noise_seed: for tests only: fixed noise and sampling, which makes the run not private.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.
    """

    method = "differential privacy"
    # The method's name on the wire.
    name = ""

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
        if not all(hasattr(sampling, word) for word in ("choose", "event", "largest_cohort", "secret_size")):
            raise ValueError(f"sampling={sampling!r}: must be a sampler of flower_dp.core.sampling, such as PoissonSampling")
        self.sampling = sampling
        self.num_clients = checks.integer("num_clients", num_clients, at_least=1)
        self.expected_cohort = sampling.expected_cohort(num_clients)
        self.delta = checks.number("delta", delta, at_least=0, below=1)
        self.report_client_metrics = checks.flag("report_client_metrics", report_client_metrics)
        self.registration_timeout = checks.number("registration_timeout", registration_timeout, above=0)
        self.noise_seed = noise_seed
        self._begin()

    def _generator(self, *purpose: object) -> Generator:
        """Return a fresh generator for one draw of noise or of a cohort; nothing of it stays in the strategy, or in its copies."""
        return noise_generator(self.noise_seed, "server", *purpose)

    def _begin(self) -> None:
        """Forget the last run."""
        self.rounds: list[RoundReport] = []
        self.incidents: list[str] = []
        self.num_missing = 0
        self._refusal = "no reply"
        self.seeded_noise = self.noise_seed is not None
        self._roster: Roster | None = None
        self._round: Round | None = None
        self._unpaid: set[int] = set()

    def plan(self, num_rounds: int) -> None:
        """Prepare for up to `num_rounds` rounds; `start` does it. For subclasses with a `start` of their own.

        Raises:
            ValueError: if `num_rounds` is not a whole number >= 0.
        """
        self._plan(checks.integer("num_rounds", num_rounds, at_least=0))

    # What a method says

    @abstractmethod
    def _plan(self, num_rounds: int) -> None:
        """Prepare for up to `num_rounds` rounds, while clients are still registering."""

    @abstractmethod
    def _why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return why this round can't be paid for, None if it can; asked before the cohort is drawn (None), and after that."""

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

    @abstractmethod
    def _bounds(self, now: Round) -> Bounds:
        """Return what the server enforces on the replies of a round."""

    @property
    def secret_cohort(self) -> bool:
        """Whether the epsilon counts on nobody knowing how many clients take part in a round."""
        return False

    def _fits(self, roster: Roster) -> str | None:
        """Return why these clients can't run this method, None if they can."""
        if roster.hosting and self.name not in roster.methods:
            runs = ", ".join(sorted(roster.methods)) or "no common method"
            return f"{self.method}: clients must run {self.name!r}; these run {runs}"
        return None

    def _cohort(self, server_round: int, roster: Roster) -> np.ndarray:
        """Return the indices of the clients that are asked in a round."""
        return self.sampling.choose(server_round, self.num_clients, self._generator("cohort", server_round))

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
            if time.monotonic() >= due or server_round == num_rounds:
                log.info("[ROUND %s/%s]", server_round, num_rounds)
                due = time.monotonic() + _LOG_SECONDS
            messages = self.configure_train(server_round, result.arrays, train_config, grid)
            if server_round in self._unpaid:
                break
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, metrics = self.aggregate_train(server_round, replies)
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            self._evaluate(evaluate_fn, server_round, result)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Draw the cohort, charge the round's release to the ledger, and return one message a node.

        No message, and no charge, where the round can't be paid for.
        """
        roster = self._call_roll(grid)
        # Asked here, so that no `start` of a subclass can go past it: nothing is sent then, and nothing is charged.
        if reason := self._why_stop(server_round, None):
            return self._stop(server_round, reason)
        started = time.monotonic()
        layout = Layout.of(wire.numpy_arrays(arrays, limit=_LARGEST_ARRAY))
        asked = roster.by_node(self._cohort(server_round, roster))
        cohort = tuple(name for names in asked.values() for name in names)
        if reason := self._why_stop(server_round, len(cohort)):
            return self._stop(server_round, reason)
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
        """Check and add up the replies, add the server's noise, and return the next global model and the round's numbers.

        None and None for a round that could not be paid for.
        """
        now = self._round
        if now is None and server_round in self._unpaid:
            return None, None
        if now is None or now.server_round != server_round:
            raise RuntimeError(f"server_round={server_round}: aggregate_train needs configure_train of the same round first")
        self._round = None
        collected = collect(
            replies,
            asked=now.asked,
            vector=now.vector,
            layout=now.layout,
            bounds=self._bounds(now),
        )
        self.seeded_noise |= collected.seeded_noise
        vector = self._next_vector(now, collected)
        report = self._report(now, collected)
        self._refusal = next(iter(collected.refused.values()), self._refusal)
        self._check_fruit()
        metrics = MetricRecord({**report.public()})
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
            bytes_per_client=self._bytes_per_client(now, collected),
            seconds=time.monotonic() - now.started,
            epsilon=self.epsilon,
            secret_cohort=self.secret_cohort,
        )
        self.rounds.append(report)
        return report

    def _told(self) -> tuple[object, ...]:
        """Return what a statement tells besides the ledger's charges."""
        return (self.seeded_noise, self.num_missing, *self.incidents)

    def _bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return how many bytes of arrays a client sends, as far as that is public: those of a dense vector."""
        return 4.0 * now.layout.size

    def _stop(self, server_round: int, reason: str) -> list[Message]:
        """Write down that a round is not run, once for all that follow; return its messages: none."""
        self._round = None
        if not self._unpaid:
            self.incidents.append(f"ended before round {server_round}: {reason}")
            log.info("%s", self.incidents[-1])
        self._unpaid.add(server_round)
        return []

    def _sane(self, vector: np.ndarray, now: Round) -> np.ndarray:
        """Return the next model as float32, or the last one if the replies have pushed it out of the range of its own dtypes."""
        if not (names := now.layout.overflows(vector)):
            return vector.astype(np.float32)
        return self._left_out(now, f"array {names[0]!r} would leave the range of its dtype")

    def _left_out(self, now: Round, why: str) -> np.ndarray:
        """Write down that a round that was paid for does not change the model; return the model as it was."""
        self.incidents.append(f"round {now.server_round} was left out: {why}")
        log.warning("%s", self.incidents[-1])
        return now.vector

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
