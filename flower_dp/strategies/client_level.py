"""Client-level differential privacy: clipped client updates, and Gaussian noise on their sum."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from flower_dp.core import checks, dp_events
from flower_dp.core.noise import Generator
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import PrivacyCost, relies_on_secret_sampling
from flower_dp.privacy.charges import Charges, History
from flower_dp.privacy.events import least_noise_multiplier
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.privacy.statement import Adversary, PaperEpsilon, PrivacyStatement, delta_warning
from flower_dp.strategies.calibration import EpsilonTarget, run_event
from flower_dp.strategies.evaluation import LocalEvaluation, NoisedSumEvaluation, PrivateEvaluation
from flower_dp.strategies.not_covered import not_covered, seeded
from flower_dp.strategies.releases.clipped_updates import ClippedUpdates
from flower_dp.strategies.releases.noised_sum import OUTSIDERS, NoisedSum, SumState
from flower_dp.strategies.releases.planned_cost import EpsilonPlan
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.releases.shared_noise import NoiseSharing
from flower_dp.strategies.rules import MethodFacts, ModelUpdate
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.wire import EVALUATION

_PAPER_FORMULA = "RDP of the Poisson-subsampled Gaussian (moments accountant)"


class ClientLevelRules:
    """One release a round: the sum of client updates, each clipped to L2 norm `clip_norm`, with noise on the sum.

    The noise has std noise_multiplier x clip_norm; the global model moves by the noised sum over the *expected* cohort. There are
    no weights by example counts. Missing and refused replies count as zeros, and a round with an empty cohort is charged too.

    The accounting claims amplification by sampling only if no message reveals who takes part. It claims none if the sum may lack
    noise shares, or if clients compress their own noised updates.

    Args:
        name: the method's name on the wire.
        title: the method's name for people.
        updates: the release of clipped updates.
        noise: noise multiplier of the release, or an `EpsilonTarget`, whose epsilon gives the noise and is the target too.
        delta: the delta at which epsilon is stated, in (0, 1).
        target_epsilon: epsilon at which the run ends, before the round that would exceed it; None for no target.
        paper_formula: name of the formula of the paper's epsilon.
        evaluation: settings of private evaluations, a second release of the rounds; None for none.

    Raises:
        ValueError: if a value is invalid, before any request; the message names field and value.
    """

    def __init__(
        self,
        name: str,
        title: str,
        updates: ClippedUpdates,
        noise: float | EpsilonTarget,
        *,
        delta: float,
        target_epsilon: float | None = None,
        paper_formula: str = _PAPER_FORMULA,
        evaluation: PrivateEvaluation | LocalEvaluation | None = None,
    ) -> None:
        delta = checks.number("delta", delta, above=0, below=1)
        self.paper_formula = paper_formula
        self.target_epsilon = None if target_epsilon is None else checks.number("target_epsilon", target_epsilon, above=0)
        self.budget = noise if isinstance(noise, EpsilonTarget) else None
        if isinstance(noise, EpsilonTarget):
            self.target_epsilon = noise.epsilon
            noise = noise.noise_multiplier(updates.shared, delta=delta)
        self.training, self.noise = updates.release(name, noise)
        self.release = self.training.release
        self.evaluation = None if evaluation is None else NoisedSumEvaluation.of(evaluation, self.training, self.noise, title)
        self.about = MethodFacts(
            title=title, num_clients=self.release.num_units, delta=delta, stock_refusal=_stock_refusal(self.training)
        )
        self._planned = self._plan_of()
        if self.target_epsilon is not None and self.release.mechanism.noise_multiplier == 0:
            raise checks.refusal("noise_multiplier", 0, f"target_epsilon={target_epsilon} needs noise; set noise_multiplier > 0")

    @property
    def releases(self) -> tuple[NoisedSum, ...]:
        """The noised sum of updates, and the noised sum of metrics if there are private evaluations."""
        return (self.training,) if self.evaluation is None else (self.training, self.evaluation)

    @property
    def clip_norms(self) -> tuple[float, float]:
        """The minimum and the maximum clip norm of a round."""
        clip = self.training.clip
        return (self.release.clip_norm,) * 2 if clip is None else (clip.of.min_clip_norm, clip.of.max_clip_norm)

    def clip_norm(self, state: RunState) -> float:
        """Return the L2 bound of one client's update in the next round."""
        return self.training.clip_norm(self.training.state_in(state))

    # The run

    def with_clients(self, names: tuple[str, ...], num_rounds: int | None) -> Self:
        """Return the rules of a run with the number of its rounds that the target allows, and the cost of each.

        Raises:
            ValueError: if the noise was calibrated for another number of rounds.
        """
        if num_rounds is None or self._planned.num_rounds == num_rounds:
            return self
        self.noise.check_rounds(num_rounds)
        if self.budget is not None:
            self.budget.check_rounds(num_rounds)
        rules = copy.copy(self)
        rules._planned = rules._plan_of()
        rules._planned.plan(num_rounds)
        return rules

    def _plan_of(self) -> EpsilonPlan:
        return EpsilonPlan(
            self._events, target_epsilon=self.target_epsilon, delta=self.about.delta, relation=self.release.relation
        )

    def _events(self, num_rounds: int) -> dp_events.DpEvent:
        """Return the most expensive event of `num_rounds` rounds with their evaluations, one after every `every`-th round."""
        return run_event(self.noise, self.evaluation, num_rounds)

    def noise_and_signal_norms(self, dimension: int) -> tuple[float, float]:
        """Return the approximate expected norm of the noise on the mean, and the largest norm of the mean without noise.

        Args:
            dimension: length of the model's vector.
        """
        training, first = self.training, SumState()
        release, beside = training.next_noise(first).release, training.num_beside
        kept = training.num_kept(dimension + beside) - beside
        return release.noise_scale / release.expected_cohort_size * math.sqrt(kept), training.clip_norm(first)

    def stop_reason(self, state: RunState, server_round: int, cohort_size: int | None) -> str | None:
        """Return why the round is not run: it would exceed the target, or is out of order; None if it is run."""
        charges = state.charges
        number = self.num_rounds(charges) + 1
        if self.training.has_fixed_order and server_round != number:
            # A caller's round number must not choose the cohort: cohort and charge follow the number of charged rounds.
            return f"with {self.training.sampling} it must be round {number}"
        if (reason := self.noise.stop_reason(number)) is not None:
            return reason
        if self.target_epsilon is None or (cohort_size is None) == self.noise.num_shares_varies:
            return None
        shares = None if cohort_size is None else self.noise.shares(cohort_size)
        charged = self.noise.release_to_participants if shares is None else self.noise.without_own_share(shares)
        event = charged.event(number)
        if self.evaluation is not None:
            # Every evaluation that may still be requested after this round, also those that earlier rounds have left out.
            owed = range(charges.number(EVALUATION) + 1, number // self.evaluation.plan.every + 1)
            event = dp_events.ComposedDpEvent(
                (event, *(self.evaluation.noise.release_to_participants.event(index) for index in owed))
            )
        if self._planned.allows(number, ledger=lambda: self.ledger(charges), event=event, as_planned=self._as_planned(charges)):
            return None
        return f"it would pass target_epsilon={self.target_epsilon:g}"

    def _as_planned(self, charges: Charges) -> bool:
        """Return whether only planned events were charged, and no more evaluations than planned for these rounds."""
        if not self.noise.num_shares_varies and set(self.training.history(charges).counts) - {
            self.noise.release_to_participants.event(1)
        }:
            return False
        return self.evaluation is None or charges.number(EVALUATION) <= self.num_rounds(charges) // self.evaluation.plan.every

    def next_model(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> ModelUpdate:
        """Return the model moved by the noised sum over the expected cohort.

        Raises:
            RoundDiscarded: with too few replies for the noise that was charged, or a sum that is not exact.
        """
        mean, after = self.training.noised(state, now, collected, rng)
        mean += now.vector
        return ModelUpdate(vector=mean, releases={self.training.name: after})

    def public_metrics(self, state: RunState, now: RoundRequest | None) -> Mapping[str, float]:
        """Return an upper bound of the cost of all rounds charged so far, and the clip norm of a round, if it is adaptive."""
        charges, planned = state.charges, None
        if self._as_planned(charges) and not self.noise.num_shares_varies:
            planned = self._planned.epsilon(self.num_rounds(charges))
        if planned is None:
            event, relation = self.ledger(charges).event, self.release.relation
            planned = accounting.epsilon(event, delta=self.about.delta, relation=relation, grid=1e-3).epsilon
        moving = {} if now is None or now.ask.indicator is None else {"clip-norm": now.ask.indicator.clip_norm}
        return {"epsilon": planned} | moving

    # Cost

    def num_rounds(self, charges: Charges) -> int:
        """Return the number of charged rounds."""
        return charges.number(self.training.name)

    def ledger(self, charges: Charges) -> History:
        """Return the charges against any single client."""
        return charges.history(self.training.scope)

    def outside_ledger(self, charges: Charges) -> History:
        """Return the charges against outsiders."""
        return charges.history(replace(self.training.scope, view=OUTSIDERS))

    def least_noise_multiplier(self, charges: Charges) -> float:
        """Return the lowest noise multiplier of the charged rounds; infinite before the first."""
        counts = self.training.history(charges).counts
        return min(map(least_noise_multiplier, counts), default=math.inf)

    def statement(self, state: RunState, facts: RunFacts) -> PrivacyStatement:
        """Return the statement on all charges, including those of private evaluations."""
        release, evaluation, charges, delta = self.release, self.evaluation, state.charges, self.about.delta
        num_rounds, ledger = self.num_rounds(charges), self.ledger(charges)
        inside, outside = ledger.cost(delta), self.outside_ledger(charges).cost(delta)
        private = math.isfinite(inside.epsilon) and not facts.seeded_noise
        noise = {
            "clip_norm": release.clip_norm,
            "noise_multiplier": release.mechanism.noise_multiplier,
            "noise_std_of_the_sum": release.noise_scale,
            "noise_std_of_the_mean": release.noise_scale / release.expected_cohort_size,
            **self.noise.numbers,
        }
        if self.budget is not None:
            noise |= {"calibrated_for_epsilon": self.budget.epsilon, "calibrated_for_rounds": self.budget.num_rounds}
        if (clip := self.training.clip) is not None:
            # The stds above are for the minimum clip norm, around update and indicator together.
            noise |= {
                "clip_norm": clip.of.min_clip_norm,
                "joint_norm": release.clip_norm,
                "initial_clip_norm": clip.of.initial_clip_norm,
                "min_clip_norm": clip.of.min_clip_norm,
                "max_clip_norm": clip.of.max_clip_norm,
                "target_quantile": clip.of.target_quantile,
                "clip_learning_rate": clip.of.learning_rate,
                "count_noise_std": clip.count_noise_std,
            }
        parts, evaluations = {}, None
        if evaluation is not None:
            noise["evaluation_noise_multiplier"] = evaluation.release.mechanism.noise_multiplier
            evaluations = f"{charges.number(evaluation.name)} private evaluations, {evaluation.sampling},"
            if private:
                parts = {
                    "training": self.training.history(charges).cost(delta).epsilon,
                    "evaluation": evaluation.history(charges).cost(delta).epsilon,
                }
        return PrivacyStatement(
            method=self.about.title,
            unit=release.unit,
            relation=release.relation,
            protected_against=release.visible_to if private else "nobody",
            delta=delta,
            epsilon=inside.epsilon if private else math.inf,
            accountant=inside.accountant,
            paper_epsilon=_paper(self, charges, facts),
            num_charged_rounds=num_rounds,
            noise=noise,
            sampling=f"{release.sampler}; {release.expected_cohort_size:g} of {release.num_units} clients expected per round",
            events=tuple(ledger.lines()),
            assumptions=tuple(_assumptions(self, facts, relies_on_secret_sampling(inside) or relies_on_secret_sampling(outside))),
            not_covered=not_covered(facts, accounts=False, logs="logs on devices and on the server", evaluations=evaluations),
            epsilon_by_release=parts,
            incidents=tuple(_incidents(self, facts)),
            unlisted_incidents=_unlisted(self),
            adversaries=_adversaries(self, charges, inside, outside) if private else (),
            num_rounds_of_event=self.noise.num_rounds_of_event,
        )


def _stock_refusal(training: NoisedSum) -> str | None:
    """Return why stock clients can't take part; None if they can."""
    if training.masks is not None:
        return "stock clients apply no mask; use DPClient or privacy_mod of flower_dp.clients"
    if training.noise.placement == "central":
        return None
    return (
        "placement='distributed': stock clients add no noise; use DPClient or privacy_mod of flower_dp.clients, or "
        "placement='central'"
    )


def _adversaries(rules: ClientLevelRules, charges: Charges, inside: PrivacyCost, outside: PrivacyCost) -> tuple[Adversary, ...]:
    """Return outsiders, participants and the server, with the epsilon that can be proved against each."""
    release, evaluation, delta = rules.noise.release_to_outsiders, rules.evaluation, rules.about.delta
    unknown = "how many" if rules.training.sampling.cohort_size_is_secret else "which clients"
    secret = f"; not {unknown} took part" if rules.training.cohort_is_secret else ", and who took part"
    if evaluation is not None and evaluation.cohort_is_secret:
        secret += " in training; not who evaluated"
    if rules.noise.placement == "central":
        knows, sees, published = "", "every client's update without noise", "every global model"
        server, std = replace(inside, epsilon=math.inf, accountant="none"), 0.0
    else:
        knows, published = ", and its own noise share", "every noised sum and global model"
        sees = "every message with only its sender's noise share, and who took part"
        multiplier = rules.noise.min_share_std / release.clip_norm
        share = replace(release, mechanism=Gaussian(noise_multiplier=multiplier), sampler=FullSampling())
        event = accounting.repeated(share.event(1), rules.num_rounds(charges))
        if evaluation is not None:
            evaluated = replace(share, clip_norm=1.0, mechanism=Gaussian(noise_multiplier=evaluation.noise.min_share_std))
            event = dp_events.ComposedDpEvent([event, accounting.repeated(evaluated.event(1), charges.number(evaluation.name))])
        server, std = accounting.epsilon(event, delta=delta, relation=release.relation), share.noise_scale
    separated = isinstance(release.sampler, MinimumSeparationSampling)
    often = "asked as often as the separation allows" if separated else "selected in every round"
    sees_as_client = f"what outsiders see{knows}; each alone, as if {often}"
    # An event of several rounds is not that of one.
    rows = math.inf if rules.noise.num_rounds_of_event else rules.least_noise_multiplier(charges)
    least = min(rows, release.mechanism.noise_multiplier) * release.clip_norm
    return (
        Adversary.of("outsiders", outside, view=f"{published}{secret}", lowest_noise_std=release.noise_scale),
        Adversary.of("participants", inside, view=sees_as_client, lowest_noise_std=least),
        Adversary.of("the server", server, view=sees, lowest_noise_std=std, trusted=True),
    )


def _paper(rules: ClientLevelRules, charges: Charges, run: RunFacts) -> PaperEpsilon | None:
    """Return the paper's RDP epsilon of the same rounds, with a check of its assumptions."""
    release = rules.release
    if not release.mechanism.noise_multiplier or not rules.num_rounds(charges) or rules.noise.num_rounds_of_event:
        return None  # with correlated noise there is no such formula
    sampling_rate = release.expected_cohort_size / release.num_units
    # The paper samples without replacement and accounts as if by Poisson, add-or-remove-one.
    as_poisson = PoissonSampling(sampling_rate=sampling_rate).event(release.mechanism.event(), 1, release.num_units)
    event = accounting.repeated(as_poisson, rules.num_rounds(charges))
    epsilon = accounting.rdp_epsilon(event, delta=rules.about.delta, relation="add-or-remove-one")
    if epsilon is None:
        return None
    held = "its assumptions hold against outsiders" if rules.noise.placement == "distributed" else "its assumptions hold"
    faults = []
    if charges.number(EVALUATION):
        faults.append("it covers training alone, and metrics of private evaluations were released as well")
    if not isinstance(release.sampler, PoissonSampling) and sampling_rate < 1:
        faults.append("it assumes Poisson sampling, and cohorts were drawn by another sampling")
    if release.relation != "add-or-remove-one":
        faults.append("it holds for add-or-remove-one")
    if rules.noise.compresses_noised_updates:
        faults.append(f"{_compression_text(rules)} of each client's own noised update is not post-processing of the noised sum")
    elif rules.noise.reveals_cohort and sampling_rate < 1:
        faults.append("it assumes that nobody knows the cohorts, and the number of noise shares in a sum reveals who takes part")
    if run.seeded_noise:
        faults.append("noise came from a fixed seed")
    return PaperEpsilon(epsilon=epsilon, formula=rules.paper_formula, valid=not faults, reason="; ".join(faults) or held)


def _assumptions(rules: ClientLevelRules, run: RunFacts, sampling_counts: bool) -> list[str]:
    release, evaluation, delta = rules.release, rules.evaluation, rules.about.delta
    lines = ["Every client clips what it sends as instructed. Whether it replies does not depend on its data."]
    if not release.mechanism.noise_multiplier:
        lines.append("No noise is added to updates: training is not private.")
    elif rules.noise.placement == "central":
        lines.append("The server is trusted: it sees single updates and adds the noise.")
    elif rules.noise.compresses_noised_updates:
        only = "In training, only" if evaluation is not None else "Only"
        lines.append(
            f"{only} a client's own noise share protects it: its message is {_compression_text(rules)} of its own noised update."
        )
        if evaluation is not None:
            lines += [f"In evaluations: {line}" for line in _of_shares(evaluation.noise)]
    else:
        lines += _of_shares(rules.noise)
    if rules.noise.reveals_cohort:
        where, its = (" in training", "its ") if evaluation is not None and evaluation.cohort_is_secret else ("", "")
        other = "zero" if release.relation == "add-or-remove-one" else "any other"
        lines.append(
            f"Adversaries may know who takes part{where}, so {its}epsilon claims no amplification by sampling. Neighboring runs "
            f"differ in one client, whose update is replaced by {other}."
        )
    elif rules.training.cohort_is_secret and release.expected_cohort_size < release.num_units and sampling_counts:
        size = " or its size" if release.sampler.cohort_size_is_secret else ""
        lines.append(f"No outsider or participant learns a round's cohort{size}, whether from logs, from timing or otherwise.")
        lines += _of_fixed_size(release, "training")
    if evaluation is not None and evaluation.cohort_is_secret:
        size = " or how many do" if evaluation.sampling.cohort_size_is_secret else ""
        lines.append(f"No outsider or participant learns who evaluates{size}, whether from logs, from timing or otherwise.")
        lines += _of_fixed_size(evaluation.noise.release_to_outsiders, "evaluation")
    if rules.training.clip is not None:
        lines.append(
            "Adaptive clipping: one release under one noise holds the update and an indicator of whether it was clipped. "
            "Epsilon is therefore that of a fixed clip norm. Clip norm, joint norm of update and indicator, and noise std are "
            "stated at the minimum clip norm and grow in proportion to it."
        )
    if isinstance(separated := release.sampler, MinimumSeparationSampling):
        most = rules.noise.max_participations or separated.max_participations
        often = f"more than {most} times, or " if most else ""
        other = "zero" if release.relation == "add-or-remove-one" else "any others"
        lines.append(
            f"No client takes part {often}again within {separated.min_separation} rounds. The server counts by client name, when "
            "it asks. Which clients are connected does not depend on their data. Neighboring runs differ in one client, whose "
            f"updates are replaced by {other}; the rounds in which it is asked are the same."
        )
    lines += rules.noise.assumptions
    lines += delta_warning(delta, max(release.num_units, run.num_known), "client")  # more may have joined
    return [*lines, *seeded(run)]


def _of_shares(noise: NoiseSharing) -> list[str]:
    """Return the assumptions of a sum whose noise the clients add in shares."""
    lines = [
        "Every replying client adds its noise share. Single messages are not private: only the aggregator receives them, and it "
        "is trusted not to look at single ones."
    ]
    if noise.server_completes_noise:
        lines.append("The server is trusted to add every noise share that a round's sum lacks.")
    lines.append("Clients do not combine what they know of their noise shares; nor does a node that hosts several clients.")
    return lines


def _of_fixed_size(release: Release, purpose: str) -> list[str]:
    """Return the further assumption of sampling of a fixed size; nothing for other samplers."""
    if not isinstance(release.sampler, FixedSizeSampling):
        return []
    drawn, clients = f"{release.expected_cohort_size:g}", release.num_units
    return [
        f"No outsider or participant knows which clients are unreachable. NOT ACCOUNTED FOR in {purpose}: epsilon uses the "
        f"sampling rate {drawn}/{clients}. Against a client that knows it was not selected, the rate is {drawn}/{clients - 1} in "
        f"that round; against a node with k clients, none selected, {drawn}/({clients} - k)."
    ]


def _compression_text(rules: ClientLevelRules) -> str:
    """Return the function of its own noised update that a client sends, in words."""
    levels = rules.training.quantization_levels
    parts = ["top-k"] if rules.training.keep_ratio < 1 else []
    return " and ".join([*parts, *([f"a random quantization ({levels} levels above 0)"] if levels else [])])


def _unlisted(rules: ClientLevelRules) -> str:
    """Return which incidents are not listed: they would help to tell who took part, or how many; evaluations count none."""
    missing, reports = "missing or rejected updates", "reports of single devices; they could reveal a cohort."
    if rules.training.cohort_is_secret:
        return f"{missing} and {reports}"
    if rules.evaluation is None:
        return ""
    return f"missing or rejected replies to evaluations{f' and {reports}' if rules.evaluation.cohort_is_secret else '.'}"


def _incidents(rules: ClientLevelRules, run: RunFacts) -> list[str]:
    lines = list(run.incidents)
    # The number would reveal the size of cohorts. That there is one would reveal that a client which always fails has taken part.
    if run.missing.total and not rules.training.cohort_is_secret:
        lines.append(f"{run.missing.total} requested updates did not count: {run.missing}")
    return lines
