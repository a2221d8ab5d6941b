"""Private evaluation: its settings, and clients' own metrics of the global model as a noised mean that is charged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flower_dp import wire
from flower_dp.core import checks
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.sampling import FullSampling, Sampler, check_sampler
from flower_dp.privacy import release as privacy
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.noised_sum import NoisedSum, check_relation
from flower_dp.strategies.releases.release import Release, RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.releases.shared_noise import NoiseSharing, converted
from flower_dp.strategies.run_state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateEvaluation:
    """Evaluation of the global model on clients' own data, with client-level differential privacy.

    In every `every`-th round a separate cohort evaluates the model. Each client's metrics, clipped to public bounds, and a 1 that
    counts the client, form one vector of L2 norm at most 1. The sum of the vectors gets Gaussian noise of std `noise_multiplier`.
    As in training, the server adds it, or the clients add shares of it. The evaluation is charged to the method's ledgers before
    any message is sent. Only the noised sum is used: the value of a metric is its noised sum over the noised count.

    Attributes:
        noise_multiplier: std of the noise on the sum of the vectors; 0 makes the run not private.
        sampling: sampler of the evaluating cohort; `PoissonSampling` costs least.
        metrics: public upper bound of every metric, by the name under which clients report it; all metrics are at least 0.
            Clients of this package report `loss` and `accuracy`; stock clients report what their evaluate function returns.
        every: number of rounds from one evaluation to the next.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.strategies import DPFedAvg, PrivateEvaluation
        >>> poisson = PoissonSampling(sampling_rate=0.1)
        >>> strategy = DPFedAvg(
        ...     clip_norm=0.5,
        ...     noise_multiplier=1.0,
        ...     sampling=poisson,
        ...     num_clients=1000,
        ...     delta=1e-4,
        ...     evaluation=PrivateEvaluation(
        ...         noise_multiplier=4.0, sampling=poisson, metrics={"loss": 5.0, "accuracy": 1.0}, every=5
        ...     ),
        ... )
    """

    noise_multiplier: float
    sampling: Sampler
    metrics: Mapping[str, float] = field(default_factory=lambda: {"accuracy": 1.0})
    every: int = 1

    def __post_init__(self) -> None:
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)
        check_sampler(self.sampling)
        MetricBounds(bounds=self.metrics)
        checks.integer("every", self.every, at_least=1)

    def due(self, server_round: int) -> bool:
        """Return whether a round has an evaluation."""
        return server_round % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEvaluation:
    """Evaluation of the global model on clients' own data, for methods with local DP.

    In every `every`-th round clients send their metrics of the model, with Laplace noise under a separate budget
    (`EvaluationBudget`). Each client's ledger is charged before any message is sent. The value of a metric is the mean over the
    clients that replied, by the method's public weights.

    If the method protects single records, so does the evaluation: a metric is the mean over a client's records, and the more
    records, the less noise.

    Attributes:
        budget: budget of every client; give clients the same one (`LocalDPClient(evaluation=...)`).
        metrics: public upper bound of every metric, by its name on the clients: `loss` and `accuracy`, or those that the
            clients' `record_metrics` returns. All metrics are at least 0.
        every: number of rounds from one evaluation to the next.
        sampling: sampler of the evaluating cohort, among the clients whose budget is not spent.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.strategies import EvaluationBudget, FedSGDDPC, LocalEvaluation
        >>> strategy = FedSGDDPC(
        ...     mechanism="laplace",
        ...     num_clients=10,
        ...     cohort_size=5,
        ...     num_records=500,
        ...     clip_norm=1.0,
        ...     epsilon=2.0,
        ...     learning_rate=0.1,
        ...     evaluation=LocalEvaluation(budget=EvaluationBudget(epsilon=0.5, num_evaluations=4), every=5),
        ... )
    """

    budget: EvaluationBudget
    metrics: Mapping[str, float] = field(default_factory=lambda: {"accuracy": 1.0})
    every: int = 1
    sampling: Sampler = field(default_factory=FullSampling)

    def __post_init__(self) -> None:
        if not isinstance(self.budget, EvaluationBudget):
            raise checks.bad("budget", self.budget, "an EvaluationBudget")
        check_sampler(self.sampling)
        MetricBounds(bounds=self.metrics)
        checks.integer("every", self.every, at_least=1)

    def due(self, server_round: int) -> bool:
        """Return whether a round has an evaluation."""
        return server_round % self.every == 0


class Evaluation(Release, Protocol):
    """Private evaluation, as the second release of a round.

    Attributes:
        plan: settings of the evaluation.
        length: length of a client's row.
    """

    @property
    def plan(self) -> PrivateEvaluation | LocalEvaluation: ...  # noqa: D102
    @property
    def length(self) -> int: ...  # noqa: D102

    def due(self, charges: Charges, server_round: int) -> bool:
        """Return whether this round has an evaluation."""

    def result(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> dict[str, float]:
        """Return value and standard error of every metric.

        Raises:
            RoundDiscarded: if nothing may be released, or the result would be useless.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSumEvaluation(NoisedSum):
    """Evaluations of a method with one noised sum: the noised sum of clients' metrics, and of a 1 that counts each client.

    Attributes:
        plan: settings of the evaluation.
        training: name of the method's own release; an evaluation follows every `plan.every`-th of its rounds.
    """

    noise: NoiseSharing
    plan: PrivateEvaluation
    training: str

    @classmethod
    def of(
        cls, plan: PrivateEvaluation | LocalEvaluation, training: NoisedSum, shared: NoiseSharing, title: str
    ) -> NoisedSumEvaluation:
        """Return the evaluations of a method with this training release, with the same placement of the noise.

        Raises:
            ValueError: if the plan is for methods with a ledger for every client.
        """
        if not isinstance(plan, PrivateEvaluation):
            raise checks.BadValue("evaluation", f"evaluation: is a {type(plan).__name__}; {title} takes a PrivateEvaluation")
        trained, mechanism = shared.release, Gaussian(noise_multiplier=plan.noise_multiplier)
        check_relation(trained.relation, plan.sampling, trained.num_units)
        if isinstance(plan.sampling, MinimumSeparationSampling):
            why = "an evaluation keeps no separation; use PoissonSampling or FullSampling"
            raise checks.refusal("sampling", plan.sampling, why)
        # Made anew: the training's noise may be correlated, and its event may be that of all rounds.
        release = converted(trained, privacy.Release, clip_norm=1.0, mechanism=mechanism, sampler=plan.sampling)
        noise = converted(shared, NoiseSharing, release=release, compresses_noised_updates=False)
        metrics = MetricBounds(bounds=plan.metrics)
        return cls(name=wire.EVALUATION, noise=noise, metrics=metrics, plan=plan, training=training.name)

    @property
    def length(self) -> int:
        """The length of a client's vector: its metrics, and the 1 that counts the client."""
        return MetricBounds(bounds=self.plan.metrics).num_counted

    def due(self, charges: Charges, server_round: int) -> bool:
        """Return whether this round has an evaluation; the run never has more of them than its plan counts."""
        return self.plan.due(server_round) and charges.number(self.name) < charges.number(self.training) // self.plan.every

    def result(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> dict[str, float]:
        """Return value and standard error of every metric, from the noised sum alone.

        The standard error covers the noise and the choice of the cohort. It is an upper bound: the variance of the clients'
        values is the largest that their bounds and the reported mean allow.

        Raises:
            RoundDiscarded: if the method releases nothing, or the noised count of clients is too small to divide by.
        """
        mean, _ = self.noised(state, now, collected, rng)
        release = self.release
        scale = math.sqrt(self.length) * release.expected_cohort_size
        *sums, count = (mean * scale).tolist()
        std = math.sqrt(self.length) * release.noise_scale
        if count < max(1.0, 3 * std):
            expected = release.expected_cohort_size
            raise RoundDiscarded(
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
