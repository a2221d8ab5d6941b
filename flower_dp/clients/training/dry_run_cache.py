"""What made-up records have said of a model: found out once for all models of torch's own layers that are alike.

Flower's `client_fn` makes a client, and with it a model, for every message. What is found out follows from layers, shapes and
types alone, and from no client's records.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from flower_dp.clients.training.per_record import keeps_records_apart
from flower_dp.clients.training.recipe import FlatModel

# A loss that is made anew for every message is a new question each time.
_MOST_FINDINGS = 256
_MOST_MODELS = 64
# Hooks of all modules of this process, as torch names them.
_FOR_ALL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None))


class DryRunCache(dict[Any, Any]):
    """Answers by question, so many at most; a copy has none, for it may belong to a model that is changed."""

    def __setitem__(self, question: Any, answer: Any) -> None:
        if len(self) >= _MOST_FINDINGS:
            self.clear()
        super().__setitem__(question, answer)

    def __reduce__(self) -> tuple[Any, ...]:
        return DryRunCache, ()


def findings_of(model: FlatModel) -> DryRunCache:
    """Return what is known of a model, to be asked and added to: the same for all that are alike, as far as that can be told."""
    alike = _alike(model)  # anew each time: a hook, or another option, makes it another model
    if alike is not None:
        return _shared(alike)
    model.findings = own = DryRunCache() if model.findings is None else model.findings
    return own


@lru_cache(maxsize=_MOST_MODELS)
def _shared(alike: tuple[Any, ...]) -> DryRunCache:
    """Return the findings of all models of which `_alike` says the same."""
    return DryRunCache()


def _alike(model: FlatModel) -> tuple[Any, ...] | None:
    """Return all that a stack of torch's own layers is told by but its weights; None for another model."""
    if not keeps_records_apart(model.module) or any(getattr(nn.modules.module, hooks, None) for hooks in _FOR_ALL):
        return None
    layers = []
    for name, layer in model.module.named_modules():
        options = {option: value for option, value in vars(layer).items() if not option.startswith("_")}
        if not all(map(_is_plain, options.values())):
            return None
        layers.append((name, type(layer), tuple(sorted(options.items()))))
    arrays = [(name, type(one), tuple(one.shape), one.requires_grad) for name, one in model.module.named_parameters()]
    if any(kind is not nn.Parameter for _, kind, _, _ in arrays):
        return None
    return str(model.device), torch.get_num_threads(), tuple(layers), tuple(arrays)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))
