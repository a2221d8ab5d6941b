"""Charges of a run, kept as a durable ledger would, and compared with the strategy's own ledgers."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from flower_dp.core import dp
from flower_dp.privacy.charge import EVERY_CLIENT, Charge, ledgers_of
from flower_dp.privacy.events import leaves_of
from flower_dp.privacy.ledger import Ledger


@dataclass(slots=True)
class Kept:
    """Every charge of a run, with its round."""

    charges: list[tuple[int, Charge]] = field(default_factory=list)
    run: str = field(default_factory=lambda: uuid4().hex)

    def charge(self, charge: Charge, server_round: int) -> None:
        self.charges.append((server_round, charge))

    def joint(self, scope: Any, delta: float) -> None:
        return None

    def close(self) -> None:
        pass


def own_ledgers(strategy: Any) -> dict[str, list[Ledger]]:
    """The ledgers that the statement is made of, by owner."""
    rules = strategy.rules
    if not hasattr(rules, "books"):
        return {EVERY_CLIENT: [rules.ledger]}
    evaluation = rules.books.evaluation
    ledgers = {name: [ledger] for name, ledger in rules.books.ledgers.items()}
    for name, ledger in {} if evaluation is None else evaluation.ledgers.items():
        ledgers[name].append(ledger)
    return ledgers


def events_of(*ledgers: Ledger) -> Counter[dp.DpEvent]:
    return sum((Counter(dict(leaves_of(ledger.event))) for ledger in ledgers), Counter())


def assert_charges_are_the_ledgers(strategy: Any, kept: Kept) -> None:
    """The sum of the charges' events is what the strategy's own ledgers have, for every owner; no number is left out."""
    found = {owner: events_of(ledger) for owner, ledger in ledgers_of(charge for _, charge in kept.charges).items()}
    own = {owner: events_of(*ledgers) for owner, ledgers in own_ledgers(strategy).items()}
    assert {owner: events for owner, events in found.items() if events} == {
        owner: events for owner, events in own.items() if events
    }
    for release in strategy._run.releases:
        numbers = [charge.number for _, charge in kept.charges if charge.release == release.name]
        assert numbers == list(range(1, release.num_charged + 1))
        assert all((charge.relation, charge.unit) == (own_scope(strategy)) for _, charge in kept.charges)


def own_scope(strategy: Any) -> tuple[str, str]:
    statement = strategy.statement
    return statement.relation, statement.unit
