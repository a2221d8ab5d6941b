"""The mask of a round: the coordinates that all its clients keep before the clip. It follows from public numbers alone."""

from functools import lru_cache

import numpy as np

from flower_dp.core import checks
from flower_dp.core.compression import random_mask
from flower_dp.wire.structs import Part


class RoundMask(Part, frozen=True, kw_only=True, tag="seed"):
    """A mask that server and clients draw from one public seed.

    Attributes:
        seed: public seed that the server draws for the round, in [0, 2^63).
        keep_ratio: part of the coordinates that is kept, in (0, 1].

    Raises:
        ValueError: naming the value that is out of range.

    Example:
        >>> from flower_dp.wire import RoundMask
        >>> len(RoundMask(seed=7, keep_ratio=0.05).indices(1000))
        50
    """

    seed: int
    keep_ratio: float

    def __post_init__(self) -> None:
        checks.integer("mask seed", self.seed, at_least=0, at_most=2**63 - 1)
        checks.number("mask keep_ratio", self.keep_ratio, above=0, at_most=1)

    def indices(self, length: int) -> np.ndarray:
        """Return the kept coordinates [k] of a vector [length], increasing."""
        return _drawn(self.seed, self.keep_ratio, length)


class SentMask(Part, frozen=True, kw_only=True, tag="bits"):
    """A mask that the server computes from released numbers, and sends: one bit per coordinate.

    Attributes:
        bits: bits of the coordinates, 8 per byte; 1 keeps a coordinate. Bits of the last byte beyond the vector are 0.

    Example:
        >>> from flower_dp.wire import SentMask
        >>> SentMask.of([0, 3, 9], length=10).indices(10).tolist()
        [0, 3, 9]
    """

    bits: bytes

    @classmethod
    def of(cls, indices: np.ndarray | list[int], *, length: int) -> "SentMask":
        """Return the mask of a vector [length] that keeps these coordinates."""
        kept = np.zeros(length, bool)
        kept[indices] = True
        return cls(bits=np.packbits(kept).tobytes())

    def indices(self, length: int) -> np.ndarray:
        """Return the kept coordinates [k] of a vector [length], increasing.

        Raises:
            ValueError: if the mask has another length, or keeps no coordinate.
        """
        return _read(self.bits, length)


PublicMask = RoundMask | SentMask


# One round needs the same mask several times.
@lru_cache(maxsize=4)
def _drawn(seed: int, keep_ratio: float, length: int) -> np.ndarray:
    indices = random_mask(length, keep_ratio, np.random.default_rng(seed))
    indices.flags.writeable = False
    return indices


@lru_cache(maxsize=4)
def _read(bits: bytes, length: int) -> np.ndarray:
    flags = np.unpackbits(np.frombuffer(bits, np.uint8))
    if len(bits) != (length + 7) // 8 or flags[length:].any():
        raise ValueError(f"mask bits: {len(bits)} bytes do not fit a vector with {length} entries")
    indices = np.flatnonzero(flags)
    if not indices.size:
        raise ValueError("mask bits: must keep at least one coordinate")
    indices.flags.writeable = False
    return indices
