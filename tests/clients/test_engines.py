"""Both engines: the same rows, and no row that another client has a part in."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_dp.apps.tasks.models import make
from flower_dp.clients import BLUR, DPClient, FlatModel, ProximalTerm, TensorRecords, Training, local_updates
from flower_dp.clients.training import engines
from flower_dp.clients.training.channels_last import Convolutions
from flower_dp.clients.training.engines import ENGINES, batched, choose_engine
from flower_dp.clients.training.engines.program import Program
from flower_dp.clients.training.engines.trace import traced
from flower_dp.clients.training.losses import hinge

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DEVICES = ["cpu", GPU]


def _drawn(*shape: int, classes: int) -> Callable[[int, int], TensorRecords]:
    """Return a maker of so many records of a shape, by a seed."""

    def made(num_records: int, seed: int) -> TensorRecords:
        rng = torch.Generator().manual_seed(seed)
        inputs = torch.randn(num_records, *shape, generator=rng)
        return TensorRecords(inputs=inputs, targets=torch.randint(classes, (num_records,), generator=rng))

    return made


_classes, _wide, _images = _drawn(4, classes=3), _drawn(64, classes=10), _drawn(3, 8, 8, classes=5)


def _net() -> nn.Module:
    torch.default_generator.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3))


def _perceptron() -> nn.Module:
    torch.default_generator.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))


def _deep() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 31), nn.ReLU(), nn.Linear(31, 10))


def _convolutions() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 7, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(7, 5),
    )


class Own(nn.Module):
    """A forward of one's own, with layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs / 2)) + inputs
        return self.last(nn.functional.gelu(self.second(hidden)))


class Chained(nn.Module):
    """Two weights whose product acts: the gradient of either is a product with the other weight itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.second = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.first @ self.second)


PLAIN = Training(learning_rate=0.1, batch_size=4, num_local_epochs=2)
RECIPE = Training(
    learning_rate=0.1, batch_size=3, num_local_epochs=2, momentum=0.5, sam_radius=0.05, weight_decay=0.01, learning_rate_decay=0.1
)
EVERYTHING = replace(RECIPE, regularizers=(ProximalTerm(strength=0.5),))
# Large steps, which forget no rounding error.
STEPS = Training(learning_rate=0.7, batch_size=8, num_local_steps=40)
EPOCHS = replace(STEPS, num_local_steps=None)


def rows_of(make, clients, training, *, engine, seeds=None, losses=None, device="cpu"):
    """The rows of these clients; a model that is there already keeps the programs of earlier calls, and its weights."""
    model = make if isinstance(make, FlatModel) else FlatModel(make(), torch.device(device))
    start = model.vector.clone()
    seeds = list(range(len(clients))) if seeds is None else seeds
    arguments: dict[str, Any] = {"seeds": seeds, "losses": losses, "engine": engine}
    rows = list(local_updates(start, clients, training, model=model, server_round=2, **arguments))
    model.vector.copy_(start)
    return rows


@pytest.fixture(autouse=True)
def no_fallback(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail where the batched engine gives up on a model, but in tests of just that."""
    yield
    said = [record.getMessage() for record in caplog.get_records("call")]  # caplog.text is that of the teardown by now
    if any("one by one" in line for line in said) and "falls_back" not in request.node.name:
        pytest.fail("\n".join(said))


class Rotary(nn.Module):
    """Turns pairs of numbers by angles in a complex table, as rotary embeddings do, and filters them in a table of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([1.0, 2.5])))
        self.filter = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j]), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(inputs).view(-1, 2, 2)) * self.turns
        turned = torch.view_as_real(pairs).flatten(1)
        return torch.fft.irfft(torch.fft.rfft(turned) * self.filter, n=4)


class Scaled(nn.Module):
    """A temperature without dimensions beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.scale, self.linear = nn.Parameter(torch.tensor(1.5)), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * self.scale


class LoRA(nn.Module):
    """A frozen layer with a trained product of two small matrices beside it, and a table of constants."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.base = nn.Linear(num_features, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(num_features, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        return (self.base(flat) + self.up(self.down(flat))) * self.scale


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - nn.functional.one_hot(targets, 3)) ** 2).sum(1).mean()


def _with(targets: Any) -> list[TensorRecords]:
    return [TensorRecords(inputs=_classes(len(targets), 6).inputs, targets=torch.as_tensor(targets))]


# The engines agree

# A model, clients, and a recipe. 520 records are fetched in two parts.
AGREE: dict[str, tuple[Callable[[], nn.Module], list[TensorRecords], Training]] = {
    "plain": (_perceptron, [_classes(9, 1), _classes(5, 2)], PLAIN),
    "weights that move in turn": (Chained, [_classes(8, 1)], replace(PLAIN, learning_rate=0.5)),
    "weights that move in turn, with momentum": (Chained, [_classes(8, 1)], replace(PLAIN, learning_rate=0.5, momentum=0.5)),
    # 700 records in two epochs: fetched in four parts, in turns with the others.
    "changed at random": (
        _perceptron,
        [replace(_classes(700, seed), transform=lambda raw: raw + torch.randn(raw.shape)) for seed in (1, 2)],
        replace(PLAIN, batch_size=100),
    ),
    "everything": (_perceptron, [_classes(90, 1), _classes(1, 2), _classes(520, 3)], replace(EVERYTHING, batch_size=40)),
    "GroupNorm": (_net, [_classes(90, 1), _classes(40, 2)], replace(EVERYTHING, batch_size=40)),
    "module of one's own": (Own, [_classes(9, 1), _classes(5, 2)], EVERYTHING),
    "complex tables": (Rotary, [_classes(9, 1)], PLAIN),
    "a parameter without dimensions": (Scaled, [_classes(7, 1)], EVERYTHING),
    "BLUR": (_net, [_classes(9, 1), _classes(4, 2)], replace(RECIPE, regularizers=(BLUR(strength=2.0, bound=0.02),))),
    "frozen layer and buffer": (lambda: LoRA(4), [_classes(5, 1), _classes(6, 2)], RECIPE),
    "convolutions": (_convolutions, [_images(size, size) for size in (9, 4, 7)], EVERYTHING),
    "soft targets": (_net, _with([[1 / 3] * 3] * 8), replace(RECIPE, batch_size=5)),
    "ignored and unknown labels": (_net, _with([0, 1, 2, -100, 0, 7, 2, -100]), replace(RECIPE, batch_size=5)),
    "another loss": (_net, [_classes(8, 1), _classes(5, 2)], replace(EVERYTHING, loss=_squares)),
    "hinge": (
        lambda: make("linear-svm", seed=3, num_features=4, num_classes=2),
        _with([1, -1, 1, 0, 1, -1, 1, 1]),
        replace(EVERYTHING, loss=hinge),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # weight_norm, which torch.func takes slot by slot
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("make", "clients", "training"), AGREE.values(), ids=AGREE)
def test_the_engines_agree(make: Callable[[], nn.Module], clients: list[TensorRecords], training: Training, device: str) -> None:
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    for engine in ENGINES:
        losses: list[Tensor] = []
        found.append((rows_of(make, clients, training, engine=engine, losses=losses, device=device), losses))
    assert min(row.abs().max() for row in found[0][0]) > 1e-3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 if device == "cpu" else 1e-3, rtol=1e-3)


# No row has another client in it


class Broken(TensorRecords):
    """Records that can't be read."""

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        raise OSError("the disk is gone")


class Lost(TensorRecords):
    """Records that can't even be counted."""

    def __len__(self) -> int:
        raise OSError("the disk is gone")


class Fragile(TensorRecords):
    """Records whose last one can't be read."""

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        if int(positions.max()) == len(self) - 1:
            raise OSError("a bad block")
        return super().batch(positions, device)


class Mixed(TensorRecords):
    """Records of two types, one in the first part and one in the second."""

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(positions, device)
        return (inputs if len(positions) == 512 else inputs.to(torch.float64).to(torch.float16).float().unsqueeze(1)), targets


# A neighbor, made of the client's own records, and what comes of it.
NEIGHBORS: dict[str, tuple[Callable[[TensorRecords], Any], type]] = {
    "another good one": (lambda own: _wide(60, 7), Tensor),
    "labels out of range": (lambda own: replace(own, targets=own.targets + 10), Tensor),
    "a record that can't be read": (lambda own: Fragile(inputs=own.inputs, targets=own.targets), OSError),
    "no record that can be read": (lambda own: Broken(inputs=own.inputs, targets=own.targets), OSError),
    "no length": (lambda own: Lost(inputs=own.inputs, targets=own.targets), OSError),
    "soft targets": (lambda own: replace(own, targets=nn.functional.one_hot(own.targets, 10).float()), Tensor),
    "an ignored label": (lambda own: replace(own, targets=torch.cat([own.targets[:-1], torch.tensor([-100])])), Tensor),
    "NaN": (lambda own: replace(own, inputs=own.inputs * math.nan), Tensor),
    "infinity": (lambda own: replace(own, inputs=own.inputs * math.inf), Tensor),
    "more records": (lambda own: _wide(610, 7), Tensor),
    "few records": (lambda own: _wide(1, 7), Tensor),
    "no records": (lambda own: replace(own, inputs=own.inputs[:0], targets=own.targets[:0]), ValueError),
}


@pytest.fixture(scope="module", params=ENGINES)
def alone(request: pytest.FixtureRequest) -> tuple[str, FlatModel, Tensor]:
    """An engine, a model, and the row of a client that is alone."""
    model = FlatModel(_deep())
    (row,) = rows_of(model, [_wide(60, 2)], EPOCHS, engine=request.param, seeds=[6])
    return request.param, model, row


@pytest.mark.slow
@pytest.mark.parametrize("name", NEIGHBORS)
def test_no_neighbor_changes_a_bit_of_a_row(name: str, alone: Any) -> None:
    """The row is the one that the client has alone, in any place."""
    own, other = _wide(60, 2), _wide(60, 3)
    make, kind = NEIGHBORS[name]
    neighbor, (engine, model, alone) = make(_wide(60, 1)), alone
    losses: list[Tensor] = []
    first = rows_of(model, [neighbor, own, other], EPOCHS, engine=engine, seeds=[5, 6, 7], losses=losses)
    last = rows_of(model, [other, own, neighbor], EPOCHS, engine=engine, seeds=[7, 6, 5])
    assert torch.equal(first[1], alone)
    assert torch.equal(last[1], alone)
    assert torch.equal(first[2], last[0])
    assert isinstance(first[0], kind)
    assert isinstance(last[2], kind)
    assert len(losses) == 2 + (kind is Tensor)
    assert alone.isfinite().all()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Clients and slots of every group that is trained from now on, those of trials included."""
    used: list[tuple[int, int]] = []

    def train(self: Program, feeds: Any, *arguments: Any) -> Any:
        used.append((len(feeds), self.num_slots))
        return real(self, feeds, *arguments)

    real = Program.train
    monkeypatch.setattr(Program, "train", train)
    return used


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "records", "training"),
    [(_deep, _wide, STEPS), (_convolutions, _images, replace(EVERYTHING, num_local_steps=10))],
    ids=["linear layers of odd sizes", "convolutions"],
)
def test_no_bit_depends_on_slot_or_number(make, records, training, device, groups):
    """A client alone, beside one other, in groups that a processor gives few slots, last of a full one, and in a second one."""
    model = FlatModel(make(), torch.device(device))
    own, full = records(20, 1), batched.num_slots(model.layout.size, model.device)
    (alone,) = rows_of(model, [own], training, engine="batched", seeds=[99])
    assert alone.any()
    for places, number, slots in (([0], 2, 2), ([2], 3, 4), ([7], 8, 8), ([1, 8], 9, 16), ([full - 1, full + 2], full + 3, 4)):
        clients = [own if place in places else records(20, 2 + place) for place in range(number)]
        seeds = [99 if place in places else 100 + place for place in range(number)]
        rows = rows_of(model, clients, training, engine="batched", seeds=seeds)
        assert groups[-1][1] == (slots if device == "cpu" else full)
        assert [torch.equal(row, alone) for row in rows] == [place in places for place in range(number)]


def test_a_number_of_slots_that_gives_other_bits_is_not_used(monkeypatch, groups):
    """As where a library computes the products of few matrices in another way."""

    def uneven(self: Program, weights: list[Tensor]) -> tuple[Tensor, list[Any]]:
        losses, gradients = real(self, weights)
        return losses, [self._weights[0] * (1 + 1e-6) if self.num_slots == 4 else gradients[0], *gradients[1:]]

    real, clients, model = Program._gradients, [_classes(9, seed) for seed in range(5)], FlatModel(_perceptron())
    monkeypatch.setattr(Program, "_gradients", uneven)
    expected = rows_of(model, clients, PLAIN, engine="batched")
    for number, slots in ((5, 8), (2, 2), (3, 8)):
        rows = rows_of(model, clients[:number], PLAIN, engine="batched")
        assert groups[-1][1] == slots
        assert all(torch.equal(*pair) for pair in zip(rows, expected, strict=False))


def test_nobody_trains_alone_where_all_can_train_together(monkeypatch: pytest.MonkeyPatch, groups: list[tuple[int, int]]) -> None:
    model = FlatModel(_perceptron())
    rows_of(model, [_classes(5, 0)], RECIPE, engine="batched")
    groups.clear()
    monkeypatch.setattr(Training, "train", lambda *_: pytest.fail("trained alone"))
    rows = rows_of(model, [_classes(5 + index % 3, index) for index in range(100)], RECIPE, engine="batched")
    assert groups[0] == (64, 64)
    assert groups[-1][0] == 36
    # A row begins in memory as a tensor of its own does: what is done to it next has the same bits as well.
    assert all(row.data_ptr() % 64 == 0 and row.is_contiguous() for row in rows)


def test_a_client_whose_step_fails_leaves_the_bits_of_the_others() -> None:
    """A number that the model has no row for: torch raises for the whole group."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.default_generator.manual_seed(0)
            self.table = nn.Parameter(torch.randn(5, 3))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.table[inputs].sum(1)

    def arguments(seed: int, wrong: int = 0) -> TensorRecords:
        rng = torch.Generator().manual_seed(seed)
        inputs = torch.randint(5, (9, 2), generator=rng)
        inputs[3, 1] += wrong
        return TensorRecords(inputs=inputs, targets=torch.randint(3, (9,), generator=rng))

    good, bad = [arguments(1), arguments(2)], arguments(3, wrong=9)
    expected = rows_of(Table, good, PLAIN, engine="batched", seeds=[1, 2])
    torch.testing.assert_close(expected, rows_of(Table, good, PLAIN, engine="one_by_one", seeds=[1, 2]), atol=1e-6, rtol=1e-4)
    first, error, second = rows_of(Table, [good[0], bad, good[1]], PLAIN, engine="batched", seeds=[1, 3, 2])
    assert isinstance(error, IndexError)
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_rows_come_in_order_through_several_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [_classes(size, size) for size in (9, 2, 30, 4, 1, 17, 9)]
    expected = rows_of(_perceptron, clients, PLAIN, engine="batched")
    monkeypatch.setattr(engines, "num_slots", lambda *_: 2)
    monkeypatch.setattr(batched, "_WAITING_FLOATS", 0)
    rows = rows_of(_perceptron, clients, PLAIN, engine="batched")
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=1e-4)


# What can't be batched


class Replacing(nn.Module):
    """Keeps what it has seen in a buffer, as spectral normalization or a codebook does."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.linear(inputs + self.seen)


class Mixing(Replacing):
    """Takes the mean of the batch out, which padding would be in."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs - inputs.mean(0))


class Words(Replacing):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(self.table((inputs[:, 0] > 0).long()))


def _dropping() -> nn.Module:
    torch.default_generator.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("make", "training", "reason"),
    [
        (_dropping, RECIPE, "random"),
        (Replacing, RECIPE, "buffers"),
        (Mixing, RECIPE, "mean over records"),
        (Words, RECIPE, "across clients"),
        (_perceptron, replace(RECIPE, loss=nn.CrossEntropyLoss(reduction="sum")), "mean over records"),
        (_perceptron, replace(RECIPE, loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0, 3.0]))), "mean over records"),
        (_perceptron, replace(RECIPE, loss=nn.CrossEntropyLoss(ignore_index=1)), "mean over records"),
    ],
    ids=["dropout", "replaced buffer", "batch mean", "embedding", "sum", "weights of classes", "an ignored class"],
)
def test_falls_back_and_says_so_once(make, training, reason, caplog):
    model = FlatModel(make())
    start = model.vector.clone()
    state = torch.get_rng_state()
    clients = [_classes(5, 7), _classes(8, 1)]
    for _ in range(2):
        arguments: dict[str, Any] = {"model": model, "server_round": 1, "seeds": [0, 1]}
        rows = list(local_updates(start, clients, training, engine="batched", **arguments))
        expected = list(local_updates(start, clients, training, **arguments))
        assert all(torch.equal(*pair) for pair in zip(rows, expected, strict=True))  # type: ignore[arg-type]
        assert rows[1].abs().max() > 1e-3  # type: ignore[union-attr]
    (message,) = [message for message in caplog.messages if "one by one" in message]
    assert reason in message
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch_size", [8, 5, 40], ids=["full", "partial", "one small"])
def test_targets_that_only_records_have_fall_back_for_this_client_alone(batch_size, caplog):
    """Class 2 is left out of the mean; made-up targets have classes 0 and 1."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, ignore_index=2)

    training = Training(learning_rate=0.5, batch_size=batch_size, loss=loss)
    plain = _classes(16, 1)
    plain = replace(plain, targets=plain.targets.clamp(max=1))
    some = replace(plain, targets=torch.arange(16) % 3)
    rows = rows_of(_perceptron, [some, plain], training, engine="batched", seeds=[0, 1])
    alone = rows_of(_perceptron, [some, plain], training, engine="one_by_one", seeds=[0, 1])
    (beside,) = rows_of(_perceptron, [plain], training, engine="batched", seeds=[1])
    assert torch.equal(rows[0], alone[0])  # by the same engine
    assert torch.equal(rows[1], beside)
    torch.testing.assert_close(rows[1], alone[1], atol=1e-6, rtol=1e-4)
    assert rows[0].abs().max() > 1e-3
    assert not caplog.text


def test_a_loss_that_uses_the_weights_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    """A penalty so small that the check of rows would not see it."""
    model = FlatModel(_perceptron())

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets) + 1e-5 * sum(one.square().sum() for one in model.parameters)

    training = replace(PLAIN, loss=loss)
    (row,) = rows_of(model, [_classes(9, 1)], training, engine="batched")
    (alone,) = rows_of(model, [_classes(9, 1)], training, engine="one_by_one")
    assert torch.equal(row, alone)
    assert "uses the model's weights" in caplog.text


def test_records_of_two_shapes_falls_back_for_this_client_alone() -> None:
    def make() -> nn.Module:
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

    plain = _classes(700, 1)
    mixed = Mixed(inputs=plain.inputs, targets=plain.targets)
    training = replace(PLAIN, batch_size=64)
    alone = rows_of(make, [mixed, plain], training, engine="one_by_one")
    rows = rows_of(make, [mixed, plain], training, engine="batched")
    assert torch.equal(rows[0], alone[0])
    torch.testing.assert_close(rows[1], alone[1], atol=1e-5, rtol=1e-4)


def test_a_model_whose_bits_depend_on_the_slot_falls_back(monkeypatch, caplog):
    def uneven(self: Program, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        losses, gradients = real(self, weights)
        gradients[1][-1] *= 1 + 1e-6
        return losses, gradients

    real = Program._gradients
    monkeypatch.setattr(Program, "_gradients", uneven)
    rows = rows_of(_perceptron, [_classes(9, 1)], PLAIN, engine="batched")
    assert torch.equal(rows[0], rows_of(_perceptron, [_classes(9, 1)], PLAIN, engine="one_by_one")[0])
    assert "depend on its slot" in caplog.text


# What is drawn by torch's own generators


@pytest.mark.slow
@pytest.mark.parametrize("training", [PLAIN, RECIPE], ids=["plain", "SAM"])
def test_dropout_of_a_client_does_not_depend_on_who_trained_before(training: Training) -> None:
    def rows(clients: list[Any], seeds: list[int], start: int = 67280421310721) -> list[Any]:
        """Torch's own generator starts as every fresh process has it."""
        torch.manual_seed(start)
        state = torch.get_rng_state()
        model = FlatModel(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3)))
        model.vector.copy_(torch.linspace(-1, 1, model.layout.size))
        torch.set_rng_state(state)
        found = rows_of(model, clients, training, engine="one_by_one", seeds=seeds)
        assert torch.equal(torch.get_rng_state(), state)
        return found

    own = _classes(40, 2)
    (alone,) = rows([own], [6], start=2)
    for first in (_classes(40, 1), _classes(48, 1), Broken(inputs=torch.zeros(40, 4), targets=torch.zeros(40))):
        assert torch.equal(rows([first, own], [5, 6])[1], alone)


# What makes no sense, and a choice


def test_convolutions_on_a_processor_are_quicker_one_by_one() -> None:
    convolutions = nn.Sequential(nn.Identity(), nn.Sequential(nn.ConvTranspose2d(1, 1, 1)))
    assert choose_engine(nn.Linear(2, 2), torch.device("cpu")) == "batched"
    assert choose_engine(convolutions, torch.device("cpu")) == "one_by_one"
    assert choose_engine(convolutions, torch.device("cuda")) == "batched"
    hosted = {"a": _classes(1, 0)}
    assert (
        DPClient(model=convolutions, clients=hosted, training=PLAIN, device="cpu", training_engine="auto").training_engine
        == "one_by_one"
    )
    with pytest.raises(ValueError, match="engine='fast': must be one of one_by_one, batched, auto"):
        DPClient(model=nn.Linear(1, 1), clients=hosted, training=PLAIN, training_engine="fast")


# Convolutions train with channels last where that is the same function; models, losses and shapes decide, never data.


TURNED = Training(learning_rate=0.1, batch_size=4, num_local_epochs=2, momentum=0.5, sam_radius=0.05)


class Net(nn.Module):
    """Two convolutions and a forward of one's own, which notes the layouts of the first one's outputs."""

    def __init__(self, *, view: bool = False, dropout: bool = False, counts: bool = False) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.second, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8 * 4 * 4, 5)
        self.view, self.dropout, self.counts, self.passes, self.layouts = view, dropout, counts, 0, Layouts()

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        hidden = torch.relu(self.first(inputs))
        self.layouts.seen.append(hidden.is_contiguous(memory_format=torch.channels_last))
        hidden = nn.functional.dropout(hidden) if self.dropout else hidden
        hidden = self.second(hidden) * (self.passes if self.counts else 1)
        return self.last(hidden.view(len(hidden), -1) if self.view else hidden.flatten(1))


class Layouts:
    """Whether outputs were made with channels last, by forward pass."""

    def __init__(self) -> None:
        self.seen: list[bool] = []


def turned_rows(model: FlatModel, clients: list[Any], seeds: list[int]) -> list[Any]:
    start = torch.randn(model.layout.size, generator=torch.Generator().manual_seed(1)) / 10
    return list(local_updates(start, clients, TURNED, model=model, server_round=1, seeds=seeds))


def usual_row(module: nn.Module, client: TensorRecords, seed: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The row in torch's own layout."""
    with monkeypatch.context() as patch:
        patch.setattr(Convolutions, "suit", lambda *_, **__: False)
        (row,) = turned_rows(FlatModel(module), [client], [seed])
    return row  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["own forward", "cnn-small"])
def test_channels_last_is_the_same_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch is smaller; with one channel both layouts have the same order, but not the same strides."""
    build = partial(make, "cnn-small", seed=0) if name == "cnn-small" else Net
    model, client = FlatModel(build()), (_drawn(784, classes=5) if name == "cnn-small" else _images)(10, 2)
    turned: list[bool] = []
    convolution = next(layer for layer in model.module.modules() if isinstance(layer, nn.Conv2d))
    convolution.register_forward_hook(lambda _, inputs, outputs: turned.append(outputs.stride()[1] == 1))
    (row,) = turned_rows(model, [client], [7])
    usual = usual_row(build(), client, 7, monkeypatch)
    torch.testing.assert_close(row, usual, atol=1e-5, rtol=1e-4)
    assert usual.norm() > 1e-2
    assert len(turned) == 2 + 12  # the trial in both layouts, then 6 steps of two passes each
    assert turned.count(False) == 1
    assert all(one.is_contiguous() for one in model.parameters)
    assert not any(layer._forward_pre_hooks for layer in model.module.modules())


@pytest.mark.parametrize("options", [{"view": True}, {"dropout": True}], ids=["view", "dropout"])
def test_a_model_that_is_another_function_keeps_its_layout(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """`view` fails with channels last; dropout would drop other units."""
    module, client = Net(**options), _images(10, 2)
    (row,) = turned_rows(FlatModel(module), [client], [7])
    assert torch.equal(row, usual_row(Net(**options), client, 7, monkeypatch))
    assert not any(module.layouts.seen[2:])  # after the trial


def test_no_other_client_changes_a_bit() -> None:
    """The trial is made once: a client that comes after it has the row that it has alone, with all that the model keeps."""
    own, other = _images(10, 2), _images(6, 3)
    for options in ({"counts": True}, {"dropout": True, "view": True}):
        (alone,) = turned_rows(FlatModel(Net(**options)), [own], [7])
        first, _ = turned_rows(FlatModel(Net(**options)), [own, other], [7, 8])
        _, last = turned_rows(FlatModel(Net(**options)), [other, own], [8, 7])
        assert torch.equal(first, alone)
        assert torch.equal(last, alone)


def test_no_value_of_a_record_chooses_the_layout() -> None:
    model = FlatModel(Net())
    broken = TensorRecords(inputs=_images(10, 2).inputs * torch.nan, targets=torch.full((10,), 77))
    _, row = turned_rows(model, [broken, _images(10, 2)], [6, 7])
    (alone,) = turned_rows(FlatModel(Net()), [_images(10, 2)], [7])
    assert torch.equal(row, alone)
    assert model.module.layouts.seen[1:] == [True] * (len(model.module.layouts.seen) - 1)


def test_where_nothing_is_to_be_chosen() -> None:
    """A device that is no processor, a model without convolutions, and inputs by name."""
    batch = _images(10, 1).inputs, _images(10, 1).targets
    assert Convolutions(Net(), torch.device("cuda")).kind_of(*batch) is None
    assert Convolutions(nn.Conv1d(3, 1, 1), torch.device("cpu")).kind_of(*batch) is None
    assert Convolutions(Net(), torch.device("cpu")).kind_of({"pixels": batch[0]}, batch[1]) is None
    assert Convolutions(Net(), torch.device("cpu")).kind_of(*batch) is not None


# A traced function does again what the function does, and what it can't do again is refused.


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_what_it_makes_itself_it_may_change():
    """And look up by numbers."""
    numbers = torch.tensor([2, 0])

    def function(given):
        made = given * 2
        part = made[0]
        part += 1
        made[1:].mul_(3)
        return made, made.topk(2).values, given[numbers]

    graph = traced(function, draw(3, 4))
    other = draw(3, 4) - 1
    assert all(torch.equal(*pair) for pair in zip(graph(other), function(other), strict=True))


KEPT = torch.zeros(4)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: KEPT.add_(given[0]),
        lambda given: KEPT.view(2, 2)[0].mul_(2) + 0 * given[0, 0],
        lambda given: torch.ops.aten._unsafe_view(KEPT, [2, 2]).mul_(2) + 0 * given[0, 0],
        lambda given: torch.add(given[0], 1, out=KEPT),
        lambda given: given.mul_(2),
    ],
    ids=["buffer", "view of a view", "unsafe view", "out", "input"],
)
def test_what_outlives_a_step_is_not_changed(change):
    given = draw(3, 4)
    with pytest.raises(RuntimeError, match=r"changes a tensor that outlives a step.*aten\."):
        traced(change, given)
    assert torch.equal(KEPT, torch.zeros(4))
    assert torch.equal(given, draw(3, 4))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda given: given if given.sum() > 0 else -given, "depend on data"),
        (lambda given: given * given.max().item(), "depend on data"),
        (lambda given: given[given > 0], "depend on data"),
        (lambda given: given if torch.equal(given, given) else -given, "depend on data"),
        (nn.functional.dropout, "draws random numbers"),
        (lambda given: given.clone().normal_(), "draws random numbers"),
    ],
    ids=["branch", "number", "mask", "equal", "dropout", "in place"],
)
def test_what_other_data_would_do_otherwise_is_refused(function, reason):
    with pytest.raises(RuntimeError, match=reason):
        traced(function, draw(3, 4))
