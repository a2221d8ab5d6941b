"""Local steps on clipped gradients of single records, without replacement: the sum from which an update is computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.reply.pipeline import Job, Trained
from flower_dp.clients.reply.rows import one_by_one
from flower_dp.clients.training.convex import ConvexModel
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.per_record import UnfitModelError
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.record_clipping import clipped_sum
from flower_dp.privacy.dp_fedpaq import FedPAQSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSteps:
    """The sum u of the clipped gradients of E steps, each on b records: y <- y - eta (mean of clipped gradients + drift).

    The E b records are drawn without replacement with the secret generator of the noise, anew for every reply.

    Attributes:
        step_size: eta of this round.
        drift: [d], added to every step's mean gradient; computed from noised messages, so public; None for none.
    """

    model: FlatModel
    steps: FedPAQSteps
    record_clip: RecordClip
    step_size: float
    loss: Loss
    drift: Tensor | None = None

    def rows(self, vector: Tensor, jobs: Sequence[Job]) -> Iterator[Trained]:
        """Yield every client's sum [d], float64, and the mean loss of the records that count, or its error."""
        convex = ConvexModel.of(self.model, self.loss, self.steps) if self.steps.sensitivity == "convex-glm" else None
        return one_by_one(jobs, partial(self._row, vector, convex), reset=self.model.reset)

    def _row(self, vector: Tensor, convex: ConvexModel | None, job: Job) -> tuple[Tensor, Tensor]:
        rng, steps = job.secret(), self.steps
        chosen = torch.from_numpy(rng.permutation(len(job.records))[: steps.num_records])
        here = vector.to(torch.float64)
        if convex is not None and (reason := convex.why_not(vector, steps, step_size=self.step_size, drift=self.drift)):
            raise UnfitModelError(reason)
        total, losses = torch.zeros_like(here), []
        for batch in torch.split(chosen, steps.batch_size):
            seed = int(rng.integers(2**63))
            if convex is not None:
                summed, loss = convex.clipped_sum(here, job.records, batch, seed=seed)
            else:
                self.model.vector.copy_(here)
                summed, loss = clipped_sum(self.model, job.records, batch, clip=self.record_clip, loss=self.loss, seed=seed)
            total += summed
            losses.append(loss)
            mean = summed / steps.batch_size
            here = here - self.step_size * (mean if self.drift is None else mean + self.drift)
        return total, torch.stack(losses).mean()
