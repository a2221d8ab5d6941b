"""The loop over the rounds of a run."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_dp.strategies.evaluate_fn import EvaluateFn
from flower_dp.strategies.exchange.stream import Replies
from flower_dp.strategies.session import Session

log = logging.getLogger("flwr")

# Flower sends the log to the SuperLink while rounds run: a line for every quick round would slow them down.
_LOG_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The rounds of a run, with the settings of each.

    Attributes:
        num_rounds: maximum number of rounds.
        timeout: time limit of a round's exchange, in seconds.
        train_config: config record sent to clients that train.
        evaluate_config: config record sent to clients that evaluate.
        evaluate_fn: function that evaluates the initial model, as round 0, and that of every round.
        clients_evaluate: whether clients evaluate.
        overridden: methods that a subclass overrides; they may read replies twice, so they get a list.
    """

    num_rounds: int
    timeout: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFn | None
    clients_evaluate: bool
    overridden: frozenset[str]

    def run(self, strategy: Strategy, session: Session, grid: Grid, initial_arrays: ArrayRecord) -> Result:
        """Run the rounds by a strategy's own methods, and return their metrics and the last model.

        A resumed run starts with the evaluations that its last round lacks.
        """
        checkpoint, due = session.writer.found, 0.0
        session.writer.result = result = Result(arrays=initial_arrays) if checkpoint is None else checkpoint.result
        if checkpoint is None:
            self._evaluate(0, result)
        elif not checkpoint.round_complete:
            self._end_round(checkpoint.server_round, result, strategy, session, grid)
        for server_round in range(session.next_round, self.num_rounds + 1):
            if time.monotonic() >= due or server_round == self.num_rounds:
                log.info("[ROUND %s/%s]", server_round, self.num_rounds)
                due = time.monotonic() + _LOG_SECONDS
            messages = strategy.configure_train(server_round, result.arrays, self.train_config, grid)
            if session.record.ended_before:
                break
            arrays, metrics = strategy.aggregate_train(server_round, self._replies("aggregate_train", grid, messages))
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            self._end_round(server_round, result, strategy, session, grid)
        return result

    def _end_round(self, server_round: int, result: Result, strategy: Strategy, session: Session, grid: Grid) -> None:
        if self.clients_evaluate:
            messages = strategy.configure_evaluate(server_round, result.arrays, self.evaluate_config, grid)
            metrics = strategy.aggregate_evaluate(server_round, self._replies("aggregate_evaluate", grid, messages))
            if metrics is not None:
                log.info("Round %s: clients: %s", server_round, dict(metrics))
                result.evaluate_metrics_clientapp[server_round] = metrics
        self._evaluate(server_round, result)

    def _replies(self, method: str, grid: Grid, messages: Iterable[Message]) -> Iterable[Message]:
        replies = Replies(grid, messages, self.timeout)
        return list(replies) if method in self.overridden else replies

    def _evaluate(self, server_round: int, result: Result) -> None:
        metrics = self.evaluate_fn(server_round, result.arrays) if self.evaluate_fn else None
        if metrics is not None:
            log.info("Round %s: evaluate_fn: %s", server_round, dict(metrics))
            result.evaluate_metrics_serverapp[server_round] = metrics
