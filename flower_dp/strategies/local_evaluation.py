"""Private evaluation for methods whose single messages are private: the weighted mean of clients' noised metrics."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from flower_dp import wire
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.strategies.population.roster import Roster
from flower_dp.strategies.private_evaluation import LocalEvaluation
from flower_dp.strategies.releases.books import NOISE_DEVIATIONS, ClientBooks
from flower_dp.strategies.releases.evaluation_books import EvaluationBooks
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.replies import Collected, collect


class LocalEvaluator:
    """One run's private evaluations, each charged to the ledger of every client that is asked."""

    def __init__(self, plan: LocalEvaluation, books: ClientBooks) -> None:
        self.plan, self.books = plan, books
        self.evaluations = EvaluationBooks(plan.budget, relation=books.relation, delta=books.delta)
        books.evaluations = self.evaluations
        self.bounds = MetricBounds(bounds=plan.metrics)
        self._last = 0
        self._now: tuple[int, dict[int, tuple[str, ...]]] | None = None
        self._sent: list[Message] = []

    @property
    def num_charged(self) -> int:
        """How many evaluations were charged."""
        return self.evaluations.num_charged

    def begin(self) -> None:
        """Forget the last run."""
        self._last, self._now, self._sent = 0, None, []

    def due(self, server_round: int) -> bool:
        """Return whether there is an evaluation in this round that was not asked for yet, and a client that can pay."""
        one_can_pay = any(self.evaluations.can_pay(name) for name in self.evaluations.ledgers)
        return self.plan.due(server_round) and server_round > self._last and one_can_pay

    def asked(self, server_round: int) -> bool:
        """Return whether clients were asked in this round, and their replies were not used yet."""
        return self._now is not None and self._now[0] == server_round

    def cohort(self, names: tuple[str, ...], rng: Generator) -> np.ndarray:
        """Return the indices of the clients that take part in the next evaluation: those drawn who can pay.

        Whose turn it is follows from the number of evaluations: by that of the round some clients might never have one.
        """
        chosen = self.plan.sampling.choose(self.num_charged + 1, len(names), rng)
        return np.asarray([index for index in chosen if self.evaluations.can_pay(names[index])], dtype=chosen.dtype)

    def charge(self, server_round: int, names: tuple[str, ...]) -> None:
        """Charge one evaluation to each client."""
        self._last = server_round
        self.evaluations.charge(names)

    def messages(
        self, server_round: int, roster: Roster, arrays: ArrayRecord, config: ConfigRecord, asked: dict[int, tuple[str, ...]]
    ) -> list[Message]:
        """Return one message a node; the evaluation is charged already."""
        self._now = (server_round, asked)
        everyone = [name for names in asked.values() for name in names]
        ask = self.evaluations.ask(everyone, self.bounds, weight_of=self.books.share)
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
        """Add up the rows of a round's replies; an invalid reply is left out."""
        if self._now is None:
            raise RuntimeError("aggregate_evaluate needs configure_evaluate of the same round first")
        limits = Limits(length=len(self.bounds.bounds), honest_norm=self._longest)
        return collect(replies, asked=self._now[1], sent=self._sent, limits=limits, stock=None, seeded=seeded)

    def _longest(self, names: Sequence[str]) -> float:
        """Return an L2 norm that the sum of these clients' honest rows all but never exceeds."""
        spread = 2 * math.sqrt(len(self.bounds.bounds)) + NOISE_DEVIATIONS
        return sum(self.books.share(name) * (1 + self._scale(name) * spread) for name in names)

    def _scale(self, name: str) -> float:
        """Return the Laplace scale on the mean of a client's contributions."""
        release = self.evaluations.terms[name].release
        return release.noise_scale / release.expected_cohort

    def result(self, collected: Collected, rng: Generator) -> dict[str, float]:
        """Return value and standard error of every metric: the mean of the received rows, by their public weights.

        The standard error covers the noise and, if not all clients have answered, the choice of clients. It is an upper bound:
        the variance of the clients' values is the largest that their bounds and the reported mean allow.

        Raises:
            RoundLeftOut: if no client has answered.
        """
        self._now, self._sent = None, []
        if not collected.clients:
            raise RoundLeftOut("no client has answered")
        shares = {name: self.books.share(name) for name in collected.clients}
        whole = sum(shares.values())
        parts = {name: share / whole for name, share in shares.items()}
        fractions = self.bounds.fractions(collected.total / whole)
        # Laplace noise has sqrt(2) x its scale; a contribution of 1 is 2 / dimension of a metric.
        variance = sum(
            (part * math.sqrt(2) * self._scale(name) * len(self.bounds.bounds) / 2) ** 2 for name, part in parts.items()
        )
        chosen = sum(part**2 for part in parts.values()) if len(parts) < len(self.books.ledgers) else 0.0
        told: dict[str, float] = {}
        for (name, bound), fraction in zip(self.plan.metrics.items(), fractions.tolist(), strict=True):
            value = min(max(fraction, 0.0), 1.0)
            error = math.sqrt(variance + chosen * value * (1 - value))
            told |= {name: value * bound, f"{name}-standard-error": error * bound}
        return told
