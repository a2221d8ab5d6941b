"""The masks of a run's rounds, made of public numbers: random ones, and the largest coordinates of the last release."""

import secrets
from dataclasses import dataclass

import numpy as np

from flower_dp.core import checks
from flower_dp.core.compression import num_kept, top_k_indices
from flower_dp.wire import PublicMask, RoundMask, SentMask


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomMasks:
    """A new random mask for every round (Hu et al. 2024: rand_k).

    Attributes:
        keep_ratio: fraction of the coordinates that is kept, in (0, 1] (paper: p = k / d).
    """

    keep_ratio: float

    def __post_init__(self) -> None:
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)

    def mask(self, length: int, released: np.ndarray | None) -> RoundMask:
        """Return a mask drawn from a new seed.

        Args:
            length: length of the vector.
            released: the last released noised mean [length]; None before any. No other number of clients' data.
        """
        return RoundMask(seed=secrets.randbits(63), keep_ratio=self.keep_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMasks:
    """The largest coordinates of the last release, and some random ones (after Hu et al. 2024: top_k).

    A masked round changes only coordinates in its mask. With the largest coordinates alone the first mask would stay for ever, so
    a part of every mask is drawn among the other coordinates. The first mask is all random. A mask is post-processing of releases
    that were charged, and costs nothing.

    Attributes:
        keep_ratio: fraction of the coordinates that is kept, in (0, 1].
        random_ratio: random fraction of the kept coordinates, in (0, 1].

    Example:
        >>> import numpy as np
        >>> from flower_dp.strategies.releases.masks import LargestMasks
        >>> released = np.array([0.0, -9.0, 1.0, 0.0, 0.0, 7.0, 0.0, 0.0])
        >>> kept = LargestMasks(keep_ratio=0.5, random_ratio=0.5).mask(8, released).indices(8)
        >>> len(kept), {1, 5} <= set(kept.tolist())
        (4, True)
    """

    keep_ratio: float
    random_ratio: float

    def __post_init__(self) -> None:
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        checks.number("random_ratio", self.random_ratio, above=0, at_most=1)

    def mask(self, length: int, released: np.ndarray | None) -> PublicMask:
        """Return the mask; before the first release a random one."""
        count = num_kept(self.keep_ratio, length)
        count_random = num_kept(self.random_ratio, count)
        if released is None or count_random == count:
            return RandomMasks(keep_ratio=self.keep_ratio).mask(length, released)
        largest = top_k_indices(released, count - count_random)
        others = np.setdiff1d(np.arange(length), largest, assume_unique=True)
        drawn = np.random.default_rng(secrets.randbits(128)).choice(others, count_random, replace=False)
        return SentMask.of(np.concatenate([largest, drawn]), length=length)


Masks = RandomMasks | LargestMasks
