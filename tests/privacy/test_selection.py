"""The cost of choosing: against closed forms, against the exact output of the best of K runs, and how K is drawn."""

import math
from collections.abc import Callable

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant
from scipy import optimize, stats

from flower_dp.privacy import renyi, selection
from flower_dp.privacy.events import Relation, UnsupportedEventError
from flower_dp.privacy.selection import NegativeBinomialRunCount, PoissonRunCount, RunCountLaw

ADD: Relation = "add-or-remove-one"
REPLACE: Relation = "replace-one"
Gaussian, Laplace = dp.GaussianDpEvent, dp.LaplaceDpEvent

# Laws of K, each with its probability generating function by Definition 1 of Papernot & Steinke (2022); gamma by hand.
GAMMA = 0.02
LOGARITHMIC = NegativeBinomialRunCount(mean=(1 / GAMMA - 1) / math.log(1 / GAMMA), shape=0)
GEOMETRIC = NegativeBinomialRunCount(mean=1 / GAMMA, shape=1)
STEEP = NegativeBinomialRunCount(mean=3 * (1 / GAMMA - 1) / (1 - GAMMA**3), shape=3)
POISSON = PoissonRunCount(mean=8)
LAWS: list[tuple[RunCountLaw, Callable[[np.ndarray], np.ndarray]]] = [
    (LOGARITHMIC, lambda x: np.log1p(-(1 - GAMMA) * x) / math.log(GAMMA)),
    (GEOMETRIC, lambda x: GAMMA * x / (1 - (1 - GAMMA) * x)),
    (STEEP, lambda x: ((1 - (1 - GAMMA) * x) ** -3.0 - 1) / (GAMMA**-3.0 - 1)),
    (POISSON, lambda x: np.exp(8 * (x - 1))),
]
IDS = ["logarithmic", "geometric", "steep", "poisson"]


def best_of(probabilities: np.ndarray, generating: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the law of the best of K draws, from the worst outcome to the best; the first entry is that of no run at all."""
    below = np.concatenate([[0.0], np.cumsum(probabilities)])
    at = generating(np.minimum(below, 1.0))
    return np.concatenate([[at[0]], np.diff(at)])


def hockey_stick(first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
    return float(np.sum(np.maximum(0.0, first - math.exp(epsilon) * second)))


def cells(law: Callable[[np.ndarray], np.ndarray], shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of some 600 cells of a noisy number, without and with a unit."""
    edges = np.concatenate([[-np.inf], np.linspace(-12, 12, 601), [np.inf]])
    without, shifted = (np.diff(law(edges - by)) for by in (0.0, shift))
    return without, shifted


def orders(without: np.ndarray, shifted: np.ndarray) -> list[np.ndarray]:
    """Return orders of the cells by score: by likelihood, both ways; and a few cells of one kind above one of the other kind."""
    by_likelihood = np.argsort(np.log(shifted + 1e-300) - np.log(without + 1e-300))
    some = [by_likelihood, by_likelihood[::-1]]
    for part in (0.02, 0.1, 0.3):
        count = int(np.searchsorted(np.cumsum(without[by_likelihood]), part))
        # Best are the cells of one end, next those of the other end.
        some += [np.concatenate([one[count:][::-1], one[:count]]) for one in (by_likelihood, by_likelihood[::-1])]
    return some


NOISES = [
    pytest.param(Gaussian(1.2), lambda x: stats.norm.cdf(x / 1.2), id="gaussian"),
    pytest.param(Laplace(1.5), lambda x: stats.laplace.cdf(x / 1.5), id="laplace"),
]


@pytest.mark.parametrize(("relation", "delta"), [(ADD, 1e-5), (REPLACE, 1e-2)])
@pytest.mark.parametrize(("number", "generating"), LAWS, ids=IDS)
@pytest.mark.parametrize(("event", "law"), NOISES)
def test_the_exact_cost_of_the_best_of_k_is_within_the_bound(event, law, number, generating, relation, delta):
    without, shifted = cells(law, 2.0 if relation == REPLACE else 1.0)
    by_renyi = selection.rdp_epsilon([event], number, delta=delta, relation=relation)
    assert by_renyi is not None
    for bound in (selection.epsilon([event], number, delta=delta, relation=relation).epsilon, by_renyi):
        worst = 0.0
        for order in orders(without, shifted):
            one, other = best_of(without[order], generating), best_of(shifted[order], generating)
            worst = max(worst, hockey_stick(one, other, bound), hockey_stick(other, one, bound))
        assert worst <= delta * (1 + 1e-9)


# Closed forms


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("mean", [1, 2, 10, 1000])
def test_pure_epsilon_grows_by_two_plus_shape_where_there_are_many_runs(shape, mean):
    # Corollary 3 of Papernot & Steinke; few runs cost less.
    number = NegativeBinomialRunCount(mean=mean, shape=shape)
    for relation, one_run in ((ADD, 0.25), (REPLACE, 0.5)):
        cost = selection.epsilon([Laplace(4.0)], number, delta=0.0, relation=relation)
        assert one_run <= cost.epsilon <= (2 + shape) * one_run * (1 + 1e-6)
        assert mean < 1000 or cost.epsilon == pytest.approx((2 + shape) * one_run, rel=1e-6)
        assert cost.accountant == "selection-profile"


def gaussian_delta(multiplier: float, epsilon: np.ndarray) -> np.ndarray:
    """Return the exact delta (Balle & Wang 2018, Theorem 8) for sensitivity 1."""
    a, b = 0.5 / multiplier - epsilon * multiplier, -0.5 / multiplier - epsilon * multiplier
    return np.asarray(stats.norm.cdf(a) - np.exp(epsilon) * stats.norm.cdf(b))


@pytest.mark.parametrize(
    ("multiplier", "mean", "delta", "golden"), [(20.0, 100, 1e-5, 1.0667), (4.0, 8, 1e-6, None), (1.0, 10, 1e-5, None)]
)
def test_poisson_by_theorem_6(multiplier, mean, delta, golden):
    # The library's delta comes from Renyi divergences, so it is above the exact one that is taken here: 1.344 for 1.067.
    grid = np.asarray(renyi.ORDERS)
    deltas = gaussian_delta(multiplier, np.log1p(1 / (grid - 1)))
    curve = grid / (2 * multiplier**2) + mean * deltas + math.log(mean) / (grid - 1)
    exact = np.min(curve + np.log1p(-1 / grid) - (math.log(delta) + np.log(grid)) / (grid - 1))
    assert golden is None or exact == pytest.approx(golden, abs=1e-3)
    found = selection.rdp_epsilon([Gaussian(multiplier)], PoissonRunCount(mean=mean), delta=delta, relation=ADD)
    assert found is not None
    assert exact <= found <= 1.02 * exact
    assert selection.epsilon([Gaussian(multiplier)], PoissonRunCount(mean=mean), delta=delta, relation=ADD).epsilon <= found * (
        1 + 1e-8
    )


@pytest.mark.parametrize("number", [LOGARITHMIC, GEOMETRIC, STEEP], ids=IDS[:3])
@pytest.mark.parametrize("event", [Gaussian(3.0), Laplace(2.0), dp.PoissonSampledDpEvent(0.1, Gaussian(1.0))])
def test_theorem_2_as_the_library_has_it(event, number):
    library = RdpAccountant(renyi.ORDERS).compose(RepeatAndSelectDpEvent(event, float(number.mean), float(number.shape)))
    found = selection.rdp_epsilon([event], number, delta=1e-6, relation=ADD)
    # Below order 2 the library's divergences of sampled releases are larger.
    assert found == pytest.approx(library.get_epsilon(1e-6), rel=1e-8)


@pytest.mark.parametrize("number", [LOGARITHMIC, GEOMETRIC, STEEP, POISSON], ids=IDS)
def test_the_bound_from_the_profile_of_one_run(number):
    delta, grid = 1e-6, np.linspace(0, 6, 60_001)
    deltas = gaussian_delta(1.0, grid)
    alone = float(optimize.brentq(lambda e: gaussian_delta(1.0, np.asarray(e)) - delta / number.mean, 0.0, 40.0))
    if isinstance(number, PoissonRunCount):
        added = np.min(8 * (np.expm1(grid) + deltas))
    else:
        added = np.min((1 + number.shape) * np.log(np.exp(grid) + (1 - GAMMA) / GAMMA * deltas))
    found = selection._profile([[(Gaussian(1.0), 1)]], number, delta, ADD)
    assert alone + added <= found + 1e-6 <= 1.01 * (alone + added)


# Candidates


def test_candidates_cost_what_the_worst_of_them_costs():
    events = [Gaussian(3.0), dp.SelfComposedDpEvent(Gaussian(3.0), 4), Gaussian(8.0)]
    together = selection.epsilon(events, GEOMETRIC, delta=1e-5, relation=ADD)
    assert together == selection.epsilon(events[1:2], GEOMETRIC, delta=1e-5, relation=ADD)
    renyi_bound = selection.rdp_epsilon(events, GEOMETRIC, delta=1e-5, relation=ADD)
    assert renyi_bound == selection.rdp_epsilon(events[1:2], GEOMETRIC, delta=1e-5, relation=ADD)


@pytest.mark.parametrize("number", [GEOMETRIC, POISSON])
def test_renyis_bound_of_candidates_takes_the_largest_divergence_at_every_order(number):
    pair = [Gaussian(1.6), Laplace(1.0)]
    alone = [selection.rdp_epsilon([event], number, delta=1e-5, relation=ADD) for event in pair]
    for events in (pair, pair[::-1]):
        assert selection.rdp_epsilon(events, number, delta=1e-5, relation=ADD) >= max(alone)
    assert selection.rdp_epsilon([dp.PoissonSampledDpEvent(0.1, Laplace(1.0))], number, delta=1e-5, relation=ADD) is None


# Fails closed


def test_no_privacy_in_one_candidate_is_none_of_the_choice() -> None:
    for events, cost in (([Gaussian(2.0), dp.NonPrivateDpEvent()], math.inf), ([dp.NoOpDpEvent()], 0)):
        assert selection.epsilon(events, GEOMETRIC, delta=1e-5, relation=ADD).epsilon == cost


def test_what_nothing_bounds_and_nonsense_is_refused() -> None:
    fixed_size = dp.SampledWithoutReplacementDpEvent(100, 10, Gaussian(2.0))
    for event, delta in ((fixed_size, 1e-5), (Gaussian(2.0), 0.0), (dp.RandomizedResponseDpEvent(0.3, 3), 1e-5)):
        with pytest.raises(UnsupportedEventError):
            selection.epsilon([event], GEOMETRIC, delta=delta, relation=ADD)
    with pytest.raises(ValueError, match="must have at least one candidate"):
        selection.epsilon([], GEOMETRIC, delta=1e-5, relation=ADD)
    for mean in (0.5, math.nan, math.inf, 20_000):
        for law in (NegativeBinomialRunCount, PoissonRunCount):
            with pytest.raises(ValueError, match="mean="):
                law(mean=mean)
    for shape in (-0.5, math.nan, 1000.0):
        with pytest.raises(ValueError, match="shape="):
            NegativeBinomialRunCount(mean=2, shape=shape)


# K


@pytest.mark.parametrize("shape", [0.0, 0.3, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("mean", [1.0, 1.0001, 2.0, 10.0, 10_000.0])
def test_gamma_gives_the_mean(mean, shape):
    gamma = NegativeBinomialRunCount(mean=mean, shape=shape).gamma
    if gamma == 1:
        assert mean == 1
    else:
        found = shape * (1 / gamma - 1) / (1 - gamma**shape) if shape else (1 / gamma - 1) / math.log(1 / gamma)
        assert found == pytest.approx(mean, rel=1e-8)


@pytest.mark.parametrize(("number", "generating"), LAWS, ids=IDS)
def test_k_has_its_law(number, generating):
    # The frequencies of K <= k against the coefficients of the generating function; the false alarm rate of each of the five
    # comparisons is below 1e-5 (4.5 standard errors), with a fixed seed.
    rng, draws = np.random.default_rng(7), 25_000
    drawn = np.asarray([number.sample(rng) for _ in range(draws)])
    assert abs(drawn.mean() - number.mean) < 4.5 * drawn.std() / math.sqrt(draws) < 0.05 * number.mean
    points = 4096
    around = np.exp(2j * np.pi * np.arange(points) / points)
    coefficients = np.real(np.fft.fft(generating(around))) / points
    for most in (0, 1, 3, 10):
        expected = float(np.sum(coefficients[: most + 1]))
        assert abs(np.mean(drawn <= most) - expected) < 4.5 * math.sqrt(max(expected * (1 - expected), 1e-9) / draws)
