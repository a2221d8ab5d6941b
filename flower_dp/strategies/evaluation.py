"""Private evaluation: clients' own metrics of the global model, as a noised mean that is charged to the method's ledger."""

import logging
import math
from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from flower_dp import wire
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.vectors import Layout
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.population.roster import Roster
from flower_dp.strategies.private_evaluation import PrivateEvaluation
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.replies import Collected, StockReply, collect
from flower_dp.strategies.rules import Round

log = logging.getLogger("flwr")


class Evaluator:
    """One run's private evaluations."""

    def __init__(self, plan: PrivateEvaluation, method: ClientLevelRules) -> None:
        self.plan, self.method = plan, method
        self.bounds = MetricBounds(bounds=plan.metrics)
        self.rules = method.evaluating(plan.noise_multiplier, plan.sampling, plan.every, self.bounds)
        names = [*plan.metrics, "the count of clients"]
        self._model = wire.Model(
            names=tuple(names),
            layout=Layout(names=tuple(names), shapes=((),) * len(names), dtypes=("float64",) * len(names)),
            vector=np.zeros(len(names), np.float32),
            frozen={},
        )
        self._now: Round | None = None
        self._sent: list[Message] = []

    @property
    def num_charged(self) -> int:
        """How many evaluations were charged."""
        return self.rules.num_rounds

    def begin(self) -> None:
        """Forget the last run."""
        self._now, self._sent = None, []

    def cohort(self, names: tuple[str, ...], rng: Generator) -> np.ndarray:
        """Return the indices of the clients that take part in the next evaluation.

        Whose turn it is follows from the number of evaluations, as their charge does, and not from the number of the round.
        """
        return self.plan.sampling.choose(self.num_charged + 1, len(names), rng)

    def charge(self, server_round: int, names: tuple[str, ...]) -> None:
        """Charge an evaluation to the method's ledgers."""
        self.rules.charge(server_round, names)

    def due(self, server_round: int) -> bool:
        """Return whether there is an evaluation in this round: never more of them than the plan of the run has counted."""
        return self.plan.due(server_round) and self.rules.num_rounds < self.method.num_rounds // self.plan.every

    def asked(self, server_round: int) -> bool:
        """Return whether clients were asked in this round, and their replies were not used yet."""
        return self._now is not None and self._now.server_round == server_round

    def messages(
        self, server_round: int, roster: Roster, arrays: ArrayRecord, config: ConfigRecord, asked: dict[int, tuple[str, ...]]
    ) -> list[Message]:
        """Return one message a node; the evaluation is charged already."""
        ask = self.rules.ask(self.bounds.num_counted, tuple(name for names in asked.values() for name in names))
        self._now = Round(
            server_round=server_round,
            ask=ask,
            model=self._model,
            asked=asked,
            bytes_down=0,
            started=0.0,
            stock=not roster.hosting,
        )
        self._sent = [
            wire.evaluate_message(
                node,
                roster.record_names,
                arrays,
                config,
                wire.Instruction(server_round=server_round, method=wire.EVALUATION, clients=names, ask=ask),
            )
            for node, names in asked.items()
        ]
        return self._sent

    def collect(self, replies: Iterable[Message], *, seeded: bool = False) -> Collected:
        """Add up the vectors of a round's replies; an invalid reply is left out, as if its clients had sent zeros."""
        now = self._now
        if now is None:
            raise RuntimeError("aggregate_evaluate needs configure_evaluate of the same round first")
        stock = StockReply(read=lambda content: self.bounds.counted(wire.reported_metrics(content)))
        return collect(
            replies,
            asked=now.asked,
            sent=self._sent,
            limits=self.rules.limits(now),
            stock=stock if now.stock else None,
            seeded=seeded,
        )

    def result(self, collected: Collected, rng: Generator) -> dict[str, float]:
        """Return value and standard error of every metric, from the noised sum alone.

        The standard error covers the noise and the choice of the cohort. It is an upper bound: the variance of the clients'
        values is the largest that their bounds and the reported mean allow.

        Raises:
            RoundLeftOut: if the method releases nothing, or the noised count of clients is too small to divide by.
        """
        now = self._now
        self._now, self._sent = None, []
        if now is None:
            raise RuntimeError("aggregate_evaluate needs configure_evaluate of the same round first")
        mean = self.rules.combine(now, collected, rng)
        scale = math.sqrt(self.bounds.num_counted) * self.rules.release.expected_cohort
        *sums, count = (mean * scale).tolist()
        std = math.sqrt(self.bounds.num_counted) * self.rules.release.noise_scale
        if count < max(1.0, 3 * std):
            raise RoundLeftOut(f"about {max(count, 0):.0f} clients evaluated, too few for noise of std {std:.3g} on their number")
        told: dict[str, float] = {}
        for (name, bound), total in zip(self.plan.metrics.items(), sums, strict=True):
            value = min(max(total / count, 0.0), 1.0)
            # Numbers in [0, 1] with mean v have a variance of at most v (1 - v).
            error = math.sqrt(std**2 * (1 + value**2) + count * value * (1 - value)) / count
            told |= {name: value * bound, f"{name}-standard-error": error * bound}
        return told
