"""The Gaussian and the Laplace mechanism: how much noise a release has, and the event that a ledger is charged with.

`noise_multiplier` is the scale of the noise over the clip norm: the standard deviation over the L2 clip norm for Gaussian noise,
the Laplace scale over the L1 clip norm for Laplace noise. The neighboring relation is not known here: `accounting` doubles the
sensitivity under replace-one. Draws are functions of `flower_dp.core.noise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from flower_dp.core import checks, dp_events, noise
from flower_dp.core.noise import Generator
from flower_dp.core.vectors import Array


class Mechanism(Protocol):
    """Noise for a clipped sum: its scale, the clipped norm, its draw, its event."""

    @property
    def noise_multiplier(self) -> float:
        """Scale of the noise over the clip norm."""

    @property
    def norm(self) -> str:
        """`l2` or `l1`: the norm that contributions are clipped in."""

    def noise(self, like: Array, scale: float, step: float, rng: Generator) -> Array:
        """Draw float64 noise of a scale on a lattice, as the functions of `flower_dp.core.noise` do."""

    def event(self) -> dp_events.DpEvent:
        """Return the event of one release, with noise scale / clip norm for its multiplier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled:
    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaussian(_Scaled):
    """Gaussian noise of standard deviation noise_multiplier x L2 clip norm; 0 means none, and no privacy.

    Example:
        >>> from flower_dp.privacy.mechanisms import Gaussian
        >>> Gaussian(noise_multiplier=1.1).event()
        GaussianDpEvent(noise_multiplier=1.1)
    """

    norm: ClassVar[str] = "l2"

    def noise(self, like: Array, scale: float, step: float, rng: Generator) -> Array:
        """Draw Gaussian noise."""
        return noise.gaussian(like, scale, step, rng)

    def event(self) -> dp_events.DpEvent:
        """Return the event of one release."""
        return dp_events.GaussianDpEvent(float(self.noise_multiplier)) if self.noise_multiplier else dp_events.NonPrivateDpEvent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Laplace(_Scaled):
    """Laplace noise of scale noise_multiplier x L1 clip norm; 0 means none, and no privacy.

    Example:
        >>> from flower_dp.privacy.mechanisms import Laplace
        >>> Laplace(noise_multiplier=2.0).norm
        'l1'
    """

    norm: ClassVar[str] = "l1"

    def noise(self, like: Array, scale: float, step: float, rng: Generator) -> Array:
        """Draw Laplace noise."""
        return noise.laplace(like, scale, step, rng)

    def event(self) -> dp_events.DpEvent:
        """Return the event of one release."""
        return dp_events.LaplaceDpEvent(float(self.noise_multiplier)) if self.noise_multiplier else dp_events.NonPrivateDpEvent()
