"""The one Flower strategy: it asks nodes for their clients, draws cohorts, charges the ledger, sends messages and checks replies.

A method gives it rules (`flower_dp.strategies.rules`): its releases, the computation of the next model from what they released,
and its statement. Rules never handle messages or the loop over rounds.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_dp import wire
from flower_dp.core import checks
from flower_dp.core.noise import Generator, noise_generator
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies import diagnostics
from flower_dp.strategies.exchange import Asked, PlainExchange
from flower_dp.strategies.legacy import LegacyAppError
from flower_dp.strategies.population.fit import why_none_fits, why_unfit
from flower_dp.strategies.population.roster import Register, Roster
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.replies import Collected, Missing
from flower_dp.strategies.releases.round import Round, RoundRelease
from flower_dp.strategies.rules import Options, Rules
from flower_dp.strategies.run_state import RoundReport, RunFacts, RunState
from flower_dp.strategies.server_optimizer import ServerOptimizer

log = logging.getLogger("flwr")

# A grid in this process answers at once; the default of 0.1 s would be most of a simulated round.
_PULL_SECONDS = 0.002
# Flower sends the log to the SuperLink while rounds run: a line for every quick round would slow them down.
_LOG_SECONDS = 1.0
_SEEDED = "replies with noise from a fixed seed were refused: for the clients that sent them nothing is stated against the server"
# Of a round number and a model: metrics by public data, or nothing.
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
# The releases of a round.
_TRAINING, _EVALUATION = "training", "evaluation"


class DPStrategy(Strategy):
    """A Flower strategy that runs a method's rules; `DPFedAvg` and the other strategies are this class with their own rules.

    Attributes:
        rules: the method's rules, with its ledgers.
        exchange: how the rows of a round's clients get to the server as one sum.
        seeded_noise: whether noise or sampling comes from a fixed seed; the run is not private then.

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
        if (plan := options.get("evaluation")) is not None:
            rules.evaluate(plan)
        self.exchange = PlainExchange()
        self.seeded_noise = self.noise_seed is not None
        self._run_state = RunState()
        self._initial = self.state
        self._begin()

    def _generator(self, *purpose: object) -> Generator:
        """Return a fresh generator for one draw of noise or of a cohort; no copy of the strategy can repeat it."""
        return noise_generator(self.noise_seed, "server", *purpose)

    def _begin(self) -> None:
        """Forget the last run."""
        self.state = self._initial
        # What belongs to one process: who is connected, what was sent and not answered, and a statement that was made already.
        self._register: Register | None = None
        self._asked: dict[str, Asked] = {}
        self._stated: tuple[Any, PrivacyStatement] | None = None

    @property
    def state(self) -> RunState:
        """All that this run needs to go on, as one value. Setting an earlier one continues from there."""
        optimizer = None if self._optimizer is None else self._optimizer.state
        return replace(self._run_state, method=self.rules.state, optimizer=optimizer)

    @state.setter
    def state(self, state: RunState) -> None:
        self._run_state = state
        self.rules.state = state.method
        if self._optimizer is not None and state.optimizer is not None:
            self._optimizer.state = state.optimizer

    def _note(self, **changes: Any) -> None:
        """Change fields of the run's state."""
        self._run_state = replace(self._run_state, **changes)

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
    def rounds(self) -> tuple[RoundReport, ...]:
        """The numbers of every round. Don't publish them as they are: see `RoundReport.public`."""
        return self._run_state.rounds

    @property
    def incidents(self) -> tuple[str, ...]:
        """What happened, in words."""
        return self._run_state.incidents

    @property
    def missing(self) -> Missing:
        """The number of requested updates that did not count, by reason."""
        return self._run_state.missing

    @property
    def evaluations(self) -> Mapping[int, Mapping[str, float]]:
        """Value and standard error of every metric of private evaluations, by round."""
        return self._run_state.evaluations

    @property
    def _releases(self) -> tuple[RoundRelease, ...]:
        evaluation = self.rules.evaluation
        return (self.rules.training,) if evaluation is None else (self.rules.training, evaluation.release)

    @property
    def secret_cohort(self) -> bool:
        """Whether an epsilon holds only if nobody knows how many clients train, or evaluate, in a round."""
        return any(release.secret_cohort for release in self._releases)

    @property
    def facts(self) -> RunFacts:
        """Facts for the statement, besides the ledgers."""
        return RunFacts(
            seeded_noise=self.seeded_noise,
            missing=self.missing,
            incidents=self.incidents,
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
        key = (self.rules.state, self.facts)
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
        evaluate_fn: EvaluateFn | None = None,
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
        if evaluate_config and not (self._evaluates_itself or self.rules.evaluation):
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
        diagnostics.log_noise_and_signal(self.rules, layout.size)
        _evaluate(evaluate_fn, 0, result)
        try:
            configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
            self._run(grid, num_rounds, timeout, configs, evaluate_fn, result)
            diagnostics.check_usable_updates(self._run_state, self.num_clients, ended=True)
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
        evaluate_fn: EvaluateFn | None,
        result: Result,
    ) -> None:
        """Run the rounds, and add their metrics and models to the result."""
        due = 0.0
        for server_round in range(1, num_rounds + 1):
            if time.monotonic() >= due or server_round == num_rounds:
                log.info("[ROUND %s/%s]", server_round, num_rounds)
                due = time.monotonic() + _LOG_SECONDS
            messages = self.configure_train(server_round, result.arrays, configs[0], grid)
            if self._run_state.ended_before:
                break
            arrays, metrics = self.aggregate_train(server_round, self.exchange.replies(grid, messages, timeout))
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            if self._evaluates_itself or self.rules.evaluation:
                messages = self.configure_evaluate(server_round, result.arrays, configs[1], grid)
                metrics = self.aggregate_evaluate(server_round, self.exchange.replies(grid, messages, timeout))
                if metrics is not None:
                    log.info("round %s: clients: %s", server_round, dict(metrics))
                    result.evaluate_metrics_clientapp[server_round] = metrics
            _evaluate(evaluate_fn, server_round, result)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Draw the cohort, charge the round's release to the ledger, and return one message per node.

        If the budget does not cover the round, nothing is sent and nothing is charged.
        """
        roster = self._call_roll(grid)
        # Checked here, so that no `start` of a subclass can bypass it: then nothing is sent, and nothing is charged.
        # A run that has ended stays so: a later round may cost less, but the ledger may not cover its clients.
        if reason := "the run has ended" if self._run_state.ended_before else self.rules.why_stop(server_round, None):
            return self._stop(server_round, reason)
        started = time.monotonic()
        model = wire.Model.of(arrays, frozen=self.frozen_arrays)
        beside = self.rules.beside(model.layout.size) if hasattr(self.rules, "beside") else None
        sent = arrays if beside is None else wire.with_beside(arrays, beside)
        release = self.rules.training
        asked = roster.by_node(release.cohort(roster.names, self._generator("cohort", server_round)))
        if reason := self.rules.why_stop(server_round, sum(map(len, asked.values()))):
            return self._stop(server_round, reason)
        now = self._opened(release, server_round, model.layout.size, model, asked, stock=not roster.hosting)
        words = {"report_metrics": self.report_client_metrics, "frozen": model.frozen_positions}
        messages = self.exchange.messages(now, roster, sent, config, **words)
        bytes_down = sum(wire.content_bytes(message.content) for message in messages)
        self._asked[_TRAINING] = self._sent(release, replace(now, bytes_down=bytes_down, started=started), messages)
        return messages

    def _opened(
        self,
        release: RoundRelease,
        server_round: int,
        length: int,
        model: wire.Model,
        asked: dict[int, tuple[str, ...]],
        *,
        stock: bool,
    ) -> Round:
        """Charge a release for its cohort, and return what is asked of it: nothing is sent before it is charged."""
        cohort = tuple(name for names in asked.values() for name in names)
        release.charge(cohort)
        ask = release.ask(length, cohort)
        return Round(
            server_round=server_round, method=release.name, ask=ask, length=length, model=model, asked=asked, stock=stock
        )

    def _sent(self, release: RoundRelease, now: Round, messages: list[Message]) -> Asked:
        return Asked(now=now, limits=release.limits(now), sent=messages)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and add up the replies, add the server's noise, and return the next global model and the round's numbers.

        None and None for a round that the budget did not cover.
        """
        asked = self._asked.get(_TRAINING)
        if asked is None and self._run_state.ended_before:
            return None, None
        if asked is None or asked.now.server_round != server_round:
            raise RuntimeError(f"server_round={server_round}: aggregate_train needs configure_train of the same round first")
        del self._asked[_TRAINING]
        now, collected = asked.now, self.exchange.total(asked, replies, seeded=self.seeded_noise)
        self._note_seeds(collected)
        if not any(report.replies for report in self.rounds):
            diagnostics.log_constants(now, collected)
        vector = self._next_vector(now, collected)
        report = self._report(now, collected)
        self._note(model=vector, refusal=next(iter(collected.refused.values()), self._run_state.refusal))
        diagnostics.check_usable_updates(self._run_state, self.num_clients)
        metrics = MetricRecord({**report.public()})
        if self.report_client_metrics and collected.clients:
            metrics.update({f"client-{name}": value / len(collected.clients) for name, value in collected.metrics.items()})
        return now.model.record(vector), metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """If a private evaluation is due, charge it and ask its cohort; otherwise ask no client.

        A subclass may override this and `aggregate_evaluate`, both or neither; the statement then says that such metrics are not
        covered.
        """
        evaluation = self.rules.evaluation
        if evaluation is None or server_round >= (self._run_state.ended_before or math.inf) or not evaluation.due(server_round):
            return []
        roster = self._call_roll(grid)
        model, release = wire.Model.of(arrays, frozen=self.frozen_arrays), evaluation.release
        asked = roster.by_node(release.cohort(roster.names, self._generator("evaluating cohort", server_round)))
        now = self._opened(release, server_round, evaluation.length, model, asked, stock=not roster.hosting)
        if self.rounds:
            self._note(rounds=(*self.rounds[:-1], replace(self.rounds[-1], epsilon=self.epsilon)))
        messages = self.exchange.messages(now, roster, arrays, config)
        self._asked[_EVALUATION] = self._sent(release, now, messages)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return value and standard error of every metric of a private evaluation; None where there is none."""
        evaluation, asked = self.rules.evaluation, self._asked.get(_EVALUATION)
        if evaluation is None or asked is None or asked.now.server_round != server_round:
            return None
        del self._asked[_EVALUATION]
        collected = self.exchange.total(asked, replies, seeded=self.seeded_noise)
        self._note_seeds(collected)
        try:
            told = evaluation.result(asked.now, collected, self._generator("evaluation", server_round))
        except RoundLeftOut as why:
            refusal = next(iter(collected.refused.values()), None)
            log.warning("the evaluation of round %s was left out: %s%s", server_round, why, f"; {refusal}" if refusal else "")
            return None
        self._note(evaluations={**self.evaluations, server_round: told})
        return MetricRecord({**told})

    def line_of(self, server_round: int) -> dict[str, int | float]:
        """Return a round's public numbers: those of its report, and the metrics of its private evaluation as `private-...`."""
        line = {f"private-{name}": value for name, value in self.evaluations.get(server_round, {}).items()}
        return line | (self.rounds[-1].public() if server_round else {"epsilon": 0.0})

    def summary(self) -> None:
        """Log what the run will do."""
        rules = self.rules
        sampling = rules.training.sampling
        expected = sampling.expected_cohort(rules.num_clients)
        log.info("%s: %s, %g of %s clients expected a round", rules.title, sampling, expected, rules.num_clients)
        if self._optimizer is not None:
            log.info("server optimiser %s: it works on the noised mean and costs no epsilon", self._optimizer.name)

    def initialize_parameters(self, client_manager: Any) -> NoReturn:
        """Raise `LegacyAppError`: Flower's old server API calls this first, and is not supported."""
        raise LegacyAppError(type(self).__name__)

    # Parts of a run

    def _call_roll(self, grid: Grid) -> Roster:
        """Return the current roster: nodes may have joined, left or rejoined since the last round."""
        first = self._register is None
        if self._register is None:
            self._check_evaluation_is_whole()
            rules = self.rules
            self._register = Register(
                rules.num_clients,
                timeout=self.registration_timeout,
                newcomers=all(release.open_population for release in self._releases),
                unfit=partial(why_unfit, self.rules),
                most_clients_per_node=self.most_clients_per_node,
                most_newcomers=self.most_newcomers,
            )
        roster = self._register.roster(grid)
        if first:
            if reason := why_none_fits(self.rules, roster):
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
        report = RoundReport(
            server_round=now.server_round,
            cohort_size=now.cohort_size,
            replies=len(collected.clients),
            bytes_down=now.bytes_down,
            bytes_up=collected.num_bytes,
            bytes_per_client=self.rules.training.bytes_per_client(now, collected),
            seconds=time.monotonic() - now.started,
            epsilon=self.epsilon,
            secret_cohort=self.rules.training.secret_cohort,
            numbers=self.rules.numbers(),
        )
        self._note(rounds=(*self.rounds, report), missing=self.missing + collected.missing)
        return report

    def _note_seeds(self, collected: Collected) -> None:
        """Record, once, that replies with noise from a fixed seed were refused; not where that tells who was in a cohort."""
        if collected.seeded_clients and _SEEDED not in self.incidents and not self.secret_cohort:
            self._note(incidents=(*self.incidents, _SEEDED))

    def _stop(self, server_round: int, reason: str) -> list[Message]:
        """Record, once, that this round and all later ones are not run; return no messages.

        Raises:
            ValueError: if no round was run before: the model would be the initial one.
        """
        self._asked.pop(_TRAINING, None)
        if not self._run_state.ended_before:
            self._note(ended_before=server_round, incidents=(*self.incidents, f"ended before round {server_round}: {reason}"))
            log.info("%s", self.incidents[-1])
        if not self.rounds:
            raise ValueError(f"no round was run: {self.incidents[-1]}")
        return []

    def _next_vector(self, now: Round, collected: Collected) -> np.ndarray:
        """Return the next global model [d], float32; the last one if the round is left out, although it was charged."""
        try:
            vector = self.rules.learn(now, collected, self._generator("noise", now.server_round))
            if self._optimizer is not None:
                vector = self._optimizer.step(now.server_round, now.layout, now.vector, vector)
            if names := now.layout.overflows(vector):
                raise RoundLeftOut(f"array {names[0]!r} would leave the range of its dtype")
        except RoundLeftOut as why:
            self._note(incidents=(*self.incidents, f"round {now.server_round} was left out: {why}"))
            log.warning("%s", self.incidents[-1])
            return now.vector
        return vector.astype(np.float32)


def _evaluate(evaluate_fn: EvaluateFn | None, server_round: int, result: Result) -> None:
    metrics = evaluate_fn(server_round, result.arrays) if evaluate_fn else None
    if metrics is not None:
        log.info("round %s: evaluate_fn: %s", server_round, dict(metrics))
        result.evaluate_metrics_serverapp[server_round] = metrics


def _optional(name: str, value: int | None, *, at_least: int) -> int | None:
    return None if value is None else checks.integer(name, value, at_least=at_least)
