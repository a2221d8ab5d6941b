"""The reply to an evaluation under local DP: a mean of contributions with full noise. Without torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from array_api_compat import array_namespace, device

from flower_dp.clients.reply.parts import FullNoise, RecordClip
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Trained, one_by_one
from flower_dp.clients.reply.sending import Lossless
from flower_dp.core import noise
from flower_dp.core.metric_bounds import FINER_LATTICE
from flower_dp.core.vectors import Array
from flower_dp.privacy.release import Release

# The global model and a client's job -> its contributions [n, dimension], each of L1 norm at most 1, one per unit of privacy.
ContributionsOf = Callable[[Array, ClientJob], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """The exact sum of contributions within the clip's bound, as the `train` part of a pipeline.

    Attributes:
        of: function that returns a client's contributions, float64.
        record_clip: bound of the contributions, and the lattice to which each is rounded toward zero.
    """

    of: ContributionsOf
    record_clip: RecordClip

    def rows(self, vector: Array, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's sum [dimension], float64, and 0 as the loss, or its error."""
        return one_by_one(jobs, partial(self._row, vector))

    def _row(self, vector: Array, job: ClientJob) -> tuple[Array, Array]:
        xp, contributions = array_namespace(vector), self.of(vector, job)
        if np.any(np.abs(contributions).sum(axis=1) > self.record_clip.clip_norm * (1 + 1e-9)):
            raise ValueError("contributions: an L1 norm is above 1: must be at most 1")
        total = noise.round_toward_zero(contributions, self.record_clip.step).sum(axis=0)
        return xp.asarray(total, device=device(vector)), xp.zeros((), device=device(vector))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMean:
    """The noised sum divided by the public number of contributions.

    Attributes:
        num_contributions: public number of contributions.
        step: step of the lattice on which the sum must be exact.
    """

    slot: ClassVar[Literal["after_noise"]] = "after_noise"
    num_contributions: float
    step: float

    def __call__(self, noised: Array) -> Array:
        """Return the mean.

        Raises:
            ValueError: if the sum is not exact.
        """
        if not noise.is_exact(noised, self.step):
            raise ValueError("noised sum: is too large to be exact on its lattice")
        return noised / self.num_contributions


def evaluation_pipeline(release: Release, *, of: ContributionsOf, dimension: int) -> Pipeline:
    """Return the pipeline of one client's reply: a mean [dimension], float64, with the noise of its own release."""
    step = release.lattice_step(dimension) / FINER_LATTICE
    clip = RecordClip(clip_norm=release.clip_norm, step=step, norm="l1")
    return Pipeline(
        train=Contributions(of=of, record_clip=clip),
        clip=clip,
        noise=FullNoise(release=release),
        after_noise=ExactMean(num_contributions=release.expected_cohort_size, step=step),
        encode=Lossless(),
    )
