"""The recipe of local training, and the model that it trains."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_dp.clients import refusal_messages
from flower_dp.clients.training.attributes import Attributes, base_hash, fingerprint
from flower_dp.clients.training.batches import Inputs, split
from flower_dp.clients.training.channels_last import Convolutions
from flower_dp.clients.training.losses import Loss, checked
from flower_dp.clients.training.records import Records
from flower_dp.clients.training.regularizers import LUS, Regularizer
from flower_dp.clients.training.training_rng import IsolatedRng, draws_seed
from flower_dp.core import checks
from flower_dp.core.vectors import Layout

log = logging.getLogger("flwr")

# Records that are fetched from a client's data set at a time.
_FETCHED_RECORDS = 512
_FLOAT32 = torch.finfo(torch.float32)
_HALVES = (torch.float16, torch.bfloat16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPACUS = "opacus.grad_sample"
OPTIMIZERS = ("sgd", "adam")


class FlatModel:
    """A model whose trainable parameters are views into one float32 vector.

    Setting, reading and averaging the whole model are then one operation each. Frozen parameters become float32.

    Raises:
        ValueError: for layers with batch statistics, naming the layer and the replacement; for a model that opacus wraps; or for
            trainable parameters of float16 or bfloat16, naming one.

    Example:
        >>> import torch
        >>> from flower_dp.clients import FlatModel
        >>> model = FlatModel(torch.nn.Linear(3, 2))
        >>> model.vector.shape, model.layout.names
        (torch.Size([8]), ('weight', 'bias'))
    """

    def __init__(self, module: nn.Module, device: torch.device | None = None) -> None:
        _refuse_wrapped(module)
        _refuse_halves(module)
        _refuse_batch_statistics(module)
        # Data that the batched engine caches for this model.
        self.programs: dict[Any, Any] = {}
        # The cache of `findings_of`, if no other model is known to be alike.
        self.findings: Any = None
        # Complex buffers, such as the tables of rotary embeddings, stay complex.
        self.module = module.float().to(device or torch.device("cpu"))
        named = {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        self.parameters: list[Tensor] = list(named.values())
        values = {name: parameter.detach() for name, parameter in named.items()}
        self.layout = Layout.of(values)
        self.vector = self.layout.flatten(values)
        self.device = self.vector.device  # with its index: "cuda" and "cuda:0" are not equal
        self.convolutions = Convolutions(self.module, self.device)
        self._share()
        self._frozen = [value for value in self.module.parameters() if not value.requires_grad]
        # One copy of a buffer that two layers share.
        saved = {id(buffer): buffer.detach().clone() for buffer in self.module.buffers()}
        self._buffers = [
            (owner, {name: None if buffer is None else saved[id(buffer)] for name, buffer in owner._buffers.items()})
            for owner in self.module.modules()
        ]
        self._attributes = Attributes(self.module)
        self._base = fingerprint(self._frozen)

    @cached_property
    def base(self) -> str:
        """The SHA-256 of the frozen base; "" if no parameter is frozen (`base_hash`)."""
        return base_hash(self.module)

    def reset(self) -> None:
        """Restore everything in which training may have stored one client's data, before another client's data are used.

        Raises:
            ChangedBaseError: if a frozen parameter was changed: there is no copy to restore.
        """
        self.reset_buffers()
        if not torch.equal(self._base, fingerprint(self._frozen)):
            raise refusal_messages.ChangedBaseError(
                "frozen parameters (requires_grad=False): training has changed them; keep what changes in buffers"
            )

    def reset_buffers(self) -> None:
        """Restore initial buffers and attributes, and make parameters views of the vector again, before another forward pass."""
        self._attributes.restore()
        pairs = zip(self.parameters, parts(self.vector, self.layout), strict=True)
        if any(parameter.data_ptr() != part.data_ptr() for parameter, part in pairs):
            self._share()
        copies = {id(saved): saved.clone() for _, buffers in self._buffers for saved in buffers.values() if saved is not None}
        for owner, buffers in self._buffers:
            owner._buffers.clear()
            owner._buffers.update({name: None if saved is None else copies[id(saved)] for name, saved in buffers.items()})

    def _share(self) -> None:
        """Make the parameters views of the vector."""
        for parameter, part in zip(self.parameters, parts(self.vector, self.layout), strict=True):
            parameter.data = part


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The recipe of local training: minibatch SGD, SAM or Adam, with a new optimizer state every round.

    Attributes:
        learning_rate: step size of round 1 (paper: eta).
        batch_size: records per step; the last batch of an epoch may be smaller.
        num_local_epochs: passes over the client's records.
        num_local_steps: steps instead of epochs; None to count epochs.
        momentum: heavy-ball momentum, in [0, 1).
        weight_decay: L2 coefficient.
        learning_rate_decay: fraction by which the step size shrinks every round, in [0, 1).
        sam_radius: radius of the SAM perturbation, over all parameters jointly (paper: rho); 0 is plain SGD. The gradient of
            a step is taken at w + sam_radius g / ||g||, on the same batch as g (Shi et al. 2023, eqs. 8 and 9).
        regularizers: penalties in every client's objective, such as `ProximalTerm` and `BLUR`. Their gradients are taken at w,
            not at SAM's perturbed weights.
        sparsifier: selection that drops the small coordinates of the trained update; None keeps all.
        optimizer: `sgd`; or `adam` (torch.optim.Adam with its own defaults, new every round), which takes no momentum.
        loss: model outputs, targets -> mean loss of the batch. By default cross-entropy, which leaves out targets that are not
            classes (`flower_dp.clients.training.losses`).

    Example:
        >>> from flower_dp.clients import Training
        >>> Training(learning_rate=0.1, learning_rate_decay=0.5, sam_radius=0.05).step_size(3)
        0.025
    """

    learning_rate: float
    batch_size: int = 32
    num_local_epochs: int = 1
    num_local_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    learning_rate_decay: float = 0.0
    sam_radius: float = 0.0
    regularizers: tuple[Regularizer, ...] = ()
    sparsifier: LUS | None = None
    optimizer: str = "sgd"
    loss: Loss = nn.functional.cross_entropy

    def __post_init__(self) -> None:
        checks.number("learning_rate", self.learning_rate, above=0)
        checks.integer("batch_size", self.batch_size, at_least=1)
        checks.integer("num_local_epochs", self.num_local_epochs, at_least=1)
        if self.num_local_steps is not None:
            checks.integer("num_local_steps", self.num_local_steps, at_least=1)
        checks.number("momentum", self.momentum, at_least=0, below=1)
        checks.number("weight_decay", self.weight_decay, at_least=0)
        checks.number("learning_rate_decay", self.learning_rate_decay, at_least=0, below=1)
        checks.number("sam_radius", self.sam_radius, at_least=0)
        if not isinstance(self.regularizers, tuple) or not all(hasattr(item, "pull") for item in self.regularizers):
            raise ValueError(f"regularizers={self.regularizers!r}: must be a tuple of regularizers, such as ProximalTerm")
        checks.one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum={self.momentum}: must be 0 with optimizer={self.optimizer!r}")

    def step_size(self, server_round: int) -> float:
        """Return the step size of round 1, 2, ..."""
        return self.learning_rate * float((1 - self.learning_rate_decay) ** (server_round - 1))

    def train(self, model: FlatModel, records: Records, server_round: int, rng: torch.Generator) -> Tensor:
        """Train the model in place on one client's records; return the mean loss over the steps, as a 0-d tensor.

        `rng` shuffles the records. Draws of model and data set from torch's process-wide generators follow from its seed, too.
        """
        with IsolatedRng(model.vector.device, draws_seed(rng.initial_seed())):
            return self._train(model, records, server_round, rng)

    def num_steps(self, num_records: int) -> int:
        """Return the number of steps of a client with `num_records` records."""
        return self.num_local_steps or self.num_local_epochs * -(-num_records // self.batch_size)

    def positions(self, num_records: int, rng: torch.Generator) -> Iterator[Tensor]:
        """Yield the positions of the shuffled records for all steps, some whole batches at a time.

        Only an epoch's last batch may be smaller than `batch_size`.
        """
        if num_records == 0:
            raise ValueError("records: none; a client without records can't train")
        records_left = self.num_steps(num_records) * self.batch_size
        at_a_time = max(1, _FETCHED_RECORDS // self.batch_size) * self.batch_size
        while records_left > 0:
            order = torch.randperm(num_records, generator=rng)[:records_left]
            for start in range(0, order.shape[0], at_a_time):
                yield order[start : start + at_a_time]
            records_left -= -(-num_records // self.batch_size) * self.batch_size

    def _train(self, model: FlatModel, records: Records, server_round: int, rng: torch.Generator) -> Tensor:
        step_size = self.step_size(server_round)
        weights = [parameter.detach() for parameter in model.parameters]
        velocity = [torch.zeros_like(weight) for weight in weights] if self.momentum else []
        start = model.vector.clone() if self.regularizers else model.vector
        adam = torch.optim.Adam(weights, lr=step_size) if self.optimizer == "adam" else None
        losses: list[Tensor] = []
        kind: object = None
        for positions in self.positions(len(records), rng):
            fetched = records.batch(positions, model.device)
            if not losses:
                kind = self._turned_kind(model, *fetched)
            for inputs, targets in zip(*(split(part, self.batch_size) for part in fetched), strict=True):
                turned = kind is not None and model.convolutions.kind_of(inputs, targets) == kind
                with model.convolutions.channels_last() if turned else nullcontext():
                    loss, gradients = self._gradients(model, inputs, targets)
                    if self.sam_radius:
                        gradients = self._sam_gradients(model, inputs, targets, gradients)
                losses.append(loss)
                gradients = self.penalized(gradients, model.vector, start, model.layout)
                if adam is not None:
                    for weight, gradient in zip(weights, gradients, strict=True):
                        weight.grad = gradient
                    adam.step()
                    continue
                if velocity:
                    torch._foreach_mul_(velocity, self.momentum)
                    torch._foreach_add_(velocity, gradients)
                torch._foreach_add_(weights, velocity or gradients, alpha=-step_size)
        return torch.stack(losses).mean()

    def _turned_kind(self, model: FlatModel, inputs: Inputs, targets: Tensor) -> object:
        """Return the kind of these records if the model trains on them with channels last, else None.

        Call it before a client's first step, while the model is as after `reset`: then no other client's records matter.
        """
        suit = model.convolutions.suit(inputs, targets, lambda *batch: self._gradients(model, *batch)[1], key=self.loss)
        model.reset_buffers()
        return model.convolutions.kind_of(inputs, targets) if suit else None

    @torch.no_grad()
    def penalized(self, gradients: list[Tensor], weights: Tensor, start: Tensor, layout: Layout) -> list[Tensor]:
        """Return the gradients of the loss with those of weight decay and of all regularizers.

        Args:
            gradients: gradients of the loss, in the shapes of the parameters of one client or, stacked, of many.
            weights: weights of one client [d], or of many [slots, d].
            start: global model [d].
            layout: layout of the parameters.
        """
        # Not in place: autograd may return one tensor for two parameters, or an expanded one.
        if self.weight_decay:
            gradients = list(torch._foreach_add(gradients, parts(weights, layout), alpha=self.weight_decay))
        for regularizer in self.regularizers:
            gradients = list(torch._foreach_add(gradients, parts(regularizer.pull(weights, start), layout)))
        return gradients

    def _gradients(self, model: FlatModel, inputs: Inputs, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        loss = checked(self.loss)(outputs_of(model.module, inputs), targets)
        if loss.ndim:
            raise refusal_messages.UnfitLossError(refusal_messages.LOSS_SHAPE)
        return loss.detach(), list(torch.autograd.grad(loss, model.parameters, materialize_grads=True))

    def _sam_gradients(self, model: FlatModel, inputs: Inputs, targets: Tensor, gradients: list[Tensor]) -> list[Tensor]:
        """Return the gradients at w + sam_radius g / ||g||; a zero gradient g gives no step."""
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item()
        if norm < _FLOAT32.tiny or self.sam_radius >= norm * _FLOAT32.max:
            return gradients
        here = model.vector.clone()
        with torch.no_grad():
            torch._foreach_add_(model.parameters, gradients, alpha=self.sam_radius / norm)
        _, uphill = self._gradients(model, inputs, targets)
        model.vector.copy_(here)
        return uphill


def outputs_of(module: nn.Module, inputs: Inputs) -> Tensor:
    """Return the model's outputs; named tensors are its keyword arguments."""
    outputs: Tensor = module(inputs) if isinstance(inputs, Tensor) else module(**inputs)
    return outputs


def parts(vectors: Tensor, layout: Layout) -> list[Tensor]:
    """Return views of the parts of vectors [..., d], in the shapes [..., *shape] of the parameters."""
    split_up = torch.split(vectors, list(layout.sizes), dim=-1)
    return [part.view((*vectors.shape[:-1], *shape)) for part, shape in zip(split_up, layout.shapes, strict=True)]


def model_arrays(module: nn.Module) -> ArrayRecord:
    """Return a model's trainable parameters as the record to start a strategy with.

    Frozen parameters stay on the devices, as the base under LoRA adapters; the log has the number of trained parameters. A
    parameter that several layers share is sent once.

    Raises:
        ValueError: for trainable parameters of float16 or bfloat16, naming one.
    """
    _refuse_halves(module)
    parameters = {name: value.detach().cpu().numpy() for name, value in module.named_parameters() if value.requires_grad}
    trained, total = sum(value.size for value in parameters.values()), sum(value.numel() for value in module.parameters())
    if trained < total:
        log.info("%s of %s parameters are trained: only they are sent, clipped and noised", f"{trained:,}", f"{total:,}")
    return ArrayRecord({name: FlowerArray(np.asarray(value, order="C")) for name, value in parameters.items()})


def _refuse_batch_statistics(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if not mixes and getattr(layer, "running_mean", None) is None:
            continue
        advice = f"use torch.nn.GroupNorm(num_groups, {getattr(layer, 'num_features', 'num_channels')})"
        if mixes:
            advice += " or flower_dp.clients.fix_batchnorm(model)"
        elif isinstance(layer, nn.modules.instancenorm._InstanceNorm):
            advice += " or track_running_stats=False"
        else:  # a layer of unknown code, such as FrozenBatchNorm2d of torchvision
            advice += ", or its scale and shift alone if its statistics never change"
        raise refusal_messages.BatchStatisticsError(
            f"layer {name!r} ({type(layer).__name__}) mixes or keeps statistics of private records: {advice}"
        )


def _refuse_halves(module: nn.Module) -> None:
    for name, value in module.named_parameters():
        if value.requires_grad and value.dtype in _HALVES:
            raise refusal_messages.HalfPrecisionError(f"parameter {name!r} is of {value.dtype}: {refusal_messages.HALVES}")


def _refuse_wrapped(module: nn.Module) -> None:
    for layer in module.modules():
        hooks = [getattr(hook, "func", hook) for kind in _HOOKS for hook in getattr(layer, kind).values()]
        if any(str(getattr(made, "__module__", "")).startswith(_OPACUS) for made in (*type(layer).__mro__, *hooks)):
            raise refusal_messages.WrappedModelError(refusal_messages.OPACUS)
