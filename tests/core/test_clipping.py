"""Clipping: the norm bound that every sensitivity rests on, checked in exact arithmetic."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_dp.core.clipping import clip_l1, clip_l2, l1_norms, l2_norms

CLIPS = {"l2": clip_l2, "l1": clip_l1}


LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])


def within(norm: str, vector: Any, clip_norm: float) -> bool:
    """Whether the norm is at most the bound, in exact numbers."""
    exact = [abs(Fraction(float(x))) for x in np.asarray(vector).ravel()]
    return sum(exact) <= Fraction(clip_norm) if norm == "l1" else sum(x * x for x in exact) <= Fraction(clip_norm) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("norm", CLIPS)
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 70),
    scale=st.floats(-30, 30),
    clip=st.floats(-30, 30),
    dtype=st.sampled_from(["float16", "float32", "float64", "bfloat16"]),
    library=st.sampled_from(["numpy", "torch"]),
    rows=st.integers(0, 3),
)
def test_norm_after_the_cast_is_at_most_the_bound(
    norm: str, seed: int, size: int, scale: float, clip: float, dtype: str, library: str, rows: int
) -> None:
    clip_norm = 10.0**clip
    largest = {"float16": 4.8, "float64": 30.0}.get(dtype, 30.0)
    shape = (size,) if rows == 0 else (rows, size)
    values = np.clip(np.random.default_rng(seed).standard_normal(shape), -5, 5) * 10.0 ** min(scale, largest - 1)
    vector: Any
    if library == "torch" or dtype == "bfloat16":
        vector = torch.from_numpy(values).to(getattr(torch, dtype))
    else:
        vector = values.astype(dtype)
    clipped = CLIPS[norm](vector, clip_norm)
    assert str(clipped.dtype).endswith("float32")
    assert tuple(clipped.shape) == shape
    for row in clipped.reshape(max(rows, 1), size) if size else []:
        assert within(norm, row, clip_norm)


@pytest.mark.parametrize("norm", CLIPS)
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), ulps=st.integers(-40, 40), library=st.sampled_from([np.asarray, torch.from_numpy]))
def test_vectors_within_some_roundings_of_the_bound_do_not_pass_it(norm: str, seed: int, ulps: int, library: Any) -> None:
    vector = np.random.default_rng(seed).standard_normal(33, dtype=np.float32)
    exact = float(np.linalg.norm(vector.astype(np.float64), 2 if norm == "l2" else 1))
    clip_norm = exact * (1 + ulps * 2.0**-26)
    assert within(norm, CLIPS[norm](library(vector), clip_norm), clip_norm)


@pytest.mark.parametrize("size", [10, 1000, 200_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_vectors_keep_the_bound_and_almost_reach_it(size: int, dtype: str) -> None:
    vector = np.random.default_rng(size).standard_normal(size).astype(dtype)
    for clip, order in ((clip_l2, 2), (clip_l1, 1)):
        assert 0.3 * (1 - 1e-6) < np.linalg.norm(clip(vector, 0.3).astype(np.float64), order) <= 0.3


@pytest.mark.parametrize("size", [2**15 - 1, 2**15, 2**15 + 1, 2**16 + 5])
@LIBRARIES
def test_norms_of_long_rows_of_ordinary_size_count_every_entry_once(size: int, library: Any) -> None:
    """Rows of zeros, as above, take another way."""
    for rows in (np.ones(size, np.float32), np.ones((2, size), np.float32)):
        assert np.asarray(l2_norms(library(rows))) == pytest.approx(math.sqrt(size), rel=1e-14)


@pytest.mark.parametrize("norm", CLIPS)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(-30, 30), slack=st.floats(1.0001, 1e6))
def test_vectors_below_the_bound_are_unchanged_bit_for_bit(norm: str, seed: int, scale: float, slack: float) -> None:
    vector = (np.random.default_rng(seed).standard_normal(21) * 10.0**scale).astype(np.float32)
    bound = float(np.linalg.norm(vector.astype(np.float64), 2 if norm == "l2" else 1)) * slack
    for library in (np.asarray, torch.from_numpy):
        clipped = np.asarray(CLIPS[norm](library(vector.copy()), bound))
        assert clipped.tobytes() == vector.tobytes()


@LIBRARIES
def test_rows_are_clipped_one_by_one_and_short_ones_are_unchanged_bit_for_bit(library: Any) -> None:
    sizes = np.array([[1e-3], [1e3], [0.01], [1.0]], np.float32)
    rows = np.random.default_rng(3).standard_normal((4, 9), dtype=np.float32) * sizes
    clipped = np.asarray(clip_l2(library(rows), 0.5))
    assert clipped[0].tobytes() == rows[0].tobytes()
    assert clipped[2].tobytes() == rows[2].tobytes()
    for row, alone in zip(clipped, rows, strict=True):
        np.testing.assert_array_equal(row, np.asarray(clip_l2(library(alone), 0.5)))
        assert within("l2", row, 0.5)


@pytest.mark.parametrize("norm", CLIPS)
@LIBRARIES
@pytest.mark.parametrize("other", [0.0, 1e-44, 1e35])
def test_no_bit_of_a_row_depends_on_another_row(norm: str, library: Any, other: float) -> None:
    """One that is zero, or so long that float32 can't hold its factor, changes not even the last bits: a lattice magnifies them."""
    rows = np.random.default_rng(1).normal(scale=3, size=(64, 999)).astype(np.float32)
    rows[5] = 1.0
    expected = np.asarray(CLIPS[norm](library(rows), 1.0))
    norms = np.asarray(l2_norms(library(rows)))
    rows[5] = other
    kept = np.arange(len(rows)) != 5
    np.testing.assert_array_equal(np.asarray(CLIPS[norm](library(rows), 1.0))[kept], expected[kept])
    np.testing.assert_array_equal(np.asarray(l2_norms(library(rows)))[kept], norms[kept])


@pytest.mark.parametrize("norm", CLIPS)
@LIBRARIES
def test_what_is_given_is_not_changed_and_not_shared(norm: str, library: Any) -> None:
    for size in (0.1, 10.0):
        vector = library(np.full(4, size, np.float32))
        clipped = CLIPS[norm](vector, 1.0)
        clipped += 1
        assert np.asarray(vector).tolist() == [np.float32(size)] * 4


@pytest.mark.parametrize("norm", CLIPS)
@LIBRARIES
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_and_infinity_are_refused(norm: str, library: Any, dtype: str) -> None:
    for shape in ((3,), (2, 3)):
        for bad in (np.nan, np.inf, -np.inf):
            vector = np.ones(shape, dtype)
            vector[..., 1] = bad
            with pytest.raises(ValueError, match="NaN or infinite"):
                CLIPS[norm](library(vector), 1.0)


@LIBRARIES
def test_float16_norms_do_not_overflow(library: Any) -> None:
    vector = np.full(100, 60_000, np.float16)  # its norm is ten times the largest float16
    clipped = np.asarray(clip_l2(library(vector), 1.0))
    np.testing.assert_allclose(clipped, 0.1, rtol=1e-6)
    assert within("l2", clipped, 1.0)
    assert float(l2_norms(library(vector))) == pytest.approx(10 * float(np.float16(60_000)), rel=1e-12)


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e-30, 1e30, 1e170, 1e300])
def test_norms_neither_overflow_nor_underflow(size: float) -> None:
    assert float(l2_norms(np.array([3.0, 4.0]) * size)) == pytest.approx(5 * size, rel=1e-12)
    assert float(l1_norms(np.array([3.0, -4.0]) * size)) == pytest.approx(7 * size, rel=1e-12)
    assert l2_norms(np.array([[3.0, 4.0], [0.0, 0.0]]) * size).tolist() == [pytest.approx(5 * size, rel=1e-12), 0]


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e30, 1e250])
def test_hugely_long_vectors_are_shrunk_to_the_bound(size: float) -> None:
    bound = size * 1e-28 if size > 1 else 1e-30
    clipped = clip_l2(np.array([3.0, 4.0]) * size, bound)
    assert within("l2", clipped, bound)
    assert np.isfinite(clipped).all()


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan"), float("inf"), "1", None, True])
@pytest.mark.parametrize("norm", CLIPS)
def test_nonsense_bounds_are_refused_by_name(norm: str, clip_norm: Any) -> None:
    with pytest.raises(ValueError, match=r"clip_norm=.*finite number > 0"):
        CLIPS[norm](np.ones(2, np.float32), clip_norm)
