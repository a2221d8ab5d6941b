"""A release's charge is a value: it changes nothing until the release takes it, and repeats the state wherever it is taken."""

from dataclasses import replace

import pytest
from dp_accounting import GaussianDpEvent

from flower_dp.core.sampling import FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy.charge import EVERY_CLIENT, Charge, ledgers_of
from flower_dp.privacy.ledger import Ledger
from flower_dp.strategies import DPPASGD, DPFedSAM
from tests.charges import Kept, assert_charges_are_the_ledgers

NAMES = tuple("abcdefgh")
WORDS = {"clip_norm": 0.5, "noise_multiplier": 1.0, "num_clients": 8, "delta": 1e-3}
SAMPLERS = [FullSampling(), PoissonSampling(sampling_rate=0.5), RoundRobinSampling(cohort_size=3)]
STEPS = {"num_clients": 8, "batch_size": 4, "num_records": 8, "clip_norm": 1.0, "epsilon": 2.0, "delta": 1e-3, "num_steps": 4}


def shared(sampling):
    return DPFedSAM(**WORDS, sampling=sampling, placement="distributed", trusted_server=False)


def local():
    strategy = DPPASGD(**STEPS, num_local_steps=1, learning_rate=0.1)
    strategy.rules.open(NAMES)
    return strategy


@pytest.mark.parametrize("make", [lambda: shared(FullSampling()), local])
def test_the_next_charge_changes_nothing_until_it_is_taken(make):
    release = make().rules.training
    before = release.state
    charge = release.next_charge(NAMES[:3])
    assert release.state is before
    assert charge == release.next_charge(NAMES[:3])
    assert charge.number == 1
    release.take(charge)
    assert release.num_charged == 1


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_charges_repeat_the_state_and_the_ledger_of_a_noised_sum(sampling):
    strategy, kept = shared(sampling), Kept()
    for size in (8, 3, 5, 1, 7, 2):
        charge = strategy.rules.training.next_charge(NAMES[:size])
        kept.charge(charge, 1)
        strategy.rules.training.take(charge)
    assert_charges_are_the_ledgers(strategy, kept)
    again = shared(sampling)
    for _, charge in kept.charges:
        again.rules.training.take(charge)
    assert again.rules.training.state == strategy.rules.training.state
    assert again.rules.ledger.lines() == strategy.rules.ledger.lines()


def test_charges_repeat_the_replies_of_every_client():
    strategy, kept = local(), Kept()
    for names in (NAMES[:3], (), NAMES[2:]):
        charge = strategy.rules.training.next_charge(names)
        kept.charge(charge, 1)
        strategy.rules.training.take(charge)
    assert_charges_are_the_ledgers(strategy, kept)
    again = local()
    for _, charge in kept.charges:
        again.rules.training.take(charge)
    assert again.rules.training.state == strategy.rules.training.state
    assert again.rules.training.counts == dict.fromkeys(NAMES, 1) | {"c": 2}


@pytest.mark.parametrize("make", [lambda: shared(FullSampling()), local])
def test_a_charge_is_taken_once_in_its_turn_and_by_the_release_that_made_it(make):
    release = make().rules.training
    charge = release.next_charge(NAMES)
    for wrong, why in (
        (replace(charge, number=2), "is number 2 of .*; the next one is number 1"),
        (replace(charge, release="private-evaluation"), "is of private-evaluation, not of"),
        (replace(charge, kind="with more noise"), "is with more noise, and this strategy charges"),
    ):
        before = release.state
        with pytest.raises(ValueError, match=why):
            release.take(wrong)
        assert release.state is before
    release.take(charge)
    with pytest.raises(ValueError, match=r"is number 1 of .*; the next one is number 2"):
        release.take(charge)


def one(**changes):
    words = {"release": "dp-fedavg", "number": 1, "kind": "x", "unit": "client", "relation": "add-or-remove-one"}
    return Charge(**words | {"owners": (EVERY_CLIENT,), "events": (GaussianDpEvent(2.0),)} | changes)


def test_the_ledgers_of_charges_have_every_event_of_every_owner():
    charges = [one(), one(number=2), one(owners=("a", "b"), events=(GaussianDpEvent(2.0), GaussianDpEvent(3.0)))]
    two = Ledger(owner=EVERY_CLIENT, relation="add-or-remove-one")
    two.charge(GaussianDpEvent(2.0), 2)
    found = ledgers_of(charges)
    assert {owner: ledger.lines() for owner, ledger in found.items()} == {
        EVERY_CLIENT: two.lines(),
        "a": ["1 x GaussianDpEvent(noise_multiplier=2.0)"],
        "b": ["1 x GaussianDpEvent(noise_multiplier=3.0)"],
    }
    assert found[EVERY_CLIENT].cost(1e-3) == two.cost(1e-3)


def test_charges_of_another_relation_or_unit_are_not_added_up():
    for other in (one(relation="replace-one"), one(unit="record")):
        with pytest.raises(ValueError, match="2 kinds of unit and relation"):
            ledgers_of([one(), other])
