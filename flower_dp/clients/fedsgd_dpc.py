"""FedSGD-DPC on the client: the noised mean of per-record clipped gradients (Zhou et al., Algorithm 1)."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from flower_dp.core import checks
from flower_dp.privacy.events import Relation
from flower_dp.clients.per_record import UnfitModelError, record_gradients
from flower_dp.clients.records import Records, TensorRecords
from flower_dp.clients.training import FlatModel
from flower_dp.clients.draws import OwnDraws, draws_seed
from flower_dp.core.clipping import clip_l1, clip_l2
from flower_dp.core.noise import toward_zero
from flower_dp.privacy.release import Release
from flower_dp.privacy.fedsgd_dpc import MECHANISMS, gradient_terms
from flower_dp.privacy.client_terms import Terms, value_of, values_in

log = logging.getLogger("flwr")

# Numbers in the matrix of per-record gradients that is in memory at a time, and its rows: what is fastest on a core, or fills a GPU.
_LARGEST_MATRIX = {"cpu": 2**22}
_LARGEST_MATRIX_ELSEWHERE = 2**26
_MOST_RECORDS = {"cpu": 64}
_MOST_RECORDS_ELSEWHERE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FedSGDDPCRecipe:
    """One reply: minus the mean of the clipped gradients of the client's records, plus noise from the client's own budget.

    Every record's gradient is clipped to `clip_norm`, L1 under Laplace noise and L2 under Gaussian noise. A record whose loss or
    gradient is not finite counts as zero, and so does one that can't be read or raises, so that no record can make the client
    refuse. The mean's denominator is public and fixed, num_records x sampling_rate, never the size of the batch that was
    drawn. Under Gaussian noise every record is in a batch by itself with probability `sampling_rate`, drawn with the secret
    generator of the noise, anew for every reply. Dropout drops the same units for all records of a reply: whose record is in the
    batch then changes no other record's gradient.

    Attributes:
        mechanism: `laplace` or `gaussian`.
        clip_norm: bound on the norm of one record's gradient.
        epsilon: budget of all replies together, one number or one by client name; math.inf: no noise, not private.
        delta: 0 for Laplace, in (0, 1) for Gaussian.
        num_replies: the most replies that a client will ever send, one number or one by client name.
        num_records: public data size, one number or one by client name; None: the number of records, which replace-one leaves
            public. Under add-or-remove-one it must be given, since the true number is then protected.
        sampling_rate: part of the records in a batch, in expectation; 1 for Laplace.
        relation: neighbouring relation; replace-one in the paper.
        loss: model outputs, targets -> loss, for batches of one record.
    """

    mechanism: str
    clip_norm: float
    epsilon: float | Mapping[str, float]
    num_replies: int | Mapping[str, int]
    delta: float = 0.0
    num_records: int | Mapping[str, int] | None = None
    sampling_rate: float = 1.0
    relation: Relation = "replace-one"
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    method = "fedsgd-dpc"

    def __post_init__(self) -> None:
        checks.one_of("mechanism", self.mechanism, MECHANISMS)
        if self.num_records is None and self.relation != "replace-one":
            raise ValueError("num_records=None: must be the public data size under relation='add-or-remove-one'")
        for replies in values_in(self.num_replies):
            checks.integer("num_replies", replies, at_least=1)
        for epsilon in values_in(self.epsilon):
            # Refuses every other impossible value as well; the noise does not depend on the number of records.
            self._terms(epsilon, 1, 1)

    def terms(self, name: str, records: Records) -> Terms:
        """Return one client's terms.

        Raises:
            ValueError: if it has no budget, or (under replace-one) not as many records as it says in public.
        """
        size = len(records) if self.num_records is None else value_of("num_records", self.num_records, name)
        if self.relation == "replace-one" and size != len(records):
            raise ValueError(f"num_records={size}: client {name!r} has {len(records)} records")
        return self._terms(value_of("epsilon", self.epsilon, name), value_of("num_replies", self.num_replies, name), size)

    def reply(
        self,
        vector: Tensor,
        records: Records,
        release: Release,
        *,
        model: FlatModel,
        server_round: int,
        seed: int,
        rng: np.random.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Return minus the noised mean gradient [d], and the mean loss of the batch's records that count."""
        model.vector.copy_(vector)
        step = release.lattice_step(vector.numel())
        batch = self._batch(len(records), rng)
        total, loss = self._clipped_sum(model, records, batch, int(rng.integers(2**63)), step)
        # The noise is of the sum's size, and sum and noise are divided together.
        noised = total + release.mechanism.noise(total, release.noise_scale, step, rng)
        return (-noised / release.expected_cohort).to(torch.float32), loss

    def _terms(self, epsilon: float, num_replies: int, num_records: int) -> Terms:
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

    def _batch(self, num_records: int, rng: np.random.Generator) -> Tensor:
        """Draw the positions of a batch; all of them at sampling rate 1."""
        if self.sampling_rate == 1:
            return torch.arange(num_records)
        return torch.from_numpy(np.flatnonzero(rng.random(num_records) < self.sampling_rate))

    def _clipped_sum(
        self, model: FlatModel, records: Records, positions: Tensor, seed: int, step: float
    ) -> tuple[Tensor, Tensor]:
        """Return the exact float64 sum [d] of the records' clipped gradients on the lattice, and their mean loss."""
        clip = clip_l1 if self.mechanism == "laplace" else clip_l2
        total = torch.zeros_like(model.vector, dtype=torch.float64)
        losses = [torch.zeros(0, device=model.device)]
        problems: set[str] = set()
        reading = OwnDraws(model.vector.device, draws_seed(seed))
        for part in torch.split(positions, _chunk(model)):
            for rows, loss in self._gradients(model, records, part, reading, seed, problems):
                finite = rows.isfinite().all(dim=1) & loss.isfinite()
                clipped = toward_zero(clip(rows.where(finite[:, None], 0.0), self.clip_norm), step)
                total += clipped.sum(dim=0, dtype=torch.float64)
                losses.append(loss[finite])
                if len(losses[-1]) < len(loss):
                    problems.add("loss or gradient not finite")
        loss = torch.cat(losses)
        if problems:
            what = "records count as zero" if len(loss) else "all records count as zero, the reply is noise alone"
            log.warning("%s: %s", what, ", ".join(sorted(problems)))
        return total, loss.mean() if len(loss) else torch.zeros((), device=model.device)

    def _gradients(
        self, model: FlatModel, records: Records, positions: Tensor, reading: OwnDraws, seed: int, problems: set[str]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield gradients [n, d] and losses [n] of some records: of all together, or where that fails of each that has them."""
        if len(positions) == 0:
            return
        try:
            with reading:
                inputs, targets = records.batch(positions, model.device)
            if not len(inputs) == len(targets) == len(positions):
                raise ValueError(f"{len(positions)} records came with {len(inputs)} inputs and {len(targets)} targets")
            try:
                with OwnDraws(model.vector.device, seed):
                    gradients = record_gradients(model, inputs, targets, loss=self.loss, chunk=_chunk(model))
            except Exception as error:
                if len(positions) > 1 or isinstance(records, TensorRecords):  # of one shape, which no single record changes
                    self._check_model(model, inputs, targets, error)
                raise
        except UnfitModelError:
            raise
        except Exception as error:
            if len(positions) == 1:
                problems.add(type(error).__name__)
                return
            for position in torch.split(positions, 1):
                yield from self._gradients(model, records, position, reading, seed, problems)
            return
        yield gradients

    def _check_model(self, model: FlatModel, inputs: Tensor, targets: Tensor, error: Exception) -> None:
        """Raise if the model has no gradient even for a record of zeros: then no record is to blame, and noise would hide a fault."""
        try:
            zeros = torch.zeros_like(inputs[:1]), torch.zeros_like(targets[:1])
            record_gradients(model, *zeros, loss=self.loss, chunk=_chunk(model))
        except Exception:
            raise UnfitModelError(f"the gradient of a single record can't be computed: {type(error).__name__}") from error


def _chunk(model: FlatModel) -> int:
    """Return how many records are computed together; never more, and never fewer, so that a row has the same bits among any others."""
    kind = model.device.type
    numbers, records = _LARGEST_MATRIX.get(kind, _LARGEST_MATRIX_ELSEWHERE), _MOST_RECORDS.get(kind, _MOST_RECORDS_ELSEWHERE)
    return max(1, min(records, numbers // model.layout.size))
