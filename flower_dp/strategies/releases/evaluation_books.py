"""The cost of private evaluations for clients with ledgers of their own, in addition to the cost of training."""

from collections.abc import Callable, Iterable, Mapping

from dp_accounting import ComposedDpEvent, DpEvent

from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.events import Relation, UnsupportedEventError
from flower_dp.privacy.ledger import Ledger
from flower_dp.strategies.releases.own_replies import ask_of
from flower_dp.wire import Ask


class EvaluationBooks:
    """Terms and ledgers of evaluation of every client, for one run.

    Args:
        budget: every client's budget of evaluations; server and clients have the same one.
        relation: neighbouring relation of the ledgers.
        delta: the delta at which epsilon is stated.
    """

    def __init__(self, budget: EvaluationBudget, *, relation: Relation, delta: float) -> None:
        self.budget, self.relation, self.delta = budget, relation, delta
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.terms: dict[str, Terms] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.num_charged = 0
        self._costs: dict[DpEvent, float] = {}

    def open(self, training: Mapping[str, Terms]) -> None:
        """Open a ledger for every client, in addition to its terms of training."""
        self.terms = {name: self.budget.terms(name, terms) for name, terms in training.items()}
        self.ledgers = {name: Ledger(owner=f"{name}, evaluation", relation=self.relation) for name in training}

    def can_pay(self, name: str) -> bool:
        """Return whether a client's budget covers one more evaluation."""
        return self.ledgers[name].num_charges < self.terms[name].num_replies

    def ask(self, names: Iterable[str], metrics: MetricBounds, *, weight_of: Callable[[str], float]) -> Ask:
        """Return what is asked of clients: their metrics, by their own terms of evaluation, and with the weight of each."""
        return ask_of({name: self.terms[name] for name in names}, clip_norm=1.0, weight_of=weight_of, metrics=metrics)

    def charge(self, names: tuple[str, ...]) -> None:
        """Charge one evaluation to each client."""
        self.num_charged += 1
        for name in names:
            self.ledgers[name].charge(self.terms[name].event)

    def alone(self, name: str) -> Cost:
        """Return what a client's evaluations cost alone: pure epsilons added up."""
        return accounting.epsilon(self.ledgers[name].event, delta=0.0, relation=self.relation)

    def pure_epsilons(self) -> dict[str, float]:
        """Return an upper bound of `alone` of every client that was charged: its number of evaluations times the cost of one."""
        return {name: ledger.num_charges * self._each(name) for name, ledger in self.ledgers.items() if ledger.num_charges}

    def _each(self, name: str) -> float:
        event = self.terms[name].event
        if event not in self._costs:
            # As a float the product may be below the sum by its last bits.
            self._costs[event] = accounting.epsilon(event, delta=0.0, relation=self.relation).epsilon * (1 + 2**-40)
        return self._costs[event]

    def together(self, name: str, training: Cost, event: DpEvent, *, grid: float) -> Cost:
        """Return what training and evaluations cost a client together: the least bound that can be proved.

        The sum always holds: (e1, delta) and (e2, 0) compose to (e1 + e2, delta).

        Args:
            name: the client.
            training: the cost of its training.
            event: what its training has released.
            grid: the accountant's grid.
        """
        ledger = self.ledgers[name]
        if not ledger.num_charges:
            return training
        total = Cost(
            epsilon=training.epsilon + self.alone(name).epsilon,
            delta=training.delta,
            relation=training.relation,
            accountant=f"{training.accountant} + pure",
        )
        try:
            whole = ComposedDpEvent([event, ledger.event])
            exact = accounting.epsilon(whole, delta=self.delta, relation=self.relation, grid=grid)
        except UnsupportedEventError:
            return total
        return min(exact, total, key=lambda cost: cost.epsilon)
