import math
import operator
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flower_dp.apps.tasks.models import make
from flower_dp.clients import FlatModel
from flower_dp.clients.training import per_record
from flower_dp.clients.training.losses import cross_entropy, hinge, record_cross_entropy
from flower_dp.clients.training.per_record import ENGINES, engine_of, record_gradients
from tests.clients.test_engines import Rotary, Scaled

CROSS_ENTROPY = nn.functional.cross_entropy
EXPANDED, VMAP = "expanded-weights", "torch.func"


MODELS = {"logistic": VMAP, "mlp": VMAP, "cnn": EXPANDED}


def case(name):
    torch.default_generator.manual_seed(3)
    return FlatModel(make(name, seed=0)), torch.randn(4, 784), torch.randint(10, (4,))


def one_at_a_time(flat, inputs, targets):
    """Rows by plain autograd, one record a backward pass."""
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        parts = torch.autograd.grad(CROSS_ENTROPY(flat.module(x[None]), y[None]), flat.parameters, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


# Equal rows


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
    expected = one_at_a_time(flat, inputs, targets)
    for engine in ENGINES:
        rows, _ = record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY, engine=engine)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("build", [Rotary, Scaled])
def test_complex_tables_and_parameters_without_dimensions(build):
    flat, inputs, targets = FlatModel(build().double()), torch.randn(6, 4), torch.randint(3, (6,))
    assert build is Scaled or (flat.module.turns.is_complex() and flat.module.filter.is_complex())
    rows, _ = record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY)
    torch.testing.assert_close(rows, one_at_a_time(flat, inputs, targets))


# The choice


class Centered(nn.Module):
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


LINEAR = nn.Linear(4, 4)
OTHERS = {
    "a module of one's own": Centered,
    "a subclass": lambda: OwnLinear(4, 3),
    "a hook": hooked,
    "a forward of its own": rebound,
    "a layer used twice": lambda: nn.Sequential(LINEAR, nn.Tanh(), LINEAR),
    "a layer without expanded weights": nn.PReLU,
    # No gradient of these is taken.
    "one row of all": lambda: nn.Flatten(0),
    "three axes": lambda: nn.Conv3d(2, 2, 2),
    "padding": lambda: nn.Embedding(7, 4, padding_idx=1),
    "max_norm": lambda: nn.Embedding(7, 4, max_norm=1.0),
    "dropout": nn.Dropout,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_mix_records_or_is_unknown_goes_to_torch_func(name):
    torch.default_generator.manual_seed(1)
    flat = FlatModel(nn.Sequential(nn.Linear(4, 4), OTHERS[name]()))
    assert not per_record.keeps_records_apart(flat.module)
    assert engine_of(flat) == VMAP
    if name in list(OTHERS)[6:]:
        return
    inputs, targets = torch.randn(6, 4), torch.randint(2, (6,))
    for _ in range(2):  # a call may leave something behind
        rows, _ = record_gradients(flat, inputs, targets, loss=CROSS_ENTROPY)
        torch.testing.assert_close(rows, one_at_a_time(flat, inputs, targets))


def test_the_engine_follows_from_the_model(monkeypatch):
    """Convolutions go to opacus, on a processor."""
    assert {name: engine_of(case(name)[0]) for name in MODELS} == MODELS
    flat, _, _ = case("cnn")
    flat.device = torch.device("cuda")
    assert engine_of(flat) == VMAP
    monkeypatch.setattr(per_record, "_OPACUS_IS_THERE", False)
    assert engine_of(case("cnn")[0]) == VMAP


# Records apart


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_a_row_depend_on_no_other_record(name, engine):
    """Nor on what the others hold, NaN, infinity and unknown classes included."""
    flat, inputs, targets = case(name)
    gradients = partial(record_gradients, flat, loss=CROSS_ENTROPY, engine=engine)
    row, loss = (part[0] for part in gradients(inputs, targets))
    for entry, label in ((0.0, -100), (1e30, 2**40), (math.nan, 10), (math.inf, 10)):
        others, classes = inputs.clone(), targets.clone()
        others[1:], classes[1:] = entry, label
        rows, losses = gradients(others, classes)
        assert torch.equal(rows[0], row)
        assert torch.equal(losses[0], loss)
        assert losses[1:].isnan().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_of_a_record_stays_on_the_model(engine):
    """Gradients neither: a loss may use the parameters itself."""
    flat, inputs, targets = case("cnn")
    before, start = [set(vars(layer)) for layer in flat.module.modules()], flat.vector.clone()

    def decayed(outputs, targets):
        return CROSS_ENTROPY(outputs, targets) + sum((parameter**2).sum() for parameter in flat.parameters)

    rows, _ = record_gradients(flat, inputs, targets, loss=decayed, engine=engine)
    assert rows.any()
    assert [set(vars(layer)) for layer in flat.module.modules()] == before
    assert torch.equal(flat.vector, start)
    assert all(parameter.grad is None and not vars(parameter) for parameter in flat.parameters)
    assert all(map(operator.is_, flat.parameters, flat.module.parameters()))


# torch's compiler, for which something stands while `torch.func` differentiates


@pytest.fixture
def never_imported(monkeypatch):
    """A process in which nobody has imported the compiler."""
    for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
        monkeypatch.delitem(sys.modules, name)
    before = vars(torch).pop("_dynamo", None)
    yield
    vars(torch).pop("_dynamo", None)
    if before is not None:
        torch._dynamo = before


@pytest.mark.usefixtures("never_imported")
def test_the_compiler_is_imported_for_whoever_asks_for_more_than_compiled_autograd_to_be_off(monkeypatch):
    """And one that is imported meanwhile stays."""
    asked, theirs = [], SimpleNamespace()
    monkeypatch.setattr(per_record.importlib, "import_module", lambda name: asked.append(name) or SimpleNamespace(more=name))
    with per_record.without_compiler():
        with torch._dynamo.compiled_autograd._disable():
            assert asked == []
        assert torch._dynamo.more == "torch._dynamo"
    assert "_dynamo" not in vars(torch)
    with per_record.without_compiler():
        torch._dynamo = theirs
    assert vars(torch)["_dynamo"] is theirs


# Checked cross-entropy against torch's, and against torch's on the targets that count.


def _value_and_gradient(loss, outputs, targets):
    outputs = outputs.clone().requires_grad_()
    value = loss(outputs, targets)
    (gradient,) = torch.autograd.grad(value, outputs)
    return value.detach(), gradient


def _targets(*shape):
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "targets",
    [_targets(9), _targets(9, 4, 4), _targets(9).where(torch.arange(9) % 3 > 0, -100), torch.full((9, 5), 0.2)],
    ids=["classes", "a class for every pixel", "ignored", "probabilities"],
)
def test_is_torchs_to_the_bit_where_torch_has_one(targets):
    shape = (9, 5, *targets.shape[1:]) if targets.dtype == torch.int64 else (9, 5)
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    value, gradient = _value_and_gradient(cross_entropy, outputs, targets)
    expected, expected_gradient = _value_and_gradient(nn.functional.cross_entropy, outputs, targets)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("label", [5, 2**40, -1, -101, -(2**40)])
def test_a_target_that_is_no_class_counts_as_if_ignored(label):
    outputs, targets = torch.randn(9, 5, generator=torch.Generator().manual_seed(2)), _targets(9)
    targets[4] = label
    value, gradient = _value_and_gradient(cross_entropy, outputs, targets)
    kept = torch.arange(9) != 4
    expected, expected_gradient = _value_and_gradient(nn.functional.cross_entropy, outputs[kept], targets[kept])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[kept], expected_gradient)
    assert not gradient[4].any()
    value, gradient = _value_and_gradient(cross_entropy, outputs, torch.full((9,), label))
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("label", [5, -1, 2**40])
def test_a_record_with_an_unknown_class_has_no_loss_and_no_gradient(label):
    targets = torch.tensor([[0, 1, label, 2]])
    value, gradient = _value_and_gradient(record_cross_entropy, torch.randn(1, 5, 4), targets)
    assert value.isnan()
    assert not gradient.any()


@pytest.mark.parametrize("targets", [torch.tensor([3]), _targets(1, 4, 4), torch.tensor([[0, -100, 4, 2]])])
def test_a_record_has_torchs_loss_and_gradient(targets):
    """It may ignore some targets."""
    outputs = torch.randn(1, 5, *targets.shape[1:])
    value, gradient = _value_and_gradient(record_cross_entropy, outputs, targets)
    expected, expected_gradient = _value_and_gradient(nn.functional.cross_entropy, outputs, targets)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("no_label", [0, 2**40])
def test_hinge_by_hand(no_label):
    """At its kink its gradient is zero, and so it is for a target that is no label."""
    outputs = torch.tensor([[2.0], [0.25], [-0.5], [3.0], [1.0], [0.5]])
    value, gradient = _value_and_gradient(hinge, outputs, torch.tensor([1, 1, 1, -1, 1, no_label]))
    assert value == (0 + 0.75 + 1.5 + 4) / 6
    torch.testing.assert_close(gradient.flatten(), torch.tensor([0.0, -1, -1, 1, 0, 0]) / 6)
