"""NbAFL (Wei et al. 2020): clipped weights with noise from every client, and noise on the server's broadcasts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import numpy as np

from flower_dp.core import checks, dp, noise
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, FullSampling
from flower_dp.core.stored import stored
from flower_dp.privacy.charges import Charge, History
from flower_dp.privacy.client_terms import values_in
from flower_dp.privacy.nbafl import downlink_noise_std, weights_terms
from flower_dp.strategies.local_level import LocalRules
from flower_dp.strategies.releases.books import ClientBooks, PerClient, Population
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.strategies.rules import Options
from flower_dp.strategies.statements.nbafl import statement_of
from flower_dp.strategies.strategy import DPStrategy

# The server's noise is drawn on a lattice that is finer than the broadcast's by this factor.
_FINER = 2.0**10


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Broadcast:
    """A noised average that every client received.

    Attributes:
        clients: places, among all clients, of those whose weights are in it.
        parts: of each in the average; they add up to 1.
        added_std: of the noise that the server added.
        std: of all noise on it.
        participant_stds: of the noise that is left for every one of these clients if another one subtracts its own.
    """

    clients: np.ndarray
    parts: np.ndarray
    added_std: float
    std: float
    participant_stds: np.ndarray


class NbAFLRules(LocalRules):
    """The rules of NbAFL, whose arguments `NbAFL` describes; `population` has the others."""

    stock_refusal = "stock clients add no noise of their own; use LocalDPClient or privacy_mod of flower_dp.clients"
    own: tuple[Broadcast, ...] = ()

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
    ) -> None:
        self.paper_epsilon, self.uplink_exposures = paper_epsilon, uplink_exposures
        if epsilon is not None and len(set(values_in(population.num_replies))) > 1:
            raise ValueError(
                f"num_replies={population.num_replies}: with epsilon={epsilon} all clients add the same noise; must be one "
                "number, or give paper_epsilon"
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
        books = ClientBooks(
            population,
            name="nbafl",
            sampling=FullSampling() if cohort_size is None else FixedSizeSampling(cohort_size=cohort_size),
            clip_norm=clip_norm,
            relation="replace-one",
            delta=delta,
            terms_of=lambda one: terms(num_replies=one.num_replies),
        )
        super().__init__("NbAFL", books)

    @property
    def broadcasts(self) -> tuple[Broadcast, ...]:
        """Those of every round that had one."""
        return self.own

    def open(self, names: tuple[str, ...]) -> None:
        """Open the ledgers of every client."""
        super().open(names)
        if not self.books.planned_rounds and self.paper_epsilon not in (None, math.inf):
            raise RuntimeError(
                "num_rounds: the downlink noise depends on it; call start(), or plan(num_rounds) before the first round"
            )

    @property
    def downlink_noise_std(self) -> float:
        """The std of the paper's downlink noise, for the planned number of rounds; 0 with a proved epsilon.

        A proved epsilon covers all replies of a client. Broadcasts are made of them and cost no more.
        """
        num_rounds = self.books.planned_rounds
        if self.paper_epsilon in (None, math.inf) or self.uplink_exposures is None or not num_rounds:
            return 0.0
        return downlink_noise_std(
            num_clients=self.num_clients,
            cohort_size=self.cohort_size,
            num_rounds=num_rounds,
            uplink_exposures=min(self.uplink_exposures, num_rounds),
            epsilon=self.paper_epsilon,
            delta=self.delta,
            clip_norm=self.clip_norm,
            min_records=self.min_records,
        )

    def noise_and_signal(self, dimension: int) -> tuple[float, float]:
        """Return the norms of all noise on a broadcast, and of the longest average of weights; for a cohort of equal clients."""
        parts = [1 / self.cohort_size] * self.cohort_size
        return self._broadcast_std(parts, self.added_noise_std(parts)) * math.sqrt(dimension), self.clip_norm

    def learn(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the next broadcast, the noised average of the replies, and charge it."""
        shares = {name: self.books.share(name) for name in collected.clients}
        all_shares = sum(shares.values())
        if not shares:
            # Nothing new is broadcast: the next round starts from the last broadcast.
            return now.vector
        parts = {name: share / all_shares for name, share in shares.items()}
        std = self.added_noise_std(list(parts.values()))
        self._charge_broadcast(collected.clients, list(parts.values()), std)
        mean = collected.total / all_shares
        # An average of lattice values with any weights lies on no lattice. The broadcast is rounded to one that is much coarser
        # than the clients' and much finer than the noise, so that it is a rounded value plus Gaussian noise.
        step = self._broadcast_step(parts.values(), std)
        own_step = min(step, noise.lattice_step(std, clip_norm=std, dimension=1)) / _FINER if std else 0.0
        drawn = noise.gaussian(mean, std, own_step, rng)
        return np.asarray(noise.nearest(mean + drawn, step))

    def _broadcast_std(self, parts: Iterable[float], std: float) -> float:
        """Return the std of all noise on a broadcast: the server's, and the average of the clients' own."""
        return math.sqrt(std**2 + self.uplink_noise_std**2 * sum(part**2 for part in parts))

    def _broadcast_step(self, parts: Iterable[float], std: float) -> float:
        """Return the step of the lattice of a broadcast, at most 1/1024 of all the noise on it; 0 without noise."""
        scale = self._broadcast_std(parts, std)
        return noise.lattice_step(scale, clip_norm=scale, dimension=1) if scale else 0.0

    def added_noise_std(self, parts: Sequence[float]) -> float:
        """Return the std of the noise that the server adds to an average with these weights, which sum to 1.

        It is sigma_D for K equal weights. In general the total noise on a broadcast, the server's and the average of the
        clients', is at least max(parts) x K times as large as with K equal weights: the ratio of noise to a client's part never
        falls.
        """
        full = math.sqrt(self.downlink_noise_std**2 + self.uplink_noise_std**2 / self.cohort_size)
        wanted = max(parts) * self.cohort_size * full
        there = self.uplink_noise_std**2 * sum(part**2 for part in parts)
        missing = wanted**2 - there
        # For a full round of equal clients the missing noise is sigma_D, up to rounding.
        return math.sqrt(missing) if missing > 1e-12 * there else 0.0

    def _charge_broadcast(self, names: Sequence[str], parts: Sequence[float], std: float) -> None:
        """Charge a broadcast to every client in it."""
        places = {name: place for place, name in enumerate(self.books.terms)}
        total = self._broadcast_std(parts, std)
        two_largest = sorted(parts, reverse=True)[:2]
        left = []
        for part in parts:
            # Another client in the average can subtract its own noise; the one with the largest part knows most of the noise.
            others = two_largest[1:] if part == two_largest[0] else two_largest[:1]
            known = self.uplink_noise_std**2 * max(others, default=0.0) ** 2
            left.append(math.sqrt(max(0.0, total**2 - known)))
        broadcast = Broadcast(
            clients=np.array([places[name] for name in names], np.int64),
            parts=np.array(parts, np.float64),
            added_std=std,
            std=total,
            participant_stds=np.array(left, np.float64),
        )
        self.own = (*self.own, broadcast)

    def unfinished(self, charge: Charge) -> None:
        """Charge the broadcast that the round may have had: that of K equal weights, the one with the least noise.

        With others the noise is at least max(parts) K times as large, for parts of at most max(parts) (`added_noise_std`, K =
        cohort_size), and what another client knows of it is at most max(parts) times its own.
        """
        places = {name: place for place, name in enumerate(self.books.terms)}
        part, num = 1 / self.cohort_size, len(charge.owners)
        std = math.sqrt(self.downlink_noise_std**2 + part * self.uplink_noise_std**2)
        left = math.sqrt(max(0.0, std**2 - (part * self.uplink_noise_std) ** 2))
        broadcast = Broadcast(
            clients=np.array([places[name] for name in charge.owners], np.int64),
            parts=np.full(num, part),
            added_std=self.downlink_noise_std,
            std=std,
            participant_stds=np.full(num, left),
        )
        self.own = (*self.own, broadcast)

    @property
    def broadcast_ledgers(self) -> dict[str, History]:
        """What the broadcasts have cost every client, against those who see no message of a client."""
        return self._charged(lambda broadcast: [broadcast.std] * len(broadcast.clients))

    @property
    def participant_ledgers(self) -> dict[str, History]:
        """What the broadcasts have cost every client, against another client, who knows its own noise."""
        return self._charged(lambda broadcast: broadcast.participant_stds.tolist())

    def _charged(self, stds_of: Callable[[Broadcast], Sequence[float]]) -> dict[str, History]:
        names = list(self.books.terms)
        counts: dict[str, Counter[dp.DpEvent]] = {name: Counter() for name in names}
        for broadcast in self.broadcasts:
            stds = stds_of(broadcast)
            for place, part, std in zip(broadcast.clients.tolist(), broadcast.parts.tolist(), stds, strict=True):
                counts[names[place]][self._broadcast_event(part, std)] += 1
        return {name: History(relation=self.books.relation, counts=own) for name, own in counts.items()}

    def _broadcast_event(self, part: float, std: float) -> dp.DpEvent:
        return dp.GaussianDpEvent(std / (part * self.clip_norm)) if std else dp.NonPrivateDpEvent()

    statement = statement_of


class NbAFL(DPStrategy):
    """NbAFL, for clients whose recipe is `flower_dp.clients.NbAFLRecipe` with the same numbers.

    In each round all clients, or K of N chosen at random, send their trained weights, clipped to L2 norm C, with noise. The
    server averages them with weights p_i and broadcasts the result. With `paper_epsilon` the noise is the paper's: the clients'
    has std sigma_U = c L (2 C / m) / paper_epsilon, c = sqrt(2 ln(1.25/delta)), and the server adds noise of std sigma_D.

    The p_i are public (data sizes or uniform) and divided by their sum over the clients *whose replies were received*, so that
    they add up to one. That is post-processing of messages that are private on their own. An average over fewer clients hides a
    client less from adversaries who see broadcasts only, so sigma_D grows then. For any dropouts and any p_i, the ratio of a
    broadcast's noise to any client's part in it is at least that of a full round of equal clients.

    The statement distinguishes adversaries who see a client's messages and those who see the broadcasts only. The ledgers use the
    sensitivity that clipping proves, 2 C for all of a client's records together; the paper's 2 C / m is an assumption.

    Args:
        num_clients: number of clients (paper: N).
        num_records: public data sizes: one number, a sequence in the order of the clients' names, or by name.
        clip_norm: L2 bound of a client's weights (paper: C).
        epsilon: what all `num_replies` replies of a client cost at most, proved; math.inf: no noise, not private. The clients'
            noise is the least that gives it, the same for all clients, and the server adds none.
        paper_epsilon: in its place, the paper's epsilon of one record, which rests on an unproved assumption; math.inf: no noise.
        delta: of either, and the delta of the statement.
        uplink_exposures: with `paper_epsilon`: the number of a client's replies for which its noise is made (paper: L).
        cohort_size: clients a round, chosen at random without replacement (paper: K); None: all clients.
        num_replies: the most replies of a client, after which it is not asked; must be given with `epsilon`; None:
            `uplink_exposures`.
        min_records: the fewest records of any client (paper: m); None: of `num_records`.
        aggregation: `data-size` (p_i = n_i / n) or `uniform`.
        options: those of every strategy: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.

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
        **options: Unpack[Options],
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
        )
        super().__init__(rules, **options)
