"""DP-FedSAM and DP-FedSAM-top_k (Shi, Wei, Shen et al. 2023): SAM on the clients, clipped updates and noise."""

from typing import Unpack

from flower_dp.strategies.client_level import ClientLevelArguments, ClientLevelRules
from flower_dp.strategies.rules import split
from flower_dp.strategies.strategy import DPStrategy

_PAPER_FORMULA = "RDP of the Poisson-subsampled Gaussian, DP-FedSAM Theorem 2"


class DPFedSAMArguments(ClientLevelArguments, total=False):
    """The arguments of `DPFedSAM`."""

    keep_ratio: float
    quantization_levels: int | None
    placement: str
    trusted_server: bool
    min_reply_ratio: float | None


class DPFedSAM(DPStrategy):
    """DP-FedSAM, for clients whose recipe of local training is SAM (`flower_dp.clients.LocalTraining(sam_radius=...)`).

    With `placement="distributed"` (the paper's) every client adds its share of the noise, std z C / sqrt(m), to its own clipped
    update, and the noise of the sum has std z C. Here m is the largest possible cohort, a public number, and the server adds the
    missing shares. The paper's m, the number of drawn clients, would be revealed to each of them, and the amplification by
    sampling holds only if nobody knows it. With `trusted_server=False` nobody adds missing shares. Then m is the smallest number
    of clients that must answer (`min_reply_ratio` of those drawn), a round with fewer replies is not released, and nothing is
    amplified. With `placement="central"` the server adds all noise.

    `keep_ratio` < 1 is DP-FedSAM-top_k: after the noise only this part of the coordinates is kept, those of largest magnitude.
    Under central placement they are chosen from the noised mean, which costs nothing (post-processing). Under distributed
    placement every client chooses from its own noised update, as in the paper; that is *not* post-processing of the noised sum,
    so the tight epsilon then rests on each client's own share alone and is very large. The paper's value stays in the statement,
    flagged as not valid.

    With `quantization_levels` every client rounds its own noised update at random to so many levels (QSGD, `DPFedPAQ`), and sends
    a few bits a coordinate. As with top-k, a single quantised message is not a function of the noised sum. Distributed placement
    only, since under central placement a client's message has no noise.

    >>> from flower_dp.core.sampling import PoissonSampling
    >>> from flower_dp.strategies import DPFedSAM
    >>> strategy = DPFedSAM(
    ...     clip_norm=0.5, noise_multiplier=0.9, sampling=PoissonSampling(sampling_rate=0.1), num_clients=1000, delta=5e-4
    ... )
    >>> round(strategy.rules.noise.charged.mechanism.noise_multiplier, 4)  # against a participant, who knows one of 192 shares
    0.8977

    Args:
        words: clip_norm (paper: C), noise_multiplier (paper: sigma), sampling, num_clients (paper: M), delta, and optionally
            target_epsilon, relation, keep_ratio (paper: p), quantization_levels, placement, trusted_server, min_reply_ratio:
            see `ClientLevelRules`;
            report_client_metrics, registration_timeout, noise_seed: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.
    """

    rules: ClientLevelRules

    def __init__(self, **words: Unpack[DPFedSAMArguments]) -> None:
        own, options = split(words, DPFedSAMArguments)
        title = "DP-FedSAM" if own.get("keep_ratio", 1) == 1 else "DP-FedSAM-top_k"
        placement = own.pop("placement", "distributed")
        rules = ClientLevelRules(name="dp-fedsam", title=title, placement=placement, paper_formula=_PAPER_FORMULA, **own)
        super().__init__(rules, **options)
