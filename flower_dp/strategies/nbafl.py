"""NbAFL (Wei et al. 2020): clipped weights with noise from every client, and noise on the server's broadcasts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, Unpack

import numpy as np

from flower_dp.core import checks, dp_events, noise
from flower_dp.core.formatting import format_epsilon
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, FullSampling
from flower_dp.core.serialization import serializable
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.charges import Charge, Charges, History
from flower_dp.privacy.client_terms import values_in
from flower_dp.privacy.nbafl import downlink_noise_std, weights_terms
from flower_dp.privacy.statement import Adversary, PaperEpsilon, PrivacyStatement
from flower_dp.strategies.evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.local_level import LocalRules, local_statement
from flower_dp.strategies.releases.client_ledgers import ClientLedgers, PerClient, Population
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import ModelUpdate, StrategyOptions
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.strategies.strategy import DPStrategy

# The server's noise is drawn on a lattice that is finer than the broadcast's by this factor.
_FINER = 2.0**10


# The server's release of a round, which every adversary sees.
BROADCAST = "broadcast"
OUTSIDERS, PARTICIPANTS = "outsiders", "participants"


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Broadcasts:
    """The noise on the broadcasts of a run, each of which was charged.

    Attributes:
        count: number of broadcasts.
        least_std: lowest std of all noise on a broadcast.
        least_participant_std: lowest std of the noise that protects a client if another one subtracts its own.
        largest_added_std: highest std of the noise that the server added.
    """

    count: int = 0
    least_std: float = math.inf
    least_participant_std: float = math.inf
    largest_added_std: float = 0.0

    def after(self, *, std: float, participant_std: float, added_std: float) -> Broadcasts:
        """Return the summary with one more broadcast."""
        return Broadcasts(
            count=self.count + 1,
            least_std=min(self.least_std, std),
            least_participant_std=min(self.least_participant_std, participant_std),
            largest_added_std=max(self.largest_added_std, added_std),
        )


class NbAFLRules(LocalRules):
    """The rules of NbAFL, whose arguments `NbAFL` describes; `population` has the others."""

    stock_refusal = "stock clients add no noise of their own; use LocalDPClient or privacy_mod of flower_dp.clients"

    def __init__(
        self,
        population: Population,
        *,
        clip_norm: float,
        epsilon: float | None = None,
        paper_epsilon: float | None = None,
        delta: float,
        uplink_exposures: int | None = None,
        cohort_size: int | None = None,
        min_records: int | None = None,
        evaluation: PrivateEvaluation | LocalEvaluation | None = None,
    ) -> None:
        self.paper_epsilon, self.uplink_exposures = paper_epsilon, uplink_exposures
        if epsilon is not None and len(set(values_in(population.num_replies))) > 1:
            raise checks.refusal(
                "num_replies",
                population.num_replies,
                f"with epsilon={epsilon} all clients add the same noise; must be one number, or give paper_epsilon",
            )
        least = min(values_in(population.num_records))
        self.min_records = least if min_records is None else checks.integer("min_records", min_records, at_least=1, at_most=least)
        terms = partial(
            weights_terms,
            clip_norm=clip_norm,
            epsilon=epsilon,
            paper_epsilon=paper_epsilon,
            delta=checks.number("delta", delta, above=0, below=1),
            uplink_exposures=uplink_exposures,
            min_records=self.min_records,
        )
        if population.num_replies is None and uplink_exposures is not None:
            exposures = checks.integer("uplink_exposures", uplink_exposures, at_least=1)
            population = replace(population, num_replies=exposures)
        self.uplink_noise_std = terms(num_replies=min(values_in(population.num_replies))).release.noise_scale
        books = ClientLedgers(
            population, relation="replace-one", delta=delta, terms_of=lambda one: terms(num_replies=one.num_replies)
        )
        sampling = FullSampling() if cohort_size is None else FixedSizeSampling(cohort_size=cohort_size)
        super().__init__("NbAFL", books, name="nbafl", sampling=sampling, clip_norm=clip_norm, evaluation=evaluation)

    def with_clients(self, names: tuple[str, ...], num_rounds: int | None) -> Self:
        """Return the rules of a run of these clients and this number of rounds.

        Raises:
            RuntimeError: if the number of rounds is not known, and the downlink noise depends on it.
        """
        if names and not num_rounds and self.paper_epsilon not in (None, math.inf):
            raise RuntimeError(
                "num_rounds: the downlink noise depends on it; call start(), or plan(num_rounds) before the first round"
            )
        return super().with_clients(names, num_rounds)

    @property
    def downlink_noise_std(self) -> float:
        """The std of the paper's downlink noise, for the planned number of rounds; 0 with a proved epsilon.

        A proved epsilon covers all replies of a client. Broadcasts are post-processing of them and cost no more.
        """
        num_rounds = self.books.planned_rounds
        if self.paper_epsilon in (None, math.inf) or self.uplink_exposures is None or not num_rounds:
            return 0.0
        return downlink_noise_std(
            num_clients=self.about.num_clients,
            cohort_size=self.cohort_size,
            num_rounds=num_rounds,
            uplink_exposures=min(self.uplink_exposures, num_rounds),
            epsilon=self.paper_epsilon,
            delta=self.about.delta,
            clip_norm=self.clip_norm,
            min_records=self.min_records,
        )

    def noise_and_signal_norms(self, dimension: int) -> tuple[float, float]:
        """Return the norms of all noise on a broadcast, and of the longest average of weights, for a cohort of equal clients."""
        parts = [1 / self.cohort_size] * self.cohort_size
        return self._broadcast_std(parts, self.added_noise_std(parts)) * math.sqrt(dimension), self.clip_norm

    def next_model(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> ModelUpdate:
        """Return the next broadcast, the noised average of the replies, and its charge."""
        shares = {name: self.books.share(name) for name in collected.clients}
        all_shares = sum(shares.values())
        if not shares:
            # Nothing new is broadcast: the next round starts from the last broadcast.
            return ModelUpdate(vector=now.vector, own=state.own)
        parts = {name: share / all_shares for name, share in shares.items()}
        std = self.added_noise_std(list(parts.values()))
        own, charge = self._broadcast(state, now.server_round, parts, std)
        mean = collected.total / all_shares
        # An average of lattice values with any weights lies on no lattice. The broadcast is rounded to one that is much coarser
        # than the clients' and much finer than the noise, so that it is a rounded value plus Gaussian noise.
        scale = self._broadcast_std(parts.values(), std)
        step = noise.lattice_step(scale, clip_norm=scale, dimension=1) if scale else 0.0
        own_step = min(step, noise.lattice_step(std, clip_norm=std, dimension=1)) / _FINER if std else 0.0
        drawn = noise.gaussian(mean, std, own_step, rng)
        return ModelUpdate(vector=np.asarray(noise.round_to_nearest(mean + drawn, step)), own=own, charges=(charge,))

    def _broadcast_std(self, parts: Iterable[float], std: float) -> float:
        """Return the std of all noise on a broadcast: the server's, and the average of the clients' own."""
        return math.sqrt(std**2 + self.uplink_noise_std**2 * sum(part**2 for part in parts))

    def added_noise_std(self, parts: Sequence[float]) -> float:
        """Return the std of the noise that the server adds to an average with these weights, which sum to 1.

        It is sigma_D for K equal weights. In general the total noise on a broadcast, the server's and the average of the
        clients', is at least max(parts) x K times that of K equal weights. So the ratio of noise to a client's part never falls.
        """
        full = math.sqrt(self.downlink_noise_std**2 + self.uplink_noise_std**2 / self.cohort_size)
        wanted = max(parts) * self.cohort_size * full
        there = self.uplink_noise_std**2 * sum(part**2 for part in parts)
        missing = wanted**2 - there
        # For a full round of equal clients the missing noise is sigma_D, up to rounding.
        return math.sqrt(missing) if missing > 1e-12 * there else 0.0

    def _broadcast(
        self, state: RunState, server_round: int, parts: Mapping[str, float], added_std: float
    ) -> tuple[Broadcasts, Charge]:
        """Return the summary of the broadcasts with this one, and its charge to every client in it.

        Args:
            state: state of the run.
            server_round: round of the broadcast.
            parts: weights of the clients in the average, by name; they sum to 1.
            added_std: std of the noise that the server adds.
        """
        std = self._broadcast_std(parts.values(), added_std)
        two_largest = sorted(parts.values(), reverse=True)[:2]
        left: dict[float, float] = {}
        for part in set(parts.values()):
            # Another client in the average can subtract its own noise; the one with the largest part knows most of the noise.
            others = two_largest[1:] if part == two_largest[0] else two_largest[:1]
            known = self.uplink_noise_std**2 * max(others, default=0.0) ** 2
            left[part] = math.sqrt(max(0.0, std**2 - known))
        before = self.broadcasts(state)
        after = before.after(std=std, participant_std=min(left.values()), added_std=added_std)
        return after, self._broadcast_charge(state.charges, server_round, parts, dict.fromkeys(left, std), left)

    def _broadcast_charge(
        self,
        charges: Charges,
        server_round: int,
        parts: Mapping[str, float],
        stds: Mapping[float, float],
        participant_stds: Mapping[float, float],
    ) -> Charge:
        """Return the charge of a broadcast, which costs nothing against adversaries who see the messages in it already.

        Args:
            charges: charges before the broadcast.
            server_round: round of the broadcast.
            parts: weights of the clients in the average, by name.
            stds: std of all noise on the broadcast, by the weight of a client in it.
            participant_stds: std of the noise that another client does not know, by the weight of a client in it.
        """
        distinct = list(dict.fromkeys(parts.values()))
        return Charge(
            release=BROADCAST,
            number=charges.number(BROADCAST) + 1,
            server_round=server_round,
            fingerprint=f"averages of noised weights, clip_norm={self.clip_norm!r}",
            scope=self.training.scope,
            owners=tuple(parts),
            events=(dp_events.NoOpDpEvent(),) * len(distinct),
            which=tuple(map({part: index for index, part in enumerate(distinct)}.__getitem__, parts.values())),
            views={
                OUTSIDERS: tuple(self._broadcast_event(part, stds[part]) for part in distinct),
                PARTICIPANTS: tuple(self._broadcast_event(part, participant_stds[part]) for part in distinct),
            },
        )

    def planned(self, charges: Charges, server_round: int, names: Sequence[str]) -> Charge:
        """Return the most that a round's broadcast is charged to these clients: K equal weights with the least noise.

        With other weights the noise is at least max(parts) K times as large (`added_noise_std`, K = cohort_size), while no part
        exceeds max(parts). The noise on it that another client knows is at most max(parts) times that client's own.
        """
        part, (std, left) = 1 / self.cohort_size, self._least_stds
        return self._broadcast_charge(charges, server_round, dict.fromkeys(names, part), {part: std}, {part: left})

    @property
    def _least_stds(self) -> tuple[float, float]:
        """The least std of all noise on a broadcast, and of the part of it that another client does not know."""
        part = 1 / self.cohort_size
        std = math.sqrt(self.downlink_noise_std**2 + part * self.uplink_noise_std**2)
        return std, math.sqrt(max(0.0, std**2 - (part * self.uplink_noise_std) ** 2))

    def broadcasts(self, state: RunState) -> Broadcasts:
        """Return the noise on the broadcasts; for rounds that a crash ended, the least noise possible."""
        known, (std, left) = state.own or Broadcasts(), self._least_stds
        for _ in range(state.charges.number(BROADCAST) - known.count):
            known = known.after(std=std, participant_std=left, added_std=self.downlink_noise_std)
        return known

    def broadcast_ledgers(self, charges: Charges, view: str) -> dict[str, History]:
        """Return the charges of the broadcasts to every client, by name.

        Args:
            charges: charges of the run.
            view: `OUTSIDERS`, who see no message of a client, or `PARTICIPANTS`, who know their own noise.
        """
        scope = replace(self.training.scope, view=view)
        return {name: charges.history(scope, name, release=BROADCAST) for name in self.books.terms}

    def _broadcast_event(self, part: float, std: float) -> dp_events.DpEvent:
        return dp_events.GaussianDpEvent(std / (part * self.clip_norm)) if std else dp_events.NonPrivateDpEvent()

    def statement(self, state: RunState, facts: RunFacts) -> PrivacyStatement:
        """Return the statement on all that every client was charged, as three adversaries see it."""
        books, charges = self.books, state.charges
        num_broadcasts, noised = charges.number(BROADCAST), self.broadcasts(state)
        replies = max(self.training.counts(charges).values(), default=0)
        broadcast_ledgers = self.broadcast_ledgers(charges, OUTSIDERS)
        seen = max((ledger.num_charges for ledger in broadcast_ledgers.values()), default=0)
        of_them = f"only the {num_broadcasts} broadcasts, at most {seen} with one client's weights in them, and who took part"
        adversaries = (
            Adversary.of(
                "the server",
                _worst(self, charges, self.ledgers(charges)),
                view=f"every message, at most {replies} of one client; an eavesdropper sees the same",
                lowest_noise_std=self.uplink_noise_std * min(map(books.share, books.terms), default=0.0),
                paper_epsilon=_paper(self, facts, exposures=replies, limit=self.uplink_exposures or 0, what="uplink"),
            ),
            Adversary.of(
                "participants",
                _worst(self, charges, self.broadcast_ledgers(charges, PARTICIPANTS)),
                view=f"{of_them}; each alone, knowing its own noise",
                lowest_noise_std=noised.least_participant_std if num_broadcasts else 0.0,
            ),
            Adversary.of(
                "outsiders",
                _worst(self, charges, broadcast_ledgers),
                view=of_them,
                lowest_noise_std=noised.least_std if num_broadcasts else 0.0,
                paper_epsilon=_paper(self, facts, exposures=num_broadcasts, limit=books.planned_rounds or 0, what="downlink"),
            ),
        )
        who = "all clients" if isinstance(self.sampling, FullSampling) else f"{self.cohort_size} at random"
        return local_statement(
            self,
            state,
            facts,
            paper=adversaries[0].paper_epsilon,
            noise={
                "clip_norm": self.clip_norm,
                "uplink_noise_std": self.uplink_noise_std,
                "downlink_noise_std": self.downlink_noise_std,
                "max_noise_std_added_by_the_server": noised.largest_added_std,
            },
            sampling=f"{who} of {len(books.terms)} in every round, at most {replies} replies per client",
            assumptions=(
                "Clipped weights lie in a ball of radius C, so all records of a client together move a message by at most 2 C. "
                "Epsilon holds for the whole client, and so for each of its records. No smaller bound is proved for one record.",
                "Against participants and outsiders: other clients add their noise and keep it secret; the server adds its own. "
                "A client that adds none lowers the protection of others against them.",
            ),
            adversaries=adversaries,
        )


def _worst(rules: NbAFLRules, charges: Charges, ledgers: Mapping[str, History]) -> PrivacyCost:
    none = PrivacyCost(epsilon=0.0, delta=rules.about.delta, relation=rules.books.relation, accountant="none")
    costs = (rules.total(charges, name, ledger) for name, ledger in ledgers.items())
    return max(costs, key=lambda cost: cost.epsilon, default=none)


def _paper(rules: NbAFLRules, run: RunFacts, *, exposures: int, limit: int, what: str) -> PaperEpsilon | None:
    """Return the epsilon that the paper claims for its noise, with the faults of the claim; None without the paper's noise."""
    if rules.paper_epsilon is None or math.isinf(rules.paper_epsilon):
        return None
    faults = []
    if exposures > limit:
        faults.append(f"{exposures} exposures, and the noise is calibrated for {limit}")
    each = rules.paper_epsilon / max(1, limit)
    if each >= 1:
        faults.append(f"the classical Gaussian formula needs epsilon < 1 for an exposure, which is {each:.4g} here")
    if what == "downlink" and not isinstance(rules.sampling, FullSampling):
        faults.append("Lemma 4 bounds one direction of the privacy loss only")
    if run.seeded_noise:
        faults.append("noise came from a fixed seed")
    assumption = (
        "unit: one record; it assumes, without proof for any training here, that one record moves the weights by at most 2 C / m"
    )
    if what == "uplink" and exposures:
        multiplier = rules.min_records * rules.uplink_noise_std / rules.clip_norm
        event = accounting.repeated(dp_events.GaussianDpEvent(multiplier), exposures)
        exact = accounting.epsilon(event, delta=rules.about.delta, relation=rules.books.relation).epsilon
        assumption += (
            f"; exact composition under that assumption gives {format_epsilon(exact)} for the {exposures} exposures of this run"
        )
    return PaperEpsilon(
        epsilon=rules.paper_epsilon,
        formula=f"Wei et al. 2020, {what} noise for {limit} exposures with linear composition, deltas not added up",
        valid=not faults,
        reason="; ".join([*faults, assumption]),
    )


class NbAFL(DPStrategy):
    """NbAFL, for clients whose recipe is `flower_dp.clients.NbAFLRecipe` with the same numbers.

    In each round all clients, or K of N sampled at random, send their trained weights, clipped to L2 norm C, with noise. The
    server averages them with weights p_i and broadcasts the result. With `paper_epsilon` the noise is the paper's: the clients'
    has std sigma_U = c L (2 C / m) / paper_epsilon, c = sqrt(2 ln(1.25/delta)), and the server adds noise of std sigma_D.

    The p_i are public (data sizes or uniform) and divided by their sum over the clients *whose replies were received*, so that
    they sum to one. That is post-processing of messages with local DP. An average over fewer clients hides a client less from
    adversaries who see broadcasts only, so sigma_D grows then. For any dropouts and any p_i, the ratio of a broadcast's noise to
    any client's part in it is at least that of a full round of equal clients.

    The statement distinguishes adversaries who see a client's messages and those who see the broadcasts only. The ledgers use the
    sensitivity that clipping proves, 2 C for all of a client's records together; the paper's 2 C / m is an assumption.

    Args:
        num_clients: number of clients (paper: N).
        num_records: public data sizes, in records: one number, a sequence in the order of the clients' names, or by name.
        clip_norm: L2 bound of a client's weights (paper: C).
        epsilon: proved upper bound of the cost of all `num_replies` replies of a client; math.inf: no noise, not private. The
            clients' noise is the least that gives it, the same for all clients, and the server adds none.
        paper_epsilon: the paper's epsilon of one record, in place of `epsilon`. It rests on an unproved assumption; math.inf: no
            noise.
        delta: delta of either, and of the statement, in (0, 1).
        uplink_exposures: number of a client's replies for which its noise is made (paper: L), with `paper_epsilon` only.
        cohort_size: clients per round, sampled at random without replacement (paper: K); None: all clients.
        num_replies: maximum replies of a client, after which it gets no requests; must be given with `epsilon`; None:
            `uplink_exposures`.
        min_records: minimum number of records of any client (paper: m); None: the minimum of `num_records`.
        aggregation: `data-size` (p_i = n_i / n) or `uniform`.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.strategies import NbAFL
        >>> strategy = NbAFL(num_clients=10, num_records=600, clip_norm=2.0, epsilon=8.0, delta=1e-3, num_replies=5)
        >>> round(strategy.rules.uplink_noise_std, 4)
        4.2934
    """

    rules: NbAFLRules

    def __init__(
        self,
        *,
        num_clients: int,
        num_records: int | Sequence[int] | Mapping[str, int],
        clip_norm: float,
        epsilon: float | None = None,
        paper_epsilon: float | None = None,
        delta: float,
        uplink_exposures: int | None = None,
        cohort_size: int | None = None,
        num_replies: int | PerClient | None = None,
        min_records: int | None = None,
        aggregation: str = "data-size",
        **options: Unpack[StrategyOptions],
    ) -> None:
        population = Population(
            num_clients=num_clients, num_records=num_records, num_replies=num_replies, aggregation=aggregation
        )
        rules = NbAFLRules(
            population,
            clip_norm=clip_norm,
            epsilon=epsilon,
            paper_epsilon=paper_epsilon,
            delta=delta,
            uplink_exposures=uplink_exposures,
            cohort_size=cohort_size,
            min_records=min_records,
            evaluation=options.get("evaluation"),
        )
        super().__init__(rules, **options)
