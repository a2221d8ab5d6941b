"""The privacy statement of a method with one client-level release a round."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from flower_dp.core import dp
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling
from flower_dp.core.words import delta_in_words
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost, counts_sampling
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.privacy.statement import Adversary, PaperEpsilon, PrivacyStatement
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.not_covered import not_covered, seeded

if TYPE_CHECKING:
    from flower_dp.strategies.client_level import ClientLevelRules


def statement_of(rules: ClientLevelRules, run: RunFacts) -> PrivacyStatement:
    """Return the statement on all charges in the ledgers, those of private evaluations among them."""
    release, evaluation = rules.release, rules.evaluated
    inside, outside = rules.ledger.cost(rules.delta), rules.outside_ledger.cost(rules.delta)
    private = math.isfinite(inside.epsilon) and not run.seeded_noise
    noise = {
        "clip_norm": release.clip_norm,
        "noise_multiplier": release.mechanism.noise_multiplier,
        "noise_std_of_the_sum": release.noise_scale,
        "noise_std_of_the_mean": release.noise_scale / release.expected_cohort,
    }
    if rules.budget is not None:
        noise |= {"calibrated_for_epsilon": rules.budget.epsilon, "calibrated_for_rounds": rules.budget.num_rounds}
    if (clip := rules.training.clip) is not None:
        # The std above are of the smallest clip norm, around update and indicator together.
        noise |= {
            "clip_norm": clip.of.smallest,
            "joint_norm": release.clip_norm,
            "initial_clip_norm": clip.of.initial,
            "smallest_clip_norm": clip.of.smallest,
            "largest_clip_norm": clip.of.largest,
            "target_quantile": clip.of.target_quantile,
            "clip_learning_rate": clip.of.learning_rate,
            "count_noise_std": clip.count_noise_std,
        }
    parts, evaluations = {}, None
    if evaluation is not None:
        noise["evaluation_noise_multiplier"] = evaluation.release.mechanism.noise_multiplier
        evaluations = f"{evaluation.num_charged} private evaluations, {evaluation.sampling},"
        if private:
            parts = {"training": rules.epsilon_of(rules.training), "evaluation": rules.epsilon_of(evaluation)}
    return PrivacyStatement(
        method=rules.title,
        unit=release.unit,
        relation=release.relation,
        adversary=release.seen_by if private else "nobody",
        delta=rules.delta,
        epsilon=inside.epsilon if private else math.inf,
        accountant=inside.accountant,
        paper=_paper(rules, run),
        num_rounds=rules.num_rounds,
        noise=noise,
        sampling=f"{release.sampler}, {release.expected_cohort:g} of {release.num_clients} clients expected a round",
        events=tuple(rules.ledger.lines()),
        assumptions=tuple(_assumptions(rules, run, counts_sampling(inside) or counts_sampling(outside))),
        not_covered=not_covered(run, accounts=False, logs="logs on devices and on the server", evaluations=evaluations),
        parts=parts,
        incidents=tuple(_incidents(rules, run)),
        adversaries=_adversaries(rules, inside, outside) if private else (),
    )


def _adversaries(rules: ClientLevelRules, inside: Cost, outside: Cost) -> tuple[Adversary, ...]:
    """Outsiders, participants and the server, and what can be proved against each."""
    release, evaluation = rules.noise.outside, rules.evaluated
    unknown = "how many clients" if rules.training.sampling.secret_size else "who"
    secret = f", not {unknown} took part" if rules.training.secret_cohort else ", and who took part"
    if evaluation is not None and evaluation.secret_cohort:
        secret += " in training; not who evaluated"
    if rules.noise.placement == "central":
        knows, sees = "", "every client's update without noise"
        server, std = replace(inside, epsilon=math.inf, accountant="none"), 0.0
    else:
        knows = ", each its own share of the noise"
        sees = "every client's message with its own share of the noise alone, and who took part"
        multiplier = rules.noise.smallest_share / release.clip_norm
        share = replace(release, mechanism=Gaussian(noise_multiplier=multiplier), sampler=FullSampling())
        event = accounting.repeated(share.event(1), rules.num_rounds)
        if evaluation is not None:
            own = replace(share, clip_norm=1.0, mechanism=Gaussian(noise_multiplier=evaluation.shared.smallest_share))
            event = dp.ComposedDpEvent([event, accounting.repeated(own.event(1), evaluation.num_charged)])
        server, std = accounting.epsilon(event, delta=rules.delta, relation=release.relation), share.noise_scale
    sees_as_client = f"what outsiders see{knows}; each by itself, as a client that is asked in every round"
    least = min(rules.least_noise_multiplier, release.mechanism.noise_multiplier) * release.clip_norm
    return (
        Adversary.of("outsiders", outside, sees=f"every global model{secret}", noise_std=release.noise_scale),
        Adversary.of("participants", inside, sees=sees_as_client, noise_std=least),
        Adversary.of("the server", server, sees=sees, noise_std=std, trusted=True),
    )


def _paper(rules: ClientLevelRules, run: RunFacts) -> PaperEpsilon | None:
    """The paper's RDP epsilon of the same rounds, with its own assumptions checked."""
    release = rules.release
    if not release.mechanism.noise_multiplier or not rules.num_rounds:
        return None
    sampling_rate = release.expected_cohort / release.num_clients
    # The paper samples without replacement and accounts as if by Poisson, add-or-remove-one.
    as_poisson = PoissonSampling(sampling_rate=sampling_rate).event(release.mechanism.event(), 1, release.num_clients)
    event = accounting.repeated(as_poisson, rules.num_rounds)
    epsilon = accounting.rdp_epsilon(event, delta=rules.delta, relation="add-or-remove-one")
    if epsilon is None:
        return None
    held = "its assumptions hold" + (", against outsiders" if rules.noise.placement == "distributed" else "")
    faults = []
    if rules.evaluated is not None and rules.evaluated.num_charged:
        faults.append("it covers training alone, and metrics of private evaluations were released as well")
    if not isinstance(release.sampler, PoissonSampling) and sampling_rate < 1:
        faults.append("it assumes Poisson sampling, and cohorts were drawn by another sampling")
    if release.relation != "add-or-remove-one":
        faults.append("it holds for add-or-remove-one")
    if rules.noise.lossy_messages:
        faults.append(f"{_made(rules)} of each client's own noised update is not post-processing of the noised sum")
    elif rules.noise.cohort_shows and sampling_rate < 1:
        faults.append("it assumes that nobody knows the cohorts, and missing shares of noise reveal who takes part")
    if run.seeded_noise:
        faults.append("noise came from a fixed seed")
    return PaperEpsilon(epsilon=epsilon, formula=rules.paper_formula, valid=not faults, reason="; ".join(faults) or held)


def _assumptions(rules: ClientLevelRules, run: RunFacts, sampling_counts: bool) -> list[str]:
    release, evaluation = rules.release, rules.evaluated
    lines = ["clients clip as asked, and whether a client answers does not depend on its data"]
    if not release.mechanism.noise_multiplier:
        lines.append("no noise is added to updates: training is not private")
    elif rules.noise.placement == "central":
        lines.append("the server is trusted: it sees single updates and adds the noise")
    elif rules.noise.lossy_messages:
        lines.append(
            f"epsilon rests on each client's own share of noise: what it sends is {_made(rules)} of its own noised update"
        )
    else:
        lines.append("clients add their shares of the noise; single messages are not private and are seen by the aggregator only")
        if rules.noise.trusted_server:
            lines.append("the server is trusted to add the shares of noise that are missing in a round")
        lines.append("clients do not combine their knowledge of their shares of the noise, nor does a node that hosts several")
    if rules.noise.cohort_shows:
        lines.append(
            "adversaries may know who takes part: sampling lowers no cost, and a client is replaced by one with a zero update"
        )
    elif release.expected_cohort < release.num_clients and sampling_counts:
        size = ", nor its size" if release.sampler.secret_size else ""
        lines.append(f"the cohort of a round is known to nobody who is protected against{size}: not from logs or timing either")
        lines += _of_fixed_size(release, "asked")
    if evaluation is not None and evaluation.secret_cohort:
        size = ", nor how many do" if evaluation.sampling.secret_size else ""
        lines.append(f"who evaluates is known to nobody who is protected against{size}: not from logs or timing either")
        lines += _of_fixed_size(evaluation.shared.outside, "asked to evaluate")
    if rules.training.clip is not None:
        lines.append(
            "adaptive clipping: whether an update is within the clip norm is part of the same release as the update, under one "
            "noise, so that epsilon is that of a fixed clip norm; clip norm, joint norm of update and indicator, and noise "
            "std are told at the smallest clip norm, and grow in proportion to it"
        )
    clients = max(release.num_clients, run.num_known)  # more may have joined
    if rules.delta * clients >= 1:
        lines.append(
            f"DELTA IS NO GUARANTEE: {delta_in_words(rules.delta)} is at least 1 / {clients} clients, and a "
            "mechanism that publishes one client's data outright can have such a delta"
        )
    return [*lines, *seeded(run)]


def _of_fixed_size(release: Release, asked: str) -> list[str]:
    """Return what sampling of a fixed size assumes besides; nothing for other samplers."""
    if not isinstance(release.sampler, FixedSizeSampling):
        return []
    drawn, clients = f"{release.expected_cohort:g}", release.num_clients
    return [
        f"nobody who is protected against knows which clients can't be reached; who knows that it was not {asked} itself meets a "
        f"sampling rate of {drawn}/{clients - 1} in that round, where {drawn}/{clients} is accounted for; a node none of whose k "
        f"clients was {asked}, of {drawn}/({clients} - k)"
    ]


def _made(rules: ClientLevelRules) -> str:
    """Return the function of its own noised update that a client sends, in words."""
    levels = rules.training.quantization_levels
    parts = ["top-k"] if rules.training.keep_ratio < 1 else []
    return " and ".join([*parts, *([f"a random quantisation ({levels} levels above 0)"] if levels else [])])


def _incidents(rules: ClientLevelRules, run: RunFacts) -> list[str]:
    lines = list(run.incidents)
    # Their number would tell how large cohorts were, and the fact alone that a client that always fails has taken part.
    if run.missing.total and not rules.training.secret_cohort:
        lines.append(f"{run.missing.total} updates that were asked for did not count: {run.missing}")
    return lines
