"""Compression: round trips, true sizes, and payloads that nobody honest made."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_dp.core.compression import Payload, decode, dense, rand_k, random_mask, smallest, top_k

LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])


def _vector(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("size", [0, 1, 17, 1000])
@LIBRARIES
def test_dense_round_trip_is_exact_and_four_bytes_a_coordinate(size: int, library: Any) -> None:
    vector = _vector(size)
    payload = dense(library(vector))
    assert payload.num_bytes == 4 * size
    np.testing.assert_array_equal(decode(payload, size), vector)


# Numbers with more bits than float32 has, as exact sums on a lattice may be, and numbers beyond its range.
WIDE = np.array([0.0, 0.0, 0.0, -1.5, 1 + 2.0**-40, 2.0**-149, 2.0**-1074, 3e38, -1e300, 2.0**53 - 1])


@settings(max_examples=60)
@given(
    hnp.arrays(st.sampled_from([np.float32, np.float64]), st.integers(0, 200), elements=st.integers(0, 9)),
    st.sampled_from([np.asarray, torch.from_numpy]),
)
def test_what_is_sent_is_without_loss_and_four_bytes_a_coordinate_wherever_float32_is_exact(kinds: Any, library: Any) -> None:
    with np.errstate(over="ignore"):
        vector = WIDE.astype(kinds.dtype)[kinds.astype(int)]
        bytes_each = 4 if (vector.astype(np.float32).astype(np.float64) == vector).all() else 8
    payload, small = dense(library(vector.copy())), smallest(library(vector.copy()))
    assert small.num_bytes <= payload.num_bytes == bytes_each * vector.size
    for one in (payload, small):
        np.testing.assert_array_equal(decode(one, vector.size), vector)


def test_nan_and_infinity_are_not_made_to_look_finite() -> None:
    for value in (math.nan, math.inf, -math.inf):
        decoded = decode(smallest(np.array([0.0, value, 1.0, 0, 0, 0, 0])), 7)
        np.testing.assert_array_equal(decoded, [0.0, value, 1.0, 0, 0, 0, 0])


@pytest.mark.parametrize("ratio", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("size", [1, 9, 1000, 70_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@LIBRARIES
def test_top_k_keeps_the_largest_and_is_as_small_as_it_says(ratio: float, size: int, dtype: Any, library: Any) -> None:
    vector = np.random.default_rng(1).standard_normal(size, dtype=dtype)
    payload = top_k(library(vector), ratio)
    decoded = decode(payload, size)
    kept = max(1, math.ceil(ratio * size))
    assert decoded.dtype == dtype
    # The second source: a full sort.
    threshold = np.sort(np.abs(vector))[size - kept]
    np.testing.assert_array_equal(decoded, np.where(np.abs(vector) >= threshold, vector, 0))
    index_bytes = min(math.ceil(size / 8), kept * (2 if size <= 65_536 else 4))
    assert payload.num_bytes == vector.itemsize * kept + index_bytes == sum(len(array.tobytes()) for array in payload.arrays)


@LIBRARIES
def test_differences_that_float32_does_not_see_decide_too(library: Any) -> None:
    close = 1 + np.arange(20) * 2.0**-40
    assert np.flatnonzero(decode(top_k(library(close), 0.25), 20)).tolist() == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537])
def test_the_last_index_survives_where_the_index_type_changes(size: int) -> None:
    vector = np.zeros(size, np.float32)
    vector[[0, size - 1]] = [1.0, -2.0]
    payload = top_k(vector, 2 / size)
    assert payload.arrays[0].dtype == (np.uint16 if size <= 65_536 else np.uint32)
    np.testing.assert_array_equal(decode(payload, size), vector)


@LIBRARIES
def test_rand_k_sends_the_masks_values_and_nothing_else(library: Any) -> None:
    vector = _vector(1000, 2)
    mask = random_mask(1000, 0.05, np.random.default_rng(3))
    assert np.array_equal(mask, np.unique(mask))
    assert mask.size == 50
    payload = rand_k(library(vector), mask)
    assert payload.num_bytes == 4 * 50
    decoded = decode(payload, 1000, mask=mask)
    np.testing.assert_array_equal(decoded[mask], vector[mask])
    assert np.count_nonzero(decoded) == 50


def test_random_masks_are_uniform() -> None:
    rng = np.random.default_rng(4)
    counts = np.zeros(20)
    for _ in range(5000):
        counts[random_mask(20, 0.25, rng)] += 1
    # Binomial(5000, 0.25) has std 30.6; 5.5 std for 20 counts together: false alarm 1e-6.
    assert np.abs(counts - 1250).max() < 5.5 * 30.7


# What no honest sender makes. LENGTH 20: 3 bytes of index bits, or uint16 indices.
LENGTH = 20
F = np.float32


def _sparse(indices: Any, values: Any) -> Payload:
    return Payload(arrays=(indices, values), header={"encoding": "top-k", "length": LENGTH})


def _dense(*arrays: Any, **header: Any) -> Payload:
    return Payload(arrays=arrays, header={"encoding": "dense", "length": LENGTH} | header)


def _bits(*indices: int, length: int = 24) -> np.ndarray:
    bits = np.zeros(length, bool)
    bits[list(indices)] = True
    return np.packbits(bits)


def test_the_forgeries_below_are_one_step_from_a_valid_payload() -> None:
    for payload in (
        _sparse(np.array([3, 7], np.uint16), np.ones(2, F)),
        _sparse(_bits(3, 7), np.ones(2, F)),
        _sparse(_bits(3, 7), np.ones(2, np.float64)),
    ):
        assert np.flatnonzero(decode(payload, LENGTH)).tolist() == [3, 7]
    for dtype in (F, np.float64):
        assert decode(_dense(np.ones(LENGTH, dtype)), LENGTH).dtype == dtype


INDICES = [([7, 3], "u2"), ([3, 3], "u2"), ([3, 20], "u2"), ([3, 65_535], "u2"), ([-1, 3], "i2"), ([3, 7], "u4"), ([3, 7], ">u2")]


@pytest.mark.parametrize(
    "payload",
    [
        *(_sparse(np.array(indices, dtype), np.ones(2, F)) for indices, dtype in [*INDICES, ([3.0, 7.0], "f8")]),
        *(_sparse(np.arange(3, dtype=np.uint16), np.ones(shape, F)) for shape in (2, 4, (1, 3))),
        *(_sparse(np.zeros(shape, np.uint16), np.ones(shape, F)) for shape in (0, (), (1, 1))),
        _sparse(np.arange(21, dtype=np.uint16), np.ones(21, F)),
        *(_sparse(_bits(*bits), np.ones(2, F)) for bits in ((3, 20), (3, 7, 23), (3,), (3, 7, 8))),
        *(_sparse(bits, np.ones(2, F)) for bits in (_bits(3, 7)[:2], _bits(3, 7, length=32))),
        _sparse(_bits(), np.ones(0, F)),
        *(_sparse(_bits(3, 7), np.ones(2, dtype)) for dtype in ("f2", ">f4", ">f8", "g", "c8", "?", "i4")),
        *(_dense(np.ones(shape, dtype)) for shape in (19, 21, (20, 1)) for dtype in ("f4", "f8")),
        *(_dense(np.ones(20, dtype)) for dtype in ("f2", "i8", ">f8")),
        *(
            _dense(*[np.ones(20, F)] * count, encoding=one)
            for one, count in (("dense", 0), ("dense", 2), ("top-k", 0), ("top-k", 1))
        ),
        _dense(np.ones(20, F), encoding="rand-k"),
        *(_dense(np.ones(LENGTH, F), **words) for words in ({"scale": 1.5}, {"mask": 3})),
        Payload(arrays=(np.ones(LENGTH, F),), header={"encoding": "dense", "length": LENGTH, 3: 1}),  # type: ignore[dict-item]
    ],
)
def test_malformed_payloads_are_refused(payload: Payload) -> None:
    with pytest.raises(ValueError, match="payload"):
        decode(payload, LENGTH)


ABSURD: list[Any] = [None, [], ["dense"], {}, {"dense": 1}, 0, 1.5, True, "", "DENSE", "QSGD", "dense\0", ("dense",), math.nan]


@pytest.mark.parametrize("value", [*ABSURD, 19, 21, -20, "20", 1e300, 10**400])
def test_absurd_encodings_and_lengths_are_refused(value: Any) -> None:
    for word in ("encoding", "length"):
        with pytest.raises(ValueError, match=f"payload {word}"):
            decode(_dense(np.ones(LENGTH, F), **{word: value}), LENGTH)


_NEAR_INDICES = st.lists(st.integers(0, 21), max_size=6).map(lambda values: np.array(sorted(values), np.uint16))
_NEAR_BITS = hnp.arrays(np.uint8, 3, elements=st.sampled_from([0, 1, 64, 255]))


@settings(max_examples=60)
@given(indices=st.one_of(_NEAR_INDICES, _NEAR_BITS), values=hnp.arrays(np.float32, st.integers(0, 12), elements=st.just(F(1))))
def test_decode_accepts_only_what_encoding_again_gives_back(indices: np.ndarray, values: np.ndarray) -> None:
    try:
        vector = decode(_sparse(indices, values), LENGTH)
    except ValueError:
        return
    assert np.count_nonzero(vector) == values.size
    chosen = np.unpackbits(indices, count=LENGTH) if indices.dtype == np.uint8 else np.isin(np.arange(LENGTH), indices)
    np.testing.assert_array_equal(vector != 0, chosen.astype(bool))


@pytest.mark.parametrize("answer", [None, 0, 1.5, True, "x", -1, 10**400])
def test_a_mask_must_be_the_one_that_both_sides_know(answer: Any) -> None:
    mask = np.arange(4)
    good = rand_k(_vector(LENGTH), mask)
    decode(good, LENGTH, mask=mask)
    for payload in (Payload(arrays=good.arrays, header={**good.header, "mask": answer}), rand_k(_vector(LENGTH), mask + 1)):
        with pytest.raises(ValueError, match="payload mask"):
            decode(payload, LENGTH, mask=mask)
    with pytest.raises(ValueError, match="payload values"):
        decode(Payload(arrays=(np.ones(3, F),), header=good.header), LENGTH, mask=mask)
