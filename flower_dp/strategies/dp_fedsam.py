"""DP-FedSAM and DP-FedSAM-top_k (Shi, Wei, Shen et al. 2023): SAM on the clients, clipped updates and noise."""

from typing import Unpack

from flower_dp.core.sampling import Sampler
from flower_dp.planning.correlated_noise import CorrelatedNoise
from flower_dp.privacy.events import Relation
from flower_dp.strategies.calibration import noise_of
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.releases.adaptive_clip import AdaptiveClip
from flower_dp.strategies.releases.clipped_updates import ClippedUpdates
from flower_dp.strategies.rules import StrategyOptions
from flower_dp.strategies.strategy import DPStrategy

_PAPER_FORMULA = "DP-FedSAM Theorem 2, RDP of the subsampled Gaussian"


class DPFedSAM(DPStrategy):
    """DP-FedSAM, for clients whose recipe of local training is SAM (`flower_dp.clients.Training(sam_radius=...)`).

    With `placement="distributed"` (the paper's) every client adds its share of the noise to its own clipped update. A share has
    std z C / sqrt(m), and the noise of the sum has std z C. Here m is the maximum cohort size, a public number. The server adds
    every share that the sum lacks. The paper's m, the number of selected clients, would be revealed to each of them, and the
    amplification by sampling holds only if nobody knows it.

    With `server_completes_noise=False` the server adds no share. Then m is the minimum number of replies (`min_reply_ratio` of
    the selected clients). A round with fewer replies is not released. The accounting claims no amplification. With
    `placement="central"` the server adds all noise.

    `keep_ratio` < 1 is DP-FedSAM-top_k: after the noise only this fraction of the coordinates is kept, those of largest
    magnitude. Under central placement the server selects them from the noised mean, which costs nothing (post-processing). Under
    distributed placement every client selects from its own noised update, as in the paper. That is *not* post-processing of the
    noised sum, so the proved epsilon then rests on each client's own share alone and is very large. The paper's value stays in
    the statement, flagged as not valid.

    With `quantization_levels` every client rounds its own noised update at random to so many levels (QSGD, `DPFedPAQ`), and sends
    a few bits per coordinate. As with top-k, a single quantized message is not a function of the noised sum. Quantization needs
    distributed placement, since under central placement a client's message has no noise.

    Args:
        clip_norm: L2 bound of one client's update (paper: C), or an `AdaptiveClip` that moves it by the updates' norms.
        noise_multiplier: std of the noise on the sum / clip_norm (paper: sigma); 0 runs without privacy, as the statement says.
        epsilon: epsilon target, in place of `noise_multiplier`. The noise is the least with which `num_rounds` rounds cost at
            most this, with their private evaluations; the run ends before a round that would exceed it.
        num_rounds: rounds of the run, with `epsilon` or `noise` only; `start` must be given the same number.
        sampling: sampler of a round's cohort, from `flower_dp.core.sampling`.
        num_clients: number of clients (paper: M); the run waits until that many have registered.
        delta: the delta at which epsilon is stated, in (0, 1).
        target_epsilon: epsilon at which the run ends, before the round that would exceed it; None for no target.
        relation: neighboring relation; by default replace-one for fixed-size sampling, else add-or-remove-one.
        keep_ratio: fraction of the coordinates kept after the noise, those of largest magnitude, in (0, 1] (paper: p).
        quantization_levels: levels above 0 to which every client rounds its own noised update (QSGD); None for none.
        placement: `distributed`: every client adds its share to its own update; `central`: the server adds all noise.
        server_completes_noise: whether, with placement='distributed', the server adds every noise share that a sum lacks
            (never with top-k or quantized messages). False: nobody does; shares are sized for the fewest replies allowed, and the
            accounting claims no amplification by sampling.
        min_reply_ratio: fraction of the selected clients that must reply, with `server_completes_noise=False` only; 0.75 by
            default.
        noise: kind of noise that is correlated over the rounds, as in `DPFTRL`; None for independent noise.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.strategies import DPFedSAM
        >>> strategy = DPFedSAM(
        ...     clip_norm=0.5, noise_multiplier=0.9, sampling=PoissonSampling(sampling_rate=0.1), num_clients=1000, delta=5e-4
        ... )
        >>> # Against a participant, who knows one of 192 shares:
        >>> round(strategy.rules.noise.release_to_participants.mechanism.noise_multiplier, 4)
        0.8977
    """

    rules: ClientLevelRules

    def __init__(
        self,
        *,
        clip_norm: float | AdaptiveClip,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        num_rounds: int | None = None,
        sampling: Sampler,
        num_clients: int,
        delta: float,
        target_epsilon: float | None = None,
        relation: Relation | None = None,
        keep_ratio: float = 1.0,
        quantization_levels: int | None = None,
        placement: str = "distributed",
        server_completes_noise: bool = True,
        min_reply_ratio: float | None = None,
        noise: CorrelatedNoise | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        evaluation = options.get("evaluation")
        rounds = num_rounds if noise is None or epsilon is not None else None
        level = noise_of(noise_multiplier, epsilon, rounds, target_epsilon=target_epsilon, evaluation=evaluation)
        updates = ClippedUpdates(
            clip_norm=clip_norm,
            sampling=sampling,
            num_clients=num_clients,
            relation=relation,
            placement=placement,
            server_completes_noise=server_completes_noise,
            min_reply_ratio=min_reply_ratio,
            noise=noise,
            num_rounds=num_rounds,
            keep_ratio=keep_ratio,
            quantization_levels=quantization_levels,
        )
        title = "DP-FedSAM" if keep_ratio == 1 else "DP-FedSAM-top_k"
        rules = ClientLevelRules(
            "dp-fedsam",
            title,
            updates,
            level,
            delta=delta,
            target_epsilon=target_epsilon,
            paper_formula=_PAPER_FORMULA,
            evaluation=evaluation,
        )
        super().__init__(rules, **options)
