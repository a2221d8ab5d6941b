"""DP-FTRL (Kairouz et al. 2021; McMahan, Xu & Zhang 2024): correlated noise, and clients that keep a minimum separation."""

from collections.abc import Mapping
from typing import Unpack

import numpy as np

from flower_dp.core import checks
from flower_dp.core.noise import Generator
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.planning.correlated_noise import BLT, CorrelatedNoise
from flower_dp.privacy.events import Relation
from flower_dp.strategies.calibration import noise_of
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.releases.adaptive_clip import AdaptiveClip
from flower_dp.strategies.releases.clipped_updates import ClippedUpdates
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import ModelUpdate, StrategyOptions
from flower_dp.strategies.run_state import RunState
from flower_dp.strategies.strategy import DPStrategy

_VELOCITY = "velocity"


class DPFTRLRules(ClientLevelRules):
    """Client-level rules whose model moves with momentum and a learning rate that falls at the end; both cost no privacy."""

    def __init__(
        self, updates: ClippedUpdates, *, learning_rate: float, momentum: float, cooldown: float, **words: object
    ) -> None:
        self.learning_rate = checks.number("server_learning_rate", learning_rate, above=0)
        self.momentum = checks.number("server_momentum", momentum, at_least=0, below=1)
        self.cooldown = checks.number("cooldown", cooldown, at_least=0, at_most=1)
        self.num_planned = checks.integer("num_rounds", updates.num_rounds or 0, at_least=1)
        super().__init__("dp-ftrl", "DP-FTRL", updates, **words)  # type: ignore[arg-type]

    def rate(self, number: int) -> float:
        """Return the learning rate of round `number`: in the cooldown it falls to zero, one round after the last."""
        falling = self.cooldown * self.num_planned
        return self.learning_rate * (min(1.0, (self.num_planned + 1 - number) / (falling + 1)) if falling else 1.0)

    def next_model(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> ModelUpdate:
        """Return the model moved by the velocity: momentum x the last velocity + the noised mean.

        Raises:
            RoundDiscarded: with a sum that is not exact.
        """
        mean, after = self.training.noised(state, now, collected, rng)
        before: Mapping[str, np.ndarray] = state.own or {}
        velocity = mean + self.momentum * before[_VELOCITY] if before else mean
        vector = now.vector + self.rate(self.num_rounds(state.charges)) * velocity
        own = {_VELOCITY: velocity} if self.momentum else None
        return ModelUpdate(vector=vector, releases={self.training.name: after}, own=own)


class DPFTRL(DPStrategy):
    """Federated averaging with noise that is correlated over the rounds, for clients that nobody samples.

    Clients take part when they are connected, but not again within `min_separation` rounds, and no more than a number of times.
    Epsilon needs no secret cohort and no sampling. Round t adds row t of C^-1 Z to the sum of clipped updates, so that most of
    the noise of earlier rounds cancels in the model. One event covers the whole run; it is charged before the first message
    leaves, and a run that ends early gives nothing back.

    The server is trusted: it clips every update once more, and adds the noise. Its state is secret: it is on the disk before the
    messages of a round leave, if the run has a `checkpoint_dir`. Any Flower client works that `DPFedAvg` works with. In a
    deployment clients need names of their own (`privacy_mod(name=...)`), since separations are counted by name; the clients of
    `flower_dp.clients` count them, too.

    Args:
        clip_norm: L2 bound of one client's update, or an `AdaptiveClip`.
        noise_multiplier: std of each row of Z / clip_norm; 0 runs without privacy. The run costs as much as one Gaussian of this
            multiplier over the sensitivity of C.
        epsilon: epsilon of the whole run, in place of `noise_multiplier`.
        num_rounds: number of rounds; `start` must be given the same number.
        sampling: rule of who may take part in a round.
        num_clients: number of clients; the run waits until that many have registered. More may come later.
        delta: the delta at which epsilon is stated, in (0, 1).
        noise: kind of the noise: `BLT`, `BISR`, `Banded` or `Tree` of `flower_dp.strategies`; `BLT()` by default.
        relation: neighboring relation: add-or-remove-one (a client's updates are zero, the default) or replace-one.
        server_learning_rate: factor of every step of the model.
        server_momentum: momentum of the steps, in [0, 1).
        cooldown: last part of the rounds, in [0, 1], in which the learning rate falls to zero.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.strategies import DPFTRL, MinimumSeparationSampling
        >>> strategy = DPFTRL(
        ...     clip_norm=0.5,
        ...     epsilon=8.0,
        ...     num_rounds=200,
        ...     sampling=MinimumSeparationSampling(cohort_size=20, min_separation=40),
        ...     num_clients=1000,
        ...     delta=1e-5,
        ... )
        >>> strategy.statement.epsilon  # nothing was released yet
        0.0
    """

    rules: DPFTRLRules

    def __init__(
        self,
        *,
        clip_norm: float | AdaptiveClip,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        num_rounds: int,
        sampling: MinimumSeparationSampling,
        num_clients: int,
        delta: float,
        noise: CorrelatedNoise | None = None,
        relation: Relation | None = None,
        server_learning_rate: float = 1.0,
        server_momentum: float = 0.0,
        cooldown: float = 0.0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        evaluation = options.get("evaluation")
        rounds = None if epsilon is None else num_rounds
        noise_or_target = noise_of(noise_multiplier, epsilon, rounds, target_epsilon=None, evaluation=evaluation)
        updates = ClippedUpdates(
            clip_norm=clip_norm,
            sampling=sampling,
            num_clients=num_clients,
            relation=relation,
            placement="central",
            server_completes_noise=True,
            min_reply_ratio=None,
            noise=BLT() if noise is None else noise,
            num_rounds=num_rounds,
        )
        rules = DPFTRLRules(
            updates,
            learning_rate=server_learning_rate,
            momentum=server_momentum,
            cooldown=cooldown,
            noise=noise_or_target,
            delta=delta,
            evaluation=evaluation,
        )
        super().__init__(rules, **options)
