"""The budget of a client's private evaluations under local DP: a pure epsilon beside that of training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flower_dp.core import checks
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.client_terms import ClientTerms, own_release, value_of, values_in
from flower_dp.privacy.mechanisms import Laplace

# Noise is larger by this part than its budget needs, so that a sum of float64 shares never exceeds the budget.
_ROUNDING = 2.0**-40


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationBudget:
    """A client's budget of private evaluations, for methods with local DP.

    In an evaluation a client sends its metrics of the global model with Laplace noise. All `num_evaluations` together are
    (epsilon, 0)-differentially private, for the unit and under the relation of the method. With a training budget of
    (epsilon_t, delta) the client has spent at most (epsilon_t + epsilon, delta): pure epsilons add up.

    Give the same budget to the client, which adds the noise and counts evaluations, and to the server's `LocalEvaluation`, which
    states the budget. A client with another budget of its own does not reply.

    Attributes:
        epsilon: pure epsilon of all evaluations together, > 0 and finite; one number, or one by client name.
        num_evaluations: largest number of evaluations that a client will ever take part in.

    Raises:
        ValueError: for a value out of range, naming field and value.

    Example:
        >>> from flower_dp.privacy.evaluation_budget import EvaluationBudget
        >>> EvaluationBudget(epsilon=0.5, num_evaluations=4).num_evaluations
        4
    """

    epsilon: float | Mapping[str, float]
    num_evaluations: int

    def __post_init__(self) -> None:
        for epsilon in values_in(self.epsilon):
            checks.number("evaluation epsilon", epsilon, above=0)
        checks.integer("num_evaluations", self.num_evaluations, at_least=1)

    def terms(self, name: str, training: ClientTerms) -> ClientTerms:
        """Return a client's terms of evaluation, under the unit, relation and public data size of its terms of training.

        The release is a sum of contributions of L1 norm at most 1. If the unit is a record, each of the client's records
        contributes: replacing one moves the sum by at most 2, adding or removing one by at most 1. If the unit is the client,
        there is one contribution.

        Raises:
            ValueError: if the client has no budget.
        """
        epsilon = value_of("evaluation epsilon", self.epsilon, name)
        release = training.release
        sensitivity = 2.0 if release.relation == "replace-one" else 1.0
        # With Laplace noise of scale b, one evaluation costs sensitivity / b.
        scale = sensitivity * self.num_evaluations / epsilon * (1 + _ROUNDING)
        description, units = "the client's metrics of the global model with noise, in every evaluation", training.num_records
        protects: dict[str, Any] = {"num_units": units or release.num_units, "unit": release.unit, "relation": release.relation}
        evaluation = own_release(description, Laplace(noise_multiplier=scale), FullSampling(), clip_norm=1.0, **protects)
        return ClientTerms(release=evaluation, num_replies=self.num_evaluations)
