"""DP-PASGD (Hu et al.): noised local steps on every device, a plain mean of their models, two budgets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from flower_dp.core.serialization import serializable
from flower_dp.core.step_schedule import StepSchedule
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.client_terms import ClientTerms, values_in
from flower_dp.privacy.dp_pasgd import paper_epsilon, step_terms
from flower_dp.privacy.statement import PaperEpsilon, PrivacyStatement
from flower_dp.strategies.evaluate_fn import Around, EvaluateFn, named
from flower_dp.strategies.evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.local_level import (
    NOISE_DEVIATIONS,
    LocalRules,
    least_and_largest,
    local_statement,
    relies_on_secret_sampling,
)
from flower_dp.strategies.releases.client_ledgers import ClientFacts, ClientLedgers, PerClient, Population
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import ModelUpdate, StrategyOptions
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.strategies.strategy import DPStrategy


def less_is_better(best_model_metric: str) -> bool:
    """Return whether the smallest value of a metric is the best (`...loss`), or the largest (`...accuracy`).

    Raises:
        ValueError: for a name with another ending.
    """
    if isinstance(best_model_metric, str) and best_model_metric.endswith(("loss", "accuracy")):
        return best_model_metric.endswith("loss")
    raise checks.bad(
        "best_model_metric", best_model_metric, "the name of a metric that ends in loss or accuracy, such as validation-loss"
    )


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestModel:
    """The best model of those that were compared.

    Attributes:
        arrays: the best model, by the names of its arrays; None before any.
        server_round: the round of the best model; 0 is the initial one.
        value: metric of the best model.
        num_seen: number of models that were compared.
    """

    arrays: Mapping[str, np.ndarray] | None = None
    server_round: int = 0
    value: float = math.nan
    num_seen: int = 0

    def after(self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord, *, best_model_metric: str) -> BestModel:
        """Return the best model after one more comparison: this one, or the new one if it is better than all before.

        A model whose metric is not finite is skipped.

        Args:
            server_round: round of the model.
            arrays: the model.
            metrics: metrics of the model. If they come from public data, the choice costs no privacy.
            best_model_metric: name of the metric that decides: see `less_is_better`.

        Raises:
            ValueError: if the metrics lack the one that decides.
        """
        value = metrics.get(best_model_metric)
        if not isinstance(value, int | float):
            raise ValueError(
                f"evaluate_fn: returns {', '.join(metrics) or 'nothing'}; must have best_model_metric={best_model_metric!r}"
            )
        if not math.isfinite(value):
            return self
        better = value < self.value if less_is_better(best_model_metric) else value > self.value
        if self.arrays is not None and not better:
            return replace(self, num_seen=self.num_seen + 1)
        model = {name: array.numpy() for name, array in arrays.items()}
        return BestModel(arrays=model, server_round=server_round, value=float(value), num_seen=self.num_seen + 1)

    def in_words(self, best_model_metric: str) -> str | None:
        """Return the text on the choice of the final model; None if nothing was compared."""
        if self.arrays is None:
            return None
        which = f"of round {self.server_round}" if self.server_round else "the initial one"
        return f"The final model, {which}, was chosen out of {self.num_seen} by its {best_model_metric}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resource costs of a device for rounds and local steps, in any unit, and their limit (Hu et al., eq. 8: c1, c2, C_th).

    A device is charged with its request, whether or not its reply arrives.

    Attributes:
        num_local_steps: local steps per round.
        cost_per_aggregation: cost of a round's messages.
        cost_per_step: cost of a local step.
        max_resource_cost: maximum cost of a device in a run; None: no limit.

    Raises:
        ValueError: if a value is invalid (the message names field and value), or if the limit is too small for one round.

    Example:
        >>> from flower_dp.strategies.dp_pasgd import Resources
        >>> Resources(num_local_steps=10, cost_per_aggregation=100, cost_per_step=1, max_resource_cost=1000).cost(9)
        990.0
    """

    num_local_steps: int
    cost_per_aggregation: float = 0.0
    cost_per_step: float = 0.0
    max_resource_cost: float | None = None

    def __post_init__(self) -> None:
        checks.number("cost_per_aggregation", self.cost_per_aggregation, at_least=0)
        checks.number("cost_per_step", self.cost_per_step, at_least=0)
        if self.max_resource_cost is not None:
            checks.number("max_resource_cost", self.max_resource_cost, above=0)
            if not self.has_costs:
                raise checks.refusal(
                    "max_resource_cost", self.max_resource_cost, "needs cost_per_aggregation or cost_per_step above 0"
                )
            if self.cost(1) > self.max_resource_cost:
                raise checks.refusal(
                    "max_resource_cost", self.max_resource_cost, f"must pay for one round, which costs a device {self.cost(1):g}"
                )

    @property
    def has_costs(self) -> bool:
        """Whether a cost is above 0."""
        return bool(self.cost_per_aggregation or self.cost_per_step)

    def cost(self, rounds: int) -> float:
        """Return the cost of `rounds` rounds to a device, bit for bit the planner's sum."""
        return float(self.cost_per_aggregation * rounds + self.cost_per_step * (rounds * self.num_local_steps))

    def stop_reason(self, most: int) -> str | None:
        """Return the reason if one more round after `most` would exceed the limit of a device; else None."""
        if self.max_resource_cost is None or self.cost(most + 1) <= self.max_resource_cost:
            return None
        return (
            f"the resource budget is spent: a device has spent {self.cost(most):g}, and one more round would make that "
            f"{self.cost(most + 1):g}{self._limit}"
        )

    def line(self, most: int) -> str:
        """Return the text on the resources that a device has spent in `most` rounds."""
        return (
            f"Resources: a device spent at most {self.cost(most):g}{self._limit}, for {most} aggregations at "
            f"{self.cost_per_aggregation:g} and {most * self.num_local_steps} local steps at {self.cost_per_step:g}"
        )

    @property
    def _limit(self) -> str:
        return "" if self.max_resource_cost is None else f" of max_resource_cost={self.max_resource_cost:g}"


_FORMULA = "rho + 2 sqrt(rho log(1/delta)), rho = 2 K G^2 / (X_m^2 sigma_m^2), Hu et al. eq. 9"
_BATCHES = {
    "fixed-size": "a batch of fixed size drawn anew in every step; accounted as if every record were in every batch",
    "poisson": "each record in the batch of every step independently with probability batch_size / num_records",
}


class DPPASGDRules(LocalRules):
    """The rules of DP-PASGD.

    Args:
        population: the devices.
        steps: local steps, the same for all.
        resources: costs of rounds and steps, and their limit.
        clip_norm: L2 bound on one record's gradient.
        delta: delta of every budget.
        num_steps: number of local steps for which the noise is made.
        batch_sampling: `fixed-size` or `poisson`: see `step_terms`.
        calibration: `exact` or `zcdp`: see `step_terms`.
        best_model_metric: name of the metric that selects the final model.
        evaluation: settings of private evaluations; None for none.
    """

    def __init__(
        self,
        population: Population,
        steps: StepSchedule,
        resources: Resources,
        *,
        clip_norm: float,
        delta: float,
        num_steps: int,
        batch_sampling: str,
        calibration: str,
        best_model_metric: str,
        evaluation: PrivateEvaluation | LocalEvaluation | None = None,
    ) -> None:
        self.steps, self.num_steps, self.batch_sampling = steps, num_steps, batch_sampling
        less_is_better(best_model_metric)
        self.best_model_metric = best_model_metric
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
            raise checks.bad("num_records", None, "the public data sizes with batch_sampling='poisson'")

        def terms_of(client: ClientFacts) -> ClientTerms:
            return terms(epsilon=client.epsilon, batch_size=client.batch_size, num_records=client.num_records)

        if evaluation is not None and population.num_records is None:
            raise checks.bad("num_records", None, "the public data sizes with an evaluation, which takes all records of a client")
        books = ClientLedgers(
            replace(population, num_replies=num_steps // steps.num_local_steps),
            relation="replace-one",
            delta=delta,
            terms_of=terms_of,
        )
        title = "DP-PASGD" if steps.num_local_steps > 1 else "DP-SGD (DP-PASGD with one local step)"
        super().__init__(title, books, name="dp-pasgd", sampling=FullSampling(), clip_norm=clip_norm, evaluation=evaluation)
        self.resources = resources

    def costs(self, charges: Charges) -> dict[str, float]:
        """Return the resource cost of every device, by name; a round counts whether or not the reply arrives."""
        return {name: self.resources.cost(rounds) for name, rounds in self.training.counts(charges).items()}

    def most_rounds(self, charges: Charges) -> int:
        """Return the maximum number of rounds in which one device got a request."""
        return max(self.training.counts(charges).values(), default=0)

    def weight(self, name: str) -> float:
        """Return 1: the server takes the plain mean."""
        return 1.0

    def stop_reason(self, state: RunState, server_round: int, cohort_size: int | None) -> str | None:
        """Return which budget is spent; None if none is."""
        spent = super().stop_reason(state, server_round, cohort_size)
        privacy = spent and f"the privacy budget is spent: num_steps={self.num_steps}, all of them charged"
        return " and ".join(filter(None, (privacy, self.resources.stop_reason(self.most_rounds(state.charges))))) or None

    def longest(self, now: RoundRequest) -> Callable[[str], float]:
        """Return a bound on the norm of a device's honest update."""
        start = float(l2_norms(now.vector.astype(np.float64)))

        def longest(name: str) -> float:
            release, batch = self.books.terms[name].release, self.books.terms[name].release.expected_cohort_size
            most = release.num_units  # under Poisson sampling a batch may hold all records
            noise = release.noise_scale / batch * (2 * math.sqrt(now.length) + NOISE_DEVIATIONS)
            return self.steps.longest(now.server_round, start=start, gradient=most / batch * self.clip_norm, noise=noise)

        return longest

    def next_model(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> ModelUpdate:
        """Return the plain mean of the models of the devices that have replied; without any, the previous model."""
        replied = len(collected.clients)
        return ModelUpdate(vector=now.vector + collected.total / replied if replied else now.vector, own=state.own)

    def noise_and_signal_norms(self, dimension: int) -> tuple[float, float]:
        """Return the norms of the noise that all steps leave in the mean, and of the longest movement without it."""
        rate, steps = self.steps.step_size(1), self.steps.num_local_steps
        variances = [(terms.release.noise_std / terms.release.expected_cohort_size) ** 2 for terms in self.books.terms.values()]
        noise = math.sqrt(steps * sum(variances) * dimension) / len(variances)
        return rate * noise, rate * steps * self.clip_norm

    def public_metrics(self, state: RunState, now: RoundRequest | None) -> Mapping[str, float]:
        """Return the quick epsilon, and the largest resource cost of a device so far, if costs were given."""
        if now is None or not self.resources.has_costs:
            return super().public_metrics(state, now)
        return {**super().public_metrics(state, now), "cost-per-device": self.resources.cost(self.most_rounds(state.charges))}

    def statement(self, state: RunState, facts: RunFacts) -> PrivacyStatement:
        """Return the statement: the worst client, and the distribution over clients."""
        books, resources, charges = self.books, self.resources, state.charges
        num_rounds = charges.number(self.training.name)
        if resources.has_costs and num_rounds:
            facts = replace(facts, incidents=(*facts.incidents, resources.line(self.most_rounds(charges))))
        assumptions = [
            "A client computes the model it sends from its noised steps alone, so the model costs as much as the steps together."
        ]
        if relies_on_secret_sampling(self, charges):
            assumptions.append("Only the client knows which records are in a batch.")
        if state.own is not None and (chosen := state.own.in_words(self.best_model_metric)):
            assumptions.append(f"{chosen} on data assumed to be public: such a choice costs nothing.")
        scale = "noise_std_of_a_mean_gradient"
        # The device with the least noise; the std is on the change of a weight in all steps of a round.
        least = min((terms.release.noise_std / terms.release.expected_cohort_size for terms in books.terms.values()), default=0.0)
        return local_statement(
            self,
            state,
            facts,
            message_std=min(self.steps.noise_std(1 + done, noise=least) for done in range(max(1, num_rounds))),
            noise={
                "clip_norm": self.clip_norm,
                **least_and_largest(books, scale, lambda release: release.noise_scale / release.expected_cohort_size),
            },
            paper=_paper(self, charges, facts),
            sampling=f"all {self.about.num_clients} clients in every round, at most {self.num_steps} local steps per client, "
            f"{self.steps.num_local_steps} per round; {_BATCHES[self.batch_sampling]}",
            assumptions=tuple(assumptions),
        )


def _paper(rules: DPPASGDRules, charges: Charges, run: RunFacts) -> PaperEpsilon | None:
    """Return the paper's epsilon for the noise and the steps of the run, of the client whom it costs most."""
    values = []
    for name, ledger in rules.ledgers(charges).items():
        terms = rules.books.terms[name]
        if not terms.release.noise_scale:
            return None
        if ledger.num_charges:
            # As a batch of one record: noise and sensitivity of the sum have the ratio of those of the mean.
            spent = paper_epsilon(
                noise_std=terms.release.noise_scale,
                delta=rules.about.delta,
                num_steps=ledger.num_charges * terms.num_releases,
                clip_norm=rules.clip_norm,
                batch_size=1,
            )
            values.append(spent)
    if not values:
        return None
    held = "zero-concentrated differential privacy, for the noise of the run, without amplification"
    reason = "noise came from a fixed seed" if run.seeded_noise else held
    return PaperEpsilon(epsilon=max(values), formula=_FORMULA, valid=not run.seeded_noise, reason=reason)


class DPPASGD(DPStrategy):
    """DP-PASGD, for clients whose recipe is `flower_dp.clients.DPPASGDRecipe` with the same numbers; DP-SGD with one local step.

    In each round every device takes tau steps w <- w - eta (g + b). Here g is the mean of the clipped gradients of a mini-batch,
    and b ~ N(0, sigma_m^2 I) is drawn independently in *every step*. The server takes the plain mean of the models of the
    devices that reply. All K steps together are (epsilon, delta)-differentially private for each record of a device, replaced by
    another, against everyone who sees its messages: local differential privacy.

    The final model is the best by `evaluate_fn`, the initial one included; without an `evaluate_fn`, or if it returns nothing,
    the last. If `evaluate_fn` uses public data only, the choice costs nothing.

    A run ends before the round that would exceed the privacy budget (`num_steps`) or the resource limit (`max_resource_cost`).
    The statement says which. `rules.costs(charges)` is the cost of every device.

    Args:
        num_clients: number of devices (paper: M).
        batch_size: records in a mini-batch (paper: X_m): one number, a sequence in the order of the clients' names, or by name.
        clip_norm: L2 bound on one record's gradient (paper: G).
        epsilon: epsilon budget of each device: one number, a sequence or a mapping; math.inf: no noise, not private.
        delta: the delta at which epsilon is stated, in (0, 1).
        num_steps: number of local steps for which the noise is made (paper: K), a multiple of `num_local_steps`.
        num_local_steps: steps of a device in a round (paper: tau).
        learning_rate: the devices' step size in round 1 (paper: eta); the server uses it to bound the norm of an honest update.
        learning_rate_decay: fraction by which the step size shrinks every round.
        weight_decay: L2 coefficient of the devices' loss.
        batch_sampling: `fixed-size`, without amplification as in the paper, or `poisson`, with it.
        calibration: `exact`, the least noise with a proof that it suffices, or `zcdp`, the paper's eq. 9 (not its eq. 23, which
            has a wrong sign).
        num_records: public data sizes, needed for `poisson` and for an `evaluation`: one number, a sequence or a mapping.
        cost_per_aggregation: cost of one round to a device (paper: c1).
        cost_per_step: cost of one local step to a device (paper: c2).
        max_resource_cost: maximum cost to a device in a run (paper: C_th); None: no limit.
        best_model_metric: metric of `evaluate_fn` that selects the final model: the smallest value if its name ends in `loss`,
            the largest if it ends in `accuracy`.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

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
        ...     max_resource_cost=1000,
        ... )
        >>> strategy.rules.resources.cost(9)
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
        max_resource_cost: float | None = None,
        best_model_metric: str = "loss",
        **options: Unpack[StrategyOptions],
    ) -> None:
        steps = StepSchedule(
            num_local_steps=num_local_steps,
            learning_rate=learning_rate,
            learning_rate_decay=learning_rate_decay,
            weight_decay=weight_decay,
        )
        resources = Resources(
            num_local_steps=num_local_steps,
            cost_per_aggregation=cost_per_aggregation,
            cost_per_step=cost_per_step,
            max_resource_cost=max_resource_cost,
        )
        rules = DPPASGDRules(
            Population(num_clients=num_clients, num_records=num_records, epsilon=epsilon, batch_size=batch_size),
            steps,
            resources,
            clip_norm=clip_norm,
            delta=delta,
            num_steps=num_steps,
            batch_sampling=batch_sampling,
            calibration=calibration,
            best_model_metric=best_model_metric,
            evaluation=options.get("evaluation"),
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
            ValueError: as `DPStrategy.start`, or if `evaluate_fn` does not return the metric `best_model_metric`.
            TimeoutError: as `DPStrategy.start`.
            RuntimeError: as `DPStrategy.start`.
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
        if (best := (self._session.record.own or BestModel()).arrays) is not None:
            result.arrays = ArrayRecord({name: Array(array) for name, array in best.items()})
        return result

    def _compared(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        """Return an `evaluate_fn` that keeps the best model that it has evaluated, the initial one included."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays)
            if metrics is not None:
                best = self._session.record.own or BestModel()
                self._session.update_state(
                    own=best.after(server_round, arrays, metrics, best_model_metric=self.rules.best_model_metric)
                )
            return metrics

        return evaluate
