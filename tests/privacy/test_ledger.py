"""The ledger: charges and their cost."""

import math
from typing import Any

import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)

from flower_dp.privacy import accounting
from flower_dp.privacy.ledger import Ledger

STRONG = PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0))
WEAK = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5))


def _ledger(relation: Any = "add-or-remove-one") -> Ledger:
    return Ledger(owner="every client", relation=relation)


def test_an_empty_ledger_costs_nothing() -> None:
    cost = _ledger().cost(1e-5)
    assert (cost.epsilon, cost.delta) == (0, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
def test_charges_one_by_one_cost_what_they_cost_together(relation: Any) -> None:
    ledger = _ledger(relation)
    for event in (STRONG, WEAK, STRONG, NoOpDpEvent(), STRONG):
        ledger.charge(event)
    together = ComposedDpEvent([SelfComposedDpEvent(STRONG, 3), WEAK])
    assert ledger.cost(1e-4) == accounting.epsilon(together, delta=1e-4, relation=relation)
    assert ledger.num_charges == 5
    assert ledger.lines() == [f"3 x {STRONG}", f"1 x {WEAK}"]


REFUSED = [
    GaussianDpEvent(float("nan")),
    GaussianDpEvent(0.0),
    GaussianDpEvent(-1.0),
    PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)),
    PoissonSampledDpEvent(0.5, PoissonSampledDpEvent(0.5, GaussianDpEvent(1.0))),
    SampledWithoutReplacementDpEvent(10, 2, GaussianDpEvent(1.0)),
]


@pytest.mark.parametrize("event", REFUSED)
def test_nothing_is_written_when_an_event_is_refused(event: Any) -> None:
    ledger = _ledger()
    ledger.charge(STRONG)
    before = (ledger.lines(), ledger.num_charges, ledger.cost(1e-4))
    with pytest.raises(ValueError, match=r"event|noise_multiplier|sampling_probability"):
        ledger.charge(event)
    assert (ledger.lines(), ledger.num_charges, ledger.cost(1e-4)) == before


def test_composed_events_are_charged_like_others() -> None:
    ledger = _ledger()
    ledger.charge(ComposedDpEvent([STRONG, WEAK]))
    assert ledger.cost(1e-4) == accounting.epsilon(ComposedDpEvent([STRONG, WEAK]), delta=1e-4, relation="add-or-remove-one")


def test_composed_events_are_copied() -> None:
    ledger, events = _ledger(), [STRONG, WEAK]
    ledger.charge(ComposedDpEvent(events))
    events.clear()
    assert ledger.cost(1e-4).epsilon > 0


def test_what_can_not_be_a_ledgers_entry_is_refused_and_not_written() -> None:
    ledger = _ledger()
    with pytest.raises(ValueError, match="must be a"):
        ledger.charge(PoissonSampledDpEvent(0.1, ComposedDpEvent([STRONG])))
    assert ledger.num_charges == 0
    assert ledger.lines() == []


def test_one_release_without_noise_makes_all_of_it_not_private() -> None:
    ledger = _ledger()
    ledger.charge(STRONG)
    ledger.charge(NonPrivateDpEvent())
    assert ledger.cost(1e-5).epsilon == math.inf


def test_pure_costs() -> None:
    ledger = _ledger("replace-one")
    for _ in range(3):
        ledger.charge(LaplaceDpEvent(2.0))
    assert ledger.cost(0).epsilon == pytest.approx(3.0, rel=1e-12)
