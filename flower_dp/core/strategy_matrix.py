"""Strategy matrices C of correlated noise: the sensitivity of C, the error of prefix sums, and the rows of C^-1 Z, one a round.

Round t releases x_t + (C^-1 Z)_t with independent Gaussian Z. That is a function of C x + Z, so one Gaussian event covers all
rounds: its sensitivity is the largest norm of C x for one client (Denisov et al. 2022). The model is a prefix sum of what is
released, and most of the noise of earlier rounds cancels in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

# The rows of noise from which the next ones are made [d] each; they are never changed in place.
Buffers = tuple[np.ndarray, ...]
Draw = Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipationSchema:
    """The rounds in which one client may take part: at most `max_participations`, each `min_separation` after the last or later.

    Attributes:
        num_rounds: number of rounds (paper: n).
        min_separation: least difference of the numbers of two rounds of a client (paper: b).
        max_participations: largest number of participations (paper: k).
    """

    num_rounds: int
    min_separation: int
    max_participations: int


class StrategyMatrix(Protocol):
    """A lower triangular matrix C, or a tree of partial sums, for a number of rounds."""

    def sensitivity(self, schema: ParticipationSchema) -> float:
        """Return an upper bound of the L2 norm of C x, if each row of x that is not zero has norm 1, over all patterns.

        Raises:
            ValueError: if no bound is proved for this matrix.
        """

    def prefix_error(self, num_rounds: int) -> float:
        """Return the root mean squared error of the prefix sums of C^-1 Z, each coordinate of Z with variance 1."""

    def row(self, number: int, buffers: Buffers, draw: Draw) -> tuple[np.ndarray, Buffers]:
        """Return row `number` (from 1) of C^-1 Z [d], and the next buffers.

        Args:
            number: number of the row.
            buffers: result of the row before; empty for the first.
            draw: function that draws new standard Gaussian noise [d]; the same draws in the same order make the same rows.
        """

    @property
    def digest(self) -> str:
        """A short hash of the matrix: two processes add to the same noise only if it is the same."""


class _Toeplitz:
    """A lower triangular Toeplitz matrix C with diagonal 1, by its first column."""

    def column(self, num_rounds: int) -> np.ndarray:
        """Return the first column of C [num_rounds]."""
        raise NotImplementedError

    def inverse_column(self, num_rounds: int) -> np.ndarray:
        """Return the first column of C^-1 [num_rounds]."""
        from scipy.signal import lfilter  # noqa: PLC0415  (slow to import)

        made: np.ndarray = lfilter([1.0], self.column(num_rounds), np.eye(1, num_rounds)[0])
        return made

    def sensitivity(self, schema: ParticipationSchema) -> float:
        """Return the norm of the sum of the columns of participations 1, 1 + b, 1 + 2b, ...

        It is the largest over all patterns if the column is nonnegative and does not increase (Kalinin & Lampert 2024, theorem
        2). If the column is no longer than b, columns of one client never overlap, and it is sqrt(k) times the norm of one.
        """
        column, separation = self.column(schema.num_rounds), schema.min_separation
        if not np.any(column[separation:]):
            return math.sqrt(schema.max_participations) * float(np.linalg.norm(column))
        if np.any(column < 0) or np.any(np.diff(column) > 0):
            problem = f"its column must not increase, or have at most {separation} entries"
            raise ValueError(f"{self!r}: has no proved sensitivity: {problem}")
        total = np.zeros(schema.num_rounds)
        for start in range(0, min(schema.max_participations * separation, schema.num_rounds), separation):
            total[start:] += column[: schema.num_rounds - start]
        return float(np.linalg.norm(total))

    def prefix_error(self, num_rounds: int) -> float:
        """Return the error: prefix sum t has the variance of the first t sums of the inverse's column."""
        sums = np.cumsum(self.inverse_column(num_rounds))
        return math.sqrt(float(np.mean(np.cumsum(sums**2))))

    @property
    def digest(self) -> str:
        """A short hash of the parameters, to the last bit."""
        return hashlib.sha256(repr((type(self).__name__, *vars(self).values())).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class BLTMatrix(_Toeplitz):
    """Buffered linear Toeplitz: c_0 = 1, c_j = sum over i of scales_i x decays_i^(j - 1) (Dvijotham et al. 2024).

    The next row needs one buffer for each decay, however many rounds there are.

    Attributes:
        decays: the decay of each buffer, in [0, 1).
        scales: the weight of each buffer, >= 0; their sum is at most 1, so that the column does not increase.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    def column(self, num_rounds: int) -> np.ndarray:
        """Return the first column of C."""
        powers = np.asarray(self.decays)[:, None] ** np.arange(num_rounds - 1)
        return np.concatenate([[1.0], np.asarray(self.scales) @ powers])

    def inverse_column(self, num_rounds: int) -> np.ndarray:
        """Return the first column of C^-1, whose generating function is a quotient of two short polynomials."""
        from scipy.signal import lfilter  # noqa: PLC0415  (slow to import)

        below = np.atleast_1d(np.poly(self.decays))
        above = below.copy()
        for place, scale in enumerate(self.scales):
            above[1:] += scale * np.atleast_1d(np.poly(np.delete(self.decays, place)))
        made: np.ndarray = lfilter(below, above, np.eye(1, num_rounds)[0])
        return made

    def row(self, number: int, buffers: Buffers, draw: Draw) -> tuple[np.ndarray, Buffers]:
        """Return the next row n of C^-1 Z: z - sum of scales_i s_i; then s_i becomes decays_i s_i + n."""
        made = draw()
        for scale, kept in zip(self.scales, buffers, strict=False):
            made -= scale * kept
        if not buffers:
            return made, (made,) * len(self.decays)
        return made, tuple(decay * kept + made for decay, kept in zip(self.decays, buffers, strict=True))


@dataclass(frozen=True, kw_only=True)
class BandedMatrix(_Toeplitz):
    """A banded matrix C (Choquette-Choo et al. 2023): the next row needs the last rows, one fewer than there are bands.

    Attributes:
        bands: the first column of C, as long as it is not zero.
    """

    bands: tuple[float, ...] = field(repr=False)

    def column(self, num_rounds: int) -> np.ndarray:
        """Return the first column of C."""
        return np.pad(self.bands, (0, max(0, num_rounds - len(self.bands))))[:num_rounds]

    def row(self, number: int, buffers: Buffers, draw: Draw) -> tuple[np.ndarray, Buffers]:
        """Return the next row n_t of C^-1 Z: z_t - sum of c_j n_(t - j)."""
        made = draw()
        for band, kept in zip(self.bands[1:], buffers, strict=False):
            made -= band * kept
        return made, (made, *buffers)[: len(self.bands) - 1]


@dataclass(frozen=True, kw_only=True)
class BandedInverseMatrix(_Toeplitz):
    """A matrix C whose inverse is banded: the next row needs the last draws, one fewer than there are bands.

    Attributes:
        bands: the first column of C^-1, as long as it is not zero.
    """

    bands: tuple[float, ...] = field(repr=False)

    def column(self, num_rounds: int) -> np.ndarray:
        """Return the first column of C."""
        return _Toeplitz.inverse_column(BandedMatrix(bands=self.bands), num_rounds)

    def inverse_column(self, num_rounds: int) -> np.ndarray:
        """Return the first column of C^-1."""
        return BandedMatrix(bands=self.bands).column(num_rounds)

    def row(self, number: int, buffers: Buffers, draw: Draw) -> tuple[np.ndarray, Buffers]:
        """Return the next row of C^-1 Z: sum of bands_j z_(t - j)."""
        drawn = draw()
        made = drawn.copy()
        for band, kept in zip(self.bands[1:], buffers, strict=False):
            made += band * kept
        return made, (drawn, *buffers)[: len(self.bands) - 1]


@dataclass(frozen=True, kw_only=True)
class TreeMatrix:
    """A binary tree of partial sums, each with its own noise, and the best estimate from the nodes that are complete.

    Every complete block of 1, 2, 4, ... rounds has a noised sum. The estimate of a block weighs its own sum against that of its
    two halves (Honaker 2015; Kairouz et al. 2021, appendix D.3).
    """

    digest: ClassVar[str] = "tree"

    def sensitivity(self, schema: ParticipationSchema) -> float:
        """Return an upper bound: at each level of the tree, participations count in as few blocks as the separation allows."""
        squared = 0.0
        for level in range(schema.num_rounds.bit_length()):
            size = 2**level
            left = schema.max_participations
            most = min(left, -(-size // schema.min_separation))
            for _ in range(schema.num_rounds // size):
                squared += min(most, left) ** 2
                left -= min(most, left)
        return math.sqrt(squared)

    @cached_property
    def _variances(self) -> tuple[float, ...]:
        """The variance of the estimate of a complete block, by its level."""
        made = [1.0]
        while len(made) < 64:
            made.append(1 / (1 + 1 / (2 * made[-1])))
        return tuple(made)

    def prefix_error(self, num_rounds: int) -> float:
        """Return the error: the variance of prefix t is that of the blocks whose sizes are the binary digits of t."""
        counts = np.arange(1, num_rounds + 1)
        total = sum(((counts >> level) & 1) * self._variances[level] for level in range(num_rounds.bit_length()))
        return math.sqrt(float(np.mean(total)))

    def row(self, number: int, buffers: Buffers, draw: Draw) -> tuple[np.ndarray, Buffers]:
        """Return the difference of the noise of two prefix sums; the buffers are the noise of complete blocks, largest first."""
        block, kept, before = draw(), list(buffers), -sum(buffers, np.zeros(()))
        for level in range(1, (number & -number).bit_length()):
            halves = block + kept.pop()
            own = self._variances[level]
            block = own * draw() + (1 - own) * halves
        return block + sum(kept, before), (*kept, block)
