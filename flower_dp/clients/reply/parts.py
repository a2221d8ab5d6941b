"""The parts of a client's pipeline up to its noise: mask, clip, noise.

They are closed sets of final classes: a subclass could put data-dependent work between clip and noise.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from flower_dp import wire
from flower_dp.core import checks, noise
from flower_dp.core.clipping import clip_l1, clip_l2, indicator
from flower_dp.core.noise import Generator
from flower_dp.core.vectors import Array
from flower_dp.privacy.release import Release

# Returns the generator of one reply's noise and secret choices, which no other reply uses.
NoiseSource = Callable[[], Generator]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The coordinates that all clients keep in a round, before the clip. They follow from public numbers and not from data.

    Attributes:
        of: mask of the round, as the server has requested it.
        length: number of coordinates of the vector.
        num_extra: number of coordinates behind the vector, which are always kept.
        indices: kept coordinates [k], increasing.

    Raises:
        ValueError: if the mask does not fit such a vector.

    Example:
        >>> from flower_dp.clients.reply.parts import Mask
        >>> from flower_dp.wire import RoundMask
        >>> mask = Mask(of=RoundMask(seed=7, keep_ratio=0.05), length=1000)
        >>> len(mask.indices)
        50
    """

    of: wire.PublicMask
    length: int
    num_extra: int = 0
    indices: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        extra = np.arange(self.length, self.length + self.num_extra)
        # A new array: torch needs one that can be written.
        object.__setattr__(self, "indices", np.concatenate([self.of.indices(self.length), extra]))

    def keep(self, row: Array) -> Array:
        """Return the kept coordinates [..., k] of rows [..., d]."""
        return row[..., self._on(row)]

    def spread(self, kept: Array) -> Array:
        """Return the vector [d] of kept coordinates [k], 0 elsewhere."""
        xp = array_namespace(kept)
        vector = xp.zeros((self.length + self.num_extra,), dtype=kept.dtype, device=device(kept))
        vector[self._on(kept)] = kept
        return vector

    def _on(self, row: Array) -> Array:
        return self.indices if is_numpy_array(row) else array_namespace(row).asarray(self.indices, device=device(row))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowClip:
    """Clip one client's whole row to an L2 norm, then round it toward zero to the lattice of the noise.

    Attributes:
        clip_norm: L2 bound.
        step: step of the lattice; 0 for none.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.reply.parts import RowClip
        >>> RowClip(clip_norm=1.0, step=2.0**-10)(np.array([30.0, 40.0], np.float32)).tolist()
        [0.599609375, 0.7998046875]
    """

    clip_norm: float
    step: float

    def __call__(self, row: Array) -> Array:
        """Return the clipped row, or rows [n, d].

        Raises:
            ValueError: if an entry is NaN or infinite.
        """
        return noise.round_toward_zero(clip_l2(row, self.clip_norm), self.step)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IndicatorClip:
    """Clip one client's update, append an indicator that the update was within the clip norm, and round both toward zero.

    Attributes:
        indicator: clip norm of the update, and scale of the indicator.
        step: step of the lattice; 0 for none.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.reply.parts import IndicatorClip
        >>> from flower_dp.wire import Indicator
        >>> clip = IndicatorClip(indicator=Indicator(clip_norm=1.0, scale=0.5), step=2.0**-10)
        >>> clip(np.array([30.0, 40.0, 0.0], np.float32)).tolist()
        [0.599609375, 0.7998046875, -0.2490234375]
    """

    indicator: wire.Indicator
    step: float

    @property
    def clip_norm(self) -> float:
        """L2 bound of the whole row."""
        return self.indicator.joint_norm

    def __call__(self, row: Array) -> Array:
        """Return the clipped row, or rows [n, d]; the indicator replaces the last entry of each.

        Raises:
            ValueError: if an entry is NaN or infinite.
        """
        xp = array_namespace(row)
        update, asked = row[..., :-1], self.indicator
        clipped = clip_l2(update, asked.clip_norm)
        last = xp.astype(indicator(update, asked.clip_norm, asked.scale), clipped.dtype)[..., None]
        return noise.round_toward_zero(xp.concat([clipped, last], axis=-1), self.step)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordClip:
    """Clip every record's contribution to a sum, then round it toward zero to the lattice of the noise.

    The `train` part applies it to every record before adding up (`flower_dp.clients.training.record_clipping`); the clip slot of
    the pipeline holds the same clip. As a clip of the row it does nothing.

    Attributes:
        clip_norm: bound on the norm of one record's contribution.
        step: step of the lattice; 0 for none.
        norm: `l1` or `l2`.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.reply.parts import RecordClip
        >>> RecordClip(clip_norm=1.0, step=2.0**-10, norm="l1").records(np.array([[3.0, 1.0], [0.0, 0.5]], np.float32)).tolist()
        [[0.7490234375, 0.2490234375], [0.0, 0.5]]
    """

    clip_norm: float
    step: float
    norm: str = "l2"

    def __post_init__(self) -> None:
        checks.one_of("norm", self.norm, ("l1", "l2"))

    def records(self, rows: Array) -> Array:
        """Return the clipped contributions of records [n, d]."""
        clip = clip_l1 if self.norm == "l1" else clip_l2
        return noise.round_toward_zero(clip(rows, self.clip_norm), self.step)

    def __call__(self, row: Array) -> Array:
        """Return a sum of clipped contributions as it is."""
        return row


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NotPrivate:
    """No noise at all, for a run without privacy."""

    noise_std: ClassVar[float] = 0.0

    def add(self, clipped: Array, step: float, rng: NoiseSource) -> Array:
        """Return the row as it is."""
        return clipped


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNoise:
    """No noise on this client, since the trusted server adds it to the sum. No selection by value may come before that."""

    noise_std: ClassVar[float] = 0.0

    def add(self, clipped: Array, step: float, rng: NoiseSource) -> Array:
        """Return the row as it is."""
        return clipped


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianShare:
    """This client's share of Gaussian noise; the shares of a cohort add up to the noise of the release.

    Attributes:
        noise_std: standard deviation of the share.

    Raises:
        ValueError: if it is not above 0.
    """

    noise_std: float

    def __post_init__(self) -> None:
        checks.number("noise_std", self.noise_std, above=0)

    def add(self, clipped: Array, step: float, rng: NoiseSource) -> Array:
        """Return the clipped row with its noise, in float64."""
        return clipped + noise.gaussian(clipped, self.noise_std, step, rng())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FullNoise:
    """The full noise of one reply under local DP, by the client's own terms.

    Attributes:
        release: release of one reply; its mechanism may be Gaussian or Laplace, or have no noise for an infinite budget.
    """

    release: Release

    @property
    def noise_std(self) -> float:
        """Scale of the noise on the clipped sum."""
        return self.release.noise_scale

    def add(self, clipped: Array, step: float, rng: NoiseSource) -> Array:
        """Return the clipped sum with its noise, in float64."""
        return clipped + self.release.mechanism.noise(clipped, self.release.noise_scale, step, rng())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """The full noise of every local step, by the client's own terms, for methods whose every step releases its own noised sum.

    The `train` part adds it to the sum of every step, directly before the weights change; the noise slot of the pipeline holds
    the same object. The row is computed from noised sums alone, and gets no further noise.

    Attributes:
        release: release of one step.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.reply.parts import StepNoise
        >>> from flower_dp.core.noise import noise_generator
        >>> from flower_dp.privacy.dp_pasgd import step_terms
        >>> terms = step_terms(
        ...     epsilon=4.0, delta=1e-4, num_steps=20, num_local_steps=10, clip_norm=1.0, batch_size=8, num_records=50
        ... )
        >>> noise = StepNoise(release=terms.release)
        >>> noised = noise.step(np.zeros(4), 2.0**-10, noise_generator())
        >>> bool((noised * 2**10 == np.rint(noised * 2**10)).all())
        True
    """

    release: Release

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the clipped sum of one step."""
        return self.release.noise_scale

    def step(self, total: Array, step: float, rng: Generator) -> Array:
        """Return the clipped sum of one step with its noise, in float64.

        Args:
            total: clipped sum, on the lattice.
            step: step of the lattice.
            rng: generator of the reply; every call draws anew.
        """
        return total + self.release.mechanism.noise(total, self.release.noise_scale, step, rng)

    def add(self, clipped: Array, step: float, rng: NoiseSource) -> Array:
        """Return a row that is computed from noised sums, unchanged."""
        return clipped


Clip = RowClip | IndicatorClip | RecordClip
Noise = NotPrivate | ServerNoise | GaussianShare | FullNoise | StepNoise
