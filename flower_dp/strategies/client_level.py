"""Client-level differential privacy: clipped client updates, and Gaussian noise on their sum."""

import math

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, NoOpDpEvent

from flower_dp import wire
from flower_dp.core import checks, compression
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, Sampler, check_sampler
from flower_dp.privacy import accounting
from flower_dp.privacy.events import Relation
from flower_dp.privacy.ledger import Ledger
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.masks import Masks
from flower_dp.strategies.releases.noised_sum import NoisedSum
from flower_dp.strategies.releases.planned_cost import PlannedCost
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.shared_noise import SharedNoise
from flower_dp.strategies.rules import Round, RunFacts
from flower_dp.strategies.statements.client_level import ClientLevelFacts, EvaluationFacts, state
from flower_dp.wire import Ask

_SEEN_BY = {
    "central": "everyone who sees global models, the clients among them; the server is trusted",
    "distributed": (
        "everyone who sees sums or global models, any single client among them; who adds up the messages is trusted not to look "
        "at single ones"
    ),
}
# Of the drawn clients, how many must answer where nobody tops up the noise of the others.
_MIN_REPLY_RATIO = 0.75
# Whose cohorts and charges are the same whatever rounds came before, and hold for more clients than were accounted for. Any other
# sampler, of a user's own too, is taken for one whose charges follow from whose turn it is.
_WITHOUT_ORDER = (FullSampling, PoissonSampling, FixedSizeSampling)
_PAPER_FORMULA = "RDP of the Poisson-subsampled Gaussian (moments accountant)"


class ClientLevelRules:
    """One release a round: the sum of client updates, each clipped to L2 norm `clip_norm`, with noise on the sum.

    The noise has std noise_multiplier x clip_norm; the global model moves by the noised sum over the *expected* cohort. There are
    no weights by example counts. Missing and refused replies count as zeros, and a round with an empty cohort is charged too.
    Sampling lowers the cost only if no message reveals who takes part: not if shares of noise may be missing from the sum, and
    not if clients choose the coordinates that they send.

    Args:
        name: the method's name on the wire.
        title: the method's name for people.
        clip_norm: L2 bound of one client's update.
        noise_multiplier: std of the noise on the sum / clip_norm; 0 runs without privacy, and the statement says so.
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
        metrics: of a private evaluation; None in training.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.
    """

    def __init__(
        self,
        *,
        name: str,
        title: str,
        clip_norm: float,
        noise_multiplier: float,
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
        metrics: MetricBounds | None = None,
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
        self._relation = accounting.relation_of(relation) if relation else default_relation
        part = isinstance(sampling, FixedSizeSampling) and sampling.cohort_size != num_clients
        if part and self._relation == "add-or-remove-one":
            raise ValueError("relation='add-or-remove-one': sampling of a fixed size is accounted under 'replace-one' only")
        self.delta = float(delta)
        self.release = Release(
            what="the noised sum of clipped client updates, and every model made from it",
            seen_by=_SEEN_BY[self.placement],
            unit="client",
            relation=self._relation,
            clip_norm=clip_norm,
            mechanism=Gaussian(noise_multiplier=noise_multiplier),
            sampler=sampling,
            num_clients=checks.integer("num_clients", num_clients, at_least=1),
        )
        self.noise = SharedNoise(
            release=self.release,
            placement=self.placement,
            trusted_server=self.trusted_server,
            min_reply_ratio=self.min_reply_ratio,
            lossy_messages=self.placement == "distributed" and (self.keep_ratio < 1 or self.quantization_levels is not None),
        )
        self.sum = NoisedSum(
            shared=self.noise,
            keep_ratio=self.keep_ratio,
            quantization_levels=self.quantization_levels or 0,
            masks=masks,
            metrics=metrics,
        )
        self._evaluation: tuple[ClientLevelRules, int] | None = None
        self.begin()
        if self.target_epsilon is not None and noise_multiplier == 0:
            raise ValueError(f"noise_multiplier=0: target_epsilon={target_epsilon} needs noise; set noise_multiplier > 0")

    @property
    def sampling(self) -> Sampler:
        """Who takes part in a round."""
        return self.release.sampler

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return self.release.num_clients

    @property
    def clip_norm(self) -> float:
        """L2 bound of one client's update."""
        return self.release.clip_norm

    @property
    def stock_refusal(self) -> str | None:
        """Why stock clients can't take part, None if they can."""
        if self.sum.masks is not None:
            return "stock clients know no mask; use DPClient or privacy_mod of flower_dp.clients"
        if self.placement == "central":
            return None
        return (
            "placement='distributed': stock clients add no noise; use DPClient or privacy_mod of flower_dp.clients, or "
            "placement='central'"
        )

    def begin(self) -> None:
        """Forget the last run."""
        # Against any single client; against those who are no clients.
        self.ledger = Ledger(owner="every client", relation=self._relation)
        self.outside_ledger = Ledger(owner="every client, against outsiders", relation=self._relation)
        # What this release alone has charged to the first one, which evaluations share.
        self.own_ledger = Ledger(owner=f"every client, {self.title}", relation=self._relation)
        self.num_rounds = 0
        # The last noised mean [d], of which masks are made.
        self.released: np.ndarray | None = None
        self.least_noise_multiplier = math.inf
        self._planned = PlannedCost(self._events, target_epsilon=self.target_epsilon, delta=self.delta, relation=self._relation)
        if self._evaluation is not None:
            self._evaluation[0].begin()
            self._evaluation[0].ledger, self._evaluation[0].outside_ledger = self.ledger, self.outside_ledger

    def evaluating(self, noise_multiplier: float, sampling: Sampler, every: int, metrics: MetricBounds) -> "ClientLevelRules":
        """Return the rules of private evaluations: a release of its own, with the placement of this one and its ledgers.

        From now on this run's plan and its target count an evaluation after every `every`-th round.

        Args:
            noise_multiplier: std of the noise on the sum of clients' vectors, whose norm is at most 1.
            sampling: who evaluates.
            every: rounds from one evaluation to the next.
            metrics: what is evaluated.
        """
        rules = ClientLevelRules(
            name=wire.EVALUATION,
            title=f"{self.title}, private evaluation",
            clip_norm=1.0,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            num_clients=self.num_clients,
            delta=self.delta,
            relation=self._relation,
            placement=self.placement,
            trusted_server=self.trusted_server,
            min_reply_ratio=None if self.trusted_server else self.min_reply_ratio,
            metrics=metrics,
        )
        self._evaluation = (rules, every)
        self.begin()
        return rules

    @property
    def evaluation(self) -> "ClientLevelRules | None":
        """The rules of this run's private evaluations; None without them."""
        return None if self._evaluation is None else self._evaluation[0]

    def _events(self, num_rounds: int) -> DpEvent:
        """Return what `num_rounds` rounds cost at most, their evaluations with them: one after every `every`-th."""
        events = self.noise.charged.events(num_rounds)
        if self._evaluation is None:
            return events
        rules, every = self._evaluation
        return ComposedDpEvent([events, rules.noise.charged.events(num_rounds // every)])

    def noise_and_signal(self, dimension: int) -> tuple[float, float]:
        """Return the expected norm, about, of the noise on the mean, and the largest norm of the mean without noise.

        Args:
            dimension: of the model's vector.
        """
        return self.release.noise_scale / self.release.expected_cohort * math.sqrt(self.sum.num_kept(dimension)), self.clip_norm

    # Noise

    @property
    def secret_cohort(self) -> bool:
        """Whether the epsilon counts on nobody knowing how many clients take part in a round."""
        return self.noise.secret_cohort

    @property
    def open_population(self) -> bool:
        """Whether clients that come later may take part.

        Every known client is drawn with the sampling rate that is accounted, or a smaller one, whatever their number; only in
        round robin would another number change whose turn it is. That holds for every release of the run: training, evaluation.
        """
        evaluates_in_turn = self._evaluation is not None and not self._evaluation[0].open_population
        return type(self.release.sampler) in _WITHOUT_ORDER and not evaluates_in_turn

    def combine(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the model moved by the noised sum over the expected cohort.

        Raises:
            RoundLeftOut: with too few replies for the noise that was charged, or a sum that is not exact.
        """
        num_replies = len(collected.clients)
        mean = self.sum.noised(now.ask, collected.total, num_replies=num_replies, cohort_size=now.cohort_size, rng=rng)
        if self.sum.masks is not None:
            self.released = mean
        return np.asarray(now.vector + mean)

    # Clients

    def open(self, names: tuple[str, ...]) -> None:
        """Nothing: one ledger serves all clients."""

    def with_budget(self, chosen: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """Return all that were drawn."""
        return chosen

    def ask(self, length: int, names: tuple[str, ...]) -> Ask:
        """Return what is asked of the clients of a round."""
        return self.sum.ask(length, len(names), self.released)

    def limits(self, now: Round) -> Limits:
        """Return clip norm, lattice and the longest honest sum."""
        return self.sum.limits(now.ask, now.layout.size)

    def bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return the mean of what the clients say that each would send alone, where epsilon rests on every single message.

        Else the bytes of a dense update: what is really sent may depend on data that a noised sum hides, or tell the size of a
        secret cohort.
        """
        if self.noise.lossy_messages and collected.clients:
            return collected.payload_bytes / len(collected.clients)
        return 4.0 * self.sum.num_kept(now.layout.size)

    # Cost

    def plan(self, num_rounds: int) -> None:
        """Compute how many rounds the target allows, and the cost of each."""
        self._planned.plan(num_rounds)

    def why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return why the round is not run: it would pass the target, or is out of order; None if it is run."""
        number = self.num_rounds + 1
        if type(self.sampling) not in _WITHOUT_ORDER and server_round != number:
            # Its cohort follows from the round's number, its charge from how many there were.
            return f"with round-robin sampling it must be round {number}"
        if self.target_epsilon is None or (cohort_size is None) == self.noise.shares_vary:
            return None
        charged = self.noise.charged if cohort_size is None else self.noise.charged_for(cohort_size)
        event = charged.event(number)
        if self._evaluation is not None:
            rules, every = self._evaluation
            # All that may still be asked for after this round: those of earlier rounds too, if nobody asked for them yet.
            owed = range(rules.num_rounds + 1, number // every + 1)
            event = ComposedDpEvent((event, *(rules.noise.charged.event(one) for one in owed)))
        if self._planned.allows(number, ledger=self.ledger, event=event):
            return None
        return f"it would pass target_epsilon={self.target_epsilon:g}"

    def charge(self, server_round: int, names: tuple[str, ...]) -> None:
        """Charge the round to the ledgers, as this cohort's shares are computed.

        What it costs follows from how often this release was charged, not from `server_round`, which a caller may repeat or skip.
        """
        charged = self.noise.charged_for(len(names))
        self.least_noise_multiplier = min(self.least_noise_multiplier, charged.mechanism.noise_multiplier)
        self.num_rounds += 1
        self.ledger.charge(charged.event(self.num_rounds))
        self.own_ledger.charge(charged.event(self.num_rounds))
        self.outside_ledger.charge(self.noise.outside.event(self.num_rounds))

    @property
    def charges(self) -> object:
        """The ledger's lines."""
        return (self.num_rounds, self.ledger.num_charges, *self.ledger.lines())

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute."""
        planned = None if self.noise.shares_vary else self._planned.epsilon(self.num_rounds)
        if planned is not None:
            return planned
        return accounting.epsilon(self.ledger.event, delta=self.delta, relation=self._relation, grid=1e-3).epsilon

    def explain(self, facts: RunFacts) -> PrivacyStatement:
        """Return the privacy statement of what the ledgers hold."""
        return state(
            ClientLevelFacts(
                title=self.title,
                release=self.release,
                outside=self.noise.outside,
                costs=(self.ledger.cost(self.delta), self.outside_ledger.cost(self.delta)),
                delta=self.delta,
                num_rounds=self.num_rounds,
                evaluation=None if self._evaluation is None else self._evaluated(),
                events=tuple(self.ledger.lines()),
                paper_formula=self.paper_formula,
                placement=self.placement,
                trusted_server=self.trusted_server,
                lossy_messages=self.noise.lossy_messages,
                keep_ratio=self.keep_ratio,
                quantization_levels=self.quantization_levels,
                cohort_shows=self.noise.cohort_shows,
                secret_cohort=self.noise.secret_cohort,
                smallest_share=self.noise.smallest_share,
                least_noise_multiplier=min(self.least_noise_multiplier, self.noise.outside.mechanism.noise_multiplier),
                run=facts,
            )
        )

    def _evaluated(self) -> EvaluationFacts:
        """Return what the statement says about private evaluations."""
        if self._evaluation is None:
            raise RuntimeError("there is no evaluation")
        rules = self._evaluation[0]
        return EvaluationFacts(
            num_evaluations=rules.num_rounds,
            noise_multiplier=rules.release.mechanism.noise_multiplier,
            sampling=str(rules.sampling),
            smallest_share=rules.noise.smallest_share,
            hidden_cohort=_hidden(rules.noise.outside),
            secret_cohort=rules.noise.secret_cohort,
            parts={name: part.own_ledger.cost(self.delta).epsilon for name, part in (("training", self), ("evaluation", rules))},
        )


def _hidden(release: Release) -> bool:
    """Return whether the cost of a release counts on nobody knowing who takes part."""
    return release.event(1) not in (release.mechanism.event(), NoOpDpEvent())
