"""Models that join the records of a batch, or keep something of one batch for the next: no record and no client reaches another."""

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flower_dp.clients import DatasetRecords, FlatModel, RecordMetrics, TensorRecords, Training
from flower_dp.clients.refusal_messages import KEEPS, UnfitModelError
from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.reply.pipeline import one_by_one
from flower_dp.clients.training import dry_run, dry_run_cache, per_record, record_clipping
from flower_dp.clients.training.dry_run import of_records
from flower_dp.clients.training.dry_run_cache import DryRunCache, findings_of
from flower_dp.clients.training.engines import local_updates
from flower_dp.clients.training.per_record import record_gradients
from flower_dp.clients.training.record_clipping import clipped_sum
from flower_dp.clients.training.record_isolation import KeepsError, must_compute_alone
from tests.local_grids import evaluated_alone

SIZE, FEATURES, CLASSES = 8, 6, 3
CROSS_ENTROPY = nn.functional.cross_entropy


class Model(nn.Module):
    """A linear layer, something of the test's own, and a linear layer."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES), between

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(inputs), inputs))


def places(inputs: Tensor) -> Tensor:
    """A place that a record names, which may be none of its own."""
    return 1 + (FEATURES - 1) * (inputs[:, :1] > 1000).long()


def filled(_: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
    return torch.stack([one.index_fill(0, place, 0.0) for one, place in zip(hidden, places(inputs), strict=True)])


def looked_up(_: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
    found = [nn.functional.embedding(place, one[:, None]) for one, place in zip(hidden, places(inputs), strict=True)]
    return hidden + torch.stack(found).sum((1, 2))[:, None]


def made(module: nn.Module) -> FlatModel:
    flat = FlatModel(module)
    flat.vector.copy_(0.5 * torch.randn(flat.layout.size, generator=torch.Generator().manual_seed(3)))
    return flat


def records(values: Tensor, labels: Tensor | None = None) -> TensorRecords:
    return TensorRecords(inputs=values, targets=torch.arange(len(values)) % CLASSES if labels is None else labels)


def pairs(values: Tensor) -> DatasetRecords:
    return DatasetRecords(dataset=[(one, place % CLASSES) for place, one in enumerate(values)])


def features(count: int = SIZE, seed: int = 1) -> Tensor:
    return torch.rand(count, FEATURES, generator=torch.Generator().manual_seed(seed))


def total(flat: FlatModel, data: Any, seed: int = 5, **arguments: Any) -> Tensor:
    clip = RecordClip(clip_norm=0.5, step=2.0**-40)
    return clipped_sum(flat, data, torch.arange(len(data)), clip=clip, loss=CROSS_ENTROPY, seed=seed, **arguments)[0]


METRICS = RecordMetrics(names=("first",), of=lambda outputs, target: {"first": float(outputs[0, 0])})


def evaluated(flat: FlatModel, data: Any) -> np.ndarray:
    return evaluated_alone(flat, data, METRICS, bound=100.0)


ZEROS = torch.zeros(SIZE, FEATURES), torch.zeros(SIZE, dtype=torch.int64)


# Records that are computed together


@pytest.mark.parametrize(("between", "of"), [(filled, records), (looked_up, pairs)], ids=["tensors", "pairs"])
def test_a_record_that_looks_beyond_its_own_table_changes_no_other(between: Any, of: Any) -> None:
    """`torch.func` puts the tables of all records into one, and an index beyond a record's own reads or fills the next one's."""
    flat, values = made(Model(between)), features(4)

    def raw(values: Tensor) -> Tensor:
        rows = [record_gradients(flat, values, torch.full((4,), n), loss=CROSS_ENTROPY)[0] for n in range(CLASSES)]
        return torch.stack(rows)[:, 3:]

    joined = raw(values)
    values[2] = torch.nan  # counts as zero, and names no place
    expected = total(flat, of(values))
    assert expected.any()
    values[2] = 2000.0
    assert torch.equal(total(flat, of(values)), expected)
    assert not torch.equal(raw(values), joined)


def centered(_: Any, hidden: Tensor, __: Tensor) -> Tensor:
    return hidden - hidden.mean(0)


@pytest.mark.parametrize("of", [records, pairs], ids=["tensors", "pairs"])
def test_where_an_engine_joins_records_each_is_computed_alone(of: Any, monkeypatch: Any) -> None:
    """The choice of the engine for a stack of layers rests on a list of layers; this is the second check."""
    flat = made(Model(lambda _, hidden, __: hidden.tanh()))
    data = of(features())
    expected = total(flat, data)

    def joined(model: FlatModel, inputs: Any, targets: Tensor, loss: Any) -> Any:
        return per_record._by_vmap(model, inputs - inputs.mean(0), targets, loss)

    monkeypatch.setattr(per_record, "engine_of", lambda model: "expanded-weights")
    monkeypatch.setitem(per_record.ENGINES, "expanded-weights", joined)
    findings_of(flat).clear()
    torch.testing.assert_close(total(flat, data), expected)


def test_nor_does_an_evaluation_join_records(monkeypatch: Any) -> None:
    flat, values = made(Model(centered)), features()
    expected = evaluated(flat, records(values))
    monkeypatch.setattr("flower_dp.clients.local.evaluation.keeps_records_apart", lambda module: True)
    findings_of(flat).clear()
    np.testing.assert_array_equal(evaluated(flat, records(values)), expected)


def computed(model: FlatModel, inputs: Any, targets: Tensor) -> Tensor:
    model.reset_buffers()
    with torch.no_grad():
        return model.module(inputs).flatten(start_dim=1)


JOINS: dict[str, Any] = {
    "mean": centered,
    "attention": lambda _, hidden, __: nn.functional.scaled_dot_product_attention(*[hidden[None]] * 3)[0],
    "flatten": lambda _, hidden, __: hidden.flatten().roll(1).view(hidden.shape),
    "the next but one": lambda _, hidden, __: hidden + hidden.roll(2, 0),
    "NaN alone": lambda _, hidden, __: hidden + 0 * hidden.sum(),
    "large alone": lambda _, hidden, inputs: hidden + (inputs.max() > 50),
    "a bag": lambda _, hidden, __: hidden + nn.functional.embedding_bag(torch.zeros(1, 4).long(), hidden),
}


@pytest.mark.parametrize("name", JOINS)
def test_joined_records_are_found(name: str) -> None:
    flat = FlatModel(Model(JOINS[name]))
    # Those of a server that hides it: all outputs are 1, whatever is between the layers.
    flat.vector.zero_()[-CLASSES:] = 1
    sent = flat.vector.clone()
    assert must_compute_alone(flat, *ZEROS, partial(computed, flat), object())
    assert torch.equal(flat.vector, sent)


@pytest.mark.parametrize(
    "rows", [lambda one, _: 0 * one, lambda one, _: one / 0, lambda one, _: one[9]], ids=["0", "inf", "raises"]
)
def test_in_doubt_records_are_computed_one_at_a_time(rows: Any) -> None:
    assert must_compute_alone(made(nn.Linear(FEATURES, CLASSES)), *ZEROS, rows, object())


def test_neither_data_nor_weights_decide_what_is_found() -> None:
    given: list[Any] = []
    for value, weight in ((1.0, 0.0), (torch.nan, 1.0)):
        flat = made(nn.Linear(FEATURES, CLASSES))
        flat.vector.fill_(weight)

        def rows(inputs: Any, targets: Tensor, flat: FlatModel = flat) -> Tensor:
            given.append((inputs, targets, flat.vector.clone()))
            return inputs

        must_compute_alone(flat, torch.full((SIZE, FEATURES), value), torch.full((SIZE,), int(weight)), rows, object())
        assert bool((flat.vector == weight).all())
    middle = len(given) // 2
    for one, other in zip(given[:middle], given[middle:], strict=True):
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


# What is kept from one forward pass to the next


def appended(model: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
    model.past.append(inputs.detach().mean())
    return hidden * (1 + sum(model.past))


def counted(model: Any, hidden: Tensor, _: Tensor) -> Tensor:
    model.count += 1
    return hidden * model.count


def moved(model: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
    model.mean.mul_(0.9).add_(inputs.detach().mean())
    return hidden * model.mean


def new(model: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
    last = getattr(model, "unheard", 1.0)
    model.unheard = inputs.detach().mean()
    return hidden * last


def tabled(model: Any, hidden: Tensor, _: Tensor) -> Tensor:
    model.table["array"] += 1
    return hidden * float(model.table["array"][0])


def own_memory(model: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
    """The trained parameter leaves the memory that a global model is written to."""
    model.first.weight.data = model.first.weight.data + inputs.detach().mean()
    return hidden


KEPT = {"list": appended, "number": counted, "tensor": moved, "new": new, "table": tabled}


def keeping(between: Any) -> nn.Module:
    model = Model(between)
    model.past, model.count, model.mean, model.table = deque(maxlen=3), 1, torch.ones(()), {"array": np.ones(1)}
    return model


@pytest.mark.parametrize("name", [*KEPT, "memory"])
def test_attributes_carry_nothing_from_client_to_client(name: str) -> None:
    between = own_memory if name == "memory" else KEPT[name]
    flat, training = made(keeping(between)), Training(learning_rate=0.1, batch_size=4)
    vector = flat.vector.clone()
    clients = [records(features(seed=seed) * seed) for seed in (1, 2, 3)]

    def rows(positions: list[int]) -> list[Any]:
        chosen = [clients[position] for position in positions]
        return [*local_updates(vector, chosen, training, model=flat, server_round=1, seeds=positions)]

    together = rows([0, 1, 2])
    assert all(isinstance(row, Tensor) for row in together)
    for position in (2, 1, 0):
        assert torch.equal(rows([position])[0], together[position])


class OfClass(Model):
    """A model that counts in an attribute of its class, which nothing restores."""

    count = 1

    def forward(self, inputs: Tensor) -> Tensor:
        type(self).count += 1
        return super().forward(inputs) * type(self).count


def enclosed() -> nn.Module:
    """A model that keeps its last input where nobody can restore it."""
    past = [torch.ones(FEATURES)]

    def between(_: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
        made = hidden + past[0]
        past[0] = inputs.detach().mean(0)
        return made

    return Model(between)


UNSEEN = {"class": lambda: OfClass(lambda _, hidden, __: hidden), "enclosed": enclosed}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_nothing_restores_is_refused(name: str) -> None:
    flat = made(UNSEEN[name]())
    for _ in range(2):
        with pytest.raises(KeepsError):
            must_compute_alone(flat, *ZEROS, partial(computed, flat), "question")


@pytest.mark.parametrize("relation", ["replace-one", "add-or-remove-one"])
def test_a_client_whose_model_keeps_records_says_so(relation: Any) -> None:
    flat = made(UNSEEN["class"]())
    assert dry_run.of_records(flat, records(features()), CROSS_ENTROPY) == KEEPS
    with pytest.raises(UnfitModelError):
        total(flat, records(features()), relation=relation)
    assert not total(flat, pairs(features()), relation=relation).any()  # a record's kind is its own, so it decides no reply
    nothing = evaluated(flat, DatasetRecords(dataset=[None] * SIZE))
    np.testing.assert_array_equal(evaluated(flat, pairs(features())), nothing)


def test_so_does_one_of_whole_clients() -> None:
    training = Training(learning_rate=0.1)
    for name, build in UNSEEN.items():
        assert dry_run.of_training(made(build()), records(features()), training) == KEEPS, name
    for between in KEPT.values():
        assert dry_run.of_training(made(keeping(between)), records(features()), training) is None


def drawn(_: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
    return hidden * (random.random() + float(np.random.rand()))  # noqa: NPY002


def test_what_a_model_draws_from_python_and_numpy_follows_from_the_seed() -> None:
    flat, data, state = made(Model(drawn)), records(features()), random.getstate()
    expected, one = total(flat, data), evaluated(flat, data)
    assert random.getstate() == state
    random.random()
    assert torch.equal(total(flat, data), expected)
    assert not torch.equal(total(flat, data, seed=6), expected)
    np.testing.assert_array_equal(evaluated(flat, data), one)


# The frozen base


def written(model: Any, hidden: Tensor, inputs: Tensor) -> Tensor:
    """A frozen parameter moves with what the model is given, where torch does not count it."""
    if float(inputs.max()) > 1:  # no made-up record of a test does
        model.frozen.data.mul_(0.5)
    return hidden * model.frozen


def based(between: Any) -> nn.Module:
    model = Model(between)
    model.frozen = nn.Parameter(torch.ones(FEATURES), requires_grad=False)
    return model


def test_a_client_that_changes_the_base_is_left_out_and_so_are_those_after_it() -> None:
    flat, training = made(based(written)), Training(learning_rate=0.1)
    vector = flat.vector.clone()
    clients = [records(features()), records(2 * features()), records(features())]
    rows = [*local_updates(vector, clients, training, model=flat, server_round=1, seeds=[0, 1, 2])]
    assert isinstance(rows[0], Tensor)
    assert [type(row).__name__ for row in rows[1:]] == ["ChangedBaseError"] * 2


def test_a_reply_of_a_client_that_changed_the_base_does_not_leave() -> None:
    flat = made(based(centered))

    def row(change: Any) -> tuple[Tensor, Tensor]:
        flat.module.frozen.data.mul_(change)
        return flat.vector.clone(), torch.zeros(())

    rows = [*one_by_one([1.0, 0.5, 1.0], row, reset=flat.reset)]
    assert isinstance(rows[0], tuple)
    assert [type(one).__name__ for one in rows[1:]] == ["ChangedBaseError"] * 2


CHANGES = [lambda base: base.data.mul_(1.001), lambda base: base[2:3].zero_(), lambda base: base.view(-1)[-1:].add_(1)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shape", [(FEATURES,), (3, 5)])
def test_every_change_of_the_base_is_seen(change: Any, shape: tuple[int, ...]) -> None:
    module = nn.Linear(FEATURES, CLASSES)
    module.frozen = nn.Parameter(torch.rand(shape, generator=torch.Generator().manual_seed(1)), requires_grad=False)
    flat = FlatModel(module)
    flat.reset()
    change(module.frozen)
    with pytest.raises(RuntimeError, match="frozen parameters"):
        flat.reset()


@pytest.mark.parametrize("at_random", [False, True])
def test_last_bits_that_follow_from_other_records_are_found(at_random: bool) -> None:
    """Those that are others every time, as of some operations on a GPU, are not taken for that."""
    flat, times = made(nn.Linear(FEATURES, CLASSES)), iter(range(1000))

    def rows(inputs: Any, targets: Tensor) -> Tensor:
        count = next(times) if at_random else int(inputs.isnan().sum() + (inputs > 5).sum())
        return torch.ones(len(inputs), 3) * (1 + 2.0**-23 * (count % 7))

    assert must_compute_alone(flat, *ZEROS, rows, object()) == (not at_random)


# What made-up records have said of a model counts for those that are alike, and for no other.


OUTPUTS = 2


def stack(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), *(middle or (nn.ReLU(),)), nn.Flatten(), nn.Linear(12, OUTPUTS))


def known(model: nn.Module) -> DryRunCache:
    return findings_of(FlatModel(model))


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    dry_run_cache._shared.cache_clear()


class Own(nn.ReLU):
    """Might do anything."""


class Weights(nn.Parameter):
    """Might do anything as well."""


def changed(change: Callable[[Any], object]) -> nn.Module:
    model = stack()
    change(model)
    return model


def test_models_that_differ_in_their_weights_alone_are_alike() -> None:
    found = known(stack())
    assert known(stack()) is found
    assert known(copy.deepcopy(stack())) is found


@pytest.mark.parametrize(
    "other",
    [
        lambda: stack(nn.Tanh()),
        lambda: changed(lambda model: model[0].weight.requires_grad_(False)),
        lambda: changed(lambda model: setattr(model[1], "note", 3)),
        lambda: stack().eval(),
    ],
    ids=["layer", "frozen", "option", "evaluates"],
)
def test_other_layers_and_options_are_another_model(other: Callable[[], nn.Module]) -> None:
    assert known(other()) is not known(stack())
    assert known(other()) is known(other())


@pytest.mark.parametrize(
    "make",
    [
        lambda: stack(Own()),
        lambda: stack(nn.Dropout(0.5)),
        lambda: changed(lambda model: setattr(model[1], "forward", lambda inputs: inputs)),
        lambda: changed(lambda model: model[1].register_forward_hook(lambda *_: None)),
        lambda: changed(lambda model: setattr(model[1], "note", [1])),
        lambda: changed(lambda model: setattr(model[0], "weight", Weights(model[0].weight.detach()))),
        lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
    ],
    ids=["subclass", "draws", "forward", "hook", "list", "parameter", "layer twice"],
)
def test_a_model_of_which_more_is_to_be_known_stands_alone(make: Callable[[], nn.Module]) -> None:
    assert known(make()) is not known(make())


def test_a_hook_for_all_modules_counts() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert known(stack()) is not known(stack())
    finally:
        handle.remove()


def test_the_next_clients_model_is_not_examined_again_and_another_loss_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    gradients = record_clipping.record_gradients
    monkeypatch.setattr(record_clipping, "record_gradients", lambda *a, **k: calls.append(1) or gradients(*a, **k))
    records = TensorRecords(inputs=torch.zeros(5, 1, 4), targets=torch.zeros(5, dtype=torch.int64))

    def examined(loss: Any = nn.functional.cross_entropy, records: TensorRecords = records) -> int:
        before = len(calls)
        assert of_records(FlatModel(stack()), records, loss) is None
        return len(calls) - before

    assert examined() > 0
    assert examined() == 0
    assert examined(lambda outputs, targets: outputs.square().mean()) > 0
    assert examined(records=TensorRecords(inputs=torch.zeros(5, 1, 4), targets=torch.zeros(5, OUTPUTS))) > 0
    assert examined() == 0


def test_a_copy_knows_nothing_and_no_more_than_so_many_questions_are_kept() -> None:
    model = FlatModel(stack(Own()))
    findings_of(model)["asked"] = True
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert "asked" not in findings_of(again)
    assert "asked" in findings_of(model)
    for number in range(2 * dry_run_cache._MAX_FINDINGS):
        findings_of(model)[number] = True
    assert len(findings_of(model)) <= dry_run_cache._MAX_FINDINGS
    assert 2 * dry_run_cache._MAX_FINDINGS - 1 in findings_of(model)
