"""Changes of models that differential privacy needs."""

import copy
import math
from collections.abc import Callable
from typing import Any

from torch import nn

from flower_dp.core.root_logger import untouched_root_logger

# A group of one value without neighbors would always be normalized to zero.
_MIN_IN_GROUP = 2
_MAX_GROUPS = 32


def fix_batchnorm(model: nn.Module, *, num_groups: int | None = None) -> nn.Module:
    """Return a copy of a model with GroupNorm instead of every BatchNorm.

    The replacements are those of opacus' ModuleValidator, with the learned scale and shift of the old layers. Train the model
    again: the statistics that BatchNorm had collected are gone.

    Args:
        model: model to copy; it stays as it is.
        num_groups: number of groups of channels; must divide the channels of every such layer. By default the largest power of
            two up to 32 (Wu & He 2018) that gives groups of at least two channels, and one group for BatchNorm1d.

    Raises:
        ValueError: if `num_groups` does not divide a layer's channels, or opacus has no replacement for a layer. Or if a
            BatchNorm1d has one channel and `num_groups` is None.

    Example:
        >>> from torch import nn
        >>> from flower_dp.clients import fix_batchnorm
        >>> fix_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].num_groups
        4
    """
    with untouched_root_logger():
        from opacus.validators import ModuleValidator  # noqa: PLC0415  (slow to load)

    fixed = copy.deepcopy(model)
    replaced: dict[int, nn.Module] = {}  # a layer that is used twice stays one layer
    for name, layer in list(fixed.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            continue
        if id(layer) not in replaced:
            if type(layer) not in ModuleValidator.FIXERS:
                raise ValueError(f"layer {name!r}: opacus has no replacement for {type(layer).__name__}; replace it by hand")
            replaced[id(layer)] = _replacement(name, layer, ModuleValidator.FIXERS[type(layer)], num_groups)
        if not name:
            return replaced[id(layer)]
        parent, _, attribute = name.rpartition(".")
        setattr(fixed.get_submodule(parent), attribute, replaced[id(layer)])
    return fixed


def _replacement(name: str, layer: Any, fix: Callable[..., Any], num_groups: int | None) -> nn.Module:
    channels: int = layer.num_features
    if num_groups is None and isinstance(layer, nn.BatchNorm1d) and channels == 1:
        raise ValueError(
            f"layer {name!r}: normalizes one number a record, and GroupNorm would make it zero: leave the layer out; or give "
            "num_groups=1 if it is for sequences"
        )
    groups = _groups(layer) if num_groups is None else num_groups
    if groups < 1 or channels % groups:
        raise ValueError(f"num_groups={groups}: must divide the {channels} channels of layer {name!r}")
    new: nn.Module = fix(layer, num_groups=groups).train(layer.training)
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    return new


def _groups(layer: Any) -> int:
    if isinstance(layer, nn.BatchNorm1d):
        return 1
    groups: int = math.gcd(_MAX_GROUPS, layer.num_features)
    return max(1, groups // 2) if layer.num_features // groups < _MIN_IN_GROUP else groups
