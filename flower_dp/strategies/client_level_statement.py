"""The privacy statement of a strategy with one client-level release a round."""

import math
from typing import TYPE_CHECKING

from dataclasses import replace

from flower_dp.privacy import accounting
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.statement import Adversary, PaperEpsilon, PrivacyStatement, delta_in_words

if TYPE_CHECKING:
    from flower_dp.strategies.client_level import ClientLevelStrategy


def state(strategy: "ClientLevelStrategy") -> PrivacyStatement:
    """Return the statement of what a strategy's ledger holds."""
    release = strategy.release
    cost = strategy.ledger.cost(strategy.delta)
    private = math.isfinite(cost.epsilon) and not strategy.seeded_noise
    return PrivacyStatement(
        method=strategy.method,
        unit=release.unit,
        relation=release.relation,
        adversary=release.seen_by if private else "nobody",
        delta=strategy.delta,
        epsilon=cost.epsilon if private else math.inf,
        accountant=cost.accountant,
        paper=_paper(strategy),
        num_rounds=strategy.ledger.num_charges,
        noise={
            "clip_norm": release.clip_norm,
            "noise_multiplier": release.mechanism.noise_multiplier,
            "noise_std_of_the_sum": release.noise_scale,
            "noise_std_of_the_mean": release.noise_scale / release.expected_cohort,
        },
        sampling=f"{release.sampler}, {release.expected_cohort:g} of {release.num_clients} clients expected a round",
        events=tuple(strategy.ledger.lines()),
        assumptions=tuple(_assumptions(strategy)),
        not_covered=tuple(_not_covered(strategy)),
        incidents=tuple(_incidents(strategy)),
        adversaries=_adversaries(strategy) if private else (),
    )


def _adversaries(strategy: "ClientLevelStrategy") -> tuple[Adversary, ...]:
    """Outsiders, participants and the server, and what can be proved against each."""
    inside, outside = strategy.ledger.cost(strategy.delta), strategy.outside_ledger.cost(strategy.delta)
    release = strategy.outside
    secret = ", not how many clients took part" if strategy.secret_cohort else ", and who took part"
    knows = "" if strategy.placement == "central" else ", each its own share of the noise"
    if strategy.placement == "central":
        server, accountant, std, sees = math.inf, "none", 0.0, "every client's update without noise"
    else:
        multiplier = strategy.smallest_share / release.clip_norm
        share = replace(release, mechanism=Gaussian(noise_multiplier=multiplier), sampler=FullSampling())
        event = accounting.repeated(share.event(1), strategy.ledger.num_charges)
        cost = accounting.epsilon(event, delta=strategy.delta, relation=release.relation)
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
            noise_std=min(strategy.least_noise_multiplier * release.clip_norm, release.noise_scale),
        ),
        Adversary(name="the server", sees=sees, epsilon=server, accountant=accountant, noise_std=std, trusted=True),
    )


def _paper(strategy: "ClientLevelStrategy") -> PaperEpsilon | None:
    """The paper's RDP epsilon of the same rounds, with its own assumptions checked."""
    release, num_rounds = strategy.release, strategy.ledger.num_charges
    if not release.mechanism.noise_multiplier or not num_rounds:
        return None
    sampling_rate = release.expected_cohort / release.num_clients
    # The paper samples without replacement and accounts as if by Poisson, add-or-remove-one.
    as_poisson = PoissonSampling(sampling_rate=sampling_rate).event(release.mechanism.event(), 1, release.num_clients)
    event = accounting.repeated(as_poisson, num_rounds)
    epsilon = accounting.rdp_epsilon(event, delta=strategy.delta, relation="add-or-remove-one")
    if epsilon is None:
        return None
    held = "its assumptions hold" + (", against outsiders" if strategy.placement == "distributed" else "")
    faults = []
    if not isinstance(release.sampler, PoissonSampling) and sampling_rate < 1:
        faults.append("it assumes Poisson sampling, and cohorts were drawn otherwise")
    if release.relation != "add-or-remove-one":
        faults.append("it holds for add-or-remove-one")
    if strategy.sparse_messages:
        faults.append("top-k of each client's own noised update is not post-processing of the noised sum")
    elif strategy.cohort_shows and sampling_rate < 1:
        faults.append("it counts on cohorts that nobody knows, and missing shares of noise tell who takes part")
    if strategy.seeded_noise:
        faults.append("noise came from a fixed seed")
    return PaperEpsilon(
        epsilon=epsilon, formula=strategy.paper_formula, valid=not faults, reason="; ".join(faults) or held
    )


def _assumptions(strategy: "ClientLevelStrategy") -> list[str]:
    release = strategy.release
    lines = ["clients clip as asked, and whether a client answers does not depend on its data"]
    if strategy.placement == "central":
        lines.append("the server is trusted: it sees single updates and adds the noise")
    elif strategy.sparse_messages:
        lines.append("epsilon rests on each client's own share of noise")
    else:
        lines.append("clients add their shares of the noise; single messages are not private and are seen by the aggregator only")
        if strategy.trusted_server:
            lines.append("the server is trusted to add the shares that the clients of a round leave missing")
        lines.append("clients do not pool what they know of their shares of the noise")
    if strategy.cohort_shows:
        lines.append("who takes part may be known: sampling lowers no cost, and a client is replaced by one whose update is zero")
    elif 0 < release.expected_cohort < release.num_clients:
        size = ", nor its size: not from logs or timing either" if strategy.secret_cohort else ""
        lines.append(f"the cohort of a round is known to nobody who is protected against{size}")
    if strategy.delta * release.num_clients >= 1:
        lines.append(
            f"DELTA IS NO GUARANTEE: {delta_in_words(strategy.delta)} is at least 1 / {release.num_clients} clients, and a mechanism "
            "that publishes one client's data outright can have such a delta"
        )
    if strategy.seeded_noise:
        lines.append("NOISE OR SAMPLING CAME FROM A FIXED SEED: for tests only")
    return lines


def _not_covered(strategy: "ClientLevelStrategy") -> list[str]:
    lines = ["everything else that is computed from client data: choice of settings, timing, logs on devices and on the server"]
    if strategy.report_client_metrics:
        lines.append("CLIENT METRICS: clients sent training metrics without noise")
    return lines


def _incidents(strategy: "ClientLevelStrategy") -> list[str]:
    lines = list(strategy.incidents)
    if strategy.num_missing:
        lines.append(f"{strategy.num_missing} updates that were asked for did not count (missing, refused or errors)")
    return lines
