"""The mask of a round: the coordinates that all of its clients keep before the clip. It follows from public numbers alone."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flower_dp.core import checks
from flower_dp.core.compression import random_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMask:
    """A mask that both sides draw from one public seed.

    Attributes:
        seed: public, drawn by the server for the round.
        keep_ratio: part of the coordinates that is kept.

    Raises:
        ValueError: for a value out of range, naming it.

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

    def to_table(self) -> dict[str, Any]:
        """Return the keys of an ask with this mask."""
        return {"mask_seed": self.seed, "mask_keep_ratio": self.keep_ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMask:
    """A mask that the server has made of released numbers, and sends: a bit a coordinate.

    Attributes:
        bits: of the coordinates, 8 a byte; 1 keeps one. What the last byte has beyond the vector is 0.

    Example:
        >>> from flower_dp.wire import SentMask
        >>> SentMask.of([0, 3, 9], length=10).indices(10).tolist()
        [0, 3, 9]
    """

    bits: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.bits, bytes):
            raise ValueError("mask_bits: must be bytes")

    @classmethod
    def of(cls, indices: np.ndarray | list[int], *, length: int) -> "SentMask":
        """Return the mask of a vector [length] that keeps these coordinates."""
        kept = np.zeros(length, bool)
        kept[indices] = True
        return cls(bits=np.packbits(kept).tobytes())

    def indices(self, length: int) -> np.ndarray:
        """Return the kept coordinates [k] of a vector [length], increasing.

        Raises:
            ValueError: if the mask is of another length, or keeps nothing.
        """
        return _read(self.bits, length)

    def to_table(self) -> dict[str, Any]:
        """Return the keys of an ask with this mask."""
        return {"mask_bits": base64.b64encode(self.bits).decode()}


PublicMask = RoundMask | SentMask
# The keys that an ask may have for its mask, by kind.
_SEEDED, _SENT = ("mask_seed", "mask_keep_ratio"), ("mask_bits",)


def mask_keys(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that the mask in an ask's table must have; none without a mask."""
    return (*(_SEEDED if _SEEDED[0] in table else ()), *(_SENT if _SENT[0] in table else ()))


def mask_of(table: Mapping[str, Any]) -> PublicMask | None:
    """Return the mask in an ask's table, whose keys were checked.

    Raises:
        ValueError: if it makes no sense, or there are two.
    """
    keys = mask_keys(table)
    if keys == _SEEDED:
        return RoundMask(seed=table["mask_seed"], keep_ratio=table["mask_keep_ratio"])
    if keys == _SENT:
        try:
            return SentMask(bits=base64.b64decode(table["mask_bits"], validate=True))
        except (TypeError, ValueError, binascii.Error):
            raise ValueError("mask_bits: must be bytes in base64") from None
    if keys:
        raise ValueError("mask_seed, mask_bits: must not both be there")
    return None


@lru_cache(maxsize=4)  # a round asks several times
def _drawn(seed: int, keep_ratio: float, length: int) -> np.ndarray:
    indices = random_mask(length, keep_ratio, np.random.default_rng(seed))
    indices.flags.writeable = False
    return indices


@lru_cache(maxsize=4)
def _read(bits: bytes, length: int) -> np.ndarray:
    flags = np.unpackbits(np.frombuffer(bits, np.uint8))
    if len(bits) != (length + 7) // 8 or flags[length:].any():
        raise ValueError(f"mask_bits: {len(bits)} bytes are no mask of a vector with {length} entries")
    indices = np.flatnonzero(flags)
    if not indices.size:
        raise ValueError("mask_bits: keep nothing")
    indices.flags.writeable = False
    return indices
