"""The one Flower strategy: it asks nodes for their clients, draws cohorts, charges the ledger, sends messages and checks replies.

A method gives it rules (`flower_dp.strategies.rules`): its releases, the computation of the next model from what they released,
and its statement. Rules never handle messages or the loop over rounds.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_dp import wire
from flower_dp.core import checks
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies import diagnostics
from flower_dp.strategies.exchange import PlainExchange
from flower_dp.strategies.journal import Journal, observed
from flower_dp.strategies.legacy import LegacyAppError
from flower_dp.strategies.loop import EvaluateFn, Rounds
from flower_dp.strategies.population.client_manager import ClientManager, KnownClients
from flower_dp.strategies.population.fit import check_overrides, why_none_fits, why_unfit
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.replies import Missing
from flower_dp.strategies.rules import Options, Rules
from flower_dp.strategies.run import Run
from flower_dp.strategies.run_state import RoundReport, RunFacts, RunState
from flower_dp.strategies.server_optimizer import ServerOptimizer

log = logging.getLogger("flwr")

# A grid in this process answers at once; the default of 0.1 s would be most of a simulated round.
_PULL_SECONDS = 0.002
# What a subclass overrides together, if its clients evaluate in its own way.
_EVALUATING = ("configure_evaluate", "aggregate_evaluate")


class DPStrategy(Strategy):
    """A Flower strategy that runs a method's rules; `DPFedAvg` and the other strategies are this class with their own rules.

    Attributes:
        rules: the method's rules, with its ledgers.

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
        self.frozen_arrays = tuple(options.get("frozen_arrays", ()))
        self.most_clients_per_node = _optional("most_clients_per_node", options.get("most_clients_per_node"), at_least=1)
        self.most_newcomers = _optional("most_newcomers", options.get("most_newcomers"), at_least=0)
        optimizer = options.get("server_optimizer")
        self._optimizer = None if optimizer is None else ServerOptimizer(optimizer)
        self.on_round = options.get("on_round")
        if self.on_round is not None and not callable(self.on_round):
            raise ValueError(f"on_round={self.on_round!r}: must be a function of a round's numbers, such as TensorBoard(folder)")
        self.journal: Journal | None = None  # of the run that `start` runs now
        if (plan := options.get("evaluation")) is not None:
            rules.evaluate(plan)
        self._run = Run(rules, PlainExchange(), self._optimizer, options.get("noise_seed"))
        self._begin()

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if not hasattr(cls.start, "__wrapped__"):
            setattr(cls, "start", observed(cls.start))  # noqa: B010

    def _begin(self) -> None:
        """Forget the last run."""
        self._run.begin()
        # Who is connected, and a statement that was made already, belong to one process.
        self._manager: ClientManager | None = None
        self._stated: tuple[Any, PrivacyStatement] | None = None

    @property
    def state(self) -> RunState:
        """All that this run needs to go on, as one value. Setting an earlier one continues from there."""
        return self._run.state

    @state.setter
    def state(self, state: RunState) -> None:
        self._run.state = state

    @property
    def noise_seed(self) -> int | None:
        """For tests only: of fixed noise and sampling, which make the run not private."""
        return self._run.noise_seed

    @property
    def seeded_noise(self) -> bool:
        """Whether noise or sampling comes from a fixed seed; the run is not private then."""
        return self.noise_seed is not None

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
        return self._run.record.rounds

    @property
    def incidents(self) -> tuple[str, ...]:
        """What happened, in words."""
        return self._run.record.incidents

    @property
    def missing(self) -> Missing:
        """The number of requested updates that did not count, by reason."""
        return self._run.record.missing

    @property
    def client_metrics(self) -> Mapping[int, Mapping[str, float]]:
        """Means of the training metrics that clients were asked for, by round; they are not private."""
        return self._run.record.client_metrics

    @property
    def evaluations(self) -> Mapping[int, Mapping[str, float]]:
        """Value and standard error of every metric of private evaluations, by round."""
        return self._run.record.evaluations

    @property
    def secret_cohort(self) -> bool:
        """Whether an epsilon holds only if nobody knows how many clients train, or evaluate, in a round."""
        return any(release.secret_cohort for release in self._run.releases)

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
            self._stated = (key, self.rules.statement(self.facts))
        return self._stated[1]

    # Flower's Strategy

    @observed
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
        self.rules.plan(num_rounds)
        known_clients = self._known_clients(grid)
        self.summary()
        log.info("%s parameters, %s clients on %s nodes", layout.size, len(known_clients.names), len(set(known_clients.nodes)))
        diagnostics.log_noise_and_signal(self.rules, layout.size)
        rounds = Rounds(
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config or ConfigRecord(),
            evaluate_config=evaluate_config or ConfigRecord(),
            evaluate_fn=evaluate_fn,
            clients_evaluate=self._evaluates_itself or self.rules.evaluation is not None,
        )
        try:
            result = rounds.run(self, self._run, grid, initial_arrays)
            diagnostics.check_usable_updates(self._run.record, self.num_clients, ended=True)
        finally:  # what was released before a failure stays released
            for line in str(self.statement).splitlines():
                log.info("%s", line)
        return result

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Draw the cohort, charge the round's release to the ledger, and return one message per node.

        If the budget does not cover the round, nothing is sent and nothing is charged.
        """
        if self.journal is not None:
            self.journal.flush(self)
        run, is_first = self._run, self._manager is None
        known_clients = self._known_clients(grid)
        model = wire.Model.of(arrays, frozen=self.frozen_arrays)
        if is_first:  # a subclass has its own `start`; that of this class has logged it
            diagnostics.log_noise_and_signal(self.rules, model.layout.size)
        # Checked here, so that no `start` of a subclass can bypass it: then nothing is sent, and nothing is charged.
        # A run that has ended stays so: a later round may cost less, but the ledger may not cover its clients.
        if reason := "the run has ended" if run.record.ended_before else self.rules.why_stop(server_round, None):
            return run.stop(server_round, reason)
        release = self.rules.training
        asked = run.drawn(release, known_clients, "cohort", server_round)
        if reason := self.rules.why_stop(server_round, sum(map(len, asked.values()))):
            return run.stop(server_round, reason)
        return run.ask(
            release,
            server_round,
            length=release.row_length(model.layout.size),
            model=model,
            asked=asked,
            known_clients=known_clients,
            arrays=arrays,
            config=config,
            report_metrics=self.report_client_metrics,
            frozen=model.frozen_positions,
        )

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and add up the replies, add the server's noise, and return the next global model and the round's numbers.

        None and None for a round that the budget did not cover.
        """
        run, release = self._run, self.rules.training
        if not run.waits(release, server_round):
            if run.record.ended_before and release.name not in run.asked:
                return None, None
            raise RuntimeError(f"server_round={server_round}: aggregate_train needs configure_train of the same round first")
        now, collected = run.total(release, replies)
        vector = run.learn(now, collected)
        metrics = MetricRecord({**run.report(now, collected, vector, epsilon=self.epsilon).public()})
        if self.report_client_metrics and collected.clients:
            means = {f"client-{name}": value / len(collected.clients) for name, value in collected.metrics.items()}
            run.note(client_metrics={**run.record.client_metrics, server_round: means})
            metrics.update(means)
        model = now.model.record(vector)
        if self.journal is not None:
            self.journal.released(server_round, model)
        return model, metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """If a private evaluation is due, charge it and ask its cohort; otherwise ask no client.

        A subclass may override this and `aggregate_evaluate`, both or neither; the statement then says that such metrics are not
        covered.
        """
        run, evaluation = self._run, self.rules.evaluation
        if evaluation is None or server_round >= (run.record.ended_before or math.inf) or not evaluation.due(server_round):
            return []
        known_clients, release = self._known_clients(grid), evaluation.release
        messages = run.ask(
            release,
            server_round,
            length=evaluation.length,
            model=wire.Model.of(arrays, frozen=self.frozen_arrays),
            asked=run.drawn(release, known_clients, "evaluating cohort", server_round),
            known_clients=known_clients,
            arrays=arrays,
            config=config,
        )
        if self.rounds:
            run.note(rounds=(*self.rounds[:-1], replace(self.rounds[-1], epsilon=self.epsilon)))
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return value and standard error of every metric of a private evaluation; None where there is none."""
        run, evaluation = self._run, self.rules.evaluation
        if evaluation is None or not run.waits(evaluation.release, server_round):
            return None
        now, collected = run.total(evaluation.release, replies)
        try:
            noised = evaluation.result(now, collected, run.generator("evaluation", server_round))
        except RoundLeftOut as why:
            refusal = next(iter(collected.refused.values()), None)
            log.warning("the evaluation of round %s was left out: %s%s", server_round, why, f"; {refusal}" if refusal else "")
            return None
        run.note(evaluations={**self.evaluations, server_round: noised})
        return MetricRecord({**noised})

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
        sampling = rules.training.sampling
        expected = sampling.expected_cohort(rules.num_clients)
        log.info("%s: %s, %g of %s clients expected a round", rules.title, sampling, expected, rules.num_clients)
        if self._optimizer is not None:
            log.info("server optimiser %s: it works on the noised mean and costs no epsilon", self._optimizer.name)

    def initialize_parameters(self, client_manager: Any) -> NoReturn:
        """Raise `LegacyAppError`: Flower's old server API calls this first, and is not supported."""
        raise LegacyAppError(type(self).__name__)

    # Parts of a run

    def _known_clients(self, grid: Grid) -> KnownClients:
        """Return the clients as they are now: nodes may have joined, left or rejoined since the last round."""
        first = self._manager is None
        if self._manager is None:
            check_overrides(type(self).__name__, {name: self._overrides(name) for name in _EVALUATING})
            rules = self.rules
            self._manager = ClientManager(
                rules.num_clients,
                timeout=self.registration_timeout,
                newcomers=all(release.open_population for release in self._run.releases),
                unfit=partial(why_unfit, self.rules),
                most_clients_per_node=self.most_clients_per_node,
                most_newcomers=self.most_newcomers,
            )
        known_clients = self._manager.known_clients(grid)
        if first:
            if reason := why_none_fits(self.rules, known_clients):
                self._manager = None
                raise ValueError(reason)
            self.rules.open(known_clients.names)
        return known_clients


def _optional(name: str, value: int | None, *, at_least: int) -> int | None:
    return None if value is None else checks.integer(name, value, at_least=at_least)
