"""A budget of all runs on one ledger: what they may cost any client together."""

from dataclasses import dataclass

from flower_dp.core import checks, dp_events
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import Charge, Charges, History
from flower_dp.privacy.events import Relation

# How many more charges are accounted at once, at least; later as many as there were.
_AHEAD = 8
# Histories that are remembered.
_MOST_KNOWN = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerBudget:
    """What all runs on a ledger together may cost any client.

    Attributes:
        epsilon: what they may cost, at delta.
        delta: in [0, 1).
        fully_adaptive: whether this holds also if mechanism, noise, sampling, or number of runs are chosen by what earlier ones
            released. Fewer rounds fit: a filter adds up Renyi divergences at one order (`flower_dp.privacy.renyi_filter`).
        renyi_order: that order; None for the one at which most Gaussian releases without sampling fit. `renyi_filter.order_for`
            returns a better one, if it is known what will be charged. A ledger keeps the one it was created with.

    Raises:
        ValueError: for a value that makes no sense.
    """

    epsilon: float
    delta: float
    fully_adaptive: bool = False
    renyi_order: float | None = None

    def __post_init__(self) -> None:
        checks.number("epsilon", self.epsilon, above=0)
        checks.number("delta", self.delta, at_least=0, below=1)
        if not checks.flag("fully_adaptive", self.fully_adaptive):
            if self.renyi_order is not None:
                raise ValueError(f"renyi_order={self.renyi_order!r}: is of a fully adaptive budget alone")
            return
        if self.delta == 0:
            raise ValueError("delta=0: a fully adaptive budget needs a delta above 0")
        if self.renyi_order is not None:
            checks.number("renyi_order", self.renyi_order, above=1)
            return
        from flower_dp.privacy import renyi_filter  # noqa: PLC0415  (slow to import)

        object.__setattr__(self, "renyi_order", renyi_filter.order_for(self.epsilon, self.delta))

    def __str__(self) -> str:
        adaptive = ", fully adaptive," if self.fully_adaptive else ""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g}{adaptive} for all runs together"


class Remaining:
    """What charges leave of a budget. It remembers how many more of an event a history affords, so that few are accounted.

    Args:
        budget: the budget.
    """

    def __init__(self, budget: LedgerBudget) -> None:
        self.budget = budget
        # What it says is true of any owner with these charges, whether they are written down or not.
        self._left: dict[tuple[Relation, frozenset[tuple[dp_events.DpEvent, int]], dp_events.DpEvent], int] = {}

    def refusal_reason(self, charges: Charges, charge: Charge, *, private: bool) -> str | None:
        """Return why the budget does not cover a charge after others; None if it does.

        Raises:
            UnsupportedEventError: if nothing here accounts an event.
        """
        limit = f"the ledger's budget, {self.budget}"
        if others := [scope for scope in charges.scopes if scope != charge.scope]:
            return f"charges {charge.scope} don't add up with those {others[0]} under {limit}"
        if not private:
            return f"noise from a fixed seed is within no budget, nor {limit}"
        return None if all(self._affords(*one) for one in charges.before(charge)) else f"it would pass {limit}"

    def _affords(self, history: History, event: dp_events.DpEvent) -> bool:
        if isinstance(event, dp_events.NoOpDpEvent):
            return True
        key = (history.relation, frozenset(history.counts.items()), event)
        if key not in self._left:
            if len(self._left) > _MOST_KNOWN:
                self._left.clear()
            self._left[key] = self._num_affordable(history, event)
        if (left := self._left[key]) > 1:
            after = {**history.counts, event: history.counts.get(event, 0) + 1}
            self._left[history.relation, frozenset(after.items()), event] = left - 1
        return left > 0

    def _num_affordable(self, history: History, event: dp_events.DpEvent) -> int:
        """Return how many more of an event a history affords; a lower bound above 0, or 0."""
        budget = self.budget
        if budget.renyi_order is not None:
            from flower_dp.privacy import renyi_filter  # noqa: PLC0415  (slow to import)

            order = budget.renyi_order
            allowed = renyi_filter.allowance(budget.epsilon, budget.delta, order)
            return renyi_filter.num_affordable(history.event, event, allowed=allowed, order=order, relation=history.relation)
        ahead = max(_AHEAD, history.counts.get(event, 0))
        while ahead:  # a few more than one need no exact number
            whole = dp_events.ComposedDpEvent([history.event, dp_events.SelfComposedDpEvent(event, ahead)])
            if accounting.epsilon(whole, delta=budget.delta, relation=history.relation).epsilon <= budget.epsilon:
                return ahead
            ahead //= 2
        return 0
