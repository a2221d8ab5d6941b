"""One noised sum of clients' clipped rows: what it asks, the limits of replies, and the server's part of its noise."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flower_dp.core import compression, dp, noise
from flower_dp.core.metric_bounds import FINER_LATTICE, MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, Sampler
from flower_dp.core.stored import stored
from flower_dp.privacy.charges import EVERY_CLIENT, Charge, Scope, frozen
from flower_dp.privacy.events import Relation
from flower_dp.privacy.release import Release
from flower_dp.strategies.releases.adaptive_clip import MovingClip
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.masks import Masks
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.strategies.releases.shared_noise import SharedNoise
from flower_dp.wire import Ask, Indicator, Promise

# More standard deviations above its mean than the norm of a Gaussian vector ever is: e^-50 is 2e-22.
_NORM_DEVIATIONS = 10.0
# Whose cohorts and charges are the same whatever rounds came before, and hold for more clients than were accounted for. Any other
# sampler, of a user's own too, is taken for one whose charges follow from whose turn it is.
_WITHOUT_ORDER = (FullSampling, PoissonSampling, FixedSizeSampling)


@stored
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumState:
    """What a noised sum has released in a run.

    Attributes:
        shares: for every charge, in how many shares its noise was drawn (`SharedNoise.shares`); the events follow from it.
        released: the last noised mean [d], where masks are made of it; None before any.
        clip_norm: of the next round, where it is adaptive; None before it has moved.
        kind: the release that was charged, as text: what the charges cost follows from it.
        order: a digest of the names of all clients in their order, where whose turn it is follows from it; empty before they are
            known, and for other samplers.
    """

    shares: tuple[int, ...] = ()
    released: np.ndarray | None = None
    clip_norm: float | None = None
    kind: str = ""
    order: str = ""


@dataclass(slots=True, kw_only=True)
class NoisedSum:
    """The sum of one row of every client of a cohort, each clipped, with Gaussian noise of std noise_multiplier x clip_norm.

    Only its `state` changes in a run.

    Attributes:
        name: of the release on the wire: the method's, or that of private evaluations.
        shared: the release, and who draws which part of its noise; with an adaptive clip norm, at the smallest one.
        keep_ratio: part of the coordinates kept, those of largest magnitude, after the noise.
        quantization_levels: levels above 0 of each client's own noised row; 0 for none.
        masks: makes the mask that all clients of a round share; None for no mask.
        clip: an adaptive clip norm; None for the fixed one of the release.
        metrics: of an evaluation; None in training.
        state: what was released so far.
    """

    name: str
    shared: SharedNoise
    keep_ratio: float = 1.0
    quantization_levels: int = 0
    masks: Masks | None = None
    clip: MovingClip | None = None
    metrics: MetricBounds | None = None
    state: SumState = field(default_factory=SumState)

    @property
    def release(self) -> Release:
        """What is released."""
        return self.shared.release

    @property
    def sampling(self) -> Sampler:
        """Who takes part in a round."""
        return self.release.sampler

    @property
    def num_charged(self) -> int:
        """How often it was charged."""
        return len(self.state.shares)

    @property
    def kind(self) -> str:
        """What is charged, as text."""
        return repr(self.shared)

    @property
    def in_order(self) -> bool:
        """Whether its cohorts and charges follow from whose turn it is."""
        return type(self.sampling) not in _WITHOUT_ORDER

    @property
    def secret_cohort(self) -> bool:
        """Whether the epsilon counts on nobody knowing who takes part in a round."""
        return self.shared.secret_cohort

    @property
    def open_population(self) -> bool:
        """Whether more clients than `release.num_clients` may take part.

        They may only if neither draws, charges nor shares of noise depend on the number of clients: the server adds all noise,
        and every client takes part, or each is drawn independently. In all other cases there are exactly `release.num_clients`.
        """
        return self.shared.placement == "central" and type(self.sampling) in (FullSampling, PoissonSampling)

    # A round

    def open(self, names: Sequence[str]) -> None:
        """Check the number of clients; in round robin remember their order, which is the same in all of a run.

        Raises:
            ValueError: if their number is not that of the accounting, or the order is another one than before: then clients could
                have more turns than they are charged for.
        """
        expected = self.release.num_clients
        if len(names) < expected or (len(names) > expected and not self.open_population):
            raise ValueError(
                f"clients: there are {len(names)}, and {self.sampling} with placement={self.shared.placement!r} is accounted for "
                f"num_clients={expected}; set num_clients={len(names)}"
            )
        if not self.in_order:
            return
        order = hashlib.sha256(repr(list(names)).encode()).hexdigest()
        if order != self.state.order and (self.state.order or self.state.shares):
            raise ValueError(
                f"clients: they are not those with which this run began, in the same order; with {self.sampling} some of them "
                "would have more turns than they are charged for"
            )
        self.state = replace(self.state, order=order)

    def cohort(self, names: tuple[str, ...], rng: Generator) -> np.ndarray:
        """Return the indices of the clients of the next round; whose turn it is follows from the charges, as their cost does.

        Raises:
            ValueError: as `open`.
        """
        self.open(names)
        return self.sampling.choose(self.num_charged + 1, len(names), rng)

    def next_charge(self, names: Sequence[str], server_round: int = 0) -> Charge:
        """Return what the next release costs every client, as the shares of its noise are computed for this cohort.

        What it costs follows from how often this release was charged, and not from the number of a round, which a caller may
        repeat or skip.
        """
        number, shares = self.num_charged + 1, self.shared.shares(len(names))
        return Charge(
            release=self.name,
            number=number,
            server_round=server_round or self.num_charged + 1,
            kind=self.kind,
            scope=Scope(unit=self.release.unit, relation=self.release.relation),
            owners=(EVERY_CLIENT,),
            events=(self._event(shares, number, outside=False),),
            shares=shares,
            views={"outsiders": (self._event(shares, number, outside=True),)},
        )

    def take(self, charge: Charge) -> None:
        """Charge a round: its cost follows from its number and its shares."""
        charge.check_next(release=self.name, num_charged=self.num_charged, kind=self.kind)
        self.state = replace(self.state, shares=(*self.state.shares, charge.shares), kind=charge.kind)

    def go_on(self, state: SumState | None) -> None:
        """Go on from an earlier state; None: from none.

        Raises:
            ValueError: if another release was charged, for example with other noise: its charges would get another cost.
        """
        state = SumState() if state is None else state
        if state.shares and state.kind != self.kind:
            raise ValueError(f"state: what was charged is {state.kind}, and this strategy releases {self.shared!r}")
        self.state = state

    def counts(self, *, outside: bool = False) -> Counter[dp.DpEvent]:
        """Return how often each event was charged so far: as any single client sees it, or those who are no clients."""
        # In any order the rounds with as many shares cost the same; in turn each costs by its own number.
        kinds = Counter((shares, number if self.in_order else 1) for number, shares in enumerate(self.state.shares, start=1))
        found: Counter[dp.DpEvent] = Counter()
        for (shares, number), count in kinds.items():
            found[frozen(self._event(shares, number, outside=outside))] += count
        return found

    def _event(self, shares: int, number: int, *, outside: bool) -> dp.DpEvent:
        """Return what one charge costs: as any single client sees it, or those who are no clients."""
        release = self.shared.outside if outside else self.shared.without_one_of(shares)
        return release.event(number if self.in_order else 1)

    def row_length(self, size: int) -> int:
        """Return the length of a client's row, given that of its update: one more with an adaptive clip norm."""
        return size + self._num_beside

    def num_kept(self, length: int) -> int:
        """Return how many coordinates of a row [length] are noised and sent: those of its mask, and what is beside the update."""
        size = length - self._num_beside
        return self._num_beside + (size if self.masks is None else compression.num_kept(self.masks.keep_ratio, size))

    @property
    def _num_beside(self) -> int:
        return int(self.clip is not None)

    @property
    def indicator(self) -> Indicator | None:
        """What clients send beside their updates in the next round; None with a fixed clip norm."""
        return None if self.clip is None else self.clip.indicator(self.state.clip_norm or self.clip.of.initial)

    @property
    def clip_norm(self) -> float:
        """L2 bound of one client's update in the next round."""
        return self.release.clip_norm if self.indicator is None else self.indicator.clip_norm

    @property
    def next_release(self) -> Release:
        """The release of the next round, around its own clip norm."""
        return self._next_shared.release

    @property
    def _next_shared(self) -> SharedNoise:
        return self.shared if self.indicator is None else self.shared.at(self.indicator.joint_norm)

    def ask(self, length: int, names: Sequence[str]) -> Ask:
        """Return what is asked of the clients of a round; a mask is made anew.

        Args:
            length: of a row.
            names: of the clients that are asked.
        """
        distributed = self.shared.placement == "distributed"
        indicator, shared = self.indicator, self._next_shared
        share, clip_norm = shared.share(len(names)), shared.release.clip_norm
        mask = None if self.masks is None else self.masks.mask(length - self._num_beside, self.state.released)
        scale = share if distributed else shared.release.noise_scale
        step = noise.lattice_step(scale, clip_norm=clip_norm, dimension=self.num_kept(length))
        if indicator is not None:  # else rounding could take most of a small indicator
            step = min(step, noise.lattice_step(scale, clip_norm=indicator.scale / 2, dimension=1))
        if self.metrics is not None:
            step /= FINER_LATTICE
        return Ask(
            promise=Promise(clip_norm=clip_norm, noise_multiplier=self.release.mechanism.noise_multiplier),
            placement=self.shared.placement,
            step=step,
            noise_std=share,
            mask=mask,
            keep_ratio=self.keep_ratio if distributed else 1.0,
            quantization_levels=self.quantization_levels,
            indicator=indicator,
            metrics=self.metrics,
        )

    def limits(self, now: Round) -> Limits:
        """Return the limits of the replies, from what was asked alone: clip norm and lattice, or the longest honest sum."""
        ask, length = now.ask, now.length
        clip_norm, indicator = ask.promise.clip_norm, ask.indicator
        mask = _kept(ask, length)
        num_kept = length if mask is None else mask.size
        longest_noise = ask.noise_std * (math.sqrt(num_kept) + _NORM_DEVIATIONS)

        def honest_norm(names: Sequence[str]) -> float:
            count = len(names)
            if not ask.quantization_levels:
                return count * clip_norm + math.sqrt(count) * longest_noise
            # Quantisation can lengthen a row; each row has the largest norm.
            return count * (clip_norm + longest_noise) * compression.qsgd_norm_ratio(num_kept, ask.quantization_levels)

        def honest_indicator(names: Sequence[str]) -> float:
            scale = 0.0 if indicator is None else indicator.scale
            return len(names) * scale / 2 + math.sqrt(len(names)) * _NORM_DEVIATIONS * ask.noise_std

        clipped = clip_norm if indicator is None else indicator.clip_norm
        return Limits(
            length=length,
            mask=mask,
            clip_norm=clipped if ask.placement == "central" else None,
            honest_indicator=None if indicator is None else honest_indicator,
            step=ask.step,
            honest_norm=honest_norm,
        )

    def keep(self, released: np.ndarray) -> None:
        """Keep the noised mean [d] of which the next mask is made."""
        if self.masks is not None:
            self.state = replace(self.state, released=released.copy())

    def bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return the mean of what the clients say that each would send alone, where epsilon rests on every single message.

        Else the bytes of a dense update: what is really sent may depend on data that a noised sum hides, or tell the size of a
        secret cohort.
        """
        if self.shared.lossy_messages and collected.clients:
            return collected.payload_bytes / len(collected.clients)
        return 4.0 * self.num_kept(now.length)

    def noised(self, ask: Ask, total: np.ndarray, *, num_replies: int, cohort_size: int, rng: Generator) -> np.ndarray:
        """Return the noised mean of the updates: the sum with the server's part of the noise, over the *expected* cohort.

        Noise of the same std is on every coordinate of the row. An adaptive clip norm moves by the last one, the indicators'.

        Args:
            ask: what was asked.
            total: the sum of the accepted rows, on the lattice; the noise is added to it in place, so that it is there no more.
            num_replies: how many clients it has.
            cohort_size: how many were asked.
            rng: fresh, for this release alone.

        Raises:
            RoundLeftOut: with too few replies for the noise that was charged, or a sum that is not exact.
        """
        if self.shared.too_few(num_replies, cohort_size):
            raise RoundLeftOut(f"{num_replies} of {cohort_size} clients answered, too few for the noise that was charged")
        if self.shared.too_many(num_replies):
            shares = self.shared.most_shares
            raise RoundLeftOut(f"{num_replies} clients answered, and the noise has {shares} shares: it would tell how many")
        # Of the clip norm that was asked, not of one that has moved since.
        std = self.shared.at(ask.promise.clip_norm).server_std(num_replies)
        # Exact sums of multiples of the step: what is released is post-processing of the ideal mechanism.
        kept = slice(None) if ask.mask is None else _kept(ask, total.size)
        total[kept] += noise.gaussian(total[kept], std, ask.step, rng)
        if not noise.exact(total, ask.step):
            raise RoundLeftOut("the replies' sum is too large to be exact")
        mean = np.divide(total, self.release.expected_cohort, out=total)
        if self.clip is not None and ask.indicator is not None:
            self.state = replace(self.state, clip_norm=self.clip.moved(ask.indicator, float(mean[-1])))
            mean = mean[:-1]
        if self.keep_ratio < 1 and self.shared.placement == "central":
            mean = compression.decode(compression.top_k(mean.astype(np.float32), self.keep_ratio), mean.size)
        return np.asarray(mean)


def _kept(ask: Ask, length: int) -> np.ndarray | None:
    """Return the coordinates of a row [length] that the ask keeps: its mask is of the update alone; None for all."""
    if ask.mask is None:
        return None
    size = length - ask.row_length(0)
    return np.concatenate([ask.mask.indices(size), np.arange(size, length)])


def check_relation(relation: Relation, sampling: Sampler, num_clients: int) -> None:
    """Refuse a sampler that is not accounted under this neighbouring relation.

    Raises:
        ValueError: for sampling of a fixed size, of a part of the clients, under add-or-remove-one.
    """
    part = isinstance(sampling, FixedSizeSampling) and sampling.cohort_size != num_clients
    if part and relation == "add-or-remove-one":
        raise ValueError("relation='add-or-remove-one': sampling of a fixed size is accounted under 'replace-one' only")
