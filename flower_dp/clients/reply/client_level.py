"""The pipeline of every method with one noised sum of clipped rows, from the request of its release. Without torch.

The methods differ in the recipe of training and in the request. Sources: McMahan et al. 2018 (DP-FedAvg); Shi et al. 2023,
Algorithm 1 (DP-FedSAM, top-k); Hu et al. 2024 (Fed-SMP: all clients share a mask, then clip and noise its coordinates alone).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from array_api_compat import array_namespace, device

from flower_dp.clients.reply.parts import Clip, GaussianShare, IndicatorClip, Mask, Noise, NotPrivate, RowClip, ServerNoise
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Train, Trained, changed, rows_together
from flower_dp.clients.reply.sending import QSGD, Dense, Encoder, Lossless, RandK, TopK
from flower_dp.core.noise import check_lattice
from flower_dp.core.vectors import Array
from flower_dp.methods import METHODS
from flower_dp.wire import ReleaseRequest

# The methods that `DPClient` and `privacy_mod` run: their clients have no terms of their own.
CLIENT_LEVEL = tuple(name for name, method in METHODS.items() if not method.recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithSlot:
    """Training whose rows end with one more entry, 0, which the clip fills."""

    train: Train

    @property
    def rows_together(self) -> int:
        """The number of rows of the training that are clipped at once."""
        return rows_together(self.train)

    def rows(self, vector: Array, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's row [d + 1] and training loss, or its error, in order."""
        return changed(self.train.rows(vector, jobs), _with_zero)


def pipeline(ask: ReleaseRequest, *, train: Train, length: int) -> Pipeline:
    """Return the pipeline of all clients of a round.

    All clients of the round, and the server, round to the same lattice, so that their sum is exact, here and on the server. A
    coordinate outside a mask is 0 and has no noise: the clip norm bounds the masked row.

    Args:
        ask: request of a release whose noise is added by the server, or in shares by the clients.
        train: training that makes the rows.
        length: coordinates of a row of the training; the row that is sent has `ask.row_length(length)`.

    Raises:
        ValueError: if the request is of local DP, or its lattice is too coarse for the noise share or too fine for exact sums.
    """
    if ask.placement == "local":
        raise ValueError("placement='local': this client has no terms of its own")
    check_lattice(ask.step, scale=ask.noise_std, clip_norm=ask.promise.clip_norm)
    mask = None if ask.mask is None else Mask(of=ask.mask, length=length, num_extra=ask.row_length(0))
    clip: Clip = RowClip(clip_norm=ask.promise.clip_norm, step=ask.step)
    if ask.indicator is not None:
        train, clip = WithSlot(train=train), IndicatorClip(indicator=ask.indicator, step=ask.step)
    noise: Noise = ServerNoise() if ask.promise.noise_multiplier else NotPrivate()
    if ask.noise_std:
        noise = GaussianShare(noise_std=ask.noise_std)
    return Pipeline(
        train=train,
        before_clip=mask,
        clip=clip,
        noise=noise,
        after_noise=None if ask.keep_ratio == 1 else TopK(keep_ratio=ask.keep_ratio),
        encode=_encoder(ask, mask, noise),
    )


def _with_zero(row: Array) -> Array:
    xp = array_namespace(row)
    return xp.concat([row, xp.zeros((1,), dtype=row.dtype, device=device(row))])


def _encoder(ask: ReleaseRequest, mask: Mask | None, noise: Noise) -> Encoder:
    if mask is not None:
        return RandK(mask=mask)
    if ask.quantization_levels:
        return QSGD(levels=ask.quantization_levels)
    return Dense() if isinstance(noise, ServerNoise) else Lossless(keep_ratio=ask.keep_ratio)
