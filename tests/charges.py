"""Charges of a run, kept as a durable ledger would, and compared with the strategy's own ledgers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from flower_dp.core import dp_events
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.charges import ALL_CLIENTS, Charge, Charges, CostScope, frozen
from flower_dp.privacy.client_terms import ClientTerms, own_release
from flower_dp.privacy.mechanisms import Mechanism


@dataclass(slots=True)
class Kept:
    """A log of one run that has every charge; a new run of the strategy does not replace it."""

    each: list[Charge] = field(default_factory=list)
    run: str = field(default_factory=lambda: uuid4().hex)
    charges: Charges = field(default_factory=Charges)

    def append(self, charge: Charge) -> None:
        self.charges = self.charges.after(charge)
        self.each.append(charge)

    def beyond(self, numbers: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple((one.release, one.server_round) for one in self.each if one.number > numbers.get(one.release, 0))

    def check_state(self, numbers: Mapping[str, int], charges: Charges) -> None:
        pass

    def joint(self, scope: Any, delta: float) -> None:
        return None

    def close(self) -> None:
        pass


def charge_each(events: Mapping[str, dp_events.DpEvent], **fields: Any) -> Charge:
    """A charge of one event for each owner; owners may have equal ones."""
    places: dict[dp_events.DpEvent, int] = {}
    which = tuple(places.setdefault(frozen(event), len(places)) for event in events.values())
    return Charge(owners=tuple(events), events=tuple(places), which=which, **fields)


def one_charge(number: int, event: dp_events.DpEvent, owners: tuple[str, ...] = (ALL_CLIENTS,), **changes: Any) -> Charge:
    """A charge of one event for all its owners."""
    scope = CostScope(unit="client", relation=changes.pop("relation", "add-or-remove-one"))
    words = {"release": "r", "number": number, "server_round": number, "fingerprint": "k", "scope": scope}
    return Charge(**words | {"owners": owners, "events": (event,)} | changes)


def device_terms(
    num_replies: int, mechanism: Mechanism, *, sampler: Any = None, num_releases: int = 1, epsilon: float = math.inf, **words: Any
) -> ClientTerms:
    """Terms of a client with 100 records."""
    words = {"clip_norm": 1.0, "num_units": 100} | words
    release = own_release("a reply", mechanism, sampler or FullSampling(), **words)
    return ClientTerms(release=release, num_replies=num_replies, num_releases=num_releases, epsilon=epsilon)


def folded(charges: Iterable[Charge]) -> Charges:
    found = Charges()
    for charge in charges:
        found = found.after(charge)
    return found


def charge(strategy: Any, names: Iterable[str] = (), *, release: Any = None, server_round: int = 0) -> Charge:
    """Charge a strategy's run for its next round of a release, by default that of training, with this cohort."""
    session = strategy._session
    release = release or session.training
    number = session.log.charges.number(release.name) + 1
    made: Charge = release.charge(session.log.charges, server_round or number, tuple(names))
    session.log.append(made)
    session._own = session._own.charged_with(made)
    return made


def assert_charges_are_the_ledgers(strategy: Any, kept: Kept) -> None:
    """All charges are in the statement's scope, and no number is left out."""
    statement = strategy.statement
    assert {one.scope for one in kept.each} <= {CostScope(relation=statement.relation, unit=statement.unit)}
    for release in {one.release for one in kept.each}:
        numbers = [one.number for one in kept.each if one.release == release]
        assert numbers == list(range(1, len(numbers) + 1))
