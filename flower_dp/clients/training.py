"""Local training: global vector + the data of some clients + a recipe -> one update row a client.

A device calls it with one client, a simulation worker with many; the rows are the same to the last bit: training can magnify any
difference, and what another client changes would no longer be bounded by the clip of that client's own row.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_dp.core import checks
from flower_dp.clients.records import Records
from flower_dp.clients.stack import LinearStack, SideBySide
from flower_dp.core.vectors import Layout

# Records that are fetched from a client's data set at a time.
_FETCHED_RECORDS = 512
_FLOAT32 = torch.finfo(torch.float32)


class FlatModel:
    """A model whose trainable parameters are views into one float32 vector.

    Setting, reading and averaging the whole model are then one operation each.

    Raises:
        ValueError: for layers with batch statistics, naming the layer and the replacement.
    """

    def __init__(self, module: nn.Module, device: torch.device | None = None) -> None:
        _refuse_batch_statistics(module)
        self.device = device or torch.device("cpu")
        self.module = module.to(self.device, torch.float32)
        named = {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        self.layout = Layout.of({name: parameter.detach() for name, parameter in named.items()})
        self.parameters: list[Tensor] = list(named.values())
        self.vector = self.layout.flatten({name: parameter.detach() for name, parameter in named.items()})
        self._share(self.vector, self.parameters)
        self.stack = LinearStack.of(self.module)
        # One copy of a buffer that two layers share.
        saved = {id(buffer): buffer.detach().clone() for buffer in self.module.buffers()}
        self._buffers = [
            (owner, name, saved[id(buffer)])
            for owner in self.module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def reset_buffers(self) -> None:
        """Put the buffers back to what they were at first: what training left in them is made of one client's data."""
        fresh = {id(saved): saved.clone() for _, _, saved in self._buffers}
        for owner, name, saved in self._buffers:
            owner._buffers[name] = fresh[id(saved)]

    def _share(self, vector: Tensor, parameters: Sequence[Tensor]) -> None:
        """Make the tensors views of consecutive parts of the vector."""
        start = 0
        for parameter in parameters:
            parameter.data = vector[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """The recipe of local training: minibatch SGD or SAM, fresh momentum every round.

    Attributes:
        learning_rate: step size of round 1 (paper: eta).
        batch_size: records a step; the last batch of an epoch may be smaller.
        num_local_epochs: passes over the client's records.
        num_local_steps: steps instead of epochs; None to count epochs.
        momentum: heavy-ball momentum.
        weight_decay: L2 coefficient.
        learning_rate_decay: the step size shrinks by this part every round.
        sam_radius: radius of the SAM perturbation, over all parameters jointly (paper: rho); 0 is plain SGD. The gradient of
            a step is taken at w + sam_radius g / ||g||, on the same batch as g (Shi et al. 2023, eqs. 8 and 9).
        proximal: coefficient of (proximal / 2) ||w - w_global||^2 in every client's objective (NbAFL, FedProx; paper: mu).
        loss: model outputs, targets -> mean loss of the batch.
    """

    learning_rate: float
    batch_size: int = 32
    num_local_epochs: int = 1
    num_local_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    learning_rate_decay: float = 0.0
    sam_radius: float = 0.0
    proximal: float = 0.0
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    def __post_init__(self) -> None:
        checks.number("learning_rate", self.learning_rate, above=0)
        checks.integer("batch_size", self.batch_size, at_least=1)
        checks.integer("num_local_epochs", self.num_local_epochs, at_least=1)
        if self.num_local_steps is not None:
            checks.integer("num_local_steps", self.num_local_steps, at_least=1)
        checks.number("momentum", self.momentum, at_least=0, below=1)
        checks.number("weight_decay", self.weight_decay, at_least=0)
        checks.number("learning_rate_decay", self.learning_rate_decay, at_least=0, below=1)
        checks.number("sam_radius", self.sam_radius, at_least=0)
        checks.number("proximal", self.proximal, at_least=0)

    def step_size(self, server_round: int) -> float:
        """Return the step size of round 1, 2, ..."""
        return self.learning_rate * float((1 - self.learning_rate_decay) ** (server_round - 1))

    def train(self, model: FlatModel, records: Records, server_round: int, rng: torch.Generator) -> Tensor:
        """Train the model in place on one client's records; return the mean loss over the steps, as a 0-d tensor.

        `rng` shuffles; what model and records draw from torch's process-wide generators follows from its seed as well.
        """
        with OwnDraws(model.vector.device, draws_seed(rng.initial_seed())):
            return self._train(model, records, server_round, rng)

    def _train(self, model: FlatModel, records: Records, server_round: int, rng: torch.Generator) -> Tensor:
        step_size = self.step_size(server_round)
        stack = self._stack(model)
        velocity = [torch.zeros_like(parameter) for parameter in model.parameters] if self.momentum else []
        start = [parameter.detach().clone() for parameter in model.parameters] if self.proximal else []
        losses = []
        for fetched in self._fetched(model, records, rng):
            shortcut = stack if stack is not None and stack.takes(*fetched) else None
            for inputs, targets in zip(*(torch.split(part, self.batch_size) for part in fetched), strict=True):
                loss, gradients = self._gradients(model, shortcut, inputs, targets)
                if self.sam_radius:
                    gradients = self._sam_gradients(model, shortcut, inputs, targets, gradients)
                losses.append(loss)
                with torch.no_grad():
                    # Not in place: autograd may return one tensor for two parameters, or an expanded one.
                    pull = self.weight_decay + self.proximal
                    if pull:
                        gradients = list(torch._foreach_add(gradients, [p.detach() for p in model.parameters], alpha=pull))
                    if self.proximal:
                        gradients = list(torch._foreach_add(gradients, start, alpha=-self.proximal))
                    if self.momentum:
                        torch._foreach_mul_(velocity, self.momentum)
                        torch._foreach_add_(velocity, gradients)
                    torch._foreach_add_(model.parameters, velocity or gradients, alpha=-step_size)
        return torch.stack(losses).mean()

    def goes_side_by_side(self, model: FlatModel) -> bool:
        """Whether clients train side by side whose records are plain batches.

        With plain SGD on a stack of linear layers under cross-entropy they do, on one thread of a processor: more of them, or a
        GPU, may split a sum for one client otherwise than for several.
        """
        return self._stack_beside(model) is not None and model.device.type == "cpu" and torch.get_num_threads() == 1

    def train_side_by_side(
        self, model: FlatModel, clients: Sequence[Records], seeds: Sequence[int], server_round: int
    ) -> Iterator[tuple[Tensor, Tensor]] | None:
        """Return update [d] and loss of clients with equally many records, from the model as it is and stays.

        None for any recipe but plain SGD on a stack of linear layers under cross-entropy, and if records of any client fail or
        are not plain batches for it.
        """
        stack = self._stack_beside(model)
        if stack is None:
            return None
        together = SideBySide(stack, len(clients), batch_size=self.batch_size, step_size=self.step_size(server_round))
        losses = []
        try:
            for fetched in zip(*map(partial(self._fetched_by_itself, model), clients, seeds), strict=True):
                if not all(stack.takes(*batch) for batch in fetched):
                    return None
                losses.append(together.descend([x.flatten(1) for x, _ in fetched], [y for _, y in fetched]))
        except Exception:
            return None
        means = torch.cat(losses, dim=1).mean(1)
        return ((together.update(index), loss) for index, loss in enumerate(means))

    def _stack(self, model: FlatModel) -> LinearStack | None:
        return model.stack if self.loss is nn.functional.cross_entropy else None

    def _stack_beside(self, model: FlatModel) -> LinearStack | None:
        plain = not (self.momentum or self.weight_decay or self.sam_radius or self.proximal)
        return self._stack(model) if plain else None

    def _fetched(self, model: FlatModel, records: Records, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the shuffled records of the given number of epochs or steps, some whole batches at a time."""
        if len(records) == 0:
            raise ValueError("records: a client without records can't train")
        steps_an_epoch = -(-len(records) // self.batch_size)
        steps_left = self.num_local_steps or self.num_local_epochs * steps_an_epoch
        fetched = max(1, _FETCHED_RECORDS // self.batch_size) * self.batch_size
        while steps_left > 0:
            order = torch.randperm(len(records), generator=rng)[: steps_left * self.batch_size]
            for positions in torch.split(order, fetched):
                yield records.batch(positions, model.device)
            steps_left -= steps_an_epoch

    def _fetched_by_itself(self, model: FlatModel, records: Records, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what `_fetched` does, while others take turns: as `train` would fetch it."""
        parts = self._fetched(model, records, torch.Generator().manual_seed(seed))
        draws = OwnDraws(model.vector.device, draws_seed(seed))
        while True:
            with draws:
                part = next(parts, None)
            if part is None:
                return
            yield part

    def _gradients(
        self, model: FlatModel, stack: LinearStack | None, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        if stack is not None:
            return stack.gradients(inputs, targets)
        loss = self.loss(model.module(inputs), targets)
        return loss.detach(), list(torch.autograd.grad(loss, model.parameters, materialize_grads=True))

    def _sam_gradients(
        self, model: FlatModel, stack: LinearStack | None, inputs: Tensor, targets: Tensor, gradients: list[Tensor]
    ) -> list[Tensor]:
        """Return the gradients at the point `sam_radius` uphill; at a zero gradient there is no uphill, and no step."""
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item()
        # A norm that float32 holds with few digits or none has no direction either, and the step to take may overflow.
        if norm < _FLOAT32.tiny or self.sam_radius >= norm * _FLOAT32.max:
            return gradients
        here = model.vector.clone()
        with torch.no_grad():
            torch._foreach_add_(model.parameters, gradients, alpha=self.sam_radius / norm)
        _, uphill = self._gradients(model, stack, inputs, targets)
        model.vector.copy_(here)
        return uphill


def local_updates(
    vector: Tensor,
    clients: Sequence[Records],
    training: LocalTraining,
    *,
    model: FlatModel,
    server_round: int,
    seeds: Sequence[int],
    losses: list[Tensor] | None = None,
) -> Iterator[Tensor | Exception]:
    """Yield every client's update, trained model minus global model, one new row [d] each, in order.

    In the place of a client whose training fails stands its error. It touches no other client's row: how a client trains, side by
    side with others or alone, follows from the recipe, the model, this process and its own records.

    Args:
        vector: the global model [d], float32, on the model's device.
        clients: each client's records.
        training: the recipe.
        model: where to train; its weights are overwritten, its buffers put back before every client.
        server_round: 1, 2, ...
        seeds: one seed a client, for the order of its records and for all else that is drawn.
        losses: receives the mean training loss of every client that trained, before its row is yielded.
    """
    if len(seeds) != len(clients):
        raise ValueError(f"seeds: {len(seeds)} for {len(clients)} clients")
    # Asked once, for all of them.
    beside = training.goes_side_by_side(model)
    for group in _groups(clients, seeds, model.stack if beside else None):
        model.vector.copy_(vector)
        # Where one of several fails, each of the others still trains as it does beside those who don't.
        together = training.train_side_by_side(model, *group, server_round) if len(group[0]) > 1 else None
        for records, seed in zip(*group, strict=True):
            try:
                if together:
                    row, loss = next(together)
                else:
                    row, loss = _by_itself(vector, records, training, model, server_round, seed, beside)
            except Exception as error:
                yield error
                continue
            if losses is not None:
                losses.append(loss)
            yield row


def _by_itself(
    vector: Tensor, records: Records, training: LocalTraining, model: FlatModel, server_round: int, seed: int, beside: bool
) -> tuple[Tensor, Tensor]:
    """Return one client's update and loss, made as beside others where that is how its records train."""
    model.vector.copy_(vector)
    together = training.train_side_by_side(model, [records], [seed], server_round) if beside else None
    if together:
        return next(together)
    model.reset_buffers()
    try:
        loss = training.train(model, records, server_round, torch.Generator().manual_seed(seed))
        return model.vector - vector, loss
    finally:
        model.reset_buffers()  # what is left must not be told by an evaluation of the model either


def _groups(
    clients: Sequence[Records], seeds: Sequence[int], stack: LinearStack | None
) -> Iterator[tuple[Sequence[Records], Sequence[int]]]:
    """Yield neighbours that could train side by side: with equally many records, and no more than fits a cache."""
    sizes = [_size(records) for records in clients]
    start = 0
    while start < len(clients):
        most = stack.clients_side_by_side(min(sizes[start], _FETCHED_RECORDS)) if stack else 1
        stop = start + 1
        while stop < len(clients) and sizes[stop] == sizes[start] and stop - start < most:
            stop += 1
        yield clients[start:stop], seeds[start:stop]
        start = stop


def _size(records: Records) -> int:
    """Return how many records there are, 0 where even that fails: training will tell why."""
    try:
        return len(records)
    except Exception:
        return 0


class OwnDraws:
    """Torch's process-wide generators, lent to one client: what is drawn within follows from its seed alone, dropout for example.

    A second time within, draws go on where they stopped. Without, nothing is seen of them.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        # Of every kind of device that has such generators; the processor's are used beside a GPU's.
        others = getattr(torch.get_device_module(device), "default_generators", None)
        self._lent: list[torch.Generator] = [torch.default_generator, *([others[device.index]] if others else [])]
        self._kept = [torch.Generator(generator.device).manual_seed(seed).get_state() for generator in self._lent]

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        for index, generator in enumerate(self._lent):
            state = generator.get_state()
            generator.set_state(self._kept[index])
            self._kept[index] = state


def draws_seed(seed: int) -> int:
    """Return the seed for all that is drawn beside the order of records, which `seed` itself is for."""
    digest = hashlib.blake2b(f"{seed}/draws".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def batch_seed(seed: int, server_round: int, client: str) -> int:
    """Return the seed for the order of one client's records in one round, the same wherever the client lives."""
    digest = hashlib.blake2b(f"{seed}/{server_round}/{client}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def model_arrays(module: nn.Module) -> ArrayRecord:
    """Return a model's trainable parameters as the record to start a strategy with."""
    parameters = {name: value.detach().cpu().numpy() for name, value in module.named_parameters() if value.requires_grad}
    return ArrayRecord({name: FlowerArray(np.asarray(value, order="C")) for name, value in parameters.items()})


def _refuse_batch_statistics(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if getattr(layer, "running_mean", None) is not None or isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) mixes and keeps statistics of private records: use GroupNorm instead, "
                f"e.g. torch.nn.GroupNorm(num_groups, {getattr(layer, 'num_features', 'num_channels')})"
            )
