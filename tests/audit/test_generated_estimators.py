"""Audit estimators over generated mechanisms, errors and claims: sharp and valid outside the shipped cases too."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flower_dp.audit.audit import Claim, claimed_tradeoff
from flower_dp.audit.one_run import epsilon_lower_bound, p_value
from flower_dp.audit.tradeoffs import GaussianTradeoff, LaplaceTradeoff, SampledGaussianTradeoff
from tests.closed_forms import gaussian_epsilon
from tests.gaps import quickly

ADD, REPLACE = "add-or-remove-one", "replace-one"
RATES = np.concatenate([np.geomspace(1e-6, 0.02, 12), np.linspace(0.03, 0.97, 30)])


def of_densities(one, other, points):
    """The trade-off curve of two densities at these rates of false positives, by the Neyman-Pearson tests on a fine grid."""
    grid = np.linspace(-30, 40, 140_001)
    absent, present = one(grid), other(grid)
    absent, present = absent / absent.sum(), present / present.sum()
    order = np.argsort(-(present / np.maximum(absent, 1e-300)), kind="stable")
    return np.interp(points, np.cumsum(absent[order]), 1 - np.cumsum(present[order]))


def pair_of(kind, strength, rate):
    """The two densities of a kind of mechanism at a strength."""
    if kind == "gaussian":
        return stats.norm(0, 1).pdf, stats.norm(strength, 1).pdf
    if kind == "laplace":
        return stats.laplace(0, 1).pdf, stats.laplace(strength, 1).pdf
    here = stats.norm(0, 1).pdf
    if kind == "sampled":
        return here, lambda x: (1 - rate) * here(x) + rate * stats.norm(strength, 1).pdf(x)
    return tuple(lambda x, side=side: (1 - rate) * here(x) + rate * stats.norm(side * strength / 2, 1).pdf(x) for side in (-1, 1))


def estimator(kind, delta, rate):
    if kind == "gaussian":
        return GaussianTradeoff(delta=delta)
    if kind == "laplace":
        return LaplaceTradeoff()
    return SampledGaussianTradeoff(delta=delta, rate=rate, replaced=kind == "replaced")


kinds = st.sampled_from(["gaussian", "laplace", "sampled", "replaced"])


@quickly(16)
@given(kinds, st.floats(0.3, 4.0), st.floats(0.1, 0.9), st.sampled_from([1e-5, 1e-2, 0.1]))
def test_a_curve_is_that_of_the_mechanisms_densities_and_its_epsilon_too(kind, strength, rate, delta):
    made = estimator(kind, delta, rate)
    one, other = pair_of(kind, strength, rate)
    exact = of_densities(one, other, RATES)
    curve = made.curve(strength, RATES)
    assert (curve <= exact + 2e-4).all()
    np.testing.assert_allclose(curve, exact, atol=5e-4)
    found = np.asarray(made.strength(RATES, np.maximum(exact, 1e-9)))
    sure = (exact > 1e-3) & (exact < 0.97) & (RATES > 1e-3)
    assert (found[sure] <= strength * 1.01 + 2e-3).all()
    assert not sure.any() or found[sure].max() > 0.9 * strength - 0.05
    # Epsilon is where the hockey-stick divergence in both directions falls to delta.
    epsilon = made.epsilon(strength)
    grid = np.linspace(-30, 40, 140_001)
    width = grid[1] - grid[0]
    hockey = [float(np.maximum(p(grid) - math.exp(epsilon) * q(grid), 0).sum() * width) for p, q in ((one, other), (other, one))]
    if kind == "laplace":
        assert epsilon == strength
    elif epsilon > 0:
        assert max(hockey) == pytest.approx(delta, rel=2e-2)
    else:
        assert max(hockey) <= delta * 1.02


# One run


@quickly(40)
@given(st.integers(1, 40), st.integers(0, 60), st.floats(0.0, 1.0), st.floats(0.0, 4.0), st.sampled_from([0.0, 1e-4, 1e-2, 1.0]))
def test_the_bound_on_right_guesses_is_corollary_5_4_by_hand(num_guesses, abstained, part, epsilon, delta):
    num_canaries, correct = num_guesses + abstained, int(part * num_guesses)
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    law = [math.comb(num_guesses, k) * right**k * (1 - right) ** (num_guesses - k) for k in range(num_guesses + 1)]
    tail = sum(law[correct:])
    most = max((sum(law[correct - i : correct]) / i for i in range(1, correct + 1)), default=0.0)
    expected = min(1.0, tail + 2 * num_canaries * delta * most)
    words = {"num_guesses": num_guesses, "num_canaries": num_canaries, "delta": delta}
    assert p_value(correct, epsilon=epsilon, **words) == pytest.approx(expected, rel=1e-9)
    bound = epsilon_lower_bound(correct, confidence=0.9, **words)
    assert bound == 0 or p_value(correct, epsilon=bound * (1 - 1e-9), **words) < 0.1
    assert p_value(correct, epsilon=bound * (1 + 1e-9) + 1e-9, **words) >= 0.1 * (1 - 1e-6)


@quickly(8)
@given(st.floats(0.7, 4.0), st.sampled_from([ADD, REPLACE]))
def test_the_claimed_curve_is_that_of_the_gaussian_that_was_charged(multiplier, relation):
    claim = Claim(unit="client", relation=relation, epsilon=1.0, delta=1e-3, accountant="a", event=dp.GaussianDpEvent(multiplier))
    rates = np.linspace(0.01, 0.99, 15)
    mu = (2 if relation == REPLACE else 1) / multiplier
    exact = stats.norm.cdf(stats.norm.isf(rates) - mu)
    found = claimed_tradeoff(claim, rates)
    assert (found <= exact + 1e-9).all()
    np.testing.assert_allclose(found, exact, atol=0.02)
    # Its corner at the claim's own delta.
    epsilon = gaussian_epsilon([multiplier], relation, 1e-3)
    assert (found >= 1 - 1e-3 - math.exp(epsilon) * rates - 0.02).all()
