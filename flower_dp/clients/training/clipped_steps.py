"""Local steps on clipped gradients of single records, without replacement: the sum from which an update is computed.

Linear models with one score per record and a convex loss have float64 gradients with non-expansive steps. The clipped gradient of
such a loss is the derivative of another convex loss of the score, as smooth as the first (Song et al. 2021). So a step of size
eta <= 2 / smoothness is non-expansive, for any mixture of records. With three classes or more it is not: clipping a softmax
gradient to a norm can change its direction so that a step increases the distance between two models.

The server chooses the weights before the first step, and with SCAFFOLD a vector that is added to all steps. If weights are so
long that rounding could undo the proof, a client does not reply (`refusal_reason`; the bound is `FedPAQSteps.longest_weights`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flower_dp.clients.refusal_messages import UnfitModelError
from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.reply.pipeline import ClientJob, Trained, one_by_one
from flower_dp.clients.training.batches import Inputs
from flower_dp.clients.training.isolated_records import map_isolated
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.record_clipping import clipped_sum
from flower_dp.clients.training.records import Records
from flower_dp.clients.training.training_rng import draws_seed
from flower_dp.core import checks
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, block_of

_WIRING = (nn.Flatten, nn.Identity, nn.Sequential)
# The largest second derivative of the loss in the score, and the number of outputs from which the score is computed.
_LOSSES: dict[Loss, tuple[float, int]] = {
    nn.functional.binary_cross_entropy_with_logits: (0.25, 1),
    nn.functional.mse_loss: (2.0, 1),
    nn.functional.cross_entropy: (0.25, 2),
}

# Features of a smaller norm get the slope's bound of this norm, which keeps the bound finite. Their gradients are shorter than
# the clip norm.
_SHORTEST = 2.0**-500
# The bound on the length of all steps is itself computed with rounding.
_ROUGHLY = 1 + 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSteps:
    """The sum u of the clipped gradients of E steps, each on b records: y <- y - eta (mean of clipped gradients + drift).

    The E b records are drawn without replacement with the secret generator of the noise, anew for every reply.

    Attributes:
        step_size: step size eta of this round.
        drift: vector [d] that is added to every step's mean gradient; computed from noised messages, so public; None for none.
    """

    model: FlatModel
    steps: FedPAQSteps
    record_clip: RecordClip
    step_size: float
    loss: Loss
    drift: Tensor | None = None

    def rows(self, vector: Tensor, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's sum [d], float64, and the mean loss of the records that count, or its error."""
        convex = ConvexModel.of(self.model, self.loss, self.steps) if self.steps.sensitivity == "convex-glm" else None
        return one_by_one(jobs, partial(self._row, vector, convex), reset=self.model.reset)

    def _row(self, vector: Tensor, convex: "ConvexModel | None", job: ClientJob) -> tuple[Tensor, Tensor]:
        rng, steps = job.secret(), self.steps
        chosen = torch.from_numpy(rng.permutation(len(job.records))[: steps.num_records])
        here = vector.to(torch.float64)
        if convex is not None and (reason := convex.refusal_reason(vector, steps, step_size=self.step_size, drift=self.drift)):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvexModel:
    """A linear model with one score: w x + b, or the difference of two outputs.

    Attributes:
        model: model of the client.
        linear: the model's one layer.
        loss: binary cross-entropy on one logit, cross-entropy on two, or the squared error of one output.
        clip_norm: L2 bound on one record's gradient.
        largest_input: L2 bound of a record's features, for which the loss has the given smoothness; longer ones are scaled down.
    """

    model: FlatModel
    linear: nn.Linear
    loss: Loss
    clip_norm: float
    largest_input: float

    @property
    def columns(self) -> int:
        """The number of features, and one more for a bias."""
        return self.linear.in_features + (self.linear.bias is not None)

    @classmethod
    def of(cls, model: FlatModel, loss: Loss, steps: FedPAQSteps) -> "ConvexModel":
        """Return a linear model with one score, after checking it.

        Raises:
            ValueError: if `convex-glm` is not proved for the model, the loss or the smoothness.
        """
        needs = "must have, for sensitivity='convex-glm',"
        layers = [layer for layer in model.module.modules() if type(layer) not in _WIRING]
        trained = sum(parameter.numel() for layer in layers[:1] for parameter in layer.parameters() if parameter.requires_grad)
        if len(layers) != 1 or type(layers[0]) is not nn.Linear or model.layout.size != trained:
            kinds = ", ".join(type(layer).__name__ for layer in layers) or "none"
            raise ValueError(f"model: {needs} one trainable Linear layer, and no other but Flatten; has {kinds}")
        linear = layers[0]
        if loss not in _LOSSES:
            names = ", ".join(known.__name__ for known in _LOSSES)
            raise ValueError(f"loss: must be, for sensitivity='convex-glm', one of torch.nn.functional's {names}")
        curvature, outputs = _LOSSES[loss]
        if linear.out_features != outputs:
            has = f"has {linear.out_features}; for more classes use 'per-step' or 'clip-update'"
            raise ValueError(f"model: {needs} {outputs} outputs with {loss.__name__}, {has}")
        assert steps.smoothness is not None  # noqa: S101 (FedPAQSteps has checked it)
        square = steps.smoothness / (curvature * outputs) - (linear.bias is not None)
        if not square > 0:
            raise checks.bad("smoothness", steps.smoothness, f"above {curvature * outputs:g}: the bias alone is less smooth")
        return cls(model=model, linear=linear, loss=loss, clip_norm=steps.clip_norm, largest_input=square**0.5)

    def refusal_reason(self, vector: Tensor, steps: FedPAQSteps, *, step_size: float, drift: Tensor | None) -> str | None:
        """Return why the sensitivity is not proved for the server's model [d] and its drift [d]; None if it is.

        The text is a function of public numbers, so the server may see it.
        """
        limit = steps.longest_weights(step_size, columns=self.columns)
        ends = "rounding ends the proof of sensitivity='convex-glm'; use 'per-step' or 'clip-update'"
        if not limit > 0:
            return f"step size {step_size:g}: {ends}, or larger steps"
        norms = [float(torch.linalg.vector_norm(given, dtype=torch.float64)) for given in (vector, drift) if given is not None]
        longest = norms[0] + _ROUGHLY * steps.num_local_steps * step_size * (steps.clip_norm + sum(norms[1:]))
        if longest <= limit:
            return None
        return f"the server's model: with all local steps its weights may have norm {longest:.3g}, beyond {limit:.3g}: {ends}"

    def clipped_sum(self, weights: Tensor, records: Records, positions: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
        """Return the float64 sum [d] of the records' clipped gradients at some weights [d], and their mean loss.

        A record counts as zero if it can't be read, does not fit the model, is not of a class, or has a feature or target that is
        not finite. That depends on the record alone, never on the weights: no convex loss has a gradient that is set to zero at
        some weights only.
        """
        parts = self._read(records, positions, draws_seed(seed), weights.device)
        if not parts:
            return torch.zeros_like(weights), torch.zeros((), device=weights.device)
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        inputs = inputs * (self.largest_input / torch.linalg.vector_norm(inputs, dim=1, keepdim=True)).clamp(max=1)
        if self.linear.bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        slopes, losses = self._slopes(self._matrix(weights), inputs, targets)
        finite = targets.isfinite() & inputs.isfinite().all(dim=1)
        # Clip the slope itself: then, in floats as well, a larger slope never becomes a smaller one.
        lengths = torch.linalg.vector_norm(inputs, dim=1) * self.linear.out_features**0.5
        largest = self.clip_norm / lengths.clamp(min=_SHORTEST)
        slopes = torch.minimum(torch.maximum(slopes, -largest), largest)
        row = slopes.where(finite, 0.0) @ inputs.where(finite[:, None], 0.0)
        counted = losses[finite & losses.isfinite()]
        return self._vector(row), counted.mean() if len(counted) else torch.zeros((), device=weights.device)

    def _slopes(self, matrix: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivative of every record's loss in its score, and the loss."""
        block = block_of(self.columns)
        parts = zip(torch.split(inputs, block, dim=1), torch.split(matrix, block, dim=1), strict=True)
        outputs = sum((part @ weights.T for part, weights in parts), inputs.new_zeros(len(inputs), len(matrix)))
        score = outputs[:, 0] if self.linear.out_features == 1 else outputs[:, 1] - outputs[:, 0]
        if self.loss is nn.functional.mse_loss:
            return 2 * (score - targets), (score - targets) ** 2
        return torch.sigmoid(score) - targets, nn.functional.softplus(score) - targets * score

    def _read(self, records: Records, positions: Tensor, seed: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return features [n, f] and targets [n] of the records that can be read and fit the model, in float64."""
        size = max(1, len(positions))
        read = map_isolated(records, positions, self.fitting, size=size, device=device, seed=seed, problems=set())
        return [(features[places], labels[places]) for _, places, (features, labels) in read]

    def fitting(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [n, f] and labels [n] in float64; NaN for an unknown class.

        Raises:
            Exception: if inputs or targets do not fit the model.
        """
        if not isinstance(inputs, Tensor):
            raise TypeError("inputs: must be one tensor")
        features = inputs.to(torch.float64).reshape(len(inputs), self.linear.in_features)
        classes = targets.reshape(len(inputs))
        labels = classes.to(torch.float64)
        if self.linear.out_features == 2:
            labels = labels.where((classes == 0) | (classes == 1), torch.nan)
        return features, labels

    def _matrix(self, weights: Tensor) -> Tensor:
        """Return the weights [outputs, features], with a column for the bias."""
        columns = [part.reshape(self.linear.out_features, -1) for part in torch.split(weights, list(self.model.layout.sizes))]
        return torch.cat(columns, dim=1)

    def _vector(self, row: Tensor) -> Tensor:
        """Return the gradient [d] of a derivative in the score times features."""
        rows = row[None] if self.linear.out_features == 1 else torch.stack([-row, row])
        features = self.linear.in_features
        return torch.cat([rows[:, :features].reshape(-1), rows[:, features:].reshape(-1)])
