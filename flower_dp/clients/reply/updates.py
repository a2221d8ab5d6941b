"""Local training with torch, as the `train` part of a pipeline: a row is an update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flower_dp.clients.reply.pipeline import Job, Trained
from flower_dp.clients.training.devices import exact_device, is_accelerator
from flower_dp.clients.training.engines import local_updates, num_slots
from flower_dp.clients.training.recipe import FlatModel, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedUpdates:
    """Local training by an engine: a row is the trained model minus the global model.

    Attributes:
        training: the recipe.
        model: where to train.
        server_round: 1, 2, ...
        engine: of `local_updates`.
        group_size: of `local_updates`.
    """

    training: Training
    model: FlatModel
    server_round: int
    engine: str
    group_size: int | None = None

    @property
    def rows_together(self) -> int:
        """How many rows are clipped at once: as many as the batched engine trains at once on a GPU."""
        device = self.model.device
        if self.engine != "batched" or not is_accelerator(exact_device(device)):
            return 1
        return num_slots(self.model.layout.size, device, self.group_size)

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
            group_size=self.group_size,
        )
        for row in rows:
            yield row if isinstance(row, Exception) else (row, losses[-1])
