"""The estimator of the one-run audit: the paper's printed numbers, coverage under known epsilon, and how close it gets."""

import itertools
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


def test_delta_term_is_the_best_distribution_of_failures():
    # P[W + F >= v] over all F with mean at most b, independent of W: a linear program over two atoms, 0 and one i.
    v, r, m, epsilon, delta = 8, 10, 12, 0.5, 1e-3
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    tail = [stats.binom.sf(n - 1, r, q) for n in range(v + 1)]
    best = max((1 - weight) * tail[v] + weight * tail[v - i] for i in range(1, v + 1) for weight in [min(1.0, 2 * m * delta / i)])
    found = p_value(v, num_guesses=r, num_canaries=m, epsilon=epsilon, delta=delta)
    assert found == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_exact_p_value_of_leaky_randomised_response_is_never_above_the_bound(delta):
    """Each bit is told with probability delta, else by randomised response: (epsilon, delta)-private, and guessed as well as can be."""
    m, epsilon = 40, 1.0
    right = delta + (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    for correct in range(m + 1):
        exact = stats.binom.sf(correct - 1, m, right)
        assert exact <= p_value(correct, num_guesses=m, num_canaries=m, epsilon=epsilon, delta=delta) * (1 + 1e-12)


def test_all_bits_at_once_with_probability_delta_are_within_the_bound():
    m, epsilon, delta = 40, 1.0, 1e-3
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    for correct in range(1, m + 1):
        exact = delta + (1 - delta) * stats.binom.sf(correct - 1, m, q)
        assert exact <= p_value(correct, num_guesses=m, num_canaries=m, epsilon=epsilon, delta=delta) * (1 + 1e-12)


def test_every_way_of_guessing_a_small_channel_is_within_the_bound():
    """m = 3 coins through a channel whose exact (epsilon, delta) is computed; all guesses that maximise the number of right ones."""
    rng = np.random.default_rng(5)
    m, epsilon = 3, 0.7
    inputs = list(itertools.product((-1, 1), repeat=m))
    for _ in range(20):
        table = rng.dirichlet(np.full(6, 0.7), size=len(inputs)) * 0.3 + rng.dirichlet(np.ones(6)) * 0.7
        pairs = [
            (a, b)
            for a, b in itertools.permutations(range(8), 2)
            if sum(x != y for x, y in zip(inputs[a], inputs[b], strict=True)) == 1
        ]
        delta = max(np.maximum(table[a] - math.exp(epsilon) * table[b], 0).sum() for a, b in pairs)
        for least in range(1, m + 1):
            # The guess that is most often right in at least so many coins, for every output.
            won = sum(
                max(
                    sum(
                        table[s, out]
                        for s, given in enumerate(inputs)
                        if sum(g == x for g, x in zip(made, given, strict=True)) >= least
                    )
                    for made in inputs
                )
                / 8
                for out in range(6)
            )
            assert won <= p_value(least, num_guesses=m, num_canaries=m, epsilon=epsilon, delta=min(delta, 1.0)) + 1e-12


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


def test_number_of_guesses_follows_from_the_claim_alone():
    few = guesses_of_each(1000, epsilon=8.0, delta=1e-5, confidence=0.95)
    assert few == guesses_of_each(1000, epsilon=8.0, delta=1e-5, confidence=0.95)
    assert 1 <= few <= 500
    assert guesses_of_each(2, epsilon=math.inf, delta=0.0, confidence=0.95) == 1


def test_coins_are_fair_and_repeatable():
    made = coins(10_000, 3)
    assert set(made.tolist()) == {-1, 1}
    assert abs(made.sum()) < 4 * math.sqrt(10_000)
    assert (coins(100, 3) == coins(100, 3)).all()
    assert (coins(100, None) != coins(100, None)).any()


@pytest.mark.parametrize(
    ("field", "changed"),
    [("num_correct", 11), ("num_guesses", 21), ("epsilon", -1.0), ("delta", 2.0), ("num_canaries", 0)],
)
def test_nonsense_is_refused_by_name(field, changed):
    good = {"num_correct": 5, "num_guesses": 10, "num_canaries": 20, "epsilon": 1.0, "delta": 0.0}
    values = good | {field: changed}
    with pytest.raises(ValueError, match=field if field != "num_canaries" else "num_"):
        p_value(values.pop("num_correct"), **values)
