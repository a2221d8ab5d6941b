"""How often an audit misses a planted bug of a known Gaussian effect: `python -m tests.audit.power`.

Scores are drawn from the bug's own distribution, and audited as `test_planted_bugs.py` does. The p-value of the claim is a normal
quantile z, whose mean and standard deviation (1, if it is smaller) tell how often z is below that of the audit's error probability.
"""

import argparse
import math
import sys
from dataclasses import dataclass

import numpy as np
from scipy import stats

from flower_dp.audit.estimate import errors_of, p_values
from flower_dp.audit.tradeoffs import Estimator, GaussianTradeoff, SampledGaussianTradeoff

MISS, DELTA = 1e-4, 1e-3
# Smaller p-values are lost in the sum with the part that is spent on the rate of false positives.
_SMALLEST = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a bug does.

    Attributes:
        estimator: of the case.
        claimed: strength that is claimed.
        real: how many standard deviations the unit moves the statistic by.
        present: standard deviation of the statistic with the unit, in those without it.
    """

    estimator: Estimator
    claimed: float
    real: float
    present: float = 1.0


GAUSSIAN = GaussianTradeoff(delta=DELTA)
EFFECTS = {
    "quarter_of_the_noise-stock": Effect(estimator=GAUSSIAN, claimed=1.25, real=5.0),
    # Four clients: the server adds one share, two clients draw theirs; with the unit three do. Another has subtracted its own.
    "shares_by_their_number-distributed, add-or-remove-one": Effect(
        estimator=GAUSSIAN, claimed=2.0, real=2.0 * math.sqrt(2), present=math.sqrt(1 / 2)
    ),
    "shares_by_their_number-distributed, replace-one": Effect(estimator=GAUSSIAN, claimed=2.0, real=4.0),
    "shares_by_their_number-distributed, untrusted server": Effect(estimator=GAUSSIAN, claimed=2.0, real=4.0),
    "no_factor_of_replace_one-stock, replace-one": Effect(estimator=GAUSSIAN, claimed=2.0, real=4.0),
    "cohort_of_the_largest_updates-stock, Poisson": Effect(
        estimator=SampledGaussianTradeoff(delta=DELTA, rate=0.1), claimed=4.0, real=4.0
    ),
}


def miss_rate(effect: Effect, trials: int, rng: np.random.Generator, *, draws: int) -> tuple[float, float, float, int]:
    """Return the probability of a miss, mean and standard deviation of z, and how many of the draws missed."""
    found, missed = [], 0
    for _ in range(draws):
        pure = rng.normal(size=(2, trials))
        scores = {
            "projection": (rng.normal(size=trials), rng.normal(effect.real, effect.present, size=trials)),
            "another": (pure[0], pure[1]),
        }
        errors = errors_of(scores, effect.estimator, confidence=1 - MISS)
        p = p_values(errors, effect.estimator, miss=MISS)(effect.claimed)
        missed += p > MISS
        found.append(stats.norm.isf(max(p - 0.05 * MISS - 2e-12, _SMALLEST)))  # without what is added to every p-value
    mean, deviation = float(np.mean(found)), float(np.std(found))
    return float(stats.norm.cdf((stats.norm.isf(0.95 * MISS) - mean) / max(deviation, 1.0))), mean, deviation, missed


def main() -> None:
    from tests.audit.test_planted_bugs import BUGS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    draws, rng = parser.parse_args().draws, np.random.default_rng(1)
    for plant, case, trials in BUGS:
        name = f"{plant.__name__}-{case.label}"
        if name not in EFFECTS:
            sys.stdout.write(f"{name:55} {trials:5} trials: of no Gaussian effect\n")
            continue
        rate, mean, deviation, missed = miss_rate(EFFECTS[name], trials, rng, draws=draws)
        told = f"z {mean:.1f} +- {deviation:.1f}; {missed} of {draws} missed; miss rate {rate:.0e}"
        sys.stdout.write(f"{name:55} {trials:5} trials: {told}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
