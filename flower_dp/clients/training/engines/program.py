"""Local training of a group of clients at once, for a fixed number of clients and of records in a step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from flower_dp.clients.refusal_messages import contained
from flower_dp.clients.reply.pipeline import Trained
from flower_dp.clients.training.devices import is_accelerator, is_out_of_memory, reproducible
from flower_dp.clients.training.engines.feed import Batch, Kind
from flower_dp.clients.training.engines.trace import LAYOUT, traced
from flower_dp.clients.training.losses import checked, class_losses, cross_entropy, known_classes
from flower_dp.clients.training.recipe import FlatModel, Training, parts

# A tensor, or two matrices [slots, ...] whose product it is.
Gradient = Tensor | tuple[Tensor, Tensor]

_FLOAT32 = torch.finfo(torch.float32)
# For these operations torch.func joins the tables of several clients, so an index beyond one client's table reads another's.
_aten = torch.ops.aten
_UNCHECKED = (_aten.embedding, _aten.embedding_dense_backward, _aten.index_fill, _aten.index_fill_)
# 64 bytes, the alignment of a tensor's memory on a CPU.
_ALIGNED_FLOATS = 16
# The largest distance between the loss of a batch and the mean of the losses of its records, relative to their mean size.
_TOLERANCE = 1e-4


class UnevenLossError(ValueError):
    """Raised if the loss of a batch is not the mean of the losses of its records."""


class Program:
    """The steps of a group of clients, each with its own weights in a slot of its own.

    The gradients of all slots are one `torch.func` program, traced once. Its shape never changes. Slots without a client, or with
    one that has finished, compute with other records, and their results are not used.

    Args:
        model: architecture; its frozen parameters and buffers are the same for all clients.
        training: recipe of local training.
        kind: kind of record.
        num_slots: number of clients in a group.
        sliced: whether to compute matrix products slot by slot, each in memory with the same alignment. A product's last bits can
            depend on the address at which its memory begins.

    Raises:
        Exception: if `torch.func.vmap` can't batch the model or the loss, the model draws random numbers, changes a buffer or has
            an embedding, or the loss uses the model's weights.
    """

    def __init__(self, model: FlatModel, training: Training, kind: Kind, num_slots: int, *, sliced: bool) -> None:
        self.num_slots, self.sliced, self._training = num_slots, sliced, training
        self._by_class = checked(training.loss) is cross_entropy and kind.target_type == torch.int64
        self._layout, self._vectors = model.layout, _aligned(model.vector.expand(num_slots, -1))
        self._weights = parts(self._vectors, self._layout)
        self._velocity, self._uphill = (
            parts(_aligned(self._vectors), self._layout) if used else [] for used in (training.momentum, training.sam_radius)
        )
        batch = (num_slots, training.batch_size)
        self._inputs = torch.zeros(*batch, *kind.input_shape, dtype=kind.input_type, device=model.device)
        self._targets = torch.zeros(*batch, *kind.target_shape, dtype=kind.target_type, device=model.device)
        self._num_classes: int | None = None
        # The sizes of the previous step's batches, and values computed from them.
        self._sizes: list[int] = []
        self._rows: Tensor | None = None
        self._present = torch.zeros(batch, dtype=torch.bool)
        self._shares = torch.ones(1, device=model.device).expand(self._targets.shape if self._by_class else batch).clone()
        self._traced = self._trace(model)
        graph = self._traced.graph
        if any(getattr(node.target, "overloadpacket", None) in _UNCHECKED for node in graph.nodes):
            raise RuntimeError("the model looks numbers up (an embedding), which torch.func does across clients")
        _drop_idle_views(graph)
        if sliced:
            for node in graph.find_nodes(op="call_function", target=_aten.bmm.default):
                node.target = _sliced_product
        else:
            _factor_gradients(graph, len(self._weights))
        graph.eliminate_dead_code()
        self._traced.recompile()

    def _trace(self, model: FlatModel) -> torch.fx.GraphModule:
        """Return the program: inputs, targets, shares of the loss, weights -> losses [2, slots], gradients.

        The second row is 1 for slots whose loss of the batch is not the mean of the losses of its records, else 0.
        """
        constants, loss = _constants(model), self._training.loss
        names = (*model.layout.names, *constants)

        def one(tensors: list[Tensor], inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
            given = dict(zip(names, (*tensors, *constants.values()), strict=True))
            used = dict(given)
            outputs = functional_call(model.module, used, (inputs,))
            if any(used[name] is not given[name] for name in given):
                raise RuntimeError("the model changes its buffers")
            if self._by_class:
                self._num_classes = outputs.shape[1]
                return torch.stack([(class_losses(outputs, targets) * shares).sum(), shares.new_zeros(())])
            each = vmap(lambda output, target: loss(output.unsqueeze(0), target.unsqueeze(0)))(outputs, targets)
            if each.ndim != 1:
                raise ValueError(f"loss: has shape {tuple(each.shape[1:])} for one record: must be one number")
            # Copies of a record fill up a batch. They do not change a mean over records. They would change other losses, for
            # example one that divides by the weights of the targets' classes.
            return torch.stack([(each * shares).sum(), _uneven(loss(outputs, targets).detach(), each.detach())])

        def gradients(inputs: Tensor, targets: Tensor, shares: Tensor, *weights: Tensor) -> tuple[Tensor, list[Tensor]]:
            leaves = [weight.detach().requires_grad_() for weight in weights]
            losses = vmap(one)(leaves, inputs, targets, shares)
            # No slot's loss depends on another slot's weights, so the gradient of the sum has the gradients of all slots.
            summed = torch.autograd.grad(losses[:, 0].sum(), leaves, materialize_grads=True)
            return losses.detach().T, list(summed)

        # A GPU's gradients would be computed in another thread, where nothing is recorded.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), reproducible(model.device):
            # The call replaces the model's weights by a slot's. A loss that reads the model's own weights would read constants.
            weights = [model.vector, *model.parameters]
            return traced(gradients, self._inputs, self._targets, self._shares, *self._weights, refused=weights)

    def train(self, feeds: Sequence[Iterable[Batch]], vector: Tensor, step_size: float) -> Iterator[tuple[int, Trained]]:
        """Yield the result of every feed's client, with its index, as soon as the client has finished.

        Clients start from the global model [d]. A client whose feed fails does not affect the others.

        Raises:
            Exception: if a step fails, for any client.
        """
        start = vector.to(self._vectors.device)
        self._vectors.copy_(start)
        for velocity in self._velocity:
            velocity.zero_()
        losses: list[Tensor] = []
        batches: dict[int, Batch] = {}
        training = {slot: iter(feed) for slot, feed in enumerate(feeds)}
        while training:
            finished = []
            for slot, feed in list(training.items()):
                try:
                    with contained():
                        batches[slot] = next(feed)
                except StopIteration:
                    finished.append(slot)
                except Exception as error:
                    if is_out_of_memory(error):  # not a client's fault
                        raise
                    del training[slot]
                    yield slot, error
            means = torch.stack(losses).mean(0) if finished else torch.zeros(2, 0)
            uneven = [0.0] * self.num_slots if self._by_class else means[1].tolist()
            for slot in finished:
                del training[slot]
                # A row in its own memory, so that later operations on it also give the same bits.
                row = (self._vectors[slot] - start).to(vector.device), means[0][slot]
                yield slot, UnevenLossError("loss: must be a mean over records") if uneven[slot] else row
            if training:
                self._stage(batches)
                losses.append(self._step(start, step_size))

    @torch.no_grad()
    def _step(self, start: Tensor, step_size: float) -> Tensor:
        """Take one step in every slot, away from the global model [d]; return the losses [2, slots] before it."""
        recipe = self._training
        with reproducible(self._inputs.device):
            losses, gradients = self._gradients(self._weights)
            if recipe.sam_radius:
                gradients = self._sam_gradients(gradients)
            if recipe.weight_decay or recipe.regularizers:
                whole = [gradient if isinstance(gradient, Tensor) else torch.bmm(*gradient) for gradient in gradients]
                gradients = [*recipe.penalized(whole, self._vectors, start, self._layout)]
            self._descend(gradients, step_size)
        return losses

    def _descend(self, gradients: list[Gradient], step_size: float) -> None:
        """Take one step, in place, with momentum; a product of two factors is added in one pass over memory."""
        kept, scale = (self._training.momentum, 1.0) if self._velocity else (1.0, -step_size)
        for moved, gradient in zip(self._velocity or self._weights, gradients, strict=True):
            if isinstance(gradient, Tensor):
                (moved.mul_(kept) if self._velocity else moved).add_(gradient, alpha=scale)
            else:
                moved.baddbmm_(*gradient, beta=kept, alpha=scale)
        if self._velocity:
            torch._foreach_add_(self._weights, self._velocity, alpha=-step_size)

    def _stage(self, batches: dict[int, Batch]) -> None:
        """Stack the batches, each filled up with its own last record; slots without a batch get any batch."""
        some = next(iter(batches.values()))
        inputs, targets = zip(*(batches.get(slot, some) for slot in range(self.num_slots)), strict=True)
        sizes = [batch.shape[0] for batch in targets]
        if sizes != self._sizes:
            self._sizes, self._rows, self._present = sizes, *self._places(torch.tensor(sizes)[:, None])
        for staged, given in ((self._inputs.flatten(0, 1), inputs), (self._targets.flatten(0, 1), targets)):
            if self._rows is None:
                torch.cat(given, out=staged)
            else:
                torch.index_select(torch.cat(given), 0, self._rows, out=staged)
        present = self._present
        if self._num_classes is None:
            torch.div(present, present.sum(1, keepdim=True), out=self._shares)
            return
        present = present.view(*present.shape, *[1] * (self._targets.ndim - 2))
        known = present & known_classes(self._targets, self._num_classes)
        self._targets.masked_fill_(~known, 0)
        # Without any class all shares are zero.
        torch.div(known, known.flatten(1).sum(1).clamp(min=1).view(-1, *[1] * (known.ndim - 1)), out=self._shares)

    def _places(self, sizes: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the staged rows of the joined batches of these sizes [slots, 1], and a mask of the places with a record.

        The rows are None if every batch is full: then all rows are staged in order.
        """
        place = torch.arange(self._training.batch_size)
        rows = torch.minimum(place, sizes - 1) + sizes.cumsum(0) - sizes
        present = place < sizes
        return None if present.all() else rows.flatten().to(self._inputs.device), present.to(self._inputs.device)

    def _gradients(self, weights: list[Tensor]) -> tuple[Tensor, list[Gradient]]:
        """Return the losses [2, slots], and gradients in the shapes of the weights."""
        losses, gradients = self._traced(self._inputs, self._targets, self._shares, *weights)
        return losses, gradients

    def _sam_gradients(self, gradients: list[Gradient]) -> list[Gradient]:
        """Return the gradients at w + sam_radius g / ||g||, slot by slot; at w if the gradient g is zero."""
        norm = torch.linalg.vector_norm(torch.stack([_norms(gradient) for gradient in gradients]), dim=0)
        flat = (norm < _FLOAT32.tiny) | (self._training.sam_radius >= norm * _FLOAT32.max)
        scale = (self._training.sam_radius / norm).where(~flat, 0.0)
        for uphill, weight, gradient in zip(self._uphill, self._weights, gradients, strict=True):
            if isinstance(gradient, Tensor):
                torch.mul(gradient, scale.view(-1, *[1] * (weight.ndim - 1)), out=uphill).add_(weight)
            else:
                torch.baddbmm(weight, scale[:, None, None] * gradient[0], gradient[1], out=uphill)
        return self._gradients(self._uphill)[1]


def _uneven(whole: Tensor, each: Tensor) -> Tensor:
    """Return 1.0 if the loss of a batch is not the mean of its records' losses [batch], else 0.0."""
    mean = each.mean()
    differs = ((whole - mean).abs() > _TOLERANCE * each.abs().mean()) | (whole.isfinite() != mean.isfinite())
    return differs.to(each.dtype)


def _constants(model: FlatModel) -> dict[str, Tensor]:
    """Return copies of the frozen parameters and the buffers, by name."""
    model.reset_buffers()
    frozen = {name: value for name, value in model.module.named_parameters() if not value.requires_grad}
    return {name: value.detach().clone() for name, value in (frozen | dict(model.module.named_buffers())).items()}


def _norms(gradient: Gradient) -> Tensor:
    """Return the norm of every slot's gradient [slots]; for a product A B, by ||A B||^2 = sum of A^T A * B B^T, without A B."""
    if isinstance(gradient, Tensor):
        norms: Tensor = torch.linalg.vector_norm(_apart(gradient[:, None].flatten(1)), dim=1)
        return norms
    one, other = gradient
    return _apart((torch.bmm(one.mT, one) * torch.bmm(other, other.mT)).flatten(1)).sum(1).clamp(min=0).sqrt()


def _apart(rows: Tensor) -> Tensor:
    """Return rows [slots, d] that a GPU adds up in one order: the order follows from the address of a row."""
    return _aligned(rows) if is_accelerator(rows.device) else rows


def _drop_idle_views(graph: torch.fx.Graph) -> None:
    """Replace views by their base tensors if the layouts are equal: vmap makes many views, which take time."""
    for node in graph.nodes:
        source = node
        while (source := _viewed(source)) is not None:
            if source.meta[LAYOUT] == node.meta[LAYOUT]:
                node.replace_all_uses_with(source)
                break


def _factor_gradients(graph: torch.fx.Graph, num_weights: int) -> None:
    """Return the two factors of every gradient that is a product, unless a factor shares memory with a weight."""
    *_, output = graph.nodes
    weights = set([node for node in graph.nodes if node.op == "placeholder"][-num_weights:])

    def gradient(node: Any) -> Any:
        product = _turned(node) or node
        if product.target is not _aten.bmm.default or {_owner(factor) for factor in product.args} & weights:
            return node
        if product is node:
            return product.args
        with graph.inserting_before(node):  # (A B)^T = B^T A^T
            return tuple(
                _turned(factor) or graph.call_function(_aten.transpose.int, (factor, 1, 2)) for factor in reversed(product.args)
            )

    losses, gradients = output.args[0]
    output.args = ((losses, [gradient(node) for node in gradients]),)


def _turned(node: Any) -> Any:
    """Return the node of the matrices [slots, m, k] that a node transposes; None for any other node."""
    turns = node.target is _aten.transpose.int and {node.args[1] % 3, node.args[2] % 3} == {1, 2}
    return node.args[0] if turns else None


def _owner(node: Any) -> Any:
    """Return the node whose tensor owns the memory of a node's tensor."""
    while (viewed := _viewed(node)) is not None:
        node = viewed
    return node


def _viewed(node: Any) -> Any:
    """Return the base node of a view; None for a node with memory of its own."""
    returned = getattr(getattr(node.target, "_schema", None), "returns", None)
    shares = returned and returned[0].alias_info is not None and not returned[0].alias_info.is_write
    return node.args[0] if shares or node.target is _aten._unsafe_view.default else None


def _sliced_product(ones: Tensor, others: Tensor) -> Tensor:
    """Return ones @ others of matrices [slots, m, k] and [slots, k, n], slot by slot."""
    ones, others = _aligned(ones), _aligned(others)
    result = _aligned(ones.new_empty(len(ones), ones.shape[1], others.shape[2]))
    for product, one, other in zip(result.unbind(), ones.unbind(), others.unbind(), strict=True):
        torch.mm(one, other, out=product)
    return result.contiguous()


def _aligned(matrices: Tensor) -> Tensor:
    """Return a copy of rows [slots, d] or matrices [slots, m, k] in which every slot is aligned like a separate tensor."""
    size = matrices[0].numel()
    padded = -(-size // _ALIGNED_FLOATS) * _ALIGNED_FLOATS
    room = matrices.new_empty(len(matrices), padded)[:, :size].view(matrices.shape)
    return room.copy_(matrices)
