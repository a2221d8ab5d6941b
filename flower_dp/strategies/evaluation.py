"""Private evaluation: clients' own metrics of the global model, as a noised mean that is charged to the method's ledgers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from flower_dp import wire
from flower_dp.core import checks
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.noised_sum import NoisedSum, check_relation
from flower_dp.strategies.releases.release import Release, Round
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.shared_noise import SharedNoise
from flower_dp.strategies.run_state import RunState


class Evaluation(Release, Protocol):
    """Private evaluation, as the second release of a round.

    Attributes:
        plan: what is evaluated, and when.
        length: of a client's row.
    """

    @property
    def plan(self) -> PrivateEvaluation | LocalEvaluation: ...  # noqa: D102
    @property
    def length(self) -> int: ...  # noqa: D102

    def due(self, charges: Charges, server_round: int) -> bool:
        """Return whether there is an evaluation in this round."""

    def result(self, state: RunState, now: Round, collected: Collected, rng: Generator) -> dict[str, float]:
        """Return value and standard error of every metric.

        Raises:
            RoundLeftOut: if nothing may be released, or nothing of use would be.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SumEvaluation(NoisedSum):
    """Evaluations of a method with one noised sum: the noised sum of clients' metrics, and of a 1 that counts each client.

    Attributes:
        plan: what is evaluated, by whom and with how much noise.
        training: the name of the method's own release: an evaluation is counted after every `plan.every`-th of its rounds.
    """

    noise: SharedNoise
    plan: PrivateEvaluation
    training: str

    @classmethod
    def of(cls, plan: PrivateEvaluation | LocalEvaluation, training: NoisedSum, shared: SharedNoise, title: str) -> SumEvaluation:
        """Return the evaluations of a method with this release of training, with the placement of its noise.

        Raises:
            ValueError: if the plan is for methods with a ledger of every client.
        """
        if not isinstance(plan, PrivateEvaluation):
            raise checks.BadValue("evaluation", f"evaluation: is a {type(plan).__name__}; {title} takes a PrivateEvaluation")
        own, mechanism = shared.release, Gaussian(noise_multiplier=plan.noise_multiplier)
        check_relation(own.relation, plan.sampling, own.num_clients)
        release = replace(own, clip_norm=1.0, mechanism=mechanism, sampler=plan.sampling)
        noise = replace(shared, release=release, lossy_messages=False)
        metrics = MetricBounds(bounds=plan.metrics)
        return cls(name=wire.EVALUATION, noise=noise, metrics=metrics, plan=plan, training=training.name)

    @property
    def length(self) -> int:
        """The number of entries of a client's vector: its metrics, and the 1 that counts it."""
        return MetricBounds(bounds=self.plan.metrics).num_counted

    def due(self, charges: Charges, server_round: int) -> bool:
        """Return whether there is an evaluation in this round: never more of them than the plan of the run has counted."""
        return self.plan.due(server_round) and charges.number(self.name) < charges.number(self.training) // self.plan.every

    def result(self, state: RunState, now: Round, collected: Collected, rng: Generator) -> dict[str, float]:
        """Return value and standard error of every metric, from the noised sum alone.

        The standard error covers the noise and the choice of the cohort. It is an upper bound: the variance of the clients'
        values is the largest that their bounds and the reported mean allow.

        Raises:
            RoundLeftOut: if the method releases nothing, or the noised count of clients is too small to divide by.
        """
        mean, _ = self.noised(state, now, collected, rng)
        release = self.release
        scale = math.sqrt(self.length) * release.expected_cohort
        *sums, count = (mean * scale).tolist()
        std = math.sqrt(self.length) * release.noise_scale
        if count < max(1.0, 3 * std):
            expected = release.expected_cohort
            raise RoundLeftOut(
                f"about {max(count, 0):.0f} clients evaluated, too few for noise of std {std:.3g} on their number",
                in_vain=round(expected) if count < expected / 2 else 0,
            )
        averages: dict[str, float] = {}
        for (name, bound), total in zip(self.plan.metrics.items(), sums, strict=True):
            value = min(max(total / count, 0.0), 1.0)
            # Numbers in [0, 1] with mean v have a variance of at most v (1 - v).
            error = math.sqrt(std**2 * (1 + value**2) + count * value * (1 - value)) / count
            averages |= {name: value * bound, f"{name}-standard-error": error * bound}
        return averages
