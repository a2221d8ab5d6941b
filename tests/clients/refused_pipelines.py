"""Pipelines with a part in the place of another, each of which mypy must refuse: in `make check` an ignore that is not needed is an error."""

from flower_dp.clients.reply.parts import GaussianShare, Mask, RowClip
from flower_dp.clients.reply.pipeline import Pipeline, Train
from flower_dp.clients.reply.sending import Lossless, RandK, TopK
from flower_dp.wire import RoundMask


def good(train: Train) -> None:
    clip, noise = RowClip(clip_norm=1.0, step=0.5), GaussianShare(noise_std=1.0)
    mask = Mask(of=RoundMask(seed=1, keep_ratio=0.5), length=9)
    Pipeline(train=train, clip=clip, noise=noise, after_noise=TopK(keep_ratio=0.5), encode=Lossless())
    Pipeline(train=train, before_clip=mask, clip=clip, noise=noise, encode=RandK(mask=mask))


def bad(train: Train) -> None:
    clip, noise, top = RowClip(clip_norm=1.0, step=0.5), GaussianShare(noise_std=1.0), TopK(keep_ratio=0.5)
    Pipeline(train=train, before_clip=top, clip=clip, noise=noise, encode=Lossless())  # type: ignore[arg-type]
    Pipeline(train=train, clip=top, noise=noise, encode=Lossless())  # type: ignore[arg-type]
    Pipeline(train=train, clip=clip, noise=top, encode=Lossless())  # type: ignore[arg-type]
    Pipeline(train=train, clip=clip, noise=noise, after_noise=Lossless(), encode=Lossless())  # type: ignore[arg-type]
    Pipeline(train=train, clip=clip, noise=noise, encode=top)  # type: ignore[arg-type]


class Own(Mask):  # type: ignore[misc]
    pass
