"""Private evaluation for methods whose single messages are private: the weighted mean of clients' noised metrics."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from flower_dp import wire
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.books import NOISE_DEVIATIONS, ClientBooks
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.own_replies import OwnReplies
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEvaluation:
    """Evaluations by noised metrics of single clients, each charged to the ledger of every client that is asked.

    Attributes:
        plan: what is evaluated, by whom, for which budget.
        books: the method's ledgers; its evaluations are charged beside its training.
        release: the clients' noised means.
    """

    plan: LocalEvaluation
    books: ClientBooks
    release: OwnReplies

    @classmethod
    def of(cls, plan: PrivateEvaluation | LocalEvaluation, books: ClientBooks, title: str) -> "OwnEvaluation":
        """Return the evaluations of the method of this title, which has these ledgers.

        Raises:
            ValueError: if the plan is for methods with one ledger for all clients.
        """
        if not isinstance(plan, LocalEvaluation):
            raise ValueError(
                f"evaluation: is a {type(plan).__name__}; {title} takes a LocalEvaluation, with a budget of every client"
            )
        release = OwnReplies(
            name=wire.EVALUATION,
            clip_norm=1.0,
            sampling=plan.sampling,
            relation=books.relation,
            weight_of=books.share,
            longest=_longest,
            metrics=MetricBounds(bounds=plan.metrics),
        )
        books.evaluate(release, plan.budget.terms)
        return cls(plan=plan, books=books, release=release)

    @property
    def length(self) -> int:
        """The number of entries of a client's row."""
        return len(self.plan.metrics)

    def due(self, server_round: int) -> bool:
        """Return whether there is an evaluation in this round, and a client that can pay."""
        return self.plan.due(server_round) and any(map(self.release.can_pay, self.release.terms))

    def result(self, now: Round, collected: Collected, rng: Generator) -> dict[str, float]:
        """Return value and standard error of every metric: the mean of the received rows, by their public weights.

        The standard error covers the noise and, if not all clients have answered, the choice of clients. It is an upper bound:
        the variance of the clients' values is the largest that their bounds and the reported mean allow.

        Raises:
            RoundLeftOut: if no client has answered.
        """
        if not collected.clients:
            raise RoundLeftOut("no client has answered")
        shares = {name: self.books.share(name) for name in collected.clients}
        whole = sum(shares.values())
        parts = {name: share / whole for name, share in shares.items()}
        fractions = MetricBounds(bounds=self.plan.metrics).fractions(collected.total / whole)
        # Laplace noise has sqrt(2) x its scale; a contribution of 1 is 2 / dimension of a metric.
        variance = sum((part * math.sqrt(2) * _scale(self.release, name) * self.length / 2) ** 2 for name, part in parts.items())
        chosen = sum(part**2 for part in parts.values()) if len(parts) < len(self.books.terms) else 0.0
        noised: dict[str, float] = {}
        for (name, bound), fraction in zip(self.plan.metrics.items(), fractions.tolist(), strict=True):
            value = min(max(fraction, 0.0), 1.0)
            error = math.sqrt(variance + chosen * value * (1 - value))
            noised |= {name: value * bound, f"{name}-standard-error": error * bound}
        return noised


def _longest(release: OwnReplies, now: Round) -> Callable[[str], float]:
    """Return how long a client's honest row is at most."""
    return lambda name: 1 + _scale(release, name) * (2 * math.sqrt(now.length) + NOISE_DEVIATIONS)


def _scale(release: OwnReplies, name: str) -> float:
    """Return the Laplace scale on the mean of a client's contributions."""
    own = release.terms[name].release
    return own.noise_scale / own.expected_cohort
