"""Lower bounds from error rates: they hold, they are sharp, and each estimator's trade-off curve is the exact one."""


import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats

from flower_dp.audit.estimate import Errors, errors_of, p_values, rate_bound
from flower_dp.audit.tradeoffs import GaussianTradeoff, HockeyStick, LaplaceTradeoff, SampledGaussianTradeoff
from flower_dp.privacy import accounting

DELTA = 1e-3
THRESHOLDS = np.linspace(-3, 5, 41)


def test_a_rate_is_above_its_bound_as_rarely_as_promised():
    """Exactly, from the binomial distribution: for every rate the bound misses with probability at most `miss`."""
    trials, miss = 60, 0.02
    bounds = rate_bound(np.arange(trials + 1), trials, miss)
    for rate in np.linspace(0.001, 0.999, 97):
        missed = stats.binom.pmf(np.arange(trials + 1), trials, rate)[bounds < rate].sum()
        assert missed <= miss * (1 + 1e-9)
    assert bounds[-1] == 1
    assert bounds[0] == pytest.approx(1 - miss ** (1 / trials))  # closed form


@pytest.mark.parametrize(
    ("rate", "replaced", "event", "relation"),
    [
        (0.5, False, dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(0.5)), "add-or-remove-one"),
        (0.1, False, dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.5)), "add-or-remove-one"),
        (0.5, False, dp.SampledWithoutReplacementDpEvent(2, 1, dp.GaussianDpEvent(1.0)), "replace-one"),
        (0.5, True, dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(1.0)), "replace-one"),
    ],
)
def test_sampled_gaussian_rates_give_mu_from_below_and_the_accountants_epsilon(rate, replaced, event, relation):
    estimator, mu = SampledGaussianTradeoff(delta=DELTA, rate=rate, replaced=replaced), 2.0
    far = mu / 2 if replaced else mu
    wrong = (
        (1 - rate) * stats.norm.sf(THRESHOLDS) + rate * stats.norm.sf(THRESHOLDS + far) if replaced else stats.norm.sf(THRESHOLDS)
    )
    missed = (1 - rate) * stats.norm.cdf(THRESHOLDS) + rate * stats.norm.cdf(THRESHOLDS - far)
    found = estimator.strength(wrong, missed)
    assert (found <= mu).all()
    assert found.max() > 0.97 * mu
    proved = accounting.epsilon(event, delta=DELTA, relation=relation).epsilon
    assert 0.999 * proved < estimator.epsilon(mu) < proved * (1 + 1e-6)


ESTIMATORS = [
    HockeyStick(delta=0.1),
    GaussianTradeoff(delta=DELTA),
    SampledGaussianTradeoff(delta=DELTA, rate=0.4),
    SampledGaussianTradeoff(delta=DELTA, rate=0.4, replaced=True),
    LaplaceTradeoff(),
]


def counted(trials, wrong, missed, slope):
    return Errors(
        statistic="a", threshold=0.0, falling=False, slope=slope, trials=trials, false_positives=wrong, false_negatives=missed
    )


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda one: f"{one.name} {getattr(one, 'replaced', '')}")
@pytest.mark.parametrize("slope", [0.3, 4.0])
def test_a_true_strength_is_refuted_as_rarely_as_promised(estimator, slope):
    """Exactly: all errors that 10 trials can have, with their probabilities at every point of the curve."""
    trials, miss, strength = 10, 0.1, 1.2
    counts = np.arange(trials + 1)
    refuted = np.array(
        [
            [
                p_values(counted(trials, wrong, missed, slope), estimator, miss=miss)(strength) <= miss
                for missed in range(trials + 1)
            ]
            for wrong in range(trials + 1)
        ]
    )
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
