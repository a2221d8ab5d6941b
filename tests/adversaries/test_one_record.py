"""One record against its client: it may neither decide whether the client replies, nor change what another record contributes.

The unit of privacy is a record: replacing one by anything at all may move the sum by twice the clip norm, and must leave every
other contribution as it is, bit for bit.
"""

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flower_dp import clients as dp
from flower_dp.clients import DatasetRecords, FlatModel, RecordMetrics, TensorRecords
from flower_dp.clients.refusal_messages import UNFIT
from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.reply.pipeline import ClientJob, Reply
from flower_dp.clients.training import record_clipping
from flower_dp.clients.training.record_clipping import clipped_sum
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from tests.adversaries.fuzzing import THOROUGH
from tests.local_grids import evaluated_alone

evaluated = partial(evaluated_alone, bound=2.0)
SIZE, FEATURES, CLASSES = 12, 6, 3
# So fine that rounding hides no difference of float32 rows, and so coarse that sums are exact in any order.
STEP = 2.0**-40
CROSS_ENTROPY = nn.functional.cross_entropy


class Reading:
    """A record that can't be read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Items:
    """A data set of items, some of which can't be read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Any:
        item = self.items[position]
        if isinstance(item, Reading):
            raise item.error
        return item


HOSTILE: dict[str, Any] = {
    "a float label": (torch.ones(FEATURES), 1.0),
    "a label of NaN": (torch.ones(FEATURES), math.nan),
    "a label of no class": (torch.ones(FEATURES), 99),
    "a bool label": (torch.ones(FEATURES), True),
    "two labels": (torch.ones(FEATURES), torch.tensor([0, 1])),
    "a label in words": (torch.ones(FEATURES), "one"),
    "no label": (torch.ones(FEATURES), None),
    "float64": (torch.ones(FEATURES, dtype=torch.float64), 1),
    "complex numbers": (torch.ones(FEATURES, dtype=torch.complex64), 1),
    "a NumPy array": (np.ones(FEATURES), 1),
    "a feature more": (torch.ones(FEATURES + 1), 1),
    "words": ("one", 1),
    "inputs by name": ({"inputs": torch.ones(FEATURES)}, 1),
    "no inputs by name": ({}, 1),
    "a sparse tensor": (torch.ones(FEATURES).to_sparse(), 1),
    "a tensor with a gradient": (torch.ones(FEATURES, requires_grad=True), 1),
    "NaN": (torch.full((FEATURES,), math.nan), 1),
    "infinity": (torch.full((FEATURES,), math.inf), 1),
    "huge": (torch.full((FEATURES,), 1e38), 1),
    "nothing": None,
    "a lost file": Reading(OSError("Jane Doe")),
    "an end": Reading(StopIteration()),
    "an exit": Reading(SystemExit("Jane Doe")),
    "a closed generator": Reading(GeneratorExit()),
    "an end of another kind": Reading(type("Ending", (BaseException,), {})()),
}
every_hostile = pytest.mark.parametrize("hostile", HOSTILE)


def in_turn(cases: Any, *turns: tuple[Any, Any]) -> Any:
    """One of some cases, another one for each next of some keys; all of them if tests are thorough (FUZZ=thorough)."""
    turn = sum(list(keys).index(key) for key, keys in turns)
    return cases if THOROUGH else [cases[turn % len(cases)]]


def honest(size: int = SIZE) -> list[Any]:
    rng = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(size, FEATURES, generator=rng), torch.randint(CLASSES, (size,), generator=rng)
    return list(zip(inputs, labels.tolist(), strict=True))


def with_one(hostile: Any, place: int, items: list[Any]) -> DatasetRecords:
    return DatasetRecords(dataset=Items([*items[:place], hostile, *items[place + 1 :]]))


def as_tensors(items: list[Any], **more: Any) -> TensorRecords:
    return TensorRecords(inputs=torch.stack([one for one, _ in items]), targets=torch.tensor([one for _, one in items]), **more)


def made(build: Any) -> FlatModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        return FlatModel(build())


# Whether a client replies

STEPS = {"learning_rate": 0.1, "num_local_steps": 2, "batch_size": 6, "clip_norm": 1.0}
PER_STEP, CONVEX = {"sensitivity": "per-step"}, {"sensitivity": "convex-glm", "smoothness": 5.0}
BUDGET = {"epsilon": 4.0, "delta": 1e-3}
NBAFL = {"clip_norm": 2.0, "paper_epsilon": 8.0, "delta": 1e-3, "uplink_exposures": 5, "min_records": SIZE}
RECIPES: dict[str, tuple[Any, int]] = {
    "fedsgd-dpc": (dp.FedSGDDPCRecipe(mechanism="laplace", clip_norm=1.0, epsilon=1.0, num_replies=9), CLASSES),
    "dp-pasgd": (dp.DPPASGDRecipe(**STEPS | {"batch_size": SIZE}, **BUDGET, num_steps=4), CLASSES),
    "dp-fedpaq": (dp.DPFedPAQRecipe(steps=FedPAQSteps(**STEPS, **PER_STEP), **BUDGET, num_replies=2), CLASSES),
    "convex": (dp.DPFedPAQRecipe(steps=FedPAQSteps(**STEPS, **CONVEX), **BUDGET, num_replies=2), 2),
    "nbafl": (dp.NbAFLRecipe(training=dp.Training(learning_rate=0.1, batch_size=4), **NBAFL), CLASSES),
}


def answer_of(recipe: Any, flat: FlatModel, records: Any) -> Any:
    release = recipe.terms("a", records).release
    pipeline = recipe.pipeline(release, model=flat, server_round=1)
    (answer,) = pipeline.replies(
        flat.vector.clone(), [ClientJob(name="a", records=records, seed=0, secret=np.random.default_rng)]
    )
    return answer


def each_hostile() -> list[tuple[str, str]]:
    """Every record with the first method, and with one of the others in turn; with all of them if tests are thorough."""
    first, *others = RECIPES
    return [(hostile, method) for hostile in HOSTILE for method in (first, *in_turn(others, (hostile, HOSTILE)))]


@pytest.mark.parametrize(("hostile", "method"), each_hostile())
def test_no_record_decides_whether_its_client_replies(method, hostile):
    """The first record, the last one, or all of them."""
    recipe, classes = RECIPES[method]
    cases = [
        *(with_one(HOSTILE[hostile], place, honest()) for place in (0, SIZE - 1)),
        DatasetRecords(dataset=Items([HOSTILE[hostile]] * SIZE)),
    ]
    for records in in_turn(cases, (method, RECIPES), (hostile, HOSTILE)):
        answer = answer_of(recipe, made(lambda: nn.Linear(FEATURES, classes)), records)
        assert isinstance(answer, Reply)
        assert answer.row.isfinite().all()


class Odd:
    """Records of a user's own class, one of which comes twice, as an array, or not at all."""

    def __init__(self, what: str) -> None:
        self.what, self.good = what, DatasetRecords(dataset=honest())

    def __len__(self) -> int:
        return SIZE

    def batch(self, positions: Tensor, device: torch.device) -> Any:
        inputs, targets = self.good.batch(positions, device)
        if 3 not in positions.tolist():
            return inputs, targets
        return {
            "twice": (inputs.repeat(2, 1), targets.repeat(2)),
            "array": (np.asarray(inputs), targets),
            "nothing": None,
            "mixed": (inputs * math.nan, targets * 0),
        }[self.what]


@pytest.mark.parametrize("method", ["fedsgd-dpc", "dp-pasgd", "dp-fedpaq", "convex"])
@pytest.mark.parametrize("what", ["twice", "array", "nothing", "mixed"])
def test_nor_does_a_record_of_a_users_own_class(method, what):
    recipe, classes = RECIPES[method]
    assert isinstance(answer_of(recipe, made(lambda: nn.Linear(FEATURES, classes)), Odd(what)), Reply)


def test_a_data_set_with_an_example_converts_records_and_leaves_out_others():
    """The example's types are public; a record of float64 is one like all others."""
    flat, items = made(lambda: nn.Linear(FEATURES, CLASSES)), honest()
    expected = total(flat, DatasetRecords(dataset=items))
    same = [(inputs.double(), label) for inputs, label in items]
    example = (torch.zeros(FEATURES), 0)
    assert torch.equal(total(flat, DatasetRecords(dataset=same, example=example)), expected)
    assert torch.equal(total(flat, DatasetRecords(dataset=same)), expected)
    wrongs = (items[5][0], 1.0), (torch.ones(FEATURES + 1), 1), ({"x": items[5][0]}, 1), (items[5][0].to(torch.complex64), 1)
    for wrong in wrongs:
        records = DatasetRecords(dataset=[*items[:5], wrong, *items[6:]], example=example)
        others = as_tensors([*items[:5], *items[6:]])
        torch.testing.assert_close(total(flat, records), total(flat, others), rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="does not fit the example"):
            records.batch(torch.tensor([5]), flat.device)


@pytest.mark.parametrize("method", ["fedsgd-dpc", "dp-pasgd", "dp-fedpaq", "nbafl"])
def test_a_made_up_record_tells_whether_the_model_fits_and_no_record_of_the_client_does(method):
    """With one record that does not fit, none, or all: without an example a client always replies, with one it never does."""
    recipe = RECIPES[method][0]
    fits, not_fits = (torch.ones(FEATURES + 1), 1), honest()
    for items in (not_fits, [*not_fits[:4], fits, *not_fits[5:]], [fits] * SIZE):
        wrong = made(lambda: nn.Linear(FEATURES + 1, CLASSES))
        assert isinstance(answer_of(recipe, wrong, DatasetRecords(dataset=items)), Reply)
        reported = answer_of(recipe, wrong, DatasetRecords(dataset=items, example=(torch.zeros(FEATURES), 0)))
        assert UNFIT in reported.reason


class Picky(nn.Linear):
    """A model that can be run on any records but some of zeros."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(inputs) and not inputs.any():
            raise ValueError("zeros")
        return super().forward(inputs)


@pytest.mark.parametrize("label", [1, 99])
def test_a_model_that_does_not_fit_a_made_up_record_never_trains(label):
    """Not only where a record of the client fails as well: that would tell of the record."""
    items = honest()
    records = as_tensors([(items[0][0], label), *items[1:]])
    assert UNFIT in answer_of(RECIPES["nbafl"][0], made(lambda: Picky(FEATURES, CLASSES)), records).reason


# What the others contribute


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 5), nn.Linear(5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.table(inputs).mean(1))


class Named(nn.Linear):
    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        return super().forward(values * mask)


class Counting(nn.Module):
    """A model that counts its forward passes, and whose outputs depend on the count."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(FEATURES, CLASSES)
        self.register_buffer("calls", torch.ones(()))
        self.register_buffer("kept", None)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            torch.add(self.calls, 1, out=self.calls)
        self.kept = torch.ones(()) if self.kept is None else 2 * self.kept
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(()))
        self.late = self.late / 3
        return self.layer(inputs) * self.calls * self.kept * self.late


class Shrinking(nn.Linear):
    """A model whose forward pass changes its weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        with torch.no_grad():
            torch.mul(self.weights[0], 0.5, out=self.weights[0])
        return outputs


def vectors(count: int) -> list[Any]:
    return [one for one, _ in honest(count)]


def spectral() -> nn.Module:
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


def images(count: int) -> list[Any]:
    return list(torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(3)))


MODELS: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: nn.Linear(FEATURES, CLASSES), vectors),
    "mlp": (lambda: nn.Sequential(nn.Linear(FEATURES, 33), nn.Tanh(), nn.Linear(33, CLASSES)), vectors),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)), images),
    "embedding": (Looked, lambda count: list(torch.randint(9, (count, 4), generator=torch.Generator().manual_seed(3)))),
    "by name": (lambda: Named(FEATURES, CLASSES), lambda count: [{"values": one, "mask": one > 0} for one in vectors(count)]),
    "spectral norm": (spectral, vectors),
    "dropout": (lambda: nn.Sequential(nn.Linear(FEATURES, 40), nn.Dropout(0.5), nn.Linear(40, CLASSES)), vectors),
    "a count": (Counting, vectors),
}
BAD: dict[str, Any] = {
    "a lost file": Reading(OSError()),
    "another shape": (torch.ones(FEATURES + 3), 1),
    "another type": (torch.ones(FEATURES, dtype=torch.complex64), 1),
    "a float label": (torch.ones(FEATURES), 0.5),
    "another number of axes": (torch.ones(2, 1, 3, 2, FEATURES), 1),
    "nothing": None,
}


PARTS, PLACES = (64, 5, 1), (6, SIZE - 1, 0)


def with_parts(names: Any, **more: int) -> Any:
    """Models, each with chunks of one size in turn, and some with one size more; with all sizes if tests are thorough."""
    pairs = [(name, part) for name in names for part in in_turn(PARTS, (name, names))]
    return pytest.mark.parametrize(("name", "part"), pairs + [pair for pair in more.items() if pair not in pairs])


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that raises for a class that is none, which a forward pass of the whole chunk does not survive."""
    return nn.functional.nll_loss(outputs.log_softmax(1), targets)


def total(flat: FlatModel, records: Any, positions: Tensor | None = None, *, loss: Any = CROSS_ENTROPY, seed: int = 5) -> Tensor:
    positions = torch.arange(len(records)) if positions is None else positions
    clip = RecordClip(clip_norm=0.5, step=STEP)
    flat.reset_buffers()
    return clipped_sum(flat, records, positions, clip=clip, loss=loss, seed=seed)[0]


@with_parts(MODELS, **{"mlp": 64, "convolution": 5, "spectral norm": 5})
def test_a_bad_record_leaves_every_other_contribution_as_it_is(name, part, monkeypatch):
    """Bit for bit: as if in its place were a record of no class, which counts as zero and is computed with the others."""
    monkeypatch.setitem(record_clipping._MAX_RECORDS, "cpu", part)
    build, inputs = MODELS[name]
    flat = made(build)
    items = [(one, place % CLASSES) for place, one in enumerate(inputs(SIZE))]
    for place in in_turn(PLACES, (name, MODELS), (part, PARTS)):
        expected = total(flat, with_one((items[place][0], CLASSES), place, items))
        assert expected.any()
        for bad in BAD.values():
            assert torch.equal(total(flat, with_one(bad, place, items)), expected)


@with_parts(["linear", "mlp", "convolution", "spectral norm", "dropout", "a count"])
def test_nor_does_a_record_for_which_the_loss_raises(name, part, monkeypatch):
    """Then a chunk is computed again without it, each of the others in its place; a record of NaN counts as zero as well."""
    monkeypatch.setitem(record_clipping._MAX_RECORDS, "cpu", part)
    build, inputs = MODELS[name]
    flat = made(build)
    items = [(one, place % CLASSES) for place, one in enumerate(inputs(SIZE))]
    for place in in_turn(PLACES, (name, MODELS), (part, PARTS)):
        expected = total(flat, with_one((items[place][0] * math.nan, 0), place, items), loss=own_loss)
        assert expected.any()
        assert torch.equal(total(flat, with_one((items[place][0], CLASSES), place, items), loss=own_loss), expected)
        tensors = as_tensors([*items[:place], (items[place][0], CLASSES), *items[place + 1 :]])
        assert torch.equal(total(flat, tensors, loss=own_loss), expected)


def test_a_forward_pass_that_changes_weights_changes_no_other_record(monkeypatch):
    monkeypatch.setitem(record_clipping._MAX_RECORDS, "cpu", 4)
    flat, items = made(lambda: Shrinking(FEATURES, CLASSES)), honest()
    monkeypatch.setattr(Shrinking, "weights", [flat.vector], raising=False)
    start = flat.vector.clone()

    def again(records):
        flat.vector.copy_(start)
        return total(flat, records, loss=own_loss)

    expected = again(with_one((items[2][0] * math.nan, 0), 2, items))
    assert expected.any()
    assert torch.equal(again(with_one((items[2][0], CLASSES), 2, items)), expected)


def test_one_record_moves_the_sum_by_twice_the_clip_norm_at_most():
    flat, items = made(spectral), honest()
    without = total(flat, DatasetRecords(dataset=items))
    for name, hostile in HOSTILE.items():
        for place in in_turn((0, 5), (name, HOSTILE)):
            moved = without - total(flat, with_one(hostile, place, items))
            assert torch.linalg.vector_norm(moved) <= 2 * 0.5, name


class Augmented(Items):
    """A data set that draws from everything, a bad record any number of times."""

    def __getitem__(self, position: int) -> Any:
        inputs, label = self.items[position]
        if label == CLASSES:
            for _ in range(int(inputs[0])):
                random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
            raise OSError
        return inputs + torch.rand(FEATURES) + float(np.random.rand()) + random.random(), label  # noqa: NPY002


def test_what_a_data_set_draws_for_a_record_depends_on_no_other():
    flat, items = made(lambda: nn.Linear(FEATURES, CLASSES)), honest()
    sums = []
    for count in (0, 1, 7):
        random.seed(count)
        outside = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
        changed = [*items[:4], (torch.full((FEATURES,), float(count)), CLASSES), *items[5:]]
        sums.append(total(flat, DatasetRecords(dataset=Augmented(changed))))
        assert (random.getstate(), str(np.random.get_state())) == outside[:2]  # noqa: NPY002
        assert torch.equal(torch.get_rng_state(), outside[2])
    assert torch.equal(sums[1], sums[0])
    assert torch.equal(sums[2], sums[0])
    # Each record draws anew, and so does each reply.
    assert not torch.equal(total(flat, DatasetRecords(dataset=Augmented(items)), seed=6), sums[0])
    same = [(torch.ones(FEATURES), 1)] * 2
    one, two = (total(flat, DatasetRecords(dataset=Augmented(same)), torch.tensor([position])) for position in (0, 1))
    assert not torch.equal(one, two)


def of_largest(batch: Tensor) -> Tensor:
    return batch / batch.abs().max()


def of_largest_by_numpy(batch: Tensor) -> Tensor:
    return torch.from_numpy(batch.numpy() / (np.abs(batch.numpy()).max() + 1e-3))


@pytest.mark.parametrize("transform", [of_largest, of_largest_by_numpy, lambda batch: batch + torch.rand(len(batch), 1)])
def test_a_transform_sees_one_record_at_a_time(transform):
    """Whatever it does with a batch; vectorized or not."""
    flat, items = made(lambda: nn.Linear(FEATURES, CLASSES)), honest()

    def contributions(values: Tensor) -> Tensor:
        """The fourth record is of no class: the sum is that of the others."""
        return total(flat, as_tensors([*items[:3], (values, CLASSES), *items[4:]], transform=transform))

    assert torch.equal(contributions(1e6 * torch.ones(FEATURES)), contributions(torch.ones(FEATURES)))
    assert contributions(torch.ones(FEATURES)).any()


# One record more or less, which moves the others to other places


@pytest.mark.parametrize("name", ["mlp", "convolution", "spectral norm"])
def test_a_record_less_leaves_the_others_as_they_are(name, monkeypatch):
    """Under add-or-remove-one: each contribution has the same bits in every place, although a product's bits may depend on it."""
    build, inputs = MODELS[name]
    flat, sums = made(build), []

    def kept(*args: Any, **arguments: Any) -> Any:
        made = clipped_sum(*args, **arguments | {"clip": RecordClip(clip_norm=0.5, step=STEP)})
        sums.append(made[0])
        return made

    monkeypatch.setattr("flower_dp.clients.fedsgd_dpc.clipped_sum", kept)
    arguments = {"mechanism": "gaussian", "clip_norm": 0.5, "epsilon": 1.0, "delta": 1e-3, "num_replies": 1}
    recipe = dp.FedSGDDPCRecipe(**arguments, relation="add-or-remove-one", num_records=SIZE)
    records = as_tensors(list(zip(inputs(SIZE), (torch.arange(SIZE) % CLASSES).tolist(), strict=True)))
    for start in (0, 1, 6, 11):  # the same records, each time another one in front
        order = torch.tensor([*range(start, SIZE), *range(start)])
        assert isinstance(
            answer_of(recipe, flat, replace(records, inputs=records.inputs[order], targets=records.targets[order])), Reply
        )
    for other in sums[1:]:
        assert torch.equal(other, sums[0])


def test_a_record_less_leaves_the_metrics_of_others_as_they_are():
    flat, items = made(MODELS["mlp"][0]), honest()
    reported: list[list[float]] = []

    def first(outputs: Tensor, target: Tensor) -> dict[str, float]:
        reported.append(outputs[0].tolist())
        return {"first": 0.0}

    metrics = RecordMetrics(names=("first",), of=first)
    for skipped in range(3):
        evaluated(flat, DatasetRecords(dataset=items[skipped:]), metrics, relation="add-or-remove-one")
    assert reported[1:SIZE] == reported[SIZE : 2 * SIZE - 1]
    assert reported[2:SIZE] == reported[2 * SIZE - 1 :]


# Evaluation


def first_output(outputs: Tensor, target: Tensor) -> dict[str, float]:
    if int(target) >= CLASSES:
        raise ValueError("Jane Doe")
    return {"first": float(outputs[0, 0] + torch.rand(1))}


class Drawing(nn.Linear):
    """A model that draws in an evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + torch.rand(1)


@pytest.mark.parametrize(
    "build", [MODELS["mlp"][0], Counting, lambda: Drawing(FEATURES, CLASSES)], ids=["apart", "a count", "drawing"]
)
def test_in_an_evaluation_a_bad_record_leaves_the_others_as_they_are(build, caplog):
    """Each counts as zero, like one whose metrics can't be computed."""
    flat, items = made(build), honest()
    metrics = RecordMetrics(names=("first",), of=lambda outputs, _: {"first": float(outputs[0, 0])})
    reported = RecordMetrics(
        names=("first",), of=lambda outputs, target: {"first": float(outputs[0, 0]) + (1 / (CLASSES - int(target))) * 0}
    )
    for place in (0, 6):
        expected = evaluated(flat, with_one((items[place][0], CLASSES), place, items), reported)
        assert expected != evaluated(flat, DatasetRecords(dataset=[None] * SIZE), metrics)  # noise alone
        for bad in BAD.values():
            if isinstance(bad, tuple) and not isinstance(bad[1], int):
                continue  # a float label is none of the model's business
            np.testing.assert_array_equal(evaluated(flat, with_one(bad, place, items), metrics), expected)
    assert "Jane" not in caplog.text


@every_hostile
def test_no_record_decides_whether_a_client_evaluates(hostile):
    metrics = RecordMetrics(names=("first",), of=first_output)
    flat = made(lambda: nn.Linear(FEATURES, CLASSES))
    for place in (0, SIZE - 1):
        assert np.isfinite(evaluated(flat, with_one(HOSTILE[hostile], place, honest()), metrics)).all()
