"""Gradients by hand against autograd, and training with one against the other."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from flower_dp.clients import FlatModel, LocalTraining, TensorRecords, local_updates, stack
from flower_dp.clients.stack import LinearStack, SideBySide

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
def test_gradients_are_those_of_autograd(make):
    torch.manual_seed(0)
    model = make()
    inputs, targets = torch.randn(9, 6), torch.randint(0, 4, (9,))
    by_hand = LinearStack.of(model)
    loss = functional.cross_entropy(model(inputs), targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    own_loss, gradients = by_hand.gradients(inputs, targets)
    assert torch.allclose(own_loss, loss)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(gradients, expected, strict=True))


def _one_by_one(make, weights, batches, step_size):
    """Return one client's update and losses by autograd and torch's own SGD."""
    model = make()
    nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=step_size)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return nn.utils.parameters_to_vector(model.parameters()).detach() - weights, losses


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_clients_side_by_side_train_as_one_by_one(make, batch_size):
    """11 records: with batches of 1 to 3 the wide first layers take their steps in several stretches."""
    torch.manual_seed(1)
    model = make()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    inputs, targets = torch.randn(3, 11, 6), torch.randint(0, 4, (3, 11))
    together = SideBySide(LinearStack.of(model), 3, batch_size=batch_size, step_size=0.5)
    losses = torch.cat([together.descend(inputs, targets), together.descend(inputs.flip(1), targets.flip(1))], dim=1)
    for client in range(3):
        x, y = inputs[client], targets[client]
        batches = [
            pair
            for order in [(x, y), (x.flip(0), y.flip(0))]
            for pair in zip(*(part.split(batch_size) for part in order), strict=True)
        ]
        expected, expected_losses = _one_by_one(make, weights, batches, 0.5)
        assert torch.allclose(together.update(client), expected, atol=1e-5)
        assert losses[client].tolist() == pytest.approx(expected_losses, abs=1e-5)
        assert expected.norm() > 0.1
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), weights)


@pytest.mark.parametrize("fast", [True, False])
def test_large_layers_side_by_side(fast, monkeypatch):
    """Large enough for oneDNN, and for several stretches; and the same without oneDNN."""
    if not fast:
        monkeypatch.setattr("flower_dp.clients.stack._ONEDNN", None)
    torch.manual_seed(1)

    def make():
        return nn.Sequential(nn.Linear(300, 140), nn.ReLU(), nn.Linear(140, 5))

    model = make()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    inputs, targets = torch.randn(2, 300, 300), torch.randint(0, 5, (2, 300))
    together = SideBySide(LinearStack.of(model), 2, batch_size=30, step_size=0.2)
    together.descend(inputs, targets)
    for client in range(2):
        batches = zip(inputs[client].split(30), targets[client].split(30), strict=True)
        expected, _ = _one_by_one(make, weights, batches, 0.2)
        assert (together.update(client) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("batch_size", [65, 128, 129, 200, 256, 700])
def test_large_batches_side_by_side(batch_size):
    """Batches larger than a stretch of a wide layer, or as large as half of one."""
    torch.manual_seed(1)

    def make():
        return nn.Sequential(nn.Linear(20, 512), nn.ReLU(), nn.Linear(512, 5))

    model = make()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    inputs, targets = torch.randn(2, 600, 20), torch.randint(0, 5, (2, 600))
    together = SideBySide(LinearStack.of(model), 2, batch_size=batch_size, step_size=0.2)
    losses = together.descend(inputs, targets)
    for client in range(2):
        batches = zip(inputs[client].split(batch_size), targets[client].split(batch_size), strict=True)
        expected, expected_losses = _one_by_one(make, weights, batches, 0.2)
        assert losses[client].tolist() == pytest.approx(expected_losses, abs=1e-5)
        # A rounding may switch a ReLU.
        assert (together.update(client) - expected).norm() < 5e-3 * expected.norm()
        assert expected.norm() > 0.05


# Features, hidden layers, classes, bias, records, batch size: sizes that no vector register divides, and layers of one unit.
ODD = [
    (7, (300, 17), 3, True, 2, 32),
    (101, (64, 31, 8), 5, False, 2, 33),
    (31, (64, 31, 8), 5, True, 5, 8),
    (7, (256,), 13, False, 3, 8),
    (17, (257,), 2, False, 2, 3),
    (13, (), 37, True, 9, 2),
    (1, (65,), 3, True, 7, 2),
    (60, (1,), 3, True, 33, 33),
    (784, (64, 1), 1, True, 20, 20),
    (100, (200,), 10, True, 61, 10),
]


@pytest.mark.parametrize(("features", "hidden", "classes", "bias", "num_records", "batch_size"), ODD)
def test_no_bit_depends_on_who_else_is_there(features, hidden, classes, bias, num_records, batch_size):
    """A client alone, and with others of all kinds in all places: a matrix's last bits can depend on where its memory begins."""
    torch.manual_seed(2)
    widths = [features, *hidden, classes]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b, bias=bias), nn.ReLU())]
    linear = LinearStack.of(nn.Sequential(*layers[:-1]))
    own, others = torch.randn(num_records, features), torch.randn(17, num_records, features)
    classes_of = torch.randint(classes, (18, num_records))

    def update(before, after):
        inputs = torch.cat([others[:before], own[None], others[before : before + after]])
        targets = torch.cat([classes_of[:before], classes_of[17:], classes_of[before : before + after]])
        together = SideBySide(linear, before + 1 + after, batch_size=batch_size, step_size=0.1)
        for _ in range(2):
            together.descend(inputs, targets)
        return together.update(before)

    alone = update(0, 0)
    assert torch.isfinite(alone).all()
    for before, after in [(0, 1), (1, 0), (1, 1), (2, 0), (3, 2), (4, 5), (7, 1), (8, 0), (5, 6), (16, 1), (17, 0)]:
        assert torch.equal(update(before, after), alone), (before, after)


def test_clients_with_other_numbers_of_records_are_refused():
    together = SideBySide(LinearStack.of(nn.Linear(6, 4)), 2, batch_size=2, step_size=0.1)
    with pytest.raises(RuntimeError, match="equal size"):
        together.descend([torch.zeros(5, 6), torch.zeros(1, 6)], [torch.zeros(5, dtype=torch.int64)] * 2)


def test_torch_still_has_the_fast_product():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    assert stack._ONEDNN is not None


def test_what_one_client_has_does_not_reach_another():
    torch.manual_seed(1)
    model = MODELS["three layers"]()
    inputs, targets = torch.randn(3, 11, 6), torch.randint(0, 4, (3, 11))
    rows = []
    for wild in (0.0, 1e30, float("nan"), float("inf")):
        inputs[1] = wild
        together = SideBySide(LinearStack.of(model), 3, batch_size=2, step_size=0.5)
        together.descend(inputs, targets)
        rows.append([together.update(0), together.update(2)])
    for row in rows[1:]:
        assert torch.equal(torch.stack(row), torch.stack(rows[0]))
    assert torch.isfinite(torch.stack(rows[0])).all()


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


def _cross_entropy(outputs, targets):
    """Not the function that the stack stands for."""
    return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    "words", [{}, {"momentum": 0.5}, {"sam_radius": 0.1}, {"weight_decay": 0.1}, {"momentum": 0.5, "sam_radius": 0.1}], ids=str
)
def test_training_is_the_same_with_and_without_the_shortcut(words):
    torch.manual_seed(2)
    module = MODELS["three layers"]()
    records = [TensorRecords(inputs=torch.randn(11, 6), targets=torch.randint(0, 4, (11,))) for _ in range(3)]
    model = FlatModel(module)
    start = model.vector.clone()
    trained = []
    for loss in (functional.cross_entropy, _cross_entropy):
        training = LocalTraining(learning_rate=0.2, batch_size=4, num_local_epochs=2, loss=loss, **words)
        losses = []
        rows = local_updates(start, records, training, model=model, server_round=1, seeds=[1, 2, 3], losses=losses)
        trained.append((torch.stack(list(rows)), torch.stack(losses)))
    (rows, losses), (expected_rows, expected_losses) = trained
    assert rows.abs().max() > 1e-2
    assert torch.allclose(rows, expected_rows, atol=1e-6)
    assert torch.allclose(losses, expected_losses, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "targets", "taken"),
    [
        (torch.zeros(2, 6), torch.tensor([0, 2]), True),
        (torch.zeros(2, 2, 3), torch.tensor([0, 2]), True),
        (torch.zeros(2, 6), torch.tensor([0, 4]), False),
        (torch.zeros(2, 6), torch.tensor([0, -100]), False),
        (torch.zeros(2, 6), torch.tensor([[0], [2]]), False),
        (torch.zeros(2, 6), torch.tensor([0, 2], dtype=torch.int32), False),
        (torch.zeros(2, 6), torch.tensor([[0.5, 0.5], [0.5, 0.5]]), False),
        (torch.zeros(2, 5), torch.tensor([0, 2]), False),
        (torch.zeros(3, 6), torch.tensor([0, 2]), False),
        (torch.zeros(0, 6), torch.tensor([], dtype=torch.int64), False),
        (torch.zeros(2, 6, dtype=torch.float64), torch.tensor([0, 2]), False),
    ],
    ids=["classes", "images", "unknown class", "ignored", "rank 2", "int32", "soft", "narrow", "more inputs", "none", "float64"],
)
def test_only_plain_batches_are_taken(inputs, targets, taken):
    assert LinearStack.of(nn.Linear(6, 4)).takes(inputs, targets) is taken


def test_subclasses_and_shared_weights_are_left_to_autograd():
    class Own(nn.Linear):
        pass

    class Chain(nn.Sequential):
        pass

    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    shared[2].weight = shared[0].weight
    for module in (Own(4, 4), Chain(nn.Linear(4, 4)), shared):
        assert LinearStack.of(module) is None
