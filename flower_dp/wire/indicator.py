"""The indicator that a client sends behind its update: whether the update is within the clip norm."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from flower_dp.core import checks
from flower_dp.wire.text import check_keys

# What the norm of a row may gain by rounding is less.
_MARGIN = 2.0**-40
# Of a larger one the coordinate is infinite as float32, whose sign no finite noise hides.
_LARGEST_SCALE = 2.0**127
_KEYS = ("clip_norm", "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Indicator:
    """One more coordinate behind the update: s (b - 1/2), with b = 1 if the update is within the clip norm, else 0.

    Source: Andrew et al. 2021, Algorithm 1. Update and indicator are one row, clipped part by part.

    Attributes:
        clip_norm: L2 bound of the update alone (paper: C).
        scale: s, what b counts in the row, in units of the update; at most 2^127, as the row is float32.

    Raises:
        ValueError: for a value that makes no sense, naming it.

    Example:
        >>> from flower_dp.wire import Indicator
        >>> round(Indicator(clip_norm=4.0, scale=6.0).joint_norm, 6)
        5.0
    """

    clip_norm: float
    scale: float

    def __post_init__(self) -> None:
        checks.number("indicator clip_norm", self.clip_norm, above=0)
        checks.number("indicator scale", self.scale, above=0, at_most=_LARGEST_SCALE)

    @property
    def joint_norm(self) -> float:
        """L2 bound of the row of update and indicator together: sqrt(C^2 + s^2 / 4), a little more."""
        return math.hypot(self.clip_norm, self.scale / 2) * (1 + _MARGIN)

    def to_table(self) -> dict[str, float]:
        """Return what is sent."""
        return {"clip_norm": self.clip_norm, "scale": self.scale}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Read what was sent.

        Raises:
            ValueError: if a key is unknown or missing, or a value makes no sense.
        """
        if not isinstance(table, dict):
            raise ValueError("indicator: must be a table")
        check_keys("indicator", table, _KEYS)
        return cls(clip_norm=table["clip_norm"], scale=table["scale"])
