"""What an owner was charged with, and its cost."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from flower_dp.core import dp_events
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import ALL_CLIENTS, Charges, CostScope, History
from tests.charges import charge_each, folded, one_charge

STRONG = dp_events.PoissonSampledDpEvent(0.1, dp_events.GaussianDpEvent(2.0))
WEAK = dp_events.PoissonSampledDpEvent(0.1, dp_events.GaussianDpEvent(1.5))


def spent(*events: Any, relation: Any = "add-or-remove-one") -> History:
    charges = folded(one_charge(number, event, relation=relation) for number, event in enumerate(events, start=1))
    return charges.history(CostScope(unit="client", relation=relation))


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
def test_charges_one_by_one_cost_what_they_cost_together(relation: Any) -> None:
    history = spent(STRONG, WEAK, STRONG, dp_events.NoOpDpEvent(), STRONG, relation=relation)
    together = dp_events.ComposedDpEvent([dp_events.SelfComposedDpEvent(STRONG, 3), WEAK])
    assert history.cost(1e-4) == accounting.epsilon(together, delta=1e-4, relation=relation)
    assert history.num_charges == 4
    assert history.lines() == [f"3 x {STRONG}", f"1 x {WEAK}"]


WITHOUT_REPLACEMENT = dp_events.SampledWithoutReplacementDpEvent(10, 2, dp_events.GaussianDpEvent(1.0))


@pytest.mark.parametrize("event", [dp_events.GaussianDpEvent(math.nan), dp_events.GaussianDpEvent(0.0), WITHOUT_REPLACEMENT])
def test_no_epsilon_is_told_of_an_event_that_nothing_accounts(event: Any) -> None:
    with pytest.raises(ValueError, match=r"event|noise_multiplier"):
        spent(STRONG, event).cost(1e-4)


def test_composed_events_are_copied() -> None:
    events = [STRONG, WEAK]
    history = spent(dp_events.ComposedDpEvent(events))
    events.clear()
    assert history.cost(1e-4).epsilon > 0


def test_what_can_not_be_charged_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a"):
        spent(dp_events.PoissonSampledDpEvent(0.1, dp_events.ComposedDpEvent([STRONG])))


def test_one_release_without_noise_makes_all_of_it_not_private() -> None:
    assert spent().cost(1e-5).epsilon == 0
    assert spent(STRONG, dp_events.NonPrivateDpEvent()).cost(1e-5).epsilon == math.inf


@pytest.mark.parametrize("how", ["scope", "views"])
def test_no_view_stands_for_the_strongest_adversary(how: str) -> None:
    """A charge counted by the events of a weaker adversary, or was in no budget and no joint epsilon."""
    scope = CostScope(unit="client", relation="add-or-remove-one", view="outsiders" if how == "scope" else "")
    views: Any = {"": (dp_events.GaussianDpEvent(100.0),)} if how == "views" else {}
    with pytest.raises(ValueError, match=r"scope=.*: must have no view; `views` has the events of weaker adversaries"):
        one_charge(1, dp_events.GaussianDpEvent(1.0), scope=scope, views=views)


@pytest.mark.parametrize("owners", [("a", "a"), ("a", ALL_CLIENTS)])
def test_nobody_is_charged_twice_at_once(owners: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="owners: must name nobody twice, and 'every client' only alone"):
        one_charge(1, STRONG, owners)


def test_histories_that_nobody_has_any_more_are_not_kept_and_change_no_count() -> None:
    """With terms of its own, every client left one behind in every round: each round took longer than the one before."""
    rng, counts, charges = np.random.default_rng(0), Counter[tuple[str, float]](), Charges()
    scope, names = CostScope(unit="record", relation="replace-one"), [f"c{place}" for place in range(6)]
    for number in range(1, 60):
        owners = [name for name in names if rng.random() < 0.6]
        stds = {name: 1.0 + (names.index(name) if rng.random() < 0.9 else 7) for name in owners}
        counts.update(stds.items())
        events = {name: dp_events.GaussianDpEvent(std) for name, std in stds.items()}
        words = {"release": "own", "number": number, "server_round": number, "fingerprint": "k", "scope": scope}
        charges = charges.after(charge_each(events, **words))
        for name in names:
            expected = {dp_events.GaussianDpEvent(std): count for (of, std), count in counts.items() if of == name}
            assert charges.history(scope, name).counts == expected
        assert len(charges._of(scope).known) <= 2 * (len(names) + 1)
    assert charges.scopes == (scope,)
