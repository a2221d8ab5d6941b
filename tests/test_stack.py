"""Gradients by hand against autograd, and training with one against the other."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from flower_dp.clients import FlatModel, LocalTraining, TensorRecords, local_updates
from flower_dp.clients.stack import LinearStack

MODELS = {
    "one layer": lambda: nn.Linear(6, 4),
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4)),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False)),
    "three layers": lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4)),
}
OTHERS = {
    "ends in ReLU": lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU()),
    "two linear layers in a row": lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)),
    "another activation": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 4)),
    "a convolution": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 4)),
    "a partial flatten": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(6, 4)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_gradients_and_step_are_those_of_autograd(make):
    torch.manual_seed(0)
    model = make()
    inputs, targets = torch.randn(9, 6), torch.randint(0, 4, (9,))
    stack = LinearStack.of(model)
    loss = functional.cross_entropy(model(inputs), targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    by_hand, gradients = stack.gradients(inputs, targets)
    assert torch.allclose(by_hand, loss)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(gradients, expected, strict=True))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stack.descend(inputs, targets, 0.3)
    for old, new, slope in zip(before, model.parameters(), expected, strict=True):
        assert torch.allclose(new, old - 0.3 * slope, atol=1e-6)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_anything_else_is_left_to_autograd(make):
    assert LinearStack.of(make()) is None


def test_frozen_parameters_and_hooks_are_left_to_autograd():
    frozen = nn.Linear(6, 4)
    frozen.bias.requires_grad_(False)
    hooked = nn.Linear(6, 4)
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    assert LinearStack.of(frozen) is None
    assert LinearStack.of(hooked) is None


@pytest.mark.parametrize(
    "words", [{}, {"momentum": 0.5}, {"sam_radius": 0.1}, {"weight_decay": 0.1}, {"momentum": 0.5, "sam_radius": 0.1}], ids=str
)
def test_training_is_the_same_with_and_without_the_shortcut(words):
    torch.manual_seed(2)
    module = MODELS["three layers"]()
    records = [TensorRecords(inputs=torch.randn(11, 6), targets=torch.randint(0, 4, (11,))) for _ in range(3)]

    def rows(loss):
        model = FlatModel(module)
        training = LocalTraining(learning_rate=0.2, batch_size=4, num_local_epochs=2, loss=loss, **words)
        start = model.vector.clone()
        common = {"model": model, "server_round": 1, "seeds": [1, 2, 3]}
        updates = torch.stack(list(local_updates(start, records, training, **common)))
        # The way that leaves the loss out and the one that does not.
        losses = []
        measured = torch.stack(list(local_updates(start, records, training, **common, losses=losses)))
        assert torch.allclose(updates, measured, atol=1e-6)
        assert torch.isfinite(torch.stack(losses)).all()
        model.vector.copy_(start)
        return updates

    shortcut, autograd = rows(functional.cross_entropy), rows(functional.cross_entropy)
    assert shortcut.abs().max() > 1e-2
    assert torch.allclose(shortcut, autograd, atol=1e-6)


@pytest.mark.parametrize(
    ("targets", "taken"),
    [
        (torch.tensor([0, 2]), True),
        (torch.tensor([0, -100]), False),
        (torch.tensor([[0, 2]]), False),
        (torch.tensor([0, 2], dtype=torch.int32), False),
        (torch.tensor([[0.5, 0.5]]), False),
    ],
    ids=["classes", "ignored", "rank 2", "int32", "soft"],
)
def test_only_plain_class_indices_are_taken(targets, taken):
    assert LinearStack.takes(targets) is taken


def test_subclasses_and_shared_weights_are_left_to_autograd():
    class Own(nn.Linear):
        pass

    class Chain(nn.Sequential):
        pass

    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    shared[2].weight = shared[0].weight
    for module in (Own(4, 4), Chain(nn.Linear(4, 4)), shared):
        assert LinearStack.of(module) is None
