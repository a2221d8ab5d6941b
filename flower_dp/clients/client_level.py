"""What client pipelines of methods with one noised sum of clipped updates share: clip and noise."""

from typing import Protocol

from flower_dp.clients.parts import GaussianShare, Noise, NotPrivate, RowClip, ServerNoise
from flower_dp.clients.pipeline import Pipeline, Train
from flower_dp.core.noise import lattice_step
from flower_dp.wire import Instruction


class ClientLevelMethod(Protocol):
    """The client side of a method: how one of its instructions becomes a pipeline."""

    def __call__(self, instruction: Instruction, *, train: Train, length: int) -> Pipeline:
        """Return the pipeline of all clients of a round.

        Args:
            instruction: one of this method; its table is not checked yet.
            train: the recipe of local training, with the engine that runs it.
            length: of the model's vector.

        Raises:
            ValueError: if the table has other keys, or values that make no sense.
        """


def clip_and_noise(instruction: Instruction, noise_std: float, dimension: int) -> tuple[RowClip, Noise]:
    """Return the clip of every update and the noise that its client adds.

    All clients of the round, and the server, round to the same lattice, so that their sum is exact, here and on the server.

    Args:
        instruction: clip norm and noise multiplier of the round.
        noise_std: of each client's share; 0 where the server adds the noise, or nobody does.
        dimension: number of coordinates that are clipped and noised.
    """
    scale = noise_std or instruction.noise_multiplier * instruction.clip_norm
    step = lattice_step(scale, clip_norm=instruction.clip_norm, dimension=dimension)
    noise: Noise
    noise = ServerNoise() if instruction.noise_multiplier else NotPrivate()
    if noise_std:
        noise = GaussianShare(noise_std=noise_std)
    return RowClip(clip_norm=instruction.clip_norm, step=step), noise
