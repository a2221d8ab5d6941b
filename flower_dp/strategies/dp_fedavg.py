"""DP-FedAvg (McMahan et al. 2018): federated averaging with clipped updates and noise on the server."""

from flower_dp.privacy.events import Relation
from flower_dp.core.sampling import Sampler
from flower_dp.strategies.client_level import ClientLevelStrategy


class DPFedAvg(ClientLevelStrategy):
    """Federated averaging with client-level differential privacy; the server is trusted and adds the noise.

    Works with any Flower client that replies with its trained model in one `arrays` record, and with the clients of
    `flower_dp.clients`. Updates are clipped on the server in any case; example counts weigh nothing.

    Args:
        clip_norm: L2 bound of one client's update.
        noise_multiplier: std of the noise on the sum / clip_norm; 0 runs without privacy, and the statement says so.
        sampling: a sampler of `flower_dp.core.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated.
        target_epsilon: the run ends before the round that would pass it.
        relation: neighbouring relation; replace-one for fixed-size sampling by default, else add-or-remove-one.
        report_client_metrics: ask clients for training metrics, which are not private.
        registration_timeout: seconds to wait for the clients.
        noise_seed: for tests only: makes the run not private.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.
    """

    name = "dp-fedavg"
    method = "DP-FedAvg"

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        sampling: Sampler,
        num_clients: int,
        delta: float,
        target_epsilon: float | None = None,
        relation: Relation | None = None,
        report_client_metrics: bool = False,
        registration_timeout: float = 600.0,
        noise_seed: int | None = None,
    ) -> None:
        super().__init__(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            num_clients=num_clients,
            delta=delta,
            target_epsilon=target_epsilon,
            relation=relation,
            report_client_metrics=report_client_metrics,
            registration_timeout=registration_timeout,
            noise_seed=noise_seed,
        )
