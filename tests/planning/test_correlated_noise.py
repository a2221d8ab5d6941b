"""Kinds of correlated noise: the matrix of least error, against published numbers, dense matrices and each other."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from flower_dp.core.strategy_matrix import (
    BandedInverseMatrix,
    BandedMatrix,
    BLTMatrix,
    ParticipationSchema,
    TreeMatrix,
)
from flower_dp.planning.correlated_noise import BISR, BLT, Banded, Tree, error, noise_named

THOUSAND = ParticipationSchema(num_rounds=1000, min_separation=200, max_participations=5)
INDEPENDENT = BandedMatrix(bands=(1.0,))


def schema_of(num_rounds: int, separation: int, most: int | None = None) -> ParticipationSchema:
    possible = -(-num_rounds // separation)
    return ParticipationSchema(
        num_rounds=num_rounds, min_separation=separation, max_participations=min(most or possible, possible)
    )


def dense(column: np.ndarray) -> np.ndarray:
    matrix: np.ndarray = toeplitz(column, np.zeros(len(column)))
    return matrix


def root_mean_square(schema: ParticipationSchema, kind: Any) -> float:
    return error(kind.matrix(schema), schema)


# Published numbers, and those of jax-privacy 2.0.0


def test_golden_numbers_of_a_thousand_rounds() -> None:
    """RMSE of prefix sums with five participations, 200 rounds apart; jax-privacy needs 27 s and 42 s for the same."""
    assert root_mean_square(THOUSAND, Banded(bands=200)) == pytest.approx(7.3569, rel=1e-3)
    blt = BLT().matrix(THOUSAND)
    assert error(blt, THOUSAND) == pytest.approx(7.6569, rel=1e-3)
    assert blt.decays == pytest.approx((0.98899138, 0.7195775), rel=1e-3)
    assert blt.sensitivity(THOUSAND) == pytest.approx(4.1202, rel=1e-3)
    # Independent noise: sqrt(5) x the root of the mean number of rounds.
    assert error(INDEPENDENT, THOUSAND) == pytest.approx(math.sqrt(5 * 500.5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("separation", "most", "bands", "banded", "blt"),
    [(1000, 1, 400, 3.11, 3.05), (400, 3, 400, 5.38, 5.49), (100, 10, 100, 11.57, 12.19)],
)
def test_other_separations_of_a_thousand_rounds(separation: int, most: int, bands: int, banded: float, blt: float) -> None:
    """To the digits of the table; the BLT of the first line has three buffers there."""
    schema = schema_of(1000, separation, most)
    assert round(root_mean_square(schema, Banded(bands=bands)), 2) == pytest.approx(banded, abs=0.011)
    assert round(root_mean_square(schema, BLT(num_buffers=3)), 2) == pytest.approx(blt, abs=0.011)


def test_the_square_root_of_prefix_sums() -> None:
    """All bands of the inverse: c_j of (1 - x)^(-1/2), whose squares sum to (ln n + gamma + ln 16) / pi, nearly."""
    matrix = BISR(bands=1000).matrix(schema_of(1000, 1000))
    squares = float(np.sum(matrix.column(1000) ** 2))
    assert squares == pytest.approx(3.26500, abs=5e-6)
    assert squares == pytest.approx((math.log(1000) + np.euler_gamma + math.log(16)) / math.pi, abs=1e-4)
    # C C is the matrix of prefix sums.
    np.testing.assert_allclose(np.convolve(matrix.column(1000), matrix.column(1000))[:1000], 1.0, rtol=1e-12)


def test_the_bands_of_bisr_are_the_coefficients_of_a_square_root() -> None:
    coefficients = [(-1) ** place * math.prod((0.5 - i) / (i + 1) for i in range(place)) for place in range(64)]
    matrix = BISR().matrix(schema_of(1000, 400))
    assert isinstance(matrix, BandedInverseMatrix)
    assert matrix.bands == pytest.approx(coefficients, rel=1e-12)  # at most 64 by default
    for kind, schema, count in (
        (BISR(bands=7), schema_of(1000, 400), 7),
        (BISR(bands=9), schema_of(1000, 7), 9),
        (BISR(bands=9), schema_of(4, 2), 4),
        (BISR(), schema_of(1, 1), 1),
    ):
        assert kind.matrix(schema).bands == pytest.approx(coefficients[:count], rel=1e-12)


# The least error


SCHEMAS = [
    schema_of(1000, 200),
    schema_of(1000, 500),
    schema_of(1000, 100),
    schema_of(300, 1, 3),
    schema_of(60, 60),
    schema_of(12, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_more_buffers_are_never_worse(schema: ParticipationSchema) -> None:
    errors = [root_mean_square(schema, BLT(num_buffers=number)) for number in range(1, 6)]
    assert errors[0] <= error(INDEPENDENT, schema) * (1 + 1e-6)
    for fewer, more in itertools.pairwise(errors):
        assert more <= fewer * (1 + 1e-3)


@pytest.mark.slow
@given(rounds=st.integers(1, 120), data=st.data())
@settings(max_examples=40)
def test_no_kind_but_the_tree_is_worse_than_independent_noise(rounds: int, data: Any) -> None:
    separation = data.draw(st.integers(1, rounds))
    schema = schema_of(rounds, separation, data.draw(st.integers(1, 20)))
    for kind in (BLT(num_buffers=1), BLT(), Banded(bands=separation)):
        assert root_mean_square(schema, kind) <= error(INDEPENDENT, schema) * (1 + 1e-4)
    if separation == rounds:  # one participation: the general Toeplitz matrix has the least error of all
        least = root_mean_square(schema, Banded(bands=rounds))
        for other in (BLT(), BISR(), BISR(bands=rounds), Banded(bands=max(1, rounds // 2))):
            assert least <= root_mean_square(schema, other) * (1 + 1e-6)


@pytest.mark.parametrize(("bands", "rounds"), [(2, 5), (5, 40), (20, 40), (40, 40)])
def test_no_change_of_the_bands_lowers_the_error(bands: int, rounds: int) -> None:
    schema, rng = schema_of(rounds, bands), np.random.default_rng(0)
    best = Banded(bands=bands).matrix(schema)
    least = error(best, schema)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            changed = np.array(best.bands)
            changed[1:] += size * rng.standard_normal(bands - 1)
            assert error(BandedMatrix(bands=tuple(changed.tolist())), schema) >= least * (1 - 1e-9)


@pytest.mark.parametrize("schema", SCHEMAS[:3], ids=str)
def test_no_change_of_decays_and_scales_lowers_the_error(schema: ParticipationSchema) -> None:
    rng = np.random.default_rng(0)
    best = BLT().matrix(schema)
    least = error(best, schema)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            moved = np.log(np.array(best.decays) / (1 - np.array(best.decays))) + size * rng.standard_normal(2)
            scales = np.array(best.scales) * np.exp(size * rng.standard_normal(2))
            other = BLTMatrix(decays=tuple((1 / (1 + np.exp(-moved))).tolist()), scales=tuple(scales.tolist()))
            assert error(other, schema) >= least * (1 - 1e-6)


def test_the_error_is_that_of_dense_matrices() -> None:
    """Sensitivity over all patterns of 9 rounds x RMSE of A C^-1; the last of three participations has three bands left."""
    schema = schema_of(9, 3)
    table = np.array([pattern for pattern in itertools.product((0, 1), repeat=9) if apart(pattern, 3)])
    prefix = np.tril(np.ones((9, 9)))
    for kind in (BLT(), BISR(), Banded(bands=3), Banded(bands=1)):
        matrix = kind.matrix(schema)
        whole = dense(matrix.column(9))
        worst = np.linalg.norm(table @ whole.T, axis=1).max()
        by_hand = worst * math.sqrt(np.mean(((prefix @ np.linalg.inv(whole)) ** 2).sum(axis=1)))
        assert error(matrix, schema) == pytest.approx(by_hand, rel=1e-9)


def apart(pattern: tuple[int, ...], separation: int) -> bool:
    rounds = np.flatnonzero(pattern)
    return bool(np.all(np.diff(rounds) >= separation))


@pytest.mark.slow
@pytest.mark.parametrize("num_rounds", [1, 2, 3, 7, 12])
def test_every_kind_has_a_proved_sensitivity_for_every_separation(num_rounds: int) -> None:
    """Also those of one round alone, and of one round more than there are."""
    for separation in range(1, num_rounds + 1):
        schema = schema_of(num_rounds, separation)
        one = schema_of(num_rounds, separation, 1)
        kinds = (BLT(num_buffers=1), BLT(), BISR(), BISR(bands=num_rounds + 1), Banded(bands=separation), Tree())
        for kind in kinds:
            matrix = kind.matrix(schema)
            assert matrix.sensitivity(schema) >= matrix.sensitivity(one) >= 1.0
            assert 0 < matrix.prefix_error(num_rounds) <= math.sqrt((num_rounds + 1) / 2) * (1 + 1e-9)


def test_the_tree_has_a_larger_error_than_what_is_optimized() -> None:
    """And than BISR, unless that has the few bands of a small separation: with one band it is independent noise."""
    for schema in SCHEMAS:
        assert isinstance(Tree().matrix(schema), TreeMatrix)
        others = [BLT(), *((BISR(),) if schema.min_separation > 1 else ())]
        assert root_mean_square(schema, Tree()) > max(root_mean_square(schema, kind) for kind in others)


def test_equal_kinds_make_equal_matrices() -> None:
    """A run that resumes computes its matrix again, and compares the digests."""
    for kind in (BLT(), BISR(), Banded(bands=20), Tree()):
        assert (
            kind.matrix(THOUSAND).digest
            == type(kind)(**{name: getattr(kind, name) for name in kind.__dataclass_fields__})
            .matrix(ParticipationSchema(num_rounds=1000, min_separation=200, max_participations=5))
            .digest
        )
    digests = {
        kind.matrix(THOUSAND).digest for kind in (BLT(), BLT(num_buffers=1), BISR(), BISR(bands=9), Banded(bands=9), Tree())
    }
    assert len(digests) == 6


# Values


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: BLT(num_buffers=0), "num_buffers=0: must be a whole number >= 1 and <= 5"),
        (lambda: BLT(num_buffers=6), "num_buffers=6: must be a whole number >= 1 and <= 5"),
        (lambda: BISR(bands=0), "bands=0: must be a whole number >= 1"),
        (lambda: Banded(bands=0), "bands=0: must be a whole number >= 1"),
        (lambda: Banded(bands=2.5), "bands=2.5: must be a whole number >= 1"),  # type: ignore[arg-type]
        (lambda: Banded(bands=201).matrix(THOUSAND), "bands=201: must be at most min_separation=200"),
        (lambda: noise_named("ring"), "noise='ring': must be one of"),
        (lambda: noise_named("blt", bands=3), "bands=3: is not read with noise='blt', but with bisr or banded"),
        (lambda: noise_named("tree", bands=3), "bands=3: is not read with noise='tree'"),
        (lambda: noise_named("bisr", num_buffers=3), "num-buffers=3: is not read with noise='bisr', but with blt"),
        (lambda: noise_named("banded"), "bands=0: must be set with noise="),
    ],
)
def test_values_out_of_range_are_refused_by_name(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        make()


def test_settings_name_kinds_and_their_defaults() -> None:
    assert noise_named("blt") == BLT(num_buffers=2) == BLT()
    assert noise_named("blt", num_buffers=4) == BLT(num_buffers=4)
    assert noise_named("bisr") == BISR(bands=None)
    assert noise_named("bisr", bands=8) == BISR(bands=8)
    assert noise_named("banded", bands=8) == Banded(bands=8)
    assert noise_named("tree") == Tree()


# Another implementation


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS[:3], ids=str)
def test_sensitivities_and_errors_are_those_of_jax_privacy(schema: ParticipationSchema) -> None:
    """In float32, as JAX computes by default."""
    oracle = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    rounds = schema.num_rounds
    for kind in (BLT(), BISR(), Banded(bands=schema.min_separation)):
        matrix = kind.matrix(schema)
        column = np.asarray(matrix.column(rounds), np.float32)
        squared = oracle.minsep_sensitivity_squared(
            column, min_sep=schema.min_separation, max_participations=schema.max_participations, n=rounds, skip_checks=True
        )
        assert matrix.sensitivity(schema) == pytest.approx(math.sqrt(float(squared)), rel=1e-3)
        errors = np.asarray(oracle.per_query_error(strategy_coef=column, n=rounds), np.float64)
        assert matrix.prefix_error(rounds) == pytest.approx(math.sqrt(errors.mean()), rel=1e-3)


@pytest.mark.parametrize(("rounds", "separation", "most", "buffers"), [(1149, 2, 208, 2), (1546, 2, 287, 2), (581, 8, 69, 3)])
def test_rounding_does_not_make_a_column_rise(rounds: int, separation: int, most: int, buffers: int) -> None:
    schema = schema_of(rounds, separation, most)
    matrix = BLT(num_buffers=buffers).matrix(schema)
    assert error(matrix, schema) < error(INDEPENDENT, schema)


@pytest.mark.parametrize(("schema", "least"), [(schema_of(10_000, 10_000), 3.9254), (schema_of(1149, 2, 208), 234.68)])
def test_two_buffers_reach_the_error_that_another_start_finds(schema: ParticipationSchema, least: float) -> None:
    assert root_mean_square(schema, BLT()) <= least * 1.001


def test_the_default_bands_of_bisr_are_those_with_the_least_error() -> None:
    schema = schema_of(300, 1, 3)
    tried = {bands: root_mean_square(schema, BISR(bands=bands)) for bands in (1, 2, 4, 8, 16, 32, 64)}
    assert root_mean_square(schema, BISR()) == min(tried.values()) < 0.4 * tried[1]
