"""SCAFFOLD (Karimireddy et al. 2020): control variates for clients with different data, with and without privacy."""

from collections.abc import Mapping, Sequence
from typing import Unpack

from flower_dp.core.sampling import Sampler
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies.control import ControlVariate
from flower_dp.strategies.dp_fedpaq import DPFedPAQRules
from flower_dp.strategies.releases.client_ledgers import PerClient, Population
from flower_dp.strategies.rules import StrategyOptions
from flower_dp.strategies.strategy import DPStrategy


class Scaffold(DPStrategy):
    """SCAFFOLD, for clients whose recipe is `flower_dp.clients.ScaffoldRecipe` with the same numbers.

    Local steps go along g + c - c_i: c_i is the client's own estimate of its mean gradient, c the mean of all clients'. If
    clients have different data, plain local steps drift to each client's own optimum; corrected steps do not. The rest is
    `DPFedPAQ`: E steps a round on b records each without replacement, clipping record by record, and local DP: noise by each
    client's own budget. The server sends c with the model; clients send only the update.

    The guarantee is exactly that of DP-FedPAQ. c and c_i are computed from messages that were private when they were sent, so
    they cost nothing. Every reply is charged once. `epsilon=math.inf` with a clip norm that no gradient reaches is SCAFFOLD
    without privacy.

    Args:
        steps: parameters of the local steps, as for `DPFedPAQ`.
        sampling: sampler of a round's cohort.
        num_clients: number of clients.
        num_records: public data sizes, in records.
        epsilon: epsilon budget of each client; math.inf: no noise, not private.
        delta: delta of every budget.
        quantization_levels: levels above 0 of a message, more than sqrt(d); None: float32. With fewer levels the errors of
            control variates grow from round to round.
        calibration: `exact` or `paper`, as for `DPFedPAQ`.
        num_replies: maximum replies of a client.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> import math
        >>> from flower_dp.core.sampling import FixedSizeSampling
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps
        >>> from flower_dp.strategies import Scaffold
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=5, batch_size=10, clip_norm=1e4, sensitivity="per-step")
        >>> sampling = FixedSizeSampling(cohort_size=10)
        >>> strategy = Scaffold(
        ...     steps=steps, sampling=sampling, num_clients=100, num_records=600, epsilon=math.inf, delta=1e-5, num_replies=50
        ... )
        >>> strategy.rules.training.name
        'scaffold'
    """

    rules: DPFedPAQRules

    def __init__(
        self,
        *,
        steps: FedPAQSteps,
        sampling: Sampler,
        num_clients: int,
        num_records: int | Sequence[int] | Mapping[str, int],
        epsilon: float | PerClient,
        delta: float,
        quantization_levels: int | None = None,
        calibration: str = "exact",
        num_replies: int | Sequence[int] | Mapping[str, int] | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        population = Population(num_clients=num_clients, num_records=num_records, num_replies=num_replies, epsilon=epsilon)
        rules = DPFedPAQRules(
            population,
            steps,
            sampling,
            delta=delta,
            quantization_levels=quantization_levels,
            calibration=calibration,
            name="scaffold",
            title="SCAFFOLD",
            control=ControlVariate(quantization_levels),
            evaluation=options.get("evaluation"),
        )
        super().__init__(rules, **options)
