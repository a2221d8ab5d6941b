"""NbAFL's reply without torch: clipped weights with noise, and a client's own terms, for devices of any framework."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flower_dp.clients.reply.parts import FullNoise, RowClip
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Train, Trained
from flower_dp.clients.reply.sending import SinglePrecision
from flower_dp.core import checks
from flower_dp.core.vectors import Array
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.nbafl import weights_terms
from flower_dp.privacy.release import Release

log = logging.getLogger("flwr")

# The lattice of a reply is finer than that of the averages by this factor.
_FINER = 2.0**10


def weights_pipeline(release: Release, *, train: Train, length: int) -> Pipeline:
    """Return the pipeline of one client's reply of trained *weights* [length], with the clip and the noise of its own release."""
    # Finer than needed here: averages are rounded to a coarser lattice, which must hide this one.
    step = release.lattice_step(length) / _FINER
    return Pipeline(
        train=train,
        clip=RowClip(clip_norm=release.clip_norm, step=step),
        noise=FullNoise(release=release),
        encode=SinglePrecision(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrGlobal:
    """Training whose row is the trained weights, or the global model's if training fails or is not finite.

    Attributes:
        train: training that gives weights, as NumPy arrays.
    """

    train: Train

    def rows(self, vector: Array, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's weights [d] and training loss."""
        for trained in self.train.rows(vector, jobs):
            if isinstance(trained, Exception):
                log.error("Training failed: the reply is made from the global model", exc_info=trained)
                yield vector, np.zeros(())
                continue
            weights, loss = trained
            yield (weights if bool(np.isfinite(weights).all()) else vector), loss


@dataclass(frozen=True, slots=True, kw_only=True)
class NbAFLTerms:
    """One client's own terms under NbAFL, for `privacy_mod`: its trained weights, clipped to `clip_norm`, plus Gaussian noise.

    They correspond to `NbAFLRecipe` for `LocalDPClient`. If training fails, or the weights are not finite or have other shapes,
    the client replies with the server's global model, clipped and noised. So no record decides whether a client replies.

    Attributes:
        clip_norm: L2 bound of the weights (paper: C).
        epsilon: proved upper bound for all `num_replies` replies together; math.inf: no noise, not private.
        paper_epsilon: in its place, the paper's epsilon over `uplink_exposures` replies.
        delta: delta of either epsilon.
        uplink_exposures: number of replies for which the paper's noise is calibrated (paper: L), with `paper_epsilon`.
        min_records: minimum number of records of any client (paper: m).
        num_records: number of records of this client; with fewer than `min_records` it does not reply.
        num_replies: maximum number of replies that this client will ever send; required with `epsilon`; None: `uplink_exposures`.

    Raises:
        ValueError: for a value out of its range, naming the field.

    Source: Wei et al. 2020, Algorithm 1 and Section III-A.

    Example:
        >>> from flower_dp.clients import NbAFLTerms
        >>> own = NbAFLTerms(clip_norm=2.0, epsilon=8.0, delta=1e-3, num_replies=5, min_records=20, num_records=31)
        >>> round(own.terms().release.noise_scale, 4)
        4.2934
    """

    clip_norm: float
    epsilon: float | None = None
    paper_epsilon: float | None = None
    delta: float
    uplink_exposures: int | None = None
    min_records: int
    num_records: int
    num_replies: int | None = None

    method = "nbafl"

    def __post_init__(self) -> None:
        checks.integer("num_records", self.num_records, at_least=0)
        self._terms()

    def terms(self) -> ClientTerms:
        """Return the client's terms.

        Raises:
            ValueError: if the client has fewer records than `min_records`.
        """
        if self.num_records < self.min_records:
            raise ValueError(f"min_records={self.min_records}: this client has only {self.num_records}")
        return self._terms()

    def pipeline(self, release: Release, *, train: Train, length: int) -> Pipeline:
        """Return the pipeline of the client's reply, with the model that its app has trained."""
        return weights_pipeline(release, train=WeightsOrGlobal(train=train), length=length)

    def _terms(self) -> ClientTerms:
        return weights_terms(
            clip_norm=self.clip_norm,
            epsilon=self.epsilon,
            paper_epsilon=self.paper_epsilon,
            delta=self.delta,
            uplink_exposures=self.uplink_exposures,
            min_records=self.min_records,
            num_replies=self.num_replies,
        )
