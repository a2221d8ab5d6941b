"""Client-level differential privacy: clipped client updates, and Gaussian noise on their sum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flower_dp.core import checks, dp
from flower_dp.core.noise import Generator
from flower_dp.core.stored import stored
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import Charge, History
from flower_dp.strategies.calibration import Budget, run_event
from flower_dp.strategies.evaluation import SumEvaluation
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.clipped_updates import ClippedUpdates
from flower_dp.strategies.releases.noised_sum import NoisedSum, SumState
from flower_dp.strategies.releases.planned_cost import PlannedCost
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.strategies.statements.client_level import statement_of

_PAPER_FORMULA = "RDP of the Poisson-subsampled Gaussian (moments accountant)"


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClientLevelState:
    """What a run of a client-level method has released.

    Attributes:
        planned_rounds: of the run; None if nobody has said.
        training: the noised sums of updates.
        evaluation: the noised sums of metrics; None without private evaluation.
    """

    planned_rounds: int | None = None
    training: SumState
    evaluation: SumState | None = None


class ClientLevelRules:
    """One release a round: the sum of client updates, each clipped to L2 norm `clip_norm`, with noise on the sum.

    The noise has std noise_multiplier x clip_norm; the global model moves by the noised sum over the *expected* cohort. There are
    no weights by example counts. Missing and refused replies count as zeros, and a round with an empty cohort is charged too.
    Sampling lowers the cost only if no message reveals who takes part: not if shares of noise may be missing from the sum, and
    not if clients choose the coordinates that they send.

    Args:
        name: the method's name on the wire.
        title: the method's name for people.
        updates: what is released.
        noise: its noise multiplier; or a `Budget`, whose epsilon gives the noise and is the target too.
        delta: the delta at which epsilon is stated, in (0, 1).
        target_epsilon: the run ends before the round that would pass it; None for no target.
        paper_formula: what the paper's epsilon is called.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.
    """

    def __init__(
        self,
        name: str,
        title: str,
        updates: ClippedUpdates,
        noise: float | Budget,
        *,
        delta: float,
        target_epsilon: float | None = None,
        paper_formula: str = _PAPER_FORMULA,
    ) -> None:
        self.name, self.title, self.paper_formula = name, title, paper_formula
        self.delta = checks.number("delta", delta, above=0, below=1)
        self.target_epsilon = None if target_epsilon is None else checks.number("target_epsilon", target_epsilon, above=0)
        self.budget = noise if isinstance(noise, Budget) else None
        if isinstance(noise, Budget):
            self.target_epsilon = noise.epsilon
            noise = noise.noise_multiplier(updates.shared, delta=self.delta)
        self.training = updates.release(name, noise)
        self.noise, self.release = self.training.shared, self.training.release
        self.num_clients, self._relation = self.release.num_clients, self.release.relation
        self.evaluation: SumEvaluation | None = None
        self._planned_rounds: int | None = None
        self._planned = self._plan_of()
        if self.target_epsilon is not None and self.release.mechanism.noise_multiplier == 0:
            raise ValueError(f"noise_multiplier=0: target_epsilon={target_epsilon} needs noise; set noise_multiplier > 0")

    @property
    def clip_norm(self) -> float:
        """L2 bound of one client's update in the next round."""
        return self.training.clip_norm

    @property
    def clip_norms(self) -> tuple[float, float]:
        """The smallest and the largest clip norm that a round can have."""
        clip = self.training.clip
        return (self.clip_norm, self.clip_norm) if clip is None else (clip.of.smallest, clip.of.largest)

    @property
    def stock_refusal(self) -> str | None:
        """Why stock clients can't take part, None if they can."""
        if self.training.masks is not None:
            return "stock clients know no mask; use DPClient or privacy_mod of flower_dp.clients"
        if self.noise.placement == "central":
            return None
        return (
            "placement='distributed': stock clients add no noise; use DPClient or privacy_mod of flower_dp.clients, or "
            "placement='central'"
        )

    # The run

    @property
    def state(self) -> ClientLevelState:
        """All that these rules need to go on."""
        return ClientLevelState(
            planned_rounds=self._planned_rounds,
            training=self.training.state,
            evaluation=None if self.evaluation is None else self.evaluation.release.state,
        )

    @state.setter
    def state(self, state: ClientLevelState) -> None:
        self._planned_rounds = state.planned_rounds
        self._planned = self._plan_of()
        if state.planned_rounds is not None:
            self._planned.plan(state.planned_rounds)
        self.training.go_on(state.training)
        if self.evaluation is not None:
            self.evaluation.release.go_on(state.evaluation)
        elif state.evaluation is not None and state.evaluation.shares:
            raise ValueError("state: private evaluations were charged, and this strategy has none; give the same evaluation=...")

    def evaluate(self, plan: PrivateEvaluation | LocalEvaluation) -> None:
        """Make private evaluation a second release of this method's rounds: its plan and its target count it from now on.

        Raises:
            ValueError: if the plan is for methods with a ledger of every client, or evaluations were charged before.
        """
        if self.evaluation is not None and self.evaluation.release.num_charged:
            raise ValueError("evaluation: evaluations were charged in this run, by another plan")
        if not isinstance(plan, PrivateEvaluation):
            raise ValueError(f"evaluation: is a {type(plan).__name__}; {self.title} takes a PrivateEvaluation")
        self.evaluation = SumEvaluation.of(plan, self.training)
        self._planned = self._plan_of()

    def plan(self, num_rounds: int) -> None:
        """Compute how many rounds the target allows, and the cost of each.

        Raises:
            ValueError: if the noise was calibrated for another number of rounds.
        """
        if self.budget is not None:
            self.budget.check_rounds(num_rounds)
        self._planned_rounds = num_rounds
        self._planned.plan(num_rounds)

    def open(self, names: tuple[str, ...]) -> None:
        """Take the order of the clients, where whose turn it is follows from it; one ledger serves all of them."""
        self.training.open(names)
        if self.evaluation is not None:
            self.evaluation.release.open(names)

    def _plan_of(self) -> PlannedCost:
        return PlannedCost(self._events, target_epsilon=self.target_epsilon, delta=self.delta, relation=self._relation)

    def _events(self, num_rounds: int) -> dp.DpEvent:
        """Return what `num_rounds` rounds cost at most, their evaluations with them: one after every `every`-th."""
        return run_event(self.noise, self.evaluation, num_rounds)

    def noise_and_signal(self, dimension: int) -> tuple[float, float]:
        """Return the expected norm, about, of the noise on the mean, and the largest norm of the mean without noise.

        Args:
            dimension: of the model's vector.
        """
        training = self.training
        release, kept = training.next_release, training.num_kept(training.row_length(dimension)) - training.row_length(0)
        return release.noise_scale / release.expected_cohort * math.sqrt(kept), self.clip_norm

    def why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return why the round is not run: it would pass the target, or is out of order; None if it is run."""
        number = self.num_rounds + 1
        if self.training.in_order and server_round != number:
            # Its cohort follows from the round's number, its charge from how many there were.
            return f"with round-robin sampling it must be round {number}"
        if self.target_epsilon is None or (cohort_size is None) == self.noise.shares_vary:
            return None
        shares = None if cohort_size is None else self.noise.shares(cohort_size)
        charged = self.noise.charged if shares is None else self.noise.without_one_of(shares)
        event = charged.event(number)
        if self.evaluation is not None:
            evaluated, every = self.evaluation.release, self.evaluation.plan.every
            # All that may still be asked for after this round: those of earlier rounds too, if nobody asked for them yet.
            owed = range(evaluated.num_charged + 1, number // every + 1)
            event = dp.ComposedDpEvent((event, *(evaluated.shared.charged.event(one) for one in owed)))
        if self._planned.allows(number, ledger=lambda: self.ledger, event=event, as_planned=self._as_planned):
            return None
        return f"it would pass target_epsilon={self.target_epsilon:g}"

    @property
    def _as_planned(self) -> bool:
        """Whether no more evaluations were charged than planned: a run that goes on may have had more of them before."""
        return self.evaluation is None or self.evaluation.release.num_charged <= self.num_rounds // self.evaluation.plan.every

    def learn(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the model moved by the noised sum over the expected cohort.

        Raises:
            RoundLeftOut: with too few replies for the noise that was charged, or a sum that is not exact.
        """
        replied = len(collected.clients)
        mean = self.training.noised(now.ask, collected.total, num_replies=replied, cohort_size=now.cohort_size, rng=rng)
        self.training.keep(mean)
        mean += now.vector
        return mean

    def unfinished(self, charge: Charge) -> None:
        """Count nothing: the charge has all that a round that was not finished may have released."""

    def numbers(self, now: Round) -> dict[str, float]:
        """Return further public numbers of a round: its clip norm, where that moves."""
        return {} if now.ask.indicator is None else {"clip-norm": now.ask.indicator.clip_norm}

    # Cost

    @property
    def evaluated(self) -> NoisedSum | None:
        """The release of private evaluations; None without them."""
        return None if self.evaluation is None else self.evaluation.release

    @property
    def num_rounds(self) -> int:
        """How many rounds were charged."""
        return self.training.num_charged

    @property
    def ledger(self) -> History:
        """What was charged against any single client."""
        return self._ledger(outside=False)

    @property
    def outside_ledger(self) -> History:
        """What was charged against those who are no clients."""
        return self._ledger(outside=True)

    def _ledger(self, *, outside: bool) -> History:
        counts = self.training.counts(outside=outside)
        if self.evaluation is not None:
            counts.update(self.evaluation.release.counts(outside=outside))
        return History(relation=self._relation, counts=counts)

    def epsilon_of(self, release: NoisedSum) -> float:
        """Return what one of the releases has cost alone."""
        return History(relation=self._relation, counts=release.counts()).cost(self.delta).epsilon

    @property
    def least_noise_multiplier(self) -> float:
        """The least noise multiplier that a round was charged with; infinite before the first one."""
        kinds = set(self.training.state.shares)
        return min((self.noise.without_one_of(shares).mechanism.noise_multiplier for shares in kinds), default=math.inf)

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute."""
        planned = self._planned.epsilon(self.num_rounds) if self._as_planned and not self.noise.shares_vary else None
        if planned is not None:
            return planned
        return accounting.epsilon(self.ledger.event, delta=self.delta, relation=self._relation, grid=1e-3).epsilon

    statement = statement_of
