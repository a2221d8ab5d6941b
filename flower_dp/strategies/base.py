"""The round: sampling, messages, checks, sum, noise, ledger, the same for every method with clipped client updates."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from dp_accounting import ComposedDpEvent
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_dp import accounting, checks, compression, wire
from flower_dp.accounting import Relation
from flower_dp.ledger import Ledger
from flower_dp.mechanisms import Gaussian, gaussian_share, noise_generator
from flower_dp.release import Release
from flower_dp.sampling import FixedSizeSampling, Sampler
from flower_dp.statement import PrivacyStatement
from flower_dp.strategies.replies import Collected, collect
from flower_dp.strategies.roster import Roster, call_roll
from flower_dp.strategies.stating import state
from flower_dp.vectors import Layout

log = logging.getLogger("flwr")

# A grid in this process answers at once; the default of 0.1 s would be most of a simulated round.
_PULL_SECONDS = 0.002
_FRUITLESS_ROUNDS = 3


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
class _Round:
    """A round under way."""

    server_round: int
    layout: Layout
    vector: np.ndarray
    asked: dict[int, tuple[str, ...]]
    bytes_down: int
    started: float

    @property
    def cohort_size(self) -> int:
        return sum(len(names) for names in self.asked.values())


class PrivateStrategy(Strategy):
    """Client-level differential privacy by clipped updates and Gaussian noise on their sum.

    Every round: the sampler draws a cohort of clients; each one's update is clipped to L2 norm `clip_norm`; the sum carries
    noise of std noise_multiplier x clip_norm; the global model moves by the noised sum over the *expected* cohort. Example
    counts weigh nothing, missing and refused replies count as zeros, an empty cohort still releases noise and still pays.

    Args:
        clip_norm: L2 bound of one client's update.
        noise_multiplier: std of the noise on the sum / clip_norm; 0 runs without privacy, and the statement says so.
        sampling: who takes part in a round: a sampler of `flower_dp.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated.
        target_epsilon: the run ends before the round that would pass it; None for no target.
        relation: neighbouring relation; by default replace-one for fixed-size sampling, else add-or-remove-one.
        placement: `central`: the server adds the noise; `distributed`: every client adds its share to its own update.
        keep_ratio: part of the coordinates kept, those of largest magnitude, after the noise.
        trusted_server: under distributed noise, whether the server adds the shares that missing clients did not; if not, the
            ledger charges the noise that was really there.
        report_client_metrics: ask clients for training metrics, which are not private; the statement says so then.
        registration_timeout: seconds to wait for the clients.
        noise_seed: for tests only: fixed noise and sampling, which makes the run not private.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.
    """

    method = "client-level DP"

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        sampling: Sampler,
        num_clients: int,
        delta: float,
        target_epsilon: float | None = None,
        relation: Relation | None = None,
        placement: str = "central",
        keep_ratio: float = 1.0,
        trusted_server: bool = True,
        report_client_metrics: bool = False,
        registration_timeout: float = 600.0,
        noise_seed: int | None = None,
    ) -> None:
        self.delta = checks.number("delta", delta, above=0, below=1)
        self.placement = checks.one_of("placement", placement, ("central", "distributed"))
        self.keep_ratio = checks.number("keep_ratio", keep_ratio, above=0, at_most=1)
        self.target_epsilon = None if target_epsilon is None else checks.number("target_epsilon", target_epsilon, above=0)
        self.trusted_server = trusted_server
        self.report_client_metrics = report_client_metrics
        self.registration_timeout = checks.number("registration_timeout", registration_timeout, above=0)
        if not hasattr(sampling, "choose"):
            raise ValueError(f"sampling={sampling!r}: must be a sampler of flower_dp.sampling, such as PoissonSampling")
        fixed_size = isinstance(sampling, FixedSizeSampling)
        self.release = Release(
            what="the noised sum of clipped client updates, and every model made from it",
            seen_by="everyone who sees global models, the clients among them; the server is trusted"
            if self.placement == "central"
            else "everyone who sees sums or global models; who adds up the messages is trusted not to look at single ones",
            unit="client",
            relation=accounting.relation_of(relation) if relation else "replace-one" if fixed_size else "add-or-remove-one",
            clip_norm=clip_norm,
            mechanism=Gaussian(noise_multiplier=noise_multiplier),
            sampler=sampling,
            num_clients=num_clients,
        )
        if self.target_epsilon is not None and noise_multiplier == 0:
            raise ValueError(f"noise_multiplier=0: target_epsilon={target_epsilon} needs noise; set noise_multiplier > 0")
        self.rounds: list[RoundReport] = []
        self.incidents: list[str] = []
        self.ledger = Ledger(owner="every client", relation=self.release.relation)
        self.seeded_noise = noise_seed is not None
        self._noise_seed = noise_seed
        self._stated: tuple[int, PrivacyStatement] | None = None
        self._begin()

    def _begin(self) -> None:
        """Forget the last run."""
        self.rounds, self.incidents = [], []
        self.ledger = Ledger(owner="every client", relation=self.release.relation)
        self._stated = None
        self._rng = noise_generator(self._noise_seed)
        self._roster: Roster | None = None
        self._round: _Round | None = None
        self._affordable = 0
        self._curve: np.ndarray = np.zeros(1)
        self.num_missing = 0
        self.num_weakened = 0

    # What a method decides

    @property
    def charged(self) -> Release:
        """The release that the ledger charges: what can be proved of what leaves."""
        if self.placement == "distributed" and self.keep_ratio < 1:
            # Every client chooses its coordinates from its own noised update, and a sum of such messages is no function of
            # the noised sum: only the client's own share of noise protects it.
            share = gaussian_share(self.release.mechanism.noise_multiplier, max(1, round(self.release.expected_cohort)))
            return replace(self.release, mechanism=Gaussian(noise_multiplier=share))
        return self.release

    def _noise_share(self, cohort_size: int) -> float:
        """Std of the noise that each of a cohort's clients adds."""
        if self.placement == "central":
            return 0.0
        if self.keep_ratio < 1:
            return self.charged.noise_scale
        # By the cohort that was drawn, so that the noise of the sum has the same std whoever is in it.
        return gaussian_share(self.release.noise_scale, cohort_size)

    def _server_noise_std(self, heard: int, cohort_size: int) -> float:
        """Std of the noise that the server adds to the sum of the updates that came back."""
        if self.placement == "central":
            return self.release.noise_scale
        if self.keep_ratio < 1 or not self.trusted_server:
            return 0.0
        return self.release.noise_scale * math.sqrt((cohort_size - heard) / cohort_size if cohort_size else 1.0)

    def _settle(self, server_round: int, heard: int, cohort_size: int) -> None:
        """Charge what was really added where shares of noise are missing and nobody may top them up."""
        topped_up = self.placement == "central" or self.trusted_server or self.keep_ratio < 1
        if topped_up or heard in (0, cohort_size):
            return
        weaker = Gaussian(noise_multiplier=self.release.mechanism.noise_multiplier * math.sqrt(heard / cohort_size))
        self.ledger.amend(self.charged.event(server_round), replace(self.release, mechanism=weaker).event(server_round))
        self.num_weakened += 1

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
            RuntimeError: if no client has answered usefully in the first rounds.
        """
        checks.integer("num_rounds", num_rounds, at_least=0)
        self._begin()
        layout = Layout.of(wire.numpy_arrays(initial_arrays, limit=2**40))
        if type(grid).__name__ == "InMemoryGrid":
            setattr(grid, "pull_interval", _PULL_SECONDS)  # noqa: B010
        result = Result(arrays=initial_arrays)
        self._plan(num_rounds)
        roster = self._call_roll(grid)
        self.summary()
        log.info("%s parameters, %s clients on %s nodes", layout.size, len(roster.names), len(set(roster.nodes)))
        self._evaluate(evaluate_fn, 0, result)
        for server_round in range(1, num_rounds + 1):
            if not self._can_pay(server_round):
                self.incidents.append(
                    f"ended before round {server_round}, which would pass target_epsilon={self.target_epsilon:g}"
                )
                log.info("%s", self.incidents[-1])
                break
            log.info("[ROUND %s/%s]", server_round, num_rounds)
            messages = self.configure_train(server_round, result.arrays, train_config or ConfigRecord(), grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, metrics = self.aggregate_train(server_round, replies)
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            self._evaluate(evaluate_fn, server_round, result)
        for line in str(self.statement).splitlines():
            log.info("%s", line)
        return result

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Draw the cohort, charge the round's release to the ledger, and return one message a node."""
        roster = self._call_roll(grid)
        started = time.monotonic()
        layout = Layout.of(wire.numpy_arrays(arrays, limit=2**40))
        asked = roster.by_node(self.release.sampler.choose(server_round, self.release.num_clients, self._rng))
        cohort_size = sum(len(names) for names in asked.values())
        self.ledger.charge(self.charged.event(server_round))
        messages = [
            wire.train_message(
                node,
                roster.dialect,
                arrays,
                config,
                wire.Instruction(
                    server_round=server_round,
                    clients=names,
                    clip_norm=self.release.clip_norm,
                    noise_multiplier=self.release.mechanism.noise_multiplier,
                    noise_std=self._noise_share(cohort_size),
                    keep_ratio=self.keep_ratio if self.placement == "distributed" else 1.0,
                    report_metrics=self.report_client_metrics,
                ),
            )
            for node, names in asked.items()
        ]
        self._round = _Round(
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
            clip_norm=self.release.clip_norm if self.placement == "central" else None,
        )
        self.seeded_noise |= collected.seeded_noise
        heard = len(collected.clients)
        self._settle(server_round, heard, now.cohort_size)
        noise = self.release.mechanism.noise(collected.total, self._server_noise_std(heard, now.cohort_size), self._rng)
        mean = ((collected.total + noise) / self.release.expected_cohort).astype(np.float32)
        if self.keep_ratio < 1 and self.placement == "central":
            mean = compression.decode(compression.top_k(mean, self.keep_ratio), mean.size)
        report = self._report(now, collected)
        self._check_fruit(collected)
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
        return wire.model_record(now.vector + mean, now.layout), metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask no client: metrics on private data would leave without protection. Use `evaluate_fn` with public data."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: no client was asked."""
        return None

    def summary(self) -> None:
        """Log what the run will do."""
        log.info(
            "%s: %s noise, clip norm %g, noise multiplier %g",
            self.method,
            self.placement,
            self.release.clip_norm,
            self.release.mechanism.noise_multiplier,
        )
        log.info(
            "%s, %g of %s clients expected a round",
            self.release.sampler,
            self.release.expected_cohort,
            self.release.num_clients,
        )

    # Cost

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement of all that was released so far."""
        if self._stated is None or self._stated[0] != self.ledger.num_charges:
            self._stated = (self.ledger.num_charges, state(self))
        return self._stated[1]

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute; the statement has the tight value."""
        if not self.num_weakened and self.ledger.num_charges < len(self._curve):
            return float(self._curve[self.ledger.num_charges])
        return accounting.epsilon(self.ledger.event, delta=self.delta, relation=self.ledger.relation, grid=1e-3).epsilon

    def _plan(self, num_rounds: int) -> None:
        """Compute the costs of the rounds to come, while clients are still registering."""
        self._curve = accounting.curve(
            self.charged.events, num_rounds=num_rounds, delta=self.delta, relation=self.release.relation
        )
        self._affordable = num_rounds
        if self.target_epsilon is not None:
            self._affordable = accounting.affordable(
                self.charged.events,
                epsilon=self.target_epsilon,
                delta=self.delta,
                relation=self.release.relation,
                limit=num_rounds,
            )

    def _can_pay(self, server_round: int) -> bool:
        """Whether the target epsilon still allows this round."""
        if self.target_epsilon is None:
            return True
        if not self.num_weakened:
            return server_round <= self._affordable
        ahead = ComposedDpEvent([self.ledger.event, self.charged.event(server_round)])
        cost = accounting.epsilon(ahead, delta=self.delta, relation=self.ledger.relation)
        return cost.epsilon <= self.target_epsilon

    # Small things

    def _call_roll(self, grid: Grid) -> Roster:
        """Return the roster, made once a run."""
        if self._roster is None:
            roster = call_roll(grid, self.release.num_clients, timeout=self.registration_timeout)
            if self.placement == "distributed" and not roster.hosting:
                raise ValueError(
                    "placement='distributed': stock clients add no noise; use flower_dp.clients, or placement='central'"
                )
            self._roster = roster
        return self._roster

    def _report(self, now: _Round, collected: Collected) -> RoundReport:
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

    def _check_fruit(self, collected: Collected) -> None:
        """End a run in which no client ever answers usefully: it would only spend budget."""
        asked = [report for report in self.rounds if report.cohort_size]
        if len(asked) >= _FRUITLESS_ROUNDS and not any(report.replies for report in asked):
            reason = next(iter(collected.refused.values()), "no reply")
            raise RuntimeError(f"no client has sent a usable update in the first {len(asked)} rounds; the last reason: {reason}")

    @staticmethod
    def _evaluate(
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None, server_round: int, result: Result
    ) -> None:
        metrics = evaluate_fn(server_round, result.arrays) if evaluate_fn else None
        if metrics is not None:
            result.evaluate_metrics_serverapp[server_round] = metrics
