"""QSGD: unbiased, of the variance that its bound says, as small as it says, and nothing forged is read.

Statistical tests have fixed seeds and a false-alarm rate of 1e-6 for each comparison, and must reject a 5 % wrong scale.
"""

import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from flower_dp.core.compression import Payload, decode, qsgd, qsgd_bytes, qsgd_norm_ratio, qsgd_variance

LEVELS = [1, 2, 3, 10, 127, 128, 1000, 32767]


def gaussian(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size)


def quantized(vector: Any, levels: int, seed: int) -> np.ndarray:
    return decode(qsgd(vector, levels, np.random.default_rng(seed)), len(vector)).astype(np.float64)


def rounded_up(vector: np.ndarray, levels: int) -> np.ndarray:
    """The exact probability that each coordinate is rounded away from zero: the second source of all variances here."""
    scaled = np.abs(vector) * levels / np.linalg.norm(vector)
    return scaled - np.floor(scaled)


# Expectation and variance


def unbiased(draws: np.ndarray, vector: np.ndarray, levels: int) -> bool:
    """Whether the projection of the draws' mean on the vector is its norm, by a normal approximation."""
    part = rounded_up(vector, levels)
    unit = vector / np.linalg.norm(vector)
    std = np.linalg.norm(vector) / levels * math.sqrt(np.sum(unit**2 * part * (1 - part)) / len(draws))
    return bool(abs(np.mean(draws @ unit) - np.linalg.norm(vector)) < stats.norm.isf(5e-7) * std)


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "library"), [(1, np.asarray), (2, torch.from_numpy)])
def test_the_expectation_is_the_vector(levels, library):
    vector = gaussian(400)
    # At one level the standard deviation of the mean is 0.6 % of the norm: 5 % are missed with probability 1e-3 at most.
    draws = np.stack([quantized(library(vector), levels, seed) for seed in range(2200)])
    assert unbiased(draws, vector, levels)
    assert not unbiased(draws * 1.05, vector, levels)
    assert not unbiased(draws / 1.05, vector, levels)
    # Every coordinate by itself: the largest of 400 deviations, in standard deviations of its own.
    part = rounded_up(vector, levels)
    std = np.linalg.norm(vector) / levels * np.sqrt(part * (1 - part) / len(draws))
    assert np.max(np.abs(draws.mean(0) - vector) / std) < stats.norm.isf(5e-7 / 400)


@settings(max_examples=50)
@given(hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(-1e3, 1e3, allow_subnormal=False)), st.integers(1, 200))
def test_the_variance_bound_holds_for_every_vector(vector, levels):
    norm = np.linalg.norm(vector)
    assume(norm > 1e-3)
    part = rounded_up(vector, levels)
    assert np.sum(part * (1 - part)) / levels**2 <= qsgd_variance(vector.size, levels) * (1 + 1e-9)
    assert qsgd_variance(vector.size, levels) == min(vector.size / levels**2, math.sqrt(vector.size) / levels)


# Round trips


@settings(max_examples=60)
@given(
    hnp.arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e6, 1e6)),
    st.sampled_from(LEVELS),
    st.sampled_from([np.float32, np.float64]),
    st.booleans(),
)
def test_every_value_is_one_of_the_two_levels_around_it(values, levels, dtype, tensor):
    vector = values.astype(dtype)
    payload = qsgd(torch.from_numpy(vector) if tensor else vector, levels, np.random.default_rng(1))
    decoded = decode(payload, vector.size).astype(np.float64)
    scale = float(np.frombuffer(payload.arrays[0][:4].tobytes(), "<f4")[0])
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    assert norm * (1 - 1e-15) <= scale <= max(norm * (1 + 2.0**-22), 2.0**-148)
    assert payload.num_bytes <= qsgd_bytes(vector.size, levels)
    assert np.all(np.abs(decoded - vector) <= scale / levels * (1 + 1e-6))
    if scale:
        steps = decoded * levels / scale
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-6 * levels)
    assert np.all(decoded[vector == 0] == 0)
    assert np.all(decoded * vector >= 0)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("length", [1, 39, 40, 41, 3000])
def test_packed_and_squeezed_payloads_say_the_same(levels, length):
    """Dense levels are packed, sparse ones squeezed: both are read back as they were drawn."""
    dense = np.random.default_rng(0).choice([-1.0, 1.0], length)
    for vector in (dense, gaussian(length)):
        payload = qsgd(vector, levels, np.random.default_rng(2))
        other = decode(payload, length)
        scale = np.frombuffer(payload.arrays[0][:4].tobytes(), "<f4")[0]
        drawn = np.random.default_rng(2).random(length)
        level = np.minimum(np.floor(np.abs(vector) * (levels / float(scale)) + drawn), levels)
        expected = float(scale) * np.sign(vector) * level / levels
        np.testing.assert_allclose(other, expected, rtol=1e-6)
        assert payload.num_bytes <= qsgd_bytes(length, levels)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-30, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("levels", [1, 10, 32767])
def test_huge_and_small_norms(size, levels):
    assert decode(qsgd(np.zeros(0), levels, np.random.default_rng(0)), 0).size == 0
    vector = np.zeros(5)
    vector[2] = -size
    decoded = decode(qsgd(vector, levels, np.random.default_rng(0)), 5)
    assert np.isfinite(decoded).all()
    assert decoded[2] == pytest.approx(-size, rel=1e-6, abs=1e-45)
    assert not decoded[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf, 1e39])
def test_what_has_no_norm_is_refused(entry):
    with pytest.raises(ValueError, match="NaN or infinite entries, or a norm beyond float32"):
        qsgd(np.array([1.0, entry]), 1, np.random.default_rng(0))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "levels"), [(7850, 1), (50, 10), (4, 3)])
def test_no_draw_is_longer_than_it_can_be(length, levels):
    for shape in (gaussian(length), np.ones(length), np.eye(1, length)[0]):
        norms = [np.linalg.norm(quantized(shape, levels, seed)) / np.linalg.norm(shape) for seed in range(50)]
        assert max(norms) <= qsgd_norm_ratio(length, levels)
    # And it says something: a Gaussian vector's typical draw is at least a third as long.
    vector = gaussian(length)
    typical = np.mean([np.linalg.norm(quantized(vector, levels, seed)) for seed in range(20)]) / np.linalg.norm(vector)
    assert typical > qsgd_norm_ratio(length, levels) / 6


# Forged payloads

LENGTH = 20


def coded(array: np.ndarray, **header: Any) -> Payload:
    return Payload(arrays=(array,), header={"encoding": "qsgd", "length": LENGTH, "levels": 1, "coding": "packed"} | header)


def forged(body: bytes, *, scale: float = 1.0, **header: Any) -> Payload:
    return coded(np.frombuffer(np.asarray([scale], "<f4").tobytes() + body, np.uint8), **header)


PACKED = bytes(4)  # five digits a byte, all of level -1
ZEROS = zlib.compress(bytes([1] * LENGTH))


def test_honest_ones_are_read():
    assert decode(forged(PACKED), LENGTH).tolist() == [-1.0] * LENGTH
    assert decode(forged(ZEROS, coding="deflate"), LENGTH).tolist() == [0.0] * LENGTH
    assert decode(forged(bytes(qsgd_bytes(LENGTH, 1000) - 4), levels=1000), LENGTH).tolist() == [-1.0] * LENGTH


@pytest.mark.parametrize(
    "payload",
    [
        *(forged(body) for body in (PACKED[:-1], PACKED + b"\0", b"", ZEROS)),
        *(forged(body) for body in (bytes([243, 0, 0, 0]), bytes([255] * 4))),  # words beyond their digits
        *(forged(PACKED, scale=scale) for scale in (math.nan, math.inf, -1.0)),
        *(forged(PACKED, levels=levels) for levels in (0, -1, 10, 10**400, 1.0, "1", True, None)),
        *(forged(PACKED, coding=coding) for coding in ("gzip", ["packed"], "deflate", None)),
        *(forged(body, coding="deflate") for body in (ZEROS[:-5], ZEROS + b"\0")),
        *(forged(zlib.compress(bytes(length)), coding="deflate") for length in (LENGTH - 1, LENGTH + 1, 10**7)),
        forged(zlib.compress(bytes([3] * LENGTH)), coding="deflate"),  # digits beyond the levels
        forged(PACKED, extra=1),
        *(coded(np.zeros(shape, dtype)) for shape, dtype in ((8, np.int8), ((8, 1), np.uint8), (2, np.uint8))),
        Payload(arrays=(np.zeros(8, np.uint8),), header={"encoding": "qsgd", "length": LENGTH}),
    ],
)
def test_forged_payloads_are_refused(payload):
    with pytest.raises(ValueError, match="payload"):
        decode(payload, LENGTH)


@settings(max_examples=100)
@given(body=st.binary(max_size=30), levels=st.integers(-1, 40), coding=st.sampled_from(["packed", "deflate", "no"]))
def test_whatever_comes_is_refused_or_finite_and_no_longer_than_its_scale(body, levels, coding):
    payload = coded(np.frombuffer(body, np.uint8), levels=levels, coding=coding)
    try:
        vector = decode(payload, LENGTH)
    except ValueError:
        return
    assert vector.shape == (LENGTH,)
    assert np.isfinite(vector).all()
