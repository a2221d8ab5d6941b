"""A release's charge is a value: it changes nothing until the release takes it, and repeats the state wherever it is taken."""

from dataclasses import replace

import pytest
from dp_accounting import GaussianDpEvent

from flower_dp.core.sampling import FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy.charges import EVERY_CLIENT, Charge, History, Scope
from flower_dp.privacy.private_file import LedgerError
from flower_dp.strategies import DPPASGD, DPFedSAM
from tests.charges import Kept, assert_charges_are_the_ledgers, folded

NAMES = tuple("abcdefgh")
WORDS = {"clip_norm": 0.5, "noise_multiplier": 1.0, "num_clients": 8, "delta": 1e-3}
SAMPLERS = [FullSampling(), PoissonSampling(sampling_rate=0.5), RoundRobinSampling(cohort_size=3)]
STEPS = {"num_clients": 8, "batch_size": 4, "num_records": 8, "clip_norm": 1.0, "epsilon": 2.0, "delta": 1e-3, "num_steps": 4}


def shared(sampling):
    return DPFedSAM(**WORDS, sampling=sampling, placement="distributed", trusted_server=False)


def local():
    strategy = DPPASGD(**STEPS, num_local_steps=1, learning_rate=0.1)
    strategy._session.open(NAMES)
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
        kept.append(charge)
        strategy.rules.training.take(charge)
    assert_charges_are_the_ledgers(strategy, kept)
    again = shared(sampling)
    for charge in kept.each:
        again.rules.training.take(charge)
    assert again.rules.training.state == strategy.rules.training.state
    assert again.rules.ledger(again.charges).lines() == strategy.rules.ledger(strategy.charges).lines()


def test_charges_repeat_the_replies_of_every_client():
    strategy, kept = local(), Kept()
    for names in (NAMES[:3], (), NAMES[2:]):
        charge = strategy.rules.training.next_charge(names)
        kept.append(charge)
        strategy.rules.training.take(charge)
    assert_charges_are_the_ledgers(strategy, kept)
    again = local()
    for charge in kept.each:
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


CLIENTS = Scope(unit="client", relation="add-or-remove-one")


def one(**changes):
    words = {"release": "dp-fedavg", "number": 1, "server_round": 1, "kind": "x", "scope": CLIENTS}
    return Charge(**words | {"owners": (EVERY_CLIENT,), "events": (GaussianDpEvent(2.0),)} | changes)


def test_the_histories_of_charges_have_every_event_of_every_owner():
    alone = one(release="other", owners=("a", "b"), events=(GaussianDpEvent(2.0), GaussianDpEvent(3.0)), which=(1, 0))
    charges = folded([one(), one(number=2), alone])
    two, three = GaussianDpEvent(2.0), GaussianDpEvent(3.0)
    expected = {EVERY_CLIENT: {two: 2}, "a": {two: 2, three: 1}, "b": {two: 3}, "somebody": {two: 2}}
    assert {name: charges.history(CLIENTS, name).counts for name in expected} == expected
    assert charges.history(CLIENTS).cost(1e-3) == History(relation=CLIENTS.relation, counts={two: 2}).cost(1e-3)
    assert charges.worst(CLIENTS, 1e-3) == charges.history(CLIENTS, "a").cost(1e-3) or (
        charges.worst(CLIENTS, 1e-3) == charges.history(CLIENTS, "b").cost(1e-3)
    )


def test_charges_of_another_relation_or_unit_are_not_added_up():
    others = [replace(CLIENTS, relation="replace-one"), replace(CLIENTS, unit="record")]
    charges = folded([one(), *(one(release=str(other), scope=other) for other in others)])
    assert charges.scopes == (CLIENTS, *others)
    for scope in charges.scopes:
        assert charges.history(scope).counts == {GaussianDpEvent(2.0): 1}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"which": (1,)}, "which: has 1 places"),
        ({"which": (-1,)}, "which: has 1 places"),
        ({"events": (GaussianDpEvent(2.0),) * 2}, "which: has 0 places of events for 1 owners"),
        ({"owners": ("a", "a")}, "charges nobody twice at once"),
        ({"owners": ("a", EVERY_CLIENT)}, "no client of the name 'every client'"),
        ({"views": {"outsiders": ()}}, "views: must have one event for each"),
        ({"number": 0}, "number"),
        ({"server_round": 0}, "server_round"),
    ],
)
def test_what_is_no_charge_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        one(**changes)


def test_a_charge_that_is_not_the_next_of_its_release_adds_nothing():
    charges = folded([one(), one(number=2)])
    for wrong in (one(number=2), one(number=4), one(number=3, kind="y"), one(number=3, scope=replace(CLIENTS, unit="record"))):
        with pytest.raises(LedgerError, match=r"has (2 )?charges of dp-fedavg in this run"):
            charges.after(wrong)
    assert charges.numbers() == {"dp-fedavg": 2}
    assert charges.after(one(), run="another").numbers("another") == {"dp-fedavg": 1}
