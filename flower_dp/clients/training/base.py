"""The frozen base of a model that is trained in part, as with LoRA: it stays on the device, and its hash says which one it is."""

import hashlib

import torch
from torch import nn


def base_hash(module: nn.Module) -> str:
    """Return the SHA-256 of what a module does not train: names, shapes and values of frozen parameters and of buffers.

    It is the same on every device and in every precision that holds the values: floats count as float32. Only what is in the
    state_dict counts.

    Args:
        module: on any device.

    Returns:
        64 hexadecimal digits; "" where no parameter is frozen.

    Example:
        >>> import torch
        >>> from flower_dp.clients.training.base import base_hash
        >>> model = torch.nn.Linear(3, 2)
        >>> base_hash(model), len(base_hash(model.requires_grad_(False)))
        ('', 64)
    """
    if all(parameter.requires_grad for parameter in module.parameters()):
        return ""
    rest = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and not tensor.requires_grad
    }
    digest = hashlib.sha256()
    for name, tensor in sorted(rest.items()):
        values = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype).contiguous()
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
