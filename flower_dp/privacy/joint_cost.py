"""What all runs on one population have cost together: every owner's events of all runs, composed.

Owners who were charged alike share one history: what a million clients have cost is accounted once for each history.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from flower_dp.core import dp
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.events import Relation
from flower_dp.privacy.server_ledger_format import JointBudget

# Owner of what every client is charged with: the others' ids are above 0.
EVERYONE = 0
_NOTHING = 0
# How many more charges are accounted at once, at least; later as many as there were.
_AHEAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What costs add up for: events that protect the same unit under the same relation."""

    unit: str
    relation: Relation

    def __str__(self) -> str:
        return f"for each {self.unit} ({self.relation})"


class Accounts:
    """What every owner was charged with, by what adds up."""

    def __init__(self) -> None:
        self._histories: dict[Scope, Histories] = {}

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Those of all charges."""
        return tuple(scope for scope, histories in self._histories.items() if not histories.empty)

    def of(self, scope: Scope) -> Histories:
        """Return what owners were charged with in a scope."""
        return self._histories.setdefault(scope, Histories(scope.relation))

    def why_not(
        self, budget: JointBudget | None, scope: Scope, charges: Iterable[tuple[int, int | None]], *, private: bool
    ) -> str | None:
        """Return why a budget does not cover charges, each an owner and a place; None if it does, or there is none."""
        if budget is None:
            return None
        limit = f"the ledger's budget, {budget}"
        if others := [other for other in self.scopes if other != scope]:
            return f"charges {scope} don't add up with those {others[0]} under {limit}"
        if not private:
            return f"noise from a fixed seed is within no budget, nor {limit}"
        return None if self.of(scope).covers(budget, charges) else f"it would pass {limit}"


class Histories:
    """How often every owner was charged with which event, in one scope; every client also has what is everyone's.

    Args:
        relation: of the events.
    """

    def __init__(self, relation: Relation) -> None:
        self._relation = relation
        self._events: list[dp.DpEvent] = []
        self._places: dict[dp.DpEvent, int] = {}
        self._counts: list[tuple[tuple[int, int], ...]] = [()]
        self._known: dict[tuple[tuple[int, int], ...], int] = {(): _NOTHING}
        self._after: dict[tuple[int, int], int] = {}
        self._of = array("q", [_NOTHING])
        self._costs: dict[tuple[int, int, float], Cost] = {}
        self._left: dict[tuple[int, int, int], int] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing was charged that costs anything."""
        return len(self._counts) == 1

    def place(self, event: dp.DpEvent) -> int | None:
        """Return the place of an event, by which owners are charged with it; None for one that costs nothing."""
        if isinstance(event, dp.NoOpDpEvent):
            return None
        if event not in self._places:
            self._places[event] = len(self._events)
            self._events.append(event)
        return self._places[event]

    def charge(self, owner: int, place: int | None) -> None:
        """Charge an owner with the event of a place."""
        if place is None:
            return
        if owner >= len(self._of):
            self._of.extend([_NOTHING] * (owner + 1 - len(self._of)))
        before = self._of[owner]
        after = self._of[owner] = self._next(before, place)
        if owner == EVERYONE:
            counted = {key: left for key, left in self._left.items() if key[1:] == (before, place)}
            self._left |= {(history, after, place): left - 1 for (history, _, _), left in counted.items() if left > 1}
        elif (left := self._left.get((before, self._of[EVERYONE], place), 0)) > 1:
            self._left[after, self._of[EVERYONE], place] = left - 1

    def has(self, owner: int) -> bool:
        """Return whether an owner was charged itself, and not as one of all clients alone."""
        return owner < len(self._of) and self._of[owner] != _NOTHING

    def event(self, owner: int) -> dp.DpEvent:
        """Return all that an owner was charged with, alone and as one of all clients."""
        return self._event(self._history(owner), self._of[EVERYONE])

    def cost(self, owner: int, delta: float) -> Cost:
        """Return what an owner was charged with costs."""
        return self._cost(self._history(owner) if owner != EVERYONE else _NOTHING, delta)

    def worst(self, delta: float) -> Cost:
        """Return the largest cost of a client."""
        return max((self._cost(history, delta) for history in self._distinct()), key=lambda cost: cost.epsilon)

    def covers(self, budget: JointBudget, charges: Iterable[tuple[int, int | None]]) -> bool:
        """Return whether charges, each an owner and a place, at most one of each owner, leave everyone within a budget."""
        everyone, wanted = self._of[EVERYONE], set()
        for owner, place in charges:
            if place is None:
                continue
            histories = self._distinct() if owner == EVERYONE else {self._history(owner)}
            wanted |= {(history, everyone, place) for history in histories}
        return all(self._affordable(budget, *one) > 0 for one in wanted)

    def _affordable(self, budget: JointBudget, history: int, everyone: int, place: int) -> int:
        """Return how many more of an event a history can be charged with; a lower bound above 0, or 0."""
        key = (history, everyone, place)
        if key not in self._left:
            if budget.fully_adaptive:
                from flower_dp.privacy import renyi_filter  # noqa: PLC0415  (slow to import)

                before = self._event(history, everyone)
                self._left[key] = renyi_filter.num_affordable(before, self._events[place], budget, self._relation)
            else:
                self._left[key] = self._covered(budget, *key)
        return self._left[key]

    def _covered(self, budget: JointBudget, history: int, everyone: int, place: int) -> int:
        """Return how many more of an event a budget of known releases has left; a lower bound above 0, or 0."""
        before = self._event(history, everyone)

        def ahead(count: int) -> dp.DpEvent:
            return dp.ComposedDpEvent([before, dp.SelfComposedDpEvent(self._events[place], count)])

        least = max(_AHEAD, sum(dict(self._counts[one]).get(place, 0) for one in (history, everyone)))
        left = 0
        while least and not left:  # a few more than one need no exact number
            left = least if self._composed(ahead(least), budget.delta).epsilon <= budget.epsilon else 0
            least //= 2
        return left

    def _next(self, history: int, place: int) -> int:
        """Return the history with one event more."""
        if (history, place) not in self._after:
            counts = dict(self._counts[history])
            counts[place] = counts.get(place, 0) + 1
            found = tuple(sorted(counts.items()))
            if found not in self._known:
                self._known[found] = len(self._counts)
                self._counts.append(found)
            self._after[history, place] = self._known[found]
        return self._after[history, place]

    def _history(self, owner: int) -> int:
        return self._of[owner] if 0 < owner < len(self._of) else _NOTHING

    def _distinct(self) -> set[int]:
        return {_NOTHING, *self._of[1:]}

    def _event(self, history: int, everyone: int) -> dp.DpEvent:
        counts = (*self._counts[history], *self._counts[everyone])
        return dp.ComposedDpEvent([dp.SelfComposedDpEvent(self._events[place], count) for place, count in counts])

    def _composed(self, event: dp.DpEvent, delta: float) -> Cost:
        return accounting.epsilon(event, delta=delta, relation=self._relation)

    def _cost(self, history: int, delta: float) -> Cost:
        key = (history, self._of[EVERYONE], delta)
        if key not in self._costs:
            self._costs[key] = self._composed(self._event(*key[:2]), delta)
        return self._costs[key]
