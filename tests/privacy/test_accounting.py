"""Accounting against second sources: closed forms, quadrature, Monte Carlo, and published numbers."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from scipy import stats

from flower_dp.privacy import accounting, pld, renyi
from flower_dp.privacy.accounting import calibrate, epsilon, epsilon_by_round, max_repetitions, rdp_epsilon, repeated
from flower_dp.privacy.events import Relation, UnsupportedEventError
from tests.closed_forms import gaussian_epsilon

ADD: Relation = "add-or-remove-one"
REPLACE: Relation = "replace-one"
Gaussian, Laplace, NonPrivate = dp.GaussianDpEvent, dp.LaplaceDpEvent, dp.NonPrivateDpEvent
Poisson, Compose, Repeat = dp.PoissonSampledDpEvent, dp.ComposedDpEvent, dp.SelfComposedDpEvent


def fixed_size(num_clients: int, cohort_size: int, release: dp.DpEvent) -> dp.DpEvent:
    return dp.SampledWithoutReplacementDpEvent(num_clients, cohort_size, release)


# Numbers that are known


@pytest.mark.parametrize(("relation", "golden"), [(ADD, 4.377178), (REPLACE, 9.997256)])
def test_one_gaussian_release_is_exact(relation: Relation, golden: float) -> None:
    cost = epsilon(Gaussian(1.0), delta=1e-5, relation=relation)
    assert cost.epsilon == pytest.approx(golden, abs=1e-6)
    assert (cost.delta, cost.relation, cost.accountant) == (1e-5, relation, "gaussian-exact")


@pytest.mark.parametrize("multiplier", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-2])
@pytest.mark.parametrize(("relation", "rounds"), [(ADD, 9), (REPLACE, 1)])
def test_gaussian_releases_are_never_below_the_closed_form(
    multiplier: float, delta: float, rounds: int, relation: Relation
) -> None:
    got = epsilon(Repeat(Gaussian(multiplier), rounds), delta=delta, relation=relation).epsilon
    second = gaussian_epsilon([multiplier] * rounds, relation, delta)
    assert second - 1e-10 * second - 1e-11 <= got <= second * (1 + 1e-8) + 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("multiplier", "rate", "rounds", "delta", "golden", "tolerance"),
    [
        # Opacus' value; dp_accounting's series at fractional orders adds terms of both signs as if positive: a little more.
        (1.5, 0.04, 2250, 1e-5, 7.32911117143, 3e-4),
        (1.0, 0.01, 1000, 1e-5, 2.1014, 5e-5),
        (0.95, 0.1, 200, 2e-3, 8.5786, 5e-5),
    ],
)
def test_poisson_by_rdp(multiplier: float, rate: float, rounds: int, delta: float, golden: float, tolerance: float) -> None:
    got = rdp_epsilon(Repeat(Poisson(rate, Gaussian(multiplier)), rounds), delta=delta, relation=ADD)
    assert got is not None
    assert got == pytest.approx(golden, abs=tolerance)


@pytest.mark.slow
@pytest.mark.exact
def test_poisson_by_pld() -> None:
    long = Repeat(Poisson(0.01, Gaussian(1.0)), 1000)
    cost = epsilon(long, delta=1e-5, relation=ADD)
    assert cost.accountant == "pld"
    assert cost.epsilon == pytest.approx(1.8282, abs=1e-4)
    assert 1.8181 < cost.epsilon < 1.8384  # prv-accountant's bracket
    digits = Repeat(Poisson(0.1, Gaussian(0.95)), 200)
    got = epsilon(digits, delta=2e-3, relation=ADD).epsilon
    assert got == pytest.approx(7.3012, abs=1e-4)
    assert 7.2928 < got < 7.3144
    assert epsilon(digits, delta=2e-3, relation=REPLACE).epsilon == pytest.approx(12.4992, abs=1e-4)


def test_pure_epsilon_of_laplace_releases() -> None:
    event = Compose([Repeat(Laplace(1.0), 3), Repeat(Laplace(2.0), 2)])
    cost = epsilon(event, delta=0, relation=ADD)
    assert (cost.epsilon, cost.accountant, cost.delta) == (4.0, "pure", 0.0)
    assert epsilon(event, delta=0, relation=REPLACE).epsilon == 8.0
    assert epsilon(event, delta=1e-3, relation=ADD).epsilon < 4.0


@pytest.mark.parametrize(
    ("gaussian", "laplace", "relation", "delta"),
    [
        (Poisson(0.1, Gaussian(1.0)), Laplace(1e-3), ADD, 1e-5),
        (Poisson(0.1, Gaussian(1.0)), Laplace(1e-5), REPLACE, 1e-5),
        (Poisson(0.1, Gaussian(1.0)), Poisson(0.1, Laplace(1e-3)), REPLACE, 1e-11),
        (fixed_size(1000, 10, Gaussian(1.0)), Poisson(0.1, Laplace(1.0)), REPLACE, 1e-5),
    ],
)
def test_pure_epsilons_and_the_rest_add_up(gaussian: Any, laplace: Any, relation: Relation, delta: float) -> None:
    """No other accountant has a bound of these, or one that takes less than gigabytes."""
    parts = [epsilon(one, delta=delta, relation=relation) for one in (gaussian, laplace)]
    both = epsilon(Compose([gaussian, laplace]), delta=delta, relation=relation)
    alone = accounting._pure([(laplace, 1)], relation)
    assert both.accountant == f"pure + {parts[0].accountant}"
    assert both.epsilon == pytest.approx(parts[0].epsilon + alone, rel=1e-12)
    assert max(one.epsilon for one in parts) < both.epsilon
    small = epsilon(Compose([gaussian, Laplace(50.0)]), delta=1e-5, relation=relation)
    assert small.accountant == "pld"


@pytest.mark.exact
@pytest.mark.parametrize(("relation", "sensitivity"), [(ADD, 1.0), (REPLACE, 2.0)])
@pytest.mark.parametrize("loss", [650.0, 720.0, 745.0, 770.0])
def test_laplace_losses_near_the_range_of_floats(loss: float, relation: Relation, sensitivity: float) -> None:
    """Their probabilities are denormal numbers, or 0: the library ended in an error."""
    release = Laplace(sensitivity / loss)
    assert epsilon(Repeat(release, 2), delta=1e-5, relation=relation).epsilon == pytest.approx(2 * loss, rel=1e-6)
    mixed = epsilon(Compose([release, Poisson(0.1, Gaussian(1.0))]), delta=1e-5, relation=relation).epsilon
    assert loss - 1 < mixed < loss + 10


@pytest.mark.parametrize("release", [Gaussian(0.5), Laplace(0.5), Poisson(0.5, Gaussian(0.5)), Poisson(0.5, Laplace(0.5))])
def test_a_grid_that_takes_too_much_memory_is_refused(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fixed_size", "poisson"):
        monkeypatch.setattr(f"flower_dp.privacy.{module}.MOST_POINTS", 1000)
    pld._leaf_pld.cache_clear()
    with pytest.raises(OverflowError, match=r"on a grid of .* are too many"):
        pld.on_grid([(release, 1)], 1e-5, ADD, 1e-4)
    assert pld.on_grid([(release, 1)], 1e-5, ADD, 0.05) > 0


@pytest.mark.exact
def test_rounding_of_many_sampled_laplace_releases_is_set_aside() -> None:
    """The exact epsilon is from an inversion of the moment generating function, with 30 digits."""
    event = Repeat(Poisson(0.06700740462204344, Laplace(14.068856339739023)), 133_754)
    found = accounting.epsilon(event, delta=1e-9, relation="add-or-remove-one").epsilon
    assert 11.3841122 <= found < 1.005 * 11.3841122


def test_a_replaced_unit_moves_a_laplace_release_twice_as_far_at_any_delta() -> None:
    replaced = epsilon(Repeat(Laplace(8.0), 10), delta=1e-3, relation=REPLACE)
    assert replaced.accountant == "pld"
    assert replaced.epsilon == pytest.approx(epsilon(Repeat(Laplace(4.0), 10), delta=1e-3, relation=ADD).epsilon, rel=1e-9)


@pytest.mark.parametrize(
    ("event", "relation", "by_hand"),
    [
        (Poisson(0.1, Laplace(0.5)), ADD, math.log(1 + 0.1 * (math.exp(2) - 1))),
        (Repeat(Poisson(0.1, Laplace(0.5)), 7), ADD, 7 * math.log(1 + 0.1 * (math.exp(2) - 1))),
        (Poisson(0.1, Laplace(0.5)), REPLACE, 2 * math.log(1 + 0.1 * (math.exp(2) - 1))),
        (fixed_size(100, 10, Laplace(0.5)), REPLACE, math.log(1 + 0.1 * (math.exp(4) - 1))),
        (Poisson(1.0, Laplace(0.5)), REPLACE, 4.0),
        (Poisson(0.5, Laplace(1e-3)), ADD, 1000.0),  # no overflow; without amplification it is at most log 2 too large
    ],
)
def test_amplified_pure_epsilon_by_hand(event: dp.DpEvent, relation: Relation, by_hand: float) -> None:
    assert epsilon(event, delta=0, relation=relation).epsilon == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(("multiplier", "rate"), [(0.4, 0.2), (1.0, 0.5)])
def test_the_pure_epsilon_of_a_sampled_replacement_is_an_upper_bound(multiplier: float, rate: float) -> None:
    """The worst ratio of (1-q) Lap(0) + q Lap(1) to (1-q) Lap(0) + q Lap(-1) is at x = 1."""
    base = 1 / multiplier
    worst = math.log(((1 - rate) * math.exp(-base) + rate) / ((1 - rate) * math.exp(-base) + rate * math.exp(-2 * base)))
    assert epsilon(Poisson(rate, Laplace(multiplier)), delta=0, relation=REPLACE).epsilon >= worst


# Bounds that are computed another way


def test_all_of_a_population_is_no_sampling() -> None:
    for relation, samples in ((ADD, [Poisson(1.0, Gaussian(1.0))]), (REPLACE, [fixed_size(10, 10, Gaussian(1.0))])):
        for event in samples:
            assert epsilon(event, delta=1e-5, relation=relation) == epsilon(Gaussian(1.0), delta=1e-5, relation=relation)


def test_composition_is_order_free_and_flat() -> None:
    one, other = Poisson(0.1, Gaussian(1.0)), Poisson(0.2, Gaussian(2.0))
    want = epsilon(Compose([Repeat(one, 3), other]), delta=1e-5, relation=ADD)
    assert epsilon(Compose([one, Compose([other, one]), dp.NoOpDpEvent(), one]), delta=1e-5, relation=ADD) == want
    assert repeated(one, 3) == Repeat(one, 3)


def test_nothing_costs_nothing_and_no_privacy_costs_infinity() -> None:
    for relation in (ADD, REPLACE):
        for event in (dp.NoOpDpEvent(), Compose([]), Repeat(Gaussian(1.0), 0)):
            assert epsilon(event, delta=0, relation=relation).epsilon == 0
        for event in (NonPrivate(), Compose([Gaussian(10.0), Repeat(NonPrivate(), 2)])):
            assert [epsilon(event, delta=delta, relation=relation).epsilon for delta in (0, 1e-5)] == [math.inf] * 2
            assert rdp_epsilon(event, delta=1e-5, relation=relation) is None


# Calibration


SAMPLED = [lambda release: release, partial(Poisson, 0.1)]


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.parametrize(
    ("event", "target", "delta", "relation", "more"),
    [
        *(
            (lambda z, kind=kind, sampled=sampled: Repeat(sampled(kind(z)), 20), 2.0, 1e-5, relation, 1.01)
            for kind in (Gaussian, Laplace)
            for relation in (ADD, REPLACE)
            for sampled in (SAMPLED if relation == ADD else [*SAMPLED, partial(fixed_size, 1000, 100)])
        ),
        # On the grid of the search these cost twice as much as `epsilon` says.
        (lambda z: Repeat(Poisson(1e-3, Gaussian(z)), 10**6), 0.75, 1e-5, ADD, 1.001),
        (lambda z: Repeat(fixed_size(1000, 10, Gaussian(z)), 10**6), 1.0, 1e-5, REPLACE, 1.001),
        # A small epsilon at a large delta took more than two minutes.
        (lambda z: Repeat(Poisson(0.1, Gaussian(z)), 20), 0.01, 0.3, ADD, 1.001),
    ],
)
def test_calibrated_noise_is_enough_and_not_much_too_much(
    event: Any, target: float, delta: float, relation: Relation, more: float
) -> None:
    found = calibrate(event, epsilon=target, delta=delta, relation=relation)
    costs = [epsilon(event(one), delta=delta, relation=relation).epsilon for one in (found, found / more)]
    assert costs[0] <= target < costs[1]


def test_calibrated_noise_is_that_by_hand() -> None:
    for relation in (ADD, REPLACE):
        for target in (2.0, 2e6):
            found = calibrate(Gaussian, epsilon=target, delta=1e-6, relation=relation)
            assert gaussian_epsilon([found], relation, 1e-6) <= target < gaussian_epsilon([found / 1.0002], relation, 1e-6)
    assert 4.0 <= calibrate(lambda z: Repeat(Laplace(z), 10), epsilon=2.5, delta=0, relation=ADD) < 4.0 * 1.0002


@pytest.mark.parametrize(("multiplier", "cohort_size"), [(1e8, 1), (1e9, 99), (1e60, 50)])
def test_samples_of_a_fixed_size_with_huge_noise_cost_little(multiplier: float, cohort_size: int) -> None:
    event = Repeat(fixed_size(100, cohort_size, Gaussian(multiplier)), 50)
    for delta, most in ((1e-5, 1e-9), (1e-12, 1.0)):
        assert epsilon(event, delta=delta, relation=REPLACE).epsilon <= most
        assert rdp_epsilon(event, delta=delta, relation=REPLACE) <= most


@pytest.mark.exact
@pytest.mark.parametrize(
    ("multiplier", "rate", "at"),
    [
        (0.10073009353097813, 0.6888337074785651, 1.849),
        (0.14480061027100832, 0.8673101722689285, 0.015),
        (1.0, 0.5, 0.3),
    ],
)
def test_one_sampled_release_costs_no_less_than_its_closed_form_at_large_deltas(
    multiplier: float, rate: float, at: float
) -> None:
    """Where the profile is flat, a rounding of delta's last digits was 5e-6 of epsilon, on the wrong side."""

    def profile(value: float) -> float:
        # Up to this point the density with the unit is more than e^value times the one without.
        cut = multiplier**2 * math.log1p(math.expm1(value) / rate) + 0.5
        without = stats.norm.sf(cut / multiplier)
        return float((1 - rate) * without + rate * stats.norm.sf((cut - 1) / multiplier) - math.exp(value) * without)

    delta = profile(at)
    event = Poisson(rate, Gaussian(multiplier))
    for got in (epsilon(event, delta=delta, relation=ADD).epsilon, pld.on_grid([(event, 1)], delta, ADD, pld.GRID)):
        assert delta * (1 - 1e-9) <= profile(got) <= delta + 2e-16


def test_targets_that_no_noise_meets_are_refused() -> None:
    with pytest.raises(ValueError, match="epsilon=1: no noise multiplier"):
        calibrate(lambda z: NonPrivate(), epsilon=1.0, delta=1e-5, relation=ADD)
    with pytest.raises(UnsupportedEventError):
        calibrate(Gaussian, epsilon=1.0, delta=0, relation=ADD)
    for target in (0, -1, math.nan, math.inf, "8", None):
        with pytest.raises(ValueError, match=r"epsilon=.*> 0"):
            calibrate(Gaussian, epsilon=target, delta=1e-5, relation=ADD)  # type: ignore[arg-type]


# Planning a run


def test_affordable_is_exact_at_the_boundary() -> None:
    make = partial(Repeat, Poisson(0.1, Gaussian(3.0)))
    for rounds in (1, 13, 30):
        cost = epsilon(make(rounds), delta=1e-4, relation=ADD).epsilon
        assert max_repetitions(make, epsilon=cost, delta=1e-4, relation=ADD, limit=30) == rounds
        assert max_repetitions(make, epsilon=math.nextafter(cost, 0), delta=1e-4, relation=ADD, limit=30) == rounds - 1
    assert max_repetitions(make, epsilon=100.0, delta=1e-4, relation=ADD, limit=30) == 30
    assert max_repetitions(make, epsilon=1e-9, delta=1e-4, relation=ADD, limit=30) == 0
    assert max_repetitions(make, epsilon=1.0, delta=1e-4, relation=ADD, limit=0) == 0
    assert max_repetitions(lambda n: Repeat(Laplace(2.0), n), epsilon=3.0, delta=0, relation=ADD, limit=100) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (Poisson(0.1, Gaussian(2.0)), ADD),
        (Poisson(0.1, Gaussian(4.0)), REPLACE),
        (fixed_size(100, 10, Gaussian(3.0)), REPLACE),
        (Gaussian(5.0), ADD),
    ],
)
@pytest.mark.parametrize("points", [5, 50])
def test_a_curve_is_an_upper_bound_that_never_falls(event: dp.DpEvent, relation: Relation, points: int) -> None:
    rounds = 8
    values = epsilon_by_round(partial(Repeat, event), num_rounds=rounds, delta=1e-4, relation=relation, points=points)
    assert values.shape == (rounds + 1,)
    assert values[0] == 0
    assert (np.diff(values) >= 0).all()
    for number in range(1, rounds + 1):
        exact = epsilon(Repeat(event, number), delta=1e-4, relation=relation).epsilon
        assert values[number] >= exact * (1 - 1e-9)
    assert values[rounds] == pytest.approx(exact, rel=0.01)


# What is refused


WRAPS = [lambda one: one, partial(Poisson, 0.1), lambda one: Compose([Gaussian(1.0), Repeat(one, 3)])]
WRONG = [math.nan, math.inf, -1.0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        *(
            ({"event": wrap(kind(multiplier))}, r"noise_multiplier=.*> 0")
            for wrap in WRAPS
            for kind in (Gaussian, Laplace)
            for multiplier in (0.0, *WRONG)
        ),
        *(({"event": Poisson(rate, Gaussian(1.0))}, r"sampling_probability=.*must be") for rate in (0.0, 1.1, math.nan)),
        ({"event": fixed_size(10, 11, Gaussian(1.0)), "relation": REPLACE}, r"sample_size=.*must be"),
        *(({"delta": delta}, r"delta=.*>= 0 and < 1") for delta in (*WRONG, -1e-9, 1.0, "1e-5", None)),
        *(({"relation": one}, r"relation=.*add-or-remove-one, replace-one") for one in ("", "add", "REPLACE-ONE", None, 1)),
    ],
)
def test_nonsense_is_refused_by_name(words: dict[str, Any], why: str) -> None:
    asked = {"event": Gaussian(1.0), "delta": 1e-5, "relation": ADD} | words
    for ask in (epsilon, rdp_epsilon):
        with pytest.raises(ValueError, match=why):
            ask(asked["event"], delta=asked["delta"], relation=asked["relation"])


@pytest.mark.parametrize(
    ("event", "delta", "relation"),
    [
        (dp.UnsupportedDpEvent(), 1e-5, ADD),
        (dp.RandomizedResponseDpEvent(0.1, 2), 1e-5, ADD),
        (dp.PoissonSampledDpEvent(0.1, Compose([Gaussian(1.0), Gaussian(1.0)])), 1e-5, ADD),
        (Poisson(0.1, Poisson(0.1, Gaussian(1.0))), 1e-5, ADD),
        (Poisson(0.1, NonPrivate()), 1e-5, ADD),
        (fixed_size(10, 2, Gaussian(1.0)), 1e-5, ADD),
        (fixed_size(10, 2, Laplace(1.0)), 1e-5, ADD),
        (Gaussian(1.0), 0, ADD),
        (Compose([Gaussian(1.0), Laplace(1.0)]), 0, REPLACE),
        (dp.SampledWithReplacementDpEvent(10, 2, Gaussian(1.0)), 1e-5, REPLACE),
    ],
)
def test_what_no_accountant_bounds_is_refused(event: dp.DpEvent, delta: float, relation: Relation) -> None:
    with pytest.raises(UnsupportedEventError, match="event"):
        epsilon(event, delta=delta, relation=relation)


@pytest.mark.exact
@pytest.mark.parametrize(("rate", "multiplier", "rounds"), [(0.1, 0.9, 150), (0.5, 2.0, 3), (1e-3, 4.0, 10_000)])
def test_sampling_under_replace_one_counts_at_every_delta(rate: float, multiplier: float, rounds: int) -> None:
    """Loss distributions end at 1e-9; Renyi divergences of the same pair go on below it, and are never below them above it."""
    event = Repeat(Poisson(rate, Gaussian(multiplier)), rounds)
    tight = epsilon(event, delta=1e-9, relation=REPLACE)
    by_renyi = rdp_epsilon(event, delta=1e-9, relation=REPLACE)
    assert tight.accountant == "pld"
    assert by_renyi is not None
    assert tight.epsilon <= by_renyi <= 1.15 * tight.epsilon
    below = epsilon(event, delta=0.99e-9, relation=REPLACE)
    assert below.accountant == "rdp"
    assert by_renyi <= below.epsilon <= 1.001 * by_renyi
    assert rdp_epsilon(event, delta=1e-9, relation=ADD) < by_renyi  # type: ignore[operator]


def test_rdp_says_where_it_has_no_bound() -> None:
    assert rdp_epsilon(Poisson(0.1, Laplace(1.0)), delta=1e-5, relation=REPLACE) is None
    assert renyi.curve_of([(Poisson(0.1, Laplace(1.0)), 1)], REPLACE) is None
    assert rdp_epsilon(fixed_size(10, 2, Gaussian(1.0)), delta=1e-5, relation=ADD) is None
    assert rdp_epsilon(Gaussian(1.0), delta=0, relation=ADD) is None


@pytest.mark.parametrize(
    ("event", "relation", "count", "delta"),
    [
        (Poisson(0.5, Gaussian(30.0)), ADD, 10_000, 1e-2),  # dp-accounting's bounds at 2.1 to 2.9 are far above those at 2 and 3
        (Poisson(0.0001, Gaussian(1.0)), ADD, 10_000, 1e-2),  # no more than delta: 0 at order 1.1 alone
        (fixed_size(100, 10, Gaussian(0.7)), REPLACE, 100, 1e-5),
        (Gaussian(0.1), ADD, 100, 1e-5),  # order 1.1
        (Gaussian(1000.0), REPLACE, 1, 1e-12),  # order 512, the last
        (Laplace(0.3), ADD, 3, 1e-5),
    ],
)
def test_rdp_finds_the_best_order_of_all(event: dp.DpEvent, relation: Relation, count: int, delta: float) -> None:
    leaves = [(event, count)]
    curve = renyi.curve_of(leaves, relation)
    assert curve is not None
    with renyi.without_warnings():
        least, _ = compute_epsilon(renyi.ORDERS, curve, delta)
    assert renyi.epsilon_of(leaves, delta, relation) == pytest.approx(least, rel=1e-12)


def test_a_renyi_divergence_that_is_no_number_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renyi, "_divergence", lambda leaf, relation, place: math.nan)
    assert renyi.epsilon_of([(Gaussian(1.0), 1)], 1e-5, ADD) == math.inf


# Extremes


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if more than a few grids were tried, or one of them had very many points: together the work there was."""
    grids: list[float] = []
    points: list[int] = []
    on_grid, composed = pld._composed, pld._self_composed

    def measured(one: Any, count: int) -> Any:
        total = composed(one, count)
        points.extend((one._pmf_remove.size, total._pmf_remove.size))
        return total

    monkeypatch.setattr(pld, "_composed", lambda *asked: grids.append(asked[2]) or on_grid(*asked))
    monkeypatch.setattr(pld, "_self_composed", measured)
    pld._leaf_pld.cache_clear()
    accounting._least.cache_clear()
    yield
    assert len(grids) <= 5
    assert max(points, default=0) < 1e6  # some 100 MB, as the library keeps them


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.parametrize(
    ("event", "delta", "relation"),
    [
        (Repeat(Poisson(0.1, Gaussian(0.01)), 100), 1e-5, ADD),
        (Gaussian(1e-3), 1e-5, ADD),
        (Repeat(fixed_size(1000, 10, Gaussian(5.0)), 1_000_000), 1e-5, REPLACE),
        (Repeat(Poisson(0.01, Gaussian(1.0)), 1000), 1e-12, REPLACE),
        (Repeat(Poisson(0.1, Laplace(0.01)), 10), 1e-5, ADD),
        (Repeat(Poisson(0.001, Laplace(1)), 10**7), 1e-5, ADD),
        (Repeat(Poisson(0.1, Gaussian(0.8848)), 100), 0.5, ADD),  # an epsilon far below most losses
    ],
)
@pytest.mark.usefixtures("little_work")
def test_extremes_take_little_work_and_are_finite(event: dp.DpEvent, delta: float, relation: Relation) -> None:
    assert 0 < epsilon(event, delta=delta, relation=relation).epsilon < math.inf


@pytest.mark.parametrize(
    ("scale", "rounds", "delta", "most"),
    [
        (1, 1000, 1e-8, 1.001),
        (5, 200, 1e-5, 1.001),
        (5, 200, pld.SMALLEST_DELTA, math.inf),
        (2, 10**7, 1e-5, 1.01),  # composed in stages
    ],
)
def test_pld_is_an_upper_bound_of_the_closed_form_and_close(scale: float, rounds: int, delta: float, most: float) -> None:
    leaves = [(Gaussian(math.sqrt(rounds) / scale), rounds)]
    got = pld.epsilon_of(leaves, delta, ADD, pld.GRID, accounting._gaussian_exact(leaves, delta, ADD))
    second = gaussian_epsilon([1 / scale], ADD, delta)
    assert second <= got <= most * second


@dataclass(frozen=True)
class Counted:
    """In the place of a privacy loss distribution: how many releases are in it."""

    count: int = 1

    def self_compose(self, count: int) -> "Counted":
        return Counted(self.count * count)

    def compose(self, other: "Counted") -> "Counted":
        return Counted(self.count + other.count)

    def get_epsilon_for_delta(self, delta: float) -> float:
        return delta

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        return 0.0


@pytest.mark.parametrize("count", [1, 199_999, 200_000, 200_001, 1_234_567_891])
def test_long_runs_are_composed_of_all_their_releases(count: int) -> None:
    assert pld._self_composed(Counted(), count).count == count


def test_rounding_inside_a_composition_is_kept_aside_from_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pld, "_leaf_pld", lambda *_: Counted())
    kept = 1e-9 - pld.on_grid([(Gaussian(1.0), 5)], 1e-9, ADD, 1e-4)
    assert kept == pytest.approx(1e-12 + 5 * 2.0**-50, rel=1e-3, abs=0)
    # More for a longer composition; a sampled release has its part as losses that are infinite.
    long = [(Gaussian(1.0), 100_000), (Poisson(0.5, Gaussian(1.0)), 90_000)]
    assert 1e-9 - pld.on_grid(long, 1e-9, ADD, 1e-4) == pytest.approx(1e-12 + 100_000 * 2.0**-50, rel=1e-3, abs=0)
    assert 1e-9 - pld.on_grid([(Gaussian(1.0), 10**7)], 1e-9, ADD, 1e-4) == pytest.approx(1e-12 + 0.1e-9, rel=1e-3, abs=0)


@pytest.mark.parametrize(
    ("rate", "multiplier", "count", "delta"),
    [(1e-8, 1e3, 1, 1e-12), (1e-12, 1e3, 1, 1e-20), (0.3, 1e8, 1, 1e-10), (0.3, 1e8, 10**12, 1e-6)],
)
def test_a_divergence_that_is_lost_to_rounding_costs_no_less(rate: float, multiplier: float, count: int, delta: float) -> None:
    """Many releases together are as one of a Gaussian with a rate's part of the sensitivity."""
    event = repeated(Poisson(rate, Gaussian(multiplier)), count)
    shift = rate * math.sqrt(count) / multiplier
    # The least delta at epsilon 0, the distance in total variation, is that of both: epsilon is above 0.
    assert 2 * stats.norm.cdf(shift / 2) - 1 > delta
    least = 0.0 if count == 1 else dp.get_epsilon_gaussian(1 / shift, delta)
    assert epsilon(event, delta=delta, relation=ADD).epsilon > least


@pytest.mark.parametrize("root", [1e-6, 1.0, 1e6])
def test_the_root_of_the_exact_gaussian_is_raised_by_the_finders_tolerance(root: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp, "get_epsilon_gaussian", lambda *_, tol: root - tol)
    assert accounting._gaussian_exact([(Gaussian(1.0), 1)], 1e-5, ADD) >= root


# The log


def test_the_library_never_configures_the_root_logger(monkeypatch):
    # dp-accounting warns of orders at this rate and noise; absl calls basicConfig for that, whatever its own level.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    renyi._divergence.cache_clear()
    assert rdp_epsilon(Poisson(0.5, Gaussian(0.31)), delta=1e-5, relation=ADD) is not None
    assert root.handlers == []
