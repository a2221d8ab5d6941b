"""The budget of a ledger: the (epsilon, delta) that all its runs together may cost any client."""

from dataclasses import dataclass

from flower_dp.core import checks, dp_events
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import Charge, Charges, History
from flower_dp.privacy.events import Relation

# Charges that one composition tries to fit, at least; later as many as were charged.
_AHEAD = 8
# Histories whose lower bounds are kept in memory.
_MOST_KNOWN = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerBudget:
    """The (epsilon, delta) that all runs on a ledger together may cost any client.

    Attributes:
        epsilon: largest joint epsilon, > 0.
        delta: the delta at which epsilon holds, in [0, 1).
        fully_adaptive: whether the budget holds also if earlier releases choose mechanism, noise, sampling, or number of later
            runs. Fewer rounds fit: a filter adds up Renyi divergences at one order (`flower_dp.privacy.renyi_filter`).
        renyi_order: order of the filter, > 1; None for the order at which most Gaussian releases without sampling fit.
            `renyi_filter.order_for` returns a better one for charges that are known. A ledger keeps the order of its creation.

    Raises:
        ValueError: for a value out of range, naming it.
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
                raise ValueError(f"renyi_order={self.renyi_order!r}: must be None unless fully_adaptive=True")
            return
        if self.delta == 0:
            raise ValueError("delta=0: must be > 0 for a fully adaptive budget")
        if self.renyi_order is not None:
            checks.number("renyi_order", self.renyi_order, above=1)
            return
        from flower_dp.privacy import renyi_filter  # noqa: PLC0415  (slow to import)

        object.__setattr__(self, "renyi_order", renyi_filter.order_for(self.epsilon, self.delta))

    def __str__(self) -> str:
        adaptive = ", fully adaptive," if self.fully_adaptive else ""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g}{adaptive} for all runs together"


class Remaining:
    """The part of a budget that charges leave. It keeps lower bounds of how many more charges fit, so that few are composed.

    Args:
        budget: budget of the ledger.
    """

    def __init__(self, budget: LedgerBudget) -> None:
        self.budget = budget
        # A lower bound of how many more of an event fit after a history. It is true of any owner with these charges, whether they
        # are stored or not.
        self._left: dict[tuple[Relation, frozenset[tuple[dp_events.DpEvent, int]], dp_events.DpEvent], int] = {}

    def refusal_reason(self, charges: Charges, charge: Charge, *, private: bool) -> str | None:
        """Return the reason why the budget does not cover a charge after earlier ones; None if it does.

        Raises:
            UnsupportedEventError: if no accountant here bounds an event.
        """
        limit = f"the ledger's budget, {self.budget}"
        if others := [scope for scope in charges.scopes if scope != charge.scope]:
            return f"charges {charge.scope} can't be composed with those {others[0]} under {limit}"
        if not private:
            return f"noise from a fixed seed protects nobody: it would exceed {limit}"
        return None if all(self._affords(*pair) for pair in charges.before(charge)) else f"it would exceed {limit}"

    def _affords(self, history: History, event: dp_events.DpEvent) -> bool:
        if isinstance(event, dp_events.NoOpDpEvent):
            return True
        key = (history.relation, frozenset(history.counts.items()), event)
        if key not in self._left:
            if len(self._left) > _MOST_KNOWN:
                self._left.clear()
            self._left[key] = self._num_affordable(history, event)
        # After one more charge one less fits. At 1 nothing is kept: the bound may be too low, so the next check composes exactly.
        if (left := self._left[key]) > 1:
            after = {**history.counts, event: history.counts.get(event, 0) + 1}
            self._left[history.relation, frozenset(after.items()), event] = left - 1
        return left > 0

    def _num_affordable(self, history: History, event: dp_events.DpEvent) -> int:
        """Return a lower bound, at least 1, of how many more of an event fit after a history; 0 if none fits."""
        budget = self.budget
        if budget.renyi_order is not None:
            from flower_dp.privacy import renyi_filter  # noqa: PLC0415  (slow to import)

            order = budget.renyi_order
            allowed = renyi_filter.allowance(budget.epsilon, budget.delta, order)
            return renyi_filter.num_affordable(history.event, event, allowed=allowed, order=order, relation=history.relation)
        ahead = max(_AHEAD, history.counts.get(event, 0))
        # A composition is slow, and any number that fits will do: halve until one does. At 1 the answer is exact.
        while ahead:
            whole = dp_events.ComposedDpEvent([history.event, dp_events.SelfComposedDpEvent(event, ahead)])
            if accounting.epsilon(whole, delta=budget.delta, relation=history.relation).epsilon <= budget.epsilon:
                return ahead
            ahead //= 2
        return 0
