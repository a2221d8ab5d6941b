"""The trained model of a run folder, and how it gets into a torch module."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flower_dp.core import checks

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("flwr")

Arrays = Mapping[str, NDArray[np.generic]]


def described(arrays: Arrays, content: bytes, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a folder says of its model: shape, dtype and hash of every array, and the hash of the file.

    Args:
        arrays: the model's arrays.
        content: of the file that holds them.
        others: the arrays of the whole model that the file has not (`rest_of`).
    """
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "arrays": {
            name: {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
            for name, array in arrays.items()
        },
        "not here": dict(others),
    }


def rest_of(model: "nn.Module") -> dict[str, dict[str, Any]]:
    """Return shape, dtype and hash of what a model has besides its trainable parameters: a frozen base, and buffers.

    Only what is in its state_dict counts.
    """
    import torch  # noqa: PLC0415

    trained = {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad and parameter.numel()}
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    return {name: _said(tensor) for name, tensor in state.items() if tensor.data_ptr() not in trained}


def _said(tensor: "torch.Tensor") -> dict[str, Any]:
    import torch  # noqa: PLC0415

    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "sha256": hashlib.sha256(content).hexdigest()}


def stored_model(file: Path, description: Path) -> tuple[dict[str, NDArray[np.generic]], Mapping[str, Any]]:
    """Return the arrays of a model, in the order in which the run had them, and what is said of those that it has not.

    Raises:
        ValueError: there is no model, as in a run without a checkpoint, or it is not the one that is described.
    """
    if not (file.is_file() and description.is_file()):
        raise ValueError(f"{file.parent}: has no {file.name} with its {description.name}: only a run that has ended has them")
    content, said = file.read_bytes(), checks.json_object(str(description), description.read_bytes())
    if hashlib.sha256(content).hexdigest() != said.get("sha256"):
        raise ValueError(f"{file}: is not the run's model: its SHA-256 is not that in {description.name}")
    if unfinished := said.get("unfinished"):
        log.warning("%s: is the model of a run that did not end: %s", file, unfinished)
    arrays, names, others = load_arrays(file, content), said.get("arrays"), said.get("not here")
    if not isinstance(names, dict) or not isinstance(others, dict) or set(names) != set(arrays):
        raise ValueError(f"{description}: does not describe the arrays of {file.name}")
    return {name: arrays[name] for name in names}, others


def load_arrays(file: Path, content: bytes) -> dict[str, NDArray[np.generic]]:
    """Return the named arrays that a file's content holds.

    Raises:
        ValueError: naming the file, if it is no safetensors file.
    """
    from safetensors.numpy import load  # noqa: PLC0415

    try:
        return dict(load(content))
    except Exception as error:  # safetensors has its own class, in Rust
        raise ValueError(f"{file.parent}: {file.name} can't be read: {error}") from None


def put_into(model: "nn.Module", arrays: Arrays, others: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Replace those parameters and buffers of a model that a run has trained; return the names of the others.

    A tensor that has two names, as tied weights, is replaced by either. Arrays without names, 0, 1, ..., as a `NumPyClient` sends
    them, are those of the model's state_dict in order, or its trainable parameters.

    Args:
        model: the module, of the same architecture; on any device.
        arrays: by name.
        others: what the run's model had besides: where the module has another one of them, the two are not of one model.
        where: what has them, for errors.

    Raises:
        ValueError: naming the arrays that the model has not, that have another shape or kind of number, that the model trains
            and the run has not, or that the run did not train and are others in the model.
    """
    import torch  # noqa: PLC0415

    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    if set(arrays) == {str(index) for index in range(len(arrays))} and not set(arrays) <= set(state):
        arrays = _named(model, arrays, where)
    problems = [f"the model has no {name!r}" for name in arrays if name not in state]
    for name, array in arrays.items():
        if name in state:
            problems += _misfit(name, array, state[name])
    replaced = {id(state[name]) for name in arrays if name in state}
    problems += [
        f"{name!r} is trained by the model, and not in the run: freeze it with requires_grad_(False) if the run did so"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in replaced
    ]
    problems += [
        f"{name!r} is not that of the run, which did not train it"
        for name, said in others.items()
        if name not in state or _said(state[name]) != said
    ]
    if problems:
        raise ValueError(f"{where}: does not fit the model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, array in arrays.items():
            state[name].copy_(torch.from_numpy(np.array(array)))
    for name, array in arrays.items():
        if not torch.equal(state[name].cpu(), torch.from_numpy(np.array(array)).to(state[name].dtype)):
            log.warning("%s: %r has another value than the array that is tied to it in the model, which is taken", where, name)
    return tuple(name for name, tensor in state.items() if id(tensor) not in replaced)


def _named(model: "nn.Module", arrays: Arrays, where: str) -> Arrays:
    in_turn = [arrays[str(index)] for index in range(len(arrays))]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for names in (list(model.state_dict()), trained):
        if len(names) == len(in_turn):
            return dict(zip(names, in_turn, strict=True))
    raise ValueError(f"{where}: has {len(in_turn)} arrays without names; the model's state_dict has {len(model.state_dict())}")


def _misfit(name: str, array: NDArray[np.generic], tensor: "torch.Tensor") -> list[str]:
    if tuple(array.shape) != tuple(tensor.shape):
        return [f"{name!r} has shape {tuple(array.shape)}, in the model {tuple(tensor.shape)}"]
    if (array.dtype.kind == "f") != tensor.is_floating_point():
        return [f"{name!r} has dtype {array.dtype}, in the model {tensor.dtype}"]
    return []
