"""Audit estimators over generated mechanisms, errors and claims: sharp and valid outside the shipped cases too."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flower_dp.audit.audit import Claim, claimed_tradeoff
from flower_dp.audit.estimate import Errors, errors_of, lower_bound, p_values
from flower_dp.audit.one_run import coins, epsilon_lower_bound, guess, guesses_of_each, p_value
from flower_dp.audit.one_run_clients import ClientCanaries
from flower_dp.audit.tradeoffs import GaussianTradeoff, HockeyStick, LaplaceTradeoff, SampledGaussianTradeoff
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


# Errors and what they prove


@quickly(25)
@given(
    kinds,
    st.floats(0.2, 3.0),
    st.floats(0.2, 0.8),
    st.integers(20, 60),
    st.floats(0.0, 0.6),
    st.floats(0.0, 0.6),
    st.floats(0.1, 8.0),
    st.sampled_from([0.9, 0.99]),
)
def test_a_p_value_is_no_less_than_the_probability_of_so_few_errors_on_the_curve(
    kind, strength, rate, n, x, y, slope, confidence
):
    """Exactly, over all counts of errors: for every rate of false positives, with the least false negatives that there can be."""
    made = estimator(kind, 1e-3, rate)
    wrong, missed = int(x * n), int(y * n)
    errors = Errors(
        statistic="s", threshold=0.0, falling=False, slope=slope, trials=n, false_positives=wrong, false_negatives=missed
    )
    value = p_values(errors, made, miss=1 - confidence)(strength)
    counts = np.arange(n + 1)
    worst = 0.0
    # Rates beyond the interval are left to the twentieth of the error probability that it has.
    sure = stats.beta.ppf(
        [0.025 * (1 - confidence), 1 - 0.025 * (1 - confidence)],
        [max(wrong, 1e-9), wrong + 1],
        [n - wrong + 1, max(n - wrong, 1e-9)],
    )
    for false_positives in np.linspace(sure[0] if wrong else 0.0, sure[1] if wrong < n else 1.0, 60):
        false_negatives = float(made.curve(strength, np.array([false_positives]))[0])
        one, two = stats.binom.pmf(counts, n, false_positives), stats.binom.pmf(counts, n, false_negatives)
        fewer = slope * counts[:, None] + counts[None, :] <= slope * wrong + missed + 1e-9
        worst = max(worst, float((one[:, None] * two[None, :] * fewer).sum()))
    assert min(1.0, worst + 0.05 * (1 - confidence) * 0.999) <= value + 1e-9
    assert value <= min(1.0, 1.25 * worst + 0.06 * (1 - confidence) + 1e-3)
    bound = lower_bound(errors, made, confidence=confidence)
    refuted = p_values(errors, made, miss=1 - confidence)
    assert bound == 0 or refuted(bound * 0.999) <= 1 - confidence
    assert bound > 500 or refuted(bound + 1e-3 + bound * 1e-3) > 1 - confidence  # more than any sample with this rate can show


@quickly(12)
@given(st.floats(0.8, 3.0), st.booleans(), st.integers(400, 1500), st.sampled_from([0.25, 0.5]), st.integers(0, 10**6))
def test_the_errors_are_those_of_the_best_statistic_on_the_other_trials(mu, falling, trials, held_out, seed):
    rng = np.random.default_rng(seed)
    sign = -1 if falling else 1
    scores = {
        "nothing": (rng.normal(size=trials), rng.normal(size=trials)),
        "all": (sign * rng.normal(0, 1, trials), sign * rng.normal(mu, 1, trials)),
        "some": (sign * rng.normal(0, 1, trials), sign * rng.normal(mu / 4, 1, trials)),
    }
    found = errors_of(scores, GaussianTradeoff(delta=1e-3), confidence=0.99, held_out=held_out)
    first = int(held_out * trials)
    assert (found.statistic, found.falling, found.trials) == ("all", falling, trials - first)
    absent, present = (sign * one[first:] for one in scores["all"])
    cut = sign * found.threshold
    assert (found.false_positives, found.false_negatives) == ((absent > cut).sum(), (present <= cut).sum())
    # The slope of the curve where the threshold is: the likelihood ratio there.
    assert math.log(found.slope) == pytest.approx(mu * cut - mu**2 / 2, abs=1.0 + mu / 2)
    bound = lower_bound(found, GaussianTradeoff(delta=1e-3), confidence=0.99)
    assert 0.55 * mu - 0.1 < bound <= mu * (1 + 4 / math.sqrt(trials)) + 0.1


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


@quickly(25)
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=30), st.data())
def test_guesses_are_on_the_extremes_alone(scores, data):
    each = data.draw(st.integers(0, len(scores) // 2))
    made = guess(np.array(scores, float), each)
    assert [int((made == sign).sum()) for sign in (1, -1)] == [each, each]
    middle = [score for score, one in zip(scores, made, strict=True) if one == 0]
    high, low = ([score for score, one in zip(scores, made, strict=True) if one == sign] for sign in (1, -1))
    assert min(high, default=5) >= max([*middle, *low], default=-5)
    assert max(low, default=-5) <= min([*middle, *high], default=5)
    if len(scores) >= 10:
        number = guesses_of_each(len(scores), epsilon=2.0, delta=1e-3, confidence=0.9)
        assert 1 <= number <= len(scores) // 2


@quickly(12)
@given(
    st.sampled_from([ADD, REPLACE]), st.integers(4, 30), st.integers(0, 10), st.sampled_from([0.3, 2.0]), st.integers(0, 10**6)
)
def test_canaries_of_clients_are_neighbours_by_the_relation_and_their_scores_find_them(relation, many, more, clip_norm, seed):
    rng = np.random.default_rng(seed)
    choices = coins(many, seed)
    assert set(choices.tolist()) <= {-1, 1}
    dimension = 4000
    names = [f"c{number}" for number in range(many + more)]
    made = ClientCanaries.drawn(names, choices, relation=relation, dimension=dimension, rng=rng)
    assert len(set(made.names)) == many
    np.testing.assert_allclose(np.linalg.norm(made.directions, axis=1), 1, rtol=1e-5)
    updates = made.updates(clip_norm)
    total = np.zeros(dimension)
    for name, coin, direction in zip(made.names, choices, made.directions, strict=True):
        update = updates[name]
        if coin < 0 and relation == ADD:
            assert update is None
            continue
        assert np.linalg.norm(update) > clip_norm
        clipped = update / np.linalg.norm(update) * clip_norm
        np.testing.assert_allclose(clipped, coin * clip_norm * direction, atol=1e-5)
        total += clipped
    cohort = 7.0
    other = rng.normal(size=dimension) * 0.5
    before = rng.normal(size=dimension)
    scale = clip_norm / cohort
    left = rng.random(dimension) < 0.8  # of a mask: what it takes away of canaries it takes away of others
    after = before + np.where(left, (total + clip_norm * other) / cohort, 0.0)
    scores = made.score([before, after, after], others=[other, 0.0], scales=[scale, scale], sampling_rate=1.0)
    for rate in (0.3, 0.7):  # the log-likelihood ratio of a contribution with this rate, by hand
        seen = made.directions @ ((after - before) / scale - np.where(left, other, 0.0))
        seen -= np.median(seen) if rate < 0.5 else 0.0
        variance = max(1.4826 * np.median(np.abs(seen)), 1e-3) ** 2
        ratio = [np.log(1 - rate + rate * np.exp(np.minimum(700, (sign * seen - 0.5) / variance))) for sign in (1, -1)]
        expected = ratio[0] - (ratio[1] if relation == REPLACE and (choices < 0).any() else 0.0)
        sure = np.abs(seen) < 600 * variance
        found = made.score([before, after], others=[other], scales=[scale], sampling_rate=rate)
        np.testing.assert_allclose(found[sure], expected[sure], rtol=1e-6, atol=1e-8)
    ordered = np.argsort(scores)
    count = int((choices < 0).sum())
    assert set(ordered[:count].tolist()) == set(np.flatnonzero(choices < 0).tolist())


@quickly(40)
@given(st.floats(1e-3, 0.999), st.floats(1e-3, 0.999), st.sampled_from([0.0, 1e-3, 0.1]))
def test_the_hockey_stick_is_the_larger_of_both_directions(wrong, missed, delta):
    made = HockeyStick(delta=delta)
    rates = [(1 - missed - delta) / wrong, (1 - wrong - delta) / missed]
    strength = float(made.strength(np.array([wrong]), np.array([missed]))[0])
    assert math.exp(strength) == pytest.approx(max(*rates, 1e-300))
    if strength > 0:  # on the curve: no lower rate is allowed
        assert made.curve(strength, np.array([wrong]))[0] == pytest.approx(missed, rel=1e-6, abs=1e-9)
        assert made.epsilon(strength) == strength


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
