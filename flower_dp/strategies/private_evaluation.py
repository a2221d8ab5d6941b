"""The settings of a private evaluation: metrics with public bounds, who evaluates, and the noise."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flower_dp import wire
from flower_dp.core import checks
from flower_dp.core.sampling import Sampler, check_sampler


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
        wire.EvaluationOrder(placement="central", bounds=self.metrics)
        checks.integer("every", self.every, at_least=1)

    def due(self, server_round: int) -> bool:
        """Return whether there is an evaluation in a round."""
        return server_round % self.every == 0
