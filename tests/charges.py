"""Charges of a run, kept as a durable ledger would, and compared with the strategy's own ledgers."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from flower_dp.core import dp
from flower_dp.privacy.charges import EVERY_CLIENT, Charge, Charges, History, Scope, frozen
from flower_dp.privacy.events import leaves_of


@dataclass(slots=True)
class Kept:
    """Every charge of a run."""

    each: list[Charge] = field(default_factory=list)
    run: str = field(default_factory=lambda: uuid4().hex)

    def append(self, charge: Charge) -> None:
        self.each.append(charge)

    @property
    def charges(self) -> Charges:
        return folded(self.each)

    def joint(self, scope: Any, delta: float) -> None:
        return None

    def close(self) -> None:
        pass


def charge_each(events: Mapping[str, dp.DpEvent], **fields: Any) -> Charge:
    """A charge of one event for each owner; owners may have equal ones."""
    places: dict[dp.DpEvent, int] = {}
    which = tuple(places.setdefault(frozen(event), len(places)) for event in events.values())
    return Charge(owners=tuple(events), events=tuple(places), which=which, **fields)


def folded(charges: Iterable[Charge]) -> Charges:
    found = Charges()
    for charge in charges:
        found = found.after(charge)
    return found


def own_ledgers(strategy: Any) -> dict[str, list[History]]:
    """The ledgers that the statement is made of, by owner."""
    rules = strategy.rules
    if not hasattr(rules, "books"):
        return {EVERY_CLIENT: [rules.ledger]}
    evaluation = rules.books.evaluation
    ledgers = {name: [ledger] for name, ledger in rules.books.ledgers.items()}
    for name, ledger in {} if evaluation is None else evaluation.ledgers.items():
        ledgers[name].append(ledger)
    return ledgers


def events_of(*ledgers: History) -> Counter[dp.DpEvent]:
    return sum((Counter(dict(leaves_of(ledger.event))) for ledger in ledgers), Counter())


def assert_charges_are_the_ledgers(strategy: Any, kept: Kept) -> None:
    """The sum of the charges' events is what the strategy's own ledgers have, for every owner; no number is left out."""
    scope = Scope(**own_scope(strategy))
    charges = kept.charges
    found = {owner: events_of(charges.history(scope, owner)) for owner in charges.owners(scope)}
    assert {charge.scope for charge in kept.each} <= {scope}
    if charges.owners(scope) == [EVERY_CLIENT]:
        seen = charges.history(replace(scope, view="outsiders"))
        assert events_of(seen) == events_of(strategy.rules.outside_ledger)
    own = {owner: events_of(*ledgers) for owner, ledgers in own_ledgers(strategy).items()}
    assert {owner: events for owner, events in found.items() if events} == {
        owner: events for owner, events in own.items() if events
    }
    for release in strategy._run.releases:
        numbers = [charge.number for charge in kept.each if charge.release == release.name]
        assert numbers == list(range(1, release.num_charged + 1))


def own_scope(strategy: Any) -> dict[str, Any]:
    statement = strategy.statement
    return {"relation": statement.relation, "unit": statement.unit}
