"""Fully adaptive budgets: what is added up, at which order, and where charges end."""

import math
import random
from functools import partial

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from scipy import integrate

from flower_dp.privacy import accounting, fixed_size, renyi, renyi_filter
from flower_dp.privacy.budget import JointBudget
from flower_dp.privacy.charges import EVERY_CLIENT, Charge, Scope
from flower_dp.privacy.events import UnsupportedEventError
from flower_dp.privacy.private_file import BudgetSpentError
from flower_dp.privacy.store import Store

Gaussian, Laplace, Poisson = dp.GaussianDpEvent, dp.LaplaceDpEvent, dp.PoissonSampledDpEvent
ADD, REPLACE = "add-or-remove-one", "replace-one"
BUDGET = partial(JointBudget, delta=1e-5, fully_adaptive=True)


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "ledger.sqlite"


def charge(number, event, owners=(EVERY_CLIENT,), relation=ADD):
    words = {"release": "r", "number": number, "server_round": number, "kind": "k"}
    return Charge(**words, scope=Scope(unit="client", relation=relation), owners=owners, events=(event,))


def affordable(event, budget, relation):
    """How often an event fits into a whole budget."""
    order = budget.renyi_order
    allowed = renyi_filter.allowance(budget.epsilon, budget.delta, order)
    return renyi_filter.num_affordable(dp.NoOpDpEvent(), event, allowed=allowed, order=order, relation=relation)


def of_densities(one, other, order, **limits):
    """The Renyi divergence of two densities, by numerical integration."""
    value, _ = integrate.quad(
        lambda x: math.exp(order * one(x) - (order - 1) * other(x)), -40, 40, epsabs=0, limit=500, points=[-1, 0, 1], **limits
    )
    return math.log(value) / (order - 1)


def gaussian(x, mean, std):
    return -(((x - mean) / std) ** 2) / 2 - math.log(std * math.sqrt(2 * math.pi))


def laplace(x, mean, scale):
    return -abs(x - mean) / scale - math.log(2 * scale)


def mixed(x, density, means, weights, scale):
    return math.log(sum(weight * math.exp(density(x, mean, scale)) for mean, weight in zip(means, weights, strict=True)))


@pytest.mark.parametrize("order", [1.5, 4.0])
@pytest.mark.parametrize(
    ("event", "relation", "density", "means", "weights", "tight"),
    [
        (Gaussian(2.0), ADD, gaussian, ([0], [1]), ([1], [1]), True),
        (Gaussian(2.0), REPLACE, gaussian, ([-1], [1]), ([1], [1]), True),
        (Laplace(2.0), ADD, laplace, ([0], [1]), ([1], [1]), True),
        (Laplace(2.0), REPLACE, laplace, ([-1], [1]), ([1], [1]), True),
        (Poisson(0.1, Gaussian(2.0)), ADD, gaussian, ([0, 1], [0]), ([0.9, 0.1], [1]), True),
        # Between orders 1 and 2 the library's bound is ten times as large.
        (Poisson(0.3, Gaussian(2.0)), ADD, gaussian, ([0, 1], [0]), ([0.7, 0.3], [1]), True),
        (Poisson(0.9, Gaussian(2.0)), REPLACE, gaussian, ([0, 1], [0, -1]), ([0.1, 0.9], [0.1, 0.9]), True),
        (dp.SampledWithoutReplacementDpEvent(10, 1, Gaussian(2.0)), REPLACE, gaussian, ([0, 2], [0]), ([0.9, 0.1], [1]), False),
        (dp.SampledWithoutReplacementDpEvent(10, 8, Gaussian(2.0)), REPLACE, gaussian, ([0, 2], [0]), ([0.2, 0.8], [1]), False),
        (Poisson(0.1, Laplace(2.0)), ADD, laplace, ([0, 1], [0]), ([0.9, 0.1], [1]), False),
        (Poisson(0.1, Laplace(2.0)), REPLACE, laplace, ([0, 1], [0, -1]), ([0.9, 0.1], [0.9, 0.1]), False),
    ],
)
def test_a_releases_divergence_is_never_below_that_of_its_worst_pair(event, relation, density, means, weights, tight, order):
    scale = dp_scale = 2.0
    assert renyi_filter.inner_of(event)[0].noise_multiplier == dp_scale
    pair = [lambda x, m=m, w=w: mixed(x, density, m, w, scale) for m, w in zip(means, weights, strict=True)]
    worst = max(of_densities(*pair, order), of_densities(*pair[::-1], order))
    found = renyi_filter.divergence(event, order, relation)
    assert worst * (1 - 1e-7) <= found
    assert not tight or found == pytest.approx(worst, rel=1e-6)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("release", [Laplace(3e16), Laplace(1e17), Gaussian(1e50)])
def test_a_release_that_costs_next_to_nothing_costs_something(release, relation):
    budget = JointBudget(epsilon=1.0, delta=1e-5, fully_adaptive=True)
    assert renyi_filter.divergence(release, budget.renyi_order, relation) > 0
    assert affordable(release, budget, relation) > 10**9


def test_a_release_without_a_bound_is_refused_and_not_charged(path):
    event = dp.SampledWithoutReplacementDpEvent(100, 10, Laplace(1.0))
    with pytest.raises(UnsupportedEventError, match="has no bound under relation='add-or-remove-one' in a fully adaptive budget"):
        renyi_filter.divergence(event, 4.0, ADD)
    Store.create(path, BUDGET(epsilon=8.0))
    with Store(path) as ledger:
        run = ledger.begin(method="m", delta=1e-5)
        with pytest.raises(UnsupportedEventError):
            ledger.append(run, charge(1, event))
        assert not ledger.num_charges
    assert renyi_filter.divergence(event, 4.0, REPLACE) < math.inf
    assert renyi_filter.divergence(dp.NonPrivateDpEvent(), 4.0, ADD) == math.inf


@pytest.mark.parametrize(("epsilon", "seed"), [(1.5, 0), (8.0, 1), (50.0, 2)])
def test_whatever_is_chosen_next_the_divergences_of_each_client_stay_within_epsilon(path, epsilon, seed):
    """An adversary chooses noise and clients of each charge by what was there before; it tries until nothing fits any more."""
    rng = random.Random(seed)
    Store.create(path, BUDGET(epsilon=epsilon))
    spent, told, refused, number = dict.fromkeys("abc", 0.0), set(), 0, 0
    with Store(path) as ledger:
        order = ledger.budget.renyi_order
        allowed = renyi_filter.allowance(epsilon, 1e-5, order)
        run = ledger.begin(method="m", delta=1e-5)
        while refused < 20 and number < 500:
            multiplier = rng.choice([3.0, 5.0, 7.0]) * math.sqrt(order / allowed) * (1 + max(spent.values()) / allowed)
            owners = rng.choice([("a",), ("b", "c"), (EVERY_CLIENT,), ("a", "b", "c")])
            one = order / (2 * multiplier**2)
            named = "abc" if owners == (EVERY_CLIENT,) else owners
            fits = all(
                compute_epsilon([order], [spent[name] + one * (1 + 1e-6)], 1e-5)[0] <= epsilon * (1 - 1e-6) for name in named
            )
            try:
                ledger.append(run, charge(number + 1, Gaussian(multiplier), owners))
            except BudgetSpentError as error:
                told.add(str(error))
                assert not fits
                refused += 1
                continue
            number += 1
            for name in named:
                spent[name] += one
    assert 1 < number < 500
    limit = f"epsilon {epsilon:g} at delta 1e-05, fully adaptive, for all runs together"
    assert told == {f"it would pass the ledger's budget, {limit}"}
    for sum_of_one in spent.values():
        assert compute_epsilon([order], [sum_of_one], 1e-5)[0] <= epsilon


@pytest.mark.exact
def test_fewer_rounds_fit_than_in_a_budget_of_releases_that_are_known_beforehand():
    """The numbers of docs/ledgers.md."""
    event = Poisson(0.1, Gaussian(1.0))
    assert affordable(event, BUDGET(epsilon=8.0), ADD) == 83
    costs = [accounting.epsilon(accounting.repeated(event, rounds), delta=1e-5, relation=ADD).epsilon for rounds in (129, 130)]
    assert costs[0] <= 8.0 < costs[1]


@pytest.mark.exact
def test_a_fixed_number_of_clients_is_charged_with_its_own_divergence_not_with_a_looser_bound():
    """100 of 1,000 clients: 32 rounds by the bound of Wang, Balle & Kasiviswanathan, 74 by the pair with the exact profile."""
    event, order = dp.SampledWithoutReplacementDpEvent(1000, 100, Gaussian(2.0)), 4.0

    def integrand(x):
        profile = fixed_size.amplified(fixed_size.gaussian_profile(1.0), 0.1, np.asarray([x]))[0]
        return (math.exp((order - 1) * x) + math.exp(-order * x)) * profile

    moment = 1 + order * (order - 1) * integrate.quad(integrand, 0, 15, epsabs=0, limit=500)[0]
    one = math.log(moment) / (order - 1)
    costs = [compute_epsilon([order], [rounds * one], 1e-5)[0] for rounds in (74, 75)]
    assert costs[0] <= 8.0 < costs[1]
    assert affordable(event, BUDGET(epsilon=8.0, renyi_order=order), REPLACE) == 74


@pytest.mark.parametrize(
    ("event", "relation", "usual", "best"),
    [
        (dp.SampledWithoutReplacementDpEvent(1000, 100, Gaussian(2.0)), REPLACE, 74, 84),
        (dp.SampledWithoutReplacementDpEvent(1000, 10, Gaussian(1.0)), REPLACE, 2, 80),
        (Poisson(0.1, Gaussian(1.0)), ADD, 83, 84),
    ],
)
def test_an_order_that_is_chosen_for_what_will_be_charged_lets_more_of_it_fit(path, event, relation, usual, best):
    order = renyi_filter.order_for(8.0, 1e-5, event, relation=relation)
    budgets = BUDGET(epsilon=8.0), BUDGET(epsilon=8.0, renyi_order=order)
    found = [affordable(event, budget, relation) for budget in budgets]
    assert found[0] == usual
    assert found[1] >= best
    # No order fits one more; and the ledger keeps it for whatever is charged.
    counts = [renyi_filter.allowance(8.0, 1e-5, one) / renyi_filter.divergence(event, one, relation) for one in renyi.ORDERS]
    assert found[1] >= math.floor(max(counts) * (1 - 1e-6))
    Store.create(path, budgets[1])
    with Store(path) as ledger:
        assert ledger.budget.renyi_order == order


def test_a_ledger_keeps_its_order_whatever_a_later_release_would_choose(path, monkeypatch):
    Store.create(path, BUDGET(epsilon=8.0))
    monkeypatch.setattr(renyi_filter, "order_for", lambda epsilon, delta: pytest.fail("chosen anew"))
    with Store(path, read_only=True) as ledger:
        assert ledger.budget == BUDGET(epsilon=8.0, renyi_order=4.0)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0, 50.0])
def test_the_order_is_the_one_at_which_most_gaussian_releases_fit(epsilon):
    best = renyi_filter.order_for(epsilon, 1e-5)
    count = affordable(Gaussian(300.0), BUDGET(epsilon=epsilon), ADD)
    assert count > 0
    for order in renyi.ORDERS:
        other = BUDGET(epsilon=epsilon, renyi_order=order)
        if order < 2 or order == int(order):
            assert affordable(Gaussian(300.0), other, ADD) <= count
    assert best < 2 or best == int(best)
    assert compute_epsilon([best], [renyi_filter.allowance(epsilon, 1e-5, best)], 1e-5)[0] == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"epsilon": 8.0, "delta": 0.0}, "delta=0: a fully adaptive budget needs a delta above 0"),
        ({"epsilon": 8.0, "renyi_order": 1.0}, "renyi_order=1.0"),
        ({"epsilon": 8.0, "renyi_order": 4.0, "fully_adaptive": False}, "is of a fully adaptive budget alone"),
        ({"epsilon": 8.0, "fully_adaptive": "yes"}, "fully_adaptive='yes'"),
        ({"epsilon": 1e-9}, "is too small for a fully adaptive budget at delta=1e-05"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(words, why):
    with pytest.raises(ValueError, match=why):
        BUDGET(**words)
