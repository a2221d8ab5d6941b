"""The one Flower strategy of all methods. It queries nodes, draws cohorts, charges the ledger, sends requests and checks replies.

A method gives it rules (`flower_dp.strategies.rules`): its releases, the computation of the next model from them, and its
statement. Rules never handle messages or the loop over rounds.
"""

import logging
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_dp import wire
from flower_dp.core import checks
from flower_dp.privacy.charges import CostScope
from flower_dp.privacy.private_file import BudgetSpentError
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies import diagnostics
from flower_dp.strategies.evaluate_fn import EvaluateFn, named
from flower_dp.strategies.exchange import PlainExchange
from flower_dp.strategies.legacy import LegacyAppError
from flower_dp.strategies.loop import Rounds
from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.population.eligibility import changing_names
from flower_dp.strategies.rules import MethodRules, StrategyOptions, check_options
from flower_dp.strategies.run_lifecycle import with_run_lifecycle
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.strategies.run_view import RunView
from flower_dp.strategies.server_optimizer import ServerOptimizer
from flower_dp.strategies.session import Session

log = logging.getLogger("flwr")

# A subclass with its own evaluation must override both: see `_known_clients`.
_EVALUATING = ("configure_evaluate", "aggregate_evaluate")


class DPStrategy(RunView, Strategy):
    """A Flower strategy that runs a method's rules; `DPFedAvg` and the other strategies are this class with their own rules.

    Args:
        rules: the method's rules.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid, before any request; the message names field and value.

    Example:
        >>> from flower_dp.core.sampling import FullSampling
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps
        >>> from flower_dp.strategies import DPStrategy
        >>> from flower_dp.strategies.dp_fedpaq import DPFedPAQRules
        >>> from flower_dp.strategies.releases.client_ledgers import Population
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=1.0, update_clip_norm=0.1)
        >>> population = Population(num_clients=10, num_records=80, epsilon=4.0)
        >>> rules = DPFedPAQRules(population, steps, FullSampling(), delta=1e-5, quantization_levels=None)
        >>> DPStrategy(rules, registration_timeout=60.0).epsilon
        0.0
    """

    def __init__(self, rules: MethodRules, **options: Unpack[StrategyOptions]) -> None:
        check_options(type(self).__name__, options)
        self.report_client_metrics = options.get("report_client_metrics", False)
        self.registration_timeout = options.get("registration_timeout", 600.0)
        self.frozen_arrays = tuple(options.get("frozen_arrays", ()))
        self.max_clients_per_node = options.get("max_clients_per_node")
        self.max_new_clients = options.get("max_new_clients")
        optimizer = options.get("server_optimizer")
        self._optimizer = None if optimizer is None else ServerOptimizer(optimizer)
        self.on_round = options.get("on_round")
        noise_seed, ledger = options.get("noise_seed"), options.get("ledger")
        self._session = Session(rules, PlainExchange(), optimizer=self._optimizer, noise_seed=noise_seed, ledger=ledger)
        if options.get("evaluation") is not None and self._session.evaluation is None:
            raise ValueError(f"evaluation: {type(self).__name__} does not pass it to its rules; pass evaluation=... to them")
        self._had_changing_names = False  # in any run of this strategy
        self._stated: tuple[Any, PrivacyStatement] | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if not hasattr(cls.start, "__wrapped__"):
            setattr(cls, "start", with_run_lifecycle(cls.start))  # noqa: B010

    def begin(self) -> None:
        """Start a new run. Its joint epsilon includes earlier runs if all have the same `ledger`, or none has one."""
        self._session.begin()

    @property
    def state(self) -> RunState:
        """The state from which this run resumes, as one value. Assign the state of another process to continue from it.

        A state without charges starts a new run.

        Raises:
            RuntimeError: if a round is open: another state would lack its charge.
            LedgerError: if this run has other charges than the state: its statement would lack them.
            ValueError: if another strategy made the state: its charges would get another cost.
        """
        return self._session.state

    @state.setter
    def state(self, state: RunState) -> None:
        self._session.state = state

    def plan(self, num_rounds: int, names: tuple[str, ...] | None = None) -> None:
        """Prepare for up to `num_rounds` rounds. `start` calls it; a subclass with its own `start` must call it, too.

        Args:
            num_rounds: maximum number of rounds of the run.
            names: names of all clients, if they are known before the first query.

        Raises:
            ValueError: if `num_rounds` is not a whole number >= 0.
        """
        self._session.register_clients(names, checks.integer("num_rounds", num_rounds, at_least=0))

    @property
    def facts(self) -> RunFacts:
        """The facts for the statement, besides the ledgers."""
        record = self._session.record
        return RunFacts(
            seeded_noise=self.seeded_noise or record.not_private,
            missing=record.missing,
            incidents=record.incidents,
            # A run that resumes without the option has still sent such metrics before.
            report_client_metrics=self.report_client_metrics or record.asked_metrics or bool(record.client_metrics),
            custom_evaluation=self._overrides("configure_evaluate") or record.custom_evaluation,
            changing_names=record.changing_names,
            num_known=record.num_known,
        )

    def _overrides(self, name: str) -> bool:
        """Return whether a subclass, or this object, overrides a method of this class."""
        return getattr(getattr(self, name), "__func__", None) is not getattr(DPStrategy, name)

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement of everything released so far."""
        charge_log = self._session.log
        # The run's id is part of the key: another run with the same releases has another joint epsilon.
        state = self._session.current
        key = (charge_log.run, state, self.facts)
        if self._stated is None or self._stated[0] != key:
            statement = self.rules.statement(state, self.facts)
            joint = charge_log.joint(CostScope(unit=statement.unit, relation=statement.relation), statement.delta)
            if joint is not None and (self._had_changing_names or self.facts.changing_names):
                # The ledger counts a client with two names as two clients, so its joint cost is unknown.
                joint = replace(joint, epsilon=math.inf, accountant="none")
            self._stated = (key, replace(statement, joint=joint))
        return self._stated[1]

    # Flower's Strategy

    @with_run_lifecycle
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> Result:
        """Run up to `num_rounds` rounds, fewer if the target epsilon ends the run first; arguments as Flower's.

        `evaluate_fn(round, arrays)` sees the initial model as round 0; give it public data. `timeout` bounds each round, in
        seconds. With a `checkpoint_dir`, charges and checkpoints are on the disk. After a crash `resume=True` resumes from the
        last checkpoint; a round that was charged and not finished stays charged. See `docs/resuming.md`.

        Raises:
            CheckpointError: if the folder has a run and `resume` is false, or a run that these arguments can't resume.
            ValueError: for a model with arrays that can't be made private or are not finite; for clients that don't fit
                `num_clients`; for a target epsilon that is too small for one round.
            TimeoutError: if the clients don't register in time.
            RuntimeError: if all nodes report that their clients can't train. If `evaluate_fn` fails. If no client sends a usable
                update in some rounds in a row, or in all rounds of a short run. For a second call within a subclass's `start`,
                or after rounds of a custom loop.
        """
        checks.integer("num_rounds", num_rounds, at_least=0)
        clients_evaluate = self._overrides("configure_evaluate") or self._session.evaluation is not None
        if evaluate_config and not clients_evaluate:
            raise ValueError(
                "evaluate_config: no client evaluates with this strategy, since its metrics would leave without protection; "
                "pass evaluation=PrivateEvaluation(...), or evaluate_fn with public data, or override configure_evaluate"
            )
        if self._session.log.charges.numbers() != self._session.finished:
            raise RuntimeError(
                "start: rounds were charged already, and a new run would forget their cost; call super().start(...) once, and "
                "resume a run with resume=True and its checkpoint_dir"
            )
        self.begin()
        model = wire.Model.of(initial_arrays, frozen=self.frozen_arrays)
        if self._optimizer is not None:
            self._optimizer.check(model.layout, model.vector)
        setting = diagnostics.run_fingerprint(self.rules, model.layout, self._optimizer, num_rounds)
        if (checkpoint := self._session.writer.begin(setting)) is None:
            self.plan(num_rounds)
        else:
            self._session.resume(checkpoint)
        known_clients = self._known_clients(grid)
        self.summary()
        diagnostics.log_start(self.rules, known_clients, model, self.facts)
        rounds = Rounds(
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config or ConfigRecord(),
            evaluate_config=evaluate_config or ConfigRecord(),
            evaluate_fn=None if evaluate_fn is None else named(evaluate_fn),
            clients_evaluate=clients_evaluate,
            overridden=frozenset(name for name in ("aggregate_train", "aggregate_evaluate") if self._overrides(name)),
        )
        result = rounds.run(self, self._session, grid, initial_arrays)
        diagnostics.check_usable_updates(self._session.record, self.num_clients, ended=True)
        return result

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Draw the cohort, charge the round's release to the ledger, and return one message per node.

        If the budget does not cover the round, nothing is charged and nothing is sent.
        """
        if (journal := self._session.journal) is not None:
            journal.flush()
        session, is_first = self._session, not self._session.knows_clients
        model = wire.Model.of(arrays, frozen=self.frozen_arrays)
        if is_first and self._optimizer is not None:  # a subclass's own `start` has not checked it
            self._optimizer.check(model.layout, model.vector)
        known_clients = self._known_clients(grid)
        session.update_state(
            asked_metrics=session.record.asked_metrics or self.report_client_metrics,
            custom_evaluation=session.record.custom_evaluation or self._overrides("configure_evaluate"),
            changing_names=session.record.changing_names or bool(changing_names(self.rules, known_clients)),
        )
        self._had_changing_names |= session.record.changing_names
        session.writer.keep(server_round - 1, arrays, session.state, round_complete=True)
        if is_first:
            diagnostics.log_start(self.rules, known_clients, model, self.facts)
        # Checked here, so that no subclass's `start` can bypass it: no charge and no message follows.
        # A run that has ended stays ended: a later round may cost less, but the ledger may not cover its clients.
        if session.record.ended_before:
            return session.stop(server_round, "the run has ended")
        if reason := self.rules.stop_reason(session.current, server_round, None):
            return session.stop(server_round, reason)
        drawn = session.draw_cohort(session.training, known_clients, "cohort", server_round)
        if reason := self.rules.stop_reason(session.current, server_round, sum(map(len, drawn[1].values()))):
            return session.stop(server_round, reason)
        try:
            return session.ask(
                session.training,
                server_round,
                drawn,
                size=model.layout.size,
                model=model,
                known_clients=known_clients,
                arrays=arrays,
                config=config,
                grid=grid,
                report_metrics=self.report_client_metrics,
                frozen=model.frozen_positions,
            )
        except BudgetSpentError as why:
            return session.stop(server_round, str(why))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and add up the replies, add the server's noise, and return the next global model and the round's numbers.

        If the budget did not cover the round, return None and None.
        """
        session = self._session
        if session.record.ended_before and session.training.name not in session.pending:
            return None, None
        now, collected, vector = session.next_model(server_round, replies)
        metrics = MetricRecord({**session.record.rounds[-1].public()})
        if self.report_client_metrics and collected.clients:
            means = {f"client-{name}": value / len(collected.clients) for name, value in collected.metrics.items()}
            session.update_state(client_metrics={**session.record.client_metrics, server_round: means})
            metrics.update(means)
        model = now.model.record(vector)
        if (journal := self._session.journal) is not None:
            journal.released(server_round, model)
        session.writer.keep(server_round, model, session.state, round_complete=False)
        return model, metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Charge a private evaluation and return its requests, if one is due; otherwise request nothing.

        After three evaluations in a row without a reply, of enough clients, the run has no more of them.

        A subclass may override this and `aggregate_evaluate`, both or neither. The statement then says that such metrics are not
        covered.
        """
        session, evaluation = self._session, self._session.evaluation
        if evaluation is None or server_round >= (session.record.ended_before or math.inf):
            return []
        if not evaluation.due(session.log.charges, server_round):
            return []
        if session.is_charged(evaluation, server_round):  # in a resumed run: it was charged, then interrupted
            return []
        if diagnostics.evaluation_stop_reason(session.record, self.num_clients):
            return []
        known_clients = self._known_clients(grid)
        try:
            messages = session.ask(
                evaluation,
                server_round,
                session.draw_cohort(evaluation, known_clients, "evaluating cohort", server_round),
                size=evaluation.length,
                model=wire.Model.of(arrays, frozen=self.frozen_arrays),
                known_clients=known_clients,
                arrays=arrays,
                config=config,
                grid=grid,
            )
        except BudgetSpentError as why:
            log.warning("The evaluation of round %s was left out: %s", server_round, why)
            return []
        if self.rounds:
            session.update_state(rounds=(*self.rounds[:-1], replace(self.rounds[-1], epsilon=self.epsilon)))
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return value and standard error of every metric of a private evaluation; None without one."""
        noised = self._session.add_evaluation(server_round, replies)
        return None if noised is None else MetricRecord({**noised})

    def summary(self) -> None:
        """Log the method, its sampling and the server optimizer."""
        diagnostics.log_summary(self.rules, self._optimizer)

    def initialize_parameters(self, client_manager: Any) -> NoReturn:
        """Raise `LegacyAppError`: Flower's old server API, which calls this first, is not supported."""
        raise LegacyAppError(type(self).__name__)

    def close(self) -> None:
        """Release the ledger, so that other runs can write to it; `start` calls it at its end."""
        self._session.log.close()

    def _known_clients(self, grid: Grid) -> KnownClients:
        """Return the clients as they are now."""
        if not self._session.knows_clients and len(overridden := [name for name in _EVALUATING if self._overrides(name)]) == 1:
            (other,) = {*_EVALUATING} - {*overridden}
            raise ValueError(
                f"{type(self).__name__} overrides {overridden[0]}, but not {other}: override both, or neither, so that the "
                "request and the reading of its replies match"
            )
        return self._session.known_clients(
            grid,
            timeout=self.registration_timeout,
            max_clients_per_node=self.max_clients_per_node,
            max_new_clients=self.max_new_clients,
        )
