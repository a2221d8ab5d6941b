"""What an owner was charged with, and its cost."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)

from flower_dp.privacy import accounting
from flower_dp.privacy.charges import EVERY_CLIENT, Charge, Charges, History, Scope
from tests.charges import charge_each

STRONG = PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0))
WEAK = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5))


def spent(*events: Any, relation: Any = "add-or-remove-one") -> History:
    charges = Charges()
    scope = Scope(unit="client", relation=relation)
    for number, event in enumerate(events, start=1):
        words = {"release": "r", "number": number, "server_round": number, "kind": "k", "scope": scope}
        charges = charges.after(Charge(**words, owners=(EVERY_CLIENT,), events=(event,)))
    return charges.history(scope)


def test_no_charge_costs_nothing() -> None:
    cost = spent().cost(1e-5)
    assert (cost.epsilon, cost.delta) == (0, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
def test_charges_one_by_one_cost_what_they_cost_together(relation: Any) -> None:
    history = spent(STRONG, WEAK, STRONG, NoOpDpEvent(), STRONG, relation=relation)
    together = ComposedDpEvent([SelfComposedDpEvent(STRONG, 3), WEAK])
    assert history.cost(1e-4) == accounting.epsilon(together, delta=1e-4, relation=relation)
    assert history.num_charges == 4
    assert history.lines() == [f"3 x {STRONG}", f"1 x {WEAK}"]


REFUSED = [
    GaussianDpEvent(float("nan")),
    GaussianDpEvent(0.0),
    GaussianDpEvent(-1.0),
    PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)),
    PoissonSampledDpEvent(0.5, PoissonSampledDpEvent(0.5, GaussianDpEvent(1.0))),
    SampledWithoutReplacementDpEvent(10, 2, GaussianDpEvent(1.0)),
]


@pytest.mark.parametrize("event", REFUSED)
def test_no_epsilon_is_told_of_an_event_that_nothing_accounts(event: Any) -> None:
    with pytest.raises(ValueError, match=r"event|noise_multiplier|sampling_probability"):
        spent(STRONG, event).cost(1e-4)


def test_composed_events_are_copied() -> None:
    events = [STRONG, WEAK]
    history = spent(ComposedDpEvent(events))
    events.clear()
    assert history.cost(1e-4).epsilon > 0


def test_what_can_not_be_charged_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a"):
        spent(PoissonSampledDpEvent(0.1, ComposedDpEvent([STRONG])))


def test_one_release_without_noise_makes_all_of_it_not_private() -> None:
    assert spent(STRONG, NonPrivateDpEvent()).cost(1e-5).epsilon == math.inf


@pytest.mark.parametrize("how", ["scope", "views"])
def test_no_view_stands_for_the_strongest_adversary(how: str) -> None:
    """A charge counted by the events of a weaker adversary, or was in no budget and no joint epsilon."""
    scope = Scope(unit="client", relation="add-or-remove-one", view="outsiders" if how == "scope" else "")
    views: Any = {"": (GaussianDpEvent(100.0),)} if how == "views" else {}
    words: Any = {"release": "r", "number": 1, "server_round": 1, "kind": "k", "owners": (EVERY_CLIENT,), "views": views}
    with pytest.raises(ValueError, match=r"scope=.*: `events` are the strongest adversary's"):
        Charge(**words, scope=scope, events=(GaussianDpEvent(1.0),))


def test_histories_that_nobody_has_any_more_are_not_kept_and_change_no_count() -> None:
    """With terms of its own, every client left one behind in every round: each round took longer than the one before."""
    rng, counts, charges = np.random.default_rng(0), Counter[tuple[str, float]](), Charges()
    scope, names = Scope(unit="record", relation="replace-one"), [f"c{place}" for place in range(6)]
    for number in range(1, 60):
        owners = [name for name in names if rng.random() < 0.6]
        stds = {name: 1.0 + (names.index(name) if rng.random() < 0.9 else 7) for name in owners}
        counts.update(stds.items())
        events = {name: GaussianDpEvent(std) for name, std in stds.items()}
        words = {"release": "own", "number": number, "server_round": number, "kind": "k", "scope": scope}
        charges = charges.after(charge_each(events, **words))
        for name in names:
            expected = {GaussianDpEvent(std): count for (of, std), count in counts.items() if of == name}
            assert charges.history(scope, name).counts == expected
        assert len(charges._of(scope).known) <= 2 * (len(names) + 1)
    assert charges.scopes == (scope,)
