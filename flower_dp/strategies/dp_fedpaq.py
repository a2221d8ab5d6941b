"""DP-FedPAQ: noised updates of local steps on clipped gradients, in a few bits a coordinate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Unpack

import numpy as np

from flower_dp.core import checks, compression
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, RoundRobinSampling, Sampler
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.client_terms import ClientTerms, values_in
from flower_dp.privacy.dp_fedpaq import (
    FedPAQSteps,
    expected_replies,
    paper_epsilon,
    paper_noise_ratio,
    update_terms,
    violated_conditions,
)
from flower_dp.privacy.statement import PaperEpsilon, PrivacyStatement
from flower_dp.strategies.control import ControlState, ControlVariate, Honest
from flower_dp.strategies.evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.local_level import (
    LocalRules,
    least_and_largest,
    local_statement,
    most_replies,
    relies_on_secret_sampling,
)
from flower_dp.strategies.releases.client_ledgers import ClientFacts, ClientLedgers, PerClient, Population
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.limits import HONEST_NORMS
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import ModelUpdate, StrategyOptions
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.strategies.strategy import DPStrategy

_SAMPLERS = (FullSampling, FixedSizeSampling, RoundRobinSampling)
# Standard deviations by which the norm of a Gaussian vector exceeds its mean with a probability of at most e^-50, which is 2e-22.
_NORM_DEVIATIONS = 10.0


class DPFedPAQRules(LocalRules):
    """The rules of DP-FedPAQ and of SCAFFOLD.

    Args:
        population: the clients.
        steps: parameters of the local steps, which both sides know.
        sampling: sampler of a round's cohort.
        delta: delta of every budget.
        quantization_levels: levels above 0 of a message; None: float32.
        calibration: `exact` or `paper`: see `update_terms`.
        name: the method's name on the wire.
        title: the method's name for people.
        control: control variate that is sent with the model; None for none.
        evaluation: settings of private evaluations; None for none.
    """

    def __init__(
        self,
        population: Population,
        steps: FedPAQSteps,
        sampling: Sampler,
        *,
        delta: float,
        quantization_levels: int | None,
        calibration: str = "exact",
        name: str = "dp-fedpaq",
        title: str = "DP-FedPAQ",
        control: ControlVariate | None = None,
        evaluation: PrivateEvaluation | LocalEvaluation | None = None,
    ) -> None:
        self.steps, self.control, self.calibration = steps, control, calibration
        if not isinstance(steps, FedPAQSteps):
            raise checks.bad("steps", steps, "a flower_dp.privacy.dp_fedpaq.FedPAQSteps")
        if not isinstance(sampling, _SAMPLERS):
            kinds = ", ".join(kind.__name__ for kind in _SAMPLERS)
            raise checks.bad("sampling", sampling, f"one of {kinds}; the server sees who takes part, so none amplifies")
        self.quantization_levels = None if quantization_levels is None else compression.check_levels(quantization_levels)
        terms = partial(update_terms, steps=steps, delta=checks.number("delta", delta, above=0, below=1), calibration=calibration)
        for size in values_in(population.num_records):  # refuses impossible values, without a calibration
            terms(epsilon=math.inf, num_replies=1, num_records=size)
        for budget in values_in(population.epsilon):
            terms(epsilon=budget, num_replies=1, num_records=steps.num_records)

        def terms_of(client: ClientFacts) -> ClientTerms:
            return terms(epsilon=client.epsilon, num_replies=client.num_replies, num_records=client.num_records)

        cohort_size, at_random = sampling.max_cohort_size(population.num_clients), isinstance(sampling, FixedSizeSampling)
        books = ClientLedgers(
            population,
            relation="replace-one",
            delta=delta,
            terms_of=terms_of,
            most_replies=lambda rounds: expected_replies(rounds, cohort_size, population.num_clients, at_random=at_random),
        )
        # A replaced record can change twice the clip norm.
        super().__init__(title, books, name=name, sampling=sampling, clip_norm=steps.sum_norm, evaluation=evaluation)

    def weight(self, name: str) -> float:
        """Return 1: a client's row is sent as it was quantized, so a weight would change its levels."""
        return 1.0

    def vectors(self, own: ControlState | None, size: int) -> dict[str, np.ndarray]:
        """Return SCAFFOLD's control variate, which is sent with the model; nothing for DP-FedPAQ."""
        return {} if self.control is None else {"control": self.control.vector(own or ControlState(), size)}

    def longest(self, now: RoundRequest) -> Callable[[str], float]:
        """Return a bound on the norm of a client's honest update, as it is sent."""
        size, factor = now.length, -self.steps.update_factor(now.server_round)
        ratio = 1.0 if self.quantization_levels is None else compression.qsgd_norm_ratio(size, self.quantization_levels)
        divisor, honest = self._divisor(now.server_round), self._honest(size)

        def longest(name: str) -> float:
            noise = self.books.terms[name].release.noise_scale * (math.sqrt(size) + _NORM_DEVIATIONS)
            norm = factor * (self.steps.longest_sum + noise)
            if self.control is None:
                return ratio * norm
            return ratio * divisor * self.control.longest(norm / divisor, now.ask.vectors["control"], honest=honest)

        return longest

    def _honest(self, size: int) -> Honest:
        """Return bounds on the norms of honest noised mean gradients [size], from public numbers: clip norm and noises."""
        stds = [terms.release.noise_scale for terms in self.books.terms.values()]
        deviations = math.sqrt(size) + _NORM_DEVIATIONS

        def gradient(std: float) -> float:
            return (self.steps.longest_sum + std * deviations) / self.steps.num_records

        # Clients that have not replied yet count as zero in the mean.
        return Honest(single=gradient(max(stds)), mean=gradient(math.hypot(*stds) / self.about.num_clients))

    def _divisor(self, server_round: int) -> float:
        """Return the ratio of an update to the mean gradient: E eta."""
        return self.steps.num_local_steps * self.steps.step_size(server_round)

    def next_model(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> ModelUpdate:
        """Return the model moved by the mean of the received messages.

        Raises:
            RoundDiscarded: if no client has replied.
        """
        if not collected.clients:
            raise RoundDiscarded("no client has answered")
        own = state.own
        if self.control is not None:
            divisor, honest, num_clients = self._divisor(now.server_round), self._honest(now.layout.size), self.about.num_clients
            own = self.control.next_model(
                own or ControlState(), collected, divisor=divisor, num_clients=num_clients, honest=honest
            )
        return ModelUpdate(vector=np.asarray(now.vector + collected.total / len(collected.clients)), own=own)

    def _assumptions(self, own: ControlState | None) -> tuple[str, ...]:
        """Return how far a lying client can move the model by the control variate; empty without one."""
        if self.control is None:
            return ()
        text = "A LYING CLIENT moves the control variate as well as the model. Honest clients keep the effect in later rounds"
        if own is None or not (size := own.vector.size):
            return (f"{text}.",)
        ratio = 1.0 if self.quantization_levels is None else compression.qsgd_norm_ratio(size, self.quantization_levels)
        honest, step = self._honest(size), self._divisor(1)
        longest, radius = self.control.longest_ever(size, honest)
        # The largest row that the server accepts, in the mean over a full cohort.
        part = HONEST_NORMS * ratio * step / self.cohort_size
        return (
            f"{text}. In a round with {self.cohort_size} replies its message moves the model by up to {part * longest:.3g} "
            f"(DP-FedPAQ: {part * honest.single:.3g}). The control variate, of norm up to {radius:.3g}, moves it by up to "
            f"{step * radius:.3g}.",
        )

    def noise_and_signal_norms(self, dimension: int) -> tuple[float, float]:
        """Return the norms of the noise on the mean of updates, and of the longest update; without quantization errors."""
        factor = -self.steps.update_factor(1)
        variances = [terms.release.noise_std**2 for terms in self.books.terms.values()]
        noise = math.sqrt(sum(variances) / len(variances) / self.cohort_size * dimension)
        return factor * noise, factor * self.steps.longest_sum

    def statement(self, state: RunState, facts: RunFacts) -> PrivacyStatement:
        """Return the statement: the worst client, and the distribution over clients."""
        books, steps, charges = self.books, self.steps, state.charges
        sizes = books.num_records.values()
        whole = bool(sizes) and all(size == steps.num_records for size in sizes)
        each = f"all records, {steps.num_records}" if whole else f"{steps.num_records} records at random, without replacement"
        # The std on an update before it is quantized, in the last round: steps shrink, and the noise with them.
        factor = -steps.update_factor(max(1, charges.number(self.training.name)))
        secret = ("Only the client knows which of its records it uses.",) if relies_on_secret_sampling(self, charges) else ()
        return local_statement(
            self,
            state,
            facts,
            message_std=factor * min((terms.release.noise_std for terms in books.terms.values()), default=0.0),
            noise=_noise_numbers(self),
            paper=_paper(self, charges, facts),
            sampling=f"{self.training.sampling}: {most_replies(books)}; {each} in each",
            assumptions=(steps.proof, *secret, *self._assumptions(state.own)),
            incidents=() if state.own is None else state.own.incidents,
        )


def _noise_numbers(rules: DPFedPAQRules) -> dict[str, float]:
    steps = rules.steps
    numbers = {"clip_norm": steps.clip_norm}
    if steps.update_clip_norm is not None:
        numbers["update_clip_norm"] = steps.update_clip_norm
    numbers["update_sensitivity_of_round_1"] = steps.update_sensitivity(1)
    std = "noise_std_of_an_update_of_round_1"
    numbers |= least_and_largest(rules.books, std, lambda release: -steps.update_factor(1) * release.noise_scale)
    if rules.quantization_levels is not None:
        numbers["quantization_levels"] = rules.quantization_levels
    return numbers


def _paper(rules: DPFedPAQRules, charges: Charges, run: RunFacts) -> PaperEpsilon | None:
    """Return the paper's epsilon of one round, summed over the replies of the client whom it costs most."""
    worst: tuple[float, float, float, int] | None = None
    for name, ledger in rules.ledgers(charges).items():
        release, replies = rules.books.terms[name].release, ledger.num_charges
        part = rules.steps.num_records / rules.books.num_records[name]
        if not replies:
            continue
        if not release.noise_scale or 1.25 * part <= rules.about.delta / replies:
            return None
        each = paper_epsilon(
            noise_std=release.noise_scale, sensitivity=release.sensitivity, sampled_part=part, delta=rules.about.delta / replies
        )
        worst = max(worst or (0.0, 0.0, 0.0, 0), (replies * each, each, part, replies))
    if worst is None:
        return None
    total, each, part, replies = worst
    delta, faults = rules.about.delta, violated_conditions(each, part)
    if run.seeded_noise:
        faults.append("noise came from a fixed seed")
    note = (
        f"epsilon and delta of a round ({each:.4g}, {delta / replies:.3g}), added up over {replies} replies: the paper "
        "composes nothing"
    )
    if rules.calibration == "paper":
        # At the delta of the settings, not at a part of it.
        ratio = paper_noise_ratio(epsilon=each, sampled_part=part, delta=delta / replies)
        asked = paper_epsilon(noise_std=ratio, sensitivity=1.0, sampled_part=part, delta=delta)
        note += (
            f"; calibration='paper': the noise was made by this formula for epsilon {asked:.4g}, delta {delta:.3g} of each "
            "reply, which is no budget of all replies"
        )
    return PaperEpsilon(
        epsilon=total,
        formula="2 gamma Delta sqrt(2 ln(1.25 gamma / delta)) / sigma a round, DP-FedPAQ eq. 17",
        valid=not faults,
        reason="; ".join([*faults, note]),
    )


class DPFedPAQ(DPStrategy):
    """DP-FedPAQ (the paper's Algorithm 2), for clients whose recipe is `flower_dp.clients.DPFedPAQRecipe` with the same numbers.

    In each round M of N clients draw E b of their n_i records without replacement. Each client takes E local steps on means of b
    clipped gradients, and adds Gaussian noise for its own budget to the update. Then it rounds the update at random and without
    bias to a few levels (QSGD), and sends that. The model moves by the mean of the received messages.

    All replies of a client together are (epsilon_i, delta)-differentially private for each of its records under replace-one,
    against everyone who sees them. `FedPAQSteps.sensitivity` names the proof of an update's sensitivity to one record. The
    client's own sampling of records amplifies; the sampling of clients does not, since the server sees it.

    Args:
        steps: the parameters that both sides know: step size, E, b, clip norm, and how the sensitivity is proved.
        sampling: sampler of a round's cohort: `FixedSizeSampling` (the paper's), `RoundRobinSampling` or `FullSampling`.
        num_clients: number of clients (paper: N).
        num_records: public data sizes, in records: one number, a sequence in the order of the clients' names, or by name.
        epsilon: epsilon budget of each client: one number, a sequence or a mapping; math.inf: no noise, not private.
        delta: delta of every budget.
        quantization_levels: levels above 0 of a message (paper: s); None: float32.
        calibration: `exact`: noise for all replies together; `paper`: that of eq. 17, for repeating the paper's experiments.
            With `paper`, epsilon and delta are those of one reply; the statement's epsilon is the cost of all replies with this
            noise.
        num_replies: maximum replies of a client. By default as many as the rounds need (round robin, or all clients); with
            `FixedSizeSampling` a number that a client exceeds with a probability of 1 %, after which it gets no requests.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.core.sampling import FixedSizeSampling
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps
        >>> from flower_dp.strategies import DPFedPAQ
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=1.0, update_clip_norm=0.1)
        >>> strategy = DPFedPAQ(
        ...     steps=steps, sampling=FixedSizeSampling(cohort_size=10), num_clients=100, num_records=80, epsilon=4.0, delta=1e-5
        ... )
        >>> steps.update_sensitivity(1)
        0.2
    """

    rules: DPFedPAQRules

    def __init__(
        self,
        *,
        steps: FedPAQSteps,
        sampling: Sampler,
        num_clients: int,
        num_records: int | Sequence[int] | Mapping[str, int],
        epsilon: float | PerClient,
        delta: float,
        quantization_levels: int | None = 10,
        calibration: str = "exact",
        num_replies: int | Sequence[int] | Mapping[str, int] | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        population = Population(num_clients=num_clients, num_records=num_records, num_replies=num_replies, epsilon=epsilon)
        rules = DPFedPAQRules(
            population,
            steps,
            sampling,
            delta=delta,
            quantization_levels=quantization_levels,
            calibration=calibration,
            evaluation=options.get("evaluation"),
        )
        super().__init__(rules, **options)
