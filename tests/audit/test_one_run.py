"""The estimator of the one-run audit: the paper's printed numbers, coverage under known epsilon, and how close it gets."""

import math

import numpy as np
import pytest
from scipy import stats

from flower_dp.audit.one_run import OneRunAudit, coins, epsilon_lower_bound, guesses_of_each, p_value


@pytest.mark.parametrize(
    ("num_canaries", "num_guesses", "num_correct", "delta", "printed"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],  # Appendix D, p. 46; section 7, p. 28
)
def test_bounds_printed_in_the_paper(num_canaries, num_guesses, num_correct, delta, printed):
    bound = epsilon_lower_bound(num_correct, num_guesses=num_guesses, num_canaries=num_canaries, delta=delta, confidence=0.95)
    assert bound == pytest.approx(printed, abs=1e-3)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_exact_p_value_of_leaky_randomised_response_is_never_above_the_bound(delta):
    """Each bit is told with probability delta, else by randomised response: (epsilon, delta)-private, and guessed as well as can be."""
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
