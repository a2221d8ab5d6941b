"""A ledger: the list of privacy events charged to one owner. Their cost is computed from the list afterwards."""

from __future__ import annotations

from flower_dp.core import checks, dp
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.events import Relation


class Ledger:
    """Events charged to one owner: every client of a central release, or one client with its own local releases.

    The owner is one printable line, since it stands in statements.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.privacy.ledger import Ledger
        >>> ledger = Ledger(owner="client a", relation="add-or-remove-one")
        >>> ledger.charge(GaussianDpEvent(noise_multiplier=2.0))
        >>> ledger.charge(GaussianDpEvent(noise_multiplier=2.0))
        >>> ledger.lines()
        ['2 x GaussianDpEvent(noise_multiplier=2.0)']
        >>> round(ledger.cost(delta=1e-5).epsilon, 2)
        2.94
    """

    def __init__(self, *, owner: str, relation: Relation) -> None:
        self.owner = checks.line("owner", owner, most=2 * checks.MOST_NAME)
        self.relation = relation
        self.num_charges = 0
        self._counts: dict[dp.DpEvent, int] = {}

    def charge(self, event: dp.DpEvent, count: int = 1) -> None:
        """Record an event, or `count` of them, before anything that it covers is released.

        Raises:
            ValueError: if the event can't be accounted; nothing is written then and nothing may be released.
        """
        event, count = frozen(event), checks.integer("count", count, at_least=0)
        if event not in self._counts:
            accounting.check(event, relation=self.relation)
        self.num_charges += count
        if count and not isinstance(event, dp.NoOpDpEvent):
            self._counts[event] = self._counts.get(event, 0) + count

    @property
    def event(self) -> dp.DpEvent:
        """All that was charged, as one event."""
        return dp.ComposedDpEvent([dp.SelfComposedDpEvent(event, count) for event, count in self._counts.items()])

    def cost(self, delta: float) -> Cost:
        """Return the tight epsilon of all that was charged."""
        return accounting.epsilon(self.event, delta=delta, relation=self.relation)

    def lines(self) -> list[str]:
        """Return the charged events in words, one a line, with their counts."""
        return [f"{count} x {event}" for event, count in self._counts.items()]


def frozen(event: dp.DpEvent) -> dp.DpEvent:
    """Return the event with tuples instead of lists: lists can't be keys, and code that holds them could change the ledger."""
    if isinstance(event, dp.ComposedDpEvent):
        return dp.ComposedDpEvent(tuple(map(frozen, event.events)))
    if isinstance(event, dp.SelfComposedDpEvent):
        return dp.SelfComposedDpEvent(frozen(event.event), event.count)
    try:
        hash(event)
    except TypeError as error:
        raise ValueError(f"event {event}: must be a (sampled) release whose parameters are numbers, or a composition") from error
    return event
