"""The privacy statement of a strategy with one client-level release a round."""

import math
from typing import TYPE_CHECKING

from flower_dp import accounting
from flower_dp.sampling import PoissonSampling
from flower_dp.statement import PaperEpsilon, PrivacyStatement

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
    faults = []
    if not isinstance(release.sampler, PoissonSampling) and sampling_rate < 1:
        faults.append("it assumes Poisson sampling, and cohorts were drawn otherwise")
    if release.relation != "add-or-remove-one":
        faults.append("it holds for add-or-remove-one")
    if strategy.sparse_messages:
        faults.append("top-k of each client's own noised update is not post-processing of the noised sum")
    elif strategy.cohort_shows and sampling_rate < 1:
        faults.append("it counts on cohorts that nobody knows, and missing shares of noise tell who takes part")
    if strategy.num_weakened:
        faults.append("noise of missing clients was missing")
    if strategy.seeded_noise:
        faults.append("noise came from a fixed seed")
    return PaperEpsilon(
        epsilon=epsilon, formula=strategy.paper_formula, valid=not faults, reason="; ".join(faults) or "its assumptions hold"
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
            lines.append("the server is trusted to add the shares of clients that did not answer")
    if strategy.cohort_shows:
        lines.append("who takes part may be known: sampling lowers no cost, and a client is replaced by one whose update is zero")
    elif 0 < release.expected_cohort < release.num_clients:
        lines.append("the cohort of a round is known to nobody who is protected against")
    if strategy.seeded_noise:
        lines.append("NOISE OR SAMPLING CAME FROM A FIXED SEED: for tests only")
    return lines


def _not_covered(strategy: "ClientLevelStrategy") -> list[str]:
    lines = ["everything else that is computed from client data: choice of settings, the cohort size, timing, logs on devices"]
    if strategy.report_client_metrics:
        lines.append("CLIENT METRICS: clients sent training metrics without noise")
    return lines


def _incidents(strategy: "ClientLevelStrategy") -> list[str]:
    lines = list(strategy.incidents)
    if strategy.num_missing:
        lines.append(f"{strategy.num_missing} updates that were asked for did not count (missing, refused or errors)")
    if strategy.num_weakened:
        lines.append(f"in {strategy.num_weakened} rounds shares of noise were missing; they are charged as they were")
    return lines
