"""Models for 28 x 28 grey images with ten classes; none keeps a state that training changes (no BatchNorm)."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn


def make(name: str, *, bias: bool = True, seed: int) -> nn.Module:
    """Build a model on the CPU, with torch's default initialisation drawn from `seed`.

    It takes float images [batch, 1, 28, 28] or [batch, 784] and returns logits [batch, 10]. Torch's global random
    state is as it was before the call.

    Args:
        name: One of `MODELS`. "logistic": one linear layer, 7,850 parameters. "mlp": 784-256-10 with ReLU, 203,530.
            "cnn": two 5 x 5 convolutions of 32 and 64 channels, each with ReLU and 2 x 2 max-pooling, a dense layer
            of 512 and the output, 1,663,370 (McMahan et al. 2017, section 3).
        bias: Whether the layers have bias terms.
        seed: Seed of the initialisation, >= 0.

    Raises:
        ValueError: If the name is unknown or the seed negative.
    """
    if name not in _BUILDERS:
        raise ValueError(f"model={name!r}: must be one of {', '.join(MODELS)}")
    if seed < 0:
        raise ValueError(f"seed={seed}: must be >= 0")
    # Layers draw from the CPU's default generator. torch.manual_seed would also reseed every GPU, which fork_rng
    # with no devices does not undo.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return _BUILDERS[name](bias)


def _logistic(bias: bool) -> nn.Module:
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), output=nn.Linear(784, 10, bias=bias)))


def _mlp(bias: bool) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden=nn.Linear(784, 256, bias=bias),
            relu=nn.ReLU(),
            output=nn.Linear(256, 10, bias=bias),
        )
    )


def _cnn(bias: bool) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            image=nn.Unflatten(1, (1, 28, 28)),
            conv1=nn.Conv2d(1, 32, kernel_size=5, padding=2, bias=bias),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, kernel_size=5, padding=2, bias=bias),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            features=nn.Flatten(),
            dense=nn.Linear(64 * 7 * 7, 512, bias=bias),
            relu3=nn.ReLU(),
            output=nn.Linear(512, 10, bias=bias),
        )
    )


_BUILDERS: dict[str, Callable[[bool], nn.Module]] = {"logistic": _logistic, "mlp": _mlp, "cnn": _cnn}

MODELS = tuple(_BUILDERS)
