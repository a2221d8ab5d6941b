"""The privacy statement of NbAFL: who sees messages, who sees broadcasts, and the paper's epsilon under its assumption."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dp_accounting import GaussianDpEvent

from flower_dp.core.sampling import FullSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.ledger import Ledger
from flower_dp.privacy.statement import Adversary, PaperEpsilon, PrivacyStatement
from flower_dp.strategies.statements.local import LocalFacts, state


@dataclass(frozen=True, slots=True, kw_only=True)
class NbAFLFacts:
    """Facts for the statement of NbAFL, besides those of all methods with local noise.

    Attributes:
        local: facts of every such method; its ledgers are those of the uplink.
        broadcast_ledgers: against outsiders, by client.
        outside: costs of these.
        inside: costs of the ledgers against participants.
        clip_norm: L2 bound of the weights.
        paper_epsilon: as configured.
        uplink_exposures: replies that the uplink noise is made for.
        planned_rounds: broadcasts that the downlink noise is made for.
        min_records: the fewest records of a client.
        cohort_size: clients a round.
        uplink_noise_std: of every client.
        message_std: the smallest std of the noise on a number in a client's message, with its public weight.
        downlink_noise_std: the paper's, of the server.
        added_noise_stds: std of the noise that the server added to each broadcast.
        least_broadcast_std: least noise on a broadcast.
        least_participant_std: the same, without the noise that one participant knows.
    """

    local: LocalFacts
    broadcast_ledgers: Mapping[str, Ledger]
    outside: Mapping[str, Cost]
    inside: Mapping[str, Cost]
    clip_norm: float
    paper_epsilon: float
    uplink_exposures: int
    planned_rounds: int
    min_records: int
    cohort_size: int
    uplink_noise_std: float
    message_std: float
    downlink_noise_std: float
    added_noise_stds: tuple[float, ...]
    least_broadcast_std: float
    least_participant_std: float


def state_nbafl(facts: NbAFLFacts) -> PrivacyStatement:
    """Return the statement of both ledgers of every client."""
    uplink, outside, inside = (_worst(costs.values(), facts) for costs in (facts.local.costs, facts.outside, facts.inside))
    replies = max((ledger.num_charges for ledger in facts.local.ledgers.values()), default=0)
    seen = max((ledger.num_charges for ledger in facts.broadcast_ledgers.values()), default=0)
    broadcasts = len(facts.added_noise_stds)
    of_them = f"the {broadcasts} broadcasts alone, at most {seen} with a client's weights in them, and who took part"
    adversaries = (
        Adversary(
            name="the server",
            sees=f"every message of a client, at most {replies} of one client; so does an eavesdropper",
            epsilon=uplink.epsilon,
            accountant=uplink.accountant,
            noise_std=facts.message_std,
            paper=_paper(facts, exposures=replies, limit=facts.uplink_exposures, what="uplink"),
        ),
        Adversary(
            name="participants",
            sees=f"each by itself, {of_them}; a participant knows its own noise",
            epsilon=inside.epsilon,
            accountant=inside.accountant,
            noise_std=facts.least_participant_std if broadcasts else 0.0,
        ),
        Adversary(
            name="outsiders",
            sees=of_them,
            epsilon=outside.epsilon,
            accountant=outside.accountant,
            noise_std=facts.least_broadcast_std if broadcasts else 0.0,
            paper=_paper(facts, exposures=broadcasts, limit=facts.planned_rounds, what="downlink"),
        ),
    )
    who = "all clients" if isinstance(facts.local.sampling, FullSampling) else f"{facts.cohort_size} at random"
    return state(
        facts.local,
        paper=adversaries[0].paper,
        noise={
            "clip_norm": facts.clip_norm,
            "uplink_noise_std": facts.uplink_noise_std,
            "downlink_noise_std": facts.downlink_noise_std,
            "largest_noise_std_added_by_the_server": max(facts.added_noise_stds, default=0.0),
        },
        sampling=f"{who} of {len(facts.local.terms)} in every round, at most {replies} replies of one client",
        assumptions=(
            "clipped weights lie in a ball of radius C, so all of a client's records together move a message by at most 2 C: "
            "epsilon holds for the whole client, and so for each of its records; no smaller bound is proved for one record",
            "participants, outsiders: the other clients add their noise and don't share it; the server adds its own",
        ),
        adversaries=adversaries,
    )


def _worst(costs: Iterable[Cost], facts: NbAFLFacts) -> Cost:
    none = Cost(epsilon=0.0, delta=facts.local.delta, relation=facts.local.relation, accountant="none")
    return max(costs, key=lambda cost: cost.epsilon, default=none)


def _paper(facts: NbAFLFacts, *, exposures: int, limit: int, what: str) -> PaperEpsilon | None:
    """The epsilon that the paper claims for its noise, and the reasons against it here."""
    if math.isinf(facts.paper_epsilon):
        return None
    faults = []
    if exposures > limit:
        faults.append(f"{exposures} exposures, and the noise is made for {limit}")
    each = facts.paper_epsilon / max(1, limit)
    if each >= 1:
        faults.append(f"the classical Gaussian formula needs epsilon < 1 for an exposure, which is {each:.4g} here")
    if what == "downlink" and not isinstance(facts.local.sampling, FullSampling):
        faults.append("Lemma 4 bounds one direction of the privacy loss only")
    if facts.local.run.seeded_noise:
        faults.append("noise came from a fixed seed")
    assumption = (
        "unit: one record; leans on an assumption that is not proved for any training here: that one record moves the weights by "
        "at most 2 C / m"
    )
    if what == "uplink" and exposures:
        multiplier = facts.min_records * facts.uplink_noise_std / facts.clip_norm
        event = accounting.repeated(GaussianDpEvent(multiplier), exposures)
        exact = accounting.epsilon(event, delta=facts.local.delta, relation=facts.local.relation).epsilon
        assumption += f"; exact composition under it gives {exact:.4f} for the {exposures} exposures that there were"
    return PaperEpsilon(
        epsilon=facts.paper_epsilon,
        formula=f"Wei et al. 2020, {what} noise for {limit} exposures with linear composition, deltas not added up",
        valid=not faults,
        reason="; ".join([*faults, assumption]),
    )
