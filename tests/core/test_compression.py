"""Compression: round trips, true sizes, and payloads that nobody honest made."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_dp.core.compression import (
    Payload,
    decode,
    dense,
    rand_k,
    random_mask,
    smallest,
    top_k,
)


def _vector(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("size", [0, 1, 17, 1000])
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
def test_dense_round_trip_is_exact_and_four_bytes_a_coordinate(size: int, library: Any) -> None:
    vector = _vector(size)
    payload = dense(library(vector))
    assert payload.num_bytes == 4 * size
    np.testing.assert_array_equal(decode(payload, size), vector)


# Numbers with more bits than float32 has, as exact sums on a lattice may be, and numbers beyond its range.
WIDE = st.sampled_from([0.0, 0.0, 0.0, -1.5, 1 + 2.0**-40, 2.0**-149, 2.0**-1074, 3e38, -1e300, 2.0**53 - 1])


@settings(max_examples=40)
@given(hnp.arrays(np.float64, st.integers(0, 200), elements=WIDE), st.sampled_from([np.asarray, torch.from_numpy]))
def test_float64_is_without_loss_and_four_bytes_a_coordinate_wherever_float32_is_exact(vector: np.ndarray, library: Any) -> None:
    with np.errstate(over="ignore"):
        bytes_each = 4 if (vector.astype(np.float32).astype(np.float64) == vector).all() else 8
    payload = dense(library(vector.copy()))
    assert payload.num_bytes == bytes_each * vector.size
    np.testing.assert_array_equal(decode(payload, vector.size), vector)
    small = smallest(library(vector.copy()))
    assert small.num_bytes <= payload.num_bytes
    np.testing.assert_array_equal(decode(small, vector.size), vector)


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
def test_top_k_of_float64_keeps_every_bit_of_the_largest(library: Any) -> None:
    vector = np.random.default_rng(5).standard_normal(1000)
    payload = top_k(library(vector), 0.1)
    decoded = decode(payload, 1000)
    assert decoded.dtype == np.float64
    assert payload.num_bytes == 8 * 100 + 125
    np.testing.assert_array_equal(decoded, np.where(np.abs(vector) >= np.sort(np.abs(vector))[900], vector, 0))
    # Differences that float32 does not see decide too.
    close = 1 + np.arange(20) * 2.0**-40
    assert np.flatnonzero(decode(top_k(library(close), 0.25), 20)).tolist() == [15, 16, 17, 18, 19]


def test_nan_and_infinity_are_not_made_to_look_finite() -> None:
    for value in (math.nan, math.inf, -math.inf):
        decoded = decode(smallest(np.array([0.0, value, 1.0, 0, 0, 0, 0])), 7)
        np.testing.assert_array_equal(decoded, [0.0, value, 1.0, 0, 0, 0, 0])


@pytest.mark.parametrize("ratio", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("size", [1, 9, 1000, 70_000])
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
def test_top_k_keeps_the_largest_and_is_as_small_as_it_says(ratio: float, size: int, library: Any) -> None:
    vector = _vector(size, 1)
    payload = top_k(library(vector), ratio)
    decoded = decode(payload, size)
    kept = max(1, math.ceil(ratio * size))
    assert decoded.dtype == np.float32
    assert np.count_nonzero(decoded) == kept
    np.testing.assert_array_equal(decoded[decoded != 0], vector[decoded != 0])
    # The second source: a full sort.
    threshold = np.sort(np.abs(vector))[size - kept]
    np.testing.assert_array_equal(decoded, np.where(np.abs(vector) >= threshold, vector, 0))
    index_bytes = min(math.ceil(size / 8), kept * (2 if size <= 65_536 else 4))
    assert payload.num_bytes == 4 * kept + index_bytes == sum(len(array.tobytes()) for array in payload.arrays)


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537])
def test_the_last_index_survives_where_the_index_type_changes(size: int) -> None:
    vector = np.zeros(size, np.float32)
    vector[[0, size - 1]] = [1.0, -2.0]
    payload = top_k(vector, 2 / size)
    assert payload.arrays[0].dtype == (np.uint16 if size <= 65_536 else np.uint32)
    np.testing.assert_array_equal(decode(payload, size), vector)


@settings(max_examples=50)
@given(hnp.arrays(np.float32, st.integers(0, 200), elements=st.sampled_from([0.0, 0.0, 0.0, -1.5, 2.0, 1e-42, 3e38])))
def test_smallest_is_without_loss_and_never_larger_than_dense(vector: np.ndarray) -> None:
    payload = smallest(vector)
    np.testing.assert_array_equal(decode(payload, vector.size), vector)
    assert payload.num_bytes <= vector.nbytes


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
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


def _bits(*indices: int, length: int = 24) -> np.ndarray:
    bits = np.zeros(length, bool)
    bits[list(indices)] = True
    return np.packbits(bits)


def test_the_forgeries_below_are_one_step_from_a_valid_payload() -> None:
    listed = _sparse(np.array([3, 7], np.uint16), np.ones(2, F))
    packed = _sparse(_bits(3, 7), np.ones(2, F))
    wide = _sparse(_bits(3, 7), np.ones(2, np.float64))
    for payload in (listed, packed, wide):
        assert np.flatnonzero(decode(payload, LENGTH)).tolist() == [3, 7]
    for values in (np.ones(LENGTH, F), np.ones(LENGTH)):
        dense_one = Payload(arrays=(values,), header={"encoding": "dense", "length": LENGTH})
        assert decode(dense_one, LENGTH).dtype == values.dtype


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(_sparse(np.array([7, 3], np.uint16), np.ones(2, F)), id="unsorted"),
        pytest.param(_sparse(np.array([3, 3], np.uint16), np.ones(2, F)), id="duplicate"),
        pytest.param(_sparse(np.array([3, 20], np.uint16), np.ones(2, F)), id="out of range"),
        pytest.param(_sparse(np.array([3, 65_535], np.uint16), np.ones(2, F)), id="far out of range"),
        pytest.param(_sparse(np.array([-1, 3], np.int16), np.ones(2, F)), id="signed indices"),
        pytest.param(_sparse(np.array([3, 7], np.uint32), np.ones(2, F)), id="wide indices"),
        pytest.param(_sparse(np.array([3, 7], ">u2"), np.ones(2, F)), id="big-endian indices"),
        pytest.param(_sparse(np.array([3.0, 7.0]), np.ones(2, F)), id="float indices"),
        pytest.param(_sparse(np.array([3, 7], np.uint16), np.ones(3, F)), id="more values than indices"),
        pytest.param(_sparse(np.array([3, 7], np.uint16), np.ones(1, F)), id="fewer values than indices"),
        pytest.param(_sparse(np.array([], np.uint16), np.ones(0, F)), id="nothing"),
        pytest.param(_sparse(np.array([[3, 7]], np.uint16), np.ones((1, 2), F)), id="two dimensions"),
        pytest.param(_sparse(np.array(3, np.uint16), np.ones((), F)), id="no dimension"),
        pytest.param(_sparse(np.arange(21, dtype=np.uint16), np.ones(21, F)), id="more than there are"),
        pytest.param(_sparse(_bits(3, 20), np.ones(2, F)), id="bits beyond the length"),
        pytest.param(_sparse(_bits(3, 7, 23), np.ones(2, F)), id="one more bit beyond the length"),
        pytest.param(_sparse(_bits(3, 7), np.ones(3, F)), id="more values than bits"),
        pytest.param(_sparse(_bits(3), np.ones(2, F)), id="fewer bits than values"),
        pytest.param(_sparse(_bits(3, 7)[:2], np.ones(2, F)), id="too few bytes of bits"),
        pytest.param(_sparse(_bits(3, 7, length=32), np.ones(2, F)), id="too many bytes of bits"),
        pytest.param(_sparse(_bits(), np.ones(0, F)), id="no bit"),
        pytest.param(_sparse(_bits(3, 7), np.ones(2, np.float16)), id="float16 values"),
        pytest.param(_sparse(_bits(3, 7), np.ones(2, ">f8")), id="big-endian float64 values"),
        pytest.param(_sparse(_bits(3, 7), np.ones(2, np.longdouble)), id="wider values"),
        pytest.param(_sparse(_bits(3, 7), np.ones(2, np.complex64)), id="complex values"),
        pytest.param(_sparse(_bits(3, 7), np.ones(2, bool)), id="true or false"),
        pytest.param(_sparse(np.array([3.0, 7.0]), np.ones(2)), id="float indices, float64 values"),
        pytest.param(_sparse(_bits(3, 7), np.ones(3)), id="more float64 values than bits"),
        pytest.param(_sparse(_bits(3, 7), np.ones(2, ">f4")), id="big-endian values"),
        pytest.param(_sparse(_bits(3, 7), np.ones(2, np.int32)), id="integer values"),
        pytest.param(Payload(arrays=(np.ones(19, F),), header={"encoding": "dense", "length": LENGTH}), id="short"),
        pytest.param(Payload(arrays=(np.ones(21, F),), header={"encoding": "dense", "length": LENGTH}), id="long"),
        pytest.param(Payload(arrays=(np.ones((20, 1), F),), header={"encoding": "dense", "length": LENGTH}), id="column"),
        pytest.param(
            Payload(arrays=(np.ones(20, np.float16),), header={"encoding": "dense", "length": LENGTH}), id="dense float16"
        ),
        pytest.param(
            Payload(arrays=(np.ones(20, np.int64),), header={"encoding": "dense", "length": LENGTH}), id="dense integers"
        ),
        pytest.param(
            Payload(arrays=(np.ones(20, ">f8"),), header={"encoding": "dense", "length": LENGTH}), id="dense big-endian"
        ),
        pytest.param(Payload(arrays=(np.ones(19),), header={"encoding": "dense", "length": LENGTH}), id="short float64"),
        pytest.param(Payload(arrays=(np.ones((20, 1)),), header={"encoding": "dense", "length": LENGTH}), id="float64 column"),
        pytest.param(Payload(arrays=(np.ones(20, F),), header={"encoding": "top-k", "length": LENGTH}), id="one array"),
        pytest.param(Payload(arrays=(np.ones(20, F),) * 2, header={"encoding": "dense", "length": LENGTH}), id="two arrays"),
        pytest.param(Payload(arrays=(), header={"encoding": "dense", "length": LENGTH}), id="no array"),
        pytest.param(Payload(arrays=(), header={"encoding": "top-k", "length": LENGTH}), id="no arrays"),
        pytest.param(Payload(arrays=(np.ones(20, F),), header={"encoding": "rand-k", "length": LENGTH}), id="no mask"),
    ],
)
def test_malformed_payloads_are_refused(payload: Payload) -> None:
    with pytest.raises(ValueError, match="payload"):
        decode(payload, LENGTH)


ABSURD: list[Any] = [None, [], ["dense"], {}, {"dense": 1}, 0, 1.5, True, "", "DENSE", "QSGD", "dense\0", ("dense",), math.nan]


@pytest.mark.parametrize("encoding", ABSURD)
def test_absurd_encodings_are_refused(encoding: Any) -> None:
    with pytest.raises(ValueError, match="payload encoding"):
        decode(Payload(arrays=(np.ones(LENGTH, F),), header={"encoding": encoding, "length": LENGTH}), LENGTH)


@pytest.mark.parametrize("length", [*ABSURD, 19, 21, -20, "20", 1e300, 10**400])
def test_absurd_lengths_are_refused(length: Any) -> None:
    with pytest.raises(ValueError, match="payload length"):
        decode(Payload(arrays=(np.ones(LENGTH, F),), header={"encoding": "dense", "length": length}), LENGTH)


def test_rand_k_values_must_fit_the_mask() -> None:
    payload = Payload(arrays=(np.ones(3, F),), header={"encoding": "rand-k", "length": LENGTH})
    with pytest.raises(ValueError, match="payload values"):
        decode(payload, LENGTH, mask=np.arange(4))


_HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "encoding": st.one_of(st.sampled_from(["dense", "top-k", "rand-k", "qsgd"]), st.sampled_from(ABSURD)),
        "length": st.one_of(st.just(LENGTH), st.integers(), st.sampled_from(ABSURD)),
    },
)
_ANY_ARRAY = hnp.arrays(
    st.sampled_from([np.float32, np.uint16, np.uint8, np.uint32, np.float64, np.int64, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=24),
)
_NEAR_INDICES = st.lists(st.integers(0, 21), max_size=6).map(lambda values: np.array(sorted(values), np.uint16))
_NEAR_BITS = hnp.arrays(np.uint8, 3, elements=st.sampled_from([0, 1, 64, 255]))
_ARRAYS = st.one_of(
    st.lists(_ANY_ARRAY, max_size=3),
    st.tuples(st.one_of(_NEAR_INDICES, _NEAR_BITS), hnp.arrays(st.sampled_from([np.float32, np.float64]), st.integers(0, 6))),
)


@pytest.mark.slow
@settings(max_examples=120)
@given(header=_HEADERS, arrays=_ARRAYS, mask=st.sampled_from([None, np.array([0, 5])]))
def test_decode_raises_value_error_or_returns_the_right_length(header: Any, arrays: Any, mask: Any) -> None:
    try:
        vector = decode(Payload(arrays=tuple(arrays), header=header), LENGTH, mask=mask)
    except ValueError:
        return
    assert vector.shape == (LENGTH,)
    assert vector.dtype in (np.float32, np.float64)
    assert vector.dtype == arrays[-1].dtype


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


# The registry of codecs


@pytest.mark.parametrize("arguments", [{"scale": 1.5}, {"mask": 3}, {3: 1}])
def test_words_that_a_codec_does_not_know_are_refused(arguments: Any) -> None:
    header = {"encoding": "dense", "length": LENGTH, **arguments}
    with pytest.raises(ValueError, match="payload header"):
        decode(Payload(arrays=(np.ones(LENGTH, F),), header=header), LENGTH)


@pytest.mark.parametrize("answer", [None, 0, 1.5, True, "x", -1, 10**400])
def test_a_mask_must_be_the_one_that_both_sides_know(answer: Any) -> None:
    mask = np.arange(4)
    good = rand_k(_vector(LENGTH), mask)
    decode(good, LENGTH, mask=mask)
    for payload in (Payload(arrays=good.arrays, header={**good.header, "mask": answer}), rand_k(_vector(LENGTH), mask + 1)):
        with pytest.raises(ValueError, match="payload mask"):
            decode(payload, LENGTH, mask=mask)
