"""One noised sum of clients' clipped rows: what it asks, the limits of replies, and the server's part of its noise."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flower_dp.core import compression, noise
from flower_dp.core.metric_bounds import FINER_LATTICE, MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, Sampler
from flower_dp.core.stored import stored
from flower_dp.privacy.events import Relation
from flower_dp.privacy.ledger import Ledger
from flower_dp.privacy.release import Release
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.masks import Masks
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.strategies.releases.shared_noise import SharedNoise
from flower_dp.wire import Ask, Promise

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
    """

    shares: tuple[int, ...] = ()
    released: np.ndarray | None = None


@dataclass(slots=True, kw_only=True)
class NoisedSum:
    """The sum of one row of every client of a cohort, each clipped, with Gaussian noise of std noise_multiplier x clip_norm.

    Only its `state` changes in a run.

    Attributes:
        name: of the release on the wire: the method's, or that of private evaluations.
        shared: the release, and who draws which part of its noise.
        keep_ratio: part of the coordinates kept, those of largest magnitude, after the noise.
        quantization_levels: levels above 0 of each client's own noised row; 0 for none.
        masks: makes the mask that all clients of a round share; None for no mask.
        metrics: of an evaluation; None in training.
        state: what was released so far.
    """

    name: str
    shared: SharedNoise
    keep_ratio: float = 1.0
    quantization_levels: int = 0
    masks: Masks | None = None
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
    def in_order(self) -> bool:
        """Whether its cohorts and charges follow from whose turn it is."""
        return type(self.sampling) not in _WITHOUT_ORDER

    @property
    def secret_cohort(self) -> bool:
        """Whether the epsilon counts on nobody knowing how many clients take part in a round."""
        return self.shared.secret_cohort

    @property
    def open_population(self) -> bool:
        """Whether clients that come later may take part.

        Every known client is drawn with the sampling rate that is accounted, or a smaller one, whatever their number; only in
        round robin would another number change whose turn it is.
        """
        return not self.in_order

    # A round

    def cohort(self, names: tuple[str, ...], rng: Generator) -> np.ndarray:
        """Return the indices of the clients of the next round; whose turn it is follows from the charges, as their cost does."""
        return self.sampling.choose(self.num_charged + 1, len(names), rng)

    def charge(self, names: Sequence[str]) -> None:
        """Charge a round with this cohort, as its shares of the noise are computed.

        What it costs follows from how often this release was charged, and not from the number of a round, which a caller may
        repeat or skip.
        """
        self.state = replace(self.state, shares=(*self.state.shares, self.shared.shares(len(names))))

    def charge_to(self, ledger: Ledger, *, outside: bool = False) -> None:
        """Charge all rounds so far to a ledger: as any single client sees them, or those who are no clients."""
        # In any order the rounds with as many shares cost the same; in turn each costs by its own number.
        kinds = Counter((shares, number if self.in_order else 1) for number, shares in enumerate(self.state.shares, start=1))
        for (shares, number), count in kinds.items():
            release = self.shared.outside if outside else self.shared.without_one_of(shares)
            ledger.charge(release.event(number), count)

    def num_kept(self, length: int) -> int:
        """Return how many coordinates of a row [length] are noised and sent."""
        return length if self.masks is None else compression.num_kept(self.masks.keep_ratio, length)

    def ask(self, length: int, names: Sequence[str]) -> Ask:
        """Return what is asked of the clients of a round; a mask is made anew.

        Args:
            length: of a row.
            names: of the clients that are asked.
        """
        distributed = self.shared.placement == "distributed"
        share = self.shared.share(len(names))
        mask = None if self.masks is None else self.masks.mask(length, self.state.released)
        scale = share if distributed else self.release.noise_scale
        step = noise.lattice_step(scale, clip_norm=self.release.clip_norm, dimension=self.num_kept(length))
        if self.metrics is not None:
            step /= FINER_LATTICE
        return Ask(
            promise=Promise(clip_norm=self.release.clip_norm, noise_multiplier=self.release.mechanism.noise_multiplier),
            placement=self.shared.placement,
            step=step,
            noise_std=share,
            mask=mask,
            keep_ratio=self.keep_ratio if distributed else 1.0,
            quantization_levels=self.quantization_levels,
            metrics=self.metrics,
        )

    def limits(self, now: Round) -> Limits:
        """Return the limits of the replies, from what was asked alone: clip norm and lattice, or the longest honest sum."""
        ask, length = now.ask, now.length
        clip_norm = ask.promise.clip_norm
        mask = None if ask.mask is None else ask.mask.indices(length)
        num_kept = length if mask is None else mask.size
        longest_noise = ask.noise_std * (math.sqrt(num_kept) + _NORM_DEVIATIONS)

        def honest_norm(names: Sequence[str]) -> float:
            count = len(names)
            if not ask.quantization_levels:
                return count * clip_norm + math.sqrt(count) * longest_noise
            # Quantisation can lengthen a row; each row has the largest norm.
            return count * (clip_norm + longest_noise) * compression.qsgd_norm_ratio(num_kept, ask.quantization_levels)

        return Limits(
            length=length,
            mask=mask,
            clip_norm=clip_norm if ask.placement == "central" else None,
            step=ask.step,
            honest_norm=honest_norm,
        )

    def keep(self, released: np.ndarray) -> None:
        """Keep the noised mean [d] of which the next mask is made."""
        if self.masks is not None:
            self.state = replace(self.state, released=released)

    def bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return the mean of what the clients say that each would send alone, where epsilon rests on every single message.

        Else the bytes of a dense update: what is really sent may depend on data that a noised sum hides, or tell the size of a
        secret cohort.
        """
        if self.shared.lossy_messages and collected.clients:
            return collected.payload_bytes / len(collected.clients)
        return 4.0 * self.num_kept(now.length)

    def noised(self, ask: Ask, total: np.ndarray, *, num_replies: int, cohort_size: int, rng: Generator) -> np.ndarray:
        """Return the noised mean [length]: the sum with the server's part of the noise, over the *expected* cohort.

        Args:
            ask: what was asked.
            total: the sum of the accepted rows, on the lattice.
            num_replies: how many clients it has.
            cohort_size: how many were asked.
            rng: fresh, for this release alone.

        Raises:
            RoundLeftOut: with too few replies for the noise that was charged, or a sum that is not exact.
        """
        if self.shared.too_few(num_replies, cohort_size):
            raise RoundLeftOut(f"{num_replies} of {cohort_size} clients answered, too few for the noise that was charged")
        std = self.shared.server_std(num_replies)
        # Exact sums of multiples of the step: what is released is post-processing of the ideal mechanism.
        kept = slice(None) if ask.mask is None else ask.mask.indices(total.size)
        total = total.copy()
        total[kept] += noise.gaussian(total[kept], std, ask.step, rng)
        if not noise.exact(total, ask.step):
            raise RoundLeftOut("the replies' sum is too large to be exact")
        mean = total / self.release.expected_cohort
        if self.keep_ratio < 1 and self.shared.placement == "central":
            mean = compression.decode(compression.top_k(mean.astype(np.float32), self.keep_ratio), mean.size)
        return np.asarray(mean)


def check_relation(relation: Relation, sampling: Sampler, num_clients: int) -> None:
    """Refuse a sampler that is not accounted under this neighbouring relation.

    Raises:
        ValueError: for sampling of a fixed size, of a part of the clients, under add-or-remove-one.
    """
    part = isinstance(sampling, FixedSizeSampling) and sampling.cohort_size != num_clients
    if part and relation == "add-or-remove-one":
        raise ValueError("relation='add-or-remove-one': sampling of a fixed size is accounted under 'replace-one' only")
