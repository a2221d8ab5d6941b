"""Kinds of correlated noise, each with the strategy matrix that it has the least error with: BLT, BISR, banded, tree.

The error is the root mean squared error of the prefix sums at equal epsilon: sensitivity x prefix error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from flower_dp.core import checks
from flower_dp.core.strategy_matrix import (
    BandedInverseMatrix,
    BandedMatrix,
    BLTMatrix,
    ParticipationSchema,
    StrategyMatrix,
    TreeMatrix,
)

_MOST_BUFFERS = 5
_TRIED_BANDS = (1, 2, 4, 8, 16, 32, 64)


class CorrelatedNoise(Protocol):
    """A kind of correlated noise."""

    def matrix(self, schema: ParticipationSchema) -> StrategyMatrix:
        """Return the strategy matrix for these rounds and participations.

        Raises:
            ValueError: if this kind has none; the message names field and value.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BLT:
    """A buffered linear Toeplitz matrix with few buffers, by numerical optimization (McMahan, Xu & Zhang 2024).

    Attributes:
        num_buffers: number of buffers, each as large as the model; 1 to 5. More than 2 lower the error by up to 1 % in runs of
            1,000 rounds, and by 1 to 3 % in longer ones.

    Example:
        >>> from flower_dp.core.strategy_matrix import ParticipationSchema
        >>> from flower_dp.planning.correlated_noise import BLT
        >>> schema = ParticipationSchema(num_rounds=1000, min_separation=200, max_participations=5)
        >>> matrix = BLT().matrix(schema)
        >>> round(matrix.sensitivity(schema) * matrix.prefix_error(1000), 3)
        7.657
    """

    num_buffers: int = 2

    def __post_init__(self) -> None:
        checks.integer("num_buffers", self.num_buffers, at_least=1, at_most=_MOST_BUFFERS)

    def matrix(self, schema: ParticipationSchema) -> BLTMatrix:
        """Return the matrix with the least error that the optimization finds."""
        return _blt(self.num_buffers, schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class BISR:
    """The banded inverse square root, in closed form (Kalinin, McKenna, Upadhyay & Lampert 2025).

    Attributes:
        bands: number of bands of C^-1; the server keeps one draw fewer. None: the power of 2 up to 64 with the least error.

    Example:
        >>> from flower_dp.core.strategy_matrix import ParticipationSchema
        >>> from flower_dp.strategies import BISR
        >>> schema = ParticipationSchema(num_rounds=1000, min_separation=200, max_participations=5)
        >>> matrix = BISR().matrix(schema)
        >>> round(matrix.sensitivity(schema) * matrix.prefix_error(1000), 2)
        7.88
    """

    bands: int | None = None

    def __post_init__(self) -> None:
        if self.bands is not None:
            checks.integer("bands", self.bands, at_least=1)

    def matrix(self, schema: ParticipationSchema) -> BandedInverseMatrix:
        """Return the first bands of the square root of the inverse of prefix sums: the coefficients of (1 - x)^(1/2)."""
        tried = _TRIED_BANDS if self.bands is None else (self.bands,)
        made = [BandedInverseMatrix(bands=_powers(-0.5, min(bands, schema.num_rounds))) for bands in tried]
        return min(made, key=lambda matrix: error(matrix, schema)) if len(made) > 1 else made[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Banded:
    """A banded Toeplitz matrix, by numerical optimization (Choquette-Choo et al. 2023).

    Attributes:
        bands: number of bands, at most `min_separation`: then no participations of one client overlap. The server keeps one
            earlier row fewer.

    Example:
        >>> from flower_dp.core.strategy_matrix import ParticipationSchema
        >>> from flower_dp.strategies import Banded
        >>> schema = ParticipationSchema(num_rounds=1000, min_separation=200, max_participations=5)
        >>> matrix = Banded(bands=200).matrix(schema)
        >>> round(matrix.sensitivity(schema) * matrix.prefix_error(1000), 2)
        7.36
    """

    bands: int

    def __post_init__(self) -> None:
        checks.integer("bands", self.bands, at_least=1)

    def matrix(self, schema: ParticipationSchema) -> BandedMatrix:
        """Return the matrix with the least error.

        Raises:
            ValueError: for more bands than `min_separation`.
        """
        if self.bands > schema.min_separation:
            why = f"must be at most min_separation={schema.min_separation}, so that participations do not overlap"
            raise checks.refusal("bands", self.bands, why)
        return _banded(min(self.bands, schema.num_rounds), schema.num_rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A binary tree of partial sums: the first DP-FTRL (Kairouz et al. 2021), for comparisons.

    Example:
        >>> from flower_dp.core.strategy_matrix import ParticipationSchema
        >>> from flower_dp.strategies import Tree
        >>> schema = ParticipationSchema(num_rounds=1000, min_separation=200, max_participations=5)
        >>> matrix = Tree().matrix(schema)
        >>> round(matrix.sensitivity(schema) * matrix.prefix_error(1000), 2)
        12.9
    """

    def matrix(self, schema: ParticipationSchema) -> TreeMatrix:
        """Return the tree, which is the same for all rounds and participations."""
        return TreeMatrix()


def noise_named(kind: str, *, num_buffers: int = 0, bands: int = 0) -> BLT | BISR | Banded | Tree:
    """Return the noise of settings, where 0 stands for the default.

    Raises:
        ValueError: for an unknown kind, or a number that it does not read.
    """
    checks.one_of("noise", kind, ("blt", "bisr", "banded", "tree"))
    for name, value, readers in (("bands", bands, ("bisr", "banded")), ("num-buffers", num_buffers, ("blt",))):
        if value and kind not in readers:
            raise checks.refusal(name, value, f"is not read with noise={kind!r}, but with {' or '.join(readers)}")
    if kind == "banded" and not bands:
        raise checks.refusal("bands", bands, "must be set with noise='banded', to at most min-separation")
    if kind == "banded":
        return Banded(bands=bands)
    if kind == "bisr":
        return BISR(bands=bands or None)
    return BLT(num_buffers=num_buffers or 2) if kind == "blt" else Tree()


def error(matrix: StrategyMatrix, schema: ParticipationSchema) -> float:
    """Return the root mean squared error of the prefix sums at noise multiplier 1 of the whole run."""
    return matrix.sensitivity(schema) * matrix.prefix_error(schema.num_rounds)


def _short(number: float) -> float:
    """Return a number >= 0 rounded down to four digits."""
    if number <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(number)) - 3)
    return math.floor(number / step) * step


def _powers(exponent: float, count: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^-exponent."""
    steps = np.arange(1, count)
    return tuple(np.cumprod(np.concatenate([[1.0], (steps - 1 + exponent) / steps])).tolist())


@lru_cache(maxsize=64)
def _banded(bands: int, num_rounds: int) -> BandedMatrix:
    """Minimize log(mean squared prefix error) + log(squared norm of the column), with the gradient by the adjoint.

    The variables are the entries of the column. If that fails, they are the logits of the ratios of neighboring entries: then the
    column always falls, so that its inverse does not grow, but many bands take seconds.
    """
    from scipy.optimize import minimize  # noqa: PLC0415  (slow to import)
    from scipy.signal import correlate, lfilter  # noqa: PLC0415
    from scipy.special import expit, logit  # noqa: PLC0415

    if bands == 1:
        return BandedMatrix(bands=(1.0,))
    weights = np.arange(num_rounds, 0, -1) / num_rounds

    def loss(others: np.ndarray) -> tuple[float, np.ndarray]:
        column = np.concatenate([[1.0], others])
        sums = lfilter([1.0], column, np.ones(num_rounds))
        squared, norm = float(weights @ sums**2), float(column @ column)
        if not squared * norm < 1e30:  # the inverse grows
            return 1e3, np.zeros_like(others)
        adjoint = lfilter([1.0], column, (2 * weights * sums)[::-1])[::-1]
        slopes = -correlate(adjoint, sums, mode="full", method="fft")[num_rounds - 1 : num_rounds - 1 + bands]
        return math.log(squared * norm), (slopes / squared + 2 * column / norm)[1:]

    def of_logits(logits: np.ndarray) -> tuple[float, np.ndarray]:
        others = np.cumprod(expit(logits))
        value, slopes = loss(others)
        return value, expit(-logits) * np.cumsum((slopes * others)[::-1])[::-1]

    start, options = np.asarray(_powers(0.5, bands)), {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    with np.errstate(all="ignore"):
        found = minimize(loss, start[1:], jac=True, method="L-BFGS-B", options=options)
    column = np.concatenate([[1.0], found.x])
    if not found.success or not found.fun < loss(start[1:])[0] or np.any(np.diff(column) > 0):
        found = minimize(of_logits, logit(start[1:] / start[:-1]), jac=True, method="L-BFGS-B", options=options)
        column = np.concatenate([[1.0], np.cumprod(expit(found.x))])
    return BandedMatrix(bands=tuple(np.round(column, 6).tolist()))


@lru_cache(maxsize=64)
def _blt(num_buffers: int, schema: ParticipationSchema) -> BLTMatrix:
    """Minimize the error over decays and scales, from starts with one more buffer than the optimum before.

    The variables are the logits of the decays, logarithms of the shares of the scales, and the logit of their sum, which stays
    below 1: then the column does not increase.
    """
    from scipy.optimize import minimize  # noqa: PLC0415  (slow to import)
    from scipy.special import expit, logit, softmax  # noqa: PLC0415

    def matrix(point: np.ndarray) -> BLTMatrix:
        decays = expit(point[:num_buffers])
        scales = softmax(point[num_buffers:-1]) * expit(point[-1]) * (1 - 1e-12)
        order = np.argsort(-decays)
        return BLTMatrix(decays=tuple(decays[order].tolist()), scales=tuple(scales[order].tolist()))

    def rounded(found: BLTMatrix) -> BLTMatrix:
        decays, scales = (1 - _short(1 - decay) for decay in found.decays), map(_short, found.scales)
        return BLTMatrix(decays=tuple(decays), scales=tuple(scales))

    def loss(point: np.ndarray) -> float:
        with np.errstate(all="ignore"):
            value = math.log(error(matrix(point), schema))
        return value if math.isfinite(value) else 1e3

    def start(decays: np.ndarray, scales: np.ndarray, total: float) -> np.ndarray:
        decays = np.clip(decays, 1e-6, 1 - 1e-9)
        return np.concatenate([logit(decays), np.log(np.maximum(scales, 1e-9)), [logit(max(total, 1e-6))]])

    # Memories of all lengths, with weights that fall slowly or fast with the length.
    decays = 1 - np.geomspace(0.6, min(0.5, 2 / schema.num_rounds), num_buffers)
    starts, before = [start(decays, (1 - decays) ** power, 0.7) for power in (0.5, 1.0)], None
    if num_buffers > 1:  # and the optimum with one buffer fewer, with a shorter or a longer memory than all of its own
        before = _blt(num_buffers - 1, schema)
        for decay, scale in ((0.6 * before.decays[-1], 0.1), (1 - (1 - before.decays[0]) / 8, 0.01)):
            starts.append(
                start(np.array([*before.decays, decay]), np.array([*before.scales, scale]), min(sum(before.scales), 0.9))
            )
    found = [minimize(loss, point, method="BFGS", options={"gtol": 1e-6, "maxiter": 60}).x for point in starts]
    best = minimize(loss, min(found, key=loss), method="BFGS", options={"gtol": 1e-8, "maxiter": 500}).x
    made = [rounded(matrix(best))]  # the error is flat there: other processors find the same digits, with few exceptions
    if before is not None:  # never worse than with one buffer fewer
        made.append(BLTMatrix(decays=(*before.decays, 0.5 * before.decays[-1]), scales=(*before.scales, 0.0)))
    return min(made, key=lambda one: error(one, schema))
