"""Stacks of linear layers: their gradients by hand, and plain training of many clients side by side.

Small models train in microseconds a step, much of which is autograd's own bookkeeping; models of this shape are most of what
federated learning simulates on processors.

Side by side, no bit of a client's update depends on who else is there, or on its place among them, as long as torch has one
thread: what is summed up is summed up client by client, by the same call on memory that is aligned alike. A batched matrix
product would not do: a matrix's last bits depend on where in memory it begins, and on whether it is the only one.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

# Records whose steps the first layer takes at once, where it has as many outputs: what saves steps costs more for more records.
_STRETCH = 128
_CACHED_FLOATS = 2**22
# 64 bytes, where memory of a tensor's own begins.
_ALIGNED_FLOATS = 16
# Multiplications from which on it pays to choose how.
_LARGE_PRODUCT = 2**20


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

    def takes(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether this is a batch whose loss is known here: float32 inputs that fit, and a class index for each of them."""
        first, last = self.layers[0], self.layers[-1]
        return (
            inputs.dtype == first.weight.dtype
            and inputs.device == targets.device == first.weight.device
            and inputs.shape[0] == len(targets) > 0
            and inputs[0].numel() == first.in_features
            and targets.dtype == torch.int64
            and targets.ndim == 1
            and bool(((targets >= 0) & (targets < last.out_features)).all())
        )

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(gradient.numel() for gradient in self._gradients)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the parts of a vector [d] that stand for the parameters, in their shapes."""
        parts = torch.split(vector, [gradient.numel() for gradient in self._gradients])
        return [part.view(gradient.shape) for part, gradient in zip(parts, self._gradients, strict=True)]

    def clients_side_by_side(self, num_records: int) -> int:
        """Return for how many clients the weights and records fit a processor's cache."""
        return max(1, _CACHED_FLOATS // max(self.size, num_records * self.layers[0].in_features))

    @torch.no_grad()
    def gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss and its gradients, in the order of the parameters; the next call overwrites them.

        Args:
            inputs: [batch, ...], flattened here.
            targets: class indices [batch].
        """
        values = [inputs.flatten(1)]
        for layer in self.layers[:-1]:
            values.append(functional.linear(values[-1], layer.weight, layer.bias).relu_())
        log_odds = functional.log_softmax(functional.linear(values[-1], self.layers[-1].weight, self.layers[-1].bias), dim=1)
        loss = functional.nll_loss(log_odds, targets)
        slope = _slope(log_odds, targets).mul_(1 / len(targets))
        slots = list(self._gradients)
        for index in reversed(range(len(self.layers))):
            if self.layers[index].bias is not None:
                torch.sum(slope, dim=0, out=slots.pop())
            torch.mm(slope.t(), values[index], out=slots.pop())
            if index:
                slope = (slope @ self.layers[index].weight).mul_(values[index] > 0)
        return loss, list(self._gradients)


class SideBySide:
    """Plain SGD of a stack for several clients at once, every client with its own weights, from those the stack has now.

    What is done to each number by itself is one operation for all clients; matrix products are taken client by client.

    Args:
        stack: the model; its weights are read until the last update is, and not written.
        num_clients: how many clients.
        batch_size: records a step.
        step_size: how far to go along the gradient of a batch's mean loss.
    """

    def __init__(self, stack: LinearStack, num_clients: int, *, batch_size: int, step_size: float) -> None:
        self._stack, self._batch_size, self._step_size = stack, batch_size, step_size
        first, *others = stack.layers
        # With few outputs, or a stretch of a single step, there is nothing to save.
        most = min(_STRETCH, first.out_features)
        self._stretch_size = most // batch_size * batch_size
        self._deferred = _Deferred(first, num_clients) if most >= 2 * batch_size else None
        lowest = self._deferred or _Formed(first, num_clients, lowest=True)
        self._layers: list[_Deferred | _Formed] = [lowest, *(_Formed(layer, num_clients) for layer in others)]

    @torch.no_grad()
    def descend(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Take a gradient step for every `batch_size` records in the order given; the last batch may be smaller.

        Args:
            inputs: every client's [records, features].
            targets: every client's class indices [records].

        Returns:
            the mean loss of every batch, before its step [clients, steps].
        """
        values = torch.stack(list(inputs), out=_room(inputs[0], len(inputs), *inputs[0].shape))
        classes = torch.stack(list(targets))
        if self._deferred is None:
            return self._stretch(values, classes)
        losses = []
        stretches = (torch.split(part, self._stretch_size, dim=1) for part in (values, classes))
        for some, their in zip(*stretches, strict=True):
            self._deferred.begin(some)
            losses.append(self._stretch(some, their))
        return torch.cat(losses, dim=1)

    @torch.no_grad()
    def update(self, client: int) -> Tensor:
        """Return one client's weights now minus those at first, a new vector [d] in the order of the parameters."""
        update = self._stack.layers[0].weight.new_empty(self._stack.size)
        slots = self._stack.views(update)
        for layer in self._layers:
            layer.write_moves(client, slots)
        return update

    def _stretch(self, inputs: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for start in range(0, inputs.shape[1], self._batch_size):
            batch = slice(start, start + self._batch_size)
            output = self._layers[0].outputs(_Matrices(inputs[:, batch]), batch)
            for layer in self._layers[1:]:
                output.all.relu_()
                output = layer.outputs(output, batch)
            log_odds = functional.log_softmax(output.all, dim=2)
            losses.append(-log_odds.gather(2, targets[:, batch, None]).mean((1, 2)))
            # The step size goes into the slope, so that nothing else needs to be scaled.
            odds = _slope(log_odds, targets[:, batch])
            slope = _Matrices(torch.mul(odds, self._step_size / odds.shape[1], out=_room(odds, *odds.shape)))
            for layer in reversed(self._layers):
                slope = layer.step(slope, batch)
        return torch.stack(losses, dim=1)


class _Matrices:
    """A matrix of every client: all in one tensor [clients, rows, columns], and each."""

    def __init__(self, all_: Tensor) -> None:
        self.all = all_

    @cached_property
    def each(self) -> tuple[Tensor, ...]:
        return self.all.unbind()


class _Formed:
    """A layer, with a copy of the weights for every client."""

    def __init__(self, layer: nn.Linear, num_clients: int, *, lowest: bool = False) -> None:
        self._layer, self._lowest = layer, lowest
        self._weights = _room(layer.weight, num_clients, *layer.weight.shape).copy_(layer.weight).unbind()
        self._transposed = [weight.t() for weight in self._weights]
        self._bias = None if layer.bias is None else layer.bias.detach().expand(num_clients, -1).clone()

    def outputs(self, values: _Matrices, batch: slice) -> _Matrices:
        """Return the outputs [clients, batch, outputs] for inputs [clients, batch, inputs], which are kept for the step."""
        self._values = values
        outputs = _products(values, self._transposed, self._layer.out_features)
        if self._bias is not None:
            outputs.all.add_(self._bias[:, None])
        return outputs

    def step(self, slope: _Matrices, batch: slice) -> _Matrices:
        """Go down the slope [clients, batch, outputs]; return the slope of the loss in what ReLU made the inputs of."""
        below = slope
        if not self._lowest:
            below = _products(slope, self._weights, self._layer.in_features)
            below.all.mul_(self._values.all > 0)
        for weight, own, values in zip(self._weights, slope.all.mT.unbind(), self._values.each, strict=True):
            weight.addmm_(own, values, alpha=-1)
        if self._bias is not None:
            self._bias.sub_(slope.all.sum(1))
        return below

    def write_moves(self, client: int, slots: list[Tensor]) -> None:
        """Pop this layer's slots and write how far a client's weight and bias have come."""
        torch.sub(self._weights[client], self._layer.weight, out=slots.pop(0))
        if self._bias is not None:
            torch.sub(self._bias[client], self._layer.bias, out=slots.pop(0))


class _Deferred:
    """A wide first layer, whose weights are not formed between steps.

    With X for a client's inputs and S for the slopes of the loss in the layer's outputs so far, step size included, the weights
    would be W - S^T X. The next outputs follow from X W^T and X X^T, each computed at once for a whole stretch of steps.
    """

    def __init__(self, layer: nn.Linear, num_clients: int) -> None:
        self._layer = layer
        # How far weight and bias of every client had come when the stretch began.
        nowhere = layer.weight.new_zeros(())
        self._moves = [(nowhere, nowhere)] * num_clients
        self._slopes = layer.weight.new_empty(0)

    def begin(self, inputs: Tensor) -> None:
        """Begin a stretch with these inputs [clients, records, inputs]."""
        layer = self._layer
        outputs = _room(inputs, *inputs.shape[:2], layer.out_features)
        for output, own in zip(outputs, inputs, strict=True):
            output.copy_(_product(own, layer.weight))
        if layer.bias is not None:
            outputs += layer.bias
        if len(self._slopes):
            self._moves = [self._formed_moves(client) for client in range(len(inputs))]
            for output, own, (weight, bias) in zip(outputs, inputs, self._moves, strict=True):
                output.addmm_(own, weight.t()).add_(bias)
        products = _products(_Matrices(inputs), inputs.mT.unbind(), inputs.shape[1]).all
        if layer.bias is not None:
            products += 1  # a bias is a weight whose input is 1
        self._inputs, self._outputs, self._products = inputs, outputs, products
        self._slopes = _room(outputs, *outputs.shape)

    def outputs(self, values: _Matrices, batch: slice) -> _Matrices:
        """Return the outputs [clients, batch, outputs] for some records of the stretch, once."""
        outputs, before = _Matrices(self._outputs[:, batch]), slice(batch.start)
        if batch.start:
            products, slopes = self._products[:, batch, before].unbind(), self._slopes[:, before].unbind()
            for output, product, slope in zip(outputs.each, products, slopes, strict=True):
                output.addmm_(product, slope, alpha=-1)
        return outputs

    def step(self, slope: _Matrices, batch: slice) -> _Matrices:
        """Go down the slope [clients, batch, outputs], and return it."""
        self._slopes[:, batch] = slope.all
        return slope

    def write_moves(self, client: int, slots: list[Tensor]) -> None:
        """Pop this layer's slots and write how far a client's weight and bias have come."""
        slopes, inputs = self._slopes[client], self._inputs[client]
        weight, bias = self._moves[client]
        torch.sub(weight, _product(slopes.t(), inputs.t()), out=slots.pop(0))
        if self._layer.bias is not None:
            torch.sub(bias, slopes.sum(0), out=slots.pop(0))

    def _formed_moves(self, client: int) -> tuple[Tensor, Tensor]:
        moves = torch.empty_like(self._layer.weight), self._layer.weight.new_zeros(self._layer.out_features)
        self.write_moves(client, list(moves))
        return moves


def _slope(log_odds: Tensor, targets: Tensor) -> Tensor:
    """Turn log-probabilities [..., classes], in place, into the slope of the summed cross-entropy in the logits."""
    odds, classes = log_odds.exp_(), targets[..., None]
    return odds.scatter_add_(-1, classes, odds.new_full(classes.shape, -1.0))


def _room(like: Tensor, num_clients: int, *shape: int) -> Tensor:
    """Return memory for numbers of every client [clients, ...], where those of each begin as a tensor of its own does."""
    size = math.prod(shape)
    padded = -(-size // _ALIGNED_FLOATS) * _ALIGNED_FLOATS
    return like.new_empty(num_clients, padded)[:, :size].view(num_clients, *shape)


def _products(ones: _Matrices, others: Sequence[Tensor], width: int) -> _Matrices:
    """Return every client's product of a matrix with another that has so many columns."""
    results = _Matrices(_room(ones.all, *ones.all.shape[:2], width))
    for result, one, other in zip(results.each, ones.each, others, strict=True):
        torch.mm(one, other, out=result)
    return results


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Return one @ other^T of matrices [m, k] and [n, k].

    A large product on a processor goes through oneDNN, as from torch's own compiler: on AMD's it takes half the time that MKL
    does, which torch calls otherwise.
    """
    large = one.shape[0] * one.shape[1] * other.shape[0] > _LARGE_PRODUCT
    if large and _ONEDNN is not None and one.device.type == "cpu" and one.dtype == torch.float32:
        result: Tensor = _ONEDNN(one, other, None, "none", [], "")
        return result
    return functional.linear(one, other)


def _onednn() -> Callable[..., Tensor] | None:
    """Return torch's linear layer by oneDNN, which is not part of its public interface, or None where there is none."""
    probe = torch.tensor([[1.0, 2.0]])
    try:
        linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        return linear if linear(probe, probe, None, "none", [], "").item() == 5 else None
    except (AttributeError, RuntimeError, TypeError):
        return None


_ONEDNN = _onednn()
