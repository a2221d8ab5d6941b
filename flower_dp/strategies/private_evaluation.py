"""The settings of a private evaluation: metrics with public bounds, who evaluates, and the noise."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flower_dp.core import checks
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.sampling import FullSampling, Sampler, check_sampler
from flower_dp.privacy.evaluation_budget import EvaluationBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateEvaluation:
    """Evaluation of the global model on clients' own data, with client-level differential privacy.

    In every `every`-th round a separate cohort evaluates the model. Each client's metrics, clipped to public bounds, and a 1 that
    counts the client, form one vector of L2 norm at most 1. The sum of the vectors gets Gaussian noise of std `noise_multiplier`,
    added like the method's own noise by the server, or as shares by the clients. The evaluation is charged to the method's
    ledgers before any message is sent. Only the noised sum is used: the value of a metric is its noised sum over the noised
    count.

    Attributes:
        noise_multiplier: std of the noise on the sum of the vectors; 0 makes the run not private.
        sampling: who evaluates; `PoissonSampling` for the least cost.
        metrics: the public upper bound of every metric, by the name under which clients report it; all are at least 0. Clients of
            this package have `loss` and `accuracy`; stock clients what their own evaluate function returns.
        every: rounds from one evaluation to the next.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.

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
        """Return whether there is an evaluation in a round."""
        return server_round % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEvaluation:
    """Evaluation of the global model on clients' own data, for methods in which every message is private on its own.

    In every `every`-th round clients send their metrics of the model with Laplace noise for a budget of their own
    (`EvaluationBudget`), charged to their ledgers before any message is sent. The value of a metric is the mean over the clients
    that replied, by the method's public weights. If the method protects single records, so does this: a metric is the mean over
    a client's records, and the more records, the less noise.

    Attributes:
        budget: every client's budget; give clients the same one (`LocalDPClient(evaluation=...)`).
        metrics: the public upper bound of every metric, by its name on the clients: `loss` and `accuracy`, or those
            that the clients' `record_metrics` returns. All metrics are at least 0.
        every: rounds from one evaluation to the next.
        sampling: who evaluates, among the clients whose budget is not spent.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.

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
        """Return whether there is an evaluation in a round."""
        return server_round % self.every == 0
