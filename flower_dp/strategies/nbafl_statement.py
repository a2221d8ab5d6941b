"""The privacy statement of NbAFL: two adversaries, and the paper's epsilon under its assumption."""

import math
from typing import TYPE_CHECKING

from dp_accounting import GaussianDpEvent

from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.statement import Adversary, PaperEpsilon, PrivacyStatement
from flower_dp.strategies.local_statement import state

if TYPE_CHECKING:
    from flower_dp.strategies.nbafl import NbAFL


def state_nbafl(strategy: "NbAFL") -> PrivacyStatement:
    """Return the statement of both ledgers of every client."""
    uplink, outside, inside = (
        _worst([strategy.cost(ledger) for ledger in ledgers.values()], strategy)
        for ledgers in (strategy.ledgers, strategy.broadcast_ledgers, strategy.participant_ledgers)
    )
    replies = max((ledger.num_charges for ledger in strategy.ledgers.values()), default=0)
    seen = max((ledger.num_charges for ledger in strategy.broadcast_ledgers.values()), default=0)
    broadcasts = len(strategy.added_noise_stds)
    of_them = f"the {broadcasts} broadcasts alone, at most {seen} with a client's weights in them, and who took part"
    adversaries = (
        Adversary(
            name="the server",
            sees=f"every message of a client, at most {replies} of one; so does who listens to it",
            epsilon=uplink.epsilon,
            accountant=uplink.accountant,
            noise_std=strategy.uplink_noise_std,
            paper=_paper(strategy, exposures=replies, limit=strategy.uplink_exposures, what="uplink"),
        ),
        Adversary(
            name="participants",
            sees=f"each by itself, {of_them}; a participant knows its own noise",
            epsilon=inside.epsilon,
            accountant=inside.accountant,
            noise_std=strategy.least_participant_std if broadcasts else 0.0,
        ),
        Adversary(
            name="outsiders",
            sees=of_them,
            epsilon=outside.epsilon,
            accountant=outside.accountant,
            noise_std=strategy.least_broadcast_std if broadcasts else 0.0,
            paper=_paper(strategy, exposures=broadcasts, limit=strategy.planned_rounds, what="downlink"),
        ),
    )
    who = "all clients" if isinstance(strategy.sampling, FullSampling) else f"{strategy.cohort_size} at random"
    return state(
        strategy,
        paper=adversaries[0].paper,
        noise={
            "clip_norm": strategy.clip_norm,
            "uplink_noise_std": strategy.uplink_noise_std,
            "downlink_noise_std": strategy.downlink_noise_std,
            "largest_noise_std_added_by_the_server": max(strategy.added_noise_stds, default=0.0),
        },
        sampling=f"{who} of {strategy.num_clients} in every round, at most {replies} replies of one client",
        assumptions=(
            "clipped weights lie in a ball of radius C, so all of a client's records together move a message by at most 2 C: "
            "epsilon holds for the whole client, and so for each of its records; no smaller bound is proved for one record",
            "participants, outsiders: the other clients add their noise and don't share it; the server adds its own",
        ),
        adversaries=adversaries,
    )


def _worst(costs: list[Cost], strategy: "NbAFL") -> Cost:
    none = Cost(epsilon=0.0, delta=strategy.delta, relation=strategy.relation, accountant="none")
    return max(costs, key=lambda cost: cost.epsilon, default=none)


def _paper(strategy: "NbAFL", *, exposures: int, limit: int, what: str) -> PaperEpsilon | None:
    """The epsilon that the paper claims for its noise, and what speaks against it here."""
    if math.isinf(strategy.paper_epsilon):
        return None
    faults = []
    if exposures > limit:
        faults.append(f"{exposures} exposures, and the noise is made for {limit}")
    each = strategy.paper_epsilon / max(1, limit)
    if each >= 1:
        faults.append(f"the classical Gaussian formula needs epsilon < 1 for an exposure, which is {each:.4g} here")
    if what == "downlink" and not isinstance(strategy.sampling, FullSampling):
        faults.append("Lemma 4 bounds one direction of the privacy loss only")
    if strategy.seeded_noise:
        faults.append("noise came from a fixed seed")
    assumption = (
        "unit: one record; leans on an assumption that is not proved for any training here: that one record moves the weights by "
        "at most 2 C / m"
    )
    if what == "uplink" and exposures:
        multiplier = strategy.min_records * strategy.uplink_noise_std / strategy.clip_norm
        event = accounting.repeated(GaussianDpEvent(multiplier), exposures)
        exact = accounting.epsilon(event, delta=strategy.delta, relation=strategy.relation).epsilon
        assumption += f"; exact composition under it gives {exact:.4f} for the {exposures} exposures that there were"
    return PaperEpsilon(
        epsilon=strategy.paper_epsilon,
        formula=f"Wei et al. 2020, {what} noise for {limit} exposures with linear composition, deltas not added up",
        valid=not faults,
        reason="; ".join([*faults, assumption]),
    )
