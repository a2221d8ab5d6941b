"""Gradients of a stack of linear layers by hand: what autograd gives, without its bookkeeping.

Small models train in microseconds a step, much of which is autograd's own; models of this shape are most of what federated
learning simulates on processors.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class LinearStack:
    """Flatten, then linear layers with ReLU between them, under mean cross-entropy."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self._gradients = [torch.empty_like(parameter) for layer in layers for parameter in layer.parameters()]

    @classmethod
    def of(cls, module: nn.Module) -> "LinearStack | None":
        """Return the stack that a module is, or None if it is anything else or has frozen parameters."""
        parts = list(module) if type(module) is nn.Sequential else [module]
        if parts and type(parts[0]) is nn.Flatten and (parts[0].start_dim, parts[0].end_dim) == (1, -1):
            parts = parts[1:]
        alternates = all(type(part) is (nn.ReLU if index % 2 else nn.Linear) for index, part in enumerate(parts))
        layers = [part for part in parts if isinstance(part, nn.Linear)]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        trainable = all(parameter.requires_grad for parameter in parameters)
        shared = len(set(map(id, parameters))) != len(parameters)
        fits = all(first.out_features == second.in_features for first, second in pairwise(layers))
        hooked = any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in (module, *parts))
        if not (alternates and len(parts) % 2 and trainable and fits) or hooked or shared:
            return None
        return cls(layers)

    @staticmethod
    def takes(targets: Tensor) -> bool:
        """Whether targets are class indices [batch], none of them one to ignore: the only ones whose loss is known here."""
        return targets.dtype == torch.int64 and targets.ndim == 1 and bool((targets >= 0).all())

    @torch.no_grad()
    def gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss and its gradients, in the order of the parameters; the next call overwrites them.

        Args:
            inputs: [batch, ...], flattened here.
            targets: class indices [batch].
        """
        logits, values = self._forward(inputs)
        log_odds = functional.log_softmax(logits, dim=1)
        loss = functional.nll_loss(log_odds, targets)
        slots = list(self._gradients)
        for layer, slope, value in self._backwards(values, _slope(log_odds.exp_(), targets, 1 / len(targets))):
            if layer.bias is not None:
                torch.sum(slope, dim=0, out=slots.pop())
            torch.mm(slope.t(), value, out=slots.pop())
        return loss, list(self._gradients)

    @torch.no_grad()
    def descend(self, inputs: Tensor, targets: Tensor, step_size: float) -> None:
        """Take one plain gradient step in place."""
        logits, values = self._forward(inputs)
        odds = functional.softmax(logits, dim=1)
        # The step size goes into the slope, so that nothing else needs to be scaled.
        for layer, slope, value in self._backwards(values, _slope(odds, targets, step_size / len(targets))):
            if layer.bias is not None:
                layer.bias.sub_(slope.sum(dim=0))
            layer.weight.addmm_(slope.t(), value, alpha=-1)

    def _forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits [batch, classes], and every layer's input."""
        values = [inputs.flatten(1)]
        for layer in self.layers[:-1]:
            values.append(functional.linear(values[-1], layer.weight, layer.bias).relu_())
        last = self.layers[-1]
        return functional.linear(values[-1], last.weight, last.bias), values

    def _backwards(self, values: list[Tensor], slope: Tensor) -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
        """Yield, from the last layer to the first: layer, slope of the loss in its output, its input."""
        for index in reversed(range(len(self.layers))):
            layer, value = self.layers[index], values[index]
            # Before the layer is handed out: whoever takes it may change its weights.
            below = (slope @ layer.weight).mul_(value > 0) if index else slope
            yield layer, slope, value
            slope = below


def _slope(odds: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Turn probabilities, in place, into `scale` times the slope of the summed cross-entropy in the logits."""
    odds.scatter_add_(1, targets[:, None], odds.new_full((len(targets), 1), -1.0))
    return odds.mul_(scale)
