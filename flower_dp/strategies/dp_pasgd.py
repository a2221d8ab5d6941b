"""DP-PASGD (Hu et al.): noised local steps on every device, a plain mean of their models, two budgets."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_dp.core import checks
from flower_dp.core.clipping import l2_norms
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FullSampling
from flower_dp.core.steps import StepSchedule
from flower_dp.core.stored import stored
from flower_dp.privacy.client_terms import Terms, per_client, values_in
from flower_dp.privacy.dp_pasgd import step_terms
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.best_model import BestModel, less_is_better
from flower_dp.strategies.evaluate_fn import Around, EvaluateFn, named
from flower_dp.strategies.local_evaluation import OwnEvaluation
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.books import (
    NOISE_DEVIATIONS,
    BooksState,
    ClientBooks,
    PerClient,
    Population,
    TermsOf,
    check_count,
)
from flower_dp.strategies.releases.own_replies import OwnReplies
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.strategies.resources import ResourceBudget, Resources
from flower_dp.strategies.rules import Options
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.dp_pasgd import statement_of
from flower_dp.strategies.strategy import DPStrategy


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DPPASGDState:
    """What a run of DP-PASGD has released, and its best model.

    Attributes:
        books: replies of every device.
        best: the best model by the server's own evaluation.
    """

    books: BooksState
    best: BestModel


class DPPASGDRules:
    """The rules of DP-PASGD; its arguments are those of `DPPASGD`."""

    name = "dp-pasgd"
    stock_refusal = "stock clients add no noise of their own; use flower_dp.clients.LocalDPClient"

    def __init__(
        self,
        *,
        num_clients: int,
        batch_size: int | Sequence[int] | Mapping[str, int],
        clip_norm: float,
        epsilon: float | PerClient,
        delta: float,
        num_steps: int,
        num_local_steps: int,
        learning_rate: float,
        learning_rate_decay: float = 0.0,
        weight_decay: float = 0.0,
        batch_sampling: str = "fixed-size",
        calibration: str = "exact",
        num_records: int | Sequence[int] | Mapping[str, int] | None = None,
        cost_per_aggregation: float = 0.0,
        cost_per_step: float = 0.0,
        max_cost: float | None = None,
        best_by: str = "loss",
    ) -> None:
        self.clip_norm = checks.number("clip_norm", clip_norm, above=0)
        self.steps = StepSchedule(
            num_local_steps=num_local_steps,
            learning_rate=learning_rate,
            learning_rate_decay=learning_rate_decay,
            weight_decay=weight_decay,
        )
        self.title = "DP-PASGD" if num_local_steps > 1 else "DP-SGD (DP-PASGD with one local step)"
        self.num_steps, self.batch_sampling, self.calibration = num_steps, batch_sampling, calibration
        less_is_better(best_by)
        self.best_by = best_by
        self._epsilon, self._batch_size = epsilon, batch_size
        check_count("epsilon", epsilon, num_clients)
        check_count("batch_size", batch_size, num_clients)
        delta = checks.number("delta", delta, above=0, below=1)
        for size in values_in(batch_size):
            for budget in values_in(epsilon):
                self._agreed(delta, budget, size, size)
        if batch_sampling == "poisson" and num_records is None:
            raise ValueError("num_records=None: must be the public data sizes with batch_sampling='poisson'")
        self._sizes_known = num_records is not None
        population = Population(
            num_clients=num_clients,
            num_records=batch_size if num_records is None else num_records,
            num_replies=num_steps // num_local_steps,
            aggregation="uniform",
        )
        self.num_clients, self.delta = num_clients, delta
        self.books = ClientBooks(
            population,
            name=self.name,
            sampling=FullSampling(),
            clip_norm=self.clip_norm,
            relation="replace-one",
            delta=delta,
            terms_of=self._terms_of,
            weight_of=lambda _: 1.0,
            longest=self._longest,
        )
        self.training = self.books.training
        self.evaluation: OwnEvaluation | None = None
        prices = ResourceBudget(cost_per_aggregation=cost_per_aggregation, cost_per_step=cost_per_step, max_cost=max_cost)
        self.resources = Resources(prices, num_local_steps=num_local_steps, replies_of=self._replies)
        self.best = BestModel()

    @property
    def state(self) -> DPPASGDState:
        """All that these rules need to go on."""
        return DPPASGDState(books=self.books.state, best=self.best)

    @state.setter
    def state(self, state: DPPASGDState) -> None:
        self.books.state, self.best = state.books, state.best

    def evaluate(self, plan: PrivateEvaluation | LocalEvaluation) -> None:
        """Make private evaluation a second release of this method's rounds.

        Raises:
            ValueError: if the data sizes are not known.
        """
        if not self._sizes_known:
            raise ValueError(
                "num_records=None: must be the public data sizes with an evaluation, which takes all records of a client"
            )
        self.evaluation = OwnEvaluation.of(plan, self.books, self.title)

    def plan(self, num_rounds: int) -> None:
        """Remember the number of rounds; the noise is calibrated for `num_steps`, for any number of them."""
        self.books.plan(num_rounds)

    def open(self, names: tuple[str, ...]) -> None:
        """Open a ledger for every client, on the terms of its own budget and batch size."""
        self.books.open(names)

    def _terms_of(self, names: Sequence[str]) -> TermsOf:
        budgets, sizes = per_client("epsilon", self._epsilon, names), per_client("batch_size", self._batch_size, names)
        return lambda name, num_records, _: self._agreed(self.delta, budgets[name], sizes[name], num_records)

    def _replies(self) -> dict[str, int]:
        """Return how many rounds every device was asked in: a round costs it resources whether or not its reply arrives."""
        return dict(zip(self.books.terms, self.training.state.replies.tolist(), strict=True))

    def why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return which budget is spent; None if none is."""
        privacy = self.books.why_stop() and f"the privacy budget is spent: num_steps={self.num_steps}, all of them charged"
        return " and ".join(reason for reason in (privacy, self.resources.why_stop()) if reason) or None

    def _longest(self, asked: OwnReplies, now: Round) -> Callable[[str], float]:
        """Return how long a device's honest update is at most."""
        start = float(l2_norms(now.vector.astype(np.float64)))

        def longest(name: str) -> float:
            release, batch = asked.terms[name].release, asked.terms[name].release.expected_cohort
            # Under Poisson sampling a batch may hold all records.
            most = self.books.num_records[name] if self.batch_sampling == "poisson" else batch
            noise = release.noise_scale / batch * (2 * math.sqrt(now.length) + NOISE_DEVIATIONS)
            return self.steps.longest(now.server_round, start=start, gradient=most / batch * self.clip_norm, noise=noise)

        return longest

    def learn(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the plain mean of the models of the devices that have answered; without any, the last model."""
        replied = len(collected.clients)
        return np.asarray(now.vector + collected.total / replied) if replied else now.vector

    def noise_and_signal(self, dimension: int) -> tuple[float, float]:
        """Return the norms of the noise that all steps leave in the mean, and of the longest movement without it."""
        rate, steps = self.steps.step_size(1), self.steps.num_local_steps
        variances = [(terms.release.noise_std / terms.release.expected_cohort) ** 2 for terms in self.books.terms.values()]
        noise = math.sqrt(steps * sum(variances) * dimension) / len(variances)
        return rate * noise, rate * steps * self.clip_norm

    @property
    def epsilon(self) -> float:
        """An upper bound of the largest cost of a client."""
        return self.books.epsilon

    def numbers(self, now: Round) -> dict[str, float]:
        """Return the largest resource cost of a device so far, if costs were given."""
        return {"cost-per-device": self.resources.largest} if self.resources.budget.has_costs else {}

    def _agreed(self, delta: float, epsilon: float, batch_size: int, num_records: int) -> Terms:
        return step_terms(
            epsilon=epsilon,
            delta=delta,
            num_steps=self.num_steps,
            num_local_steps=self.steps.num_local_steps,
            clip_norm=self.clip_norm,
            batch_size=batch_size,
            num_records=num_records,
            batch_sampling=self.batch_sampling,
            calibration=self.calibration,
        )

    def statement(self, facts: RunFacts) -> PrivacyStatement:
        """Return the statement: the worst client, and the distribution over clients."""
        return statement_of(self, facts)


class DPPASGD(DPStrategy):
    """DP-PASGD, for clients whose recipe is `flower_dp.clients.DPPASGDRecipe` with the same numbers; DP-SGD with one local step.

    In each round every device takes tau steps w <- w - eta (g + b), where g is the mean of the clipped gradients of a mini-batch
    and b ~ N(0, sigma_m^2 I) is drawn anew in *every step*; the server takes the plain mean of the models of the devices that
    answer. All K steps together are (epsilon, delta)-differentially private for each record of a device, replaced by another,
    against everyone who sees its messages: local differential privacy.

    The result's model is the best by `evaluate_fn`, the initial one included; without an `evaluate_fn`, or if it returns nothing,
    the last. Let `evaluate_fn` use public data: then the choice costs nothing.

    A run ends before the round that would pass the privacy budget (`num_steps`) or the resource budget (`max_cost`), and its
    statement says which; `rules.resources.costs` has the cost of every device.

    Args:
        num_clients: number of devices (paper: M).
        batch_size: records in a mini-batch (paper: X_m): one number, a sequence in the order of the clients' names, or by name.
        clip_norm: L2 bound on one record's gradient (paper: G).
        epsilon: budget of each device: one number, a sequence or a mapping; math.inf: no noise, not private.
        delta: in (0, 1).
        num_steps: local steps that the noise is made for (paper: K), a multiple of `num_local_steps`.
        num_local_steps: steps of a device in a round (paper: tau).
        learning_rate: the devices' step size in round 1 (paper: eta); the server uses it to bound the norm of an honest update.
        learning_rate_decay: the step size shrinks by this part every round.
        weight_decay: L2 coefficient of the devices' loss.
        batch_sampling: `fixed-size`, without amplification as in the paper, or `poisson`, with it.
        calibration: `exact`, the least noise that can be proved enough, or `zcdp`, the paper's eq. 9 (not its eq. 23, which has a
            wrong sign).
        num_records: public data sizes, needed for `poisson` and for an `evaluation`: one number, a sequence or a mapping.
        cost_per_aggregation: of one round to a device (paper: c1).
        cost_per_step: of one local step to a device (paper: c2).
        max_cost: of a device in a run (paper: C_th); None: no limit.
        best_by: the number of `evaluate_fn` by which models are compared: the least, if its name ends in `loss`, or the largest,
            if it ends in `accuracy`.
        options: those of every strategy: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.

    Source: Hu, Guo, Ratazzi, Gong, Differentially Private Federated Learning for Resource-Constrained Internet of Things,
    Algorithm 1.

    Example:
        >>> from flower_dp.strategies import DPPASGD
        >>> strategy = DPPASGD(
        ...     num_clients=16,
        ...     batch_size=64,
        ...     clip_norm=1.0,
        ...     epsilon=10.0,
        ...     delta=1e-4,
        ...     num_steps=90,
        ...     num_local_steps=10,
        ...     learning_rate=0.5,
        ...     cost_per_aggregation=100,
        ...     cost_per_step=1,
        ...     max_cost=1000,
        ... )
        >>> strategy.rules.resources.budget.cost(num_rounds=9, num_steps=90)
        990.0
    """

    rules: DPPASGDRules

    def __init__(
        self,
        *,
        num_clients: int,
        batch_size: int | Sequence[int] | Mapping[str, int],
        clip_norm: float,
        epsilon: float | PerClient,
        delta: float,
        num_steps: int,
        num_local_steps: int,
        learning_rate: float,
        learning_rate_decay: float = 0.0,
        weight_decay: float = 0.0,
        batch_sampling: str = "fixed-size",
        calibration: str = "exact",
        num_records: int | Sequence[int] | Mapping[str, int] | None = None,
        cost_per_aggregation: float = 0.0,
        cost_per_step: float = 0.0,
        max_cost: float | None = None,
        best_by: str = "loss",
        **options: Unpack[Options],
    ) -> None:
        rules = DPPASGDRules(
            num_clients=num_clients,
            batch_size=batch_size,
            clip_norm=clip_norm,
            epsilon=epsilon,
            delta=delta,
            num_steps=num_steps,
            num_local_steps=num_local_steps,
            learning_rate=learning_rate,
            learning_rate_decay=learning_rate_decay,
            weight_decay=weight_decay,
            batch_sampling=batch_sampling,
            calibration=calibration,
            num_records=num_records,
            cost_per_aggregation=cost_per_aggregation,
            cost_per_step=cost_per_step,
            max_cost=max_cost,
            best_by=best_by,
        )
        super().__init__(rules, **options)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run as `DPStrategy.start` does; the result's model is the best of the run by `evaluate_fn`, else the last.

        Raises:
            ValueError: as there, or if `evaluate_fn` does not return the number that `best_by` names.
            TimeoutError: as there.
            RuntimeError: as there.
        """
        compared = None if (evaluate := named(evaluate_fn)) is None else Around(self._compared(evaluate))
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, compared)
        if (best := self.rules.best.arrays) is not None:
            result.arrays = ArrayRecord({name: Array(array) for name, array in best.items()})
        return result

    def _compared(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        """Return an `evaluate_fn` that keeps the best model that it has evaluated, the initial one included."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays)
            if metrics is not None:
                self.rules.best = self.rules.best.after(server_round, arrays, metrics, best_by=self.rules.best_by)
            return metrics

        return evaluate
