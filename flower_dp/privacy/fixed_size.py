"""Sampling without replacement under replace-one: the privacy loss distribution of a release on m of n units.

Exactly m of n units are drawn, each set of m with equal probability; g = m / n. Let d(x) be the hockey-stick profile of the
release itself: its least delta at epsilon x, when one of the m units is replaced. The sampled release's profile d' is at most

    d'(log(1 + g (e^x - 1))) = g d(x)     for x >= 0; (Balle, Barthe & Gaboardi 2018, Theorem 9)
    d'(-x) = 1 - e^-x (1 - d'(x))         for x > 0.  (replace-one is symmetric)

d' is the profile of one pair of distributions, which dominates all neighbors in both directions. So releases compose by
adding up the losses of their pairs (Zhu, Dong & Wang 2022, on dominating pairs), or the Renyi divergences of these pairs.
`docs/accounting.md` has the proof.
"""

import math
from collections.abc import Callable

import dp_accounting as dp
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import special

# epsilons >= 0 [k] -> deltas [k].
Profile = Callable[[np.ndarray], np.ndarray]

# Losses of Gaussian noise more than so many standard deviations above their mean count as infinite: a probability of 1e-19.
_TAIL = 9.0
# A distribution with more points takes too long; such an epsilon protects nobody.
MOST_POINTS = 2**23
# More than the error of a profile in float64, in parts of 1 + the sensitivity over the noise scale; added to the profile.
ROUNDING = 2.0**-50
# Nodes and weights of Gauss-Legendre integration on [-1, 1], and the most nodes of an integral: tens of milliseconds.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_MOST_NODES = 2**18
# Up to this e^x is far from the largest float.
_LARGE = 50.0


def distribution(release: dp.DpEvent, rate: float, grid: float) -> PrivacyLossDistribution:
    """Return a distribution of losses on a grid whose profile is nowhere below that of the sampled release, under replace-one.

    Args:
        release: one Gaussian or Laplace release with noise scale / *sensitivity* for its multiplier. The sensitivity of a
            replacement is twice the clip norm.
        rate: g = m / n, in (0, 1].
        grid: distance of neighboring losses.

    Raises:
        OverflowError: if the grid is too fine for losses of this size.
    """
    distance = 1 / release.noise_multiplier
    profile = gaussian_profile(distance) if isinstance(release, dp.GaussianDpEvent) else laplace_profile(distance)
    last = num_points(release, rate, grid)
    epsilons = grid * np.arange(last + 1)
    above = amplified(profile, rate, epsilons)
    below = mirrored(above[:0:-1], epsilons[:0:-1])
    deltas = np.minimum(1.0, np.concatenate([below, above]) + ROUNDING * (1 + distance))
    # The builder joins the points by straight lines in e^epsilon, where the profile is convex, and stays level beyond the last
    # one: nowhere below the profile.
    return PrivacyLossDistribution(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -last, last, deltas))


def divergence(release: dp.GaussianDpEvent, rate: float, order: float) -> float:
    """Return a bound on the Renyi divergence of the sampled release at an order, under replace-one.

    It is the divergence of the pair with the profile d'. Let P = (1 - g) N(0, 1) + g N(s, 1), Q = N(0, 1) and u = P / Q. That
    pair has the losses log u > 0 of P over Q, and those turned around. So the moment E_Q'[(P' / Q')^order] is

        1 + integral over x > s / 2 of (u^order - 1) (1 - u^(1 - order)) Q(x).

    If the integral would take too many points, the divergence without sampling is returned, which is never less.

    Args:
        release: one Gaussian release with noise std / *sensitivity* for its multiplier, 1 / s.
        rate: g = m / n, in (0, 1).
        order: above 1.
    """
    distance = 1 / float(release.noise_multiplier)
    # What is left out is less than 1e-18 of the integral: the integrand falls there as the density of N(order s, 1) does.
    last = (order - 0.5) * distance + _TAIL
    # The logarithm of u is analytic up to pi / s beside the real line, and each panel is far narrower.
    width = min(1.0, 1 / distance) / 2
    if not len(_NODES) * last < _MOST_NODES * width:
        return order * distance**2 / 2
    starts = width * np.arange(math.ceil(last / width))
    # Distances from s / 2, where u = 1.
    xs = (starts[:, None] + width * (_NODES + 1) / 2).ravel()
    exponents = distance * xs
    ratios = np.where(
        exponents < _LARGE,
        np.log1p(rate * np.expm1(np.minimum(exponents, _LARGE))),
        np.logaddexp(math.log(rate) + exponents, math.log1p(-rate)),
    )
    terms = order * ratios + np.log(-np.expm1(-order * ratios)) + np.log(-np.expm1((1 - order) * ratios))
    terms += np.log(np.tile(width * _WEIGHTS / 2, len(starts))) - (xs + distance / 2) ** 2 / 2
    log_excess = float(special.logsumexp(terms)) - math.log(2 * math.pi) / 2
    return float(np.logaddexp(0.0, log_excess)) / (order - 1)


def num_points(release: dp.DpEvent, rate: float, grid: float) -> int:
    """Return the number of losses above 0 of a Gaussian or Laplace release on a sample, on a grid.

    Raises:
        OverflowError: if there are too many.
    """
    last = max(1, math.ceil(largest_loss(release, rate) / grid))
    if last > MOST_POINTS:
        raise OverflowError(f"{release}: losses up to {last * grid:g} on a grid of {grid:g} are too many")
    return last


def largest_loss(release: dp.DpEvent, rate: float) -> float:
    """Return the loss of a Gaussian or Laplace release on a sample beyond which losses count as infinite."""
    distance = 1 / release.noise_multiplier
    largest = distance * (distance / 2 + _TAIL) if isinstance(release, dp.GaussianDpEvent) else distance
    return _amplified(largest, rate)


def amplified(profile: Profile, rate: float, epsilons: np.ndarray) -> np.ndarray:
    """Return the sampled release's deltas [k] at epsilons >= 0 [k]: g d(log(1 + (e^epsilon - 1) / g))."""
    deltas: np.ndarray = rate * profile(before_sampling(epsilons, rate))
    return deltas


def before_sampling(epsilons: np.ndarray, rate: float) -> np.ndarray:
    """Return log(1 + (e^epsilon - 1) / g) [k] for epsilons [k], without overflow; -inf up to log(1 - g)."""
    with np.errstate(divide="ignore"):
        small = np.log1p(np.maximum(-1.0, np.expm1(np.minimum(epsilons, 1.0)) / rate))
    large = epsilons - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(epsilons, 1.0)))
    before: np.ndarray = np.where(epsilons < 1, small, large)
    return before


def mirrored(deltas: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Return a symmetric profile's deltas [k] at -epsilons [k] from its deltas at epsilons > 0: 1 - e^-epsilon (1 - delta)."""
    whole: np.ndarray = np.exp(-epsilons) * deltas - np.expm1(-epsilons)
    return whole


def gaussian_profile(distance: float) -> Profile:
    """Return the profile of two normal distributions of variance 1 with means `distance` apart (Balle & Wang 2018, Theorem 8).

    It is ndtr(a) - e^epsilon ndtr(b) with a, b = +-distance / 2 - epsilon / distance. Both terms have the factor e^(-a^2 / 2),
    which is taken out: e^epsilon alone would overflow.
    """

    def profile(epsilons: np.ndarray) -> np.ndarray:
        a, b = distance / 2 - epsilons / distance, -distance / 2 - epsilons / distance
        density = np.exp(-a * a / 2)
        first = np.where(a < 0, density * special.erfcx(-np.minimum(a, 0.0) / math.sqrt(2)) / 2, special.ndtr(a))
        deltas: np.ndarray = np.maximum(0.0, first - density * special.erfcx(-b / math.sqrt(2)) / 2)
        return deltas

    return profile


def laplace_profile(distance: float) -> Profile:
    """Return the profile of Laplace noise of scale 1 on vectors at most `distance` apart in L1."""
    return lambda epsilons: -np.expm1(np.minimum(0.0, (epsilons - distance) / 2))


def _amplified(pure: float, rate: float) -> float:
    """Return log(1 + g (e^x - 1)), without overflow."""
    if pure < 1:
        return math.log1p(rate * math.expm1(pure))
    return pure + math.log(rate + (1 - rate) * math.exp(-pure))
