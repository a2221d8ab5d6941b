"""Sampling without replacement under replace-one against explicit pairs of data sets, the sampler itself, and Monte Carlo.

In `distance` the noise scale is 1 and the sensitivity 2 C is `distance`.
"""

import itertools
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special

from flower_dp.core.sampling import FixedSizeSampling
from flower_dp.privacy import accounting, fixed_size, planned_run, pld
from flower_dp.privacy.accounting import epsilon, rdp_epsilon
from flower_dp.privacy.charges import History
from flower_dp.privacy.events import UnsupportedEventError

Gaussian, Laplace, Poisson = dp.GaussianDpEvent, dp.LaplaceDpEvent, dp.PoissonSampledDpEvent
Compose, Repeat = dp.ComposedDpEvent, dp.SelfComposedDpEvent
REPLACE = "replace-one"
GOLDEN = [(2.0, 1000, 100, 150, 5.01e-4, 7.482), (4.0, 600, 120, 18, 1e-4, 1.817), (2.0, 1000, 1000, 1, 1e-5, 4.3772)]
Tail = Callable[[Any], Any]
TAIL: dict[Any, Tail] = {
    Gaussian: lambda x: special.ndtr(-x),
    Laplace: lambda x: np.where(x < 0, 1 - np.exp(x) / 2, np.exp(-x) / 2),
}


def sampled(population: int, sample: int, release: dp.DpEvent) -> dp.DpEvent:
    return dp.SampledWithoutReplacementDpEvent(population, sample, release)


def run(multiplier: float, population: int, sample: int, count: int) -> dp.DpEvent:
    return Repeat(sampled(population, sample, Gaussian(multiplier)), count)


def cost(event: dp.DpEvent, delta: float = 1e-5) -> float:
    return epsilon(event, delta=delta, relation=REPLACE).epsilon


def lost(p: Tail, q: Tail, eps: float, thresholds: np.ndarray) -> float:
    """The largest P(S) - e^eps Q(S) over half lines S, from P(x > t) and Q(x > t): no delta is below it."""
    differences = p(thresholds) - math.exp(eps) * q(thresholds)
    return float(max(differences.max(), (1 - math.exp(eps) - differences).max()))


def worst_pair(kind: Any, distance: float, rate: float) -> tuple[Tail, Tail]:
    """The sum if all other clients send -C, and one sends C or -C: with probability g it is 2 C higher, else the same."""
    tail = TAIL[kind]
    return lambda t: (1 - rate) * tail(t) + rate * tail(t - distance), tail


# Numbers


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.parametrize(("multiplier", "population", "sample", "count", "delta", "golden"), GOLDEN)
def test_golden_numbers(multiplier: float, population: int, sample: int, count: int, delta: float, golden: float) -> None:
    event = run(multiplier, population, sample, count)
    assert cost(event, delta) == pytest.approx(golden, abs=1e-3)
    renyi = rdp_epsilon(event, delta=delta, relation=REPLACE)
    assert renyi is not None
    assert cost(event, delta) < renyi


# One release


@pytest.mark.parametrize("kind", [Gaussian, Laplace])
@pytest.mark.parametrize(("distance", "rate"), [(1.0, 0.1), (0.5, 0.5), (2.0, 0.02), (0.1, 0.9), (3.0, 1.0)])
@pytest.mark.parametrize("grid", [1e-3, 0.05])
def test_the_profile_is_that_of_the_worst_pair_in_both_directions_and_never_below(
    kind: Any, distance: float, rate: float, grid: float
) -> None:
    p, q = worst_pair(kind, distance, rate)
    got = fixed_size.distribution(kind(1 / distance), rate, grid)
    thresholds = np.concatenate([np.linspace(-30, 30, 20_001), [0, distance]])
    for eps in (-2.03, -0.71, -0.101, 0.0, 0.0503, 0.333, 0.9004, 1.7):
        there, back = lost(p, q, eps, thresholds), lost(q, p, eps, thresholds)
        # Above 0 the way from p to q is the worse one, below 0 the way back.
        exact = there if eps >= 0 else back
        assert exact >= max(there, back) - 1e-6
        # A line between two points of a smooth profile is too high by about grid^2; of one with a corner by about the grid.
        most = exact + (2 * grid**2 + 3e-6 if kind is Gaussian else grid)
        assert max(there, back) <= got.get_delta_for_epsilon(eps) <= most


@pytest.mark.parametrize("order", [1.1, 2.0, 5.5, 12.0])
@pytest.mark.parametrize(("distance", "rate"), [(1.0, 0.1), (0.05, 0.5), (1.5, 0.02), (0.01, 1e-4), (1.2, 0.9)])
def test_the_renyi_divergence_is_that_of_the_profile(distance: float, rate: float, order: float) -> None:
    """A moment is a mixture of hockey sticks: 1 + a (a - 1) times the integral of (e^((a - 1) x) + e^(-a x)) d'(x) over x > 0."""
    profile = fixed_size.gaussian_profile(distance)

    def integrand(x: float) -> float:
        delta = fixed_size.amplified(profile, rate, np.asarray([x]))[0]
        return float((math.exp((order - 1) * x) + math.exp(-order * x)) * delta)

    ends = fixed_size._amplified(distance * (order * distance + 12), rate)
    points = [fixed_size._amplified(distance * t, rate) for t in (0.5, 2.0, order * distance / 2, order * distance, 9.0)]
    value, error = integrate.quad(integrand, 0, ends, points=points, limit=2000, epsabs=0, epsrel=1e-11)
    right = math.log1p(order * (order - 1) * value) / (order - 1)
    assert error < 1e-8 * value
    assert fixed_size.divergence(Gaussian(1 / distance), rate, order) == pytest.approx(right, rel=1e-8)


@pytest.mark.parametrize("order", [1.5, 4.0, 64.0])
def test_a_divergence_is_never_above_wangs_nor_above_that_without_sampling(order: float) -> None:
    for noise, sample in itertools.product((0.3, 1.0, 4.0, 100.0, 1e9), (1, 100, 900)):
        found = fixed_size.divergence(Gaussian(noise), sample / 1000, order)
        unsampled = order / (2 * noise**2)
        assert 0 < found < unsampled
        if noise < 1e3:
            library = RdpAccountant([order], dp.NeighboringRelation.REPLACE_ONE)
            assert found <= library.compose(sampled(1000, sample, Gaussian(noise))).rdp[0] * (1 + 1e-9)
    # Where the integral would take too long.
    assert fixed_size.divergence(Gaussian(1e-9), 0.1, order) == pytest.approx(order * 5e17, rel=1e-12)


@pytest.mark.parametrize("kind", [Gaussian, Laplace])
@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([(2, 1), (3, 2), (4, 2), (5, 1), (5, 4), (4, 4)]),
    values=st.lists(st.sampled_from([-1.0, 1.0]) | st.floats(-1, 1), min_size=6, max_size=6),
    scale=st.floats(0.7, 3),
    eps=st.floats(-2, 2),
)
def test_no_data_sets_lose_more_when_every_subset_is_counted(
    kind: Any, shape: tuple[int, int], values: list[float], scale: float, eps: float
) -> None:
    """The released sum is a mixture over all subsets of m of n contributions in [-1, 1]; `values[n]` replaces `values[0]`."""
    population, sample = shape
    data, other = values[:population], [values[population], *values[1:population]]

    def tail(contributions: list[float]) -> Tail:
        sums = [sum(subset) for subset in combinations(contributions, sample)]
        return lambda t: sum(TAIL[kind]((t - total) / scale) for total in sums) / len(sums)

    one = pld._leaf_pld(sampled(population, sample, kind(scale)), REPLACE, 0.01)
    assert one.get_delta_for_epsilon(eps) >= lost(tail(data), tail(other), eps, np.linspace(-20, 20, 2001)) - 1e-12


def test_one_client_more_or_less_is_not_bounded() -> None:
    for event in (sampled(10, 2, kind(1.0)) for kind in (Gaussian, Laplace)):
        assert pld._leaf_pld(event, "add-or-remove-one", 1e-2) is None
        with pytest.raises(UnsupportedEventError, match="event"):
            epsilon(Compose([event, Gaussian(3.0)]), delta=1e-5, relation="add-or-remove-one")


def test_a_sampled_laplace_release_ends_at_its_pure_epsilon() -> None:
    event = sampled(10, 3, Laplace(2.0))
    pure = math.log1p(0.3 * math.expm1(1.0))
    assert epsilon(event, delta=0, relation=REPLACE).epsilon == pytest.approx(pure, rel=1e-12)
    assert pld._leaf_pld(event, REPLACE, 1e-4).get_delta_for_epsilon(pure + 1e-4) < 1e-14
    assert cost(event, 1e-2) < pure


# Many releases


@pytest.mark.slow
@pytest.mark.parametrize(("multiplier", "sample", "fits"), [(2.0, 100, True), (4.0, 100, False), (2.0, 80, False)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_no_run_loses_more_by_monte_carlo(multiplier: float, sample: int, fits: bool, adaptive: bool) -> None:
    """The neighbors of `worst_pair`, at noise 2 C and a tenth of the clients; half of the sensitivity or a smaller sample is refuted.

    If adaptive, the contributions depend on what was released: the others send C instead of -C, which turns the pair around, where
    the loss so far is below its mean.
    """
    rng, size, delta = np.random.default_rng(8), 60_000, 2e-2
    losses = np.zeros(size)
    for _ in range(150):
        around = (losses < losses.mean()) if adaptive else np.zeros(size, bool)
        out = rng.standard_normal(size) + (~around & (rng.random(size) < 0.1))
        loss = np.log1p(0.1 * np.expm1(out - 0.5))
        losses += np.where(around, -loss, loss)
    gains = np.maximum(0, -np.expm1(cost(run(multiplier, 1000, sample, 150), delta) - losses))
    lower = gains.mean() - 5 * gains.std() / math.sqrt(size)  # false alarm 3e-7
    assert (lower <= delta) == fits


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.parametrize(
    ("multiplier", "delta", "sample", "count"),
    [(8.0, 1e-6, 1, 60), (0.8, 1e-6, 1, 1), (3.0, 1e-3, 20, 10), (8.0, 1e-6, 60, 10)],
)
def test_never_below_a_pair_that_can_happen_and_never_above_the_renyi_bound(
    multiplier: float, delta: float, sample: int, count: int
) -> None:
    """The losses of `worst_pair`, in each direction, are those of Poisson sampling with and without one client, at twice the norm."""
    event = run(multiplier, 60, sample, count)
    leaves = [(event.event, count)]
    got = pld.epsilon_of(leaves, delta, REPLACE, pld.GRID, math.nan)
    one = Gaussian(multiplier / 2) if sample == 60 else Poisson(sample / 60, Gaussian(multiplier / 2))
    lower = epsilon(Repeat(one, count), delta=delta, relation="add-or-remove-one").epsilon
    assert got >= lower - 1e-4 * (1 + lower)
    renyi = rdp_epsilon(event, delta=delta, relation=REPLACE)
    assert renyi is not None
    assert got <= renyi + 1e-4
    assert cost(event, delta) <= min(renyi, got + 1e-4)


@pytest.mark.exact
def test_an_epsilon_below_the_error_of_its_grid_is_renyis() -> None:
    """A search for little noise looks on a coarse grid."""
    event = run(49.5, 10_000, 10, 3000)
    coarse = epsilon(event, delta=1e-3, relation=REPLACE, grid=1e-3)
    assert coarse.epsilon == rdp_epsilon(event, delta=1e-3, relation=REPLACE)
    assert epsilon(event, delta=1e-3, relation=REPLACE).epsilon < coarse.epsilon < 0.004


def test_losses_too_large_for_a_grid_are_left_to_other_accountants() -> None:
    with pytest.raises(OverflowError, match="too many"):
        fixed_size.distribution(Gaussian(1e-3), 0.1, 1e-4)
    for event in (run(1e-3, 100, 10, 3), Repeat(sampled(100, 10, Laplace(1e-4)), 3)):
        assert 0 < cost(event) < math.inf


# Events together


@pytest.mark.slow
def test_fixed_size_poisson_and_unsampled_releases_compose_in_any_order() -> None:
    parts = [run(3.0, 100, 10, 5), Repeat(Poisson(0.1, Gaussian(3.0)), 5), Gaussian(6.0), Laplace(20.0)]
    both = epsilon(Compose(parts), delta=1e-5, relation=REPLACE)
    assert both.accountant == "pld"
    assert cost(Compose(parts[::-1])) == pytest.approx(both.epsilon, rel=1e-6)
    assert both.epsilon > max(cost(Compose(parts[:index] + parts[index + 1 :])) for index in range(4))
    assert both.epsilon < sum(cost(part, 2.5e-6) for part in parts)


def test_several_gaussian_releases_on_one_sample_are_one_with_less_noise() -> None:
    together = sampled(100, 10, Compose([Gaussian(3.0), Repeat(Gaussian(8.0), 2)]))
    assert cost(Repeat(together, 4)) == pytest.approx(cost(run(1 / math.hypot(1 / 3, 1 / 8, 1 / 8), 100, 10, 4)), rel=1e-9)
    assert cost(together) > cost(sampled(100, 10, Gaussian(3.0)))
    assert cost(sampled(100, 10, Compose([Gaussian(3.0), dp.NonPrivateDpEvent()]))) == math.inf
    for event in (Compose([Gaussian(3.0), Laplace(3.0)]), Compose([]), Compose([sampled(10, 2, Gaussian(1.0))])):
        with pytest.raises(UnsupportedEventError, match="on one sample only Gaussian"):
            cost(sampled(100, 10, event))
    with pytest.raises(ValueError, match="noise_multiplier=nan"):
        cost(sampled(100, 10, Compose([Gaussian(3.0), Gaussian(math.nan)])))


# Who uses it

OPTIONS: dict[str, Any] = {"mechanism": "gaussian", "sampling": "full", "num_rounds": 1, "delta": 1e-5, "relation": None}
OPTIONS |= {"sampling_rate": None, "cohort_size": None, "num_clients": None}


@pytest.mark.slow
@pytest.mark.exact
def test_a_planned_run_and_a_ledger_state_the_golden_epsilon() -> None:
    multiplier, population, sample, count, delta, golden = GOLDEN[1]
    sampler = FixedSizeSampling(cohort_size=sample)
    event = sampler.event(Gaussian(multiplier), 1, population)
    ledger = History(relation=REPLACE, counts={event: count})
    options = OPTIONS | {"sampling": "fixed-size", "delta": delta, "cohort_size": sample, "num_clients": population}
    options |= {"num_rounds": count}
    planned = planned_run.from_options(**options)
    assert planned.cost(multiplier)["epsilon"] == ledger.cost(delta).epsilon == pytest.approx(golden, abs=1e-3)
    assert planned.cost(multiplier)["accountant"] == ledger.cost(delta).accountant == "pld"
    assert planned.longest(golden + 1e-3, multiplier).num_rounds == count
    curve = accounting.epsilon_by_round(
        lambda rounds: run(multiplier, population, sample, rounds), num_rounds=count, delta=delta, relation=REPLACE
    )
    assert golden - 1e-3 <= curve[-1] <= 1.005 * golden


@pytest.mark.parametrize("wrong", ["mechanism", "sampling"])
def test_a_planned_run_of_an_unknown_kind_is_refused(wrong: str) -> None:
    """It was accounted as Gaussian noise, or as full sampling."""
    with pytest.raises(ValueError, match=f"^--{wrong}='none': must be one of"):
        planned_run.from_options(**OPTIONS | {wrong: "none"})
