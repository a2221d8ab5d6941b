"""Fed-SMP on the client: a random mask that all clients of a round share, then clip and noise on the kept coordinates alone.

Source: Hu et al. 2024, "Federated Learning with Sparsified Model Perturbation", with rand_k.
"""

from flower_dp.clients.client_level import clip_and_noise
from flower_dp.clients.parts import Mask
from flower_dp.clients.pipeline import Pipeline, Train
from flower_dp.clients.sending import RandK
from flower_dp.wire import FedSMPOrder, Instruction


def pipeline(instruction: Instruction, *, train: Train, length: int) -> Pipeline:
    """Return the pipeline of an instruction; see `ClientLevelMethod`.

    The clip norm bounds the masked update, and the lattice is that of the kept coordinates: a coordinate that is not kept is 0
    and has no noise.
    """
    order = FedSMPOrder.of(instruction)
    mask = Mask(seed=order.mask_seed, length=length, keep_ratio=order.keep_ratio)
    clip, noise = clip_and_noise(instruction, order.noise_std, len(mask.indices))
    return Pipeline(train=train, before_clip=mask, clip=clip, noise=noise, encode=RandK(mask=mask))
