"""Fed-SMP (Hu et al. 2024): updates under one mask a round, clip and noise on the kept coordinates alone."""

from typing import Unpack

from flower_dp.core import checks
from flower_dp.core.sampling import Sampler
from flower_dp.privacy.events import Relation
from flower_dp.strategies.calibration import noise_of
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.releases.adaptive_clip import AdaptiveClip
from flower_dp.strategies.releases.clipped_updates import ClippedUpdates
from flower_dp.strategies.releases.masks import LargestMasks, Masks, RandomMasks
from flower_dp.strategies.rules import StrategyOptions
from flower_dp.strategies.strategy import DPStrategy

# The default random fraction of a top_k mask.
_RANDOM_RATIO = 0.5


class FedSMP(DPStrategy):
    """Fed-SMP with rand_k or top_k, for the clients of `flower_dp.clients.DPClient`.

    Every round has one mask of `keep_ratio` of the coordinates. Every client masks its update, clips the kept coordinates to L2
    norm `clip_norm`, and adds its share of the noise there. The other coordinates are 0 and carry no noise. A masked update is
    shorter, so it is clipped less, and less noise reaches the model. The update is not scaled by d / k.

    A `rand-k` mask is random; the server sends its seed. A `top-k` mask has the largest coordinates of the last released noised
    mean. A `random_ratio` of the mask is other coordinates, drawn at random. The server sends one bit per coordinate. The first
    mask is all random. A mask depends on data only through releases that were charged, so masks cost no privacy: epsilon is that
    of the noised sum. The paper's top_k takes its mask from public data.

    Args:
        clip_norm: L2 bound of one client's update, or an `AdaptiveClip` that moves it by the updates' norms.
        noise_multiplier: std of the noise on the sum / clip_norm; 0 runs without privacy, and the statement says so.
        epsilon: epsilon target, in place of `noise_multiplier`. The noise is the least with which `num_rounds` rounds cost at
            most this, with their private evaluations; the run ends before a round that would exceed it.
        num_rounds: rounds of the run, with `epsilon` only; `start` must be given the same number.
        sampling: sampler of a round's cohort, from `flower_dp.core.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated, in (0, 1).
        target_epsilon: epsilon at which the run ends, before the round that would exceed it; None for no target.
        relation: neighboring relation; by default replace-one for fixed-size sampling, else add-or-remove-one.
        keep_ratio: fraction of the coordinates in a round's mask, in (0, 1] (paper: p = k / d).
        mask: `rand-k` or `top-k`.
        random_ratio: random fraction of the mask's coordinates, in (0, 1], with `top-k` only; 0.5 by default.
        placement: `distributed`: every client adds its share to its own update; `central`: the server adds all noise.
        server_completes_noise: whether, with placement='distributed', the server adds every noise share that a sum lacks
            (never with top-k or quantized messages). False: nobody does; shares are sized for the fewest replies allowed, and the
            accounting claims no amplification by sampling.
        min_reply_ratio: fraction of the selected clients that must reply, with `server_completes_noise=False` only; 0.75 by
            default.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.strategies import FedSMP
        >>> words = {"clip_norm": 0.5, "noise_multiplier": 0.9, "num_clients": 1000, "delta": 5e-4}
        >>> strategy = FedSMP(**words, sampling=PoissonSampling(sampling_rate=0.1), keep_ratio=0.4)
        >>> strategy.rules.training.num_kept(10)
        4
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
        keep_ratio: float = 0.4,
        mask: str = "rand-k",
        random_ratio: float | None = None,
        placement: str = "distributed",
        server_completes_noise: bool = True,
        min_reply_ratio: float | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        masks: Masks = RandomMasks(keep_ratio=keep_ratio)
        if checks.one_of("mask", mask, ("rand-k", "top-k")) == "top-k":
            masks = LargestMasks(keep_ratio=keep_ratio, random_ratio=_RANDOM_RATIO if random_ratio is None else random_ratio)
        elif random_ratio is not None:
            raise checks.refusal("random_ratio", random_ratio, "is read with mask='top-k' only; a rand-k mask is all random")
        evaluation = options.get("evaluation")
        noise = noise_of(noise_multiplier, epsilon, num_rounds, target_epsilon=target_epsilon, evaluation=evaluation)
        updates = ClippedUpdates(
            clip_norm=clip_norm,
            sampling=sampling,
            num_clients=num_clients,
            relation=relation,
            placement=placement,
            server_completes_noise=server_completes_noise,
            min_reply_ratio=min_reply_ratio,
            masks=masks,
        )
        title = f"Fed-SMP-{mask.replace('-', '_')}"
        rules = ClientLevelRules(
            "fed-smp", title, updates, noise, delta=delta, target_epsilon=target_epsilon, evaluation=evaluation
        )
        super().__init__(rules, **options)
