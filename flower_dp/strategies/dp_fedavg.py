"""DP-FedAvg (McMahan et al. 2018): federated averaging with clipped updates and noise on the server."""

from typing import Unpack

from flower_dp.strategies.client_level import ClientLevelArguments, ClientLevelRules
from flower_dp.strategies.rules import split
from flower_dp.strategies.strategy import DPStrategy


class DPFedAvg(DPStrategy):
    """Federated averaging with client-level differential privacy; the server is trusted and adds the noise.

    Works with any Flower client that replies with its trained model in one `arrays` record, and with the clients of
    `flower_dp.clients`. Updates are clipped on the server in any case, and not weighted by example counts.

    >>> from flower_dp.core.sampling import PoissonSampling
    >>> from flower_dp.strategies import DPFedAvg
    >>> strategy = DPFedAvg(
    ...     clip_norm=0.5, noise_multiplier=1.0, sampling=PoissonSampling(sampling_rate=0.1), num_clients=100, delta=1e-4
    ... )
    >>> strategy.statement.epsilon  # nothing was released yet
    0.0

    Args:
        words: clip_norm, noise_multiplier, sampling, num_clients, delta, and optionally target_epsilon and relation: see
            `ClientLevelRules`; report_client_metrics, registration_timeout, noise_seed: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.
    """

    rules: ClientLevelRules

    def __init__(self, **words: Unpack[ClientLevelArguments]) -> None:
        own, options = split(words, ClientLevelArguments)
        super().__init__(ClientLevelRules(name="dp-fedavg", title="DP-FedAvg", **own), **options)
