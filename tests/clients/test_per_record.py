import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from flower_dp.apps.tasks.models import make
from flower_dp.clients import FlatModel
from flower_dp.clients.training import per_record
from flower_dp.clients.training.losses import hinge
from flower_dp.clients.training.per_record import ENGINES, engine_of, record_gradients
from flower_dp.core.clipping import clip_l2

CROSS_ENTROPY = nn.functional.cross_entropy
EXPANDED, VMAP = "expanded-weights", "torch.func"


MODELS = {
    "logistic": (lambda: make("logistic", seed=0), (784,), 24),
    "mlp": (lambda: make("mlp", seed=0), (784,), 12),
    "cnn": (lambda: make("cnn", seed=0), (784,), 5),
}


def case(name):
    build, shape, count = MODELS[name]
    torch.default_generator.manual_seed(3)
    return FlatModel(build()), torch.randn(count, *shape), torch.randint(10, (count,))


def one_at_a_time(flat, inputs, targets, loss=CROSS_ENTROPY):
    """Rows by plain autograd, one record a backward pass."""
    rows, losses = [], []
    for x, y in zip(inputs, targets, strict=True):
        value = loss(flat.module(x[None]), y[None])
        parts = torch.autograd.grad(value, flat.parameters, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
        losses.append(value.detach())
    return torch.stack(rows), torch.stack(losses)


def clipped_sum(rows):
    """Clipped where it matters: the bound is the middle norm."""
    bound = float(torch.linalg.vector_norm(rows, dim=1).median())
    return clip_l2(rows, bound).sum(dim=0, dtype=torch.float64)


def assert_close_sums(rows, expected):
    # Relative to the length of the sum.
    difference = torch.linalg.vector_norm(clipped_sum(rows) - clipped_sum(expected))
    assert difference <= 1e-5 * torch.linalg.vector_norm(clipped_sum(expected))


# Equal sums


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_engines_make_the_same_sums_as_plain_autograd(name):
    flat, inputs, targets = case(name)
    expected, values = one_at_a_time(flat, inputs, targets)
    for engine, chunk in itertools.product(ENGINES, (4,) if name == "cnn" else (None, 4)):
        rows, losses = record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY, engine=engine, chunk=chunk)
        assert_close_sums(rows, expected)
        torch.testing.assert_close(losses, values)


def tied():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


def frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    return model


def idle():
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return model


def image(*layers):
    return lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh(), *[layer() for layer in layers], nn.Flatten())


STACKS = {
    "tied weights": (tied, (4,)),
    "frozen parameters": (frozen, (4,)),
    "a parameter without use": (idle, (4,)),
    "group norm": (image(lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(2, 4, affine=False)), (4, 8, 8)),
    "strides": (image(lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2)), (4, 9, 10)),
    "groups": (image(lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same", bias=False)), (4, 8, 8)),
    "one axis": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.MaxPool1d(2), nn.Conv1d(4, 2, 2), nn.Flatten()), (4, 11)),
}


@pytest.mark.parametrize("count", [5, 40])  # opacus takes convolutions of 32 records and more another way
@pytest.mark.parametrize("name", STACKS)
def test_stacks_that_expanded_weights_take(name, count):
    build, shape = STACKS[name]
    torch.default_generator.manual_seed(1)
    flat, inputs, targets = FlatModel(build()), torch.randn(count, *shape), torch.randint(2, (count,))
    assert per_record.keeps_records_apart(flat.module)
    expected, _ = one_at_a_time(flat, inputs, targets)
    for engine in ENGINES:
        rows, _ = record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY, engine=engine)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_hinge_loss_by_hand(engine):
    """The gradient of max(0, 1 - y (w x + b)) is -y (x, 1) where y (w x + b) < 1; a label that is none has gradient zero."""
    flat = FlatModel(make("linear-svm", seed=0, num_features=6, num_classes=2))
    inputs, targets = torch.randn(9, 6, generator=torch.Generator().manual_seed(5)), torch.tensor([1, -1, 1, -1, 1, -1, 1, -1, 0])
    scores = flat.module(inputs)[:, 0].detach()
    active = ((targets * scores < 1) & (targets != 0)).float()
    expected = -(active * targets)[:, None] * torch.cat([inputs, torch.ones(9, 1)], dim=1)
    rows, losses = record_gradients(flat, inputs, targets, loss=hinge, engine=engine)
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(losses, active * (1 - targets * scores))
    assert 3 < active.sum() < 9


# The choice


class Centred(nn.Module):
    """Mixes the records of a batch."""

    def forward(self, x):
        return x - x.mean(0)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def hooked():
    layer = nn.Linear(4, 3)
    layer.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(0),))
    return layer


def rebound():
    layer = nn.Linear(4, 3)
    layer.forward = lambda x: nn.functional.linear(x - x.mean(0), layer.weight, layer.bias)
    return layer


def twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


OTHERS = {
    "mixed records": lambda: nn.Sequential(nn.Linear(4, 3), Centred()),
    "a subclass": lambda: nn.Sequential(OwnLinear(4, 3)),
    "a hook": lambda: nn.Sequential(hooked()),
    "a forward of its own": lambda: nn.Sequential(rebound()),
    "a layer used twice": twice,
    "a layer without expanded weights": lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_mix_records_or_is_unknown_goes_to_torch_func(name):
    torch.default_generator.manual_seed(1)
    flat, inputs, targets = FlatModel(OTHERS[name]()), torch.randn(6, 4), torch.randint(2, (6,))
    assert not per_record.keeps_records_apart(flat.module)
    assert engine_of(flat) == VMAP
    # Twice, since a call may leave something behind.
    for _ in range(2):
        rows, _ = record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY)
        torch.testing.assert_close(rows, one_at_a_time(flat, inputs, targets)[0])


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(),
        nn.Flatten(0),
        nn.Conv3d(2, 2, 2),
        nn.Embedding(7, 4, padding_idx=1),
        nn.Embedding(7, 4, max_norm=1.0),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_expanded_weights_do_not_take(layer):
    assert not per_record.keeps_records_apart(nn.Sequential(nn.Linear(4, 4), layer))


def test_the_engine_follows_from_the_model(monkeypatch):
    """Convolutions go to opacus, on a processor."""
    flat, _, _ = case("cnn")
    assert [engine_of(case(name)[0]) for name in ("logistic", "mlp", "cnn")] == [VMAP, VMAP, EXPANDED]
    flat.device = torch.device("cuda")
    assert engine_of(flat) == VMAP
    monkeypatch.setattr(per_record, "opacus_is_there", lambda: False)
    assert engine_of(case("cnn")[0]) == VMAP


def test_unknown_engines_and_chunks_are_refused():
    flat, inputs, targets = case("logistic")
    with pytest.raises(ValueError, match="engine='hooks'"):
        record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY, engine="hooks")
    with pytest.raises(ValueError, match="chunk=0"):
        record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY, chunk=0)


# Records apart


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
def test_the_bits_of_a_row_depend_on_no_other_record(name, engine):
    """Neither on how many others there are, nor on what they hold, NaN, infinity and unknown classes included."""
    flat, inputs, targets = case(name)
    gradients = partial(record_gradients, flat, loss=CROSS_ENTROPY, engine=engine, chunk=4)
    row, loss = (part[0] for part in gradients(inputs[:4], targets[:4]))
    for count in (1, 2, 3):
        alone, value = gradients(inputs[:count], targets[:count])
        assert torch.equal(alone[0], row)
        assert torch.equal(value[0], loss)
    for entry in (0.0, 1e30, math.nan, math.inf):
        others, classes = inputs[:4].clone(), targets[:4].clone()
        others[1:], classes[1:] = entry, 10
        rows, losses = gradients(others, classes)
        assert torch.equal(rows[0], row)
        assert torch.equal(losses[0], loss)
        assert losses[1:].isnan().all()


@pytest.mark.parametrize("label", [2**40, -100])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_record_of_no_class_has_gradient_zero_and_a_loss_of_nan(engine, label):
    flat, inputs, targets = case("mlp")
    targets[2] = label
    rows, losses = record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY, engine=engine)
    assert not rows[2].any()
    assert losses.isnan().tolist() == [index == 2 for index in range(12)]
    assert rows.any(dim=1).sum() == 11


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_of_a_record_stays_on_the_model(engine):
    """Gradients neither: a loss may use the parameters itself."""
    flat, inputs, targets = case("cnn")
    before = [(set(vars(layer)), flat.vector.clone()) for layer in flat.module.modules()]

    def decayed(outputs, targets):
        return CROSS_ENTROPY(outputs, targets) + sum((parameter**2).sum() for parameter in flat.parameters)

    rows, _ = record_gradients(flat, inputs, targets, loss=decayed, engine=engine)
    assert rows.any()
    for parameter in flat.parameters:
        assert parameter.grad is None
        assert not vars(parameter)
        assert any(parameter is kept for kept in flat.module.parameters())
    for layer, (names, vector) in zip(flat.module.modules(), before, strict=True):
        assert set(vars(layer)) == names
        assert torch.equal(flat.vector, vector)
