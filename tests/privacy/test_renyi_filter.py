"""Fully adaptive budgets: what is added up, at which order, and where charges end."""

import math
from contextlib import suppress
from functools import partial

import dp_accounting as dp
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from scipy import integrate

from flower_dp.privacy import accounting, renyi, renyi_filter
from flower_dp.privacy.budget import LedgerBudget
from flower_dp.privacy.events import UnsupportedEventError
from flower_dp.privacy.private_file import BudgetSpentError
from flower_dp.privacy.store import Store
from tests.charges import one_charge

Gaussian, Laplace, Poisson = dp.GaussianDpEvent, dp.LaplaceDpEvent, dp.PoissonSampledDpEvent
ADD, REPLACE = "add-or-remove-one", "replace-one"
BUDGET = partial(LedgerBudget, delta=1e-5, fully_adaptive=True)


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "ledger.sqlite"


def affordable(event, budget, relation):
    """How often an event fits into a whole budget."""
    order = budget.renyi_order
    allowed = renyi_filter.allowance(budget.epsilon, budget.delta, order)
    return renyi_filter.num_affordable(dp.NoOpDpEvent(), event, allowed=allowed, order=order, relation=relation)


def of_densities(one, other, order):
    """The Renyi divergence of two densities, by numerical integration."""
    value, _ = integrate.quad(
        lambda x: math.exp(order * one(x) - (order - 1) * other(x)), -40, 40, epsabs=0, limit=500, points=[-1, 0, 1]
    )
    return math.log(value) / (order - 1)


def gaussian(x, mean):
    return math.exp(-(((x - mean) / 2) ** 2) / 2) / (2 * math.sqrt(2 * math.pi))


def laplace(x, mean):
    return math.exp(-abs(x - mean) / 2) / 4


def mixed(x, density, means, weights):
    return math.log(sum(weight * density(x, mean) for mean, weight in zip(means, weights, strict=True)))


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
    pair = [lambda x, m=m, w=w: mixed(x, density, m, w) for m, w in zip(means, weights, strict=True)]
    worst = max(of_densities(*pair, order), of_densities(*pair[::-1], order))
    found = renyi_filter.divergence(event, order, relation)
    assert worst * (1 - 1e-7) <= found
    assert not tight or found == pytest.approx(worst, rel=1e-6)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("release", [Laplace(3e16), Laplace(1e17), Gaussian(1e50)])
def test_a_release_that_costs_next_to_nothing_costs_something(release, relation):
    budget = LedgerBudget(epsilon=1.0, delta=1e-5, fully_adaptive=True)
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
            ledger.append(run, one_charge(1, event))
        assert not ledger.num_charges
    assert renyi_filter.divergence(event, 4.0, REPLACE) < math.inf
    assert renyi_filter.divergence(dp.NonPrivateDpEvent(), 4.0, ADD) == math.inf


def test_charges_of_one_kind_end_where_their_divergences_do(path):
    """Mixed ones: tests/privacy/test_generated_ledgers.py."""
    Store.create(path, BUDGET(epsilon=8.0))
    with Store(path) as ledger:
        order, run = ledger.budget.renyi_order, ledger.begin(method="m", delta=1e-5)
        number, said = 1, "budget, epsilon 8 at delta 1e-05, fully adaptive, for all runs together"
        with suppress(BudgetSpentError):
            for number in range(1, 100):
                ledger.append(run, one_charge(number, Gaussian(2.0)))
        with pytest.raises(BudgetSpentError, match=said):
            ledger.append(run, one_charge(number, Gaussian(2.0)))
    costs = [compute_epsilon([order], [charged * order / 8], 1e-5)[0] for charged in (number - 1, number)]
    assert costs[0] <= 8.0 < costs[1]


@pytest.mark.exact
def test_fewer_rounds_fit_than_in_a_budget_of_releases_that_are_known_beforehand():
    """The numbers of docs/ledgers.md."""
    event = Poisson(0.1, Gaussian(1.0))
    assert affordable(event, BUDGET(epsilon=8.0), ADD) == 83
    costs = [accounting.epsilon(accounting.repeated(event, rounds), delta=1e-5, relation=ADD).epsilon for rounds in (129, 130)]
    assert costs[0] <= 8.0 < costs[1]


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
    whole = [order for order in renyi.ORDERS if order < 2 or order == int(order)]
    assert best in whole
    assert max(affordable(Gaussian(300.0), BUDGET(epsilon=epsilon, renyi_order=order), ADD) for order in whole) == count
    assert compute_epsilon([best], [renyi_filter.allowance(epsilon, 1e-5, best)], 1e-5)[0] == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"epsilon": 8.0, "delta": 0.0}, "delta=0: must be > 0 for a fully adaptive budget"),
        ({"epsilon": 8.0, "renyi_order": 1.0}, "renyi_order=1.0"),
        ({"epsilon": 8.0, "renyi_order": 4.0, "fully_adaptive": False}, "must be None unless fully_adaptive=True"),
        ({"epsilon": 8.0, "fully_adaptive": "yes"}, "fully_adaptive='yes'"),
        ({"epsilon": 1e-9}, "is too small for a fully adaptive budget at delta=1e-05"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(words, why):
    with pytest.raises(ValueError, match=why):
        BUDGET(**words)
