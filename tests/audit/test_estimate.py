"""Lower bounds from error rates and from right guesses: they hold, and each estimator's trade-off curve is the exact one."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flower_dp.audit.audit import Claim, claimed_tradeoff
from flower_dp.audit.estimate import Errors, errors_of, p_values, rate_bound
from flower_dp.audit.one_run import OneRunAudit, coins, epsilon_lower_bound, guesses_of_each, p_value
from flower_dp.audit.tradeoffs import GaussianTradeoff, HockeyStick, LaplaceTradeoff, SampledGaussianTradeoff
from tests.closed_forms import gaussian_epsilon
from tests.gaps import quickly

DELTA = 1e-3


def test_a_rate_is_above_its_bound_as_rarely_as_promised():
    """Exactly, from the binomial distribution: for every rate the bound misses with probability at most `miss`."""
    trials, miss = 60, 0.02
    bounds = rate_bound(np.arange(trials + 1), trials, miss)
    for rate in np.linspace(0.001, 0.999, 97):
        missed = stats.binom.pmf(np.arange(trials + 1), trials, rate)[bounds < rate].sum()
        assert missed <= miss * (1 + 1e-9)
    assert bounds[-1] == 1
    assert bounds[0] == pytest.approx(1 - miss ** (1 / trials))  # closed form


ESTIMATORS = [
    HockeyStick(delta=0.1),
    GaussianTradeoff(delta=DELTA),
    SampledGaussianTradeoff(delta=DELTA, rate=0.4),
    SampledGaussianTradeoff(delta=DELTA, rate=0.4, replaced=True),
    LaplaceTradeoff(),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda one: f"{one.name} {getattr(one, 'replaced', '')}")
@pytest.mark.parametrize("slope", [0.3, 4.0])
def test_a_true_strength_is_refuted_as_rarely_as_promised(estimator, slope):
    """Exactly: all errors that 10 trials can have, with their probabilities at every point of the curve."""
    trials, miss, strength = 10, 0.1, 1.2
    counts = np.arange(trials + 1)
    test = {"statistic": "a", "threshold": 0.0, "falling": False, "slope": slope, "trials": trials}
    refuted = np.zeros((trials + 1, trials + 1), bool)
    for wrong, missed in np.ndindex(refuted.shape):
        errors = Errors(**test, false_positives=wrong, false_negatives=missed)
        refuted[wrong, missed] = p_values(errors, estimator, miss=miss)(strength) <= miss
    assert refuted.any()
    rates = np.linspace(0.0, 1.0, 201)
    wrong = stats.binom.pmf(counts, trials, rates[:, None])
    missed = stats.binom.pmf(counts, trials, np.clip(estimator.curve(strength, rates), 0, 1)[:, None])
    assert ((wrong @ refuted * missed).sum(axis=1) <= miss).all()


def test_the_best_statistic_is_found_in_both_directions():
    rng = np.random.default_rng(1)
    scores = {"none": (rng.normal(size=800), rng.normal(size=800)), "falls": (rng.normal(size=800), rng.normal(size=800) - 3)}
    found = errors_of(scores, GaussianTradeoff(delta=DELTA), confidence=0.99)
    assert (found.statistic, found.falling, found.trials) == ("falls", True, 600)
    assert found.false_positives == int(np.sum(scores["falls"][0][200:] < found.threshold))
    assert found.false_negatives == int(np.sum(scores["falls"][1][200:] >= found.threshold))


# Curves of generated mechanisms

ADD, REPLACE = "add-or-remove-one", "replace-one"
RATES = np.concatenate([np.geomspace(1e-6, 0.02, 12), np.linspace(0.03, 0.97, 30)])


def of_densities(one, other, points):
    """The trade-off curve of two densities at these rates of false positives, by the Neyman-Pearson tests on a fine grid."""
    grid = np.linspace(-30, 40, 140_001)
    absent, present = one(grid), other(grid)
    absent, present = absent / absent.sum(), present / present.sum()
    order = np.argsort(-(present / np.maximum(absent, 1e-300)), kind="stable")
    return np.interp(points, np.cumsum(absent[order]), 1 - np.cumsum(present[order]))


def mixture(rate, mean):
    return lambda x: (1 - rate) * stats.norm.pdf(x) + rate * stats.norm.pdf(x, mean)


# Of every kind of mechanism its estimator, and its two densities at a strength.
KINDS = {
    "gaussian": lambda delta, rate: (GaussianTradeoff(delta=delta), lambda s: (mixture(0, s), mixture(1, s))),
    "laplace": lambda delta, rate: (LaplaceTradeoff(), lambda s: (stats.laplace(0).pdf, stats.laplace(s).pdf)),
    "sampled": lambda delta, rate: (
        SampledGaussianTradeoff(delta=delta, rate=rate),
        lambda s: (mixture(rate, 0), mixture(rate, s)),
    ),
    "replaced": lambda delta, rate: (
        SampledGaussianTradeoff(delta=delta, rate=rate, replaced=True),
        lambda s: (mixture(rate, -s / 2), mixture(rate, s / 2)),
    ),
}


@quickly(16)
@given(st.sampled_from(sorted(KINDS)), st.floats(0.3, 4.0), st.floats(0.1, 0.9), st.sampled_from([1e-5, 1e-2, 0.1]))
def test_a_curve_is_that_of_the_mechanisms_densities_and_its_epsilon_too(kind, strength, rate, delta):
    made, densities = KINDS[kind](delta, rate)
    one, other = densities(strength)
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


@pytest.mark.parametrize(
    ("num_canaries", "num_guesses", "num_correct", "delta", "printed"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],  # Appendix D, p. 46; section 7, p. 28
)
def test_bounds_printed_in_the_paper(num_canaries, num_guesses, num_correct, delta, printed):
    bound = epsilon_lower_bound(num_correct, num_guesses=num_guesses, num_canaries=num_canaries, delta=delta, confidence=0.95)
    assert bound == pytest.approx(printed, abs=1e-3)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_exact_p_value_of_leaky_randomized_response_is_never_above_the_bound(delta):
    """Each bit is told with probability delta, else by randomized response: (epsilon, delta)-private, and guessed as well as can be."""
    m, epsilon = 40, 1.0
    right = delta + (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    for correct in range(m + 1):
        exact = stats.binom.sf(correct - 1, m, right)
        assert exact <= p_value(correct, num_guesses=m, num_canaries=m, epsilon=epsilon, delta=delta) * (1 + 1e-12)


def test_an_audit_counts_its_guesses_and_compares_with_the_claim():
    choices = np.where(np.arange(200) < 90, 1, -1)
    words = {"unit": "client", "relation": "add-or-remove-one", "sees": "all models"}
    audit = OneRunAudit.of(lambda: choices * 1.0, choices, claimed=1.0, delta=1e-6, confidence=0.95, **words)
    each = audit.num_guesses // 2
    assert each == guesses_of_each(200, epsilon=1.0, delta=1e-6, confidence=0.95)
    assert audit.num_correct == min(each, 90) + each
    assert audit.refuted == (audit.lower_bound > 1.0)
    assert audit.to_dict()["claimed"] == 1.0
    wrong = OneRunAudit.of(lambda: -choices * 1.0, choices, claimed=1.0, delta=1e-6, confidence=0.95, **words)
    assert wrong.num_correct == max(0, each - 90) < wrong.num_guesses
    assert wrong.lower_bound == 0.0
    assert not wrong.refuted


def test_coins_are_fair_and_repeatable():
    made = coins(10_000, 3)
    assert set(made.tolist()) == {-1, 1}
    assert abs(made.sum()) < 4 * math.sqrt(10_000)
    assert (coins(100, 3) == coins(100, 3)).all()
    assert (coins(100, None) != coins(100, None)).any()


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
