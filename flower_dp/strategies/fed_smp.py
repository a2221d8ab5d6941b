"""Fed-SMP with rand_k (Hu et al. 2024): updates under one random mask a round, clip and noise on the kept coordinates alone."""

from typing import Unpack

from flower_dp.core import checks
from flower_dp.strategies.client_level import ClientLevelArguments, ClientLevelRules
from flower_dp.strategies.rules import split
from flower_dp.strategies.strategy import DPStrategy


class FedSMPArguments(ClientLevelArguments, total=False):
    """The arguments of `FedSMP`."""

    keep_ratio: float
    placement: str
    trusted_server: bool
    min_reply_ratio: float | None


class FedSMP(DPStrategy):
    """Fed-SMP with rand_k, for the clients of `flower_dp.clients.DPClient`.

    In each round the server draws one random mask of `keep_ratio` of the coordinates and sends its seed. Every client masks its
    update, clips what is kept to L2 norm `clip_norm`, and adds its share of the noise there; the other coordinates are 0 and
    carry no noise. The mask does not depend on data, so it costs no privacy: epsilon is that of the noised sum. A masked update
    is shorter, so it is clipped less, and less noise reaches the model. The update is not scaled by d / k.

    >>> from flower_dp.core.sampling import PoissonSampling
    >>> from flower_dp.strategies import FedSMP
    >>> words = {"clip_norm": 0.5, "noise_multiplier": 0.9, "num_clients": 1000, "delta": 5e-4}
    >>> strategy = FedSMP(**words, sampling=PoissonSampling(sampling_rate=0.1), keep_ratio=0.4)
    >>> strategy.rules.sum.num_kept(10)
    4

    Args:
        words: clip_norm, noise_multiplier, sampling, num_clients, delta, keep_ratio (paper: p = k / d), and optionally
            target_epsilon, relation, placement, trusted_server, min_reply_ratio: see `ClientLevelRules`; report_client_metrics,
            registration_timeout, noise_seed: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.
    """

    rules: ClientLevelRules

    def __init__(self, **words: Unpack[FedSMPArguments]) -> None:
        own, options = split(words, FedSMPArguments)
        keep_ratio = checks.number("keep_ratio", own.pop("keep_ratio", 0.4), above=0, at_most=1)
        placement = own.pop("placement", "distributed")
        rules = ClientLevelRules(name="fed-smp", title="Fed-SMP-rand_k", placement=placement, mask_keep_ratio=keep_ratio, **own)
        super().__init__(rules, **options)
