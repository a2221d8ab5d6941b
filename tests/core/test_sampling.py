"""Sampling: who takes part, how often, and what that does to an event.

Statistical tests have fixed seeds; each would raise a false alarm with probability at most 1e-6 for a random seed.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flower_dp.core import dp_events
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, check_sampler

FALSE_ALARM = 1e-6
RELEASE = dp_events.GaussianDpEvent(1.0)


def _cohorts(sampler: Any, num_clients: int, rounds: int, seed: int = 0) -> np.ndarray:
    """Participation [rounds x clients] as booleans."""
    rng = np.random.default_rng(seed)
    table = np.zeros((rounds, num_clients), bool)
    for number in range(1, rounds + 1):
        chosen = sampler.sample(number, num_clients, rng)
        assert np.array_equal(chosen, np.unique(chosen))  # sorted, nobody twice
        assert chosen.size == 0 or (chosen[0] >= 0 and chosen[-1] < num_clients)
        table[number - 1, chosen] = True
    return table


def _within(counts: np.ndarray, trials: int, rate: float) -> bool:
    """Whether binomial counts all lie in a band that holds them together with probability 1 - FALSE_ALARM."""
    low, high = stats.binom.interval(1 - FALSE_ALARM / counts.size, trials, rate)
    return bool(np.all((counts >= low) & (counts <= high)))


@pytest.mark.parametrize(
    ("sampler", "cohort", "event"),
    [
        (FullSampling(), 8, RELEASE),
        (PoissonSampling(sampling_rate=0.25), 2, dp_events.PoissonSampledDpEvent(0.25, RELEASE)),
        (FixedSizeSampling(cohort_size=3), 3, dp_events.SampledWithoutReplacementDpEvent(8, 3, RELEASE)),
        (PoissonSampling(sampling_rate=1), 8, RELEASE),
        (FixedSizeSampling(cohort_size=8), 8, RELEASE),
    ],
)
def test_events_and_expected_cohorts(sampler: Any, cohort: float, event: dp_events.DpEvent) -> None:
    assert sampler.expected_cohort_size(8) == cohort
    assert sampler.event(RELEASE, 9, 8) == event
    assert isinstance(sampler.event(dp_events.NonPrivateDpEvent(), 1, 8), dp_events.NonPrivateDpEvent)
    assert event is not RELEASE or _cohorts(sampler, 8, 3).all()


def test_poisson_includes_everybody_at_the_rate() -> None:
    rate = 0.03
    table = _cohorts(PoissonSampling(sampling_rate=rate), 40, 20_000)
    assert _within(table.sum(axis=0), 20_000, rate)
    assert not _within(table.sum(axis=0), 20_000, rate * 1.2)
    assert _within(np.array([table.sum()]), table.size, rate)
    assert not _within(np.array([table.sum()]), table.size, rate * 1.05)


def test_poisson_clients_are_independent() -> None:
    table = _cohorts(PoissonSampling(sampling_rate=0.2), 6, 20_000).astype(float)
    correlations = np.corrcoef(table.T)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < stats.norm.isf(FALSE_ALARM / 30) / math.sqrt(20_000)
    over_time = [np.corrcoef(column[1:], column[:-1])[0, 1] for column in table.T]
    assert np.abs(over_time).max() < stats.norm.isf(FALSE_ALARM / 12) / math.sqrt(20_000)


def test_fixed_size_is_exact_and_uniform() -> None:
    table = _cohorts(FixedSizeSampling(cohort_size=3), 8, 20_000)
    assert (table.sum(axis=1) == 3).all()
    assert _within(table.sum(axis=0), 20_000, 3 / 8)
    # Every one of the 56 subsets equally often.
    seen = np.unique(table @ (1 << np.arange(8)), return_counts=True)[1]
    assert seen.size == math.comb(8, 3)
    assert stats.chisquare(seen).pvalue > FALSE_ALARM


@given(clients=st.integers(1, 40), data=st.data(), rounds=st.integers(1, 120))
def test_round_robin_is_balanced_after_any_number_of_rounds(clients: int, data: Any, rounds: int) -> None:
    size = data.draw(st.integers(1, clients))
    sampler = RoundRobinSampling(cohort_size=size)
    table = _cohorts(sampler, clients, rounds)
    assert (table.sum(axis=1) == size).all()
    asked = table.cumsum(axis=0)
    assert (asked.max(axis=1) - asked.min(axis=1)).max() <= 1
    events = [sampler.event(RELEASE, number, clients) for number in range(1, rounds + 1)]
    charged = np.cumsum([event is RELEASE for event in events])
    assert all(event is RELEASE or isinstance(event, dp_events.NoOpDpEvent) for event in events)
    assert np.array_equal(charged, asked.max(axis=1))  # at every moment what the client asked most often has paid
    assert charged[-1] == sampler.participations(rounds, clients) == math.ceil(size * rounds / clients)


@pytest.mark.parametrize("kind", [FixedSizeSampling, RoundRobinSampling])
def test_cohorts_larger_than_the_population_are_refused(kind: Any) -> None:
    sampler = kind(cohort_size=9)
    rng = np.random.default_rng(0)
    for use, arguments in ((sampler.sample, (1, 8, rng)), (sampler.expected_cohort_size, (8,)), (sampler.event, (RELEASE, 1, 8))):
        with pytest.raises(ValueError, match="cohort_size=9: must be a whole number >= 1 and <= 8"):
            use(*arguments)


def test_random_samplers_follow_the_generator_they_are_given() -> None:
    for sampler in (PoissonSampling(sampling_rate=0.5), FixedSizeSampling(cohort_size=50)):
        one, same, other = (sampler.sample(1, 100, np.random.default_rng(seed)).tolist() for seed in (1, 1, 2))
        assert one == same != other
        # The round's number must not be a seed: the server's cohort of round 1 would be everybody's to compute.
        assert sampler.sample(2, 100, np.random.default_rng(1)).tolist() == one


@pytest.mark.parametrize("rate", [1e-6, 0.001, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_clients", [1, 2, 50, 1000, 10**6])
def test_the_largest_cohort_is_a_quantile_of_the_binomial(rate, num_clients):
    largest = PoissonSampling(sampling_rate=rate).max_cohort_size(num_clients)
    assert stats.binom.sf(largest, num_clients, rate) <= 1e-18
    assert largest == 0 or stats.binom.sf(largest - 1, num_clients, rate) > 1e-18


def test_very_large_cohorts_are_drawn_anew():
    class Many:
        calls = 0

        def random(self, size):
            self.calls += 1
            return np.zeros(size) if self.calls < 3 else np.linspace(0, 1, size)

    rng: Any = Many()
    assert len(PoissonSampling(sampling_rate=0.1).sample(1, 1000, rng)) == 100
    assert rng.calls == 3


@pytest.mark.parametrize("word", ["sample", "event", "expected_cohort_size", "max_cohort_size", "cohort_size_is_secret"])
def test_an_object_that_lacks_a_part_of_a_sampler_is_refused(word):
    parts = {
        one: None
        for one in ("sample", "event", "expected_cohort_size", "max_cohort_size", "cohort_size_is_secret")
        if one != word
    }
    with pytest.raises(ValueError, match=r"sampling=.*: must be a sampler"):
        check_sampler(SimpleNamespace(**parts))
    check_sampler(SimpleNamespace(**parts, **{word: None}))
