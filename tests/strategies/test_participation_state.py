"""The secret state of correlated noise: its law, what is stored of it, and what a resumed run draws.

Statistical tests would raise a false alarm with probability at most 1e-6 for a random seed, and notice a scale that is 5 % wrong.
"""

import itertools
import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import toeplitz

from flower_dp.core.noise import noise_generator
from flower_dp.core.participation import Participation
from flower_dp.core.serialization import dump_bytes, load_bytes
from flower_dp.core.strategy_matrix import BandedInverseMatrix, BandedMatrix, BLTMatrix, TreeMatrix
from flower_dp.strategies.releases import participation_state
from flower_dp.strategies.releases.participation_state import ParticipationState
from tests.closed_forms import assert_std

FALSE_ALARM = 1e-6
ROUNDS, SIZE = 6, 20_000
BLT = BLTMatrix(decays=(0.9, 0.4), scales=(0.3, 0.4))
MATRICES = {
    "BLT": BLT,
    "banded": BandedMatrix(bands=(1.0, 0.6, 0.3)),
    "banded inverse": BandedInverseMatrix(bands=(1.0, -0.5, -0.125)),
    "tree": TreeMatrix(),
    "independent": BandedMatrix(bands=(1.0,)),
}
every_matrix = pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)


def replayed(state: ParticipationState, matrix: Any, length: int) -> np.ndarray:
    """Return all rows that the seeds of a state determine, by hand."""
    made, buffers = [], ()
    for place, seed in enumerate(state.seeds, start=1):
        draw = participation_state._Draws(noise_generator(int(seed, 16), "correlated", place), length)
        row, buffers = matrix.row(place, buffers, draw)
        made.append(row.copy())
    return np.array(made)


def stored(state: ParticipationState) -> ParticipationState:
    """Return the state as it is after the run's process has died."""
    read: ParticipationState = load_bytes(dump_bytes(state))
    return read


def rows(
    state: ParticipationState, matrix: Any, numbers: Any, length: int = SIZE, seed: int = 3
) -> tuple[np.ndarray, ParticipationState]:
    """Return the rows of these rounds, and the state after them; the seeds of a round follow from `seed` and its number."""
    made = []
    for number in numbers:
        row, state = state.row(matrix, number, length, noise_generator(seed, number))
        made.append(row.copy())
    return np.array(made), state


# The law of the noise


@every_matrix
def test_rows_have_the_covariance_of_the_inverse(matrix: Any) -> None:
    """Undone by C, they are independent standard Gaussians: each of its rows, and every two of them."""
    made, _ = rows(ParticipationState(), matrix, range(1, ROUNDS + 1))
    if isinstance(matrix, TreeMatrix):
        whole = np.linalg.inv(tree_root(ROUNDS))
    else:
        whole = toeplitz(matrix.column(ROUNDS), np.zeros(ROUNDS))
    assert_independent(whole @ made)


def tree_root(num_rounds: int) -> np.ndarray:
    """Return the Cholesky root of the covariance of the tree's rows, from rows for unit vectors as draws."""
    num_draws = sum((number & -number).bit_length() for number in range(1, num_rounds + 1))
    units, buffers, made = iter(np.eye(num_draws)), (), []
    for number in range(1, num_rounds + 1):
        row, buffers = TreeMatrix().row(number, buffers, lambda: next(units).copy())
        made.append(row)
    root: np.ndarray = np.linalg.cholesky(np.array(made) @ np.array(made).T)
    return root


def assert_independent(draws: np.ndarray) -> None:
    for row in draws:
        assert_std(row, 1.0, FALSE_ALARM / len(draws))
        assert stats.kstest(row, "norm").pvalue > FALSE_ALARM / len(draws)
    pairs = list(itertools.combinations(range(len(draws)), 2))
    band = stats.norm.isf(FALSE_ALARM / (2 * len(pairs))) / math.sqrt(draws.shape[1])
    for one, other in pairs:
        assert abs(np.mean(draws[one] * draws[other])) < band


def test_prefix_sums_of_rows_have_the_error_that_is_told() -> None:
    """The noise of the model; of the raw rows it would be larger."""
    for matrix in (BLT, TreeMatrix()):
        made, _ = rows(ParticipationState(), matrix, range(1, 9))
        squares = np.mean(np.cumsum(made, axis=0) ** 2)
        assert math.sqrt(squares) == pytest.approx(matrix.prefix_error(8), rel=0.02)


def test_each_draw_is_two_with_variance_one_in_all() -> None:
    """The second fills the gaps between the doubles of the first; both weights are read off unit vectors."""

    class Units:
        calls = 0

        def standard_normal(self, size: int) -> np.ndarray:
            self.calls += 1
            return np.eye(2)[self.calls - 1]

    rng: Any = Units()
    weights = participation_state._Draws(rng, 2)()
    assert rng.calls == 2
    assert float(weights @ weights) == pytest.approx(1.0, rel=1e-12)
    assert 2.0**-8 < weights[1] < 0.1


def test_the_noise_of_a_round_follows_from_its_seed_and_number_alone() -> None:
    """Not from the length of the run, or what else was drawn; and other seeds and numbers draw other noise."""
    made, state = rows(ParticipationState(), MATRICES["independent"], range(1, 4))
    np.testing.assert_array_equal(replayed(state, MATRICES["independent"], SIZE), made)
    other, _ = rows(ParticipationState(), MATRICES["independent"], range(1, 4), seed=4)
    assert_independent(np.concatenate([made, other]))


def test_every_round_has_a_seed_of_256_bits_of_new_entropy() -> None:
    state = ParticipationState()
    for number in range(1, 41):
        _, state = state.row(BLT, number, 3, noise_generator())
    seeds = [int(seed, 16) for seed in state.seeds]
    assert {len(seed) for seed in state.seeds} == {64}
    assert len(set(seeds)) == 40
    # Of 256 bits each, every one is set in some round and not in another: 2 x 256 x 2^-40 that a fair one is not.
    assert (np.bitwise_or.reduce(seeds), np.bitwise_and.reduce(seeds)) == (2**256 - 1, 0)


@pytest.mark.parametrize("lost", [True, False], ids=["stored", "in memory"])
def test_two_copies_of_a_state_draw_other_noise_for_new_rounds(lost: bool) -> None:
    """Their models would differ by what the noise is to hide."""
    _, state = rows(ParticipationState(), BLT, [1, 2])
    copies = [stored(state) if lost else state for _ in range(2)]
    made = [copy.row(BLT, 3, SIZE, noise_generator()) for copy in copies]
    assert made[0][1].seeds[:2] == made[1][1].seeds[:2] == state.seeds
    # The difference of the two rows is that of their draws, which are independent: variance 2.
    assert np.mean((made[0][0] - made[1][0]) ** 2) == pytest.approx(2.0, rel=0.1)


def test_a_model_of_another_size_is_refused() -> None:
    """One buffer of length 1 would be added to every coordinate."""
    _, state = rows(ParticipationState(), BLT, [1], 1)
    with pytest.raises(ValueError, match="noise of 400 entries"):
        state.row(BLT, 2, 400, noise_generator())


# What is stored


@every_matrix
@pytest.mark.parametrize("before", [1, 2, 5])
def test_a_resumed_run_draws_what_it_would_have_drawn(matrix: Any, before: int) -> None:
    """To the last bit: a redrawn round with other noise is a second release."""
    made, _ = rows(ParticipationState(), matrix, range(1, 9), 50)
    first, state = rows(ParticipationState(), matrix, range(1, before + 1), 50)
    later, end = rows(stored(state), matrix, range(before + 1, 9), 50)
    np.testing.assert_array_equal(np.concatenate([first, later]), made)
    assert len(end.seeds) == 8
    # And once more, from what the resumed run has stored.
    state = stored(rows(stored(state), matrix, range(before + 1, 7), 50)[1])
    np.testing.assert_array_equal(rows(state, matrix, [7, 8], 50)[0], made[6:])


@every_matrix
@pytest.mark.parametrize("lost", [True, False], ids=["stored", "in memory"])
def test_a_round_that_was_charged_and_lost_stays_in_step(matrix: Any, lost: bool) -> None:
    """Its row is drawn and not used: round t has row t of C^-1 Z, whatever was lost before."""
    state = rows(ParticipationState(), matrix, [1, 2], 50)[1]
    skipped, after = rows(stored(state) if lost else state, matrix, [5, 7], 50)
    assert len(set(after.seeds)) == 7
    np.testing.assert_array_equal(skipped, replayed(after, matrix, 50)[[4, 6]])


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("lost", [True, False], ids=["stored", "in memory"])
def test_the_noise_of_a_round_is_never_drawn_twice(number: int, lost: bool) -> None:
    """Two releases with one noise differ by what the noise was to hide."""
    state = rows(ParticipationState(), BLT, [1, 3], 50)[1]
    with pytest.raises(RuntimeError, match=f"noise of round {number}: was drawn already; rounds 1 to 3"):
        (stored(state) if lost else state).row(BLT, number, 50, noise_generator())


@every_matrix
def test_other_draws_than_those_of_the_run_are_refused(matrix: Any) -> None:
    """Another NumPy may draw other numbers of the same seed: later rows would not cancel the noise of earlier ones."""
    state = stored(rows(ParticipationState(), matrix, range(1, 4), 50)[1])
    for wrong in (state.checksum + 1, state.checksum - 1, 0):
        with pytest.raises(RuntimeError, match=r"noise of rounds 1 to 3: NumPy .* draws other numbers than the run did"):
            replace(state, checksum=wrong).row(matrix, 4, 50, noise_generator())
    with pytest.raises(RuntimeError, match="draws other numbers"):
        replace(state, seeds=(*state.seeds[:2], "0" * 63 + "1")).row(matrix, 4, 50, noise_generator())
    with pytest.raises(RuntimeError, match="draws other numbers"):  # a model of another size
        state.row(matrix, 4, 51, noise_generator())


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("which", [0, 1])
def test_one_bit_of_one_draw_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch, place: int, which: int) -> None:
    """In any of the rounds so far, in the first coordinate or the last."""
    state = stored(rows(ParticipationState(), BLT, range(1, 4), 50)[1])
    real, counted = participation_state._Draws.__call__, itertools.count()

    class Changed:
        def __init__(self, rng: Any) -> None:
            self.rng = rng

        def standard_normal(self, size: int) -> np.ndarray:
            drawn: np.ndarray = self.rng.standard_normal(size)
            if next(counted) == 2 * place:  # the first of two draws of its round
                drawn[-which] *= 1 + 2.0**-50
            return drawn

    def call(draws: Any) -> np.ndarray:
        draws._rng = Changed(draws._rng)
        drawn: np.ndarray = real(draws)
        return drawn

    monkeypatch.setattr(participation_state._Draws, "__call__", call)
    with pytest.raises(RuntimeError, match="draws other numbers"):
        state.row(BLT, 4, 50, noise_generator())


def test_what_is_stored_is_small_and_has_no_noise() -> None:
    """The buffers are as large as the model, each; none is on the disk."""
    length = 100_000
    for matrix in MATRICES.values():
        _, state = rows(ParticipationState(), matrix, range(1, 4), length)
        content = dump_bytes(state)
        assert len(content) < 1000
        assert not any(struct.pack("<d", float(value)) in content for buffer in state.buffers or () for value in buffer[:100])
        read = load_bytes(content)
        assert read.buffers is None
        assert (read.seeds, read.checksum) == (state.seeds, state.checksum)
        assert 0 <= read.checksum < 2**62


def test_the_seed_is_in_no_text_of_the_state() -> None:
    """States are in tracebacks and logs; who knows the seed knows all noise."""
    _, state = ParticipationState().row(BLT, 1, 3, noise_generator())
    (seed,) = state.seeds
    for one in (state, stored(state)):
        for text in (repr(one), str(one), f"{one}", f"{one!r}"):
            assert seed not in text
            assert seed[:16] not in text
            assert str(int(seed, 16)) not in text


# Who took part


def test_participations_are_counted_by_name_and_stored() -> None:
    state = ParticipationState()
    for number, names in ((1, ("a", "b")), (4, ("a",)), (9, ("c", "a"))):
        state = replace(state, past=state.asked(names, number))
    by_hand = {
        "a": Participation(last=9, count=3),
        "b": Participation(last=1, count=1),
        "c": Participation(last=9, count=1),
    }
    assert state.past == by_hand
    read = stored(state)
    assert read.past == by_hand
    assert {type(each) for each in read.past.values()} == {Participation}
    assert state.asked((), 12) == by_hand


def test_noise_and_participations_do_not_change_each_other() -> None:
    state = replace(ParticipationState(), past=ParticipationState().asked(("a",), 1))
    _, after = rows(state, BLT, [1, 2], 5)
    assert after.past == state.past
    assert replace(after, past=after.asked(("b",), 3)).buffers is after.buffers


def test_a_state_of_independent_noise_has_no_seed() -> None:
    state = stored(replace(ParticipationState(), past=ParticipationState().asked(("a",), 1)))
    assert (state.seeds, state.checksum) == ((), 0)


def test_many_clients_are_stored_with_all_their_participations() -> None:
    past = {f"client-{number}": Participation(last=number + 1, count=number % 7 + 1) for number in range(10_000)}
    assert stored(ParticipationState(past=past)).past == past


def test_no_noise_is_in_the_text_of_the_state() -> None:
    row, state = ParticipationState().row(BLT, 1, 3, noise_generator())
    assert not any(f"{value:.5f}"[:7] in repr(state) for value in row)
