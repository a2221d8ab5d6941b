"""DP-FedPAQ on the client: a noised update of local steps on clipped gradients, quantized to a few levels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from flower_dp.clients.reply.parts import Clip, FullNoise, RecordClip, RowClip
from flower_dp.clients.reply.pipeline import Pipeline
from flower_dp.clients.reply.sending import QSGD, SinglePrecision
from flower_dp.clients.training import dry_run
from flower_dp.clients.training.clipped_steps import ClippedSteps, ConvexModel
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.records import Records
from flower_dp.core import checks, compression
from flower_dp.privacy.client_terms import ClientTerms, value_of, values_in
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, update_terms
from flower_dp.privacy.release import Release

# Rounding may make a sum of clipped gradients a little longer than its bound; a clip must not change the sum for that.
_UNCLIPPED = 1 + 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """The update from a noised sum of gradients: the sum times a public number, plus a public vector.

    Attributes:
        factor: public number, -eta / b.
        shift: public vector [d]; None for none.
    """

    slot: ClassVar[Literal["after_noise"]] = "after_noise"
    factor: float
    shift: Tensor | None = None

    def __call__(self, noised: Tensor) -> Tensor:
        """Return the row in float32."""
        update = self.factor * noised.to(torch.float64)
        return (update if self.shift is None else update + self.shift).to(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DPFedPAQRecipe:
    """One reply: the update of E local steps along means of b clipped gradients, plus noise by the client's own budget.

    A record counts as zero if its gradient is not finite, it can't be read, or it raises an error. So no record can make the
    client refuse. A client with fewer than E b records, a public number, does not reply.

    Attributes:
        steps: parameters that both sides know: step size, E, b, clip norm, and the proof of the sensitivity.
        epsilon: budget of all replies together, one number or one by client name; math.inf: no noise, not private.
        delta: delta of the budget, in (0, 1).
        num_replies: maximum number of replies that a client will ever send, one number or one by client name.
        calibration: `exact`: noise for all replies together; `paper`: the paper's noise, for which epsilon and delta are of one
            reply, and all replies together cost more: see `update_terms`.
        quantization_levels: levels above 0 of the quantized row (paper: s); None: float32.
        loss: model outputs, targets -> loss, for batches of one record.

    Raises:
        ValueError: for a value out of its range, naming field and value.

    Example:
        >>> from flower_dp.clients import DPFedPAQRecipe
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=1.0, sensitivity="per-step")
        >>> recipe = DPFedPAQRecipe(steps=steps, epsilon=1.0, delta=1e-5, num_replies=3, quantization_levels=1)
        >>> recipe.terms("device-17", range(8)).num_replies
        3
    """

    steps: FedPAQSteps
    epsilon: float | Mapping[str, float]
    delta: float
    num_replies: int | Mapping[str, int]
    calibration: str = "exact"
    quantization_levels: int | None = 10
    loss: Loss = nn.functional.cross_entropy

    method = "dp-fedpaq"

    def __post_init__(self) -> None:
        if self.quantization_levels is not None:
            compression.check_levels(self.quantization_levels)
        for replies in values_in(self.num_replies):
            checks.integer("num_replies", replies, at_least=1)
        for epsilon in values_in(self.epsilon):
            # `update_terms` refuses every other invalid value as well.
            self._terms(epsilon, 1, self.steps.num_records)

    def terms(self, name: str, records: Records) -> ClientTerms:
        """Return one client's terms.

        Raises:
            ValueError: if the client has no budget, or fewer records than a round takes.
        """
        replies = value_of("num_replies", self.num_replies, name)
        return self._terms(value_of("epsilon", self.epsilon, name), replies, len(records))

    def unfit_reason(self, model: FlatModel, records: Records) -> str | None:
        """Return why the gradient of a single record can't be computed: see `DryRunnable`."""
        if self.steps.sensitivity == "convex-glm":  # its gradients are a closed formula, without autograd
            return dry_run.of_convex(model, records, self.loss, self.steps)
        return dry_run.of_records(model, records, self.loss)

    def pipeline(self, release: Release, *, model: FlatModel, server_round: int) -> Pipeline:
        """Return the pipeline of one client's reply, with the clip and the noise of its own release."""
        steps = self.steps
        step = steps.lattice_step(release.noise_scale, model.layout.size)
        record_clip = RecordClip(clip_norm=steps.clip_norm, step=step)
        clip: Clip = record_clip
        if steps.sensitivity == "clip-update":
            clip = RowClip(clip_norm=steps.sum_norm, step=step)
        elif steps.sensitivity == "convex-glm":  # only rounds to the lattice: the slopes are clipped in `ConvexModel`
            clip = RowClip(clip_norm=_UNCLIPPED * steps.longest_sum, step=step)
        step_size = steps.step_size(server_round)
        drift = self._drift()
        train = ClippedSteps(model=model, steps=steps, record_clip=record_clip, step_size=step_size, loss=self.loss, drift=drift)
        shift = None if drift is None else -steps.num_local_steps * step_size * drift
        return Pipeline(
            train=train,
            clip=clip,
            noise=FullNoise(release=release),
            after_noise=Rescale(factor=steps.update_factor(server_round), shift=shift),
            encode=SinglePrecision() if self.quantization_levels is None else QSGD(levels=self.quantization_levels),
        )

    def refusal_reason(self, vector: Tensor, *, model: FlatModel, server_round: int) -> str | None:
        """Return why a client must not reply to a model [d] for which the sensitivity is not proved; None if it is proved."""
        if self.steps.sensitivity != "convex-glm":  # the other proofs bound the sum whatever the server sends
            return None
        convex = ConvexModel.of(model, self.loss, self.steps)
        return convex.refusal_reason(vector, self.steps, step_size=self.steps.step_size(server_round), drift=self._drift())

    def _drift(self) -> Tensor | None:
        """Return the public vector [d] that is added to every step's mean gradient; None for none."""
        return None

    def _terms(self, epsilon: float, num_replies: int, num_records: int) -> ClientTerms:
        return update_terms(
            steps=self.steps,
            epsilon=epsilon,
            delta=self.delta,
            num_replies=num_replies,
            num_records=num_records,
            calibration=self.calibration,
        )
