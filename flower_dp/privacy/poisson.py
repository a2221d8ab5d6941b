"""Poisson sampling of Gaussian releases: the privacy loss distribution of one release, by dp-accounting but faster.

dp-accounting defines the pair of distributions, the range of its losses and the builder. Its own loop over the grid takes some
seven microseconds a point in Python. A run's plan, and a calibration for each of many clients, need millions of points.

Renyi divergences of the pairs are here, too: dp-accounting has none for replace-one, and between whole orders its bounds for
add-or-remove-one may be many times too large.
"""

import math

import dp_accounting as dp
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy import special

from flower_dp.privacy.events import Relation
from flower_dp.privacy.fixed_size import MOST_POINTS, ROUNDING, before_sampling

_PAIRS = {"add-or-remove-one": (AdjacencyType.REMOVE, AdjacencyType.ADD), "replace-one": (AdjacencyType.REPLACE,)}
# Most points of an integral: tens of milliseconds.
_MOST_NODES = 2**18
# More than float64 loses of a few terms, in parts of them.
_EPSILON = 2.0**-50
# Up to this e^x is far from the largest float.
_LARGE = 50.0


def distribution(release: dp.GaussianDpEvent, rate: float, grid: float, relation: Relation) -> PrivacyLossDistribution:
    """Return a distribution of losses on a grid whose profile is nowhere below that of the sampled release.

    Args:
        release: one Gaussian release, with noise std / clip norm for its multiplier.
        rate: the probability with which each unit takes part, in (0, 1).
        grid: distance of neighboring losses.
        relation: neighboring relation; a replaced unit moves the sum by up to twice the clip norm.

    Raises:
        OverflowError: if the grid is too fine for losses of this size.
    """
    return PrivacyLossDistribution(*(_losses(release, rate, grid, adjacency) for adjacency in _PAIRS[relation]))


def replaced_divergence(release: dp.GaussianDpEvent, rate: float, order: float) -> float:
    """Return the Renyi divergence of one sampled release under replace-one; infinite if it would take too many points.

    Let P = (1 - q) N(0, std^2) + q N(-1, std^2) and Q = (1 - q) N(0, std^2) + q N(1, std^2). The pair of P and Q dominates the
    release (`docs/accounting.md` has the proof), so its divergence bounds that of every pair of neighbors.

    Args:
        release: one Gaussian release, with noise std / clip norm for its multiplier.
        rate: the probability q with which each unit takes part, in (0, 1).
        order: above 1.
    """
    return _divergence(release.noise_multiplier, rate, order, replaced=True)


def removed_divergence(release: dp.GaussianDpEvent, rate: float, order: float) -> float:
    """Return the Renyi divergence of one sampled release under add-or-remove-one, as `replaced_divergence`.

    The pair is that P and N(0, std^2). The divergence in the other direction is never more (Mironov, Talwar & Zhang 2019,
    Theorem 5).
    """
    return _divergence(release.noise_multiplier, rate, order, replaced=False)


def _divergence(std: float, rate: float, order: float, *, replaced: bool) -> float:
    """Return the divergence of P from Q, or from N(0, std^2).

    The integral of P^order Q^(1 - order) is a sum over equidistant points: for an integrand that is analytic near the real line,
    its error falls exponentially in their number.
    """
    # The density of N(0, std^2) is analytic everywhere; the ratios to it are, up to pi std^2 beside the real line.
    step = min(std, std**2) / 4
    # What is left out is less than 1e-18 of the integral: right of the points P < Q, and left of 1 - 2 order the integrand falls
    # at least as a normal density does.
    first, last = 1 - 2 * order - 9 * std, 0.5 + 9 * std
    if not last - first < _MOST_NODES * step:
        return math.inf
    xs = np.arange(first, last + step, step)
    with_unit, other = _log_mixed(-xs, std, rate), _log_mixed(xs, std, rate) if replaced else np.zeros_like(xs)
    terms = order * with_unit, (1 - order) * other, -0.5 * (xs / std) ** 2
    moment = float(special.logsumexp(sum(terms))) + math.log(step / std) - 0.5 * math.log(2 * math.pi)
    # The terms may cancel out if the moment is small.
    rounding = _EPSILON * float(np.max(sum(map(np.abs, terms))))
    return (max(0.0, moment) + rounding) / (order - 1)


def _log_mixed(moved: np.ndarray, std: float, rate: float) -> np.ndarray:
    """Return the logarithm of 1 - q + q e^((moved - 1/2) / std^2): a mixture over the density without the unit."""
    exponents = (moved - 0.5) / std**2
    small = np.log1p(rate * np.expm1(np.minimum(exponents, _LARGE)))
    mixed: np.ndarray = np.where(exponents < _LARGE, small, np.logaddexp(np.log1p(-rate), math.log(rate) + exponents))
    return mixed


def _losses(release: dp.GaussianDpEvent, rate: float, grid: float, adjacency: AdjacencyType) -> pld_pmf.PLDPmf:
    """Return the distribution of the losses of one of the pairs, in one direction."""
    pair = GaussianPrivacyLoss(release.noise_multiplier, sampling_prob=rate, adjacency_type=adjacency)
    bounds = pair.connect_dots_bounds()
    first, last = int(np.floor(bounds.epsilon_lower / grid)), int(np.ceil(bounds.epsilon_upper / grid))
    if last - first > MOST_POINTS:
        raise OverflowError(f"{release}: losses from {first * grid:g} to {last * grid:g} on a grid of {grid:g} are too many")
    epsilons = grid * np.arange(first, last + 1)
    # The losses fall with x, so that this is the hockey-stick divergence; at any other cut it would be less.
    cuts = _cuts(release.noise_multiplier, rate, epsilons, adjacency)
    deltas = pair.mu_upper_cdf(cuts) - np.exp(epsilons + pair.mu_lower_log_cdf(cuts))
    deltas = np.clip(deltas + ROUNDING, -np.expm1(np.minimum(0.0, epsilons)), 1.0)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, deltas)


def _cuts(std: float, rate: float, epsilons: np.ndarray, adjacency: AdjacencyType) -> np.ndarray:
    """Return the points [k] up to which losses are at least epsilons [k]; -inf if no loss is, inf if every one is.

    Without the unit the release is N(0, std^2); with it, N(-1, std^2), or N(1, std^2) with what replaces it.
    """
    if adjacency is AdjacencyType.REPLACE:
        # The loss is log((1 - q + q e^-(x + 1/2) / std^2) / (1 - q + q e^(x - 1/2) / std^2)), an odd function.
        half = np.abs(epsilons) / 2
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - np.log(2)
        product = log_sinh + 0.5 / std**2 + np.log1p(-rate) - np.log(rate)
        arsinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2 * product), product)
        cuts: np.ndarray = -(std**2) * (np.sign(epsilons) * arsinh + epsilons / 2)
        return cuts
    if adjacency is AdjacencyType.REMOVE:
        return -0.5 - std**2 * before_sampling(epsilons, rate)
    return 0.5 + std**2 * before_sampling(-epsilons, rate)
