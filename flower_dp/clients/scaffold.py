"""SCAFFOLD on the client (Karimireddy et al. 2020, option II): local steps with control variates, with and without privacy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor

from flower_dp.clients.dp_fedpaq import DPFedPAQRecipe
from flower_dp.clients.reply.pipeline import Pipeline
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.privacy.release import Release


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlVariate:
    """The client's control variate for its next round: c_i' = c_i - c - Dx_i / (E eta) (eq. 9 of the DP-FedPAQ paper).

    Attributes:
        common: the server's c [d].
        divisor: E eta of this round.
    """

    slot: ClassVar[Literal["keep"]] = "keep"
    common: Tensor
    divisor: float

    def __call__(self, row: Tensor, kept: Tensor | None) -> Tensor:
        """Return c_i' [d], a function of the row that was sent, c_i (None: 0) and c alone."""
        change = -self.common - row / self.divisor
        return change if kept is None else kept + change


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldRecipe(DPFedPAQRecipe):
    """One reply: the update of E local steps along g + c - c_i, with noise as in `DPFedPAQRecipe`.

    c_i is the client's own control variate, c the server's, which is sent with the model. Both are computed from messages that
    were sent with all their noise, so they are public, and one record changes an update by no more than without them. After its
    reply a client adds -c - Dx_i / (E eta) to c_i, where Dx_i is *the row that was sent*. So update and control variate share one
    noise draw and one charge, and the server computes the same change from the message. A client without a c_i starts at zero,
    and reports this to the server.

    Attributes:
        steps: parameters that both sides know, as for `DPFedPAQRecipe`.
        epsilon: budget of all replies together, one number or one by client name; math.inf: no noise, not private.
        delta: delta of the budget, in (0, 1).
        num_replies: maximum number of replies that a client will ever send, one number or one by client name.
        calibration: `exact`: noise for all replies together; `paper`: the paper's noise, for which epsilon and delta are of one
            reply, and all replies together cost more: see `update_terms`.
        quantization_levels: levels above 0 of the quantized row; None: float32.
        loss: model outputs, targets -> loss, for batches of one record.
        common: server's c [d] of a round: see `with_vectors`.
        own: client's c_i [d]; None: zero.

    Raises:
        ValueError: for a value out of its range, naming field and value.

    Example:
        >>> from flower_dp.clients import ScaffoldRecipe
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=1.0, sensitivity="per-step")
        >>> ScaffoldRecipe(steps=steps, epsilon=1.0, delta=1e-5, num_replies=3).method
        'scaffold'
    """

    quantization_levels: int | None = None
    common: Tensor | None = field(default=None, repr=False, compare=False)
    own: Tensor | None = field(default=None, repr=False, compare=False)

    method = "scaffold"
    vectors = ("control",)

    def with_vectors(self, vectors: Mapping[str, Tensor], kept: Tensor | None) -> "ScaffoldRecipe":
        """Return the recipe of one client's reply in one round, with the server's c and its own c_i."""
        return replace(self, common=vectors["control"], own=kept)

    def pipeline(self, release: Release, *, model: FlatModel, server_round: int) -> Pipeline:
        """Return the pipeline of one client's reply: c - c_i is added to every step's gradient, and c_i' is kept."""
        made = DPFedPAQRecipe.pipeline(self, release, model=model, server_round=server_round)
        if self.common is None:
            return made
        divisor = self.steps.num_local_steps * self.steps.step_size(server_round)
        return replace(made, keep=ControlVariate(common=self.common, divisor=divisor))

    def _drift(self) -> Tensor | None:
        """Return c - c_i; both are public."""
        return self.common if self.common is None or self.own is None else self.common - self.own
