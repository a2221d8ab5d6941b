"""DP-FedAvg and DP-FedSAM on the client: a clipped update, its share of the noise, then the largest coordinates, or levels.

Sources: McMahan et al. 2018; Shi et al. 2023, Algorithm 1. The two differ in the recipe of training alone.
"""

from flower_dp.clients.client_level import clip_and_noise
from flower_dp.clients.pipeline import Pipeline, Train
from flower_dp.clients.sending import QSGD, Lossless, TopK
from flower_dp.wire import ClientLevelOrder, Instruction


def pipeline(instruction: Instruction, *, train: Train, length: int) -> Pipeline:
    """Return the pipeline of an instruction; see `ClientLevelMethod`."""
    order = ClientLevelOrder.of(instruction)
    clip, noise = clip_and_noise(instruction, order.noise_std, length)
    return Pipeline(
        train=train,
        clip=clip,
        noise=noise,
        after_noise=None if order.keep_ratio == 1 else TopK(keep_ratio=order.keep_ratio),
        encode=QSGD(levels=order.quantization_levels) if order.quantization_levels else Lossless(keep_ratio=order.keep_ratio),
    )
