"""The trained model of a run folder: its description, and its copy into a torch module."""

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
    """Return the description of a folder's model: shape, dtype and hash of every array, and the hash of the file.

    Args:
        arrays: arrays of the model.
        content: content of the file that holds the arrays.
        others: arrays of the whole model that the file does not have (`rest_of`).
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
    """Return shape, dtype and hash of a model's frozen parameters and buffers, as far as its state_dict has them."""
    import torch  # noqa: PLC0415

    trained = {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad and parameter.numel()}
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    return {name: _described_tensor(tensor) for name, tensor in state.items() if tensor.data_ptr() not in trained}


def _described_tensor(tensor: "torch.Tensor") -> dict[str, Any]:
    import torch  # noqa: PLC0415

    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "sha256": hashlib.sha256(content).hexdigest()}


def stored_model(file: Path, description: Path) -> tuple[dict[str, NDArray[np.generic]], Mapping[str, Any]]:
    """Return the arrays of a model, in the run's order, and the descriptions of the arrays that the run did not have.

    Raises:
        ValueError: if there is no model, as in a run without a checkpoint, or it differs from its description.
    """
    if not (file.is_file() and description.is_file()):
        raise ValueError(f"{file.parent}: has no {file.name} with its {description.name}: only a run that has ended has them")
    content, stated = file.read_bytes(), checks.json_object(str(description), description.read_bytes())
    if hashlib.sha256(content).hexdigest() != stated.get("sha256"):
        raise ValueError(f"{file}: is not the run's model: its SHA-256 is not that in {description.name}")
    if unfinished := stated.get("unfinished"):
        log.warning("%s: is the model of a run that did not end: %s", file, unfinished)
    arrays, names, others = load_arrays(file, content), stated.get("arrays"), stated.get("not here")
    if not isinstance(names, dict) or not isinstance(others, dict) or set(names) != set(arrays):
        raise ValueError(f"{description}: does not describe the arrays of {file.name}")
    return {name: arrays[name] for name in names}, others


def load_arrays(file: Path, content: bytes) -> dict[str, NDArray[np.generic]]:
    """Return the arrays in a file's content, by name.

    Raises:
        ValueError: naming the file, if it is not a safetensors file.
    """
    from safetensors.numpy import load  # noqa: PLC0415

    try:
        return dict(load(content))
    except Exception as error:  # safetensors raises a class of its own, made in Rust
        raise ValueError(f"{file.parent}: {file.name} can't be read: {error}") from None


def put_into(model: "nn.Module", arrays: Arrays, others: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Replace the parameters and buffers of a model that a run has trained; return the names of the others.

    Tied weights, one tensor with two names, are replaced under either name. Arrays without names, 0, 1, ..., as a `NumPyClient`
    sends them, are those of the model's state_dict in order, or its trainable parameters.

    Args:
        model: module of the same architecture, on any device.
        arrays: arrays of the run, by name.
        others: descriptions of the arrays of the run's model that the run did not train. The module must have the same ones.
        where: file of the arrays, for errors.

    Raises:
        ValueError: naming every array that does not fit. It is missing in the model; or has another shape or kind of number; or
            is trained by the model alone; or was not trained by the run, and differs.
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
        for name, stated in others.items()
        if name not in state or _described_tensor(state[name]) != stated
    ]
    if problems:
        raise ValueError(f"{where}: does not fit the model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, array in arrays.items():
            state[name].copy_(torch.from_numpy(np.array(array)))
    for name, array in arrays.items():
        if not torch.equal(state[name].cpu(), torch.from_numpy(np.array(array)).to(state[name].dtype)):
            log.warning("%s: %r has another value than the array that is tied to it in the model, which is used", where, name)
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
