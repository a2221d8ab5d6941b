"""Client-level differential privacy: clipped client updates, and Gaussian noise on their sum."""

import math
from dataclasses import replace

import numpy as np
from dp_accounting import ComposedDpEvent

from flower_dp import accounting, checks, compression, wire
from flower_dp.events import Relation
from flower_dp.ledger import Ledger
from flower_dp.mechanisms import Gaussian, gaussian_share
from flower_dp.release import Release
from flower_dp.sampling import FixedSizeSampling, FullSampling, RoundRobinSampling, Sampler
from flower_dp.statement import PrivacyStatement
from flower_dp.strategies.replies import Collected
from flower_dp.strategies.roster import Roster
from flower_dp.strategies.rounds import Round, RoundStrategy
from flower_dp.strategies.stating import state

_SEEN_BY = {
    "central": "everyone who sees global models, the clients among them; the server is trusted",
    "distributed": "everyone who sees sums or global models; who adds up the messages is trusted not to look at single ones",
}


class ClientLevelStrategy(RoundStrategy):
    """One release a round: the sum of client updates, each clipped to L2 norm `clip_norm`, with noise on the sum.

    The noise has std noise_multiplier x clip_norm; the global model moves by the noised sum over the *expected* cohort. Example
    counts weigh nothing, missing and refused replies count as zeros, an empty cohort still pays. Sampling lowers the cost only
    where nothing that leaves tells who takes part: not where shares of noise may be missing from the sum, and not where clients
    choose the coordinates that they send.

    Args:
        clip_norm: L2 bound of one client's update.
        noise_multiplier: std of the noise on the sum / clip_norm; 0 runs without privacy, and the statement says so.
        sampling: who takes part in a round: a sampler of `flower_dp.sampling`.
        num_clients: number of clients; the run waits until that many have registered.
        delta: the delta at which epsilon is stated, in (0, 1).
        target_epsilon: the run ends before the round that would pass it; None for no target.
        relation: neighbouring relation; by default replace-one for fixed-size sampling, else add-or-remove-one.
        placement: `central`: the server adds the noise; `distributed`: every client adds its share to its own update.
        keep_ratio: part of the coordinates kept, those of largest magnitude, after the noise.
        trusted_server: under distributed noise, whether the server adds the shares that missing clients did not; if not, the
            ledger charges the noise that was really there, and counts on no sampling.
        report_client_metrics: as `RoundStrategy`.
        registration_timeout: as `RoundStrategy`.
        noise_seed: as `RoundStrategy`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value, before any client is asked.
    """

    paper_formula = "RDP of the Poisson-subsampled Gaussian (moments accountant)"

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        sampling: Sampler,
        num_clients: int,
        delta: float,
        target_epsilon: float | None = None,
        relation: Relation | None = None,
        placement: str = "central",
        keep_ratio: float = 1.0,
        trusted_server: bool = True,
        report_client_metrics: bool = False,
        registration_timeout: float = 600.0,
        noise_seed: int | None = None,
    ) -> None:
        checks.number("delta", delta, above=0, below=1)
        self.placement = checks.one_of("placement", placement, tuple(_SEEN_BY))
        self.keep_ratio = checks.number("keep_ratio", keep_ratio, above=0, at_most=1)
        self.target_epsilon = None if target_epsilon is None else checks.number("target_epsilon", target_epsilon, above=0)
        self.trusted_server = checks.flag("trusted_server", trusted_server)
        default_relation: Relation = "replace-one" if isinstance(sampling, FixedSizeSampling) else "add-or-remove-one"
        self._relation = accounting.relation_of(relation) if relation else default_relation
        part = isinstance(sampling, FixedSizeSampling) and sampling.cohort_size != num_clients
        if part and self._relation == "add-or-remove-one":
            raise ValueError("relation='add-or-remove-one': sampling of a fixed size is accounted under 'replace-one' only")
        super().__init__(
            sampling=sampling,
            num_clients=num_clients,
            delta=delta,
            report_client_metrics=report_client_metrics,
            registration_timeout=registration_timeout,
            noise_seed=noise_seed,
        )
        self.release = Release(
            what="the noised sum of clipped client updates, and every model made from it",
            seen_by=_SEEN_BY[self.placement],
            unit="client",
            relation=self._relation,
            clip_norm=clip_norm,
            mechanism=Gaussian(noise_multiplier=noise_multiplier),
            sampler=sampling,
            num_clients=num_clients,
        )
        if isinstance(sampling, RoundRobinSampling) and self.placement == "distributed" and not trusted_server:
            raise ValueError(
                "trusted_server=False: round-robin sampling charges the busiest client alone, and can't charge missing noise "
                "to others; use another sampler, or trusted_server=True"
            )
        if self.target_epsilon is not None and noise_multiplier == 0:
            raise ValueError(f"noise_multiplier=0: target_epsilon={target_epsilon} needs noise; set noise_multiplier > 0")

    def _begin(self) -> None:
        super()._begin()
        self.ledger = Ledger(owner="every client", relation=self._relation)
        self.num_weakened = 0
        self._affordable = 0
        self._curve = np.zeros(1)
        self._stated: tuple[tuple[object, ...], PrivacyStatement] | None = None

    # Noise

    @property
    def sparse_messages(self) -> bool:
        """Whether every client chooses the coordinates that it sends from its own noised update."""
        return self.placement == "distributed" and self.keep_ratio < 1

    @property
    def cohort_shows(self) -> bool:
        """Whether what leaves tells who takes part: by the coordinates sent, or by how much noise is missing from the sum."""
        return self.sparse_messages or (self.placement == "distributed" and not self.trusted_server)

    @property
    def charged(self) -> Release:
        """The release that the ledger charges: what can be proved of what leaves."""
        release = self.release
        if self.cohort_shows and not isinstance(release.sampler, RoundRobinSampling):
            # A client that is not drawn can be told from one whose update is zero: no amplification by sampling.
            release = replace(release, sampler=FullSampling())
        if self.sparse_messages:
            # A sum of such messages is no function of the noised sum: only the client's own share of noise protects it.
            share = gaussian_share(release.mechanism.noise_multiplier, max(1, math.ceil(self.expected_cohort)))
            release = replace(release, mechanism=Gaussian(noise_multiplier=share))
        return release

    def _share(self, cohort_size: int) -> float:
        """Std of the noise that each of a cohort's clients adds to its own update."""
        if self.placement == "central":
            return 0.0
        if self.sparse_messages:
            return self.charged.noise_scale
        # By the cohort that was drawn, so that the noise of the sum has the same std whoever is in it: a std that depends on
        # whether one client takes part would itself tell of that client.
        return gaussian_share(self.release.noise_scale, cohort_size)

    def _server_noise_std(self, heard: int, cohort_size: int) -> float:
        """Std of the noise that the server adds to the sum of the updates that came back."""
        if self.placement == "central":
            return self.release.noise_scale
        if self.cohort_shows:
            return 0.0
        return self.release.noise_scale * math.sqrt((cohort_size - heard) / cohort_size if cohort_size else 1.0)

    def _next_vector(self, now: Round, collected: Collected) -> np.ndarray:
        heard = len(collected.clients)
        self._settle(now.server_round, heard, now.cohort_size)
        noise = self.release.mechanism.noise(collected.total, self._server_noise_std(heard, now.cohort_size), self.rng)
        mean = (collected.total + noise) / self.expected_cohort
        if self.keep_ratio < 1 and self.placement == "central":
            mean = compression.decode(compression.top_k(mean.astype(np.float32), self.keep_ratio), mean.size)
        return self._sane(now.vector + mean, now.vector, now.server_round)

    # Clients

    def _fits(self, roster: Roster) -> str | None:
        if self.placement == "distributed" and not roster.hosting:
            return "placement='distributed': stock clients add no noise; use flower_dp.clients, or placement='central'"
        return None

    def _server_clip_norm(self) -> float | None:
        return self.release.clip_norm if self.placement == "central" else None

    def _instruction(self, server_round: int, names: tuple[str, ...], cohort_size: int) -> wire.Instruction:
        return wire.Instruction(
            server_round=server_round,
            clients=names,
            clip_norm=self.release.clip_norm,
            noise_multiplier=self.release.mechanism.noise_multiplier,
            noise_std=self._share(cohort_size),
            keep_ratio=self.keep_ratio if self.placement == "distributed" else 1.0,
            report_metrics=self.report_client_metrics,
        )

    # Cost

    def _plan(self, num_rounds: int) -> None:
        events, delta, relation = self.charged.events, self.delta, self._relation
        self._curve = accounting.curve(events, num_rounds=num_rounds, delta=delta, relation=relation)
        self._affordable = num_rounds
        if self.target_epsilon is not None and self._curve[-1] > self.target_epsilon:
            self._affordable = accounting.affordable(
                events, epsilon=self.target_epsilon, delta=delta, relation=relation, limit=num_rounds
            )

    def _why_stop(self, server_round: int) -> str | None:
        if self.target_epsilon is None:
            return None
        pays = server_round <= self._affordable
        if self.num_weakened:
            ahead = ComposedDpEvent([self.ledger.event, self.charged.event(server_round)])
            pays = accounting.epsilon(ahead, delta=self.delta, relation=self._relation).epsilon <= self.target_epsilon
        return None if pays else f"it would pass target_epsilon={self.target_epsilon:g}"

    def _charge(self, server_round: int, names: tuple[str, ...]) -> None:
        self.ledger.charge(self.charged.event(server_round))

    def _settle(self, server_round: int, heard: int, cohort_size: int) -> None:
        """Charge what was really added where shares of noise are missing and nobody may top them up."""
        if self.placement == "central" or self.trusted_server or self.sparse_messages or heard in (0, cohort_size):
            return
        weaker = Gaussian(noise_multiplier=self.release.mechanism.noise_multiplier * math.sqrt(heard / cohort_size))
        self.ledger.amend(self.charged.event(server_round), replace(self.charged, mechanism=weaker).event(server_round))
        self.num_weakened += 1

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute; the statement has the tight value."""
        if self.seeded_noise:
            return math.inf
        if not self.num_weakened and self.ledger.num_charges < len(self._curve):
            return float(self._curve[self.ledger.num_charges])
        return accounting.epsilon(self.ledger.event, delta=self.delta, relation=self._relation, grid=1e-3).epsilon

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement of all that was released so far."""
        key = (*self.ledger.lines(), self.ledger.num_charges, *self._told())
        if self._stated is None or self._stated[0] != key:
            self._stated = (key, state(self))
        return self._stated[1]
