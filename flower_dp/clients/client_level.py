"""What client pipelines of methods with one noised sum of clipped updates share: training, clip and noise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flower_dp.clients.engines import local_updates
from flower_dp.clients.engines.one_by_one import Trained
from flower_dp.clients.parts import GaussianShare, Noise, NotPrivate, RowClip, ServerNoise
from flower_dp.clients.pipeline import Job, Pipeline, Train
from flower_dp.clients.training import FlatModel, LocalTraining
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUpdates:
    """Local training by an engine: a row is the trained model minus the global model.

    Attributes:
        training: the recipe.
        model: where to train.
        server_round: 1, 2, ...
        engine: `one_by_one` or `batched`.
    """

    training: LocalTraining
    model: FlatModel
    server_round: int
    engine: str

    def rows(self, vector: Tensor, jobs: Sequence[Job]) -> Iterator[Trained]:
        """Yield every client's update and training loss, or its error, in order."""
        losses: list[Tensor] = []
        rows = local_updates(
            vector,
            [job.records for job in jobs],
            self.training,
            model=self.model,
            server_round=self.server_round,
            seeds=[job.seed for job in jobs],
            losses=losses,
            engine=self.engine,
        )
        for row in rows:
            yield row if isinstance(row, Exception) else (row, losses[-1])


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
    if noise_std:
        noise = GaussianShare(noise_std=noise_std)
    else:
        noise = ServerNoise() if instruction.noise_multiplier else NotPrivate()
    return RowClip(clip_norm=instruction.clip_norm, step=step), noise
