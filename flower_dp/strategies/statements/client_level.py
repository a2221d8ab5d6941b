"""The privacy statement of a method with one client-level release a round."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dp_accounting import ComposedDpEvent

from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost, counts_sampling
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.privacy.statement import Adversary, PaperEpsilon, PrivacyStatement, delta_in_words
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.not_covered import not_covered


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFacts:
    """Facts on private evaluations for a statement.

    Attributes:
        num_evaluations: how many were charged.
        noise_multiplier: std of the noise on the sum of clients' vectors, each of norm at most 1.
        sampling: who evaluated.
        smallest_share: std of the least noise that a client adds to its own vector; 0 where the server adds it.
        parts: what training alone, and evaluation alone, would have cost at most.
        hidden_cohort: whether the cost counts on nobody knowing who evaluates.
        secret_cohort: whether it counts on nobody knowing how many do.
    """

    num_evaluations: int
    noise_multiplier: float
    sampling: str
    smallest_share: float
    parts: Mapping[str, float]
    hidden_cohort: bool
    secret_cohort: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLevelFacts:
    """The facts from which the statement is made.

    Attributes:
        title: the method's name.
        release: what was configured.
        outside: the release with the noise that protects against outsiders.
        costs: of all that was charged, against participants and against outsiders.
        delta: at which they are stated.
        num_rounds: rounds that were charged.
        events: the ledger, in words.
        paper_formula: the name of the formula for the paper's epsilon.
        placement: `central` or `distributed`.
        trusted_server: whether the server tops up missing shares.
        lossy_messages: whether every client sends a function of its own noised update, not the update.
        keep_ratio: part of the coordinates that are kept.
        quantization_levels: of what clients send; None where it is not quantised.
        cohort_shows: whether the release reveals the cohort.
        secret_cohort: whether the epsilon holds only if nobody knows the size of a cohort.
        smallest_share: smallest std of the noise that a client adds itself.
        least_noise_multiplier: of the noise that remains against a participant, who knows its own share.
        run: facts of the run.
        evaluation: facts of private evaluations, which the costs hold; None without them.
    """

    title: str
    release: Release
    outside: Release
    costs: tuple[Cost, Cost]
    delta: float
    num_rounds: int
    events: tuple[str, ...]
    paper_formula: str
    placement: str
    trusted_server: bool
    lossy_messages: bool
    keep_ratio: float
    quantization_levels: int | None
    cohort_shows: bool
    secret_cohort: bool
    smallest_share: float
    least_noise_multiplier: float
    run: RunFacts
    evaluation: EvaluationFacts | None = None


def state(facts: ClientLevelFacts) -> PrivacyStatement:
    """Return the statement on all charges in the ledgers."""
    release = facts.release
    cost = facts.costs[0]
    private = math.isfinite(cost.epsilon) and not facts.run.seeded_noise
    return PrivacyStatement(
        method=facts.title,
        unit=release.unit,
        relation=release.relation,
        adversary=release.seen_by if private else "nobody",
        delta=facts.delta,
        epsilon=cost.epsilon if private else math.inf,
        accountant=cost.accountant,
        paper=_paper(facts),
        num_rounds=facts.num_rounds,
        noise={
            "clip_norm": release.clip_norm,
            "noise_multiplier": release.mechanism.noise_multiplier,
            "noise_std_of_the_sum": release.noise_scale,
            "noise_std_of_the_mean": release.noise_scale / release.expected_cohort,
            **({"evaluation_noise_multiplier": facts.evaluation.noise_multiplier} if facts.evaluation else {}),
        },
        sampling=f"{release.sampler}, {release.expected_cohort:g} of {release.num_clients} clients expected a round",
        events=facts.events,
        assumptions=tuple(_assumptions(facts)),
        not_covered=_not_covered(facts),
        parts=dict(facts.evaluation.parts) if facts.evaluation is not None and private else {},
        incidents=tuple(_incidents(facts)),
        adversaries=_adversaries(facts) if private else (),
    )


def _adversaries(facts: ClientLevelFacts) -> tuple[Adversary, ...]:
    """Outsiders, participants and the server, and what can be proved against each."""
    inside, outside = facts.costs
    release = facts.outside
    secret = ", not how many clients took part" if facts.secret_cohort else ", and who took part"
    if facts.evaluation is not None and facts.evaluation.hidden_cohort:
        secret += " in training; not who evaluated"
    knows = "" if facts.placement == "central" else ", each its own share of the noise"
    if facts.placement == "central":
        server, accountant, std, sees = math.inf, "none", 0.0, "every client's update without noise"
    else:
        multiplier = facts.smallest_share / release.clip_norm
        share = replace(release, mechanism=Gaussian(noise_multiplier=multiplier), sampler=FullSampling())
        event = accounting.repeated(share.event(1), facts.num_rounds)
        if facts.evaluation is not None:
            own = replace(share, clip_norm=1.0, mechanism=Gaussian(noise_multiplier=facts.evaluation.smallest_share))
            event = ComposedDpEvent([event, accounting.repeated(own.event(1), facts.evaluation.num_evaluations)])
        cost = accounting.epsilon(event, delta=facts.delta, relation=release.relation)
        server, accountant, std = cost.epsilon, cost.accountant, share.noise_scale
        sees = "every client's message with its own share of the noise alone, and who took part"
    return (
        Adversary(
            name="outsiders",
            sees=f"every global model{secret}",
            epsilon=outside.epsilon,
            accountant=outside.accountant,
            noise_std=release.noise_scale,
        ),
        Adversary(
            name="participants",
            sees=f"what outsiders see{knows}; each by itself, as a client that is asked in every round",
            epsilon=inside.epsilon,
            accountant=inside.accountant,
            noise_std=facts.least_noise_multiplier * release.clip_norm,
        ),
        Adversary(name="the server", sees=sees, epsilon=server, accountant=accountant, noise_std=std, trusted=True),
    )


def _paper(facts: ClientLevelFacts) -> PaperEpsilon | None:
    """The paper's RDP epsilon of the same rounds, with its own assumptions checked."""
    release, num_rounds = facts.release, facts.num_rounds
    if not release.mechanism.noise_multiplier or not num_rounds:
        return None
    sampling_rate = release.expected_cohort / release.num_clients
    # The paper samples without replacement and accounts as if by Poisson, add-or-remove-one.
    as_poisson = PoissonSampling(sampling_rate=sampling_rate).event(release.mechanism.event(), 1, release.num_clients)
    event = accounting.repeated(as_poisson, num_rounds)
    epsilon = accounting.rdp_epsilon(event, delta=facts.delta, relation="add-or-remove-one")
    if epsilon is None:
        return None
    held = "its assumptions hold" + (", against outsiders" if facts.placement == "distributed" else "")
    faults = []
    if facts.evaluation is not None and facts.evaluation.num_evaluations:
        faults.append("it covers training alone, and metrics of private evaluations were released as well")
    if not isinstance(release.sampler, PoissonSampling) and sampling_rate < 1:
        faults.append("it assumes Poisson sampling, and cohorts were drawn by another sampling")
    if release.relation != "add-or-remove-one":
        faults.append("it holds for add-or-remove-one")
    if facts.lossy_messages:
        faults.append(f"{_made(facts)} of each client's own noised update is not post-processing of the noised sum")
    elif facts.cohort_shows and sampling_rate < 1:
        faults.append("it assumes that nobody knows the cohorts, and missing shares of noise reveal who takes part")
    if facts.run.seeded_noise:
        faults.append("noise came from a fixed seed")
    return PaperEpsilon(epsilon=epsilon, formula=facts.paper_formula, valid=not faults, reason="; ".join(faults) or held)


def _assumptions(facts: ClientLevelFacts) -> list[str]:
    release = facts.release
    lines = ["clients clip as asked, and whether a client answers does not depend on its data"]
    if facts.placement == "central":
        lines.append("the server is trusted: it sees single updates and adds the noise")
    elif facts.lossy_messages:
        lines.append(
            f"epsilon rests on each client's own share of noise: what it sends is {_made(facts)} of its own noised update"
        )
    else:
        lines.append("clients add their shares of the noise; single messages are not private and are seen by the aggregator only")
        if facts.trusted_server:
            lines.append("the server is trusted to add the shares of noise that are missing in a round")
        lines.append("clients do not combine their knowledge of their shares of the noise")
    if facts.cohort_shows:
        lines.append(
            "adversaries may know who takes part: sampling lowers no cost, and a client is replaced by one with a zero update"
        )
    elif release.expected_cohort < release.num_clients and any(counts_sampling(cost) for cost in facts.costs):
        size = ", nor its size: not from logs or timing either" if facts.secret_cohort else ""
        lines.append(f"the cohort of a round is known to nobody who is protected against{size}")
    if facts.evaluation is not None and facts.evaluation.hidden_cohort:
        size = ", nor how many do: not from logs or timing either" if facts.evaluation.secret_cohort else ""
        lines.append(f"who evaluates is known to nobody who is protected against{size}")
    if facts.delta * release.num_clients >= 1:
        lines.append(
            f"DELTA IS NO GUARANTEE: {delta_in_words(facts.delta)} is at least 1 / {release.num_clients} clients, and a "
            "mechanism that publishes one client's data outright can have such a delta"
        )
    if facts.run.seeded_noise:
        lines.append("NOISE OR SAMPLING CAME FROM A FIXED SEED: for tests only")
    return lines


def _made(facts: ClientLevelFacts) -> str:
    """Return the function of its own noised update that a client sends, in words."""
    levels = facts.quantization_levels
    parts = ["top-k"] if facts.keep_ratio < 1 else []
    return " and ".join([*parts, *([f"a random quantisation ({levels} levels above 0)"] if levels else [])])


def _not_covered(facts: ClientLevelFacts) -> tuple[str, ...]:
    own = facts.evaluation
    evaluations = None if own is None else f"{own.num_evaluations} private evaluations, {own.sampling},"
    return not_covered(facts.run, accounts=False, logs="logs on devices and on the server", evaluations=evaluations)


def _incidents(facts: ClientLevelFacts) -> list[str]:
    lines = list(facts.run.incidents)
    # Their number would tell how large cohorts were, and the fact alone that a client that always fails has taken part.
    if facts.run.missing.total and not facts.secret_cohort:
        lines.append(f"{facts.run.missing.total} updates that were asked for did not count: {facts.run.missing}")
    return lines
