"""A charge is a value: it counts where it is in the log, and ledgers are functions of charges."""

from dataclasses import replace

import pytest
from dp_accounting import GaussianDpEvent

from flower_dp.privacy.charges import ALL_CLIENTS, Charge, CostScope, History
from flower_dp.privacy.private_file import LedgerError
from tests.charges import folded

CLIENTS = CostScope(unit="client", relation="add-or-remove-one")


def one(**changes):
    words = {"release": "dp-fedavg", "number": 1, "server_round": 1, "fingerprint": "x", "scope": CLIENTS}
    return Charge(**words | {"owners": (ALL_CLIENTS,), "events": (GaussianDpEvent(2.0),)} | changes)


def test_the_histories_of_charges_have_every_event_of_every_owner():
    alone = one(release="other", owners=("a", "b"), events=(GaussianDpEvent(2.0), GaussianDpEvent(3.0)), which=(1, 0))
    charges = folded([one(), one(number=2), alone])
    two, three = GaussianDpEvent(2.0), GaussianDpEvent(3.0)
    expected = {ALL_CLIENTS: {two: 2}, "a": {two: 2, three: 1}, "b": {two: 3}, "somebody": {two: 2}}
    assert {name: charges.history(CLIENTS, name).counts for name in expected} == expected
    assert charges.history(CLIENTS).cost(1e-3) == History(relation=CLIENTS.relation, counts={two: 2}).cost(1e-3)
    assert charges.cost_of_most_charged(CLIENTS, 1e-3) in [charges.history(CLIENTS, name).cost(1e-3) for name in ("a", "b")]


def test_charges_of_another_relation_or_unit_are_not_added_up():
    others = [replace(CLIENTS, relation="replace-one"), replace(CLIENTS, unit="record")]
    charges = folded([one(), *(one(release=str(other), scope=other) for other in others)])
    assert charges.scopes == (CLIENTS, *others)
    for scope in charges.scopes:
        assert charges.history(scope).counts == {GaussianDpEvent(2.0): 1}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"which": (-1,)}, "which: has 1 indices of events"),
        ({"events": (GaussianDpEvent(2.0),) * 2}, "which: has 0 indices of events for 1 owners"),
        ({"owners": ("a", "a")}, "must name nobody twice"),
        ({"owners": ("a", ALL_CLIENTS)}, "must name nobody twice, and 'every client' only alone"),
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
    for wrong in (
        one(number=2),
        one(number=4),
        one(number=3, fingerprint="y"),
        one(number=3, scope=replace(CLIENTS, unit="record")),
    ):
        with pytest.raises(LedgerError, match=r"has (2 )?charges of dp-fedavg in this run"):
            charges.after(wrong)
    assert charges.numbers() == {"dp-fedavg": 2}
    assert charges.after(one(), run="another").numbers("another") == {"dp-fedavg": 1}
