"""Poisson sampling: the same losses as dp-accounting's own loop has, and never a smaller epsilon."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import integrate, stats

from flower_dp.privacy import poisson

RELATIONS = {
    "add-or-remove-one": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}
CASES = [(0.3, 0.5), (0.5, 0.01), (1.0, 0.1), (1.0, 0.999), (2.0, 1e-4), (30.0, 0.02)]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("std", "rate"), CASES)
def test_the_losses_are_those_of_the_library(std, rate, relation):
    grid = 1e-3 if std > 1 else 1e-2 if std > 0.4 else 5e-2  # the library takes seconds where losses are large
    ours = poisson.distribution(dp.GaussianDpEvent(std), rate, grid, relation)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        std, value_discretization_interval=grid, sampling_prob=rate, neighboring_relation=RELATIONS[relation]
    )
    composed = ours.self_compose(20), theirs.self_compose(20)
    epsilons = np.concatenate([np.linspace(-3, 3, 61), [5.0, 10.0, 20.0]])
    for pair in ((ours, theirs), composed):
        found, expected = (one.get_delta_for_epsilon(epsilons) for one in pair)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    for delta in (1e-3, 1e-6, 1e-9):
        found, expected = (one.get_epsilon_for_delta(delta) for one in composed)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("std", "rate"), [(0.5, 0.01), (1.0, 0.1), (4.0, 0.3)])
def test_no_profile_is_below_that_of_the_densities(std, rate, relation):
    """Integrated without any formula of losses: the part of one density that is above e^epsilon times the other."""

    xs = np.linspace(-1 - 12 * std, 1 + 12 * std, 200_001)

    def mixed(shift):
        return (1 - rate) * stats.norm.pdf(xs, 0, std) + rate * stats.norm.pdf(xs, shift, std)

    with_unit, without = mixed(-1.0), mixed(1.0) if relation == "replace-one" else mixed(0.0)
    found = poisson.distribution(dp.GaussianDpEvent(std), rate, 1e-3, relation)
    for epsilon in (0.0, 0.013, 0.2, 1.0, 2.5):
        both = ((with_unit, without), (without, with_unit))
        exact = max(integrate.simpson(np.maximum(0.0, one - math.exp(epsilon) * other), x=xs) for one, other in both)
        assert exact - 1e-9 <= found.get_delta_for_epsilon(epsilon) <= 1.01 * exact + 1e-7


@pytest.mark.parametrize(("rate", "std"), [(0.01, 0.5), (0.3, 2.0), (0.9, 0.5)])
def test_no_two_contributions_have_a_larger_profile_than_opposite_ones(std, rate):
    """The claim of docs/privacy.md, for vectors in the plane of norm 1 and less."""
    rng = np.random.default_rng(5)
    line = np.linspace(-9 * std - 2, 9 * std + 2, 301)
    weights = np.outer(*[stats.norm.pdf(line, 0, std) * (line[1] - line[0])] * 2)

    def profile(order, with_unit, replaced):
        ratios = [
            np.exp((np.add.outer(moved[0] * line, moved[1] * line) - moved @ moved / 2) / std**2)
            for moved in (with_unit, replaced)
        ]
        return np.sum(weights * np.maximum(0.0, (1 - rate) * (1 - order) + rate * ratios[0] - order * rate * ratios[1]))

    for order in np.exp([-2.0, -0.3, 0.0, 0.05, 0.5, 2.0]):
        largest = profile(order, np.array([-1.0, 0.0]), np.array([1.0, 0.0]))
        for _ in range(20):
            angles, norms = rng.uniform(0, 2 * np.pi, 2), rng.uniform(0, 1, 2) ** 0.2
            pair = [norm * np.array([np.cos(angle), np.sin(angle)]) for angle, norm in zip(angles, norms, strict=True)]
            assert profile(order, *pair) <= largest + 1e-9


def divergence(std, rate, order):
    """By the densities themselves, in place of their ratios: of the mixtures with N(-1, std^2) and with N(1, std^2)."""
    xs = np.linspace(-2 * order - 12 * std, 12 * std + 1, 400_001)
    without = math.log1p(-rate) + stats.norm.logpdf(xs, 0, std)
    with_unit, replaced = (np.logaddexp(without, math.log(rate) + stats.norm.logpdf(xs, at, std)) for at in (-1.0, 1.0))
    return math.log(integrate.simpson(np.exp(order * with_unit + (1 - order) * replaced), x=xs)) / (order - 1)


@pytest.mark.parametrize(
    ("std", "rate", "order"),
    [(1.0, 0.1, 2.0), (1.0, 0.1, 1.1), (0.5, 0.01, 4.0), (1.0, 1e-3, 6.5), (4.0, 0.3, 10.0), (2.0, 0.999, 16.0)],
)
def test_the_divergence_of_replacing_is_that_of_the_densities(std, rate, order):
    found = poisson.replaced_divergence(dp.GaussianDpEvent(std), rate, order)
    assert found == pytest.approx(divergence(std, rate, order), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("order", [1.1, 2.0, 16.0, 512.0])
@pytest.mark.parametrize("std", [0.3, 1.0, 3.0, 1e3])
def test_the_divergence_of_replacing_lies_between_what_it_must(std, order):
    """Of a unit that always takes part it is that of a shift by 2; it is above that of a unit that is removed; endless noise costs nothing."""
    release = dp.GaussianDpEvent(std)
    always = 2 * order / std**2
    if always * order < 5:
        assert poisson.replaced_divergence(release, 1 - 1e-12, order) == pytest.approx(always, rel=1e-6)
    found = [poisson.replaced_divergence(release, rate, order) for rate in (1e-6, 1e-3, 0.1, 0.5, 0.9)]
    assert found == sorted(found)
    assert found[-1] < always
    assert poisson.replaced_divergence(dp.GaussianDpEvent(1e50), 0.5, order) < 1e-12 / (order - 1)
    if order == 16.0:
        removed = dp.rdp.RdpAccountant([order]).compose(dp.PoissonSampledDpEvent(0.1, release)).rdp[0]
        assert removed < found[2]


def test_an_order_that_takes_too_many_points_has_no_bound():
    assert poisson.replaced_divergence(dp.GaussianDpEvent(1e-3), 0.5, 64.0) == math.inf
    assert poisson.replaced_divergence(dp.GaussianDpEvent(1e-3), 0.5, 1e9) == math.inf
