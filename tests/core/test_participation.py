"""Minimum separation: who may take part in a round, over whole runs whose clients join, leave and return."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flower_dp.core import dp_events
from flower_dp.core.participation import MinimumSeparationSampling, Participation
from flower_dp.core.sampling import check_sampler

FALSE_ALARM = 1e-6
RELEASE = dp_events.GaussianDpEvent(1.0)
NAMES = tuple(f"client-{number}" for number in range(12))

samplers = st.builds(
    MinimumSeparationSampling,
    cohort_size=st.integers(1, 5),
    min_separation=st.integers(1, 6),
    max_participations=st.none() | st.integers(1, 4),
)


def noted(past: dict[str, Participation], names: list[str], number: int) -> None:
    for name in names:
        past[name] = Participation(last=number, count=past[name].count + 1 if name in past else 1)


def cohorts(sampling: MinimumSeparationSampling, num_clients: int, num_rounds: int, seed: int = 0) -> list[list[int]]:
    """Return every round's cohort, if all clients are connected all the time."""
    rng, past = np.random.default_rng(seed), dict[str, Participation]()
    names, made = [str(number) for number in range(num_clients)], []
    for number in range(1, num_rounds + 1):
        chosen = sampling.choose(names, past, number, rng).tolist()
        noted(past, [names[place] for place in chosen], number)
        made.append(chosen)
    return made


@given(sampling=samplers, data=st.data(), seed=st.integers(0, 2**32))
def test_no_client_takes_part_too_early_or_too_often_whoever_is_connected(
    sampling: MinimumSeparationSampling, data: Any, seed: int
) -> None:
    """The rounds of each client are kept here, apart from what `choose` is told."""
    rng, past = np.random.default_rng(seed), dict[str, Participation]()
    rounds: dict[str, list[int]] = {name: [] for name in NAMES}
    number = 0
    for _ in range(data.draw(st.integers(1, 30))):
        number += data.draw(st.sampled_from([1, 1, 1, 2]))  # rounds without a cohort count, too
        connected = data.draw(st.permutations(NAMES))[: data.draw(st.integers(0, len(NAMES)))]
        chosen = sampling.choose(connected, past, number, rng)
        assert np.array_equal(chosen, np.unique(chosen))  # sorted, nobody twice
        names = [connected[place] for place in chosen]
        may = {
            name
            for name in connected
            if (not rounds[name] or number - rounds[name][-1] >= sampling.min_separation)
            and len(rounds[name]) < (sampling.max_participations or math.inf)
        }
        assert may == {name for name in connected if sampling.refusal(past.get(name), number) is None}
        assert set(names) <= may
        assert len(names) == min(sampling.cohort_size, len(may))
        counts, others = [len(rounds[name]) for name in names], [len(rounds[name]) for name in may - set(names)]
        assert not counts or not others or max(counts) <= min(others)
        for name in names:
            rounds[name].append(number)
        noted(past, names, number)
    for each in rounds.values():
        assert len(each) <= sampling.participations(number)
        assert all(later - earlier >= sampling.min_separation for earlier, later in itertools.pairwise(each))


@given(size=st.integers(1, 6), separation=st.integers(1, 6), more=st.integers(0, 9), seed=st.integers(0, 2**32))
def test_cohorts_are_full_if_the_population_is_large_enough(size: int, separation: int, more: int, seed: int) -> None:
    sampling = MinimumSeparationSampling(cohort_size=size, min_separation=separation)
    num_clients = size * separation + more
    assert sampling.max_cohort_size(num_clients) == sampling.expected_cohort_size(num_clients) == size
    made = cohorts(sampling, num_clients, 30, seed)
    assert {len(cohort) for cohort in made} == {size}
    counts = np.bincount(np.concatenate(made), minlength=num_clients)
    assert counts.max() <= sampling.participations(30)
    if not more:  # there is no choice: each group comes again in its round
        assert counts.max() - counts.min() <= 1


@given(sampling=samplers, num_rounds=st.integers(1, 40))
def test_events_charge_the_largest_number_of_participations_after_every_round(
    sampling: MinimumSeparationSampling, num_rounds: int
) -> None:
    """A client that is always connected, and has no other beside it, takes part as often as it may."""
    made = cohorts(sampling, 1, num_rounds)
    for number in range(1, num_rounds + 1):
        events = [sampling.event(RELEASE, earlier, 100) for earlier in range(1, number + 1)]
        assert all(event == RELEASE or isinstance(event, dp_events.NoOpDpEvent) for event in events)
        charged = sum(event == RELEASE for event in events)
        assert charged == sampling.participations(number) == sum(map(len, made[:number]))
    assert sampling.participations(0) == 0


def test_an_event_without_privacy_is_not_free_in_the_first_round() -> None:
    sampling = MinimumSeparationSampling(cohort_size=1, min_separation=3)
    assert isinstance(sampling.event(dp_events.NonPrivateDpEvent(), 1, 3), dp_events.NonPrivateDpEvent)


def test_participations_by_hand() -> None:
    """Rounds 1, 4, 7, 10 of ten, with a separation of three."""
    sampling = MinimumSeparationSampling(cohort_size=1, min_separation=3)
    assert [sampling.participations(rounds) for rounds in (1, 3, 4, 6, 7, 9, 10)] == [1, 1, 2, 2, 3, 3, 4]
    few = MinimumSeparationSampling(cohort_size=1, min_separation=3, max_participations=2)
    assert [few.participations(rounds) for rounds in (1, 4, 7, 1000)] == [1, 2, 2, 2]
    every = MinimumSeparationSampling(cohort_size=1, min_separation=1)
    assert every.participations(1000) == 1000


def test_ties_are_broken_uniformly_whatever_the_order_of_names() -> None:
    """Else the first names would be the participants of early rounds, for everyone to know."""
    sampling, rng = MinimumSeparationSampling(cohort_size=2, min_separation=2), np.random.default_rng(3)
    past = {"e": Participation(last=1, count=1)}
    chosen = np.zeros(5)
    for _ in range(20_000):
        chosen[sampling.choose(("a", "b", "c", "d", "e"), past, 9, rng)] += 1
    assert chosen[4] == 0  # the only one that took part before
    assert stats.chisquare(chosen[:4]).pvalue > FALSE_ALARM
    one, same, other = (
        sampling.choose([str(name) for name in range(100)], {}, 1, np.random.default_rng(seed)).tolist() for seed in (1, 1, 2)
    )
    assert one == same != other


def test_a_refusal_says_what_was_and_what_is_to_be_kept() -> None:
    sampling = MinimumSeparationSampling(cohort_size=1, min_separation=4, max_participations=2)
    assert sampling.refusal(None, 1) is None
    assert sampling.refusal(Participation(last=3, count=1), 6) == "it took part in round 3, and min_separation=4"
    assert sampling.refusal(Participation(last=3, count=1), 7) is None
    assert sampling.refusal(Participation(last=3, count=2), 7) == "it took part 2 times, and max_participations=2"
    every = MinimumSeparationSampling(cohort_size=1, min_separation=1)
    assert every.refusal(Participation(last=3, count=10**6), 4) is None
    assert every.refusal(Participation(last=3, count=1), 3) is not None  # the same round


def test_nobody_is_chosen_of_nobody() -> None:
    sampling, rng = MinimumSeparationSampling(cohort_size=3, min_separation=2), np.random.default_rng(0)
    assert sampling.choose((), {}, 1, rng).tolist() == []
    assert sampling.choose(("a",), {"a": Participation(last=1, count=1)}, 2, rng).tolist() == []
    # Those that are not connected are never chosen, whatever is known of them.
    assert sampling.choose(("b",), {"a": Participation(last=1, count=1)}, 9, rng).tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"cohort_size": 0}, "cohort_size=0: must be a whole number >= 1"),
        ({"cohort_size": 2.5}, "cohort_size=2.5: must be a whole number >= 1"),
        ({"min_separation": 0}, "min_separation=0: must be a whole number >= 1"),
        ({"min_separation": True}, "min_separation=True: must be a whole number >= 1"),
        ({"max_participations": 0}, "max_participations=0: must be a whole number >= 1"),
        ({"max_participations": "3"}, "max_participations='3': must be a whole number >= 1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(arguments: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        MinimumSeparationSampling(**{"cohort_size": 1, "min_separation": 1} | arguments)


def test_a_population_too_small_for_full_cohorts_has_smaller_ones() -> None:
    """The separation holds nonetheless: 7 clients, 3 a round, each again after 4 rounds."""
    sampling = MinimumSeparationSampling(cohort_size=3, min_separation=4)
    assert [len(cohort) for cohort in cohorts(sampling, 7, 9)] == [3, 3, 1, 0, 3, 3, 1, 0, 3]
    for use in (sampling.max_cohort_size, sampling.expected_cohort_size):
        assert use(7) == 3
        with pytest.raises(ValueError, match="cohort_size=3: must be a whole number >= 1 and <= 2"):
            use(2)


def test_it_is_a_sampler_whose_cohorts_are_never_drawn_blindly() -> None:
    """A cohort drawn without what happened before would break the separation that its event assumes."""
    sampling = MinimumSeparationSampling(cohort_size=1, min_separation=2)
    check_sampler(sampling)
    assert not sampling.cohort_size_is_secret
    for number in (1, 2):
        with pytest.raises(ValueError, match=r"^sampling=MinimumSeparationSampling\(.*draws by who took part before"):
            sampling.sample(number, 10, np.random.default_rng(0))
