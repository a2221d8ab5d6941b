"""The planned cost of a run's rounds, and the number of rounds that a target epsilon allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flower_dp.core import dp_events
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import History
from flower_dp.privacy.events import Relation

# Rounds to compose ahead if the number of rounds is not known.
_FIRST_HORIZON = 64


class EpsilonPlan:
    """The cost of a run's rounds, by a plan that is made before the first round.

    Attributes:
        num_rounds: number of rounds of the plan; None before the plan is made.

    Args:
        events: function that returns the most expensive event of rounds 1 to n.
        target_epsilon: maximum epsilon of the run; None for no limit.
        delta: the delta at which epsilon is stated.
        relation: neighboring relation.
    """

    def __init__(
        self, events: Callable[[int], dp_events.DpEvent], *, target_epsilon: float | None, delta: float, relation: Relation
    ) -> None:
        self._events = events
        self._target, self._delta, self._relation = target_epsilon, delta, relation
        self.num_rounds: int | None = None
        self._planned, self._epsilons = 0, np.zeros(1)
        self._affordable = 0
        self._all_affordable = True
        self._asked: tuple[object, ...] = ()
        self._pays = False

    def plan(self, num_rounds: int) -> None:
        """Plan `num_rounds` rounds, or as many as the target allows."""
        self.num_rounds = num_rounds
        if self._target is not None:
            self._count_affordable(num_rounds, self._target)
            num_rounds = self._affordable
        self._planned, self._epsilons = num_rounds, np.zeros(1)

    def epsilon(self, num_rounds: int) -> float | None:
        """Return an upper bound of the cost of `num_rounds` rounds in order; None for more than were planned.

        The first call composes all planned rounds, so that a mere statement of the plan does not pay for that.
        """
        if num_rounds > self._planned:
            return None
        if num_rounds >= len(self._epsilons):
            self._epsilons = accounting.epsilon_by_round(
                self._events, num_rounds=self._planned, delta=self._delta, relation=self._relation
            )
        bound = float(self._epsilons[num_rounds])
        # All planned rounds fit the target, as computed exactly; the bounds by round, on a coarser grid, may be above it.
        return bound if self._target is None else min(bound, self._target)

    def allows(self, number: int, *, ledger: Callable[[], History], event: dp_events.DpEvent, as_planned: bool) -> bool:
        """Return whether the target allows one more round.

        Args:
            number: number of rounds, this one included.
            ledger: function that returns the charges so far.
            event: event of this round, and of everything else that may still be requested without another round.
            as_planned: whether the charges cost at most as planned.
        """
        if self._target is None:
            return True
        if number > self._affordable and self._all_affordable:
            self._count_affordable(max(2 * self._affordable, _FIRST_HORIZON), self._target)
        if as_planned and number <= self._affordable:
            return True
        # The charges may differ from the plan, so the real charges are composed with this round.
        charged = ledger()
        key = (*charged.lines(), event)
        if key != self._asked:  # cached, since a run that has to end asks the same more than once
            ahead = dp_events.ComposedDpEvent([charged.event, event])
            cost = accounting.epsilon(ahead, delta=self._delta, relation=self._relation).epsilon
            self._asked, self._pays = key, cost <= self._target
        return self._pays

    def _count_affordable(self, num_rounds: int, target: float) -> None:
        """Compute how many rounds in order the target allows, up to a number."""
        self._affordable = accounting.max_repetitions(
            self._events, epsilon=target, delta=self._delta, relation=self._relation, limit=num_rounds
        )
        self._all_affordable = self._affordable == num_rounds
