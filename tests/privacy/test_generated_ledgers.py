"""Both ledgers over generated histories: owners, runs, relations and reopenings, against sums by hand; and files that were exchanged."""

import math
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import given
from hypothesis import strategies as st

from flower_dp.privacy.budget import LedgerBudget
from flower_dp.privacy.charges import ALL_CLIENTS, CostScope
from flower_dp.privacy.device_store import DeviceLedger, ReplyNumber
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.private_file import BudgetSpentError, LedgerError
from flower_dp.privacy.renyi_filter import order_for
from flower_dp.privacy.store import Store
from tests.charges import device_terms, one_charge
from tests.closed_forms import gaussian_epsilon
from tests.gaps import quickly

ADD, REPLACE = "add-or-remove-one", "replace-one"
NAMES = "abc"
TOLERANCE = 1e-6


def divergence(event, order, relation):
    """The Renyi divergence of a plain release at an order, in closed form; a replaced client moves a sum twice as far."""
    far = (2 if relation == REPLACE else 1) / event.noise_multiplier
    if isinstance(event, GaussianDpEvent):
        return order * far**2 / 2
    up, down = (order - 1) * far + math.log(order / (2 * order - 1)), -order * far + math.log((order - 1) / (2 * order - 1))
    return (max(up, down) + math.log1p(math.exp(-abs(up - down)))) / (order - 1)  # Mironov 2017, Proposition 6


def by_hand(events, budget, relation):
    """The epsilon of a client's releases: of their divergences at the budget's order, or of all of them as one Gaussian."""
    if budget.fully_adaptive:
        spent = sum(divergence(event, budget.renyi_order, relation) for event in events)
        return compute_epsilon([budget.renyi_order], [spent], budget.delta)[0]
    return gaussian_epsilon([event.noise_multiplier for event in events], relation, budget.delta)


steps = st.lists(
    st.tuples(
        st.sampled_from([0.9, 1.3, 2.0]),
        st.sampled_from([("a",), ("b", "c"), (ALL_CLIENTS,), ("a", "b", "c"), ("c",)]),
        st.booleans(),  # a Laplace release, where the budget can add it up
        st.sampled_from(["go on", "go on", "go on", "open again", "another run"]),
    ),
    min_size=20,
    max_size=40,
)


@quickly(15)
@given(steps, st.booleans(), st.sampled_from([ADD, REPLACE]), st.sampled_from([2.0, 8.0]), st.sampled_from([1e-3, 1e-6]))
def test_a_budget_of_all_runs_ends_where_the_sum_by_hand_does(history, adaptive, relation, epsilon, delta):
    budget = LedgerBudget(epsilon=epsilon, delta=delta, fully_adaptive=adaptive)
    spent = {name: [] for name in NAMES}
    numbers, charged = Counter(), []
    # Of zero-concentrated privacy: of these about six fit.
    logs = math.log(1 / delta)
    usual = (2 if relation == REPLACE else 1) * math.sqrt(6) / (math.sqrt(2 * (logs + epsilon)) - math.sqrt(2 * logs))
    with TemporaryDirectory() as folder:
        path = Path(folder, "ledger")
        Store.create(path, budget)
        ledger = Store(path)
        assert not adaptive or ledger.budget.renyi_order == order_for(epsilon, delta)
        run = ledger.begin(method="m", delta=delta)
        refused = 0
        for multiplier, owners, laplace, how in history:
            if how != "go on":
                ledger.close()
                ledger = Store(path)
                run = ledger.begin(method="m", delta=delta) if how == "another run" else run
            size = multiplier * usual
            event = LaplaceDpEvent(size) if laplace and adaptive else GaussianDpEvent(size)
            named = NAMES if owners == (ALL_CLIENTS,) else owners
            after = [by_hand([*spent[name], event], ledger.budget, relation) for name in named]
            number = numbers[run] + 1
            try:
                ledger.append(run, one_charge(number, event, owners, relation=relation))
            except BudgetSpentError:
                refused += 1
                assert max(after) > epsilon * (1 - TOLERANCE)
                continue
            assert max(after) <= epsilon * (1 + TOLERANCE)
            numbers[run] += 1
            charged.append((run, number, owners, event))
            for name in named:
                spent[name].append(event)
        assert charged
        assert refused
        scope = CostScope(unit="client", relation=relation)
        if not adaptive:
            cost = ledger.all.cost_of_most_charged(scope, delta).epsilon
            assert cost == pytest.approx(max(by_hand(one, budget, relation) for one in spent.values()), rel=1e-6)
        found = [(one, each.server_round, each.owners, each.events[0]) for one in ledger.runs for each in ledger.read(one)]
        assert Counter(found) == Counter(charged)
        assert {one: ledger.charges[one].numbers() for one in ledger.runs} == {
            one: {"r": numbers[one]} if numbers[one] else {} for one in ledger.runs
        }
        for name in NAMES:
            own = Counter(each for _, _, owners, each in charged if owners == (ALL_CLIENTS,) or name in owners)
            assert ledger.all.history(scope, name).counts == own
        ledger.close()


# Files that are not what they were


def filled(path, budget=None, *, charges=0):
    Store.create(path, budget)
    with Store(path) as ledger:
        run = ledger.begin(method="m", delta=1e-3)
        for number in range(1, charges + 1):
            ledger.append(run, one_charge(number, GaussianDpEvent(3.0)))
    return run


def budgets():
    return st.sampled_from([None, LedgerBudget(epsilon=50.0, delta=1e-3), LedgerBudget(epsilon=60.0, delta=1e-3)])


@quickly(15)
@given(st.integers(0, 2), st.integers(0, 2), budgets(), budgets(), st.booleans(), st.booleans())
def test_another_ledger_in_the_place_of_one_is_refused_whatever_both_have(ours, theirs, budget, other, read_only, during):
    """The .mark file stays: it remembers the last charge, or that there was none."""
    with TemporaryDirectory() as folder:
        path, foreign = Path(folder, "ledger"), Path(folder, "other")
        filled(path, budget, charges=ours)
        filled(foreign, other, charges=theirs)
        if during:
            ledger = Store(path)
            os.replace(foreign, path)
            with pytest.raises(LedgerError, match="was moved, replaced or removed"):
                ledger.append(ledger.begin(method="m", delta=1e-3), one_charge(1, GaussianDpEvent(3.0)))
            ledger.close()
            return
        os.replace(foreign, path)
        with pytest.raises(LedgerError, match=r"older copy|another copy"):
            Store(path, read_only=read_only).close()


# A device's file


asked = st.lists(
    st.tuples(st.sets(st.sampled_from(NAMES), min_size=1), st.sampled_from([1.0, 1.0, 1.0, 0.5, 1.01, 1 + 5e-4])),
    min_size=4,
    max_size=12,
)


@quickly(20)
@given(asked, st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4), min_size=3))
def test_a_devices_ledger_counts_every_client_alone(history, most):
    """A reply is charged by the terms on which the account was opened: not with less noise, nor for another budget."""
    with TemporaryDirectory() as folder:
        path, count, opened = Path(folder, "ledger"), Counter(), {}
        DeviceLedger.create(path, NAMES)
        for number, (names, factor) in enumerate(history, start=1):
            due = {name: device_terms(most[name], Gaussian(noise_multiplier=3.0 * factor)) for name in sorted(names)}
            noise = {name: opened.get(name, 3.0 * factor) for name in due}
            fits = {name for name in due if count[name] < most[name] and noise[name] <= 3.0 * factor <= noise[name] * 1.001}
            numbered = {name: ReplyNumber(run="r", number=number) for name in due}
            refused, counts = DeviceLedger(path).charge(due, numbered, at_least=dict(count))
            assert (set(counts), set(refused)) == (fits, set(due) - fits)
            for name in fits:
                count[name] += 1
                opened.setdefault(name, 3.0 * factor)
                assert counts[name] == count[name]
            assert {name: entry.replies for name, entry in DeviceLedger(path).read().items()} == {
                name: count[name] for name in NAMES
            }
            with pytest.raises(LedgerError, match="older copy"):
                DeviceLedger(path).charge(
                    {"a": device_terms(9, Gaussian(noise_multiplier=3.0))},
                    {"a": ReplyNumber(run="s", number=1)},
                    at_least={"a": count["a"] + 1},
                )
        found, text = DeviceLedger(path).read(), path.read_bytes()
        for place in range(0, len(text), max(1, len(text) // 12)):
            path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
            with suppress(LedgerError):  # or it is in a part of the file that says nothing
                assert DeviceLedger(path).read() == found
