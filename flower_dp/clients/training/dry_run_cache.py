"""A cache of dry-run results of a model, shared by all models of torch's own layers that are alike.

Flower's `client_fn` makes a client, and with it a model, for every message. The results follow from layers, shapes and types
alone, and from no client's records.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from flower_dp.clients.training.per_record import keeps_records_apart
from flower_dp.clients.training.recipe import FlatModel

# Limits of the cache: a loss that is made anew for every message is a new key each time.
_MAX_FINDINGS = 256
_MAX_MODELS = 64
# Hooks of all modules of this process, as torch names them.
_FOR_ALL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None))


class DryRunCache(dict[Any, Any]):
    """Results by key, of limited number; a copy is empty, because its model may be changed."""

    def __setitem__(self, key: Any, result: Any) -> None:
        if len(self) >= _MAX_FINDINGS:
            self.clear()
        super().__setitem__(key, result)

    def __reduce__(self) -> tuple[Any, ...]:
        return DryRunCache, ()


def findings_of(model: FlatModel) -> DryRunCache:
    """Return the cache of a model, to read and to extend; models that are known to be alike share one."""
    key = _alike(model)  # anew each time: a hook, or another option, makes it another model
    if key is not None:
        return _shared(key)
    model.findings = findings = DryRunCache() if model.findings is None else model.findings
    return findings


@lru_cache(maxsize=_MAX_MODELS)
def _shared(key: tuple[Any, ...]) -> DryRunCache:
    """Return the cache of all models with the same `_alike`."""
    return DryRunCache()


def _alike(model: FlatModel) -> tuple[Any, ...] | None:
    """Return everything but the weights that identifies a stack of torch's own layers; None for any other model."""
    if not keeps_records_apart(model.module) or any(getattr(nn.modules.module, hooks, None) for hooks in _FOR_ALL):
        return None
    layers = []
    for name, layer in model.module.named_modules():
        options = {option: value for option, value in vars(layer).items() if not option.startswith("_")}
        if not all(map(_is_plain, options.values())):
            return None
        layers.append((name, type(layer), tuple(sorted(options.items()))))
    arrays = [(name, type(value), tuple(value.shape), value.requires_grad) for name, value in model.module.named_parameters()]
    if any(kind is not nn.Parameter for _, kind, _, _ in arrays):
        return None
    return str(model.device), torch.get_num_threads(), tuple(layers), tuple(arrays)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))
