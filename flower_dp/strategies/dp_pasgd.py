"""DP-PASGD (Hu et al.): noised local steps on every device, a plain mean of their models, two budgets."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from flower_dp.privacy.client_terms import Terms, values_in
from flower_dp.privacy.dp_pasgd import step_terms
from flower_dp.strategies.best_model import BestModel, less_is_better
from flower_dp.strategies.evaluate_fn import Around, EvaluateFn, named
from flower_dp.strategies.local_level import LocalRules
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.books import NOISE_DEVIATIONS, ClientBooks, Member, PerClient, Population
from flower_dp.strategies.releases.own_replies import OwnReplies
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.strategies.resources import ResourceBudget, Resources
from flower_dp.strategies.rules import Options
from flower_dp.strategies.statements.dp_pasgd import statement_of
from flower_dp.strategies.strategy import DPStrategy


class DPPASGDRules(LocalRules):
    """The rules of DP-PASGD.

    Args:
        population: the devices.
        steps: local steps, the same for all.
        resources: what rounds and steps cost a device.
        clip_norm: L2 bound on one record's gradient.
        delta: of every budget.
        num_steps: local steps that the noise is made for.
        batch_sampling: see `step_terms`.
        calibration: see `step_terms`.
        best_by: the number by which models are compared.
    """

    own: BestModel = BestModel()

    def __init__(
        self,
        population: Population,
        steps: StepSchedule,
        resources: ResourceBudget,
        *,
        clip_norm: float,
        delta: float,
        num_steps: int,
        batch_sampling: str,
        calibration: str,
        best_by: str,
    ) -> None:
        self.steps, self.num_steps, self.batch_sampling = steps, num_steps, batch_sampling
        less_is_better(best_by)
        self.best_by = best_by
        terms = partial(
            step_terms,
            delta=delta,
            num_steps=num_steps,
            num_local_steps=steps.num_local_steps,
            clip_norm=checks.number("clip_norm", clip_norm, above=0),
            batch_sampling=batch_sampling,
            calibration=calibration,
        )
        for size in values_in(population.batch_size):  # refuses impossible values
            for budget in values_in(population.epsilon):
                terms(epsilon=budget, batch_size=size, num_records=size)
        if batch_sampling == "poisson" and population.num_records is None:
            raise ValueError("num_records=None: must be the public data sizes with batch_sampling='poisson'")

        def terms_of(one: Member) -> Terms:
            return terms(epsilon=one.epsilon, batch_size=one.batch_size, num_records=one.num_records)

        books = ClientBooks(
            replace(population, num_replies=num_steps // steps.num_local_steps),
            name="dp-pasgd",
            sampling=FullSampling(),
            clip_norm=clip_norm,
            relation="replace-one",
            delta=delta,
            terms_of=terms_of,
            weight_of=lambda _: 1.0,
            longest=self._longest,
        )
        super().__init__("DP-PASGD" if steps.num_local_steps > 1 else "DP-SGD (DP-PASGD with one local step)", books)
        self.resources = Resources(resources, num_local_steps=steps.num_local_steps, replies_of=self._replies)

    def evaluate(self, plan: PrivateEvaluation | LocalEvaluation) -> None:
        """Make private evaluation a second release of this method's rounds.

        Raises:
            ValueError: if the data sizes are not known.
        """
        if self.books.population.num_records is None:
            raise ValueError(
                "num_records=None: must be the public data sizes with an evaluation, which takes all records of a client"
            )
        super().evaluate(plan)

    def _replies(self) -> dict[str, int]:
        """Return how many rounds every device was asked in: a round costs it resources whether or not its reply arrives."""
        return self.training.counts

    def why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return which budget is spent; None if none is."""
        privacy = self.books.why_stop() and f"the privacy budget is spent: num_steps={self.num_steps}, all of them charged"
        return " and ".join(reason for reason in (privacy, self.resources.why_stop()) if reason) or None

    def _longest(self, asked: OwnReplies, now: Round) -> Callable[[str], float]:
        """Return how long a device's honest update is at most."""
        start = float(l2_norms(now.vector.astype(np.float64)))

        def longest(name: str) -> float:
            release, batch = asked.terms[name].release, asked.terms[name].release.expected_cohort
            most = release.num_clients  # under Poisson sampling a batch may hold all records
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

    def numbers(self, now: Round) -> dict[str, float]:
        """Return the largest resource cost of a device so far, if costs were given."""
        return {"cost-per-device": self.resources.largest} if self.resources.budget.has_costs else {}

    statement = statement_of


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
        steps = StepSchedule(
            num_local_steps=num_local_steps,
            learning_rate=learning_rate,
            learning_rate_decay=learning_rate_decay,
            weight_decay=weight_decay,
        )
        rules = DPPASGDRules(
            Population(num_clients=num_clients, num_records=num_records, epsilon=epsilon, batch_size=batch_size),
            steps,
            ResourceBudget(cost_per_aggregation=cost_per_aggregation, cost_per_step=cost_per_step, max_cost=max_cost),
            clip_norm=clip_norm,
            delta=delta,
            num_steps=num_steps,
            batch_sampling=batch_sampling,
            calibration=calibration,
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
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> Result:
        """Run as `DPStrategy.start` does; the result's model is the best of the run by `evaluate_fn`, else the last.

        Raises:
            ValueError: as there, or if `evaluate_fn` does not return the number that `best_by` names.
            TimeoutError: as there.
            RuntimeError: as there.
        """
        compared = None if evaluate_fn is None else Around(self._compared(named(evaluate_fn)))
        result = super().start(
            grid,
            initial_arrays,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            compared,
            checkpoint_dir=checkpoint_dir,
            resume=resume,
        )
        if (best := self.rules.own.arrays) is not None:
            result.arrays = ArrayRecord({name: Array(array) for name, array in best.items()})
        return result

    def _compared(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        """Return an `evaluate_fn` that keeps the best model that it has evaluated, the initial one included."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays)
            if metrics is not None:
                self.rules.own = self.rules.own.after(server_round, arrays, metrics, best_by=self.rules.best_by)
            return metrics

        return evaluate
