"""The privacy statement of DP-PASGD: exact composition of all noised steps, and the paper's epsilon for the same noise."""

from dataclasses import dataclass, replace

from flower_dp.privacy.dp_pasgd import paper_epsilon
from flower_dp.privacy.statement import PaperEpsilon, PrivacyStatement
from flower_dp.strategies.statements.local import LocalFacts, state

_FORMULA = "rho + 2 sqrt(rho log(1/delta)), rho = 2 K G^2 / (X_m^2 sigma_m^2), Hu et al. eq. 9"
_BATCHES = {
    "fixed-size": "a batch of fixed size drawn anew in every step, accounted as if every record were in all of them",
    "poisson": "each record in the batch of every step independently with probability batch_size / num_records",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPASGDFacts:
    """Facts for the statement of DP-PASGD, besides those of all methods with local noise.

    Attributes:
        local: facts of every such method.
        clip_norm: L2 bound on one record's gradient.
        num_clients: number of devices.
        num_steps: steps that the noise is made for.
        num_local_steps: steps of a round.
        message_std: the smallest std of the noise on a number in a device's message.
        batch_sampling: `fixed-size` or `poisson`.
        resources: the resources that the run has cost a device, in words; None if no costs were given.
        chosen: which model the server chose, in words; None if it is the last.
    """

    local: LocalFacts
    clip_norm: float
    num_clients: int
    num_steps: int
    num_local_steps: int
    message_std: float
    batch_sampling: str
    resources: str | None
    chosen: str | None


def state_dp_pasgd(facts: DPPASGDFacts) -> PrivacyStatement:
    """Return the statement: the worst client, and the distribution over clients."""
    local = facts.local
    if facts.resources:
        local = replace(local, run=replace(local.run, incidents=(*local.run.incidents, facts.resources)))
    return state(
        local,
        message_std=facts.message_std,
        noise=_noise_numbers(facts),
        paper=_paper(facts),
        sampling=f"all clients of {facts.num_clients} in every round, at most {facts.num_steps} local steps of one client, "
        f"{facts.num_local_steps} a round; {_BATCHES[facts.batch_sampling]}",
        assumptions=tuple(_assumptions(facts)),
    )


def _assumptions(facts: DPPASGDFacts) -> list[str]:
    lines = ["the model that a client sends is computed from its noised steps alone, so it costs what the steps cost together"]
    if facts.local.counts_sampling:
        lines.append("which records are in a batch is known to the client alone")
    if facts.chosen:
        lines.append(f"{facts.chosen} on data that are taken as public: choosing by public data costs nothing")
    return lines


def _noise_numbers(facts: DPPASGDFacts) -> dict[str, float]:
    numbers = {"clip_norm": facts.clip_norm}
    releases = [terms.release for terms in facts.local.terms.values()]
    for word, pick in (("least", min), ("largest", max)) if releases else ():
        numbers[f"{word}_noise_multiplier"] = pick(release.mechanism.noise_multiplier for release in releases)
        stds = [release.noise_scale / release.expected_cohort for release in releases]
        numbers[f"{word}_noise_std_of_a_mean_gradient"] = pick(stds)
    return numbers


def _paper(facts: DPPASGDFacts) -> PaperEpsilon | None:
    """The paper's epsilon, for the noise and the steps of the run, of the client whom it costs most."""
    values = []
    for name, ledger in facts.local.ledgers.items():
        terms = facts.local.terms[name]
        if not terms.release.noise_scale:
            return None
        if ledger.num_charges:
            # As a batch of one record: noise and sensitivity of the sum have the ratio of those of the mean.
            spent = paper_epsilon(
                noise_std=terms.release.noise_scale,
                delta=facts.local.delta,
                num_steps=ledger.num_charges * terms.num_releases,
                clip_norm=facts.clip_norm,
                batch_size=1,
            )
            values.append(spent)
    if not values:
        return None
    if facts.local.run.seeded_noise:
        return PaperEpsilon(epsilon=max(values), formula=_FORMULA, valid=False, reason="noise came from a fixed seed")
    reason = "zero-concentrated differential privacy, for the noise of the run, without amplification"
    return PaperEpsilon(epsilon=max(values), formula=_FORMULA, valid=True, reason=reason)
