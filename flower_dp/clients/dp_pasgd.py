"""DP-PASGD on the client: local steps on noised means of clipped per-record gradients (Hu et al., Algorithm 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from flower_dp.clients.reply.parts import RecordClip, StepNoise
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Trained, one_by_one
from flower_dp.clients.reply.sending import SinglePrecision
from flower_dp.clients.training import dry_run
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.record_clipping import clipped_sum, secret_batch
from flower_dp.clients.training.records import Records
from flower_dp.core.sampling import PoissonSampling, Sampler
from flower_dp.core.step_schedule import StepSchedule
from flower_dp.privacy.client_terms import ClientTerms, value_of, values_in
from flower_dp.privacy.dp_pasgd import step_terms
from flower_dp.privacy.release import Release


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSteps:
    """Local steps along noised mean gradients: sum of clipped gradients, plus noise, over the batch's public size.

    Attributes:
        step_noise: noise that is added to the sum of every step; its release fixes the sampling of batches.
        steps: number and size of steps; the gradient of their weight decay is made of the weights alone.
    """

    model: FlatModel
    record_clip: RecordClip
    step_noise: StepNoise
    steps: StepSchedule
    server_round: int
    loss: Loss

    def rows(self, vector: Tensor, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield the change of every client's weights [d], float32, and the mean of its steps' losses, or its error."""
        return one_by_one(jobs, partial(self._row, vector), reset=self.model.reset)

    def _row(self, vector: Tensor, job: ClientJob) -> tuple[Tensor, Tensor]:
        rng, losses, release = job.secret(), [], self.step_noise.release
        moved = torch.zeros_like(vector, dtype=torch.float64)
        step_size = self.steps.step_size(self.server_round)
        for _ in range(self.steps.num_local_steps):
            # Of all information on records, a step passes only its noised sum to the next step: the weights are computed from
            # it, and the model's buffers are reset.
            self.model.vector.copy_(vector + moved)
            self.model.reset_buffers()
            batch = _batch(len(job.records), release.sampler, release.expected_cohort_size, rng)
            seed = int(rng.integers(2**63))
            total, loss = clipped_sum(self.model, job.records, batch, clip=self.record_clip, loss=self.loss, seed=seed)
            losses.append(loss)
            noised = self.step_noise.step(total, self.record_clip.step, rng)
            gradient = noised / release.expected_cohort_size + self.steps.weight_decay * (vector + moved)
            moved -= step_size * gradient
        row = moved.to(torch.float32)
        if not bool((vector + row).isfinite().all()):
            raise ArithmeticError("weights: left the range of float32; choose a smaller learning rate")
        return row, torch.stack(losses).mean()


def _batch(num_records: int, sampler: Sampler, size: float, rng: np.random.Generator) -> Tensor:
    """Draw the positions of a batch without repetition: by Poisson sampling, or `size` of them at random."""
    if isinstance(sampler, PoissonSampling):
        return secret_batch(num_records, sampler.sampling_rate, rng)
    return torch.from_numpy(rng.choice(num_records, int(size), replace=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPASGDRecipe:
    """One reply of DP-PASGD: the change of the weights in tau noised local steps; DP-SGD with `num_local_steps=1`.

    Step: w <- w - eta (mean of the batch's clipped gradients + noise). Every record's gradient is clipped to L2 norm `clip_norm`
    (G; the paper assumes that gradients are no longer). With this noise all `num_steps` steps together are (epsilon,
    delta)-differentially private for each record, under replace-one. The reply is computed from noised steps alone, so it costs
    no more. A record counts as zero if its loss or gradient is not finite, it can't be read, or it raises an error.

    Batches are drawn anew for every step, with the secret generator of the noise: `batch_size` records without replacement, or
    with `batch_sampling="poisson"` every record independently with probability batch_size / (number of records). The mean's
    denominator is always `batch_size`.

    Attributes:
        learning_rate: step size of round 1 (paper: eta); it costs no privacy.
        clip_norm: L2 bound on one record's gradient (paper: G).
        epsilon: budget of all steps together, one number or one by client name; math.inf: no noise, not private.
        delta: delta of the budget, in (0, 1).
        num_steps: total number of steps (paper: K), a multiple of `num_local_steps`. It limits the number of replies.
        num_local_steps: steps per round (paper: tau).
        batch_size: records per batch (paper: X_m), one number or one by client name.
        batch_sampling: `fixed-size`, accounted without amplification as in the paper, or `poisson`, with it.
        calibration: `exact`, the least noise that can be proved enough, or `zcdp`, the paper's eq. 9, which is more.
        learning_rate_decay: fraction by which the step size shrinks every round.
        weight_decay: L2 coefficient of the loss, at most 1 / learning_rate.
        loss: model outputs, targets -> loss, for batches of one record.

    Raises:
        ValueError: for a value out of its range, naming field and value.

    Source: Hu, Guo, Ratazzi, Gong, Differentially Private Federated Learning for Resource-Constrained Internet of Things,
    Algorithm 1 and eq. 9.

    Example:
        >>> from flower_dp.clients import DPPASGDRecipe
        >>> recipe = DPPASGDRecipe(
        ...     learning_rate=0.1, clip_norm=1.0, epsilon=4.0, delta=1e-4, num_steps=200, num_local_steps=10, batch_size=64
        ... )
        >>> terms = recipe.terms("device-1", range(1000))
        >>> terms.num_replies, round(terms.release.noise_scale / 64, 4)
        (20, 0.4237)
    """

    learning_rate: float
    clip_norm: float
    epsilon: float | Mapping[str, float]
    delta: float
    num_steps: int
    num_local_steps: int
    batch_size: int | Mapping[str, int]
    batch_sampling: str = "fixed-size"
    calibration: str = "exact"
    learning_rate_decay: float = 0.0
    weight_decay: float = 0.0
    loss: Loss = nn.functional.cross_entropy

    method = "dp-pasgd"

    def __post_init__(self) -> None:
        self._steps()
        for size in values_in(self.batch_size):
            # `step_terms` refuses every other invalid value as well.
            for epsilon in values_in(self.epsilon):
                self._terms(epsilon, size, size)

    def terms(self, name: str, records: Records) -> ClientTerms:
        """Return one client's terms.

        Raises:
            ValueError: if the client has no budget or batch size, or fewer records than a batch.
        """
        size = value_of("batch_size", self.batch_size, name)
        return self._terms(value_of("epsilon", self.epsilon, name), size, len(records))

    def unfit_reason(self, model: FlatModel, records: Records) -> str | None:
        """Return why the gradient of a single record can't be computed: see `DryRunnable`."""
        return dry_run.of_records(model, records, self.loss)

    def pipeline(self, release: Release, *, model: FlatModel, server_round: int) -> Pipeline:
        """Return the pipeline of one client's reply, with the clip and the noise of its own release."""
        clip = RecordClip(clip_norm=release.clip_norm, step=release.lattice_step(model.layout.size))
        noise = StepNoise(release=release)
        train = NoisedSteps(
            model=model, record_clip=clip, step_noise=noise, steps=self._steps(), server_round=server_round, loss=self.loss
        )
        return Pipeline(train=train, clip=clip, noise=noise, encode=SinglePrecision())

    def _steps(self) -> StepSchedule:
        return StepSchedule(
            num_local_steps=self.num_local_steps,
            learning_rate=self.learning_rate,
            learning_rate_decay=self.learning_rate_decay,
            weight_decay=self.weight_decay,
        )

    def _terms(self, epsilon: float, batch_size: int, num_records: int) -> ClientTerms:
        return step_terms(
            epsilon=epsilon,
            delta=self.delta,
            num_steps=self.num_steps,
            num_local_steps=self.num_local_steps,
            clip_norm=self.clip_norm,
            batch_size=batch_size,
            num_records=num_records,
            batch_sampling=self.batch_sampling,
            calibration=self.calibration,
        )
