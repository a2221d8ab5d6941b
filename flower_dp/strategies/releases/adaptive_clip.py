"""A clip norm that follows a quantile of the updates' norms (Andrew et al. 2021), at the cost of a fixed one."""

import math
from dataclasses import dataclass

from flower_dp.core import checks
from flower_dp.wire import Indicator

# The default noise on the number of clients within the clip norm is the expected cohort over this, as in the paper.
_COHORT_PART = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClip:
    """A clip norm that moves after every round towards a quantile of the norms of updates.

    Every client sends, in the row of its update, whether the update is within the clip norm. Update and indicator are one vector,
    under one noise. So a run costs as much as one with a fixed clip norm and the same noise multiplier. The price is in the noise
    on the model, which is larger by the factor z_delta / z.

    Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, Algorithm 1 and Theorem 1.

    Attributes:
        initial_clip_norm: clip norm of the first round (paper: C^0).
        target_quantile: target fraction of updates within the clip norm, in (0, 1) (paper: gamma).
        learning_rate: step size of the clip norm's logarithm (paper: eta_C).
        count_noise_std: std of the noise on the number of clients within the clip norm (paper: sigma_b); more than half of the
            noise multiplier. None: a twentieth of the expected cohort, or the noise multiplier if that is larger.
        min_clip_norm: minimum clip norm of any round; a public number.
        max_clip_norm: maximum clip norm of any round; a public number.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.strategies import AdaptiveClip, DPFedAvg
        >>> strategy = DPFedAvg(
        ...     clip_norm=AdaptiveClip(initial_clip_norm=0.1, min_clip_norm=1e-3, max_clip_norm=10.0),
        ...     noise_multiplier=1.0,
        ...     sampling=PoissonSampling(sampling_rate=0.1),
        ...     num_clients=1000,
        ...     delta=1e-4,
        ... )
        >>> strategy.rules.clip_norm(strategy.state)
        0.1
    """

    initial_clip_norm: float
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_std: float | None = None
    min_clip_norm: float
    max_clip_norm: float

    def __post_init__(self) -> None:
        checks.number("min_clip_norm", self.min_clip_norm, above=0)
        checks.number("max_clip_norm", self.max_clip_norm, at_least=self.min_clip_norm)
        checks.number("initial_clip_norm", self.initial_clip_norm, at_least=self.min_clip_norm, at_most=self.max_clip_norm)
        checks.number("target_quantile", self.target_quantile, above=0, below=1)
        checks.number("learning_rate", self.learning_rate, above=0)
        if self.count_noise_std is not None:
            checks.number("count_noise_std", self.count_noise_std, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipController:
    """An adaptive clip under the noise of one release.

    Attributes:
        of: the user's settings.
        noise_multiplier: z of the release: noise std / joint norm of update and indicator.
        expected_cohort_size: divisor of the noised number of clients within the clip norm.

    Raises:
        ValueError: if `count_noise_std` is not more than half of the noise multiplier.
    """

    of: AdaptiveClip
    noise_multiplier: float
    expected_cohort_size: float

    def __post_init__(self) -> None:
        least = self.noise_multiplier / 2
        if self.of.count_noise_std is not None and not self.of.count_noise_std > least:
            raise checks.bad(
                "count_noise_std",
                self.of.count_noise_std,
                f"more than {least:g}, half of the noise multiplier; with less the indicators alone would cost all of the budget",
            )

    @property
    def count_noise_std(self) -> float:
        """Std of the noise on the number of clients within the clip norm (paper: sigma_b)."""
        if self.of.count_noise_std is not None:
            return self.of.count_noise_std
        return max(self.expected_cohort_size / _COHORT_PART, self.noise_multiplier)

    def indicator(self, clip_norm: float) -> Indicator:
        """Return the indicator that clients send beside updates with this clip norm.

        With z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) and s = z_delta C / sigma_b the joint norm is C z_delta / z. So noise of std
        z_delta C on every coordinate is noise of std sigma_b on the number of clients, and z times the joint norm.
        """
        z, sigma_b = self.noise_multiplier, self.count_noise_std
        if z == 0:
            return Indicator(clip_norm=clip_norm, scale=clip_norm)
        z_delta = z / math.sqrt(1 - (z / (2 * sigma_b)) ** 2)
        return Indicator(clip_norm=clip_norm, scale=z_delta * clip_norm / sigma_b)

    def next_clip_norm(self, indicator: Indicator, mean: float) -> float:
        """Return the clip norm of the next round: C exp(-eta_C (b - gamma)), within its limits.

        Args:
            indicator: indicator of the round.
            mean: noised sum of the clients' indicators over the expected cohort size.
        """
        within = 0.5 + mean / indicator.scale
        log = math.log(indicator.clip_norm) - self.of.learning_rate * (within - self.of.target_quantile)
        limits = self.of.min_clip_norm, self.of.max_clip_norm
        # Clamped twice: exp(log(x)) may exceed x in its last bit, and a clip norm above its limit breaks the announced bound.
        # Without the inner clamp exp could overflow.
        return min(max(math.exp(min(max(log, math.log(limits[0])), math.log(limits[1]))), limits[0]), limits[1])
