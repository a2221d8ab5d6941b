"""Local differential privacy: every client's message is private on its own, and every client has a ledger of its own."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from flower_dp.privacy import accounting
from flower_dp.core import checks
from flower_dp import wire
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.events import Relation
from flower_dp.privacy.ledger import Ledger
from flower_dp.core.sampling import Sampler
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.local_statement import state
from flower_dp.strategies.replies import Bounds, Collected
from flower_dp.strategies.roster import Roster
from flower_dp.strategies.rounds import Round, RoundStrategy
from flower_dp.privacy.client_terms import Terms, per_client, values_in

AGGREGATIONS = ("data-size", "uniform")
# Of the norm of a noise vector, above its mean: e^-60 is 1e-26.
_NORM_DEVIATIONS = 60.0
PerClient = Sequence[float] | Mapping[str, float]


class LocalLevelStrategy(RoundStrategy):
    """Rounds of clients who add their own noise in full, each under its own budget.

    The server charges a client's ledger when it asks the client, and no longer asks who has sent as many replies as its budget
    pays for; the others go on. The client keeps an account of its own and refuses by it: the server's ledgers are what the
    statement is computed from, not what protects the client. Replies are weighted with public numbers only.

    A client that sends updates without noise, or without clipping, can't be told from an honest one: under local noise nothing
    that the server sees depends on it in a known way. It gives up its own privacy, and can move the model as far as it likes.

    Args:
        sampling: who is asked in a round: a sampler of `flower_dp.core.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated, in [0, 1).
        num_records: public data sizes: one number, a sequence in the order of the clients' names, or a mapping by name.
        num_replies: the most replies of a client; one number, a sequence or a mapping; None: as many as the sampler can ask.
        aggregation: `data-size`: clients weigh as their public data sizes; `uniform`: all the same.
        relation: neighbouring relation of the ledgers.
        report_client_metrics: as `RoundStrategy`.
        registration_timeout: as `RoundStrategy`.
        noise_seed: as `RoundStrategy`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.
    """

    def __init__(
        self,
        *,
        sampling: Sampler,
        num_clients: int,
        delta: float,
        num_records: int | PerClient,
        num_replies: int | PerClient | None,
        aggregation: str,
        relation: Relation,
        report_client_metrics: bool = False,
        registration_timeout: float = 600.0,
        noise_seed: int | None = None,
    ) -> None:
        self.aggregation = checks.one_of("aggregation", aggregation, AGGREGATIONS)
        self.relation = accounting.relation_of(relation)
        for size in values_in(num_records):
            checks.integer("num_records", size, at_least=1)
        for replies in [] if num_replies is None else values_in(num_replies):
            checks.integer("num_replies", replies, at_least=1)
        for field, value in (("num_records", num_records), ("num_replies", num_replies)):
            check_count(field, value, num_clients)
        self._num_records = num_records
        self._num_replies = num_replies
        super().__init__(
            sampling=sampling,
            num_clients=num_clients,
            delta=delta,
            report_client_metrics=report_client_metrics,
            registration_timeout=registration_timeout,
            noise_seed=noise_seed,
        )

    def _begin(self) -> None:
        super()._begin()
        self.num_rounds = 0
        self.num_unasked = 0
        self.terms: dict[str, Terms] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.num_records: dict[str, int] = {}
        self._all_records = 0
        self._planned_rounds: int | None = None
        self._costs: dict[tuple[float, tuple[str, ...]], Cost] = {}
        self._stated: tuple[tuple[object, ...], PrivacyStatement] | None = None

    # What a method says

    @abstractmethod
    def _terms(self, name: str, num_records: int, num_replies: int) -> Terms:
        """Return the terms that were agreed with a client."""

    @abstractmethod
    def _weight(self, share: float) -> float:
        """Return what a client's row counts in a sum, for its share of all data (or 1 / num_clients under `uniform`)."""

    @abstractmethod
    def _most_replies(self, num_rounds: int) -> int:
        """Return how many replies of one client the method plans with where no number is given."""

    # The round

    def _plan(self, num_rounds: int) -> None:
        self._planned_rounds = num_rounds

    def _call_roll(self, grid: Grid) -> Roster:
        known = self._roster is not None
        roster = super()._call_roll(grid)
        if not known:
            self._open(roster.names)
        return roster

    def _open(self, names: tuple[str, ...]) -> None:
        """Open a ledger for every client, on the terms that were agreed with it."""
        if self._num_replies is None and self._planned_rounds is None:
            raise RuntimeError("num_replies: the number of rounds is not known yet; call start(), or name num_replies")
        replies = self._num_replies
        if replies is None:
            replies = max(1, self._most_replies(self._planned_rounds or 0))
        self.num_records = per_client("num_records", self._num_records, names)
        self._all_records = sum(self.num_records.values())
        each = per_client("num_replies", replies, names)
        self.terms = {name: self._terms(name, self.num_records[name], each[name]) for name in names}
        self.ledgers = {name: Ledger(owner=name, relation=self.relation) for name in names}

    def _fits(self, roster: Roster) -> str | None:
        if not roster.hosting:
            return f"{self.method}: stock clients add no noise of their own; use flower_dp.clients.LocalDPClient"
        return super()._fits(roster)

    def can_pay(self, name: str) -> bool:
        """Tell whether a client's budget has one more reply in it."""
        return self.ledgers[name].num_charges < self.terms[name].num_replies

    def _cohort(self, server_round: int, roster: Roster) -> np.ndarray:
        chosen = super()._cohort(server_round, roster)
        able = np.asarray([index for index in chosen if self.can_pay(roster.names[index])], dtype=chosen.dtype)
        self.num_unasked += len(chosen) - len(able)
        return able

    def _why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        if any(self.can_pay(name) for name in self.ledgers):
            return None
        return "every client's budget is spent"

    def _charge(self, server_round: int, names: tuple[str, ...]) -> None:
        self.num_rounds += 1
        for name in names:
            self.ledgers[name].charge(self.terms[name].event)

    def _share(self, name: str) -> float:
        """Return a client's public share of the average over all clients."""
        if self.aggregation == "uniform":
            return 1 / self.num_clients
        return self.num_records[name] / self._all_records

    def _instruction(self, server_round: int, names: tuple[str, ...], cohort_size: int) -> wire.Instruction:
        releases = [self.terms[name].release for name in names]
        order = wire.LocalOrder(
            weights=tuple(self._weight(self._share(name)) for name in names),
            terms=tuple(self.terms[name].kind for name in names),
            noise_multipliers=tuple(release.mechanism.noise_multiplier for release in releases),
        )
        return wire.Instruction(
            server_round=server_round,
            method=self.name,
            clients=names,
            clip_norm=releases[0].clip_norm,
            # Clients work by their own; the least of them, for policies that ask for some noise at all.
            noise_multiplier=min(release.mechanism.noise_multiplier for release in releases),
            report_metrics=self.report_client_metrics,
            order=asdict(order),
        )

    def _bounds(self, now: Round) -> Bounds:
        size = now.layout.size

        def honest_norm(names: Sequence[str]) -> float:
            total = 0.0
            for name in names:
                release = self.terms[name].release
                # A row is a noised sum, over its denominator for a mean; Laplace vectors are up to twice as long, and spread more.
                noise = release.noise_scale * (2 * math.sqrt(size) + _NORM_DEVIATIONS)
                contributions = 1.0 if release.unit == "client" else self.num_records[name]
                row = (contributions * release.clip_norm + noise) / (1.0 if release.unit == "client" else release.expected_cohort)
                total += self._weight(self._share(name)) * row
            return total

        return Bounds(clip_norm=None, step=0.0, honest_norm=honest_norm)

    def _bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return the mean of what came up: messages carry their own noise, and who takes part is public."""
        return collected.num_bytes / len(collected.clients) if collected.clients else 0.0

    # Cost

    def cost(self, ledger: Ledger, *, grid: float = 1e-5) -> Cost:
        """Return the cost of a ledger; equal ledgers are accounted once. A coarser grid would show more than a small budget."""
        key = (grid, (ledger.relation, *ledger.lines()))
        if key not in self._costs:
            self._costs[key] = accounting.epsilon(ledger.event, delta=self.delta, relation=ledger.relation, grid=grid)
        return self._costs[key]

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all replies so far to the client who paid most; the statement has the tight value."""
        if self.seeded_noise:
            return math.inf
        return max((self.cost(ledger, grid=1e-4).epsilon for ledger in self.ledgers.values()), default=0.0)

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement of all that was released so far."""
        key = (self.num_rounds, len(self.rounds), self.num_unasked, *self._told())
        if self._stated is None or self._stated[0] != key:
            self._stated = (key, self._state())
        return self._stated[1]

    def _state(self) -> PrivacyStatement:
        return state(self)


def check_count(field: str, value: Any, num_clients: int) -> None:
    """Refuse a sequence or mapping that doesn't have one value a client."""
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str) and len(value) != num_clients:
        raise ValueError(f"{field}: has {len(value)} values: must have one for each of the {num_clients} clients")
