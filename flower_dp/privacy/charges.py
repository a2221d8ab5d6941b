"""Charges: the only record of what was released. Ledgers, joint epsilon and budgets are functions of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flower_dp.core import checks, dp_events
from flower_dp.core.serialization import parts_of, register_serializable
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.events import Relation, as_json, of_json
from flower_dp.privacy.private_file import LedgerError

# The owner of a release that costs all clients alike: known or not, selected or not.
ALL_CLIENTS = "every client"
# An owner's events by index, each with its count, sorted.
_Counts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostScope:
    """The scope in which costs compose: events for the same unit under the same relation, as one adversary sees them.

    Attributes:
        unit: unit that the events protect: `client` or `record`.
        relation: neighboring relation of the events.
        view: name of the adversary; empty for the strongest one.

    Example:
        >>> from flower_dp.privacy.charges import CostScope
        >>> print(CostScope(unit="client", relation="replace-one"))
        for each client (replace-one)
    """

    unit: str
    relation: Relation
    view: str = ""

    def __str__(self) -> str:
        return f"for each {self.unit} ({self.relation})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """The cost of one release of one round, and its owners.

    Attributes:
        release: name of the release on the wire: the method's, or that of private evaluations.
        number: number of charges of this release in its run, this one included: 1, 2, ...
        server_round: number of the round: 1, 2, ...
        fingerprint: text that identifies the charged release; all charges of a release in one run have the same.
        scope: unit and neighboring relation that the events protect.
        owners: names of the charged clients, or `ALL_CLIENTS` alone.
        events: distinct events of the owners.
        which: index into `events` for each owner; may be left out if there is one event.
        views: events as other adversaries see them, by the adversary's name, in the order of `events`.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.privacy.charges import Charge, CostScope
        >>> words = {"release": "dp-pasgd", "number": 1, "server_round": 1, "fingerprint": "by the clients' terms"}
        >>> scope = CostScope(unit="record", relation="replace-one")
        >>> charge = Charge(owners=("a", "b"), events=(GaussianDpEvent(2.0),), scope=scope, **words)
        >>> charge.by_owner["b"]
        GaussianDpEvent(noise_multiplier=2.0)
    """

    release: str
    number: int
    server_round: int
    fingerprint: str
    scope: CostScope
    owners: tuple[str, ...]
    events: tuple[dp_events.DpEvent, ...]
    which: tuple[int, ...] = ()
    views: Mapping[str, tuple[dp_events.DpEvent, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks.integer("number", self.number, at_least=1, at_most=checks.MOST_COUNT)
        checks.integer("server_round", self.server_round, at_least=1, at_most=checks.MOST_COUNT)
        if not self.which and len(self.events) == 1:
            object.__setattr__(self, "which", (0,) * len(self.owners))
        indices = set(self.which)
        if len(self.which) != len(self.owners) or (indices and not 0 <= min(indices) <= max(indices) < len(self.events)):
            raise ValueError(f"which: has {len(self.which)} indices of events for {len(self.owners)} owners; must be one of each")
        if len(set(self.owners)) < len(self.owners) or (ALL_CLIENTS in self.owners and len(self.owners) > 1):
            raise ValueError(f"owners: must name nobody twice, and {ALL_CLIENTS!r} only alone")
        if self.scope.view or "" in self.views:  # else it would count for less, or not at all
            raise ValueError(f"scope={self.scope!r}: must have no view; `views` has the events of weaker adversaries")
        object.__setattr__(self, "events", tuple(map(frozen, self.events)))
        object.__setattr__(self, "views", {view: tuple(map(frozen, events)) for view, events in self.views.items()})
        if any(len(events) != len(self.events) for events in self.views.values()):
            raise ValueError("views: must have one event for each of `events`")

    @property
    def by_owner(self) -> dict[str, dp_events.DpEvent]:
        """Event of each owner."""
        return {owner: self.events[index] for owner, index in zip(self.owners, self.which, strict=True)}

    @property
    def by_scope(self) -> dict[CostScope, tuple[dp_events.DpEvent, ...]]:
        """Events as each adversary sees them."""
        return {self.scope: self.events} | {replace(self.scope, view=view): events for view, events in self.views.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The events that one owner was charged with, and their counts.

    Attributes:
        relation: neighboring relation of the events.
        counts: number of charges by event.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.privacy.charges import History
        >>> history = History(relation="add-or-remove-one", counts={GaussianDpEvent(noise_multiplier=2.0): 2})
        >>> history.lines()
        ['2 x GaussianDpEvent(noise_multiplier=2.0)']
        >>> round(history.cost(delta=1e-5).epsilon, 2)
        2.94
    """

    relation: Relation
    counts: Mapping[dp_events.DpEvent, int]

    @property
    def num_charges(self) -> int:
        """Number of charges of all events."""
        return sum(self.counts.values())

    @property
    def event(self) -> dp_events.DpEvent:
        """Composition of all charges, as one event."""
        return dp_events.ComposedDpEvent([dp_events.SelfComposedDpEvent(event, count) for event, count in self._costing])

    def cost(self, delta: float) -> PrivacyCost:
        """Return an upper bound of epsilon for all that was charged.

        Raises:
            ValueError: if no accountant bounds an event.
        """
        return accounting.epsilon(self.event, delta=delta, relation=self.relation)

    def lines(self) -> list[str]:
        """Return the charged events as text, one a line, with their counts."""
        return [f"{count} x {event}" for event, count in self._costing]

    @property
    def _costing(self) -> list[tuple[dp_events.DpEvent, int]]:
        return [(event, count) for event, count in self.counts.items() if count and not isinstance(event, dp_events.NoOpDpEvent)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Histories:
    """The histories of all owners in one scope. Owners with equal charges share one history.

    Attributes:
        events: distinct events of the scope.
        known: distinct histories; the first one is empty.
        of: index into `known` of each owner's history [owners]. Owner 0 is every client; its history counts for all others, too.
    """

    events: tuple[dp_events.DpEvent, ...] = ()
    known: tuple[_Counts, ...] = ((),)
    of: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def after(self, owners: np.ndarray, events: Sequence[dp_events.DpEvent], which: np.ndarray) -> _Histories:
        """Return these histories with one more event for each of some owners."""
        places = {event: place for place, event in enumerate(self.events)}
        numbers = np.asarray([places.setdefault(event, len(places)) for event in events], np.int64)
        free = {place for event, place in places.items() if isinstance(event, dp_events.NoOpDpEvent)}
        of = np.zeros(max(len(self.of), int(owners.max(initial=0)) + 1), np.int64)
        of[: len(self.of)] = self.of
        known, index = list(self.known), {counts: place for place, counts in enumerate(self.known)}
        # As one number, a history and an event are sorted ten times as fast.
        pairs, inverse = np.unique((of[owners] << 32) | numbers[which], return_inverse=True)
        after = []
        for history, event in zip((pairs >> 32).tolist(), (pairs & 0xFFFFFFFF).tolist(), strict=True):
            counts = dict(known[history])
            if event not in free:
                counts[event] = counts.get(event, 0) + 1
            changed = tuple(sorted(counts.items()))
            if changed not in index:
                index[changed] = len(known)
                known.append(changed)
            after.append(index[changed])
        of[owners] = np.asarray(after, np.int64)[inverse.ravel()]
        # A round may leave the previous histories of all clients without an owner: drop those before they are the majority.
        used = np.unique(np.append(of, 0))
        if len(known) > 2 * len(used):
            known, of = [known[place] for place in used.tolist()], np.searchsorted(used, of)
        return _Histories(events=tuple(places), known=tuple(known), of=of)

    def counts(self, history: int) -> dict[dp_events.DpEvent, int]:
        """Return the counts of a history, together with those of all clients."""
        totals = dict(self.known[history])
        for event, count in self.known[self.of[0]]:
            totals[event] = totals.get(event, 0) + count
        return {self.events[event]: count for event, count in totals.items()}

    def of_owner(self, owner: int | None) -> int:
        """Return the index of an owner's own history, without that of all clients; 0, the empty one, if it has none."""
        return int(self.of[owner]) if owner and owner < len(self.of) else 0

    def numbers(self, owners: Sequence[int | None]) -> np.ndarray:
        """Return the number of charges of each owner [owners], alone and as one of all clients."""
        known = np.asarray([sum(count for _, count in counts) for counts in self.known], np.int64)
        indices = np.fromiter((owner or 0 for owner in owners), np.int64, len(owners))
        alone = np.where((indices > 0) & (indices < len(self.of)), self.of[np.minimum(indices, len(self.of) - 1)], 0)
        return np.asarray(known[alone] + known[self.of[0]])

    @property
    def distinct(self) -> tuple[int, ...]:
        """Indices of the distinct histories of clients, also of one that was never charged alone."""
        return tuple(np.unique(np.append(self.of[1:], 0)).tolist())


_NOBODY = _Histories()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Charges:
    """The charges of one run or of several runs, as a value.

    Attributes:
        last: last charge of each release, by run and release.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.privacy.charges import ALL_CLIENTS, Charge, Charges, CostScope
        >>> scope = CostScope(unit="client", relation="add-or-remove-one")
        >>> words = {"release": "dp-fedavg", "fingerprint": "z = 2", "scope": scope}
        >>> charges = Charges()
        >>> for number in (1, 2):
        ...     words |= {"number": number, "server_round": number}
        ...     charges = charges.after(Charge(**words, owners=(ALL_CLIENTS,), events=(GaussianDpEvent(2.0),)))
        >>> charges.numbers(), round(charges.cost_of_most_charged(scope, 1e-5).epsilon, 2)
        ({'dp-fedavg': 2}, 2.94)
    """

    last: Mapping[tuple[str, str], Charge] = field(default_factory=dict)
    # Index of each name. Earlier and later values share it: a name keeps its index.
    _owners: dict[str, int] = field(default_factory=lambda: {ALL_CLIENTS: 0})
    # Histories by scope and release; "" stands for all releases together.
    _histories: Mapping[tuple[CostScope, str], _Histories] = field(default_factory=dict)

    def after(self, charge: Charge, *, run: str = "", private: bool = True) -> Charges:
        """Return these charges and one more.

        Args:
            charge: next charge of its release in its run.
            run: name of its run, if there are several.
            private: whether its noise is drawn afresh; if not, it counts as a release without noise.

        Raises:
            LedgerError: if it is not the next charge of its release, or has another fingerprint or scope than the previous one.
        """
        key = (run, charge.release)
        if (last := self.last.get(key)) is not None:
            so_far = f"of {charge.release} in this run"
            if charge.number != last.number + 1:
                raise LedgerError(f"has {last.number} charges {so_far}: number {charge.number} is not the next")
            if (charge.fingerprint, charge.scope) != (last.fingerprint, last.scope):
                raise LedgerError(f"has charges {so_far} for something else: {last.fingerprint}, {last.scope}")
        owners = self._owners
        indices = np.fromiter((owners.setdefault(name, len(owners)) for name in charge.owners), np.int64, len(charge.owners))
        which = np.asarray(charge.which, np.int64)
        histories = dict(self._histories)
        for scope, events in charge.by_scope.items():
            counted = events if private else (dp_events.NonPrivateDpEvent(),) * len(events)
            alone, together = self._of(scope, charge.release), self._of(scope)
            histories[scope, charge.release] = alone.after(indices, counted, which)
            same = alone is together  # as long as no other release was charged
            histories[scope, ""] = histories[scope, charge.release] if same else together.after(indices, counted, which)
        return Charges(last={**self.last, key: charge}, _owners=owners, _histories=histories)

    def _of(self, scope: CostScope, release: str = "") -> _Histories:
        return self._histories.get((scope, release), _NOBODY)

    def number(self, release: str, run: str = "") -> int:
        """Return the number of charges of a release of a run."""
        return self.last[run, release].number if (run, release) in self.last else 0

    def numbers(self, run: str = "") -> dict[str, int]:
        """Return the number of charges of each release of a run."""
        return {release: charge.number for (of, release), charge in self.last.items() if of == run}

    @property
    def scopes(self) -> tuple[CostScope, ...]:
        """Scopes of all charges that cost anything, as the strongest adversary sees them."""
        return tuple(
            scope
            for (scope, release), histories in self._histories.items()
            if not scope.view and not release and len(histories.known) > 1
        )

    def runs(self, scope: CostScope) -> set[str]:
        """Return the names of the runs that were charged in a scope."""
        return {run for (run, _), charge in self.last.items() if charge.scope == scope}

    def owners(self, scope: CostScope) -> list[str]:
        """Return the names of all who were charged alone in a scope, and `ALL_CLIENTS` if all were charged."""
        histories = self._of(scope)
        return [name for name, owner in self._owners.items() if owner < len(histories.of) and histories.of[owner]]

    def history(self, scope: CostScope, owner: str = ALL_CLIENTS, *, release: str = "") -> History:
        """Return all that an owner was charged with, alone and as one of all clients; for one release, or for all."""
        histories = self._of(scope, release)
        return History(relation=scope.relation, counts=histories.counts(histories.of_owner(self._owners.get(owner))))

    def counts(self, scope: CostScope, release: str, owners: Sequence[str]) -> np.ndarray:
        """Return the number of charges of each owner for a release [owners], without events that cost nothing."""
        return self._of(scope, release).numbers([self._owners.get(owner) for owner in owners])

    def histories(self, scope: CostScope) -> list[History]:
        """Return the distinct histories of all clients; the first one is that of a client who was not charged alone."""
        histories = self._of(scope)
        return [History(relation=scope.relation, counts=histories.counts(history)) for history in histories.distinct]

    def before(self, charge: Charge) -> list[tuple[History, dp_events.DpEvent]]:
        """Return the distinct histories of a charge's owners, each with the event that the charge would add."""
        if charge.owners == (ALL_CLIENTS,):
            return [(history, charge.events[charge.which[0]]) for history in self.histories(charge.scope)]
        known = self._of(charge.scope)
        pairs = {(known.of_owner(self._owners.get(name)), index) for name, index in zip(charge.owners, charge.which, strict=True)}
        relation = charge.scope.relation
        return [(History(relation=relation, counts=known.counts(number)), charge.events[index]) for number, index in pairs]

    def parts(self) -> dict[str, Any]:
        """Return all charges as parts that can be stored."""
        known = max((len(histories.of) for histories in self._histories.values()), default=1)
        return {
            "last": tuple((*key, charge) for key, charge in self.last.items()),
            "owners": tuple(name for name, owner in self._owners.items() if owner < known),
            "histories": tuple((*key, histories) for key, histories in self._histories.items()),
        }

    @classmethod
    def of_parts(cls, parts: Mapping[str, Any]) -> Charges:
        """Return the charges of such parts."""
        return cls(
            last={(run, release): charge for run, release, charge in parts["last"]},
            _owners={name: owner for owner, name in enumerate(parts["owners"])},
            _histories={(scope, release): histories for scope, release, histories in parts["histories"]},
        )

    def cost_of_most_charged(self, scope: CostScope, delta: float) -> PrivacyCost:
        """Return the largest cost of a client.

        Raises:
            UnsupportedEventError: if no accountant here bounds an event.
        """
        return max((history.cost(delta) for history in self.histories(scope)), key=lambda cost: cost.epsilon)


def _with_events(write: Callable[[Any], Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that writes, or reads, the events among the parts of a value."""

    def change(parts: Mapping[str, Any]) -> dict[str, Any]:
        views = {view: tuple(map(write, events)) for view, events in parts.get("views", {}).items()}
        return {**parts, "events": tuple(map(write, parts["events"])), **({"views": views} if "views" in parts else {})}

    return change


_written, _read = _with_events(as_json), _with_events(of_json)
register_serializable(CostScope)
register_serializable(Charge, lambda charge: _written(parts_of(charge)), lambda parts: Charge(**_read(parts)))
register_serializable(_Histories, lambda found: _written(parts_of(found)), lambda parts: _Histories(**_read(parts)))
register_serializable(Charges, Charges.parts, Charges.of_parts)


def frozen(event: dp_events.DpEvent) -> dp_events.DpEvent:
    """Return the event with tuples instead of lists: lists can't be keys, and code that holds them could change the charge."""
    if isinstance(event, dp_events.ComposedDpEvent):
        return dp_events.ComposedDpEvent(tuple(map(frozen, event.events)))
    if isinstance(event, dp_events.SelfComposedDpEvent):
        return dp_events.SelfComposedDpEvent(frozen(event.event), event.count)
    try:
        hash(event)
    except TypeError as error:
        raise ValueError(f"event {event}: must be a (sampled) release whose parameters are numbers, or a composition") from error
    return event
