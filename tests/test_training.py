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

from flower_dp.clients import FlatModel, LocalTraining, TensorRecords, local_updates, model_arrays
from flower_dp.clients import training as training_module
from flower_dp.clients.stack import LinearStack, SideBySide
from flower_dp.clients.training import OwnDraws, batch_seed, draws_seed


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


def update(module: nn.Module, data: Any, training: LocalTraining, server_round: int = 1, seed: int = 0) -> np.ndarray:
    model = FlatModel(module)
    start = model.vector.clone()
    (row,) = local_updates(start, [data], training, model=model, server_round=server_round, seeds=[seed])
    if isinstance(row, Exception):
        raise row
    return row.numpy()


ORIGIN = records([0.0, 0.0])


def test_one_sgd_step_by_hand() -> None:
    training = LocalTraining(learning_rate=0.1, loss=quadratic([1.0, 4.0]))
    np.testing.assert_allclose(update(Point(3.0, 1.0), ORIGIN, training), [-0.3, -0.4], rtol=1e-6)


def test_one_sam_step_by_hand_differs_from_sgd() -> None:
    """At (3, 1) with scales (1, 4) the gradient is (3, 4), its norm 5; rho 0.5 leads to (3.3, 1.4), whose gradient is (3.3, 5.6)."""
    sam = LocalTraining(learning_rate=0.1, sam_radius=0.5, loss=quadratic([1.0, 4.0]))
    np.testing.assert_allclose(update(Point(3.0, 1.0), ORIGIN, sam), [-0.33, -0.56], rtol=1e-6)


def test_sam_perturbs_over_all_parameters_jointly() -> None:
    """The same step with the two coordinates in two tensors; one norm a tensor would give (3.5, 1.5)."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor(1.0))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.cat([self.a, self.b[None]]) - inputs

    sam = LocalTraining(learning_rate=0.1, sam_radius=0.5, loss=quadratic([1.0, 4.0]))
    np.testing.assert_allclose(update(Two(), ORIGIN, sam), [-0.33, -0.56], rtol=1e-6)


def test_sam_takes_both_gradients_on_the_same_batch() -> None:
    seen: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.clone())
        return (outputs**2).mean()

    data = TensorRecords(inputs=torch.randn(7, 2, generator=torch.Generator().manual_seed(1)), targets=torch.arange(7))
    update(Point(1.0, 2.0), data, LocalTraining(learning_rate=0.1, sam_radius=0.1, batch_size=3, loss=loss))
    assert len(seen) == 6
    assert all(torch.equal(first, second) for first, second in zip(seen[::2], seen[1::2], strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sam_at_a_zero_gradient_makes_no_step_and_no_nan(momentum: float) -> None:
    training = LocalTraining(learning_rate=0.1, sam_radius=0.5, momentum=momentum, num_local_epochs=3, loss=quadratic([1.0, 1.0]))
    assert update(Point(0.0, 0.0), ORIGIN, training).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("gradient", [1e-20, 1e-25, 1e-30, 1e18])
def test_sam_at_tiny_and_huge_gradients_makes_no_nan(gradient: float) -> None:
    training = LocalTraining(learning_rate=0.1, sam_radius=0.5, loss=lambda outputs, targets: outputs.sum() * gradient)
    np.testing.assert_allclose(update(Point(1.0, 1.0), ORIGIN, training), -0.1 * gradient, rtol=1e-5, atol=1e-6)


def test_sam_at_a_subnormal_gradient() -> None:
    training = LocalTraining(learning_rate=0.1, sam_radius=0.05, loss=lambda outputs, targets: outputs.mean() * 1e-40)
    assert update(Point(1.0), records([0.0]), training).tolist() == [0.0]


def test_momentum_by_hand_over_two_steps_and_fresh_every_round() -> None:
    """x0 = 1, gradient x: v1 = 1, x1 = 0.9; v2 = 0.5 + 0.9 = 1.4, x2 = 0.76."""
    training = LocalTraining(learning_rate=0.1, momentum=0.5, num_local_steps=2, loss=quadratic([1.0]))
    model = FlatModel(Point(1.0))
    start = model.vector.clone()
    data = records([0.0])
    for server_round in (1, 2):  # the second round starts without the first one's velocity
        (row,) = local_updates(start, [data], training, model=model, server_round=server_round, seeds=[0])
        np.testing.assert_allclose(row.numpy(), [0.76 - 1], rtol=1e-6)


def test_momentum_of_sam_by_hand() -> None:
    """x0 = 1, radius 0.2: gradient at 1.2 is 1.2, x1 = 0.88; at 1.08 it is 1.08, v2 = 0.6 + 1.08 = 1.68, x2 = 0.712."""
    training = LocalTraining(learning_rate=0.1, momentum=0.5, sam_radius=0.2, num_local_steps=2, loss=quadratic([1.0]))
    np.testing.assert_allclose(update(Point(1.0), records([0.0]), training), [0.712 - 1], rtol=1e-6)


def test_weight_decay_by_hand() -> None:
    """Gradient 2 (x - 1) at x = 3 is 4; with 0.5 x it is 5.5."""
    training = LocalTraining(learning_rate=0.1, weight_decay=0.5, loss=quadratic([2.0]))
    np.testing.assert_allclose(update(Point(3.0), records([1.0]), training), [-0.55], rtol=1e-6)


def test_weight_decay_of_parameters_that_are_added_up() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([10.0]))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.a + self.b - inputs

    training = LocalTraining(learning_rate=1.0, weight_decay=0.1, loss=lambda outputs, targets: 0 * outputs.sum())
    np.testing.assert_allclose(update(Sum(), records([0.0]), training), [-0.1, -1.0], rtol=1e-6)


def test_weight_decay_where_the_loss_is_a_sum_of_weights() -> None:
    class Weights(Point):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.point.sum()

    training = LocalTraining(learning_rate=1.0, weight_decay=0.1, loss=lambda outputs, targets: outputs)
    np.testing.assert_allclose(update(Weights(1.0, 2.0), ORIGIN, training), [-1.1, -1.2], rtol=1e-6)


def test_proximal_term_by_hand() -> None:
    """Starting at x = 2 with gradient x: x1 = 1.8; the second gradient is 1.8 + 3 (1.8 - 2) = 1.2: x2 = 1.68."""
    training = LocalTraining(learning_rate=0.1, proximal=3.0, num_local_steps=2, loss=quadratic([1.0]))
    np.testing.assert_allclose(update(Point(2.0), records([0.0]), training), [1.68 - 2], rtol=1e-6)


def test_step_size_decays_every_round() -> None:
    training = LocalTraining(learning_rate=0.1, learning_rate_decay=0.5, loss=quadratic([1.0]))
    for server_round, step in ((1, 0.1), (2, 0.05), (4, 0.0125)):
        assert training.step_size(server_round) == pytest.approx(step, rel=1e-12)
        np.testing.assert_allclose(update(Point(1.0), records([0.0]), training, server_round), [-step], rtol=1e-6)


def _batches(num_records: int, **settings: Any) -> list[list[int]]:
    seen: list[list[int]] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.tolist())
        return (outputs**2).mean()

    data = TensorRecords(inputs=torch.zeros(num_records, 1), targets=torch.arange(num_records))
    update(Point(1.0), data, LocalTraining(learning_rate=0.1, loss=loss, **settings))
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
    seen = _batches(10, batch_size=4, num_local_steps=7, num_local_epochs=100)
    assert [len(batch) for batch in seen] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(itertools.chain.from_iterable(seen[3:6])) == list(range(10))


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3))


def _classes(num_records: int, seed: int) -> TensorRecords:
    rng = torch.Generator().manual_seed(seed)
    return TensorRecords(
        inputs=torch.randn(num_records, 4, generator=rng), targets=torch.randint(3, (num_records,), generator=rng)
    )


RECIPE = LocalTraining(
    learning_rate=0.1, batch_size=3, num_local_epochs=2, momentum=0.5, sam_radius=0.05, weight_decay=0.01, learning_rate_decay=0.1
)


def test_rows_are_the_same_alone_and_together_and_in_any_order() -> None:
    model = FlatModel(_net())
    start = model.vector.clone()
    data = [_classes(size, size) for size in (5, 8, 3)]
    seeds = [batch_seed(0, 2, f"client-{i}") for i in range(3)]
    together = list(local_updates(start, data, RECIPE, model=model, server_round=2, seeds=seeds))
    backwards = list(local_updates(start, data[::-1], RECIPE, model=model, server_round=2, seeds=seeds[::-1]))[::-1]
    for row, other, records_, seed in zip(together, backwards, data, seeds, strict=True):
        (alone,) = local_updates(start, [records_], RECIPE, model=FlatModel(_net()), server_round=2, seeds=[seed])
        assert torch.equal(row, alone)
        assert torch.equal(row, other)
        assert row.abs().max() > 0


def test_rows_do_not_depend_on_other_clients_data() -> None:
    model = FlatModel(_net())
    start = model.vector.clone()
    wild = TensorRecords(inputs=torch.full((4, 4), float("nan")), targets=torch.zeros(4, dtype=torch.int64))
    _, after_wild = local_updates(start, [wild, _classes(5, 1)], RECIPE, model=model, server_round=1, seeds=[0, 1])
    _, after_tame = local_updates(start, [_classes(9, 2), _classes(5, 1)], RECIPE, model=model, server_round=1, seeds=[0, 1])
    assert torch.equal(after_wild, after_tame)
    assert torch.isfinite(after_wild).all()


class Broken(TensorRecords):
    """Records that can't be read."""

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        raise OSError("the disk is gone")


class Lost(TensorRecords):
    """Records that can't even be counted."""

    def __len__(self) -> int:
        raise OSError("the disk is gone")


def _perceptron() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))


PLAIN = LocalTraining(learning_rate=0.1, batch_size=4, num_local_epochs=2)


@pytest.mark.parametrize("training", [PLAIN, RECIPE], ids=["side by side", "one by one"])
def test_a_client_that_fails_leaves_its_neighbours_alone(training: LocalTraining) -> None:
    model = FlatModel(_perceptron())
    start = model.vector.clone()
    good = _classes(9, 1)
    soft = TensorRecords(inputs=good.inputs, targets=nn.functional.one_hot(good.targets, 3).to(torch.float32))
    unknown = TensorRecords(inputs=good.inputs, targets=good.targets + 7)
    narrow = TensorRecords(inputs=good.inputs[:, :2], targets=good.targets)
    wild = TensorRecords(inputs=good.inputs * float("nan"), targets=good.targets)
    kinds = (Broken, Lost)
    clients = [
        good,
        *(kind(inputs=good.inputs, targets=good.targets) for kind in kinds),
        soft,
        unknown,
        narrow,
        wild,
        _classes(9, 2),
    ]
    losses: list[Tensor] = []
    seeds = list(range(len(clients)))
    rows = list(local_updates(start, clients, training, model=model, server_round=1, seeds=seeds, losses=losses))
    assert [type(row).__name__ for row in rows] == [
        "Tensor",
        "OSError",
        "OSError",
        "Tensor",
        "IndexError",
        "RuntimeError",
        "Tensor",
        "Tensor",
    ]
    assert len(losses) == 4
    assert not torch.isfinite(rows[6]).any()
    for index in (0, 3, 7):
        (alone,) = local_updates(start, [clients[index]], training, model=FlatModel(_perceptron()), server_round=1, seeds=[index])
        torch.testing.assert_close(rows[index], alone)
        assert rows[index].abs().max() > 0


@pytest.mark.parametrize("sizes", [(9, 9, 9), (9, 8, 9, 9), (700, 700)], ids=str)
def test_rows_are_the_same_side_by_side_and_one_by_one(sizes: tuple[int, ...]) -> None:
    """700 records are fetched in two parts."""
    model = FlatModel(_perceptron())
    start = model.vector.clone()
    data = [_classes(size, index) for index, size in enumerate(sizes)]
    assert PLAIN.train_side_by_side(model, data[-2:], [0, 1], 1) is not None
    assert torch.equal(model.vector, start)
    losses: list[Tensor] = []
    rows = local_updates(start, data, PLAIN, model=model, server_round=1, seeds=list(range(len(sizes))), losses=losses)
    for index, row in enumerate(rows):
        fresh = FlatModel(_perceptron())
        loss = PLAIN.train(fresh, data[index], 1, torch.Generator().manual_seed(index))
        torch.testing.assert_close(row, fresh.vector - start, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(losses[index], loss)
    assert index == len(sizes) - 1


@pytest.mark.parametrize("words", [{"momentum": 0.1}, {"weight_decay": 0.1}, {"sam_radius": 0.1}, {"proximal": 0.1}], ids=str)
def test_only_plain_sgd_goes_side_by_side(words: dict[str, float]) -> None:
    training = LocalTraining(learning_rate=0.1, **words)  # type: ignore[arg-type]
    model = FlatModel(_perceptron())
    assert training.train_side_by_side(model, [_classes(5, 1)], [0], 1) is None
    assert not training.goes_side_by_side(model)


class Fragile(TensorRecords):
    """Records whose last one can't be read."""

    def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        if int(positions.max()) == len(self) - 1:
            raise OSError("a bad block")
        return super().batch(positions, device)


def _wide(num_records: int, seed: int) -> TensorRecords:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_records, 64, generator=rng)
    return TensorRecords(inputs=inputs, targets=torch.randint(10, (num_records,), generator=rng))


def _deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


# Steps that a rounding error is magnified in: to some 1 % of the update.
CHAOTIC = LocalTraining(learning_rate=1.0, batch_size=8, num_local_steps=150)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients trained, or tried to, in each group that went side by side."""
    seen: list[int] = []

    class Spy(SideBySide):
        def __init__(self, stack: LinearStack, num_clients: int, **words: Any) -> None:
            seen.append(num_clients)
            super().__init__(stack, num_clients, **words)

    monkeypatch.setattr(training_module, "SideBySide", Spy)
    return seen


NEIGHBOURS: dict[str, Callable[[TensorRecords], TensorRecords]] = {
    "another good one": lambda own: _wide(60, 7),
    "a label out of range": lambda own: replace(own, targets=torch.cat([own.targets[:-1], torch.tensor([10])])),
    "a record that can't be read": lambda own: Fragile(inputs=own.inputs, targets=own.targets),
    "no record that can be read": lambda own: Broken(inputs=own.inputs, targets=own.targets),
    "soft targets": lambda own: replace(own, targets=nn.functional.one_hot(own.targets, 10).float()),
    "other inputs": lambda own: replace(own, inputs=own.inputs[:, :63]),
    "an ignored label": lambda own: replace(own, targets=torch.cat([own.targets[:-1], torch.tensor([-100])])),
    "NaN": lambda own: replace(own, inputs=own.inputs * math.nan),
    "more records": lambda own: _wide(61, 7),
    "no records": lambda own: replace(own, inputs=own.inputs[:0], targets=own.targets[:0]),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_no_neighbour_changes_a_bit_of_a_row(name: str, groups: list[int]) -> None:
    """Clients on both sides; the row is the one that the client has alone, and always from training side by side."""
    model = FlatModel(_deep())
    start = model.vector.clone()
    own, other = _wide(60, 2), _wide(60, 3)
    neighbour = NEIGHBOURS[name](_wide(60, 1))
    (alone,) = local_updates(start, [own], CHAOTIC, model=model, server_round=1, seeds=[6])
    assert groups == [1]
    rows = list(local_updates(start, [neighbour, own, other], CHAOTIC, model=model, server_round=1, seeds=[5, 6, 7]))
    assert torch.equal(rows[1], alone)  # type: ignore[arg-type]
    (alone,) = local_updates(start, [other], CHAOTIC, model=model, server_round=1, seeds=[7])
    assert torch.equal(rows[2], alone)  # type: ignore[arg-type]


def test_side_by_side_and_one_by_one_differ_by_more_than_a_rounding_error() -> None:
    """What the test above is for: a neighbour that chose between the two would change the row by some of its norm."""
    start = FlatModel(_deep()).vector
    (row,) = local_updates(start, [_wide(60, 2)], CHAOTIC, model=FlatModel(_deep()), server_round=1, seeds=[6])
    model = FlatModel(_deep())
    CHAOTIC.train(model, _wide(60, 2), 1, torch.Generator().manual_seed(6))
    assert not torch.equal(row, model.vector - start)  # type: ignore[arg-type]


def test_clients_who_could_still_train_side_by_side_beside_one_who_fails(groups: list[int]) -> None:
    model = FlatModel(_deep())
    clients = [_wide(60, 1), Broken(inputs=torch.zeros(60, 64), targets=torch.zeros(60)), _wide(60, 2)]
    rows = list(local_updates(model.vector.clone(), clients, PLAIN, model=model, server_round=1, seeds=[1, 2, 3]))
    assert [type(row).__name__ for row in rows] == ["Tensor", "OSError", "Tensor"]
    assert groups == [3, 1, 1, 1]


def test_many_equal_clients_train_side_by_side(groups: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path: all in one group, nobody by autograd or alone."""

    def refuse(*_: Any) -> None:
        raise AssertionError("trained alone")

    monkeypatch.setattr(LocalTraining, "train", refuse)
    model = FlatModel(_perceptron())
    clients = [_classes(9, index) for index in range(40)]
    rows = list(local_updates(model.vector.clone(), clients, PLAIN, model=model, server_round=1, seeds=list(range(40))))
    assert groups == [40]
    assert all(isinstance(row, Tensor) for row in rows)


def test_with_several_threads_all_train_one_by_one(groups: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = FlatModel(_perceptron())
    start = model.vector.clone()
    clients = [_classes(9, 1), _classes(9, 2)]
    rows = list(local_updates(start, clients, PLAIN, model=model, server_round=1, seeds=[1, 2]))
    assert groups == []
    for row, records_, seed in zip(rows, clients, [1, 2], strict=True):
        alone = FlatModel(_perceptron())
        PLAIN.train(alone, records_, 1, torch.Generator().manual_seed(seed))
        assert torch.equal(row, alone.vector - start)  # type: ignore[arg-type]


def test_on_a_gpu_all_train_one_by_one() -> None:
    model = FlatModel(_perceptron())
    assert PLAIN.goes_side_by_side(model)
    model.device = torch.device("cuda")
    assert not PLAIN.goes_side_by_side(model)


def test_a_client_that_changes_the_number_of_threads_does_not_change_how_others_train(
    groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])

    class Greedy(TensorRecords):
        def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
            threads[0] = 2
            raise OSError("the disk is gone")

    model = FlatModel(_perceptron())
    clients = [Greedy(inputs=torch.zeros(9, 4), targets=torch.zeros(9)), _classes(9, 1), _classes(8, 1)]
    list(local_updates(model.vector.clone(), clients, PLAIN, model=model, server_round=1, seeds=[1, 2, 3]))
    assert threads == [2]
    assert groups == [2, 1, 1, 1]


# What is drawn by torch's own generators


def _dropping() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3))


def _after(first: TensorRecords, training: LocalTraining, seeds: Sequence[int] = (5, 6)) -> Tensor:
    """Return the row of a client after another, with torch's own generator as every fresh process has it."""
    torch.manual_seed(67280421310721)
    model = FlatModel(_dropping())
    torch.manual_seed(67280421310721)
    state = torch.get_rng_state()
    rows = list(local_updates(model.vector.clone(), [first, _classes(40, 2)], training, model=model, server_round=1, seeds=seeds))
    assert torch.equal(torch.get_rng_state(), state)
    return rows[1]  # type: ignore[return-value]


@pytest.mark.parametrize("training", [PLAIN, RECIPE], ids=["plain", "SAM"])
def test_dropout_of_a_client_does_not_depend_on_who_trained_before(training: LocalTraining) -> None:
    row = _after(_classes(40, 1), training)
    assert torch.equal(_after(_classes(48, 1), training), row)
    assert torch.equal(_after(Broken(inputs=torch.zeros(40, 4), targets=torch.zeros(40)), training), row)
    torch.manual_seed(1)
    model = FlatModel(_dropping())
    torch.manual_seed(2)
    (alone,) = local_updates(model.vector.clone(), [_classes(40, 2)], training, model=model, server_round=1, seeds=[6])
    assert torch.equal(alone, row)  # type: ignore[arg-type]


def test_a_client_that_fails_leaves_the_generators_as_they_were() -> None:
    model = FlatModel(_dropping())
    state = torch.get_rng_state()
    late = Fragile(inputs=torch.zeros(600, 4), targets=torch.zeros(600, dtype=torch.int64))
    (row,) = local_updates(model.vector.clone(), [late], PLAIN, model=model, server_round=1, seeds=[1])
    assert isinstance(row, OSError)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_follows_the_clients_own_seed() -> None:
    """One record and one step: the order of records can't differ, what is dropped does."""
    start = FlatModel(_dropping()).vector
    rows = set()
    for seed in range(20):
        (row,) = local_updates(start, [_classes(1, 1)], PLAIN, model=FlatModel(_dropping()), server_round=1, seeds=[seed])
        rows.add(tuple(row.tolist()))  # type: ignore[union-attr]
    assert len(rows) > 10


def test_dropout_and_the_order_of_records_are_drawn_from_different_seeds() -> None:
    with OwnDraws(torch.device("cpu"), draws_seed(7)):
        drawn = torch.randperm(100)
    assert not torch.equal(drawn, torch.randperm(100, generator=torch.Generator().manual_seed(7)))
    with OwnDraws(torch.device("cpu"), 7):
        drawn = torch.randperm(100)
    assert torch.equal(drawn, torch.randperm(100, generator=torch.Generator().manual_seed(7)))


def test_own_draws_go_on_where_they_stopped() -> None:
    draws, expected = OwnDraws(torch.device("cpu"), 7), torch.Generator().manual_seed(7)
    outside = torch.get_rng_state()
    for _ in range(3):
        with draws:
            drawn = torch.rand(5)
        assert torch.equal(drawn, torch.rand(5, generator=expected))
    assert torch.equal(torch.get_rng_state(), outside)


@pytest.mark.parametrize("threads", [1, 2], ids=["side by side", "one by one"])
def test_records_that_are_changed_at_random_do_not_depend_on_who_else_is_there(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """700 records in two epochs: fetched in four parts, in turns with the others side by side."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model = FlatModel(_perceptron())
    start = model.vector.clone()
    training = LocalTraining(learning_rate=0.1, batch_size=100, num_local_epochs=2)

    def noisy(seed: int, size: int = 700) -> TensorRecords:
        return replace(_classes(size, seed), transform=lambda raw: raw + torch.randn(raw.shape))

    state = torch.get_rng_state()
    (alone,) = local_updates(start, [noisy(1)], training, model=model, server_round=1, seeds=[1])
    (still,) = local_updates(start, [_classes(700, 1)], training, model=model, server_round=1, seeds=[1])
    assert not torch.allclose(alone, still, atol=1e-3)  # type: ignore[arg-type]
    for clients in ([noisy(2), noisy(1)], [noisy(2, 800), noisy(1)], [noisy(2), noisy(1), noisy(3)]):
        rows = list(local_updates(start, clients, training, model=model, server_round=1, seeds=[2, 1, 3][: len(clients)]))
        assert torch.equal(rows[1], alone)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)


def test_noisy_records_train_side_by_side_as_one_by_one() -> None:
    model = FlatModel(_perceptron())
    start = model.vector.clone()
    data = replace(_classes(700, 1), transform=lambda raw: raw + torch.randn(raw.shape))
    (row,) = local_updates(start, [data], PLAIN, model=model, server_round=1, seeds=[4])
    PLAIN.train(model, data, 1, torch.Generator().manual_seed(4))
    torch.testing.assert_close(row, model.vector - start, atol=1e-5, rtol=1e-4)


def test_every_client_needs_a_seed() -> None:
    model = FlatModel(_perceptron())
    with pytest.raises(ValueError, match="seeds: 1 for 2 clients"):
        list(local_updates(model.vector, [_classes(5, 1)] * 2, PLAIN, model=model, server_round=1, seeds=[0]))


STACKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "flat linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
    "perceptron": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)
    ),
    # None of these is a plain stack of layers.
    "two linear": lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)),
    "relu last": lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
    "tanh": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))),
}


def _autograd(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, but not the function that the hand-made gradients stand for."""
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"sam_radius": 0.3}, {"momentum": 0.5, "weight_decay": 0.1}, {"sam_radius": 0.3, "momentum": 0.5, "proximal": 0.7}],
)
def test_gradients_by_hand_are_autograds(name: str, settings: dict[str, float]) -> None:
    rows = []
    for loss in (nn.functional.cross_entropy, _autograd):
        torch.manual_seed(5)
        training = LocalTraining(learning_rate=0.2, batch_size=3, num_local_epochs=3, loss=loss, **settings)  # type: ignore[arg-type]
        rows.append(update(STACKS[name](), _classes(8, 6), training))
    assert np.abs(rows[1]).max() > 0.01
    np.testing.assert_allclose(rows[0], rows[1], atol=2e-6)


class Scaled(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs / 100)  # type: ignore[no-any-return, no-untyped-call]


def test_a_forward_of_ones_own_is_used() -> None:
    rows = []
    for loss in (nn.functional.cross_entropy, _autograd):
        torch.manual_seed(5)
        rows.append(update(Scaled(nn.Linear(4, 3)), _classes(8, 6), LocalTraining(learning_rate=0.2, loss=loss)))
    np.testing.assert_allclose(rows[0], rows[1], atol=2e-6)


def test_layers_that_share_a_weight() -> None:
    rows = []
    for loss in (nn.functional.cross_entropy, _autograd):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
        net[2].weight = net[0].weight
        rows.append(update(net, _classes(8, 6), LocalTraining(learning_rate=0.2, momentum=0.5, loss=loss)))
    np.testing.assert_allclose(rows[0], rows[1], atol=2e-6)


@pytest.mark.parametrize(
    "targets", [torch.full((8, 3), 1 / 3), torch.tensor([0, 1, 2, -100, 0, 1, 2, -100])], ids=["soft", "ignored"]
)
def test_all_targets_of_cross_entropy(targets: Tensor) -> None:
    data = TensorRecords(inputs=_classes(8, 6).inputs, targets=targets)
    rows = []
    for loss in (_autograd, nn.functional.cross_entropy):
        torch.manual_seed(5)
        rows.append(update(nn.Linear(4, 3), data, LocalTraining(learning_rate=0.2, loss=loss)))
    np.testing.assert_allclose(rows[0], rows[1], atol=2e-6)


class Counting(nn.Module):
    """Keeps what it has seen in a buffer, as spectral normalisation or a codebook does."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.mean(0)
        outputs: Tensor = self.linear(inputs + self.seen)
        return outputs


def test_buffers_do_not_carry_data_from_client_to_client() -> None:
    model = FlatModel(Counting())
    start = model.vector.clone()
    rows = [
        list(local_updates(start, [_classes(5, seed), _classes(5, 1)], RECIPE, model=model, server_round=1, seeds=[0, 1]))[1]
        for seed in (7, 8)
    ]
    assert torch.equal(*rows)


def test_agrees_with_torch_optim() -> None:
    module, data = _net(), _classes(8, 4)
    reference = copy.deepcopy(module)
    training = LocalTraining(learning_rate=0.1, batch_size=8, num_local_epochs=5, momentum=0.5, weight_decay=0.01)
    row = update(module, data, training)
    before = nn.utils.parameters_to_vector(reference.parameters()).detach().clone()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(data.inputs), data.targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = nn.utils.parameters_to_vector(reference.parameters()).detach()
    np.testing.assert_allclose(row, (after - before).numpy(), atol=1e-6)


def test_losses_are_handed_out() -> None:
    losses: list[Tensor] = []
    model = FlatModel(Point(2.0))
    training = LocalTraining(learning_rate=0.5, num_local_steps=2, loss=quadratic([1.0]))
    list(local_updates(model.vector.clone(), [records([0.0])], training, model=model, server_round=1, seeds=[0], losses=losses))
    assert [float(loss) for loss in losses] == [(2.0 + 0.5) / 2]  # x = 2, then 1


def test_nothing_touches_the_global_generators() -> None:
    module, data = _net(), _classes(8, 4)
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    states = torch.get_rng_state(), np.random.get_state(legacy=False)  # noqa: NPY002
    first = update(module, data, RECIPE)
    assert torch.equal(torch.get_rng_state(), states[0])
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])  # noqa: NPY002
    torch.manual_seed(10)
    np.testing.assert_array_equal(update(_net(), data, RECIPE), first)


def test_the_order_of_records_follows_the_seed() -> None:
    rows = [update(_net(), _classes(8, 4), RECIPE, seed=seed).tolist() for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]
    seeds = {batch_seed(seed, number, name) for seed in (0, 1) for number in (1, 2) for name in ("a", "b")}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_batch_statistics_are_refused_naming_layer_and_replacement(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"layer '0\.1' \({type(layer).__name__}\).*GroupNorm\(num_groups, 4\)"):
        FlatModel(nn.Sequential(nn.Sequential(nn.Linear(4, 4), layer)))


def test_a_batch_norm_that_keeps_no_statistics_still_mixes_records_and_is_refused() -> None:
    with pytest.raises(ValueError, match="GroupNorm"):
        FlatModel(nn.BatchNorm2d(3, track_running_stats=False))
    FlatModel(nn.Sequential(nn.GroupNorm(1, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4, affine=True)))


def test_frozen_parameters_are_left_out_and_stay() -> None:
    module = _net()
    frozen = module.get_submodule("0")
    assert isinstance(frozen, nn.Linear)
    frozen.requires_grad_(False)
    before = frozen.weight.clone()
    model = FlatModel(module)
    assert model.layout.names == ("1.weight", "1.bias", "3.weight", "3.bias")
    (row,) = local_updates(model.vector.clone(), [_classes(5, 1)], RECIPE, model=model, server_round=1, seeds=[0])
    assert row.shape == (6 + 6 + 18 + 3,)
    assert torch.equal(frozen.weight, before)
    assert list(model_arrays(module)) == list(model.layout.names)


def test_parameters_are_views_of_the_vector() -> None:
    module = _net()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    model = FlatModel(module)
    assert torch.equal(model.vector, torch.cat([parameter.ravel() for parameter in before]))
    model.vector.zero_()
    assert all(not parameter.any() for parameter in module.parameters())


def test_parameters_without_influence_get_zero_gradients() -> None:
    class Idle(Point):
        def __init__(self) -> None:
            super().__init__(1.0)
            self.idle = nn.Parameter(torch.tensor([5.0]))

    np.testing.assert_allclose(
        update(Idle(), records([0.0]), LocalTraining(learning_rate=0.1, loss=quadratic([1.0]))), [-0.1, 0], rtol=1e-6
    )


def test_shared_records_are_picked_and_transformed() -> None:
    data = TensorRecords(
        inputs=torch.tensor([[0], [100], [200]], dtype=torch.uint8),
        targets=torch.tensor([0, 1, 2]),
        indices=torch.tensor([2, 1]),
        transform=lambda raw: raw.float() / 100,
    )
    assert len(data) == 2
    inputs, targets = data.batch(torch.tensor([1, 0]), torch.device("cpu"))
    assert (inputs.tolist(), targets.tolist()) == ([[1.0], [2.0]], [1, 2])


def test_a_client_without_records_is_refused() -> None:
    with pytest.raises(ValueError, match="a client without records can't train"):
        update(Point(1.0), TensorRecords(inputs=torch.zeros(0, 1), targets=torch.zeros(0)), LocalTraining(learning_rate=0.1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0),
        ("learning_rate", math.nan),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("num_local_epochs", 0),
        ("num_local_steps", 0),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("weight_decay", -1),
        ("learning_rate_decay", 1.0),
        ("sam_radius", -0.1),
        ("sam_radius", math.inf),
    ],
)
def test_nonsense_recipes_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        LocalTraining(**{"learning_rate": 0.1, field: value})
