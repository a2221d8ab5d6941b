"""Noise on a lattice: Gaussian and Laplace draws, rounded to multiples of a power of two.

A proof assumes real-valued noise. With floating-point noise, the set of floats that a sum "value + noise" can take depends on the
value, so counting them distinguishes neighboring inputs. Here the value is first rounded toward zero to multiples of a step g,
which never raises its norm; the draw is rounded to the nearest multiple of g; and the sum is exact. For x on the lattice,
x + round(n) = round(x + n): the result is post-processing of the ideal mechanism. A sum of separately rounded Gaussian shares of
standard deviation s differs from that by terms of the order exp(-2 pi^2 (s / g)^2): 0 in any float, as s >= 1024 g here.

The precision of the draws themselves remains limited; docs/accounting.md bounds its effect.
"""

import hashlib
import math
import secrets
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array, is_torch_array

from flower_dp.core import checks
from flower_dp.core.vectors import Array

# numpy.random.Generator, or torch.Generator on the device of the tensors that it makes noise for.
Generator = Any

# The step is at most the scale of the noise over this ...
_STEPS_A_SCALE = 2**10
# ... and at most this part of the entries of a vector whose norm is the clip norm and whose entries are all of one size.
_STEPS_AN_ENTRY = 2**8
# A standard deviation of more steps than this is drawn in two parts: a double has 53 bits, and a cell needs many of its values.
_MOST_STEPS = 2**16
_FINE_STEPS = 2**12
# Digits of a geometric draw are drawn from one uniform number each.
_DIGIT_BITS = 12
# Clip norm and noise have fewer steps than this, so that sums of many of them are exact.
_MOST_STEPS_A_CLIP = 2.0**48
# Smaller steps have inverses near the end of a double's range.
_SMALLEST = 2.0**-900
# Exact integers of a double; sums of lattice values must stay below.
LARGEST_EXACT = 2.0**53
# Entries of a long vector that are drawn at once, so that no second vector of its length is needed.
_BLOCK = 2**15
# Outside this range float32 can't hold the multiples of a step, or can't be divided by the step.
_FLOAT32_STEPS = (2.0**-100, 2.0**100)


def lattice_step(scale: float, *, clip_norm: float, dimension: int, norm: str = "l2") -> float:
    """Return the step of the lattice for one release, a power of two; 0 (no lattice) if there is no noise.

    The step is at most scale / 1024. It is also at most clip_norm / (256 sqrt(dimension)) for an L2 bound, and at most
    clip_norm / (256 dimension) for an L1 bound. So rounding takes at most 1/256 of the clip norm off a vector.

    Args:
        scale: scale of the least noise that one party adds: a standard deviation, or a Laplace scale.
        clip_norm: bound on the norm of what is noised.
        dimension: number of coordinates.
        norm: `l2` or `l1`.

    Raises:
        ValueError: for a value out of range, naming it.
    """
    checks.number("noise_scale", scale, at_least=0)
    checks.number("clip_norm", clip_norm, above=0)
    checks.integer("dimension", dimension, at_least=0)
    if scale == 0:
        return 0.0
    spread = dimension if checks.one_of("norm", norm, ("l2", "l1")) == "l1" else math.sqrt(max(dimension, 1))
    largest = min(scale / _STEPS_A_SCALE, clip_norm / (_STEPS_AN_ENTRY * max(spread, 1)))
    step = math.ldexp(1.0, math.frexp(largest)[1] - 1)
    if not largest > _SMALLEST or clip_norm / step >= _MOST_STEPS_A_CLIP:
        raise ValueError(f"noise_scale={scale:g}: is too small for clip_norm={clip_norm:g}; use more noise, or 0 for none")
    return step


def check_lattice(step: float, *, scale: float, clip_norm: float) -> None:
    """Check a lattice that another party has chosen, on which this party clips and noises.

    Args:
        step: step of the lattice; 0 for no lattice, if this party adds no noise.
        scale: scale of the noise that this party adds; 0 if the other party adds all of it.
        clip_norm: bound on the norm of what this party clips.

    Raises:
        ValueError: if the step is not a power of two, is above scale / 1024, or is so small that sums are not exact.
    """
    if step == scale == 0:
        return
    _check_step(scale or math.inf, step)
    if not max(scale, clip_norm) / step < _MOST_STEPS_A_CLIP or step < _SMALLEST:
        raise ValueError(f"step={step:g}: is too small for clip_norm={clip_norm:g} and noise of scale {scale:g}")


def round_toward_zero(values: Array, step: float) -> Array:
    """Return clipped values rounded toward zero to multiples of a step; float64 if float32 can't hold these.

    No entry grows, so no norm does. A step of 0 changes nothing. The step must be that of `lattice_step` for their clip norm.
    """
    if step == 0:
        return values
    xp = array_namespace(values)
    if values.dtype == xp.float32 and not _FLOAT32_STEPS[0] < step < _FLOAT32_STEPS[1]:
        values = xp.astype(values, xp.float64)
    # torch.trunc is more than ten times slower than its division with the same rounding; dividing by a power of two is exact.
    rounded = values.div(step, rounding_mode="trunc") if is_torch_array(values) else xp.trunc(values / step)
    rounded *= step
    # Adding 0 makes every zero positive: the sign of what was rounded away must not stay.
    rounded += 0.0
    return rounded


def round_to_nearest(values: Array, step: float) -> Array:
    """Return values rounded to the nearest multiples of a step, which removes all finer digits of an already noised sum."""
    if step == 0:
        return values
    xp = array_namespace(values)
    return xp.round(values * (1 / step)) * step + 0.0


def gaussian(like: Array, scale: float, step: float, rng: Generator) -> Array:
    """Draw N(0, scale^2) for every entry of `like`, rounded to multiples of `step`.

    Args:
        like: array whose shape, library and device the noise gets.
        scale: standard deviation; 0 gives zeros.
        step: a power of two, at most scale / 1024.
        rng: a fresh generator, see `noise_generator`.

    Returns:
        float64 noise.

    Raises:
        ValueError: if the step is not such a power of two, or `rng` is not a generator.
    """
    numpy = _is_numpy(rng)
    if checks.number("noise_std", scale, at_least=0) == 0:
        return _zeros(like)
    parts = [_check_step(scale, step)]
    if parts[0] > _MOST_STEPS:
        # A sum of two Gaussians: the small one fills the gaps between the doubles that the large one can take.
        parts = [math.sqrt(parts[0] ** 2 - _FINE_STEPS**2), _FINE_STEPS]
    if numpy:
        total = np.zeros(like.shape)
        flat = total.reshape(-1)  # a view
        for part in parts:
            for start in range(0, flat.size, _BLOCK):
                drawn = np.asarray(rng.standard_normal(min(_BLOCK, flat.size - start)))
                drawn *= part
                flat[start : start + _BLOCK] += np.rint(drawn, out=drawn) * step
        return _to(like, total)  # sums that start at 0 have no negative zeros
    total = _zeros(like)
    for part in parts:
        total += like.new_empty(like.shape, dtype=total.dtype).normal_(0.0, part, generator=rng).round_()
    return total * step


def laplace(like: Array, scale: float, step: float, rng: np.random.Generator) -> Array:
    """Draw Laplace(scale) for every entry of `like` (standard deviation sqrt(2) x scale), rounded to multiples of `step`.

    Arguments, result and errors are those of `gaussian`, but for `rng`, which is NumPy's.
    """
    if not _is_numpy(rng):
        raise checks.bad("rng", rng, "a numpy.random.Generator")
    if checks.number("noise_scale", scale, at_least=0) == 0:
        return _zeros(like)
    # The magnitude in half steps, rounded down, is geometric; two half steps around a multiple of the step round to it.
    halves = _geometric(like.shape, 0.5 / _check_step(scale, step), rng)
    magnitude = np.floor((halves + 1) / 2)
    return _to(like, np.where(rng.random(like.shape) < 0.5, magnitude, -magnitude) * step + 0.0)


def uniform(like: Array, rng: Generator) -> Array:
    """Draw a float64 number in [0, 1) for every entry of `like`, for secret choices after the noise."""
    if _is_numpy(rng):
        return _to(like, rng.random(tuple(like.shape)))
    return _zeros(like).uniform_(0.0, 1.0, generator=rng)


def is_exact(values: Array, step: float) -> bool:
    """Return whether a float64 sum of multiples of a step is exact: its entries have at most 53 bits."""
    xp = array_namespace(values)
    most = LARGEST_EXACT * step
    return step == 0 or not math.prod(values.shape) or bool((xp.min(values) > -most) & (xp.max(values) < most))


def noise_generator(seed: int | None = None, *purpose: object, on: Array | None = None) -> Generator:
    """Return a generator of noise or of secret choices, with fresh entropy from the operating system.

    Make one for each reply or release, and discard it. A generator that is kept is copied with its owner, and the copies repeat
    the noise.

    Args:
        seed: seed for tests only. Anyone who knows it can subtract the noise, so its run is not private and must say so.
        purpose: round, client and the like, used with a seed only; each purpose gives different numbers.
        on: a tensor on a device with its own generator, such as a GPU; None for NumPy's generator, on the CPU.

    Raises:
        ValueError: if the seed is not a whole number >= 0.
    """
    if seed is None:
        entropy = secrets.randbits(256)
    else:
        checks.integer("noise_seed", seed, at_least=0)
        entropy = int.from_bytes(hashlib.sha256(repr((seed, *purpose)).encode()).digest())
    if on is not None and not is_numpy_array(on) and on.device.type != "cpu":
        generator = array_namespace(on).Generator(on.device)
        generator.manual_seed(entropy % 2**64 - 2**63)
        return generator
    # torch's own generator for the CPU keeps 32 bits of a seed, which can be guessed.
    # The default pool of a SeedSequence keeps 128 bits.
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(entropy, pool_size=8)))


def gaussian_share(noise_std: float, num_shares: int) -> float:
    """Return the std that each of `num_shares` clients must add so that their sum has `noise_std`: noise_std / sqrt(n)."""
    return noise_std / math.sqrt(checks.integer("num_shares", num_shares, at_least=1))


def _geometric(shape: tuple[int, ...], rate: float, rng: np.random.Generator) -> np.ndarray:
    """Draw floor(E / rate) of standard exponential E, as float64 whole numbers: P(k) = (1 - e^-rate) e^(-rate k).

    Its binary digits are independent, so they are drawn in groups, each from a uniform number of 53 bits. Then no cell, however
    far from zero, depends on the last bits of one float.
    """
    bits = max(0, math.ceil(math.log2(2 / rate)))
    total = np.floor(np.log1p(-rng.random(shape)) / -(rate * 2.0**bits)) * 2.0**bits
    for first in range(0, bits, _DIGIT_BITS):
        size = 2.0 ** min(_DIGIT_BITS, bits - first)
        each = rate * 2.0**first
        digit = np.floor(np.log1p(rng.random(shape) * math.expm1(-each * size)) / -each)
        total += np.minimum(digit, size - 1) * 2.0**first
    return total


def _check_step(scale: float, step: float) -> float:
    """Return the scale in steps, if the step is valid for it."""
    if not step > 0 or math.frexp(step)[0] != 0.5 or scale < _STEPS_A_SCALE * step:
        raise checks.bad("step", step, f"a power of two, at most 1/{_STEPS_A_SCALE} of the noise scale {scale:g}")
    return scale / step


def _is_numpy(rng: Generator) -> bool:
    """Return whether a generator is NumPy's.

    None is refused: torch would draw from its global generator, which anybody may seed.
    """
    if isinstance(rng, np.random.Generator):
        return True
    if not hasattr(rng, "manual_seed"):
        raise checks.bad("rng", rng, "a numpy.random.Generator or a torch.Generator")
    return False


def _zeros(like: Array) -> Array:
    xp = array_namespace(like)
    return xp.zeros(tuple(like.shape), dtype=xp.float64, device=device(like))


def _to(like: Array, values: np.ndarray) -> Array:
    return values if is_numpy_array(like) else array_namespace(like).asarray(values, device=device(like))
