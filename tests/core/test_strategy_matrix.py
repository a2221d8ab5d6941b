"""Strategy matrices: rows, errors and sensitivities, each against dense matrices and all participation patterns."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from flower_dp.core.strategy_matrix import (
    BandedInverseMatrix,
    BandedMatrix,
    BLTMatrix,
    ParticipationSchema,
    TreeMatrix,
)

MOST_ROUNDS, ROUNDING = 20, 1e-11


def schema_of(num_rounds: int, separation: int, most: int) -> ParticipationSchema:
    return ParticipationSchema(num_rounds=num_rounds, min_separation=separation, max_participations=most)


def dense(column: np.ndarray) -> np.ndarray:
    """Return the lower triangular Toeplitz matrix with this first column."""
    matrix: np.ndarray = toeplitz(column, np.zeros(len(column)))
    return matrix


def read_only(arrays: Any) -> None:
    for array in arrays:
        array.flags.writeable = False


def rows_of(matrix: Any, num_rounds: int, num_draws: int) -> tuple[np.ndarray, list[int]]:
    """Return rows 1 to n for unit vectors as draws, one after another, and the number of buffers after each row.

    Buffers are read-only: a row that is made in place of one raises. No row may change a row before it, either.
    """
    units = iter(np.eye(num_draws))
    made, copies, counts, buffers = [], [], [], ()
    for number in range(1, num_rounds + 1):
        row, buffers = matrix.row(number, buffers, lambda: next(units).copy())
        read_only([row, *buffers])
        made.append(row)
        copies.append(row.copy())
        counts.append(len(buffers))
    assert next(units, None) is None
    np.testing.assert_array_equal(made, copies)
    return np.array(made), counts


def patterns(schema: ParticipationSchema) -> np.ndarray:
    """Return every participation pattern as a row of zeros and ones [patterns x rounds]."""

    def after(first: int, left: int) -> Iterator[tuple[int, ...]]:
        yield ()
        for number in range(first, schema.num_rounds) if left else ():
            for rest in after(number + schema.min_separation, left - 1):
                yield (number, *rest)

    listed = list(after(0, schema.max_participations))
    table = np.zeros((len(listed), schema.num_rounds))
    for place, pattern in enumerate(listed):
        table[place, list(pattern)] = 1
    return table


def largest_norm(dense_matrix: np.ndarray, schema: ParticipationSchema) -> float:
    """Return the largest norm of C x over all patterns, if all rows of x have one direction."""
    return float(np.linalg.norm(patterns(schema) @ dense_matrix.T, axis=1).max())


def largest_norm_of_directions(dense_matrix: np.ndarray, schema: ParticipationSchema, rng: np.random.Generator) -> float:
    """Return the largest norm of C x over all patterns, for unit rows of x of random directions, in 1 to 3 dimensions."""
    norms = []
    for dimension in (1, 2, 3):
        directions = rng.standard_normal((schema.num_rounds, dimension))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        each = patterns(schema)[:, :, None] * directions
        norms.append(np.linalg.norm(np.einsum("ij,pjd->pid", dense_matrix, each), axis=(1, 2)).max())
    return float(max(norms))


# What may be in a matrix

unit = st.floats(0.0, 1.0)
schemas = st.integers(1, 12).flatmap(
    lambda rounds: st.builds(schema_of, st.just(rounds), st.integers(1, rounds + 2), st.integers(1, rounds + 1))
)


@st.composite
def buffered(draw: Any) -> BLTMatrix:
    num = draw(st.integers(1, 4))
    decays, parts = (draw(st.lists(st.floats(0.01, 0.999), min_size=num, max_size=num)) for _ in range(2))
    scales = np.array(parts) * draw(st.floats(0.0, 0.999)) / sum(parts)
    return BLTMatrix(decays=tuple(decays), scales=tuple(scales.tolist()))


@st.composite
def falling(draw: Any) -> BandedMatrix:
    """A banded matrix whose column is nonnegative and does not increase."""
    return BandedMatrix(bands=tuple(np.cumprod([1.0, *draw(st.lists(unit, max_size=MOST_ROUNDS - 1))]).tolist()))


def any_bands(kind: Callable[..., Any], most: int = MOST_ROUNDS) -> Any:
    """Matrices with any bands after the first, small enough that an inverse of 20 rounds loses few digits."""
    return st.lists(st.floats(-0.3, 0.3), max_size=most - 1).map(lambda others: kind(bands=(1.0, *others)))


def root(count: int) -> np.ndarray:
    """Return the first coefficients of (1 - x)^(1/2)."""
    return np.array([(-1) ** place * math.prod((0.5 - i) / (i + 1) for i in range(place)) for place in range(count)])


inverse_roots = st.integers(1, MOST_ROUNDS).map(lambda count: BandedInverseMatrix(bands=tuple(root(count).tolist())))
toeplitz_matrices = st.one_of(buffered(), falling(), any_bands(BandedMatrix), any_bands(BandedInverseMatrix), inverse_roots)


# Toeplitz matrices


def test_columns_by_their_definitions() -> None:
    blt = BLTMatrix(decays=(0.5, 0.25), scales=(0.25, 0.125))
    assert blt.column(4).tolist() == [1.0, 0.375, 0.125 + 0.03125, 0.0625 + 0.0078125]
    assert BandedMatrix(bands=(1.0, 0.5)).column(4).tolist() == [1.0, 0.5, 0.0, 0.0]
    assert BandedMatrix(bands=(1.0, 0.5, 0.25)).column(2).tolist() == [1.0, 0.5]
    half = BandedInverseMatrix(bands=(1.0, -0.5))
    assert half.inverse_column(3).tolist() == [1.0, -0.5, 0.0]
    assert half.column(4).tolist() == [1.0, 0.5, 0.25, 0.125]


@given(matrix=toeplitz_matrices, num_rounds=st.integers(1, MOST_ROUNDS))
def test_rows_are_those_of_the_inverse(matrix: Any, num_rounds: int) -> None:
    """Row t has the draws 1 to t alone: noise of later rounds is not drawn before."""
    inverse = np.linalg.inv(dense(matrix.column(num_rounds)))
    made, counts = rows_of(matrix, num_rounds, num_rounds)
    np.testing.assert_allclose(made, np.tril(made), rtol=0, atol=0)
    np.testing.assert_allclose(made, inverse, rtol=0, atol=1e-9)
    np.testing.assert_allclose(dense(matrix.inverse_column(num_rounds)), inverse, rtol=0, atol=1e-9)
    kept = len(matrix.decays) if isinstance(matrix, BLTMatrix) else len(matrix.bands) - 1
    assert max(counts) <= kept  # the memory of a server, whatever the number of rounds


@given(matrix=toeplitz_matrices, num_rounds=st.integers(1, MOST_ROUNDS))
def test_the_prefix_error_is_that_of_the_dense_matrix(matrix: Any, num_rounds: int) -> None:
    noise = np.tril(np.ones((num_rounds, num_rounds))) @ np.linalg.inv(dense(matrix.column(num_rounds)))
    by_hand = math.sqrt(np.mean((noise**2).sum(axis=1)))
    assert matrix.prefix_error(num_rounds) == pytest.approx(by_hand, rel=1e-9)


@given(matrix=st.one_of(buffered(), falling(), inverse_roots), schema=schemas, seed=st.integers(0, 2**32))
def test_the_sensitivity_is_the_largest_norm_over_all_patterns(matrix: Any, schema: ParticipationSchema, seed: int) -> None:
    """Also for updates of any direction: for a nonnegative matrix none is worse than one direction for all."""
    column = matrix.column(schema.num_rounds)
    claimed, matrix_of_run = matrix.sensitivity(schema), dense(column)
    worst = largest_norm(matrix_of_run, schema)
    assert worst <= claimed * (1 + ROUNDING)
    assert largest_norm_of_directions(matrix_of_run, schema, np.random.default_rng(seed)) <= claimed * (1 + ROUNDING)
    if np.any(column[schema.min_separation :]):
        assert claimed == pytest.approx(worst, rel=ROUNDING)


@given(data=st.data(), schema=schemas, seed=st.integers(0, 2**32))
def test_the_sensitivity_of_bands_that_never_overlap(data: Any, schema: ParticipationSchema, seed: int) -> None:
    """Whatever their signs: sqrt(k) x norm; all of it is reached if the last participation has all bands left."""
    matrix = data.draw(any_bands(BandedMatrix, most=min(schema.min_separation, schema.num_rounds)))
    matrix_of_run, claimed = dense(matrix.column(schema.num_rounds)), matrix.sensitivity(schema)
    assert claimed == pytest.approx(math.sqrt(schema.max_participations) * np.linalg.norm(matrix.bands), rel=ROUNDING)
    worst = largest_norm(matrix_of_run, schema)
    assert worst <= claimed * (1 + ROUNDING)
    assert largest_norm_of_directions(matrix_of_run, schema, np.random.default_rng(seed)) <= claimed * (1 + ROUNDING)
    if (schema.max_participations - 1) * schema.min_separation + len(matrix.bands) <= schema.num_rounds:
        assert claimed == pytest.approx(worst, rel=ROUNDING)


def test_every_schema_of_a_small_run() -> None:
    """All separations and numbers of participations of 12 rounds, also those that never matter: b > n, k > n / b."""
    blt = BLTMatrix(decays=(0.9, 0.3), scales=(0.4, 0.5))
    banded = BandedMatrix(bands=(1.0, 0.6, 0.6, 0.1))
    bisr = BandedInverseMatrix(bands=tuple(root(5).tolist()))
    for separation, most, matrix in itertools.product(range(1, 15), range(1, 14), (blt, banded, bisr)):
        schema = schema_of(12, separation, most)
        column = matrix.column(12)
        claimed, worst = matrix.sensitivity(schema), largest_norm(dense(column), schema)
        assert worst <= claimed * (1 + ROUNDING)
        if np.any(column[separation:]):
            assert claimed == pytest.approx(worst, rel=ROUNDING)
        else:
            assert claimed == pytest.approx(math.sqrt(most) * np.linalg.norm(column), rel=ROUNDING)


@given(matrix=toeplitz_matrices, schema=schemas)
def test_a_column_without_a_proof_is_refused(matrix: Any, schema: ParticipationSchema) -> None:
    column = matrix.column(schema.num_rounds)
    proved = not np.any(column[schema.min_separation :]) or (np.all(column >= 0) and np.all(np.diff(column) <= 0))
    if proved:
        assert largest_norm(dense(column), schema) <= matrix.sensitivity(schema) * (1 + ROUNDING)
    else:
        with pytest.raises(ValueError, match=r"has no proved sensitivity: its column must not increase, or have at most"):
            matrix.sensitivity(schema)


@pytest.mark.parametrize(
    "matrix",
    [
        BandedMatrix(bands=(1.0, 0.2, 0.3)),
        BandedMatrix(bands=(1.0, -0.2)),
        BandedMatrix(bands=(1.0, 1.5)),
        BandedInverseMatrix(bands=(1.0, 0.5)),
        BLTMatrix(decays=(0.5,), scales=(1.5,)),
        BLTMatrix(decays=(0.5,), scales=(-0.1,)),
        BLTMatrix(decays=(1.1,), scales=(0.5,)),
    ],
)
def test_columns_that_rise_or_turn_negative_have_no_sensitivity_with_a_small_separation(matrix: Any) -> None:
    """For the first the equally spaced pattern is not the worst one; a client with another one would get too little noise."""
    with pytest.raises(ValueError, match=f"^{type(matrix).__name__}.*at most 1 entries$"):
        matrix.sensitivity(schema_of(6, 1, 2))
    assert matrix.sensitivity(schema_of(6, 6, 1)) == pytest.approx(np.linalg.norm(matrix.column(6)))


@pytest.mark.parametrize(
    ("bands", "pattern", "signs"),
    [
        ((1.0, 0.0, 1.0, 0.0, 0.0, 0.0), [0, 2], [1, 1]),  # two rounds apart is worse than the least separation
        ((1.0, -0.2), [0, 1], [1, -1]),  # updates of opposite directions are worse than of one
    ],
)
def test_refused_columns_would_be_understated(bands: Any, pattern: list[int], signs: list[int]) -> None:
    """The sum of the columns of rounds 1 and 2 is no bound."""
    schema, whole = schema_of(len(bands), 1, 2), dense(np.array(bands))
    assert np.linalg.norm(whole[:, pattern] @ signs) > 1.05 * np.linalg.norm(whole[:, :2].sum(axis=1))
    with pytest.raises(ValueError, match="has no proved sensitivity"):
        BandedMatrix(bands=bands).sensitivity(schema)


@pytest.mark.parametrize("rounds", [1, 2, 7])
@pytest.mark.parametrize(
    "matrix",
    [
        BLTMatrix(decays=(0.9,), scales=(0.5,)),
        BandedMatrix(bands=(1.0, 0.5)),
        BandedInverseMatrix(bands=(1.0, -0.5)),
        TreeMatrix(),
    ],
)
def test_one_round_is_independent_noise_and_a_separation_above_the_rounds_is_one_participation(matrix: Any, rounds: int) -> None:
    assert matrix.sensitivity(schema_of(1, 1, 1)) == matrix.prefix_error(1) == 1.0
    assert rows_of(matrix, 1, 1)[0].tolist() == [[1.0]]
    beyond = matrix.sensitivity(schema_of(rounds, rounds + 5, 1))
    assert beyond == matrix.sensitivity(schema_of(rounds, rounds, 1))


def test_no_correlation_is_independent_noise() -> None:
    """C = 1: the sensitivity is that of k releases, and the error of the prefix sums that of a random walk."""
    schema = schema_of(10, 2, 5)
    for matrix in (BandedMatrix(bands=(1.0,)), BandedInverseMatrix(bands=(1.0,)), BLTMatrix(decays=(0.5,), scales=(0.0,))):
        assert rows_of(matrix, 10, 10)[0].tolist() == np.eye(10).tolist()
        assert matrix.sensitivity(schema) == pytest.approx(math.sqrt(5))
        assert matrix.prefix_error(10) == pytest.approx(math.sqrt(5.5))


@given(one=toeplitz_matrices, other=toeplitz_matrices)
def test_equal_matrices_alone_have_equal_digests(one: Any, other: Any) -> None:
    assert (one.digest == other.digest) == ((type(one), vars(one)) == (type(other), vars(other)))
    assert one.digest != TreeMatrix().digest


def test_long_runs_keep_the_proof() -> None:
    """Rounding must not make a column rise: it would be refused in the middle of a plan."""
    bands = tuple(np.cumprod([1.0, *((np.arange(1, 3000) - 1.5) / np.arange(1, 3000))]).tolist())
    np.testing.assert_allclose(bands[:30], root(30), rtol=1e-12)
    for count in (2, 64, 3000):
        matrix = BandedInverseMatrix(bands=bands[:count])
        assert matrix.sensitivity(schema_of(3000, 1, 3000)) > math.sqrt(3000)
        assert matrix.sensitivity(schema_of(3000, 100, 30)) > math.sqrt(30)


# The tree


def measured(num_rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of all complete blocks of 1, 2, 4, ... rounds, by the round that completes them, smallest first.

    Returns:
        Blocks as zeros and ones [blocks x rounds], and the round that completes each.
    """
    blocks, ends = [], []
    for number in range(1, num_rounds + 1):
        for size in (2**level for level in range(num_rounds.bit_length()) if number % 2**level == 0):
            block = np.zeros(num_rounds)
            block[number - size : number] = 1
            blocks.append(block)
            ends.append(number)
    return np.array(blocks), np.array(ends)


@pytest.mark.parametrize("num_rounds", range(1, MOST_ROUNDS + 1))
def test_the_trees_prefix_sums_are_the_best_estimates_from_complete_blocks(num_rounds: int) -> None:
    """Each released prefix sum is a weighted sum of noised blocks, and no other unbiased one has less noise."""
    blocks, ends = measured(num_rounds)
    rows, counts = rows_of(TreeMatrix(), num_rounds, len(blocks))
    assert counts == [number.bit_count() for number in range(1, num_rounds + 1)]
    weights = np.cumsum(rows, axis=0)  # of the blocks' noise in each prefix sum
    np.testing.assert_allclose(weights @ blocks, np.tril(np.ones((num_rounds, num_rounds))), atol=1e-12)
    best = []
    for number in range(1, num_rounds + 1):
        known = blocks[ends <= number, :number]
        best.append(np.ones(number) @ np.linalg.inv(known.T @ known) @ np.ones(number))
    np.testing.assert_allclose((weights**2).sum(axis=1), best, rtol=1e-10)
    assert TreeMatrix().prefix_error(num_rounds) == pytest.approx(math.sqrt(np.mean(best)), rel=1e-10)


def test_the_trees_sensitivity_is_never_understated() -> None:
    """Over all patterns, and against the closed bound where a client takes part once: every level has it in one block."""
    rng = np.random.default_rng(0)
    for num_rounds in range(1, 13):
        blocks, _ = measured(num_rounds)
        for separation, most in itertools.product(range(1, num_rounds + 2), range(1, num_rounds + 2)):
            schema = schema_of(num_rounds, separation, most)
            claimed = TreeMatrix().sensitivity(schema)
            worst = largest_norm(blocks, schema)
            assert worst <= claimed * (1 + ROUNDING)
            # With no more participations than the rounds have room for, the bound is not far above.
            assert most > -(-num_rounds // separation) or claimed <= 1.2 * worst
        assert largest_norm_of_directions(blocks, schema_of(num_rounds, 1, 12), rng) <= TreeMatrix().sensitivity(
            schema_of(num_rounds, 1, 12)
        )
        once = TreeMatrix().sensitivity(schema_of(num_rounds, 1, 1))
        assert once == math.sqrt(num_rounds.bit_length())


def test_the_trees_variance_tends_to_its_limit() -> None:
    """Honaker's estimate of a large block has variance 1/2: v = 1 / (1 + 1 / 2v)."""
    assert TreeMatrix()._variances[-1] == pytest.approx(0.5, rel=1e-12)


def test_all_draws_of_the_tree_have_the_length_of_the_first() -> None:
    """The tree has several draws in a round; of one coordinate alone it would repeat noise."""
    rng = np.random.default_rng(0)
    buffers: Any = ()
    for number in range(1, 9):
        row, buffers = TreeMatrix().row(number, buffers, lambda: rng.standard_normal(5))
        assert row.shape == (5,)
        assert len(np.unique(row)) == 5


@given(matrix=toeplitz_matrices)
def test_a_matrix_is_a_value(matrix: Any) -> None:
    assume(matrix.column(3).size == 3)
    assert matrix == type(matrix)(**{name: getattr(matrix, name) for name in matrix.__dataclass_fields__})
    with pytest.raises(AttributeError):
        matrix.bands = (2.0,)


def test_digests_differ_beyond_1024_rounds() -> None:
    one = BandedMatrix(bands=(1.0, *[0.0] * 1200, 0.1))
    assert one.digest != BandedMatrix(bands=(1.0,)).digest
    assert one.digest == BandedMatrix(bands=(1.0, *[0.0] * 1200, 0.1)).digest
