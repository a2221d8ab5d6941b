"""DP-FedAvg (McMahan et al. 2018): federated averaging with clipped updates and noise on their sum."""

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


class DPFedAvg(DPStrategy):
    """Federated averaging with client-level differential privacy; updates are not weighted by example counts.

    With `placement="central"` the server is trusted: it clips every update once more, and adds the noise. Any Flower client works
    that replies with its trained model in one `arrays` record, and so do the clients of `flower_dp.clients`.

    With `placement="distributed"` every client clips its own update and adds its share of the noise, as in `DPFedSAM`. That needs
    the clients of `flower_dp.clients`, and a server that adds up messages without looking at single ones.

    Args:
        clip_norm: L2 bound of one client's update, or an `AdaptiveClip` that moves it by the updates' norms.
        noise_multiplier: std of the noise on the sum / clip_norm; 0 runs without privacy, and the statement says so.
        epsilon: epsilon target, in place of `noise_multiplier`. The noise is the least with which `num_rounds` rounds cost at
            most this, with their private evaluations; the run ends before a round that would exceed it.
        num_rounds: rounds of the run, with `epsilon` or `noise` only; `start` must be given the same number.
        sampling: sampler of a round's cohort, from `flower_dp.core.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated, in (0, 1).
        target_epsilon: epsilon at which the run ends, before the round that would exceed it; None for no target.
        relation: neighboring relation; by default replace-one for fixed-size sampling, else add-or-remove-one.
        placement: `central`: the server adds all noise; `distributed`: every client adds its share to its own update.
        server_completes_noise: whether, with placement='distributed', the server adds every noise share that a sum lacks
            (never with top-k or quantized messages). False: nobody does; shares are sized for the fewest replies allowed, and the
            accounting claims no amplification by sampling.
        min_reply_ratio: fraction of the selected clients that must reply, with `server_completes_noise=False` only; 0.75 by
            default. These replies alone hold the noise of the release. With fewer replies the round is charged and not released.
        noise: kind of noise that is correlated over the rounds, as in `DPFTRL`; None for independent noise.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.strategies import DPFedAvg
        >>> strategy = DPFedAvg(
        ...     clip_norm=0.5, noise_multiplier=1.0, sampling=PoissonSampling(sampling_rate=0.1), num_clients=100, delta=1e-4
        ... )
        >>> strategy.statement.epsilon  # nothing was released yet
        0.0
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
        placement: str = "central",
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
        )
        rules = ClientLevelRules(
            "dp-fedavg", "DP-FedAvg", updates, level, delta=delta, target_epsilon=target_epsilon, evaluation=evaluation
        )
        super().__init__(rules, **options)
