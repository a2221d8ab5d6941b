"""The privacy statement of NbAFL: who sees messages, who sees broadcasts, and the paper's epsilon under its assumption."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flower_dp.core import dp
from flower_dp.core.sampling import FullSampling
from flower_dp.core.words import epsilon_in_words
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.charges import History
from flower_dp.privacy.statement import Adversary, PaperEpsilon, PrivacyStatement
from flower_dp.strategies.releases.books import ClientBooks
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.local import local_statement

if TYPE_CHECKING:
    from flower_dp.strategies.nbafl import NbAFLRules


def statement_of(rules: NbAFLRules, run: RunFacts) -> PrivacyStatement:
    """Return the statement of all three ledgers of every client."""
    books = rules.books
    replies = max(map(books.training.replies, books.terms), default=0)
    broadcast_ledgers, broadcasts = rules.broadcast_ledgers, len(rules.broadcasts)
    seen = max((ledger.num_charges for ledger in broadcast_ledgers.values()), default=0)
    of_them = f"the {broadcasts} broadcasts alone, at most {seen} with a client's weights in them, and who took part"
    adversaries = (
        Adversary.of(
            "the server",
            _worst(books, books.ledgers),
            sees=f"every message of a client, at most {replies} of one client; so does an eavesdropper",
            noise_std=rules.uplink_noise_std * min(map(books.share, books.terms), default=0.0),
            paper=_paper(rules, run, exposures=replies, limit=rules.uplink_exposures or 0, what="uplink"),
        ),
        Adversary.of(
            "participants",
            _worst(books, rules.participant_ledgers),
            sees=f"each by itself, {of_them}; a participant knows its own noise",
            noise_std=min((float(one.participant_stds.min()) for one in rules.broadcasts), default=0.0),
        ),
        Adversary.of(
            "outsiders",
            _worst(books, broadcast_ledgers),
            sees=of_them,
            noise_std=min((one.std for one in rules.broadcasts), default=0.0),
            paper=_paper(rules, run, exposures=broadcasts, limit=books.planned_rounds or 0, what="downlink"),
        ),
    )
    who = "all clients" if isinstance(rules.training.sampling, FullSampling) else f"{rules.cohort_size} at random"
    return local_statement(
        rules.title,
        books,
        run,
        paper=adversaries[0].paper,
        noise={
            "clip_norm": rules.clip_norm,
            "uplink_noise_std": rules.uplink_noise_std,
            "downlink_noise_std": rules.downlink_noise_std,
            "largest_noise_std_added_by_the_server": max((one.added_std for one in rules.broadcasts), default=0.0),
        },
        sampling=f"{who} of {len(books.terms)} in every round, at most {replies} replies of one client",
        assumptions=(
            "clipped weights lie in a ball of radius C, so all of a client's records together move a message by at most 2 C: "
            "epsilon holds for the whole client, and so for each of its records; no smaller bound is proved for one record",
            "participants, outsiders: the other clients add their noise and don't share it; the server adds its own",
        ),
        adversaries=adversaries,
    )


def _worst(books: ClientBooks, ledgers: Mapping[str, History]) -> Cost:
    none = Cost(epsilon=0.0, delta=books.delta, relation=books.relation, accountant="none")
    costs = (books.total(name, ledger) for name, ledger in ledgers.items())
    return max(costs, key=lambda cost: cost.epsilon, default=none)


def _paper(rules: NbAFLRules, run: RunFacts, *, exposures: int, limit: int, what: str) -> PaperEpsilon | None:
    """The epsilon that the paper claims for its noise, and the reasons against it here; None if the noise is not the paper's."""
    if rules.paper_epsilon is None or math.isinf(rules.paper_epsilon):
        return None
    faults = []
    if exposures > limit:
        faults.append(f"{exposures} exposures, and the noise is made for {limit}")
    each = rules.paper_epsilon / max(1, limit)
    if each >= 1:
        faults.append(f"the classical Gaussian formula needs epsilon < 1 for an exposure, which is {each:.4g} here")
    if what == "downlink" and not isinstance(rules.training.sampling, FullSampling):
        faults.append("Lemma 4 bounds one direction of the privacy loss only")
    if run.seeded_noise:
        faults.append("noise came from a fixed seed")
    assumption = (
        "unit: one record; leans on an assumption that is not proved for any training here: that one record moves the weights by "
        "at most 2 C / m"
    )
    if what == "uplink" and exposures:
        multiplier = rules.min_records * rules.uplink_noise_std / rules.clip_norm
        event = accounting.repeated(dp.GaussianDpEvent(multiplier), exposures)
        exact = accounting.epsilon(event, delta=rules.delta, relation=rules.books.relation).epsilon
        assumption += (
            f"; exact composition under it gives {epsilon_in_words(exact)} for the {exposures} exposures that there were"
        )
    return PaperEpsilon(
        epsilon=rules.paper_epsilon,
        formula=f"Wei et al. 2020, {what} noise for {limit} exposures with linear composition, deltas not added up",
        valid=not faults,
        reason="; ".join([*faults, assumption]),
    )
