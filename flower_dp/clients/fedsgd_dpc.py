"""FedSGD-DPC on the client: the noised mean of per-record clipped gradients (Zhou et al., Algorithm 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from flower_dp.clients.reply.parts import FullNoise, RecordClip
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Trained, one_by_one
from flower_dp.clients.reply.sending import SinglePrecision
from flower_dp.clients.training import dry_run
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.record_clipping import clipped_sum, secret_batch
from flower_dp.clients.training.records import Records
from flower_dp.core import checks
from flower_dp.privacy.client_terms import ClientTerms, value_of, values_in
from flower_dp.privacy.events import Relation
from flower_dp.privacy.fedsgd_dpc import MECHANISMS, gradient_terms
from flower_dp.privacy.release import Release


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedGradients:
    """The sum of the clipped gradients of a secret batch of the client's records, at the global model."""

    model: FlatModel
    record_clip: RecordClip
    sampling_rate: float
    loss: Loss
    relation: Relation

    def rows(self, vector: Tensor, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's sum [d], float64, and the mean loss of the records that count, or its error."""
        return one_by_one(jobs, partial(self._row, vector), reset=self.model.reset)

    def _row(self, vector: Tensor, job: ClientJob) -> tuple[Tensor, Tensor]:
        rng = job.secret()
        self.model.vector.copy_(vector)
        batch = secret_batch(len(job.records), self.sampling_rate, rng)
        seed = int(rng.integers(2**63))
        return clipped_sum(
            self.model, job.records, batch, clip=self.record_clip, loss=self.loss, seed=seed, relation=self.relation
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MinusMean:
    """Minus the noised sum over the expected size of the batch, a public number: sum and noise are divided together.

    Attributes:
        expected_size: expected number of records in the batch, a public number.
    """

    slot: ClassVar[Literal["after_noise"]] = "after_noise"
    expected_size: float

    def __call__(self, noised: Tensor) -> Tensor:
        """Return the row in float32."""
        return (-noised / self.expected_size).to(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedSGDDPCRecipe:
    """One reply: minus the mean of the clipped gradients of the client's records, plus noise by the client's own budget.

    Every record's gradient is clipped to `clip_norm`, L1 under Laplace noise and L2 under Gaussian noise. A record counts as zero
    if its loss or gradient is not finite, it can't be read, or it raises an error. So no record can make the client refuse. The
    mean's denominator is public and fixed, num_records x sampling_rate, never the size of the batch that was drawn.

    Under Gaussian noise every record is in a batch independently with probability `sampling_rate`, drawn with the secret
    generator of the noise, anew for every reply. Dropout drops the same units for all records of a reply, so a record in the
    batch changes no other record's gradient.

    Attributes:
        mechanism: `laplace` or `gaussian`.
        clip_norm: bound on the norm of one record's gradient.
        epsilon: budget of all replies together, one number or one by client name; math.inf: no noise, not private.
        delta: 0 for Laplace, in (0, 1) for Gaussian.
        num_replies: maximum number of replies that a client will ever send, one number or one by client name.
        num_records: public data size, one number or one by client name; None: the number of records, which replace-one leaves
            public. Under add-or-remove-one it must be given, because the true number is then protected.
        sampling_rate: expected fraction of the records in a batch; 1 for Laplace.
        relation: neighboring relation; replace-one in the paper.
        loss: model outputs, targets -> loss, for batches of one record.

    Example:
        >>> import torch
        >>> from flower_dp.clients import FedSGDDPCRecipe, TensorRecords
        >>> recipe = FedSGDDPCRecipe(mechanism="laplace", clip_norm=1.0, epsilon=1.0, num_replies=5)
        >>> records = TensorRecords(inputs=torch.randn(20, 3), targets=torch.randint(0, 2, (20,)))
        >>> round(recipe.terms("hospital-7", records).release.noise_scale, 6)  # of the sum: 2 clip_norm num_replies / epsilon
        10.0
    """

    mechanism: str
    clip_norm: float
    epsilon: float | Mapping[str, float]
    num_replies: int | Mapping[str, int]
    delta: float = 0.0
    num_records: int | Mapping[str, int] | None = None
    sampling_rate: float = 1.0
    relation: Relation = "replace-one"
    loss: Loss = nn.functional.cross_entropy

    method = "fedsgd-dpc"

    def __post_init__(self) -> None:
        checks.one_of("mechanism", self.mechanism, MECHANISMS)
        if self.num_records is None and self.relation != "replace-one":
            raise ValueError("num_records=None: must be the public data size under relation='add-or-remove-one'")
        for replies in values_in(self.num_replies):
            checks.integer("num_replies", replies, at_least=1)
        for epsilon in values_in(self.epsilon):
            # `gradient_terms` refuses every other invalid value as well; the noise does not depend on the number of records.
            self._terms(epsilon, 1, 1)

    def terms(self, name: str, records: Records) -> ClientTerms:
        """Return one client's terms.

        Raises:
            ValueError: if the client has no budget, or (under replace-one) its number of records is not the public one.
        """
        size = len(records) if self.num_records is None else value_of("num_records", self.num_records, name)
        if self.relation == "replace-one" and size != len(records):
            raise ValueError(f"num_records={size}: client {name!r} has {len(records)} records")
        return self._terms(value_of("epsilon", self.epsilon, name), value_of("num_replies", self.num_replies, name), size)

    def unfit_reason(self, model: FlatModel, records: Records) -> str | None:
        """Return why the gradient of a single record can't be computed: see `DryRunnable`."""
        return dry_run.of_records(model, records, self.loss)

    def pipeline(self, release: Release, *, model: FlatModel, server_round: int) -> Pipeline:
        """Return the pipeline of one client's reply, with the clip and the noise of its own release."""
        clip = RecordClip(clip_norm=release.clip_norm, step=release.lattice_step(model.layout.size), norm=release.mechanism.norm)
        return Pipeline(
            train=ClippedGradients(
                model=model, record_clip=clip, sampling_rate=self.sampling_rate, loss=self.loss, relation=release.relation
            ),
            clip=clip,
            noise=FullNoise(release=release),
            after_noise=MinusMean(expected_size=release.expected_cohort_size),
            encode=SinglePrecision(),
        )

    def _terms(self, epsilon: float, num_replies: int, num_records: int) -> ClientTerms:
        return gradient_terms(
            mechanism=self.mechanism,
            clip_norm=self.clip_norm,
            epsilon=epsilon,
            delta=self.delta,
            num_replies=num_replies,
            num_records=num_records,
            sampling_rate=self.sampling_rate,
            relation=self.relation,
        )
