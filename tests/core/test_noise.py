"""Noise: its distribution to the last step of its lattice, its independence, its source of randomness.

The statistical tests use fixed seeds; for a random seed each would raise a false alarm with probability 1e-6, and each is
shown to reject a scale that is wrong by 5 %.
"""

import itertools
import math
import secrets
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from flower_dp.core.clipping import clip_l1, clip_l2
from flower_dp.core.noise import (
    LARGEST_EXACT,
    check_lattice,
    gaussian,
    gaussian_share,
    is_exact,
    laplace,
    lattice_step,
    noise_generator,
    round_to_nearest,
    round_toward_zero,
)

FALSE_ALARM = 1e-6
SIZE = 200_000  # so many that a 5 % wrong scale is rejected with near certainty
DRAWS: dict[str, Any] = {"gaussian": gaussian, "laplace": laplace}
DISTRIBUTIONS: dict[str, Any] = {"gaussian": stats.norm, "laplace": stats.laplace}
# (what the noise is like, generator)
SOURCES: dict[str, Any] = {
    "numpy": lambda shape, seed: (np.zeros(shape, np.float32), np.random.default_rng(seed)),
    "numpy-float64": lambda shape, seed: (np.zeros(shape), np.random.default_rng(seed)),
    "torch": lambda shape, seed: (torch.zeros(shape), torch.Generator().manual_seed(seed)),
    "torch-float16": lambda shape, seed: (torch.zeros(shape, dtype=torch.float16), torch.Generator().manual_seed(seed)),
    "torch-numpy-generator": lambda shape, seed: (torch.zeros(shape), np.random.default_rng(seed)),
}
# Laplace noise comes from NumPy's generators alone.
KINDS = [("gaussian", source) for source in SOURCES] + [("laplace", source) for source in SOURCES if "numpy" in source]
each_kind = pytest.mark.parametrize(("name", "source"), KINDS)


def _step(scale: float) -> float:
    """The step of a lattice for noise of this scale on a vector of one entry, whose clip norm is the scale."""
    return lattice_step(scale, clip_norm=scale, dimension=1)


# The distribution


@each_kind
def test_mean_and_standard_deviation(name: str, source: str) -> None:
    std = {"gaussian": 1.0, "laplace": math.sqrt(2)}[name]
    like, rng = SOURCES[source]((SIZE,), 12)
    step = _step(2.0)
    noise = np.asarray(DRAWS[name](like, 2.0, step, rng), np.float64)
    z = stats.norm.isf(FALSE_ALARM / 2)
    # Rounding adds the variance of a uniform number within a step, less than 1e-7 of the whole.
    variance = (2 * std) ** 2 + step**2 / 12
    assert abs(noise.mean()) < z * math.sqrt(variance / SIZE)
    # The variance's relative error is sqrt((kurtosis - 1) / n): kurtosis 3 for Gaussian, 6 for Laplace noise.
    band = z * math.sqrt(({"gaussian": 3, "laplace": 6}[name] - 1) / SIZE)
    assert abs(noise.var() / variance - 1) < band
    assert band < 1.05**2 - 1  # so a 5 % wrong scale would fail


@each_kind
def test_noise_is_independent_across_coordinates_and_draws(name: str, source: str) -> None:
    like, rng = SOURCES[source]((SIZE,), 13)
    # A step so fine that hardly two values are equal.
    first, second = (np.asarray(DRAWS[name](like, 1.0, 2.0**-40, rng), np.float64) for _ in range(2))
    # Five correlations, each of std 1 / sqrt(n) were the noise independent.
    band = stats.norm.isf(FALSE_ALARM / 10) / math.sqrt(SIZE - 2)
    pairs = [(first, second), (first[1:], first[:-1]), (first[2:], first[:-2]), (np.abs(first), np.abs(second))]
    pairs.append((np.abs(first[1:]), np.abs(first[:-1])))
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < band
    assert np.unique(first).size > 0.8 * SIZE


# The law on the lattice, step by step

MANY = 500_000  # so many that a 5 % wrong scale is missed with probability 1e-5 at most
_FEWEST = 50  # expected draws in a cell, where chi-square's own distribution is good enough
# Scales in steps: the coarsest lattice that there is, the last that is drawn in one part, and ones that are drawn in two parts,
# or from digits of more than one uniform number.
SCALES = [2**10, 1500.7, 2**16, 2**16 + 1, 2**20]


def _below(name: str, scale: float, k: Any) -> Any:
    """The exact probability of at most k steps, for a draw of this scale (in steps) that is rounded to whole steps."""
    return DISTRIBUTIONS[name](0, scale).cdf(np.asarray(k, np.float64) + 0.5)


def _residue_law(name: str, scale: float, modulus: int) -> np.ndarray:
    """The exact probabilities of k mod modulus."""
    if name == "laplace":
        # p(0) = 1 - e^(-1/2s), p(k) = sinh(1/2s) e^(-|k|/s), and k, k + m, k + 2m, ... are a geometric series.
        first = np.arange(1, modulus + 1)
        right = math.sinh(0.5 / scale) * np.exp(-first / scale) / -math.expm1(-modulus / scale)
        law = np.zeros(modulus)
        np.add.at(law, first % modulus, right)
        np.add.at(law, -first % modulus, right)
        law[0] += -math.expm1(-0.5 / scale)
        return law
    if scale >= 4 * modulus:
        # Poisson's sum: every probability is 1/m up to 2 exp(-2 pi^2 (s/m)^2) < 1e-100.
        return np.full(modulus, 1 / modulus)
    k = np.arange(-math.ceil(12 * scale), math.ceil(12 * scale) + 1)
    law = np.zeros(modulus)
    np.add.at(law, k % modulus, _below(name, scale, k) - _below(name, scale, k - 1))
    return law


def _chi_square(counts: np.ndarray, law: np.ndarray) -> bool:
    """Whether counts look like draws of this law; the rare cells are counted as one."""
    assert law.sum() == pytest.approx(1, abs=1e-9)
    expected = law * counts.sum()
    order = np.argsort(expected)
    rare = max(1, int((expected < _FEWEST).sum()))
    while expected[order[:rare]].sum() < _FEWEST:
        rare += 1
    counts, expected = (np.append(part[order[rare:]], part[order[:rare]].sum()) for part in (counts, expected))
    return bool(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1) > FALSE_ALARM)


def _cells_fit(k: np.ndarray, name: str, scale: float, *, width: int) -> bool:
    """Whether whole numbers k look like rounded draws of this scale, counted in cells of so many steps and two tails."""
    last = np.arange(-int(8 * scale) // width * width, 8 * scale, width)  # of the steps of each cell
    law = np.diff(np.concatenate([[0.0], _below(name, scale, last), [1.0]]))
    cells = np.clip((k.astype(np.int64) - int(last[0]) + width - 1) // width, 0, len(last))
    return _chi_square(np.bincount(cells, minlength=len(law)), law)


def _steps(name: str, source: str, scale: float, *, step: float = 2.0**-7, seed: int = 41) -> np.ndarray:
    """Draws of a scale (in steps), in steps."""
    like, rng = SOURCES[source]((MANY,), seed)
    k = np.asarray(DRAWS[name](like, scale * step, step, rng)) / step
    np.testing.assert_array_equal(k, np.rint(k))
    return np.asarray(k, np.int64)


LATTICE_KINDS = [("gaussian", "numpy-float64"), ("gaussian", "torch"), ("laplace", "numpy-float64")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), LATTICE_KINDS)
@pytest.mark.parametrize("scale", SCALES)
def test_cells_of_the_lattice_have_their_exact_probabilities(name: str, source: str, scale: float) -> None:
    k = _steps(name, source, scale)
    for width in (int(scale) // 128, int(scale) // 16 + 1):
        assert _cells_fit(k, name, scale, width=width)
        assert not _cells_fit(k, name, 1.05 * scale, width=width)
        assert not _cells_fit(k, name, 0.95 * scale, width=width)
    # A wrong one of the right scale, moved by a twentieth of it.
    assert not _cells_fit(k + int(scale) // 20, name, scale, width=int(scale) // 16)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), LATTICE_KINDS)
@pytest.mark.parametrize("scale", SCALES)
def test_the_last_bits_have_their_exact_probabilities(name: str, source: str, scale: float) -> None:
    """Up to modulus 4096 they are one digit of a Laplace draw; with 8192 the next digit must be independent of it."""
    k = _steps(name, source, scale, seed=42)
    wrong = {
        "a lattice of twice the step": k // 2 * 2,
        "a digit that is left out now and then": np.where(k % 10 == 7, k + 1, k),
    }

    def fits(k: np.ndarray, modulus: int, scale: float = scale) -> bool:
        return _chi_square(np.bincount(k % modulus, minlength=modulus), _residue_law(name, scale, modulus))

    for modulus in (2, 3, 8, 4096, 8192):
        assert fits(k, modulus), modulus
        if modulus != 3 and (name, source) == LATTICE_KINDS[0]:  # what the others draw would be rejected as well
            assert not any(fits(one, modulus) for one in wrong.values()), modulus
    if scale == 2**10:  # elsewhere residues are uniform, or nearly so, whatever the scale
        assert not fits(k, 8192, 1.05 * scale)
        assert not fits(k, 8192, 0.95 * scale)


@pytest.mark.parametrize(("name", "source"), LATTICE_KINDS)
@pytest.mark.parametrize("scale", [2**10, 1500.7])
def test_single_steps_around_zero_have_their_exact_probabilities(name: str, source: str, scale: float) -> None:
    """Zero is a step like any other: rounding toward it, for example, would make it twice as frequent."""
    k = _steps(name, source, scale, seed=43)
    around = np.arange(-5, 6)
    inside = _below(name, scale, around) - _below(name, scale, around - 1)
    law = np.append(inside, 1 - inside.sum())
    counts = np.array([(k == value).sum() for value in around])
    assert _chi_square(np.append(counts, k.size - counts.sum()), law)
    for factor in (0, 2):
        wrong = np.where(around == 0, factor * counts, counts)
        assert not _chi_square(np.append(wrong, k.size - wrong.sum()), law)


# The lattice


@given(
    scale=st.floats(1e-30, 1e30), clip=st.floats(1e-30, 1e30), dimension=st.integers(1, 10**9), norm=st.sampled_from(["l2", "l1"])
)
def test_the_step_is_the_largest_power_of_two_within_its_bounds(scale: float, clip: float, dimension: int, norm: str) -> None:
    assume(clip / scale < 1e9)
    step = lattice_step(scale, clip_norm=clip, dimension=dimension, norm=norm)
    assert math.frexp(step)[0] == 0.5
    # In exact numbers; the one for L2 is squared.
    bounds = [Fraction(scale) / 1024]
    if norm == "l1":
        bounds.append(Fraction(clip) / 256 / dimension)
        assert Fraction(step) <= min(bounds) * (1 + Fraction(1, 2**50))
        assert 2 * Fraction(step) > min(bounds) * (1 - Fraction(1, 2**50))
    else:
        bound = min(bounds[0] ** 2, (Fraction(clip) / 256) ** 2 / dimension)
        assert Fraction(step) ** 2 <= bound * (1 + Fraction(1, 2**50))
        assert (2 * Fraction(step)) ** 2 > bound * (1 - Fraction(1, 2**50))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"scale": scale}, "noise_scale=") for scale in (-1.0, math.nan, math.inf)),
        *(({"clip_norm": clip_norm}, "clip_norm=") for clip_norm in (0.0, math.nan)),
        ({"norm": "linf"}, "norm='linf'"),
        ({"scale": 1e-12}, "noise_scale=1e-12: is too small for clip_norm=1"),
    ],
)
def test_lattices_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    options = {"scale": 1.0, "clip_norm": 1.0, "dimension": 10, **arguments}
    with pytest.raises(ValueError, match=message):
        lattice_step(options.pop("scale"), **options)


def test_without_noise_there_is_no_lattice() -> None:
    assert lattice_step(0.0, clip_norm=1.0, dimension=10) == 0
    values = np.array([0.1, -1 / 3])
    np.testing.assert_array_equal(round_toward_zero(values, 0.0), values)
    np.testing.assert_array_equal(round_to_nearest(values, 0.0), values)


@each_kind
@pytest.mark.parametrize(("scale", "finer"), [(1e-9, 2**-6), (0.7, 1), (3.0, 2**-30), (1e12, 2**-7)])
def test_every_value_is_a_multiple_of_the_step(name: str, source: str, scale: float, finer: float) -> None:
    like, rng = SOURCES[source]((5000,), 19)
    step = finer * _step(scale)
    noise = np.asarray(DRAWS[name](like, scale, step, rng))
    assert noise.dtype == np.float64
    steps = noise / step  # exact, by a power of two
    np.testing.assert_array_equal(steps, np.rint(steps))
    assert np.abs(steps).max() < LARGEST_EXACT
    assert (steps % 2 != 0).any()


# Rounding toward zero

_LIBRARIES: dict[str, Any] = {"numpy": np.asarray, "torch": torch.from_numpy}
_EXPONENTS = st.integers(-60, 60)


def _exactly(value: float, step: float) -> Fraction:
    """Python's own exact rounding toward zero."""
    return int(Fraction(value) / Fraction(step)) * Fraction(step)


@settings(max_examples=60)
@given(
    data=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]),
    exponent=_EXPONENTS,
    library=st.sampled_from(["numpy", "torch"]),
)
def test_rounding_toward_zero_is_exact_and_no_entry_grows(data: Any, dtype: Any, exponent: int, library: str) -> None:
    width = 32 if dtype == np.float32 else 64
    step = 2.0**exponent
    # So far from the largest float that the count of steps is one, too.
    elements = st.floats(-(2.0**60), 2.0**60, width=width) | st.floats(-8 * step, 8 * step, width=width)
    values = data.draw(hnp.arrays(dtype, st.integers(0, 20), elements=elements))
    rounded = np.asarray(round_toward_zero(_LIBRARIES[library](values.copy()), step))
    assert rounded.dtype == dtype
    assert (np.abs(rounded) <= np.abs(values)).all()
    assert (np.abs(values.astype(np.float64) - rounded) < step).all()
    assert [Fraction(float(x)) for x in rounded] == [_exactly(float(x), step) for x in values]
    again = np.asarray(round_toward_zero(_LIBRARIES[library](rounded.copy()), step))
    np.testing.assert_array_equal(again, rounded)


@pytest.mark.parametrize("library", _LIBRARIES)
@pytest.mark.parametrize("step", [2.0**-130, 2.0**110])
def test_steps_beyond_float32_are_rounded_to_in_float64(library: str, step: float) -> None:
    """In float32, 1 / step or the multiples of the step would overflow or vanish."""
    values = np.array([3.7, -3.7, 0.9], np.float32).astype(np.float64) * 2.0 ** (math.log2(step) if step > 1 else -129)
    rounded = round_toward_zero(_LIBRARIES[library](values.astype(np.float32)), step)
    expected = [float(_exactly(float(np.float32(x)), step)) for x in values]
    assert np.asarray(rounded).tolist() == expected
    assert np.asarray(rounded).dtype == np.float64


@settings(max_examples=60)
@given(
    values=hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)),
    clip=st.floats(1e-6, 1e6),
    ratio=st.floats(1e-3, 1e3),
    norm=st.sampled_from(["l2", "l1"]),
    library=st.sampled_from(["numpy", "torch"]),
)
def test_rounding_keeps_the_clip_bound(values: np.ndarray, clip: float, ratio: float, norm: str, library: str) -> None:
    """In exact numbers, and what rounding takes away is at most 1/256 of the clip norm."""
    step = lattice_step(ratio * clip, clip_norm=clip, dimension=values.size, norm=norm)
    clipped = (clip_l2 if norm == "l2" else clip_l1)(_LIBRARIES[library](values), clip)
    before = [Fraction(float(x)) for x in np.asarray(clipped)]
    after = [Fraction(float(x)) for x in np.asarray(round_toward_zero(clipped, step))]
    if norm == "l2":
        assert sum(x * x for x in after) <= Fraction(clip) ** 2
        assert sum((x - y) ** 2 for x, y in zip(before, after, strict=True)) <= (Fraction(clip) / 256) ** 2
    else:
        assert sum(map(abs, after)) <= Fraction(clip)
        assert sum(abs(x - y) for x, y in zip(before, after, strict=True)) <= Fraction(clip) / 256


@settings(max_examples=50)
@given(
    values=hnp.arrays(np.float64, st.integers(0, 20), elements=st.floats(-1e9, 1e9)),
    exponent=st.integers(-20, 20),
    library=st.sampled_from(["numpy", "torch"]),
)
def test_nearest_is_the_nearest_multiple(values: np.ndarray, exponent: int, library: str) -> None:
    step = 2.0**exponent
    rounded = np.asarray(round_to_nearest(_LIBRARIES[library](values.copy()), step))
    expected = [round(Fraction(float(x)) / Fraction(step)) * Fraction(step) for x in values]
    assert [Fraction(float(x)) for x in rounded] == expected


# A value on the lattice plus rounded noise is the rounded sum: post-processing of the ideal mechanism


class Shifted(np.random.Generator):
    """A NumPy generator that remembers the normals that it drew."""

    def __init__(self, seed: int) -> None:
        super().__init__(np.random.PCG64(seed))
        self.drawn: list[np.ndarray] = []

    def standard_normal(self, *args: Any, **arguments: Any) -> Any:
        drawn = super().standard_normal(*args, **arguments)
        self.drawn.append(np.array(drawn))
        return drawn


def _rounded(number: Fraction) -> int:
    assert number.denominator != 2  # of a tie both neighbors are nearest; no draw of these seeds is one
    return round(number)


@pytest.mark.parametrize("scale", [1024.0, 3333.3, 2.0**16, 2.0**20])
def test_a_shift_before_gaussian_noise_is_rounded_is_a_shift_after_it(scale: float) -> None:
    """Exactly: x + noise is what rounding x + (the un-rounded draw of the same generator) gives, whatever x is.

    Noise of very many steps has a coarse part, which is rounded first, and a fine one; together they have the whole variance.
    """
    step, rng = 2.0**-9, Shifted(51)
    parts = [scale] if scale <= 2**16 else [math.sqrt(scale**2 - 2.0**24), 2.0**12]
    assert math.hypot(*parts) == pytest.approx(scale, rel=1e-15)
    x = round_toward_zero(np.random.default_rng(52).standard_normal(3000) * 7 * scale * step, step)
    released = x + gaussian(x, scale * step, step, rng)
    for value, out, *normals in zip(x, released, *rng.drawn, strict=True):
        shifted = Fraction(float(value)) / Fraction(step)
        for normal, part in zip(normals, parts, strict=True):
            # The draw itself is a float product, of which the sum is then rounded in exact numbers.
            shifted = Fraction(_rounded(shifted + Fraction(float(normal) * part)))
        assert Fraction(float(out)) == shifted * Fraction(step)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), LATTICE_KINDS)
def test_sums_of_lattice_values_are_the_same_in_any_order(name: str, source: str) -> None:
    like, rng = SOURCES[source]((200,), 56)
    step = lattice_step(0.7, clip_norm=1.0, dimension=200)
    rows = [np.asarray(DRAWS[name](like, 0.7, step, rng)) for _ in range(100)]
    values = np.random.default_rng(57).standard_normal((100, 200))
    rows = [row + round_toward_zero(value, step) for row, value in zip(rows, values, strict=True)]

    def totals(rows: Any) -> set[bytes]:
        orders = [np.arange(100), np.arange(100)[::-1], *(np.random.default_rng(i).permutation(100) for i in range(5))]
        return {np.add.accumulate(np.stack(rows)[order])[-1].tobytes() for order in orders}

    (only,) = totals(rows)
    assert is_exact(np.frombuffer(only), step)
    # By the exact sum of the exact numbers, too.
    expected = [float(sum(map(Fraction, map(float, column)), Fraction(0))) for column in np.stack(rows).T]
    assert np.frombuffer(only).tolist() == expected
    assert len(totals(list(values))) > 1  # off the lattice it is not so


@each_kind
def test_neither_noise_nor_what_is_rounded_to_zero_is_minus_zero(name: str, source: str) -> None:
    """Only -0.0 + -0.0 is -0.0: its sign would tell an entry a little below zero from one of zero."""
    like, rng = SOURCES[source]((SIZE,), 58)
    noise = np.asarray(DRAWS[name](like, 1.0, 2.0**-10, rng))
    assert (noise == 0).sum() > 30
    assert not np.signbit(noise[noise == 0]).any()
    for library in _LIBRARIES.values():
        for dtype in (np.float32, np.float64):
            rounded = np.asarray(round_toward_zero(library(np.array([-0.3, -0.0, 0.0, 0.3], dtype)), 1.0))
            assert not rounded.any()
            assert not np.signbit(rounded).any()


def test_a_sum_with_too_many_bits_is_not_called_exact() -> None:
    step = 2.0**-9
    for library in _LIBRARIES.values():
        assert is_exact(library(np.array([0.0, -(2.0**53 - 1)]) * step), step)
        assert not is_exact(library(np.array([0.0, -(2.0**53)]) * step), step)
        assert not is_exact(library(np.array([0.0, math.inf])), step)
        assert not is_exact(library(np.array([0.0, math.nan])), step)
        assert is_exact(library(np.array([1e300])), 0.0)


# What is asked for


@each_kind
@pytest.mark.parametrize(("scale", "step"), [(1.0, 2.0**-10), (2.0**20, 2.0**-10), (0.0, 0.0)])
def test_noise_has_the_shape_and_library_asked_for_and_is_float64(name: str, source: str, scale: float, step: float) -> None:
    """And of scale 0 it is 0."""
    for shape in ((), (0,), (7,), (3, 5), (4, 0)):
        like, rng = SOURCES[source](shape, 14)
        noise = DRAWS[name](like, scale, step, rng)
        assert tuple(noise.shape) == shape
        assert isinstance(noise, torch.Tensor) == isinstance(like, torch.Tensor)
        assert str(noise.dtype).endswith("float64")
        assert np.asarray(noise).any() == (scale > 0 and 0 not in shape)


@each_kind
def test_scales_and_steps_that_make_no_sense_are_refused(name: str, source: str) -> None:
    like, rng = SOURCES[source]((3,), 16)
    for scale in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"noise_s(td|cale)=.*>= 0"):
            DRAWS[name](like, scale, 2.0**-10, rng)
    DRAWS[name](like, 1.0, 2.0**-10, rng)
    for step in (0.0, -(2.0**-12), 3 * 2.0**-13, 1e-4, math.nan, math.inf, 2.0**-9, 1.0):
        with pytest.raises(ValueError, match=r"step=.*must be a power of two, at most 1/1024 of the noise scale 1"):
            DRAWS[name](like, 1.0, step, rng)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("like", [torch.zeros(3), np.zeros(3)], ids=["torch", "numpy"])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_what_is_no_generator_is_refused(name: str, like: Any, scale: float) -> None:
    """None above all: torch would draw from its global generator, which anybody may seed. Laplace noise takes none of torch's."""
    for rng in (None, 5, np.random, np.random.RandomState(1), *([torch.Generator()] if name == "laplace" else [])):
        with pytest.raises(ValueError, match=r"rng=.*must be a numpy\.random\.Generator"):
            DRAWS[name](like, scale, 2.0**-10, rng)


# The source of randomness


def test_without_a_seed_every_call_takes_256_new_bits_and_the_purpose_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that differ in the low or high words alone would be a smaller seed."""
    asked: list[int] = []
    true = secrets.randbits
    monkeypatch.setattr(secrets, "randbits", lambda bits: asked.append(bits) or true(bits))
    generators = [noise_generator(None, "server", 1) for _ in range(50)]
    assert asked == [256] * 50
    assert len({rng.standard_normal() for rng in generators}) == 50
    states = [noise_generator().bit_generator.state["state"]["state"] for _ in range(50)]
    assert len({state >> 64 for state in states}) == len({state % 2**64 for state in states}) == 50


def test_every_one_of_the_256_bits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    entropies = iter([0, *(1 << bit for bit in range(256))])
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(entropies))
    draws = {noise_generator().standard_normal() for _ in range(257)}
    assert len(draws) == 257


def test_with_a_seed_numbers_follow_from_the_seed_and_every_part_of_the_purpose() -> None:
    parts: list[Any] = [0, 1, 2, 11, "1", "a", "b", "ab", "a, b", "a', 'b", "", None, ("a", "b")]
    purposes = [(), *((one,) for one in parts), *itertools.product(parts, repeat=2), *itertools.product(parts[:6], repeat=3)]
    keys = [(seed, *purpose) for seed in (0, 1, 2**32, 2**64, 2**64 + 1) for purpose in purposes]
    draws = [tuple(noise_generator(*key).standard_normal(2).tolist()) for key in keys]
    assert len(set(draws)) == len(keys)
    assert draws == [tuple(noise_generator(*key).standard_normal(2).tolist()) for key in keys]


@pytest.mark.parametrize("on", [None, np.zeros(3), torch.zeros(3)], ids=["nothing", "numpy", "torch"])
def test_on_the_processor_numbers_are_numpys_and_the_same(on: Any) -> None:
    """Torch's generator for the processor keeps 32 bits of a seed."""
    rng = noise_generator(3, "x", on=on)
    assert isinstance(rng, np.random.Generator)
    assert rng.standard_normal() == noise_generator(3, "x").standard_normal()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scale", [2.0**10, 2.0**20])
def test_noise_that_a_gpu_draws_has_the_law_of_the_lattice(scale: float) -> None:
    like = torch.zeros(MANY, device="cuda")
    rng = noise_generator(61, on=like)
    assert rng.device.type == "cuda"
    drawn = gaussian(like, scale, 1.0, rng)
    assert drawn.device.type == "cuda"
    assert drawn.dtype == torch.float64
    k = drawn.cpu().numpy()
    np.testing.assert_array_equal(k, np.rint(k))
    fits = [_cells_fit(k, "gaussian", factor * scale, width=int(scale) // 128) for factor in (1.0, 1.05, 0.95)]
    assert fits == [True, False, False]
    for modulus in (2, 64):
        assert _chi_square(np.bincount(k.astype(np.int64) % modulus, minlength=modulus), _residue_law("gaussian", scale, modulus))
    again = gaussian(like, scale, 1.0, noise_generator(61, on=like))
    assert torch.equal(again, drawn)
    first, second = (gaussian(like, scale, 1.0, noise_generator(on=like)) for _ in range(2))
    assert not torch.equal(first, second)


@each_kind
def test_noise_does_not_touch_or_follow_the_global_generators(name: str, source: str) -> None:
    noises = []
    for seed in (1, 2):
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        numpy_state, torch_state = np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
        like, rng = SOURCES[source]((20,), 17)
        noise_generator()
        noises.append(np.asarray(DRAWS[name](like, 1.0, 2.0**-10, rng)))
        np.testing.assert_equal(np.random.get_state(legacy=False), numpy_state)  # noqa: NPY002
        assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(*noises)


# Shares


def test_shares_of_noise_sum_to_the_noise() -> None:
    """Variances add up; the law of each share is that of the tests above."""
    for shares in (1, 7, 100):
        assert shares * gaussian_share(3.0, shares) ** 2 == pytest.approx(9.0, rel=1e-15)


# A lattice that another party has chosen


@pytest.mark.parametrize(
    "step", [0.0, -(2.0**-12), math.nan, math.inf, 3 * 2.0**-14, 2.0**-10 * 1.0000000000000002, 2.0**-9, 1.0]
)
def test_a_lattice_on_which_the_noise_shows_is_refused(step):
    check_lattice(2.0**-10, scale=1.0, clip_norm=1.0)
    with pytest.raises(ValueError, match="must be a power of two, at most 1/1024 of the noise scale 1"):
        check_lattice(step, scale=1.0, clip_norm=1.0)
    if step and not math.log2(abs(step)).is_integer():
        with pytest.raises(ValueError, match="must be a power of two"):
            check_lattice(step, scale=0.0, clip_norm=1.0)


@pytest.mark.parametrize(
    ("step", "scale", "clip_norm"),
    [
        (2.0**-48, 1.0, 0.01),  # the noise has 2^48 steps
        (2.0**-47, 0.2, 2.0),  # the clip norm has
        (2.0**-901, 2.0**-880, 2.0**-880),  # the inverse of the step is near the end of a double's range
        (2.0**-1074, 1.0, 1.0),
        (2.0**-1028, 0.0, 0.25),  # somebody else adds the noise; what is clipped has no number of such steps
        (2.0**-901, 0.0, 2.0**-880),
        (2.0**-48, 0.0, 1.0),
    ],
)
def test_a_lattice_that_is_too_fine_for_exact_sums_is_refused(step, scale, clip_norm):
    check_lattice(2.0**-46, scale=1.0, clip_norm=1.0)
    check_lattice(2.0**-46, scale=0.0, clip_norm=1.0)
    check_lattice(0.0, scale=0.0, clip_norm=1.0)
    with pytest.raises(ValueError, match=r"step=.*: is too small for clip_norm="):
        check_lattice(step, scale=scale, clip_norm=clip_norm)


@pytest.mark.parametrize("shape", [(2**16 + 7,), (3, 2**15 + 1)])
def test_every_entry_of_a_long_vector_has_noise_of_its_own(shape: tuple[int, ...]) -> None:
    """It is drawn in blocks: no entry is without noise, no block has that of another one."""
    step, size = 2.0**-12, math.prod(shape)
    drawn = gaussian(np.empty(shape), 3.0, step, np.random.default_rng(5))
    whole = np.rint(np.random.default_rng(5).standard_normal(size) * (3.0 / step)) * step
    assert np.array_equal(drawn, whole.reshape(shape))
