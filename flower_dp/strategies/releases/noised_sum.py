"""One noised sum of clients' clipped rows: its requests, the limits of replies, and the server's part of its noise."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flower_dp.core import checks, compression, noise
from flower_dp.core.metric_bounds import FINER_LATTICE, MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, Sampler
from flower_dp.core.serialization import serializable
from flower_dp.privacy import release as releases
from flower_dp.privacy.charges import ALL_CLIENTS, Charge, Charges, CostScope, History
from flower_dp.privacy.events import Relation
from flower_dp.strategies.releases.adaptive_clip import ClipController
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.limits import ReplyLimits
from flower_dp.strategies.releases.masks import Masks
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.releases.shared_noise import Noise
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import Indicator, Promise, ReleaseRequest

# Standard deviations by which the norm of a Gaussian vector exceeds its mean with a probability of at most e^-50, which is 2e-22.
_NORM_DEVIATIONS = 10.0
# Samplers without a fixed order: cohorts and charges do not depend on earlier rounds and stay valid for a larger population. Any
# other sampler, a user's too, is treated as ordered.
_WITHOUT_ORDER = (FullSampling, PoissonSampling, FixedSizeSampling)
# The view of outsiders, who are no clients.
OUTSIDERS = "outsiders"


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumState:
    """The state of a noised sum before its next round, besides its charges.

    Attributes:
        released: the last noised mean [d], if masks are made from it; None before any.
        clip_norm: clip norm of the next round, if it is adaptive; None before it has moved.
        order: digest of all clients' names in their fixed order; empty before they are known, and for samplers without order.
        noise: secret state of noise that is correlated over rounds; None for noise that is independent in every round.
    """

    released: np.ndarray | None = None
    clip_norm: float | None = None
    order: str = ""
    noise: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSum:
    """The sum of one row of every client of a cohort, each clipped, with Gaussian noise of std noise_multiplier x clip_norm.

    Attributes:
        name: name of the release on the wire: the method's, or that of private evaluations.
        noise: the release, and the split of its noise; with an adaptive clip norm, at the minimum one.
        keep_ratio: fraction of the coordinates kept after the noise, those of largest magnitude.
        quantization_levels: levels above 0 of each client's own noised row; 0 for none.
        masks: maker of the mask that all clients of a round share; None for no mask.
        clip: controller of an adaptive clip norm; None for the fixed one of the release.
        metrics: bounds of the metrics of an evaluation; None in training.
    """

    name: str
    noise: Noise
    keep_ratio: float = 1.0
    quantization_levels: int = 0
    masks: Masks | None = None
    clip: ClipController | None = None
    metrics: MetricBounds | None = None

    @property
    def release(self) -> releases.Release:
        """The noised sum that is released, with all its noise; `noise.events` has what is charged."""
        return self.noise.release

    @property
    def sampling(self) -> Sampler:
        """The sampler of a round's cohort."""
        return self.release.sampler

    @property
    def scope(self) -> CostScope:
        """The unit and relation under which its charges compose."""
        return CostScope(unit=self.release.unit, relation=self.release.relation)

    @property
    def has_fixed_order(self) -> bool:
        """Whether its cohorts and charges follow a fixed order of the clients."""
        return type(self.sampling) not in _WITHOUT_ORDER

    @property
    def cohort_is_secret(self) -> bool:
        """Whether the epsilon holds only if nobody knows who takes part in a round."""
        return self.noise.cohort_is_secret

    @property
    def accepts_new_clients(self) -> bool:
        """Whether more clients than `release.num_units` may take part.

        They may only if neither draws, charges nor noise shares depend on the number of clients: the server adds all noise, and
        every client takes part, or each is drawn independently. In all other cases there are exactly `release.num_units`.
        """
        return self.noise.placement == "central" and type(self.sampling) in (FullSampling, PoissonSampling)

    def state_in(self, state: RunState) -> SumState:
        """Return the part of a run's state that belongs to this release."""
        return state.releases.get(self.name) or SumState()

    def history(self, charges: Charges) -> History:
        """Return the charges of this release alone, against any single client."""
        return charges.history(self.scope, release=self.name)

    # A round

    def cohort(self, state: RunState, names: tuple[str, ...], rng: Generator) -> tuple[np.ndarray, SumState]:
        """Return the indices of the next round's clients. If the order is fixed, the number of charges gives the position in it.

        Round robin uses one order of the clients in the whole run.

        Raises:
            ValueError: if the number of clients is not that of the accounting, or their order has changed: then a client could
                take part more often than it is charged.
        """
        sum_state, number, expected = self.state_in(state), state.charges.number(self.name), self.release.num_units
        if len(names) < expected or (len(names) > expected and not self.accepts_new_clients):
            raise ValueError(
                f"clients: there are {len(names)}, and {self.sampling} with placement={self.noise.placement!r} is accounted for "
                f"num_clients={expected}; set num_clients={len(names)}"
            )
        if self.has_fixed_order:
            order = hashlib.sha256(repr(list(names)).encode()).hexdigest()
            if order != sum_state.order and (sum_state.order or number):
                raise ValueError(
                    f"clients: they are not those with which this run began, in the same order; with {self.sampling} some of "
                    "them would take part more often than they are charged"
                )
            sum_state = replace(sum_state, order=order)
        return self.sampling.sample(number + 1, len(names), rng), sum_state

    def charge(self, charges: Charges, server_round: int, names: Sequence[str]) -> Charge:
        """Return the charge of the next release to every client, with noise shares for this cohort.

        The charge follows from the number of charges so far, not from the number of the round, which a caller may repeat or skip.
        """
        number = charges.number(self.name) + 1
        events = self.noise.events(number, len(names))
        return Charge(
            release=self.name,
            number=number,
            server_round=server_round,
            fingerprint=repr(self.noise),
            scope=self.scope,
            owners=(ALL_CLIENTS,),
            events=(events[""],),
            views={view: (event,) for view, event in events.items() if view},
        )

    def num_kept(self, length: int) -> int:
        """Return how many entries of a row [length] are noised and sent: those of its mask, and those beside the update."""
        size = length - self.num_beside
        return self.num_beside + (size if self.masks is None else compression.num_kept(self.masks.keep_ratio, size))

    @property
    def num_beside(self) -> int:
        """The number of entries of a row beside the update: 1 with an adaptive clip norm, else 0."""
        return int(self.clip is not None)

    def indicator(self, state: SumState) -> Indicator | None:
        """Return the indicator that clients send beside their updates in the next round; None with a fixed clip norm."""
        return None if self.clip is None else self.clip.indicator(state.clip_norm or self.clip.of.initial_clip_norm)

    def clip_norm(self, state: SumState) -> float:
        """Return the L2 bound of one client's update in the next round."""
        indicator = self.indicator(state)
        return self.release.clip_norm if indicator is None else indicator.clip_norm

    def next_noise(self, state: SumState) -> Noise:
        """Return the noise of the next round, around its own clip norm."""
        indicator = self.indicator(state)
        return self.noise if indicator is None else self.noise.with_clip_norm(indicator.joint_norm)

    def ask(self, state: RunState, size: int, names: Sequence[str], rng: Generator) -> tuple[ReleaseRequest, Any, SumState]:
        """Return the request to the clients of a round, noise that is drawn ahead for it, and the next state.

        Every call makes a new mask.
        """
        sum_state, distributed = self.state_in(state), self.noise.placement == "distributed"
        indicator, drawn, length = self.indicator(sum_state), self.next_noise(sum_state), size + self.num_beside
        share, clip_norm = drawn.share_std(len(names)), drawn.release.clip_norm
        mask = None if self.masks is None else self.masks.mask(size, sum_state.released)
        scale = share if distributed else drawn.release.noise_scale
        step = noise.lattice_step(scale, clip_norm=clip_norm, dimension=self.num_kept(length))
        if indicator is not None:  # a coarser step could round most of a small indicator away
            step = min(step, noise.lattice_step(scale, clip_norm=indicator.scale / 2, dimension=1))
        if self.metrics is not None:
            step /= FINER_LATTICE
        begun, kept = drawn.begin(sum_state.noise, state.charges.number(self.name) + 1, self.num_kept(length), rng)
        asked = ReleaseRequest(
            promise=Promise(clip_norm=clip_norm, noise_multiplier=self.noise.promised_multiplier),
            placement=self.noise.placement,
            step=step,
            noise_std=share,
            mask=mask,
            keep_ratio=self.keep_ratio if distributed else 1.0,
            quantization_levels=self.quantization_levels,
            indicator=indicator,
            metrics=self.metrics,
        )
        return asked, begun, replace(sum_state, noise=kept)

    def limits(self, now: RoundRequest) -> ReplyLimits:
        """Return the limits of the replies, from the request alone: clip norm and lattice, or the longest honest sum."""
        ask, length = now.ask, now.length
        clip_norm, indicator = ask.promise.clip_norm, ask.indicator
        mask = _kept_coordinates(ask, length)
        num_kept = length if mask is None else mask.size
        longest_noise = ask.noise_std * (math.sqrt(num_kept) + _NORM_DEVIATIONS)

        def honest_norm(names: Sequence[str]) -> float:
            count = len(names)
            if not ask.quantization_levels:
                return count * clip_norm + math.sqrt(count) * longest_noise
            # Quantization can lengthen a row, and in the worst case all rows have the largest norm and one direction.
            return count * (clip_norm + longest_noise) * compression.qsgd_norm_ratio(num_kept, ask.quantization_levels)

        def honest_indicator(names: Sequence[str]) -> float:
            scale = 0.0 if indicator is None else indicator.scale
            return len(names) * scale / 2 + math.sqrt(len(names)) * _NORM_DEVIATIONS * ask.noise_std

        clipped = clip_norm if indicator is None else indicator.clip_norm
        return ReplyLimits(
            length=length,
            mask=mask,
            clip_norm=clipped if ask.placement == "central" else None,
            honest_indicator=None if indicator is None else honest_indicator,
            step=ask.step,
            honest_norm=honest_norm,
        )

    def noised(
        self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator
    ) -> tuple[np.ndarray, SumState]:
        """Return the noised mean of the updates: the sum with the server's part of the noise, over the *expected* cohort.

        Noise of the same std is on every coordinate of the row. An adaptive clip norm moves by the last one, the indicators'. The
        noise is added to the sum of the replies in place, so that the sum without noise no longer exists.

        Args:
            state: state of the run.
            now: the request of the round.
            collected: the sum of the accepted rows, on the lattice.
            rng: new generator, for this release alone.

        Raises:
            RoundDiscarded: with too few replies for the noise that was charged, or a sum that is not exact.
        """
        ask, total, sum_state = now.ask, collected.total, self.state_in(state)
        kept = _kept_coordinates(ask, total.size)
        part = total if kept is None else total[kept]
        # Noise for the clip norm of the request, not for one that has moved since. Sums of multiples of the step are exact, so
        # what is released is post-processing of the ideal mechanism.
        self.noise.with_clip_norm(ask.promise.clip_norm).add(
            part, now.begun, step=ask.step, num_replies=len(collected.clients), cohort_size=now.cohort_size, rng=rng
        )
        if kept is not None:
            total[kept] = part
        if not noise.is_exact(total, ask.step):
            raise RoundDiscarded("the replies' sum is too large to be exact")
        mean = np.divide(total, self.release.expected_cohort_size, out=total)
        if self.clip is not None and ask.indicator is not None:
            sum_state = replace(sum_state, clip_norm=self.clip.next_clip_norm(ask.indicator, float(mean[-1])))
            mean = mean[:-1]
        if self.keep_ratio < 1 and self.noise.placement == "central":
            mean = compression.decode(compression.top_k(mean.astype(np.float32), self.keep_ratio), mean.size)
        if self.masks is not None:
            sum_state = replace(sum_state, released=np.array(mean))
        return np.asarray(mean), sum_state


def _kept_coordinates(ask: ReleaseRequest, length: int) -> np.ndarray | None:
    """Return the coordinates of a row [length] that the request keeps, by its mask of the update; None for all."""
    if ask.mask is None:
        return None
    size = length - ask.row_length(0)
    return np.concatenate([ask.mask.indices(size), np.arange(size, length)])


def check_relation(relation: Relation, sampling: Sampler, num_clients: int) -> None:
    """Refuse a sampler that is not accounted under this neighboring relation.

    Raises:
        ValueError: for sampling of a fixed size, of a part of the clients, under add-or-remove-one.
    """
    part = isinstance(sampling, FixedSizeSampling) and sampling.cohort_size != num_clients
    if part and relation == "add-or-remove-one":
        raise checks.refusal("relation", "add-or-remove-one", "sampling of a fixed size is accounted under 'replace-one' only")
