"""Stochastic quantization to a few levels, packed into bytes (QSGD; Alistarh et al. 2017).

Coordinate j of a vector x becomes ||x|| sign(x_j) l_j / s. The level l_j is a whole number from 0 to s, rounded up or down at
random so that the expectation is x_j. Most l_j of a long vector are 0, and zlib codes them in far less than log2(2 s + 1) bits
each. Otherwise they are packed as digits of base 2 s + 1, as many in a few bytes as fit.
"""

import math
import zlib
from functools import lru_cache
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_numpy_array

from flower_dp.core import checks
from flower_dp.core.clipping import l2_norms
from flower_dp.core.compression.payload import Codec, Payload, check_array
from flower_dp.core.noise import Generator, uniform
from flower_dp.core.vectors import Array

# Digits of two bytes.
MOST_LEVELS = 2**15 - 1
# Coordinates that are quantized, packed or read at a time.
_BLOCK = 2**16
_BYTE = np.dtype(np.uint8)
_SCALE = np.dtype("<f4")
_CODINGS = ("packed", "deflate")
# Natural logarithm of the probability that a quantized vector is longer than `qsgd_norm_ratio` says.
_LOG_NEVER = -50.0


def qsgd(vector: Array, levels: int, rng: Generator) -> Payload:
    """Encode a vector that is already private, without bias: a scale, and about log2(2 levels + 1) bits a coordinate or fewer.

    The scale is the vector's L2 norm, rounded up to float32. E[Q(x)] = x, and E||Q(x) - x||^2 <= q ||x||^2 with
    q = min(d / s^2, sqrt(d) / s).

    Args:
        vector: [d], with its noise: scale and size of the payload are functions of it.
        levels: s, the number of levels above 0; 1 is ternary.
        rng: secret, the generator of the reply; see `flower_dp.core.noise.noise_generator`.

    Raises:
        ValueError: for levels out of range, a NaN or infinite entry, or a norm beyond float32.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.compression import decode, qsgd
        >>> payload = qsgd(np.random.default_rng(1).standard_normal(7850), 1, np.random.default_rng(2))
        >>> payload.num_bytes < 0.25 * 7850 / 8, np.unique(np.sign(decode(payload, 7850))).tolist()
        (True, [-1.0, 0.0, 1.0])
    """
    scale, length = _scale(vector), int(vector.shape[0])
    digits = np.empty(length, _digit_type(check_levels(levels)))
    for start in range(0, length, _BLOCK):
        digits[start : start + _BLOCK] = _digits(vector[start : start + _BLOCK], scale, levels, rng)
    # Nearly all of the redundancy is in runs of zeros, which run-length coding finds quickly.
    squeezer = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    body = squeezer.compress(digits.data) + squeezer.flush()
    coding = "deflate" if len(body) < qsgd_bytes(length, levels) - _SCALE.itemsize else "packed"
    coded = np.frombuffer(_SCALE.type(scale).tobytes() + (body if coding == "deflate" else _packed(digits, levels)), np.uint8)
    return Payload(arrays=(coded,), header={"encoding": "qsgd", "length": length, "levels": levels, "coding": coding})


def check_levels(levels: int) -> int:
    """Return the number of levels.

    Raises:
        ValueError: if it is not a whole number of 1 to 32767.
    """
    return checks.integer("quantization_levels", levels, at_least=1, at_most=MOST_LEVELS)


def qsgd_bytes(length: int, levels: int) -> int:
    """Return the largest size of a payload."""
    digits, width = _word(2 * check_levels(levels) + 1)
    return _SCALE.itemsize + -(-length // digits) * width


def qsgd_variance(length: int, levels: int) -> float:
    """Return q = min(d / s^2, sqrt(d) / s): E||Q(x) - x||^2 <= q ||x||^2 (QSGD, Lemma 3.1)."""
    return min(length / levels**2, math.sqrt(length) / levels)


def qsgd_norm_ratio(length: int, levels: int) -> float:
    """Return a bound on the ratio of the norms of a quantized vector and its vector, exceeded with a probability below 1e-21.

    The square of the ratio is the sum of l_j^2 over s^2. These are independent, l_j is one of two neighbors in 0 to s, and their
    sum has an expectation of at most s^2 (1 + q): Bernstein's inequality with differences of at most 2 s + 1.
    """
    mean, largest = levels**2 * (1 + qsgd_variance(length, levels)), 2 * levels + 1
    third = -_LOG_NEVER * largest / 3
    deviation = third + math.sqrt(third**2 - 2 * _LOG_NEVER * largest * mean)
    return min(math.sqrt(mean + deviation) / levels, 1 + math.sqrt(length) / levels) * (1 + 2.0**-20)


def _scale(vector: Array) -> np.float32:
    """Return the norm, rounded up."""
    norm = float(l2_norms(vector))
    with np.errstate(over="ignore"):
        scale = np.float32(norm)
    if float(scale) < norm:
        scale = np.nextafter(scale, np.float32(math.inf))
    if not np.isfinite(scale):
        raise ValueError("vector: has NaN or infinite entries, or a norm beyond float32")
    return scale


def _digits(block: Array, scale: np.float32, levels: int, rng: Generator) -> np.ndarray:
    """Return level + s of every coordinate, 0 to 2 s."""
    xp = array_namespace(block)
    wide = xp.astype(block, xp.float64)
    drawn = uniform(wide, rng)
    if scale:
        # A sum that is rounded up to the next whole number must not become a level of its own.
        drawn += xp.abs(wide) * (levels / float(scale))
        drawn = xp.clip(xp.floor(drawn), 0, levels)
    else:
        drawn = xp.zeros_like(drawn)
    signed = xp.where(wide < 0, -drawn, drawn) + levels
    return signed if is_numpy_array(signed) else np.asarray(signed.cpu().numpy())


def _digit_type(levels: int) -> np.dtype[Any]:
    """Return the type of digits 0 to 2 s as zlib sees them."""
    return np.dtype(np.uint8 if 2 * levels < 2**8 else "<u2")


@lru_cache(maxsize=64)
def _word(base: int) -> tuple[int, int]:
    """Return how many digits are packed into how many bytes, for the fewest bytes per digit."""
    choices = []
    for width in range(1, 9):
        digits = 1
        while base ** (digits + 1) <= 2 ** (8 * width):
            digits += 1
        if base <= 2 ** (8 * width):
            choices.append((width / digits, width, digits))
    _, width, digits = min(choices)
    return digits, width


def _packed(digits: np.ndarray, levels: int) -> bytes:
    """Return digits packed into words of several digits each; the last word is filled up with zeros."""
    base = 2 * levels + 1
    count, width = _word(base)
    block = _BLOCK // count * count
    return b"".join(_words(digits[start : start + block], base, count, width) for start in range(0, digits.size, block))


def _words(digits: np.ndarray, base: int, count: int, width: int) -> bytes:
    rows = np.zeros((-(-digits.size // count), count), np.uint64)
    rows.reshape(-1)[: digits.size] = digits
    words = rows[:, -1].copy()
    for place in range(count - 2, -1, -1):
        words *= np.uint64(base)
        words += rows[:, place]
    return words.astype("<u8").view(_BYTE).reshape(-1, 8)[:, :width].tobytes()


def _read(payload: Payload, length: int, mask: np.ndarray | None) -> np.ndarray:
    (coded,) = payload.arrays
    levels = checks.integer("payload levels", payload.header.get("levels"), at_least=1, at_most=MOST_LEVELS)
    coding = checks.one_of("payload coding", payload.header.get("coding"), _CODINGS)
    check_array("bytes", coded, _BYTE, coded.size)
    scale = np.frombuffer(coded[: _SCALE.itemsize].tobytes().ljust(_SCALE.itemsize, b"\xff"), _SCALE)[0]
    if not (np.isfinite(scale) and scale >= 0):
        raise ValueError(f"payload scale={scale}: must be a finite number >= 0")
    body = coded[_SCALE.itemsize :]
    digits = _inflated(body, length, levels) if coding == "deflate" else _unpacked(body, length, levels)
    values = (float(scale) * np.arange(-levels, levels + 1) / levels).astype(np.float32)
    vector = np.empty(length, np.float32)
    for start in range(0, length, _BLOCK):
        part = digits[start : start + _BLOCK]
        if part.max() > 2 * levels:
            raise ValueError(f"payload has digits above {2 * levels}")
        np.take(values, part, out=vector[start : start + _BLOCK])
    return vector


def _inflated(body: np.ndarray, length: int, levels: int) -> np.ndarray:
    """Return the digits of a zlib stream, which must have exactly the expected number of them."""
    kind = _digit_type(levels)
    size, stream = length * kind.itemsize, zlib.decompressobj()
    try:
        data = stream.decompress(body.tobytes(), size + 1)
    except zlib.error as error:
        raise ValueError(f"payload bytes are not a zlib stream ({error})") from None
    if len(data) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"payload bytes are not a zlib stream of {size} bytes and no more")
    return np.frombuffer(data, kind)


def _unpacked(body: np.ndarray, length: int, levels: int) -> np.ndarray:
    """Return the digits of packed words."""
    base = 2 * levels + 1
    count, width = _word(base)
    check_array("bytes", body, _BYTE, -(-length // count) * width)
    digits = np.empty(-(-length // count) * count, _digit_type(levels))
    words = _BLOCK // count
    for start in range(0, body.size // width, words):
        rows = digits[start * count : (start + words) * count].reshape(-1, count)
        padded = np.zeros((len(rows), 8), np.uint8)
        padded[:, :width] = body[start * width : (start + len(rows)) * width].reshape(-1, width)
        rest = padded.view("<u8")[:, 0].astype(np.uint64)
        for place in range(count):
            more = rest // np.uint64(base)
            rows[:, place] = rest - more * np.uint64(base)
            rest = more
        if rest.any():
            raise ValueError(f"payload has a word beyond {count} digits of base {base}")
    if digits[length:].any():
        raise ValueError("payload has digits beyond the model's length")
    return digits[:length]


CODEC = Codec(name="qsgd", num_arrays=1, keys=("levels", "coding"), read=_read)
