"""The one Flower strategy: it asks nodes for their clients, draws cohorts, charges the ledger, sends messages and checks replies.

A method gives it rules (`flower_dp.strategies.rules`): what it releases and charges, its order to the clients, the computation
of the next model from the replies, and its statement. Rules never handle messages or the loop over rounds.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_dp import wire
from flower_dp.core import checks
from flower_dp.core.noise import Generator, noise_generator
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.evaluation import Evaluator
from flower_dp.strategies.legacy import LegacyAppError
from flower_dp.strategies.local_evaluation import LocalEvaluator
from flower_dp.strategies.population.roster import Register, Roster
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.books import ClientBooks
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.replies import Collected, Missing, collect
from flower_dp.strategies.rules import (
    ComparesNoise,
    CountsResources,
    Options,
    Round,
    RoundReport,
    Rules,
    RunFacts,
    SendsBeside,
)
from flower_dp.strategies.server_optimizer import ServerOptimizer

log = logging.getLogger("flwr")

# A grid in this process answers at once; the default of 0.1 s would be most of a simulated round.
_PULL_SECONDS = 0.002
# Flower sends the log to the SuperLink while rounds run: a line for every quick round would slow them down.
_LOG_SECONDS = 1.0
_SEEDED = "replies with noise from a fixed seed were refused: for the clients that sent them nothing is stated against the server"
_FRUITLESS_ROUNDS, _FRUITLESS_CLIENTS = 3, 10


class DPStrategy(Strategy):
    """A Flower strategy that runs a method's rules; `DPFedAvg` and the other strategies are this class with their own rules.

    Attributes:
        rules: the method's rules, with its ledgers.
        rounds: the numbers of every round. Don't publish them as they are: see `RoundReport.public`.
        incidents: what happened, in words.
        missing: the number of requested updates that did not count, by reason.
        evaluations: value and standard error of every metric of private evaluations, by round.
        client_metrics: means of the training metrics that clients were asked for, by round; they are not private.

    Args:
        rules: the method's rules.
        options: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.

    Example:
        >>> from flower_dp.core.sampling import FullSampling
        >>> from flower_dp.strategies import DPStrategy
        >>> from flower_dp.strategies.client_level import ClientLevelRules
        >>> rules = ClientLevelRules(
        ...     name="dp-fedavg",
        ...     title="DP-FedAvg",
        ...     clip_norm=0.5,
        ...     noise_multiplier=1.0,
        ...     sampling=FullSampling(),
        ...     num_clients=10,
        ...     delta=1e-4,
        ... )
        >>> DPStrategy(rules, registration_timeout=60.0).epsilon
        0.0
    """

    def __init__(self, rules: Rules, **options: Unpack[Options]) -> None:
        if unknown := sorted(set(options) - set(Options.__annotations__)):
            known = ", ".join(Options.__annotations__)
            raise TypeError(
                f"{type(self).__name__}: unexpected keyword argument {unknown[0]!r}; besides the method's own: {known}"
            )
        self.rules = rules
        self.report_client_metrics = checks.flag("report_client_metrics", options.get("report_client_metrics", False))
        self.registration_timeout = checks.number("registration_timeout", options.get("registration_timeout", 600.0), above=0)
        self.noise_seed = options.get("noise_seed")
        self.frozen_arrays = tuple(options.get("frozen_arrays", ()))
        self.most_clients_per_node = _optional("most_clients_per_node", options.get("most_clients_per_node"), at_least=1)
        self.most_newcomers = _optional("most_newcomers", options.get("most_newcomers"), at_least=0)
        optimizer = options.get("server_optimizer")
        self._optimizer = None if optimizer is None else ServerOptimizer(optimizer)
        plan = options.get("evaluation")
        self._evaluator = None if plan is None else self._make_evaluator(plan)
        self._begin()

    def _generator(self, *purpose: object) -> Generator:
        """Return a fresh generator for one draw of noise or of a cohort; no copy of the strategy can repeat it."""
        return noise_generator(self.noise_seed, "server", *purpose)

    def _begin(self) -> None:
        """Forget the last run."""
        self.rounds: list[RoundReport] = []
        self.incidents: list[str] = []
        self.missing = Missing()
        self.evaluations: dict[int, dict[str, float]] = {}
        self.client_metrics: dict[int, dict[str, float]] = {}
        self.seeded_noise = self.noise_seed is not None
        self._refusal = "no reply"
        self._register: Register | None = None
        self._round: Round | None = None
        self._sent: list[Message] = []
        self._constants_checked = False
        self._unpaid: set[int] = set()
        self._stated: tuple[Any, PrivacyStatement] | None = None
        if self._optimizer is not None:
            self._optimizer.begin()
        if self._evaluator is not None:
            self._evaluator.begin()
        self.rules.begin()

    def plan(self, num_rounds: int) -> None:
        """Prepare for up to `num_rounds` rounds. `start` calls it; a subclass with its own `start` must call it, too.

        Raises:
            ValueError: if `num_rounds` is not a whole number >= 0.
        """
        self.rules.plan(checks.integer("num_rounds", num_rounds, at_least=0))

    # What the run has cost

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return self.rules.num_clients

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return self.rules.delta

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute; the statement has the tight value."""
        return math.inf if self.seeded_noise else self.rules.epsilon

    @property
    def secret_cohort(self) -> bool:
        """Whether an epsilon holds only if nobody knows how many clients train, or evaluate, in a round."""
        evaluating = self._evaluator.rules if isinstance(self._evaluator, Evaluator) else self.rules
        return self.rules.secret_cohort or evaluating.secret_cohort

    @property
    def facts(self) -> RunFacts:
        """Facts for the statement, besides the ledgers."""
        return RunFacts(
            seeded_noise=self.seeded_noise,
            missing=self.missing,
            incidents=tuple(self.incidents),
            report_client_metrics=self.report_client_metrics,
            own_evaluation=self._evaluates_itself,
        )

    @property
    def _evaluates_itself(self) -> bool:
        """Whether another `configure_evaluate` than this one asks clients to evaluate: that of a subclass, or of one object."""
        return self._overrides("configure_evaluate")

    def _overrides(self, name: str) -> bool:
        return getattr(getattr(self, name), "__func__", None) is not getattr(DPStrategy, name)

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement of all that was released so far."""
        key = (self.rules.charges, self._evaluator and self._evaluator.num_charged, self.facts)
        if self._stated is None or self._stated[0] != key:
            self._stated = (key, self.rules.explain(self.facts))
        return self._stated[1]

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
            ValueError: for a model with arrays that can't be made private or are not finite, clients that don't fit
                `num_clients`, or a target epsilon that is too small for one round.
            TimeoutError: if the clients don't register in time.
            RuntimeError: if no client sends a usable update in the first rounds, or in all rounds of a short run.
        """
        checks.integer("num_rounds", num_rounds, at_least=0)
        if evaluate_config and not (self._evaluates_itself or self._evaluator):
            raise ValueError(
                "evaluate_config: no client evaluates with this strategy, since its metrics would leave without protection; "
                "give evaluation=PrivateEvaluation(...), evaluate_fn with public data, or override configure_evaluate"
            )
        self._begin()
        layout = wire.Model.of(initial_arrays, frozen=self.frozen_arrays).layout
        if type(grid).__name__ == "InMemoryGrid":
            setattr(grid, "pull_interval", _PULL_SECONDS)  # noqa: B010
        result = Result(arrays=initial_arrays)
        self.rules.plan(num_rounds)
        roster = self._call_roll(grid)
        self.summary()
        log.info("%s parameters, %s clients on %s nodes", layout.size, len(roster.names), len(set(roster.nodes)))
        self._log_noise_and_signal(layout.size)
        self._evaluate(evaluate_fn, 0, result)
        try:
            configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
            self._run(grid, num_rounds, timeout, configs, evaluate_fn, result)
            self._check_usable_updates(ended=True)
        finally:  # what was released before a failure stays released
            for line in str(self.statement).splitlines():
                log.info("%s", line)
        return result

    def _run(
        self,
        grid: Grid,
        num_rounds: int,
        timeout: float,
        configs: tuple[ConfigRecord, ConfigRecord],
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        result: Result,
    ) -> None:
        """Run the rounds, and add their metrics and models to the result."""
        due = 0.0
        for server_round in range(1, num_rounds + 1):
            if time.monotonic() >= due or server_round == num_rounds:
                log.info("[ROUND %s/%s]", server_round, num_rounds)
                due = time.monotonic() + _LOG_SECONDS
            messages = self.configure_train(server_round, result.arrays, configs[0], grid)
            if server_round in self._unpaid:
                break
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, metrics = self.aggregate_train(server_round, replies)
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            if self._evaluates_itself or self._evaluator:
                messages = self.configure_evaluate(server_round, result.arrays, configs[1], grid)
                metrics = self.aggregate_evaluate(server_round, grid.send_and_receive(messages, timeout=timeout))
                if metrics is not None:
                    log.info("round %s: clients: %s", server_round, dict(metrics))
                    result.evaluate_metrics_clientapp[server_round] = metrics
            self._evaluate(evaluate_fn, server_round, result)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Draw the cohort, charge the round's release to the ledger, and return one message per node.

        If the budget does not cover the round, nothing is sent and nothing is charged.
        """
        roster = self._call_roll(grid)
        # Checked here, so that no `start` of a subclass can bypass it: then nothing is sent, and nothing is charged.
        # A run that has ended stays so: a later round may cost less, but the ledger may not cover its clients.
        if reason := "the run has ended" if self._unpaid else self.rules.why_stop(server_round, None):
            return self._stop(server_round, reason)
        started = time.monotonic()
        model = wire.Model.of(arrays, frozen=self.frozen_arrays)
        beside = self.rules.beside(model.layout.size) if isinstance(self.rules, SendsBeside) else None
        sent = arrays if beside is None else wire.with_beside(arrays, beside)
        asked = roster.by_node(self._cohort(server_round, roster))
        cohort = tuple(name for names in asked.values() for name in names)
        if reason := self.rules.why_stop(server_round, len(cohort)):
            return self._stop(server_round, reason)
        self.rules.charge(server_round, cohort)
        ask = self.rules.ask(model.layout.size, cohort)
        messages = [
            wire.train_message(
                node,
                roster.record_names,
                sent,
                config,
                wire.Instruction(
                    server_round=server_round,
                    method=self.rules.name,
                    clients=names,
                    ask=ask,
                    report_metrics=self.report_client_metrics,
                    frozen=model.frozen_positions,
                ),
            )
            for node, names in asked.items()
        ]
        self._round = Round(
            server_round=server_round,
            ask=ask,
            model=model,
            asked=asked,
            bytes_down=sum(wire.content_bytes(message.content) for message in messages),
            started=started,
            stock=not roster.hosting,
        )
        self._sent = messages
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and add up the replies, add the server's noise, and return the next global model and the round's numbers.

        None and None for a round that the budget did not cover.
        """
        now = self._round
        if now is None and server_round in self._unpaid:
            return None, None
        if now is None or now.server_round != server_round:
            raise RuntimeError(f"server_round={server_round}: aggregate_train needs configure_train of the same round first")
        sent, self._round, self._sent = self._sent, None, []
        collected = collect(
            replies,
            asked=now.asked,
            sent=sent,
            model=now.model,
            limits=self.rules.limits(now),
            stock=now.stock,
            seeded=self.seeded_noise,
        )
        self._note_seeds(collected)
        self._warn_of_constants(now, collected)
        vector = self._next_vector(now, collected)
        report = self._report(now, collected)
        self._refusal = next(iter(collected.refused.values()), self._refusal)
        self._check_usable_updates()
        metrics = MetricRecord({**report.public()})
        if self.report_client_metrics and collected.clients:
            means = {f"client-{name}": value / len(collected.clients) for name, value in collected.metrics.items()}
            self.client_metrics[server_round] = means
            metrics.update(means)
        return now.model.record(vector), metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """If a private evaluation is due, charge it and ask its cohort; otherwise ask no client.

        A subclass may override this and `aggregate_evaluate`, both or neither; the statement then says that such metrics are not
        covered.
        """
        evaluator = self._evaluator
        if evaluator is None or server_round in self._unpaid or not evaluator.due(server_round):
            return []
        roster = self._call_roll(grid)
        rng = self._generator("evaluating cohort", server_round)
        asked = roster.by_node(evaluator.cohort(roster.names, rng))
        evaluator.charge(server_round, tuple(name for names in asked.values() for name in names))
        if self.rounds:
            self.rounds[-1] = replace(self.rounds[-1], epsilon=self.epsilon)
        return evaluator.messages(server_round, roster, arrays, config, asked)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return value and standard error of every metric of a private evaluation; None where there is none."""
        evaluator = self._evaluator
        if evaluator is None or not evaluator.asked(server_round):
            return None
        collected = evaluator.collect(replies, seeded=self.seeded_noise)
        self._note_seeds(collected)
        try:
            told = evaluator.result(collected, self._generator("evaluation", server_round))
        except RoundLeftOut as why:
            refusal = next(iter(collected.refused.values()), None)
            log.warning("the evaluation of round %s was left out: %s%s", server_round, why, f"; {refusal}" if refusal else "")
            return None
        self.evaluations[server_round] = told
        return MetricRecord({**told})

    def line_of(self, server_round: int) -> dict[str, int | float]:
        """Return a round's numbers for people to see.

        They are those of its report, the metrics of its private evaluation as `private-...`, and, where clients were asked for
        training metrics, which are not private, their means as `client-...`.
        """
        line = {f"private-{name}": value for name, value in self.evaluations.get(server_round, {}).items()}
        line |= self.client_metrics.get(server_round, {})
        return line | (self.rounds[-1].public() if server_round else {"epsilon": 0.0})

    def summary(self) -> None:
        """Log what the run will do."""
        rules = self.rules
        expected = rules.sampling.expected_cohort(rules.num_clients)
        log.info("%s: %s, %g of %s clients expected a round", rules.title, rules.sampling, expected, rules.num_clients)
        if self._optimizer is not None:
            log.info("server optimiser %s: it works on the noised mean and costs no epsilon", self._optimizer.name)

    def initialize_parameters(self, client_manager: Any) -> NoReturn:
        """Raise `LegacyAppError`: Flower's old server API calls this first, and is not supported."""
        raise LegacyAppError(type(self).__name__)

    # Parts of a run

    def _log_noise_and_signal(self, dimension: int) -> None:
        """Log before the first round how the noise compares with the updates."""
        if not isinstance(self.rules, ComparesNoise):
            return
        noise, signal = self.rules.noise_and_signal(dimension)
        log.info("norm of the noise on the mean of round 1 %.3g, of the mean without it at most %.3g", noise, signal)
        if noise > signal:
            log.warning(
                "the noise on the mean is %.1f times as long as any mean without it: one round teaches little; more clients a "
                "round, less noise or a smaller model help, and so do more rounds within the budget",
                noise / signal,
            )

    def _make_evaluator(self, plan: PrivateEvaluation | LocalEvaluation) -> Evaluator | LocalEvaluator:
        """Return the evaluator that runs private evaluations.

        Raises:
            ValueError: if the plan is not of the method's kind: one ledger for all clients, or one each.
        """
        books = getattr(self.rules, "books", None)
        if isinstance(plan, LocalEvaluation) and isinstance(books, ClientBooks):
            return LocalEvaluator(plan, books)
        if isinstance(plan, PrivateEvaluation) and isinstance(self.rules, ClientLevelRules):
            return Evaluator(plan, self.rules)
        fit = "LocalEvaluation, with a budget of every client" if isinstance(books, ClientBooks) else "PrivateEvaluation"
        raise ValueError(f"evaluation: is a {type(plan).__name__}; {self.rules.title} takes a {fit}")

    def _call_roll(self, grid: Grid) -> Roster:
        """Return the current roster: nodes may have joined, left or rejoined since the last round."""
        first = self._register is None
        if self._register is None:
            self._check_evaluation_is_whole()
            rules = self.rules
            self._register = Register(
                rules.num_clients,
                timeout=self.registration_timeout,
                newcomers=rules.open_population,
                unfit=self._unfit,
                most_clients_per_node=self.most_clients_per_node,
                most_newcomers=self.most_newcomers,
            )
        roster = self._register.roster(grid)
        if first:
            if reason := self._fits(roster):
                self._register = None
                raise ValueError(reason)
            self.rules.open(roster.names)
        return roster

    def _check_evaluation_is_whole(self) -> None:
        """Refuse a strategy that asks clients to evaluate and does not read what they reply, or the other way round."""
        names = ("configure_evaluate", "aggregate_evaluate")
        own = [name for name in names if self._overrides(name)]
        if len(own) == 1:
            (other,) = set(names) - set(own)
            raise ValueError(
                f"{type(self).__name__} overrides {own[0]}, but not {other}: override both, or neither, so that what clients are "
                "asked and what their replies are read for go together"
            )

    def _report(self, now: Round, collected: Collected) -> RoundReport:
        self.missing += collected.missing
        report = RoundReport(
            server_round=now.server_round,
            cohort_size=now.cohort_size,
            replies=len(collected.clients),
            bytes_down=now.bytes_down,
            bytes_up=collected.num_bytes,
            bytes_per_client=self.rules.bytes_per_client(now, collected),
            seconds=time.monotonic() - now.started,
            epsilon=self.epsilon,
            secret_cohort=self.rules.secret_cohort,
            cost_per_device=self.rules.cost_per_device if isinstance(self.rules, CountsResources) else None,
        )
        self.rounds.append(report)
        return report

    def _note_seeds(self, collected: Collected) -> None:
        """Record, once, that replies with noise from a fixed seed were refused; not where that tells who was in a cohort."""
        if collected.seeded_clients and _SEEDED not in self.incidents and not self.secret_cohort:
            self.incidents.append(_SEEDED)

    def _stop(self, server_round: int, reason: str) -> list[Message]:
        """Record, once, that this round and all later ones are not run; return no messages.

        Raises:
            ValueError: if no round was run before: the model would be the initial one.
        """
        self._round = None
        if not self._unpaid:
            self.incidents.append(f"ended before round {server_round}: {reason}")
            log.info("%s", self.incidents[-1])
        self._unpaid.add(server_round)
        if not self.rounds:
            raise ValueError(f"no round was run: {self.incidents[-1]}")
        return []

    def _warn_of_constants(self, now: Round, collected: Collected) -> None:
        """Warn, once, of arrays that no reply of the first round changes: they get noise nevertheless.

        It reads sums without noise, which only a trusted server has, and writes only to the server's log.
        """
        if self._constants_checked or not collected.clients or now.ask.placement != "central":
            return
        self._constants_checked = True
        same = [name for name, array in now.layout.unflatten(collected.total).items() if not array.any()]
        if same and len(same) < len(now.layout.names):
            log.warning(
                "round %s: no reply changes %s, which noise is added to; name constant arrays in frozen_arrays",
                now.server_round,
                ", ".join(map(repr, same)),
            )

    def _next_vector(self, now: Round, collected: Collected) -> np.ndarray:
        """Return the next global model [d], float32; the last one if the round is left out, although it was charged."""
        try:
            vector = self.rules.combine(now, collected, self._generator("noise", now.server_round))
            if self._optimizer is not None:
                vector = self._optimizer.step(now.server_round, now.layout, now.vector, vector)
            if names := now.layout.overflows(vector):
                raise RoundLeftOut(f"array {names[0]!r} would leave the range of its dtype")
        except RoundLeftOut as why:
            self.incidents.append(f"round {now.server_round} was left out: {why}")
            log.warning("%s", self.incidents[-1])
            return now.vector
        return vector.astype(np.float32)

    def _fits(self, roster: Roster) -> str | None:
        """Return why these clients can't run this method, None if they can."""
        rules = self.rules
        if not roster.hosting:
            return f"{rules.title}: {rules.stock_refusal}" if rules.stock_refusal else None
        return self._unfit(roster.methods)

    def _unfit(self, methods: frozenset[str]) -> str | None:
        """Return why clients that run these methods can't take part, None if they can."""
        if self.rules.name not in methods:
            runs = ", ".join(sorted(methods)) or "no common method"
            return f"{self.rules.title}: clients must run {self.rules.name!r}; these run {runs}"
        if self._evaluator is not None and wire.EVALUATION not in methods:
            return (
                f"evaluation: these clients do not run {wire.EVALUATION!r}; use flower_dp.clients.DPClient, or "
                "LocalDPClient(evaluation=...)"
            )
        return None

    def _cohort(self, server_round: int, roster: Roster) -> np.ndarray:
        """Return the indices of the clients that are asked in a round."""
        rng = self._generator("cohort", server_round)
        return self.rules.with_budget(self.rules.sampling.choose(server_round, len(roster.names), rng), roster.names)

    def _check_usable_updates(self, *, ended: bool = False) -> None:
        """Fail a run in which no client ever sends a usable update: it would only spend budget."""
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
            log.info("round %s: evaluate_fn: %s", server_round, dict(metrics))
            result.evaluate_metrics_serverapp[server_round] = metrics


def _optional(name: str, value: int | None, *, at_least: int) -> int | None:
    return None if value is None else checks.integer(name, value, at_least=at_least)
