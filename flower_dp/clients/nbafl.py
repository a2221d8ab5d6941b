"""NbAFL on the client: proximal training, clipping of the whole weights, noise on them (Wei et al. 2020, Algorithm 1)."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flower_dp.clients.nbafl_weights import weights_pipeline
from flower_dp.clients.refusal_messages import UnfitModelError, contained, new_traceback_of
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Trained, one_by_one
from flower_dp.clients.training import dry_run
from flower_dp.clients.training.batches import repeated
from flower_dp.clients.training.losses import checked
from flower_dp.clients.training.recipe import FlatModel, Training, outputs_of
from flower_dp.clients.training.records import Records, made_up
from flower_dp.clients.training.training_rng import IsolatedRng
from flower_dp.privacy.client_terms import ClientTerms, value_of, values_in
from flower_dp.privacy.nbafl import check_epsilons, weights_terms
from flower_dp.privacy.release import Release

log = logging.getLogger("flwr")

# Synthetic records that are tried first: a whole batch may be large, and some models need more than one record.
_FEW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeights:
    """Local training whose row is the trained *weights*, or the global model's if training fails or is not finite."""

    training: Training
    model: FlatModel
    server_round: int

    def rows(self, vector: Tensor, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's weights [d] and training loss, or its error."""
        return one_by_one(jobs, partial(self._row, vector), reset=self.model.reset)

    def _row(self, vector: Tensor, job: ClientJob) -> tuple[Tensor, Tensor]:
        model = self.model
        self._check_model(vector, job.records)
        model.vector.copy_(vector)
        model.reset_buffers()
        try:
            with contained():
                loss = self.training.train(model, job.records, self.server_round, torch.Generator().manual_seed(job.seed))
        except Exception as error:
            name, trace = type(error).__name__, new_traceback_of(error)
            log.error("Training failed (%s): the reply is made from the global model%s", name, trace)
            loss = torch.zeros((), device=model.device)
            model.vector.copy_(vector)
        weights = model.vector.to(vector.device, copy=True)
        return (weights if bool(weights.isfinite().all()) else vector), loss

    def _check_model(self, vector: Tensor, records: Records) -> None:
        """Raise if the model can't be trained on synthetic records either, few or a whole batch: then no record is the cause.

        Only the synthetic records decide, whatever the client's records do.
        """
        size = self.training.batch_size
        try:
            made = made_up(records, self.model.device)
        except Exception as error:
            raise UnfitModelError(f"the model can't be trained: {type(error).__name__}") from error
        if made is None:
            return
        for count in dict.fromkeys((min(_FEW, size), size)):
            try:
                inputs, targets = repeated(*made, count)
                self.model.vector.copy_(vector)
                with IsolatedRng(self.model.vector.device, 0):
                    loss = checked(self.training.loss)(outputs_of(self.model.module, inputs), targets)
                    torch.autograd.grad(loss, self.model.parameters, allow_unused=True)
                return
            except Exception as error:
                cause = error
        raise UnfitModelError(f"the model can't be trained: {type(cause).__name__}") from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class NbAFLRecipe:
    """One reply: the locally trained *weights*, clipped to L2 norm `clip_norm`, plus Gaussian noise.

    If training fails, or gives NaN or infinite weights, the reply is made from the global model that the server sent, so that no
    record decides whether a client replies.

    Attributes:
        training: recipe of local training; the strength of its `ProximalTerm` is the paper's mu. It has no sparsifier, because
            weights are sent.
        clip_norm: L2 bound of the weights (paper: C). Fixed: the paper's median of norms depends on private data, unless it is
            computed on public data.
        epsilon: proved upper bound for all `num_replies` replies together, one number or one by client name; math.inf: no noise.
        paper_epsilon: in its place, the paper's epsilon over `uplink_exposures` replies, one number or one by client name.
        delta: delta of either epsilon.
        uplink_exposures: number of replies for which the paper's noise is calibrated (paper: L), with `paper_epsilon`.
        min_records: minimum number of records of any client (paper: m); a client with fewer does not reply.
        num_replies: maximum number of replies that a client will ever send; None: `uplink_exposures`.

    Example:
        >>> import torch
        >>> from flower_dp.clients import Training, NbAFLRecipe, TensorRecords
        >>> recipe = NbAFLRecipe(
        ...     training=Training(learning_rate=0.1),
        ...     clip_norm=2.0,
        ...     epsilon=8.0,
        ...     delta=1e-3,
        ...     num_replies=5,
        ...     min_records=20,
        ... )
        >>> records = TensorRecords(inputs=torch.randn(20, 3), targets=torch.randint(0, 2, (20,)))
        >>> round(recipe.terms("hospital-7", records).release.noise_scale, 4)
        4.2934
    """

    training: Training
    clip_norm: float
    epsilon: float | Mapping[str, float] | None = None
    paper_epsilon: float | Mapping[str, float] | None = None
    delta: float
    uplink_exposures: int | None = None
    min_records: int
    num_replies: int | Mapping[str, int] | None = None

    method = "nbafl"

    def __post_init__(self) -> None:
        if self.training.sparsifier is not None:
            raise ValueError(f"sparsifier={self.training.sparsifier}: must be None, since NbAFL sends weights and not updates")
        check_epsilons(self.epsilon, self.paper_epsilon)
        for epsilon in values_in(self._epsilon):
            for replies in values_in(self.num_replies):
                self._terms(epsilon, replies)

    def terms(self, name: str, records: Records) -> ClientTerms:
        """Return one client's terms.

        Raises:
            ValueError: if the client has no budget, or fewer records than `min_records`.
        """
        if len(records) < self.min_records:
            raise ValueError(f"min_records={self.min_records}: client {name!r} has only {len(records)}")
        field = "epsilon" if self.paper_epsilon is None else "paper_epsilon"
        return self._terms(value_of(field, self._epsilon, name), value_of("num_replies", self.num_replies, name))

    def unfit_reason(self, model: FlatModel, records: Records) -> str | None:
        """Return why the model can't be trained: see `DryRunnable`."""
        return dry_run.of_training(model, records, self.training, public=True)

    def pipeline(self, release: Release, *, model: FlatModel, server_round: int) -> Pipeline:
        """Return the pipeline of one client's reply, with the clip and the noise of its own release."""
        train = TrainedWeights(training=self.training, model=model, server_round=server_round)
        return weights_pipeline(release, train=train, length=model.layout.size)

    @property
    def _epsilon(self) -> float | Mapping[str, float] | None:
        return self.epsilon if self.paper_epsilon is None else self.paper_epsilon

    def _terms(self, epsilon: float, num_replies: int | None) -> ClientTerms:
        proved = self.paper_epsilon is None
        return weights_terms(
            clip_norm=self.clip_norm,
            epsilon=epsilon if proved else None,
            paper_epsilon=None if proved else epsilon,
            delta=self.delta,
            uplink_exposures=self.uplink_exposures,
            min_records=self.min_records,
            num_replies=num_replies,
        )
