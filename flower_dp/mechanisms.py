"""Noise: the Gaussian and the Laplace mechanism, and the event each leaves in a ledger.

`noise_multiplier` is the scale of the noise over the clip norm: the standard deviation over the L2 clip norm for Gaussian noise,
the Laplace scale over the L1 clip norm for Laplace noise. The neighbouring relation is not known here: `accounting` doubles the
sensitivity under replace-one.
"""

import math
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, NonPrivateDpEvent

from flower_dp import checks
from flower_dp.vectors import Array

# numpy.random.Generator, or torch.Generator on the device of the tensors that it makes noise for.
Generator = Any


class Mechanism(Protocol):
    """Noise for a clipped sum: its scale, its draw, its event."""

    @property
    def noise_multiplier(self) -> float:
        """Scale of the noise over the clip norm."""

    def noise(self, like: Array, scale: float, rng: Generator) -> Array:
        """Draw independent float32 noise of the given scale, of the shape, library and device of `like`."""

    def event(self) -> DpEvent:
        """Return what one release costs, with the multiplier as noise scale / clip norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaussian:
    """Gaussian noise of standard deviation noise_multiplier x L2 clip norm; 0 means none, and no privacy."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)

    def noise(self, like: Array, scale: float, rng: Generator) -> Array:
        """Draw N(0, scale^2) for every entry of `like`."""
        checks.number("noise_std", scale, at_least=0)
        if _is_numpy(rng):
            return _to(like, rng.standard_normal(like.shape, dtype=np.float32) * np.float32(scale))
        return like.new_empty(like.shape, dtype=_float32(like)).normal_(0.0, scale, generator=rng)

    def event(self) -> DpEvent:
        """Return the event of one release."""
        return GaussianDpEvent(float(self.noise_multiplier)) if self.noise_multiplier else NonPrivateDpEvent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Laplace:
    """Laplace noise of scale noise_multiplier x L1 clip norm; 0 means none, and no privacy."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)

    def noise(self, like: Array, scale: float, rng: Generator) -> Array:
        """Draw Laplace(scale) for every entry of `like` (standard deviation sqrt(2) x scale)."""
        checks.number("noise_scale", scale, at_least=0)
        if _is_numpy(rng):
            return (
                _to(like, rng.laplace(0.0, scale, like.shape).astype(np.float32))
                if scale
                else _to(like, np.zeros(like.shape, np.float32))
            )
        first, second = (like.new_empty(like.shape, dtype=_float32(like)).exponential_(1.0, generator=rng) for _ in range(2))
        return (first - second) * scale

    def event(self) -> DpEvent:
        """Return the event of one release."""
        return LaplaceDpEvent(float(self.noise_multiplier)) if self.noise_multiplier else NonPrivateDpEvent()


def noise_generator(seed: int | None = None) -> np.random.Generator:
    """Return a generator for noise or for secret sampling, seeded by the operating system.

    `seed` is for tests alone: whoever knows it can subtract the noise, so a run that uses one is not private and must say so.
    """
    if seed is not None:
        checks.integer("noise_seed", seed, at_least=0)
    return np.random.Generator(np.random.PCG64DXSM(secrets.randbits(256) if seed is None else seed))


def gaussian_share(noise_std: float, num_shares: int) -> float:
    """Return the std that each of `num_shares` clients must add so that their sum has `noise_std`: noise_std / sqrt(n)."""
    return noise_std / math.sqrt(checks.integer("num_shares", num_shares, at_least=1))


def _is_numpy(rng: Generator) -> bool:
    """Tell NumPy's generator from torch's; None would make torch draw from its global generator, which anybody may seed."""
    if isinstance(rng, np.random.Generator):
        return True
    if not hasattr(rng, "manual_seed"):
        raise ValueError(f"rng={rng!r}: must be a numpy.random.Generator or a torch.Generator")
    return False


def _to(like: Array, values: np.ndarray) -> Array:
    return values if is_numpy_array(like) else array_namespace(like).asarray(values, device=device(like))


def _float32(like: Array) -> Any:
    return array_namespace(like).float32
