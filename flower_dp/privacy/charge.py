"""A charge: what one release of one round costs, and whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flower_dp.core import dp
from flower_dp.privacy.events import Relation
from flower_dp.privacy.ledger import Ledger, frozen

# The owner of a release that costs all clients alike: known or not, asked or not.
EVERY_CLIENT = "every client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What one release of one round is charged with; it has all that a release needs to go on from it.

    Attributes:
        release: the name of the release on the wire: the method's, or that of private evaluations.
        number: 1, 2, ...: how often this release is charged in its run, this time included.
        kind: what is charged, as text: the same in all charges of a release, or they can't belong to one run.
        unit: what the events protect.
        relation: the neighbouring relation of the events.
        owners: who is charged: names of clients, or `EVERY_CLIENT`.
        events: what it costs each of them, in the same order.
        shares: in how many shares its noise is drawn; 0 where clients' noise is their own.
    """

    release: str
    number: int
    kind: str
    unit: Literal["client", "record"]
    relation: Relation
    owners: tuple[str, ...]
    events: tuple[dp.DpEvent, ...]
    shares: int = 0

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.events):
            raise ValueError(f"events: {len(self.events)} of {len(self.owners)} owners; must be one of each")
        object.__setattr__(self, "events", tuple(map(frozen, self.events)))

    def check_next(self, *, release: str, num_charged: int, kind: str) -> None:
        """Refuse to take this charge for the next one of a release.

        Args:
            release: its name.
            num_charged: how often it was charged before.
            kind: what it charges.

        Raises:
            ValueError: if it is another release's, not the next one, or of another kind: with other noise, for example.
        """
        if self.release != release:
            raise ValueError(f"charge: is of {self.release}, not of {release}")
        if self.number != num_charged + 1:
            raise ValueError(f"charge: is number {self.number} of {release}; the next one is number {num_charged + 1}")
        if self.kind != kind:
            raise ValueError(f"charge: what was charged for {release} is {self.kind}, and this strategy charges {kind}")


def ledgers_of(charges: Iterable[Charge]) -> dict[str, Ledger]:
    """Return the ledger of every owner, with all that these charges cost it.

    Raises:
        ValueError: if the charges differ in relation or unit: no accountant adds up their costs.
    """
    events: dict[str, Counter[dp.DpEvent]] = {}
    scopes = set()
    for charge in charges:
        scopes.add((charge.unit, charge.relation))
        for owner, event in zip(charge.owners, charge.events, strict=True):
            events.setdefault(owner, Counter())[event] += 1
    if len(scopes) > 1:
        raise ValueError(f"charges: are of {len(scopes)} kinds of unit and relation, whose costs don't add up")
    found = {}
    for owner, counts in events.items():
        found[owner] = ledger = Ledger(owner=owner, relation=next(iter(scopes))[1])
        for event, count in counts.items():
            ledger.charge(event, count)
    return found
