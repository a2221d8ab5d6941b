"""One noised sum of clients' clipped rows: what it asks, the limits of replies, and the server's part of its noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flower_dp.core import compression, noise
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.privacy.release import Release
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.masks import Masks
from flower_dp.strategies.releases.shared_noise import SharedNoise
from flower_dp.wire import Ask, Promise
from flower_dp.wire.evaluation import FINER_LATTICE

# More standard deviations above its mean than the norm of a Gaussian vector ever is: e^-50 is 2e-22.
_NORM_DEVIATIONS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSum:
    """The sum of one row of every client of a cohort, each clipped, with Gaussian noise of std noise_multiplier x clip_norm.

    Attributes:
        shared: the release, and who draws which part of its noise.
        keep_ratio: part of the coordinates kept, those of largest magnitude, after the noise.
        quantization_levels: levels above 0 of each client's own noised row; 0 for none.
        masks: makes the mask that all clients of a round share; None for no mask.
        metrics: of an evaluation; None in training.
    """

    shared: SharedNoise
    keep_ratio: float = 1.0
    quantization_levels: int = 0
    masks: Masks | None = None
    metrics: MetricBounds | None = None

    @property
    def release(self) -> Release:
        """What is released."""
        return self.shared.release

    def num_kept(self, length: int) -> int:
        """Return how many coordinates of a row [length] are noised and sent."""
        return length if self.masks is None else compression.num_kept(self.masks.keep_ratio, length)

    def ask(self, length: int, cohort_size: int, released: np.ndarray | None = None) -> Ask:
        """Return what is asked of the clients of a round; a mask is made anew.

        Args:
            length: of a row.
            cohort_size: how many clients are asked.
            released: the noised mean [length] that was released last, which a mask may be made of; None before any was.
        """
        distributed = self.shared.placement == "distributed"
        share = self.shared.share(cohort_size)
        mask = None if self.masks is None else self.masks.mask(length, released)
        scale = share if distributed else self.release.noise_scale
        step = noise.lattice_step(scale, clip_norm=self.release.clip_norm, dimension=self.num_kept(length))
        if self.metrics is not None:
            step /= FINER_LATTICE
        return Ask(
            promise=Promise(clip_norm=self.release.clip_norm, noise_multiplier=self.release.mechanism.noise_multiplier),
            placement=self.shared.placement,
            step=step,
            noise_std=share,
            mask=mask,
            keep_ratio=self.keep_ratio if distributed else 1.0,
            quantization_levels=self.quantization_levels,
            metrics=self.metrics,
        )

    def limits(self, ask: Ask, length: int) -> Limits:
        """Return the limits of the replies to an ask: the clip norm and the lattice, or the longest honest sum."""
        clip_norm = ask.promise.clip_norm
        mask = None if ask.mask is None else ask.mask.indices(length)
        num_kept = length if mask is None else mask.size
        longest_noise = ask.noise_std * (math.sqrt(num_kept) + _NORM_DEVIATIONS)

        def honest_norm(names: Sequence[str]) -> float:
            count = len(names)
            if not ask.quantization_levels:
                return count * clip_norm + math.sqrt(count) * longest_noise
            # Quantisation can lengthen a row; each row has the largest norm.
            return count * (clip_norm + longest_noise) * compression.qsgd_norm_ratio(num_kept, ask.quantization_levels)

        return Limits(
            length=length,
            mask=mask,
            clip_norm=clip_norm if ask.placement == "central" else None,
            step=ask.step,
            honest_norm=honest_norm,
        )

    def noised(self, ask: Ask, total: np.ndarray, *, num_replies: int, cohort_size: int, rng: Generator) -> np.ndarray:
        """Return the noised mean [length]: the sum with the server's part of the noise, over the *expected* cohort.

        Args:
            ask: what was asked.
            total: the sum of the accepted rows, on the lattice.
            num_replies: how many clients it has.
            cohort_size: how many were asked.
            rng: fresh, for this release alone.

        Raises:
            RoundLeftOut: with too few replies for the noise that was charged, or a sum that is not exact.
        """
        if self.shared.too_few(num_replies, cohort_size):
            raise RoundLeftOut(f"{num_replies} of {cohort_size} clients answered, too few for the noise that was charged")
        std = self.shared.server_std(num_replies)
        # Exact sums of multiples of the step: what is released is post-processing of the ideal mechanism.
        kept = slice(None) if ask.mask is None else ask.mask.indices(total.size)
        total = total.copy()
        total[kept] += noise.gaussian(total[kept], std, ask.step, rng)
        if not noise.exact(total, ask.step):
            raise RoundLeftOut("the replies' sum is too large to be exact")
        mean = total / self.release.expected_cohort
        if self.keep_ratio < 1 and self.shared.placement == "central":
            mean = compression.decode(compression.top_k(mean.astype(np.float32), self.keep_ratio), mean.size)
        return np.asarray(mean)
