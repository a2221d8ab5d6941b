"""Models for images and for rows of numbers. None has state that training changes: no BatchNorm."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flower_dp.apps.tasks import MODELS, vision
from flower_dp.clients.training.losses import Loss, hinge
from flower_dp.core import checks

_PIXELS = 28 * 28
_COLORED = 3 * 32 * 32
# As in the paper that group normalization comes from (Wu and He 2018).
_NUM_GROUPS = 32


def make(name: str, *, bias: bool = True, seed: int, num_features: int = _PIXELS, num_classes: int = 10) -> nn.Module:
    """Build a model on the CPU, with torch's default initialization drawn from `seed`.

    The model takes float records [batch, ...] of `num_features` numbers and returns logits [batch, num_classes]; "linear-svm"
    returns one number per record [batch, 1]. Torch's global random state does not change. The models are:

    - "logistic": one linear layer, with one row of weights per class.
    - "mlp": one hidden layer of 256 units with ReLU.
    - "cnn", for 28 x 28 pixels: two 5 x 5 convolutions of 32 and 64 channels, each with ReLU and 2 x 2 max-pooling. A dense layer
      of 512 and the output follow: 1,663,370 parameters (McMahan et al. 2017, section 3).
    - "cnn-small", for 28 x 28 pixels: convolutions of 16 and 32 channels (8 x 8 and 4 x 4, stride 2) with tanh and max-pooling.
      A dense layer of 32 with tanh and the output follow: 26,010 parameters (Papernot et al. 2021, table 1).
    - "resnet18", for 32 x 32 color pixels: torchvision's ResNet-18 with group normalization (32 groups) in place of BatchNorm.
    - "linear-svm": one row of weights, for labels -1 and +1.

    Args:
        name: one of `MODELS`.
        bias: whether the layers have bias terms.
        seed: seed of the initialization, >= 0.
        num_features: number of features of a record.
        num_classes: number of classes.

    Raises:
        ValueError: if the name is unknown, the seed negative, or the model does not fit the numbers.
    """
    kind = _kind(name)
    checks.integer("seed", seed, at_least=0)
    # Layers draw from the CPU's default generator. torch's own function for a seed would also reseed every GPU,
    # which fork_rng with no devices does not undo.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return kind.build(num_features, num_classes, bias)


def loss_of(name: str) -> Loss:
    """Return the loss of a model in training and tests: model outputs, labels -> mean loss.

    Raises:
        ValueError: if the name is unknown.
    """
    return _kind(name).loss


def predictions(name: str, outputs: Tensor) -> Tensor:
    """Return the labels [batch] that a model's outputs predict.

    Raises:
        ValueError: if the name is unknown.
    """
    return _kind(name).predict(outputs)


def _largest(outputs: Tensor) -> Tensor:
    return outputs.argmax(1)


def _sign(outputs: Tensor) -> Tensor:
    return torch.where(outputs[:, 0] > 0, 1, -1)


def _logistic(num_features: int, num_classes: int, bias: bool) -> nn.Module:
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), output=nn.Linear(num_features, num_classes, bias=bias)))


def _mlp(num_features: int, num_classes: int, bias: bool) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden=nn.Linear(num_features, 256, bias=bias),
            relu=nn.ReLU(),
            output=nn.Linear(256, num_classes, bias=bias),
        )
    )


def _cnn(num_features: int, num_classes: int, bias: bool) -> nn.Module:
    _check_pixels("cnn", num_features)
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
            output=nn.Linear(512, num_classes, bias=bias),
        )
    )


def _cnn_small(num_features: int, num_classes: int, bias: bool) -> nn.Module:
    _check_pixels("cnn-small", num_features)
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            image=nn.Unflatten(1, (1, 28, 28)),
            conv1=nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=3, bias=bias),
            tanh1=nn.Tanh(),
            pool1=nn.MaxPool2d(2, stride=1),
            conv2=nn.Conv2d(16, 32, kernel_size=4, stride=2, bias=bias),
            tanh2=nn.Tanh(),
            pool2=nn.MaxPool2d(2, stride=1),
            features=nn.Flatten(),
            dense=nn.Linear(32 * 4 * 4, 32, bias=bias),
            tanh3=nn.Tanh(),
            output=nn.Linear(32, num_classes, bias=bias),
        )
    )


def _check_pixels(model: str, num_features: int) -> None:
    if num_features != _PIXELS:
        raise ValueError(f"model={model!r}: needs 28 x 28 pixels, not {num_features} features")


def _resnet18(num_features: int, num_classes: int, bias: bool) -> nn.Module:
    if num_features != _COLORED:
        raise ValueError(f"model='resnet18': needs 3 x 32 x 32 pixels, not {num_features} features")
    if not bias:
        raise ValueError("model-bias=False: must be True for model='resnet18', whose convolutions never have bias terms")
    try:
        resnet18 = vision.import_torchvision().models.resnet18
    except ImportError as error:
        raise ValueError(f"model='resnet18': {vision.NEEDED}") from error
    body = resnet18(norm_layer=partial(nn.GroupNorm, _NUM_GROUPS), num_classes=num_classes)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), image=nn.Unflatten(1, (3, 32, 32)), resnet=body))


def _linear_svm(num_features: int, num_classes: int, bias: bool) -> nn.Module:
    if num_classes != 2:
        raise ValueError(f"model='linear-svm': needs two classes, not {num_classes}")
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), output=nn.Linear(num_features, 1, bias=bias)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A kind of model: its builder (num_features, num_classes, bias), its loss, and its predicted labels."""

    build: Callable[[int, int, bool], nn.Module]
    loss: Loss = nn.functional.cross_entropy
    predict: Callable[[Tensor], Tensor] = _largest


def _kind(name: str) -> _Kind:
    return _KINDS[checks.one_of("model", name, MODELS)]


_KINDS = {
    "logistic": _Kind(build=_logistic),
    "mlp": _Kind(build=_mlp),
    "cnn": _Kind(build=_cnn),
    "cnn-small": _Kind(build=_cnn_small),
    "resnet18": _Kind(build=_resnet18),
    "linear-svm": _Kind(build=_linear_svm, loss=hinge, predict=_sign),
}
