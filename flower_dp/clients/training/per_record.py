"""Per-record gradients: one row per record, by the faster of two engines that supports the model.

`torch.func` differentiates the model for one record and vectorizes that (`vmap`): records can't mix, whatever the model's own
forward does with a batch. Opacus' expanded weights run the whole batch through the model once. They are faster for convolutions
on a CPU, and serve only stacks of layers that are known to keep records apart. `docs/accounting.md` has the figures.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from flower_dp.clients.training.batches import Inputs, each
from flower_dp.clients.training.losses import Loss, record_cross_entropy
from flower_dp.clients.training.recipe import FlatModel, outputs_of
from flower_dp.core import checks
from flower_dp.core.root_logger import untouched_root_logger

# Layers without parameters and random draws that work record by record; options that mix records are checked below.
_NAMES = (
    "Sequential Flatten Unflatten Identity ReLU LeakyReLU ELU GELU SiLU Sigmoid Tanh Softplus MaxPool1d MaxPool2d AvgPool1d "
    "AvgPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d"
)
_APART = frozenset(getattr(nn, name) for name in _NAMES.split())
# Layers whose per-record gradients by expanded weights are right. Those of an Embedding with some options are wrong (see
# `_keeps_apart`), and Conv3d fails with dilation.
_EXPANDED = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.Embedding})
# Layers for which expanded weights are faster. For linear layers alone both engines take the same time, and opacus takes time to
# import.
_FASTER = (nn.Conv1d, nn.Conv2d)
# torch's compiler, whose import takes most of a second in every process of a device.
_COMPILER = "torch._dynamo"
_OPACUS_IS_THERE = find_spec("opacus") is not None  # it is in the extra `torch`
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def record_gradients(
    model: FlatModel, inputs: Inputs, targets: Tensor, *, loss: Loss, engine: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradient [n, d] and the loss [n] of every record, at the model's present weights.

    Random numbers in the model are the same for all records. Under cross-entropy a record of an unknown class has gradient zero
    and a loss of NaN: torch's own cross-entropy would make a GPU unusable for the process.

    Args:
        model: model at its weights; its layout fixes the order of the arrays in a row.
        inputs: one row per record, n of them; a tensor, or tensors by the names of the model's arguments.
        targets: one row per record.
        loss: model outputs, targets -> loss, for batches of one record.
        engine: one of `ENGINES`; None: the choice of `engine_of`.

    Raises:
        ValueError: for an unknown engine.
    """
    name = engine_of(model) if engine is None else engine
    gradients = ENGINES[checks.one_of("engine", name, tuple(ENGINES))]
    checked = record_cross_entropy if loss is nn.functional.cross_entropy else loss
    made, losses = gradients(model, inputs, targets, checked)
    # The added dimension gives a parameter without dimensions its column as well.
    return torch.cat([part[:, None].flatten(start_dim=1) for part in made], dim=1).detach(), losses.detach()


def engine_of(model: FlatModel) -> str:
    """Return the engine for a model: by its layers and its device, never by data."""
    faster = model.device.type == "cpu" and any(isinstance(layer, _FASTER) for layer in model.module.modules())
    return "expanded-weights" if faster and _OPACUS_IS_THERE and keeps_records_apart(model.module) else "torch.func"


def keeps_records_apart(module: nn.Module) -> bool:
    """Return whether a model is a plain stack of layers that keep records apart and that expanded weights differentiate.

    Layers count by their exact type and options: a subclass, a hook or a forward of its own may mix records. Dropout does not
    count: it would draw by a record's place in the batch.
    """
    layers = [layer for _, layer in module.named_modules(remove_duplicate=False)]
    # Expanded weights would leave a layer that is used twice with wrong parameters.
    return len({id(layer) for layer in layers}) == len(layers) and all(map(_keeps_apart, layers))


def _keeps_apart(layer: nn.Module) -> bool:
    if "forward" in vars(layer) or any(getattr(layer, hooks) for hooks in _HOOKS) or type(layer) not in _APART | _EXPANDED:
        return False
    if isinstance(layer, nn.Flatten):
        return layer.start_dim >= 1
    if isinstance(layer, nn.Unflatten):
        return isinstance(layer.dim, int) and layer.dim >= 1
    if isinstance(layer, nn.Embedding):
        return layer.padding_idx is None and layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    return True


def _by_vmap(model: FlatModel, inputs: Inputs, targets: Tensor, loss: Loss) -> tuple[Sequence[Tensor], Tensor]:
    """Differentiate the model for one record, vectorized over records (`torch.func`)."""
    weights = [parameter.detach() for parameter in model.parameters]
    places = _places(model)

    def one(weights: list[Tensor], inputs: Inputs, target: Tensor) -> Tensor:
        placed = {place: weights[index] for place, index in places.items()}
        batch = each(inputs, lambda tensor: tensor.unsqueeze(0))
        arguments = {} if isinstance(batch, Tensor) else dict(batch)
        outputs = torch.func.functional_call(model.module, placed, () if arguments else (batch,), arguments, tie_weights=False)
        return loss(outputs, target.unsqueeze(0))

    vectorized = torch.func.vmap(torch.func.grad_and_value(one), in_dims=(None, 0, 0), randomness="same")
    with without_compiler():
        gradients, values = vectorized(weights, inputs, targets)
    return gradients, values


def _places(model: FlatModel) -> dict[str, int]:
    """Return the index of every trainable parameter by its name, under every name of a layer that is used twice.

    `functional_call` by itself leaves a layer that is used twice with the arrays of the call.
    """
    indices = {id(parameter): index for index, parameter in enumerate(model.parameters)}
    return {
        f"{prefix}.{name}".lstrip("."): indices[id(parameter)]
        for prefix, layer in model.module.named_modules()
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in indices
    }


def _by_expanded_weights(model: FlatModel, inputs: Inputs, targets: Tensor, loss: Loss) -> tuple[Sequence[Tensor], Tensor]:
    """Run the batch through the model once; every layer's backward pass keeps the records apart (opacus)."""
    with untouched_root_logger():
        from opacus.grad_sample import GradSampleModuleExpandedWeights  # noqa: PLC0415

    wrapped = GradSampleModuleExpandedWeights(model.module, loss_reduction="sum")
    try:
        with torch.enable_grad():
            outputs: Any = outputs_of(wrapped, inputs)
            ends = outputs.detach().requires_grad_()
            values = torch.func.vmap(loss, randomness="same")(ends.unsqueeze(1), targets.unsqueeze(1))
        outputs.backward(*torch.autograd.grad(values.sum(), ends))
        pairs = [(parameter, vars(parameter).get("grad_sample")) for parameter in model.parameters]
        gradients = [value.new_zeros(len(targets), *value.shape) if made is None else made for value, made in pairs]
    finally:
        wrapped.to_standard_module()  # takes the per-record gradients off the parameters
    return gradients, values


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let `torch.func` differentiate within this context without importing torch's compiler.

    `torch.func` calls the compiler only to turn off compiled autograd, which can't be on if the compiler was never imported. Any
    other use of the compiler imports it. The replaced attribute is private to torch: a version without the call is not affected.
    """
    if _COMPILER in sys.modules:
        yield
        return
    instead = _Absent(_COMPILER, compiled_autograd=_Absent(f"{_COMPILER}.compiled_autograd", _disable=nullcontext))
    setattr(torch, "_dynamo", instead)  # noqa: B010  (torch has it as a module that is imported when it is asked for)
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is instead:
            delattr(torch, "_dynamo")


class _Absent:
    """A stand-in for a module of the compiler, which imports the module if an unknown attribute is read."""

    def __init__(self, module: str, **known: Any) -> None:
        self.__dict__.update(known)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


ENGINES: dict[str, Callable[[FlatModel, Inputs, Tensor, Loss], tuple[Sequence[Tensor], Tensor]]] = {
    "torch.func": _by_vmap,
    "expanded-weights": _by_expanded_weights,
}
