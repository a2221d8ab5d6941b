"""Local training against steps computed by hand."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flower_dp.clients import BLUR, LUS, FlatModel, ProximalTerm, Regularizer, TensorRecords, Training, as_records, local_updates
from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.training.engines import ENGINES
from flower_dp.clients.training.record_clipping import clipped_sum
from flower_dp.clients.training.training_rng import batch_seed
from tests.clients.test_engines import PLAIN, _classes, _perceptron


class Point(nn.Module):
    """A point; the loss is a function of it alone, or of its distance to the record."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.tensor(values))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.point - inputs


def quadratic(scales: Sequence[float]) -> Callable[[Tensor, Tensor], Tensor]:
    """1/2 sum of scale_i x_i^2, the mean over records: its gradient is scale_i x_i."""
    weights = torch.tensor(scales)
    return lambda outputs, targets: (0.5 * weights * outputs**2).sum(-1).mean()


def records(*rows: Sequence[float]) -> TensorRecords:
    return TensorRecords(inputs=torch.tensor(rows), targets=torch.zeros(len(rows)))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def update(module, data, training, server_round=1, seed=0, engine="one_by_one"):
    model = FlatModel(module)
    start = model.vector.clone()
    (row,) = local_updates(start, [data], training, model=model, server_round=server_round, seeds=[seed], engine=engine)
    if isinstance(row, Exception):
        raise row
    return row.numpy()


ORIGIN = records([0.0, 0.0])


class Two(nn.Module):
    """A point in two tensors, one of which has no dimensions, and a parameter that has no influence."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([first])), nn.Parameter(torch.tensor(second))
        self.idle = nn.Parameter(torch.tensor([5.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.a, self.b[None]]) - inputs


class Sum(nn.Module):
    """The sum of two parameters: autograd gives one tensor as the gradient of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([10.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.a + self.b - inputs


ONE, BOTH = quadratic([1.0]), quadratic([1.0, 4.0])
SAM: dict[str, Any] = {"learning_rate": 0.1, "sam_radius": 0.5}
# A model, a recipe, and the update by hand.
BY_HAND: dict[str, tuple[nn.Module, dict[str, Any], list[float]]] = {
    "SGD": (Point(3.0, 1.0), {"loss": BOTH}, [-0.3, -0.4]),
    # At (3, 1) the gradient is (3, 4), its norm 5; rho 0.5 leads to (3.3, 1.4), whose gradient is (3.3, 5.6).
    "SAM": (Point(3.0, 1.0), {**SAM, "loss": BOTH}, [-0.33, -0.56]),
    "SAM, over all parameters jointly": (Two(3.0, 1.0), {**SAM, "loss": BOTH}, [-0.33, -0.56, 0.0]),
    "SAM at zero": (Point(0.0, 0.0), {**SAM, "loss": BOTH, "num_local_epochs": 3, "momentum": 0.9}, [0.0, 0.0]),
    "SAM at a subnormal gradient": (Point(1.0, 1.0), {**SAM, "loss": lambda o, _: o.mean() * 1e-40}, [0.0, 0.0]),
    "SAM at a tiny gradient": (Point(1.0, 1.0), {**SAM, "loss": lambda o, _: o.sum() * 1e-25}, [-1e-26, -1e-26]),
    "SAM at a huge gradient": (Point(1.0, 1.0), {**SAM, "loss": lambda o, _: o.sum() * 1e18}, [-1e17, -1e17]),
    # x1 = 0.9; v2 = 0.5 + 0.9 = 1.4, x2 = 0.76.
    "momentum": (Point(1.0), {"momentum": 0.5, "num_local_steps": 2, "loss": ONE}, [0.76 - 1]),
    # The gradient at 1.2 is 1.2, x1 = 0.88; at 1.08 it is 1.08, v2 = 0.6 + 1.08 = 1.68, x2 = 0.712.
    "momentum of SAM": (Point(1.0), {"momentum": 0.5, "sam_radius": 0.2, "num_local_steps": 2, "loss": ONE}, [0.712 - 1]),
    "weight decay": (Point(3.0), {"weight_decay": 0.5, "loss": quadratic([2.0])}, [-0.75]),
    "weight decay of parameters that are added up": (
        Sum(),
        {"learning_rate": 1.0, "weight_decay": 0.1, "loss": lambda o, _: 0 * o.sum()},
        [-0.1, -1.0],
    ),
    # x1 = 1.8; the second gradient is 1.8 + 3 (1.8 - 2) = 1.2: x2 = 1.68.
    "proximal term": (Point(2.0), {"regularizers": (ProximalTerm(strength=3.0),), "num_local_steps": 2, "loss": ONE}, [1.68 - 2]),
    # From x = 2 with gradient x: x1 = 1.8, 0.2 away; the penalty's is -3 (0.2 - 0.1): x2 = 1.8 - 0.1 (1.8 - 0.3) = 1.65.
    "BLUR": (Point(2.0), {"regularizers": (BLUR(strength=3.0, bound=0.1),), "num_local_steps": 2, "loss": ONE}, [1.65 - 2]),
    # Of the second coordinate: -6 x 1 + 7 x 1 = 1. Adam's first step goes by signs.
    "Adam with weight decay": (
        Point(3.0, 1.0),
        {"weight_decay": 7.0, "optimizer": "adam", "loss": quadratic([1.0, -6.0])},
        [-0.1, -0.1],
    ),
}


@pytest.mark.parametrize(("module", "recipe", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_steps_by_hand(module: nn.Module, recipe: dict[str, Any], expected: list[float], engine: str) -> None:
    """In two rounds, the second of which starts without the first one's velocity."""
    training = Training(**{"learning_rate": 0.1} | recipe)
    data = records([0.0])
    for server_round in (1, 2):
        found = update(copy.deepcopy(module), data, training, server_round, engine=engine)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


def test_step_size_decays_every_round(engine: str) -> None:
    training = Training(learning_rate=0.1, learning_rate_decay=0.5, loss=quadratic([1.0]))
    for server_round, step in ((1, 0.1), (2, 0.05), (4, 0.0125)):
        assert training.step_size(server_round) == pytest.approx(step, rel=1e-12)
        np.testing.assert_allclose(update(Point(1.0), records([0.0]), training, server_round, engine=engine), [-step], rtol=1e-6)


def _batches(num_records: int, **settings: Any) -> list[list[int]]:
    seen: list[list[int]] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.tolist())
        return (outputs**2).mean()

    data = TensorRecords(inputs=torch.zeros(num_records, 1), targets=torch.arange(num_records))
    update(Point(1.0), data, Training(learning_rate=0.1, loss=loss, **settings))
    return seen


@pytest.mark.parametrize(("num_records", "batch_size"), [(10, 3), (9, 3), (2, 5), (1, 1)])
def test_batches_cover_all_records_once_an_epoch(num_records: int, batch_size: int) -> None:
    seen = _batches(num_records, batch_size=batch_size, num_local_epochs=4)
    an_epoch = math.ceil(num_records / batch_size)
    assert len(seen) == 4 * an_epoch
    for epoch in range(4):
        batches = seen[epoch * an_epoch : (epoch + 1) * an_epoch]
        assert sorted(itertools.chain.from_iterable(batches)) == list(range(num_records))
        assert all(len(batch) == batch_size for batch in batches[:-1])
    if num_records == 10:
        assert seen[:an_epoch] != seen[an_epoch : 2 * an_epoch]  # shuffled anew


def test_steps_instead_of_epochs() -> None:
    """SAM takes both gradients on the same batch."""
    seen = _batches(10, batch_size=4, num_local_steps=7, num_local_epochs=100, sam_radius=0.1)
    assert [len(batch) for batch in seen[::2]] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(itertools.chain.from_iterable(seen[6:12:2])) == list(range(10))
    assert seen[::2] == seen[1::2]


def test_losses_are_handed_out(engine: str) -> None:
    losses: list[Tensor] = []
    model, training = FlatModel(Point(2.0)), Training(learning_rate=0.5, num_local_steps=2, loss=ONE)
    arguments: dict[str, Any] = {"model": model, "server_round": 1, "seeds": [0], "losses": losses, "engine": engine}
    list(local_updates(model.vector.clone(), [records([0.0])], training, **arguments))
    assert [float(loss) for loss in losses] == [(2.0 + 0.5) / 2]  # x = 2, then 1


def test_the_order_of_records_follows_the_seed(engine: str) -> None:
    rows = [update(_perceptron(), _classes(8, 4), PLAIN, seed=seed, engine=engine).tolist() for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]
    assert len({batch_seed(seed, number, name) for seed in (0, 1) for number in (1, 2) for name in ("a", "b")}) == 8


NAN, INF = math.nan, math.inf
# What makes each of them, and values of its fields that make no sense.
NONSENSE: list[tuple[Any, dict[str, list[Any]]]] = [
    (
        lambda **bad: Training(**{"learning_rate": 0.1} | bad),
        {"learning_rate": [NAN], "batch_size": [2.5], "num_local_epochs": [0], "num_local_steps": [0], "momentum": [1.0]}
        | {
            "weight_decay": [-1],
            "learning_rate_decay": [1.0],
            "sam_radius": [INF],
            "optimizer": ["lion"],
            "regularizers": [(0.5,)],
        },
    ),
    (lambda **bad: Training(learning_rate=0.1, optimizer="adam", **bad), {"momentum": [0.5]}),
    (lambda **bad: BLUR(**{"strength": 1.0, "bound": 1.0} | bad), {"strength": [0.0], "bound": [0.0]}),
    (ProximalTerm, {"strength": [0.0]}),
    (LUS, {"keep_ratio": [0.0, 1.0, -0.5, NAN]}),
]


@pytest.mark.parametrize(
    ("make", "field", "value"), [(make, field, value) for make, bad in NONSENSE for field in bad for value in bad[field]]
)
def test_nonsense_is_refused_by_name(make: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        make(**{field: value})


# Adam


def test_two_adam_steps_by_hand(engine: str) -> None:
    """Kingma & Ba 2015 with beta 0.9 and 0.999: a first step is learning_rate x sign of the gradient, whatever its size."""
    training = Training(learning_rate=0.1, num_local_steps=2, optimizer="adam", loss=quadratic([1.0, 4.0]))
    here, first, second = np.array([3.0, 1.0]), np.zeros(2), np.zeros(2)
    for step in (1, 2):
        gradient = np.array([1.0, 4.0]) * here
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        here = here - 0.1 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose(update(Point(3.0, 1.0), ORIGIN, training, engine=engine), here - [3.0, 1.0], rtol=1e-5)


# Inputs of several tensors


class Pair(nn.Module):
    """Two inputs, the second of which says which entries count: by name, or in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        values, mask = (values[:, 0], values[:, 1]) if mask is None else (values, mask)
        return self.linear(values * mask)


VALUES, MASK = torch.randn(9, 3, generator=torch.Generator().manual_seed(5)), (torch.arange(27) % 2).float().view(9, 3)
LABELS = torch.arange(9) % 2


def clipped(module: nn.Module, data: Any) -> Tensor:
    clip = RecordClip(clip_norm=0.3, step=2.0**-30)
    return clipped_sum(FlatModel(module), data, torch.arange(len(data)), clip=clip, loss=nn.functional.cross_entropy, seed=0)[0]


def test_named_inputs_train_as_one_tensor_does(engine: str) -> None:
    """And are clipped record by record as it is."""
    training = replace(PLAIN, sam_radius=0.1)
    named = TensorRecords(inputs={"values": VALUES, "mask": MASK}, targets=LABELS, indices=torch.arange(8))
    joint = TensorRecords(inputs=torch.stack([VALUES, MASK], dim=1), targets=LABELS, indices=torch.arange(8))
    items = as_records([({"values": VALUES[at], "mask": MASK[at]}, int(LABELS[at])) for at in range(8)])
    expected, total = update(Pair(), joint, training), clipped(Pair(), joint)
    assert total.norm() > 0.1
    for data in (named, items):
        np.testing.assert_allclose(update(Pair(), data, training, engine=engine), expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(clipped(Pair(), data), total, rtol=0, atol=1e-5)


# Regularizers: their pull is the gradient of their penalty, in both engines, and no client's pull has another client in it.


# The penalties, written down a second time.
PENALTIES: dict[str, tuple[Regularizer, Callable[[Tensor, Tensor], Tensor]]] = {
    "proximal": (ProximalTerm(strength=0.7), lambda weights, start: 0.35 * (weights - start).square().sum()),
    "BLUR": (
        BLUR(strength=0.7, bound=1.5),
        lambda weights, start: 0.35 * ((weights - start).square().sum().sqrt() - 1.5).clamp(min=0) ** 2,
    ),
}


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("length", [0.01, 1.4, 1.6, 40.0])
def test_a_pull_is_the_gradient_of_the_penalty(name: str, length: float) -> None:
    part, penalty = PENALTIES[name]
    start, away = draws(1, 200), draws(2, 200)
    weights = (start + length * away / away.norm()).requires_grad_()
    (expected,) = torch.autograd.grad(penalty(weights, start), weights)
    with torch.no_grad():
        found = part.pull(weights, start)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert not part.pull(start, start).any()  # where the norm is 0
    assert bool(found.any()) == (name == "proximal" or length > 1.5)


@pytest.mark.parametrize("name", PENALTIES)
def test_no_row_of_a_pull_depends_on_another(name: str) -> None:
    """Stacked clients are pulled as each is alone, to the bit in every slot, next to whatever there is."""
    size = 4099
    part, start, own = PENALTIES[name][0], draws(1, size), 5 * draws(2, size)
    alone = part.pull(own, start)
    for other in (draws(3, size), torch.full((size,), torch.nan), torch.full((size,), torch.inf)):
        for slot in range(8):
            stacked = other.expand(8, size).clone()
            stacked[slot] = own
            found = part.pull(stacked, start)
            torch.testing.assert_close(found[slot], alone)
            assert torch.equal(found[slot], part.pull(own.expand(8, size), start)[0])


# Records: bad data is refused when it is given, not rounds later.


INPUTS, TARGETS = torch.arange(12.0).reshape(4, 3), torch.arange(4)
ROWS = torch.tensor([3, 2, 1, 0])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"inputs": INPUTS.numpy()}, "inputs: is a ndarray"),
        ({"targets": [0, 1, 2, 3]}, "targets: is a list"),
        ({"targets": TARGETS[:3]}, r"shapes \(4, 3\) and \(3,\)"),
        ({"targets": torch.tensor(1)}, r"shapes \(4, 3\) and \(\)"),
        ({"inputs": {}}, "inputs={}: must have at least one tensor"),
        ({"inputs": {"a": INPUTS, "b": INPUTS[:3]}}, r"inputs\['b'\], targets: shapes \(3, 3\)"),
        ({"indices": torch.arange(2.0)}, "indices: torch.float32"),
        ({"indices": torch.tensor([[0]])}, r"indices: .* of shape \(1, 1\)"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_given(arguments, named):
    with pytest.raises(ValueError, match=named):
        TensorRecords(**{"inputs": INPUTS, "targets": TARGETS} | arguments)


@pytest.mark.parametrize(
    "data",
    [
        (INPUTS.numpy(), TARGETS.numpy()),
        (INPUTS, TARGETS),
        torch.utils.data.TensorDataset(INPUTS, TARGETS),
        list(zip(INPUTS, TARGETS.tolist(), strict=True)),
        TensorRecords(inputs=INPUTS.flip(0) / 2, targets=TARGETS.flip(0), indices=ROWS, transform=lambda batch: 2 * batch),
    ],
    ids=["arrays", "tensors", "dataset", "list", "made"],
)
def test_a_clients_data_may_come_in_several_kinds(data):
    made = as_records(data)
    assert len(made) == 4
    inputs, targets = made.batch(torch.tensor([2, 0]), torch.device("cpu"))
    assert torch.equal(inputs, INPUTS[[2, 0]])
    assert (targets.tolist(), targets.dtype) == ([2, 0], torch.int64)


@pytest.mark.parametrize("data", [(INPUTS.sum(), TARGETS), 7, "text", (INPUTS,), {"inputs": INPUTS}, None])
def test_what_is_no_data_is_refused(data):
    with pytest.raises(ValueError, match=r"inputs|a client's data is a"):
        as_records(data)
    with pytest.raises(ValueError, match="must be pairs"):
        as_records([{"pixels": INPUTS[0]}]).batch(torch.tensor([0]), torch.device("cpu"))
