"""Client-level differential privacy: clipped client updates, and Gaussian noise on their sum."""

import math
from dataclasses import dataclass

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent

from flower_dp.core import checks, compression
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, Sampler, check_sampler
from flower_dp.core.stored import stored
from flower_dp.privacy import accounting
from flower_dp.privacy.events import Relation
from flower_dp.privacy.ledger import Ledger
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.calibration import Budget, run_event
from flower_dp.strategies.evaluation import SumEvaluation
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.adaptive_clip import AdaptiveClip, MovingClip
from flower_dp.strategies.releases.masks import Masks
from flower_dp.strategies.releases.noised_sum import NoisedSum, SumState, check_relation
from flower_dp.strategies.releases.planned_cost import PlannedCost
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.strategies.releases.shared_noise import SharedNoise
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.client_level import statement_of

_SEEN_BY = {
    "central": "everyone who sees global models, the clients among them; the server is trusted",
    "distributed": (
        "everyone who sees sums or global models, any single client among them; who adds up the messages is trusted not to look "
        "at single ones"
    ),
}
# Of the drawn clients, how many must answer where nobody tops up the noise of the others.
_MIN_REPLY_RATIO = 0.75
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
        clip_norm: L2 bound of one client's update, or an `AdaptiveClip` that moves it by the updates' norms.
        noise_multiplier: std of the noise on the sum / clip_norm (adaptive: / norm of update and indicator together); 0 runs
            without privacy, and the statement says so. A `Budget`: the least that its epsilon allows, which is the target too.
        sampling: who takes part in a round: a sampler of `flower_dp.core.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated, in (0, 1).
        target_epsilon: the run ends before the round that would pass it; None for no target.
        relation: neighbouring relation; by default replace-one for fixed-size sampling, else add-or-remove-one.
        placement: `central`: the server adds the noise; `distributed`: every client adds its share to its own update.
        keep_ratio: part of the coordinates kept, those of largest magnitude, after the noise.
        quantization_levels: levels above 0 to which every client rounds its own noised update, without bias (QSGD); None for
            no quantisation. With distributed placement only.
        trusted_server: under distributed noise, whether the server adds the shares that missing clients did not; if not, shares
            are computed for the fewest clients that may answer, and the ledger charges as if there were no sampling.
        min_reply_ratio: with `trusted_server=False`, part of the drawn clients that must answer, 0.75 by default; shares are so
            large that these alone have the noise of the release. With fewer replies the round is charged and not released.
        paper_formula: what the paper's epsilon is called.
        masks: makes the mask that all clients of a round share; None for no mask.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.
    """

    def __init__(
        self,
        *,
        name: str,
        title: str,
        clip_norm: float | AdaptiveClip,
        noise_multiplier: float | Budget,
        sampling: Sampler,
        num_clients: int,
        delta: float,
        target_epsilon: float | None = None,
        relation: Relation | None = None,
        placement: str = "central",
        keep_ratio: float = 1.0,
        quantization_levels: int | None = None,
        trusted_server: bool = True,
        min_reply_ratio: float | None = None,
        paper_formula: str = _PAPER_FORMULA,
        masks: Masks | None = None,
    ) -> None:
        self.name, self.title, self.paper_formula = name, title, paper_formula
        check_sampler(sampling)
        checks.number("delta", delta, above=0, below=1)
        self.placement = checks.one_of("placement", placement, tuple(_SEEN_BY))
        self.keep_ratio = checks.number("keep_ratio", keep_ratio, above=0, at_most=1)
        self.quantization_levels = None if quantization_levels is None else compression.check_levels(quantization_levels)
        if self.quantization_levels is not None and self.placement == "central":
            raise ValueError(
                f"quantization_levels={quantization_levels}: is read with placement='distributed' only; under 'central' clients "
                "send updates without noise, and what is made of them is not private"
            )
        self.target_epsilon = None if target_epsilon is None else checks.number("target_epsilon", target_epsilon, above=0)
        self.trusted_server = checks.flag("trusted_server", trusted_server)
        if min_reply_ratio is not None and (self.trusted_server or self.placement == "central"):
            raise ValueError(
                f"min_reply_ratio={min_reply_ratio}: is read with placement='distributed' and trusted_server=False only; else "
                "the server adds the noise of clients that do not answer"
            )
        self.min_reply_ratio = checks.number(
            "min_reply_ratio", _MIN_REPLY_RATIO if min_reply_ratio is None else min_reply_ratio, above=0, at_most=1
        )
        default_relation: Relation = "replace-one" if isinstance(sampling, FixedSizeSampling) else "add-or-remove-one"
        checks.integer("num_clients", num_clients, at_least=1)
        self._relation = accounting.relation_of(relation) if relation else default_relation
        check_relation(self._relation, sampling, num_clients)
        self.delta = float(delta)

        def shared(multiplier: float, norm: float = 1.0) -> SharedNoise:
            release = Release(
                what="the noised sum of clipped client updates, and every model made from it",
                seen_by=_SEEN_BY[self.placement],
                unit="client",
                relation=self._relation,
                clip_norm=norm,
                mechanism=Gaussian(noise_multiplier=multiplier),
                sampler=sampling,
                num_clients=num_clients,
            )
            return SharedNoise(
                release=release,
                placement=self.placement,
                trusted_server=self.trusted_server,
                min_reply_ratio=self.min_reply_ratio,
                lossy_messages=self.lossy_messages,
            )

        self.budget = noise_multiplier if isinstance(noise_multiplier, Budget) else None
        if isinstance(noise_multiplier, Budget):
            self.target_epsilon = noise_multiplier.epsilon
            noise_multiplier = noise_multiplier.noise_multiplier(shared, delta=self.delta)
        moving = None
        if isinstance(clip_norm, AdaptiveClip):
            if self.lossy_messages:
                raise ValueError(
                    f"clip_norm={clip_norm}: does not go with keep_ratio={keep_ratio:g} and "
                    f"quantization_levels={quantization_levels} under placement='distributed': clients would drop or coarsen the "
                    "coordinate by which the clip norm moves; use placement='central', or a fixed clip norm"
                )
            mechanism, cohort = Gaussian(noise_multiplier=noise_multiplier), sampling.expected_cohort(num_clients)
            moving = MovingClip(of=clip_norm, noise_multiplier=mechanism.noise_multiplier, expected_cohort=cohort)
            clip_norm = moving.indicator(clip_norm.smallest).joint_norm
        self.noise = shared(noise_multiplier, clip_norm)
        self.release = self.noise.release
        self.training = NoisedSum(
            name=name,
            shared=self.noise,
            keep_ratio=self.keep_ratio,
            quantization_levels=self.quantization_levels or 0,
            masks=masks,
            clip=moving,
        )
        self.evaluation: SumEvaluation | None = None
        self._planned_rounds: int | None = None
        self._planned = self._plan_of()
        if self.target_epsilon is not None and noise_multiplier == 0:
            raise ValueError(f"noise_multiplier=0: target_epsilon={target_epsilon} needs noise; set noise_multiplier > 0")

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return self.release.num_clients

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
    def lossy_messages(self) -> bool:
        """Whether clients send the largest coordinates or the levels of their own noised updates."""
        return self.placement == "distributed" and (self.keep_ratio < 1 or self.quantization_levels is not None)

    @property
    def stock_refusal(self) -> str | None:
        """Why stock clients can't take part, None if they can."""
        if self.training.masks is not None:
            return "stock clients know no mask; use DPClient or privacy_mod of flower_dp.clients"
        if self.placement == "central":
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
            ValueError: if the plan is for methods with a ledger of every client.
        """
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
        """Nothing: one ledger serves all clients."""

    def _plan_of(self) -> PlannedCost:
        return PlannedCost(self._events, target_epsilon=self.target_epsilon, delta=self.delta, relation=self._relation)

    def _events(self, num_rounds: int) -> DpEvent:
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
            event = ComposedDpEvent((event, *(evaluated.shared.charged.event(one) for one in owed)))
        if self._planned.allows(number, ledger=lambda: self.ledger, event=event):
            return None
        return f"it would pass target_epsilon={self.target_epsilon:g}"

    def learn(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the model moved by the noised sum over the expected cohort.

        Raises:
            RoundLeftOut: with too few replies for the noise that was charged, or a sum that is not exact.
        """
        replied = len(collected.clients)
        mean = self.training.noised(now.ask, collected.total, num_replies=replied, cohort_size=now.cohort_size, rng=rng)
        self.training.keep(mean)
        return np.asarray(now.vector + mean)

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
    def ledger(self) -> Ledger:
        """What was charged against any single client."""
        return self._ledger("every client", outside=False)

    @property
    def outside_ledger(self) -> Ledger:
        """What was charged against those who are no clients."""
        return self._ledger("every client, against outsiders", outside=True)

    def _ledger(self, owner: str, *, outside: bool) -> Ledger:
        ledger = Ledger(owner=owner, relation=self._relation)
        self.training.charge_to(ledger, outside=outside)
        if self.evaluation is not None:
            self.evaluation.release.charge_to(ledger, outside=outside)
        return ledger

    def epsilon_of(self, release: NoisedSum) -> float:
        """Return what one of the releases has cost alone."""
        ledger = Ledger(owner=f"every client, {release.name}", relation=self._relation)
        release.charge_to(ledger)
        return ledger.cost(self.delta).epsilon

    @property
    def least_noise_multiplier(self) -> float:
        """The least noise multiplier that a round was charged with; infinite before the first one."""
        kinds = set(self.training.state.shares)
        return min((self.noise.without_one_of(shares).mechanism.noise_multiplier for shares in kinds), default=math.inf)

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute."""
        planned = None if self.noise.shares_vary else self._planned.epsilon(self.num_rounds)
        if planned is not None:
            return planned
        return accounting.epsilon(self.ledger.event, delta=self.delta, relation=self._relation, grid=1e-3).epsilon

    def statement(self, facts: RunFacts) -> PrivacyStatement:
        """Return the privacy statement of what the ledgers hold."""
        return statement_of(self, facts)
