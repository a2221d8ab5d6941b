"""Private evaluation for methods whose single messages are private: the weighted mean of clients' noised metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flower_dp import wire
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.privacy.charges import Charges
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.books import ClientBooks
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.own_replies import OwnReplies
from flower_dp.strategies.releases.release import Round
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.run_state import RunState

# The norm of a noise vector exceeds its bound with probability e^-60, which is 1e-26.
NOISE_DEVIATIONS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEvaluation(OwnReplies):
    """Evaluations by noised metrics of single clients, each charged to every client that is asked.

    Attributes:
        plan: what is evaluated, by whom, for which budget.
        books: the method's terms.
    """

    plan: LocalEvaluation
    books: ClientBooks

    @staticmethod
    def checked(plan: PrivateEvaluation | LocalEvaluation, title: str) -> LocalEvaluation:
        """Return the plan.

        Raises:
            ValueError: if it is for methods with one ledger for all clients, and not for the method of this title.
        """
        if not isinstance(plan, LocalEvaluation):
            raise ValueError(
                f"evaluation: is a {type(plan).__name__}; {title} takes a LocalEvaluation, with a budget of every client"
            )
        return plan

    @classmethod
    def of(cls, plan: LocalEvaluation, books: ClientBooks) -> OwnEvaluation:
        """Return the evaluations of a method with these terms."""
        terms = {name: plan.budget.terms(name, own) for name, own in books.terms.items()}

        def scale(name: str) -> float:
            """Return the Laplace scale on the mean of a client's contributions."""
            return terms[name].release.noise_scale / terms[name].release.expected_cohort

        def longest(now: Round) -> Callable[[str], float]:
            return lambda name: 1 + scale(name) * (2 * math.sqrt(now.length) + NOISE_DEVIATIONS)

        return cls(
            name=wire.EVALUATION,
            clip_norm=1.0,
            sampling=plan.sampling,
            relation=books.relation,
            weight_of=books.share,
            longest=longest,
            metrics=MetricBounds(bounds=plan.metrics),
            terms=terms,
            plan=plan,
            books=books,
        )

    @property
    def length(self) -> int:
        """The number of entries of a client's row."""
        return len(self.plan.metrics)

    def due(self, charges: Charges, server_round: int) -> bool:
        """Return whether there is an evaluation in this round, and a client that can pay."""
        return self.plan.due(server_round) and self.anyone_pays(charges)

    def result(self, state: RunState, now: Round, collected: Collected, rng: Generator) -> dict[str, float]:
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
        scales = {name: self.terms[name].release.noise_scale / self.terms[name].release.expected_cohort for name in parts}
        # Laplace noise has sqrt(2) x its scale; a contribution of 1 is 2 / dimension of a metric.
        variance = sum((part * math.sqrt(2) * scales[name] * self.length / 2) ** 2 for name, part in parts.items())
        chosen = sum(part**2 for part in parts.values()) if len(parts) < len(self.terms) else 0.0
        noised: dict[str, float] = {}
        for (name, bound), fraction in zip(self.plan.metrics.items(), fractions.tolist(), strict=True):
            value = min(max(fraction, 0.0), 1.0)
            error = math.sqrt(variance + chosen * value * (1 - value))
            noised |= {name: value * bound, f"{name}-standard-error": error * bound}
        return noised
