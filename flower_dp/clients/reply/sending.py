"""The parts of a client's pipeline after its noise: selection, quantization, and the encoding of a node's sum.

Any part with the right protocol is allowed in these slots: it sees only noised rows, unless the server adds the noise.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from array_api_compat import array_namespace, device, is_numpy_array

from flower_dp.clients.reply.parts import Clip, Mask, Noise, RecordClip, ServerNoise
from flower_dp.core import checks, compression
from flower_dp.core.compression import Payload
from flower_dp.core.noise import Generator
from flower_dp.core.vectors import Array

# Values of up to this many lattice steps are exact in float32. Noise of so many standard deviations is practically never drawn.
_FLOAT32_EXACT = 2.0**24
_NEVER_DRAWN = 9.0


class Selection(Protocol):
    """A part that may follow the noise: any function of the noised row and public numbers."""

    slot: ClassVar[Literal["after_noise"]]

    def __call__(self, noised: Array) -> Array:
        """Return the row [k] that is sent."""


class Encoder(Protocol):
    """The encoding of a node's sum, and the size of each client's row had it been sent alone."""

    slot: ClassVar[Literal["encode"]]

    def encode(self, total: Array, width: int | None) -> Payload:
        """Return the payload of the sum [d], in `width` bytes a value if its size must not follow from the values."""

    def row_bytes(self, length: int, width: int) -> int:
        """Return the bytes of one client's row [length], `width` bytes a value.

        They follow from public numbers: the number of zeros in a row would reveal information on the data.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Keep the coordinates of largest magnitude, after the noise.

    Attributes:
        keep_ratio: fraction of the coordinates that is kept, in (0, 1].

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.reply.sending import TopK
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
    """Send the sum without loss: by its nonzero coordinates if that is smaller, else dense.

    Attributes:
        keep_ratio: fraction of every row's coordinates that an earlier selection has kept.
    """

    slot: ClassVar[Literal["encode"]] = "encode"
    keep_ratio: float = 1.0

    def encode(self, total: Array, width: int | None) -> Payload:
        """Return the payload."""
        return compression.smallest(total)

    def row_bytes(self, length: int, width: int) -> int:
        """Return the bytes of a dense row, or of the kept coordinates and their indices if that is smaller."""
        kept = compression.num_kept(self.keep_ratio, length)
        return min(length * width, compression.top_k_bytes(length, kept, width)) if kept < length else length * width


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Send all coordinates of the sum, zeros as well, for rows without noise.

    Their number of zeros is private. The network, or a round's public number of bytes, would reveal it.
    """

    slot: ClassVar[Literal["encode"]] = "encode"

    def encode(self, total: Array, width: int | None) -> Payload:
        """Return the payload."""
        return compression.dense(total, width)

    def row_bytes(self, length: int, width: int) -> int:
        """Return the bytes of a whole row."""
        return length * width


@dataclass(frozen=True, slots=True, kw_only=True)
class SinglePrecision:
    """Send the sum of rows that have their full noise (local DP), rounded to float32."""

    slot: ClassVar[Literal["encode"]] = "encode"

    def encode(self, total: Array, width: int | None) -> Payload:
        """Return the payload."""
        return compression.smallest(array_namespace(total).astype(total, array_namespace(total).float32))

    def row_bytes(self, length: int, width: int) -> int:
        """Return 4 bytes a value."""
        return 4 * length


@dataclass(frozen=True, slots=True, kw_only=True)
class QSGD:
    """Quantize every row at random to a few levels, before rows are added up; send a single row packed.

    A row already has its noise here, and so has everything that is computed from it: its norm, which is sent, and the size of the
    payload. The sum of several rows has no levels; it is sent as float32.

    Attributes:
        levels: levels above 0 (paper: s); 1 is ternary.

    Raises:
        ValueError: if there are not 1 to 32767 levels.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.reply.sending import QSGD
        >>> row, alone = QSGD(levels=1).quantize(np.array([3.0, 0.0, -4.0]), np.random.default_rng(0))
        >>> sorted(set(np.abs(row).tolist()) | {0.0, 5.0}), alone.num_bytes
        ([0.0, 5.0], 5)
    """

    slot: ClassVar[Literal["encode"]] = "encode"
    levels: int

    def __post_init__(self) -> None:
        compression.check_levels(self.levels)

    def quantize(self, row: Array, rng: Generator) -> tuple[Array, Payload]:
        """Return the quantized row [d], float32, and the payload of it alone.

        Args:
            row: noised row [d].
            rng: secret generator of the reply.

        Raises:
            ValueError: if the row has a NaN or infinite entry, or a norm beyond float32.
        """
        payload = compression.qsgd(row, self.levels, rng)
        quantized = compression.decode(payload, int(row.shape[0]))
        return quantized if is_numpy_array(row) else array_namespace(row).asarray(quantized, device=device(row)), payload

    def encode(self, total: Array, width: int | None) -> Payload:
        """Return the payload of a sum of quantized rows."""
        return compression.smallest(array_namespace(total).astype(total, array_namespace(total).float32))

    def row_bytes(self, length: int, width: int) -> int:
        """Return the maximum number of bytes of a quantized row."""
        return compression.qsgd_bytes(length, self.levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandK:
    """Send the coordinates of a mask that the server also knows, without indices.

    Attributes:
        mask: the pipeline's `before_clip`.
    """

    slot: ClassVar[Literal["encode"]] = "encode"
    mask: Mask

    def encode(self, total: Array, width: int | None) -> Payload:
        """Return the payload of a sum [d]."""
        return compression.rand_k(total, self.mask.indices, width)

    def row_bytes(self, length: int, width: int) -> int:
        """Return the bytes of the kept values."""
        return len(self.mask.indices) * width


def bytes_a_value(row: Array, clip: Clip, added: Noise) -> int:
    """Return the bytes per value of a row that is sent alone: 4 if float32 holds all of its values, else 8.

    Public numbers decide it for a row without noise, and for most noised rows. Otherwise the noised row decides.
    """
    if (width := width_of_sum(1, clip, added)) is not None:
        return width
    xp = array_namespace(row)
    if row.dtype == xp.float32:
        return 4
    if clip.step and _NEVER_DRAWN * added.noise_std + clip.clip_norm <= _FLOAT32_EXACT * clip.step:
        return 4
    narrow: Any = xp.astype(row, xp.float32)
    return 4 if bool(xp.all(xp.astype(narrow, xp.float64) == row)) else 8


def width_of_sum(num_rows: int, clip: Clip, added: Noise) -> int | None:
    """Return the bytes per value of a sum of rows to which the server adds the noise, by public numbers; None for other sums.

    The number of bytes of a round is public, and a width by the sum's values would reveal something of rows without noise.
    """
    if type(added) is not ServerNoise or not clip.step:
        return None
    if isinstance(clip, RecordClip):  # the number of records in a row, which bounds its values, is not public
        return 8
    return 4 if num_rows * clip.clip_norm <= _FLOAT32_EXACT * clip.step else 8
