"""Calibration: the noise multiplier of a whole run from its epsilon, by the events that its ledger will be charged with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from operator import attrgetter

from flower_dp.core import checks, dp_events
from flower_dp.core.formatting import format_rounded_up
from flower_dp.core.sampling import PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.release import Release
from flower_dp.strategies.evaluation import LocalEvaluation, NoisedSumEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.noised_sum import NoisedSum
from flower_dp.strategies.releases.shared_noise import NoiseSharing

# Probability that a run has a smaller cohort than its noise is made for, if the cohort changes the cost of a round.
_SMALLER_COHORT = 1e-3
# Server and clients calibrate separately. Rounding up to six digits gives them the same number on any machine.
_DIGITS = Context(prec=6, rounding=ROUND_CEILING)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsilonTarget:
    """A run's epsilon target and number of rounds. Calibration finds the least noise that meets it.

    Epsilon is that of the statement's headline: against participants, who know their own shares of the noise.

    Attributes:
        epsilon: epsilon of all rounds and all private evaluations together.
        num_rounds: number of rounds of the run.
        evaluation: private evaluations of the run; None without them.

    Raises:
        ValueError: if a value is invalid; the message names field and value.
    """

    epsilon: float
    num_rounds: int
    evaluation: PrivateEvaluation | None = None

    def __post_init__(self) -> None:
        checks.number("epsilon", self.epsilon, above=0)
        checks.integer("num_rounds", self.num_rounds, at_least=1)

    def check_rounds(self, num_rounds: int) -> None:
        """Refuse any other number of rounds: more would exceed epsilon; fewer would need less noise.

        Raises:
            ValueError: naming both numbers.
        """
        if num_rounds != self.num_rounds:
            raise checks.refusal(
                "num_rounds",
                num_rounds,
                f"the strategy was constructed with num_rounds={self.num_rounds}, for which "
                f"epsilon={self.epsilon:g} gave the noise; pass the same number to both",
            )

    def noise_multiplier(self, shared_of: Callable[[float], NoiseSharing], *, delta: float) -> float:
        """Return the least noise multiplier, rounded up to six digits, with which the run costs at most epsilon.

        Args:
            shared_of: function that makes the noise of the method's release from a noise multiplier.
            delta: the delta at which epsilon is stated.

        Raises:
            ValueError: if no noise on the method's own release keeps the run within epsilon.
        """
        unit_noise = shared_of(1.0)
        relation, evaluation = unit_noise.release.relation, None
        if self.evaluation is not None:
            evaluation = NoisedSumEvaluation.of(self.evaluation, NoisedSum(name="", noise=unit_noise), unit_noise, "")

        def run(noise_multiplier: float) -> dp_events.DpEvent:
            return run_event(shared_of(_rounded_up(noise_multiplier)), evaluation, self.num_rounds, charged=self._likely)

        if evaluation is not None:
            count = self.num_rounds // evaluation.plan.every
            evaluations = _events(evaluation.noise, count, self._likely)
            alone = accounting.epsilon(evaluations, delta=delta, relation=relation).epsilon
            if not alone < self.epsilon:
                raise checks.refusal(
                    "epsilon",
                    self.epsilon,
                    f"the {count} private evaluations alone cost {format_rounded_up(alone, 4)}; give "
                    f"them more noise than noise_multiplier={evaluation.plan.noise_multiplier:g}, or evaluate in fewer rounds "
                    f"than every={evaluation.plan.every}",
                )
        try:
            return _rounded_up(accounting.calibrate(run, epsilon=self.epsilon, delta=delta, relation=relation))
        except ValueError as error:
            raise checks.BadValue("epsilon", f"{error}, for num_rounds={self.num_rounds}") from error

    def _likely(self, shared: NoiseSharing) -> Release:
        """Return the most that a round is charged, unless its cohort is smaller than almost any of the run."""
        if not shared.num_shares_varies:
            return shared.release_to_participants
        # Two shares are the worst case: if the sum has one share, no other participant knows a part of the noise.
        return shared.without_own_share(max(2, shared.shares(smallest_cohort(shared, self.num_rounds))))


def smallest_cohort(shared: NoiseSharing, num_rounds: int) -> int:
    """Return a size that every cohort of a run reaches, with a probability of 99.9 %."""
    sampler, num_clients = shared.release.sampler, shared.release.num_units
    if not sampler.cohort_size_is_secret:
        return sampler.max_cohort_size(num_clients)
    if not isinstance(sampler, PoissonSampling):
        return 0
    from scipy.stats import binom  # noqa: PLC0415  (slow to import)

    return int(binom.ppf(_SMALLER_COHORT / num_rounds, num_clients, sampler.sampling_rate))


def noise_of(
    noise_multiplier: float | None,
    epsilon: float | None,
    num_rounds: int | None,
    *,
    target_epsilon: float | None,
    evaluation: PrivateEvaluation | LocalEvaluation | None,
) -> float | EpsilonTarget:
    """Return the given noise multiplier, or the epsilon target for which it is calibrated.

    Raises:
        ValueError: unless exactly one of `noise_multiplier` and `epsilon` is given, and `num_rounds` with `epsilon` alone.
    """
    if (noise_multiplier is None) == (epsilon is None):
        both = "neither is given" if epsilon is None else "both are given"
        raise checks.BadValue(
            "noise_multiplier",
            f"noise_multiplier={noise_multiplier}, epsilon={epsilon}: {both}; must be exactly one: epsilon calibrates the noise",
        )
    if noise_multiplier is not None:
        if num_rounds is not None:
            raise checks.refusal("num_rounds", num_rounds, "is read with epsilon only; with noise_multiplier, give it to start")
        return noise_multiplier
    if target_epsilon is not None:
        raise checks.refusal("target_epsilon", target_epsilon, f"epsilon={epsilon} is the run's target already; give one of them")
    if num_rounds is None or epsilon is None:
        raise checks.BadValue(
            "num_rounds", f"num_rounds: is missing; epsilon={epsilon} needs the number of rounds, the same as start"
        )
    plan = evaluation if isinstance(evaluation, PrivateEvaluation) else None
    return EpsilonTarget(epsilon=epsilon, num_rounds=num_rounds, evaluation=plan)


def run_event(
    training: NoiseSharing,
    evaluation: NoisedSumEvaluation | None,
    num_rounds: int,
    *,
    charged: Callable[[NoiseSharing], Release] = attrgetter("release_to_participants"),
) -> dp_events.DpEvent:
    """Return the event of rounds 1 to `num_rounds` with their evaluations, one after every `every`-th round.

    Args:
        training: the method's own noise.
        evaluation: the private evaluations; None without them.
        num_rounds: number of rounds.
        charged: function that returns the release that a round is charged for, which may depend on its cohort.
    """
    events = charged(training).events(num_rounds)
    if evaluation is None:
        return events
    return dp_events.ComposedDpEvent([events, _events(evaluation.noise, num_rounds // evaluation.plan.every, charged)])


def _events(shared: NoiseSharing, count: int, charged: Callable[[NoiseSharing], Release]) -> dp_events.DpEvent:
    # The last evaluation counts at its maximum: before a round, the target must cover its evaluation for any cohort.
    last = [shared.release_to_participants.event(count)] if count else []
    return dp_events.ComposedDpEvent([charged(shared).events(max(0, count - 1)), *last])


def _rounded_up(number: float) -> float:
    return float(_DIGITS.plus(Decimal(repr(number))))
