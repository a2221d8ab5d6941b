"""The parts of a client's pipeline: what may stand in its slots, and nothing of how they are run.

Mask, clip and noise are closed sets of final classes: a subclass could put data-dependent work between clip and noise. What comes
after the noise, and how it is encoded, may be any part of the right protocol: it sees nothing that is not noised yet.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, final

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from flower_dp.core import checks, compression, noise
from flower_dp.core.clipping import clip_l1, clip_l2
from flower_dp.core.compression import Payload
from flower_dp.core.noise import Generator
from flower_dp.core.vectors import Array
from flower_dp.privacy.release import Release

# Values of this many steps are exact in float32, and no noise that is ever drawn is so many standard deviations large.
_FLOAT32_EXACT = 2.0**24
_NEVER_DRAWN = 9.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The coordinates that everyone keeps in a round, before the clip. They follow from public numbers, so no data chose them.

    Attributes:
        seed: public, drawn by the server for the round.
        length: of the vector.
        keep_ratio: part of the coordinates that is kept.
        indices: the kept coordinates [k], increasing.

    Example:
        >>> from flower_dp.clients.parts import Mask
        >>> mask = Mask(seed=7, length=1000, keep_ratio=0.05)
        >>> len(mask.indices), (mask.indices == Mask(seed=7, length=1000, keep_ratio=0.05).indices).all().item()
        (50, True)
    """

    seed: int
    length: int
    keep_ratio: float
    indices: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(checks.integer("mask_seed", self.seed, at_least=0))
        object.__setattr__(self, "indices", compression.random_mask(self.length, self.keep_ratio, rng))

    def keep(self, row: Array) -> Array:
        """Return the kept coordinates [k] of a row [d]."""
        return row[self._on(row)]

    def spread(self, kept: Array) -> Array:
        """Return the vector [d] of kept coordinates [k], 0 elsewhere."""
        xp = array_namespace(kept)
        vector = xp.zeros((self.length,), dtype=kept.dtype, device=device(kept))
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
        step: of the lattice; 0 for none.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.parts import RowClip
        >>> RowClip(clip_norm=1.0, step=2.0**-10)(np.array([30.0, 40.0], np.float32)).tolist()
        [0.599609375, 0.7998046875]
    """

    clip_norm: float
    step: float

    def __call__(self, row: Array) -> Array:
        """Return the clipped row.

        Raises:
            ValueError: if an entry is NaN or infinite.
        """
        return noise.toward_zero(clip_l2(row, self.clip_norm), self.step)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordClip:
    """Clip every record's contribution to a sum, then round it toward zero to the lattice of the noise.

    The part that trains applies it, record by record, before it adds up (`flower_dp.clients.record_clipping`); the slot of the
    clip names it. The sum itself is not touched.

    Attributes:
        clip_norm: bound on the norm of one record's contribution.
        step: of the lattice; 0 for none.
        norm: `l1` or `l2`.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.parts import RecordClip
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
        return noise.toward_zero(clip(rows, self.clip_norm), self.step)

    def __call__(self, row: Array) -> Array:
        """Return a sum of clipped contributions as it is."""
        return row


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NotPrivate:
    """No noise, by anybody: a run without privacy."""

    noise_std: ClassVar[float] = 0.0

    def add(self, clipped: Array, step: float, rng: "Secret") -> Array:
        """Return the row as it is."""
        return clipped


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNoise:
    """No noise on this client: the server, which is trusted, adds it to the sum. Nothing may choose by value before that."""

    noise_std: ClassVar[float] = 0.0

    def add(self, clipped: Array, step: float, rng: "Secret") -> Array:
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

    def add(self, clipped: Array, step: float, rng: "Secret") -> Array:
        """Return the clipped row with its noise, in float64."""
        return clipped + noise.gaussian(clipped, self.noise_std, step, rng())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FullNoise:
    """All noise of a release that is private on its own, from the client's own terms.

    Attributes:
        release: what leaves with one reply; its mechanism may be Gaussian or Laplace, or have no noise for an infinite budget.
    """

    release: Release

    @property
    def noise_std(self) -> float:
        """Scale of the noise on the clipped sum."""
        return self.release.noise_scale

    def add(self, clipped: Array, step: float, rng: "Secret") -> Array:
        """Return the clipped sum with its noise, in float64."""
        return clipped + self.release.mechanism.noise(clipped, self.release.noise_scale, step, rng())


Clip = RowClip | RecordClip
Noise = NotPrivate | ServerNoise | GaussianShare | FullNoise


class Secret(Protocol):
    """Gives the generator of one reply's noise and secret choices."""

    def __call__(self) -> Generator:
        """Return a generator that no other reply uses."""


class Selection(Protocol):
    """What may follow the noise: any function of the noised row and public numbers."""

    slot: ClassVar[Literal["after_noise"]]

    def __call__(self, noised: Array) -> Array:
        """Return the row [k] that leaves."""


class Encoder(Protocol):
    """How the node's sum is sent, and what each of its clients would have sent alone."""

    slot: ClassVar[Literal["encode"]]

    def encode(self, total: Array) -> Payload:
        """Return the payload of the sum [d]."""

    def row_bytes(self, length: int, width: int) -> int:
        """Return the bytes of one client's row [length], `width` bytes a value.

        They follow from public numbers: counting the zeros of a row would tell of the data.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Keep the coordinates of largest magnitude, after the noise.

    Attributes:
        keep_ratio: part of the coordinates that is kept.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.parts import TopK
        >>> TopK(keep_ratio=0.5)(np.array([0.5, -3.0, 2.0, 0.1])).tolist()
        [0.0, -3.0, 2.0, 0.0]
    """

    slot: ClassVar[Literal["after_noise"]] = "after_noise"
    keep_ratio: float

    def __post_init__(self) -> None:
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)

    def __call__(self, noised: Array) -> Array:
        """Return the row with zeros for all other coordinates."""
        sparse = compression.decode(compression.top_k(noised, self.keep_ratio), int(noised.shape[0]))
        return sparse if is_numpy_array(noised) else array_namespace(noised).asarray(sparse, device=device(noised))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossless:
    """Send the sum without loss: by its nonzero coordinates where that is smaller, else dense.

    Attributes:
        keep_ratio: what a selection before it has kept of every row.
    """

    slot: ClassVar[Literal["encode"]] = "encode"
    keep_ratio: float = 1.0

    def encode(self, total: Array) -> Payload:
        """Return the payload."""
        return compression.smallest(total)

    def row_bytes(self, length: int, width: int) -> int:
        """Return the bytes of a dense row, or of the kept coordinates and their indices where that is smaller."""
        kept = compression.num_kept(self.keep_ratio, length)
        return min(length * width, compression.top_k_bytes(length, kept, width)) if kept < length else length * width


@dataclass(frozen=True, slots=True, kw_only=True)
class SinglePrecision:
    """Send the sum of rows that are private on their own, rounded to float32."""

    slot: ClassVar[Literal["encode"]] = "encode"

    def encode(self, total: Array) -> Payload:
        """Return the payload."""
        return compression.smallest(array_namespace(total).astype(total, array_namespace(total).float32))

    def row_bytes(self, length: int, width: int) -> int:
        """Return 4 bytes a value."""
        return 4 * length


@dataclass(frozen=True, slots=True, kw_only=True)
class RandK:
    """Send the coordinates of the mask that the server knows too, and no index.

    Attributes:
        mask: the one of the slot before the clip.
    """

    slot: ClassVar[Literal["encode"]] = "encode"
    mask: Mask

    def encode(self, total: Array) -> Payload:
        """Return the payload of a sum [d]."""
        return compression.rand_k(total, self.mask.indices)

    def row_bytes(self, length: int, width: int) -> int:
        """Return the bytes of the kept values."""
        return len(self.mask.indices) * width


def bytes_a_value(row: Array, clip: Clip, added: Noise) -> int:
    """Return the bytes a value with which a row travels alone: 4 where float32 holds all of its values, else 8.

    Mostly public numbers decide; where noise may or may not fit into float32, the noised row does.
    """
    xp = array_namespace(row)
    if row.dtype == xp.float32:
        return 4
    if clip.step and _NEVER_DRAWN * added.noise_std + clip.clip_norm <= _FLOAT32_EXACT * clip.step:
        return 4
    narrow: Any = xp.astype(row, xp.float32)
    return 4 if bool(xp.all(xp.astype(narrow, xp.float64) == row)) else 8
