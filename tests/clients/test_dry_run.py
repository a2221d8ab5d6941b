"""A client that can't train says so before round 1, in fixed words; an odd one that can is not refused."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flower_dp import clients as dp
from flower_dp import wire
from flower_dp.clients import DatasetRecords, FedSGDDPCRecipe, TensorRecords, Training, refusal_messages
from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.training import dry_run
from flower_dp.clients.training.record_clipping import clipped_sum
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import DPFedAvg, FedSGDDPC, NbAFL
from tests.clients.test_engines import LoRA
from tests.grids import LocalGrid
from tests.local_grids import context_of

NUM, CLASSES = 4, 3
LABELS = torch.zeros(8, dtype=torch.int64)
LOCAL: dict[str, Any] = {"mechanism": "laplace", "clip_norm": 1.0, "epsilon": 1.0}
NAME = "Jane Doe"


class Last(nn.Module):
    def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0][:, -1]


def gru() -> nn.Module:
    return nn.Sequential(nn.GRU(4, CLASSES, batch_first=True), Last())


class Named(nn.Module):
    """Takes tokens by name; a record without a single token is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.out((self.table(ids) * mask.unsqueeze(-1)).mean(1))


class Lengths(Named):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if not bool(mask.sum(1).all()):
            raise ValueError("a text without a word")
        return super().forward(ids, mask)


class Detached(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).detach()


class Centered(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) < 2:
            raise ValueError("a batch of one")
        return super().forward(inputs)


class Listed:
    """Records of a user's own, with no public kind."""

    def __len__(self) -> int:
        return 8

    def batch(self, positions: Tensor, device: torch.device) -> Any:
        return [torch.ones(len(positions), 4), LABELS[positions]]


def floats(*shape: int) -> Tensor:
    return torch.randn(8, *shape)


def one_based(outputs: Tensor, targets: Tensor) -> Tensor:
    """A user's own loss, which takes no zeros."""
    if int(targets.min()) < 1990:
        raise ValueError(f"{NAME} was not born in the year 0")
    return nn.functional.mse_loss(outputs[:, 0], targets.float() - 1990)


def tensors(inputs: Any, targets: Tensor = LABELS, **more: Any) -> TensorRecords:
    return TensorRecords(inputs=inputs, targets=targets, **more)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, CLASSES))


def linear() -> nn.Module:
    return nn.Linear(4, CLASSES)


def one_output() -> nn.Module:
    return nn.Linear(4, 1)


def table(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(5, CLASSES, **options), nn.Flatten())


def rows(row: Any, **more: Any) -> DatasetRecords:
    return DatasetRecords(dataset=[row] * 8, **more)


PLAIN = Training(learning_rate=0.1)
FOUR, FIVE, HALVES = tensors(floats(4)), tensors(floats(5)), tensors(floats(4), torch.arange(8) + 0.5)
BYTES = torch.zeros(8, 1, 4, 4, dtype=torch.uint8)
NO_NUMBER, BINARY, SQUARE = (
    replace(PLAIN, loss=loss)
    for loss in (nn.CrossEntropyLoss(reduction="none"), nn.functional.binary_cross_entropy_with_logits, nn.functional.mse_loss)
)
HUBER = replace(PLAIN, loss=nn.HuberLoss())
BROKEN: dict[str, tuple[Any, Any, Training, str]] = {
    "uint8": (convolution, tensors(BYTES), PLAIN, refusal_messages.WHOLE_NUMBERS),
    "dict rows": (linear, rows({"image": torch.ones(4), "label": NAME}), PLAIN, refusal_messages.ROWS),
    "another shape": (linear, FIVE, PLAIN, refusal_messages.MODEL),
    "a row of another shape": (linear, rows((torch.ones(5), 1)), PLAIN, refusal_messages.MODEL),
    "another loss": (one_output, tensors(floats(4), torch.rand(8)), BINARY, refusal_messages.LOSS),
    "no number": (convolution, tensors(floats(1, 4, 4)), replace(NO_NUMBER, batch_size=1), refusal_messages.LOSS_SHAPE),
    "no gradient": (lambda: Detached(4, CLASSES), FOUR, PLAIN, refusal_messages.GRADIENT),
    "a transform of other shapes": (
        linear,
        replace(FOUR, transform=lambda one: one @ FIVE.inputs),
        PLAIN,
        refusal_messages.TRANSFORM,
    ),
    "reentrant checkpointing": (lambda: Partial("last", use_reentrant=True), FOUR, PLAIN, refusal_messages.REENTRANT),
    "of all layers": (lambda: Partial("first", "last", use_reentrant=True), FOUR, PLAIN, refusal_messages.REENTRANT),
    "the targets of others": (one_output, HALVES, HUBER, refusal_messages.BROADCAST),
    "the targets of others in a function": (one_output, HALVES, SQUARE, refusal_messages.BROADCAST),
}
BY_NAME = tensors({"ids": LABELS[:, None].repeat(1, 5), "mask": torch.ones(8, 5)})
HONEST: dict[str, tuple[Any, Any, Training]] = {
    "inputs by name": (Named, BY_NAME, replace(PLAIN, batch_size=3)),
    "no zeros": (Lengths, BY_NAME, PLAIN),
    "tokens": (table, tensors(LABELS[:, None]), replace(PLAIN, optimizer="adam")),
    "LoRA": (lambda: LoRA(4), FOUR, replace(PLAIN, regularizers=(dp.ProximalTerm(strength=0.1),))),
    "uint8 with a transform": (convolution, tensors(BYTES, transform=lambda one: one.float() / 255), PLAIN),
    "a GRU": (gru, tensors(floats(6, 4)), PLAIN),
    "a loss that takes other targets": (linear, tensors(floats(4), LABELS + 1995), replace(PLAIN, loss=one_based)),
    "no batch of one": (lambda: Centered(4, CLASSES), FOUR, replace(PLAIN, batch_size=4)),
    "a batch in a list": (linear, Listed(), PLAIN),
    "without records": (linear, DatasetRecords(dataset=[]), PLAIN),
    "one of two that fits": (linear, {"a": FIVE, "b": FOUR}, PLAIN),
    "checkpointing": (lambda: Partial("first", "last", use_reentrant=False), FOUR, PLAIN),
    "outputs without a dimension": (lambda: nn.Sequential(one_output(), nn.Flatten(0)), HALVES, HUBER),
}
SINGLE: dict[str, tuple[Any, Any, str]] = {
    "a GRU": (gru, tensors(floats(6, 4)), refusal_messages.RECURRENT),
    "another shape": (linear, FIVE, refusal_messages.MODEL),
    "an example of another shape": (linear, rows((torch.ones(4), 1), example=(torch.zeros(5), 0)), refusal_messages.MODEL),
    "a branch on values": (Lengths, tensors({"ids": LABELS[:, None], "mask": torch.ones(8, 1)}), refusal_messages.SINGLE_RECORD),
    "checkpointing": (lambda: Partial("last", use_reentrant=False), FOUR, refusal_messages.CHECKPOINTING),
    "an old function": (lambda: Doubled(4, CLASSES), FOUR, refusal_messages.OLD_FUNCTION),
    "max_norm": (lambda: table(max_norm=1.0), tensors(LABELS[:, None]), refusal_messages.MAX_NORM),
    "sparse": (lambda: table(sparse=True), tensors(LABELS[:, None]), refusal_messages.SPARSE),
}
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0, 3.0]))
# Losses, and why single records can't be trained with them; None if they can.
LOSSES: dict[str, tuple[Any, str | None]] = {
    "class weights": (WEIGHTED, refusal_messages.LOSS_UNEVEN),
    "no reduction": (nn.CrossEntropyLoss(reduction="none"), refusal_messages.LOSS_SHAPE),
    "an ignored class": (nn.CrossEntropyLoss(ignore_index=0), None),
    "a sum with weights": (nn.CrossEntropyLoss(weight=WEIGHTED.weight, reduction="sum"), None),
    "for one record": (lambda o, t: nn.functional.cross_entropy(o[0], t[0]), None),
    "the square error": (lambda o, t: (o.softmax(1).gather(1, t[:, None]) - 1).square().mean(), None),
}
engines = pytest.mark.parametrize("engine", ["one_by_one", "batched"])


def client_of(build: Any, records: Any, training: Training, engine: str = "one_by_one") -> dp.DPClient:
    clients = records if isinstance(records, Mapping) else {"a": records}
    return dp.DPClient(model=build(), clients=clients, training=training, training_engine=engine, device="cpu")


def local_client(build: Any, records: Any, recipe: Any) -> dp.LocalDPClient:
    return dp.LocalDPClient(model=build(), clients={"a": records}, recipe=recipe, context=context_of(), device="cpu")


def nbafl(training: Training) -> dp.NbAFLRecipe:
    return dp.NbAFLRecipe(training=training, clip_norm=2.0, paper_epsilon=8.0, delta=1e-3, uplink_exposures=5, min_records=8)


def grid_of(clients: list[Any]) -> LocalGrid:
    """One client a node."""
    return LocalGrid(dp.client_app(lambda context: clients[int(context.node_config["partition-id"])]), len(clients))


# What a client says


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:None of the inputs")
@engines
@pytest.mark.parametrize("what", BROKEN)
def test_the_answer_has_fixed_words_alone(what, engine):
    build, records, training, reason = BROKEN[what]
    client = client_of(build, records, training, engine)
    assert client.unable_reason() == reason
    assert json.loads(client.get_properties({})[wire.KEY])["unable"] == reason


@engines
@pytest.mark.parametrize("what", HONEST)
def test_an_odd_client_that_can_train_is_not_refused(what, engine):
    build, records, training = HONEST[what]
    assert client_of(build, records, training, engine).unable_reason() is None


MODELS: dict[str, Any] = {"linear": (linear, FOUR.inputs), "convolution": (convolution, floats(1, 4, 4))}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_single_records_have_not_is_refused(what, model):
    (build, inputs), (loss, reason) = MODELS[model], LOSSES[what]
    client = local_client(build, tensors(inputs), FedSGDDPCRecipe(**LOCAL, num_replies=1, loss=loss))
    assert client.unable_reason() == (reason and f"{refusal_messages.UNFIT}: {reason}")


@pytest.mark.parametrize("model", MODELS)
def test_a_loss_of_single_records_that_uses_the_weights_is_refused(model):
    build, inputs = MODELS[model]
    module = build()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets) + 1e-5 * sum(one.square().sum() for one in module.parameters())

    client = local_client(lambda: module, tensors(inputs), FedSGDDPCRecipe(**LOCAL, num_replies=1, loss=loss))
    assert client.unable_reason() == f"{refusal_messages.UNFIT}: {refusal_messages.LOSS_OF_WEIGHTS}"
    together = client_of(lambda: module, tensors(inputs), Training(learning_rate=0.1, loss=loss))
    assert together.unable_reason() is None  # autograd differentiates all of it


def test_records_of_no_known_kind_with_such_a_loss_count_as_zero(caplog):
    """Without an example nobody can say so before round 1: the node's log does, and nothing is trained wrongly."""
    records = DatasetRecords(dataset=[(torch.ones(4), 1)] * 3)
    clip = RecordClip(clip_norm=1.0, step=2.0**-30)
    total, _ = clipped_sum(dp.FlatModel(linear()), records, torch.arange(3), clip=clip, loss=WEIGHTED, seed=0)
    assert not total.any()
    assert "UnfitLossError" in caplog.text


class Forgetful(nn.Linear):
    """Takes inputs of its shape, and fails for another reason."""

    def forward(self, inputs: Tensor) -> Tensor:
        scale: Tensor = self.forgotten
        return scale * super().forward(inputs)


class Partial(nn.Module):
    """Computes some of its layers again in the backward pass, as torch's older kind of checkpointing does or as the newer one."""

    def __init__(self, *again: str, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.again, self.kind = nn.Linear(4, 4), nn.Linear(4, CLASSES), again, use_reentrant

    def forward(self, outputs: Tensor) -> Tensor:
        for name in ("first", "last"):
            layer = getattr(self, name)
            outputs = checkpoint(layer, outputs, use_reentrant=self.kind) if name in self.again else layer(outputs)
        return outputs


def test_a_forward_that_fails_for_another_reason_is_told_by_the_nodes_log_with_its_place(caplog):
    line = Forgetful.forward.__code__.co_firstlineno + 1
    dry_run._log_once.cache_clear()
    told = client_of(lambda: Forgetful(4, CLASSES), FOUR, PLAIN).unable_reason()
    assert told == refusal_messages.MODEL
    words = "AttributeError: 'Forgetful' object has no attribute 'forgotten'"
    assert f"fails: {words} (test_dry_run.py:{line})" in caplog.text


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return 2 * inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return Old.apply(super().forward(inputs))


@pytest.mark.parametrize(("num_features", "loss", "fits"), [(4, "mse", True), (5, "mse", False), (4, "l1", False)])
def test_what_convex_glm_is_not_proved_for_is_found_before_round_1(num_features, loss, fits):
    sizes = {"learning_rate": 0.01, "num_local_steps": 2, "batch_size": 4, "clip_norm": 1.0}
    steps = FedPAQSteps(**sizes, sensitivity="convex-glm", smoothness=100.0)
    recipe = dp.DPFedPAQRecipe(steps=steps, epsilon=1.0, delta=1e-5, num_replies=1, loss=getattr(nn.functional, f"{loss}_loss"))
    client = local_client(lambda: nn.Linear(num_features, 1), tensors(floats(4), torch.rand(8)), recipe)
    assert client.unable_reason() == (None if fits else f"{refusal_messages.UNFIT}: {refusal_messages.CONVEX}")


@pytest.mark.filterwarnings("ignore")  # of torch, about sparse tensors
@pytest.mark.parametrize("what", SINGLE)
def test_a_client_of_single_records_that_cannot_train_says_what_to_do(what):
    build, records, reason = SINGLE[what]
    client = local_client(build, records, FedSGDDPCRecipe(**LOCAL, num_replies=1))
    assert client.unable_reason() == f"{refusal_messages.UNFIT}: {reason}"


@pytest.mark.parametrize("what", ["inputs by name", "tokens", "LoRA", "uint8 with a transform", "without records"])
def test_an_odd_client_of_single_records_is_not_refused(what):
    build, records, training = HONEST[what]
    assert local_client(build, records, FedSGDDPCRecipe(**LOCAL, num_replies=1)).unable_reason() is None
    assert local_client(build, records, nbafl(training)).unable_reason() is None


# No record decides


@pytest.mark.parametrize("recipe", [FedSGDDPCRecipe(**LOCAL, num_replies=1), nbafl(PLAIN)])
@pytest.mark.parametrize("row", [{"image": NAME}, (torch.ones(9), 1), None])
def test_where_single_records_are_protected_no_record_is_looked_at(recipe, row, caplog):
    """A row that does not fit is known to the node's own log alone; the example, or nothing, speaks for the others."""
    for example in (None, (torch.zeros(4), 0)):
        client = local_client(linear, rows(row, example=example), recipe)
        with caplog.at_level(logging.ERROR, logger="flwr"):
            assert "unable" not in json.loads(client.get_properties({})[wire.KEY])
    said = [record for record in caplog.records if refusal_messages.ROWS in record.getMessage()]
    assert bool(said) is not isinstance(row, tuple)
    assert NAME not in caplog.text


class Frame:
    """What as_records sees of a pandas or polars DataFrame; its length is that of a data set."""

    columns, to_numpy = ["age"], None

    def __len__(self):
        return 8

    def __getitem__(self, name):
        raise KeyError(name)


class Read(dict):
    """Clients whose data are read when they are needed, as in an app."""

    def __getitem__(self, name):
        return dp.as_records(super().__getitem__(name))


def test_a_data_frame_is_refused_in_words_that_the_server_learns():
    clients = Read(a=Frame(), b=Frame())
    client = dp.DPClient(model=linear(), clients=clients, training=PLAIN, device="cpu")
    assert json.loads(client.get_properties({})[wire.KEY])["unable"] == refusal_messages.TABLE


def test_values_of_records_change_nothing():
    """A made-up batch has nobody's."""
    seen: list[Tensor] = []

    class Seeing(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs.clone())
            raise ValueError(NAME)

    for records in (tensors(torch.full((8, 4), 5.0)), rows((torch.full((4,), 5.0), 2))):
        assert client_of(lambda: Seeing(4, CLASSES), records, PLAIN).unable_reason() == refusal_messages.MODEL
    assert {float(value) for inputs in seen for value in inputs.flatten()} == {0.0, 1.0}


def test_a_client_whose_data_cannot_be_read_says_no_more_than_that():
    class Lost(dict):
        def __getitem__(self, name: str) -> Any:
            raise OSError(NAME)

    client = client_of(linear, Lost(a=1), PLAIN)
    assert client.unable_reason() == f"{refusal_messages.DATA}; {refusal_messages.SEE_LOG}"


# What it costs


def test_a_dry_run_leaves_model_buffers_and_generators_as_they_are():
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, CLASSES)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, inputs: Tensor) -> Tensor:
            self.count += 1
            return nn.functional.dropout(super().forward(inputs), 0.5)

    client = client_of(Counting, FOUR, PLAIN)
    before, draws, others = client.model.vector.clone(), torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    assert client.unable_reason() is None
    assert torch.equal(client.model.vector, before)
    assert torch.equal(torch.get_rng_state(), draws)
    assert (np.random.get_state()[1] == others).all()  # noqa: NPY002
    assert float(client.model.module.count) == 0


def test_one_dry_run_a_process_is_enough(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(dry_run, "of_training", lambda *args, **keywords: calls.append(1))
    clients = [client_of(linear, {f"c{i}": FOUR}, PLAIN) for i in range(NUM)]
    strategy(DPFedAvg, {}).start(grid_of(clients), dp.model_arrays(linear()), num_rounds=1)
    assert calls == [1]


# What the server does


def strategy(method: Any, options: dict[str, Any]) -> Any:
    own = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": FullSampling(), "delta": 1e-3} if method is DPFedAvg else {}
    return method(num_clients=NUM, **own, **options)


def nodes_of(kinds: str) -> list[Any]:
    """Nodes with one client each: `f`its, or is of another shape."""
    return [client_of(linear, {f"c{i}": FOUR if kind == "f" else FIVE}, PLAIN) for i, kind in enumerate(kinds)]


def test_clients_that_cannot_train_decide_nothing_for_the_others(caplog):
    """The population, and so the cost and the denominator, are as if they could."""
    made, all_fit = strategy(DPFedAvg, {}), strategy(DPFedAvg, {})
    arrays = dp.model_arrays(linear())
    with caplog.at_level(logging.WARNING, logger="flwr"):
        made.start(grid_of(nodes_of("xxxf")), arrays, num_rounds=2)
    all_fit.start(grid_of(nodes_of("ffff")), arrays, num_rounds=2)
    assert [report.cohort_size for report in made.rounds] == [NUM, NUM]
    assert [report.replies for report in made.rounds] == [1, 1]
    assert made.epsilon == all_fit.epsilon
    lines = [record.getMessage() for record in caplog.records if "can't train: " in record.getMessage()]
    assert len(lines) == 3
    assert all(refusal_messages.MODEL in line for line in lines)


@pytest.mark.parametrize("method", ["fedsgd-dpc", "nbafl"])
def test_a_client_that_cannot_train_pays_nothing_on_its_own_account(method, monkeypatch):
    """Neither in the run, which ends at once, nor for a server that asks it nevertheless."""
    common: dict[str, Any] = {"num_clients": NUM, "cohort_size": NUM, "num_records": 8}
    recipe: Any = FedSGDDPCRecipe(**LOCAL, num_replies=2)
    made: Any = FedSGDDPC(**common, **LOCAL, learning_rate=0.5)
    if method == "nbafl":
        recipe, made = nbafl(PLAIN), NbAFL(**common, clip_norm=2.0, paper_epsilon=8.0, delta=1e-3, uplink_exposures=5)
    charged: list[Any] = []
    monkeypatch.setattr("flower_dp.clients.local.client.charged", lambda account, due, instruction: charged.append(due) or {})
    arguments: dict[str, Any] = {"recipe": recipe, "device": "cpu"}
    hosted = [{f"c{i}": FOUR} for i in range(NUM)]
    clients = [dp.LocalDPClient(model=nn.Linear(5, CLASSES), clients=own, **arguments) for own in hosted]
    arrays = dp.model_arrays(nn.Linear(5, CLASSES))
    with pytest.raises(RuntimeError, match=refusal_messages.UNFIT):
        made.start(grid_of(clients), arrays, num_rounds=2)
    assert not charged
    assert made.epsilon == 0
    monkeypatch.setattr(dp.LocalDPClient, "unable_reason", lambda self: None)
    with pytest.raises(RuntimeError, match="no client has sent a usable update"):
        made.start(grid_of(clients), arrays, num_rounds=1)
    assert charged
    assert not any(charged)


@pytest.mark.parametrize(("kept", "seconds", "words"), [(False, 0.0, 1), (True, 0.0, 0), (False, 1e9, 0)])
def test_clients_that_are_made_anew_for_each_message_are_told_of_once(kept, seconds, words, monkeypatch, caplog):
    monkeypatch.setattr(dp.app, "_LONG", seconds)
    made = []

    def client_fn(context: Context) -> Any:
        if not kept or not made:
            recipe = FedSGDDPCRecipe(**LOCAL, num_replies=3)
            made.append(local_client(linear, FOUR, recipe))
        return made[-1]

    strategy = FedSGDDPC(num_clients=1, cohort_size=1, num_records=8, learning_rate=0.1, **LOCAL)
    strategy.start(LocalGrid(dp.client_app(client_fn), 1), dp.model_arrays(linear()), num_rounds=3)
    assert made[-1].dry_run_seconds > 0
    assert len(made) == 1 if kept else len(made) > 3
    assert caplog.text.count("client_fn made a new client") == words


def test_an_answer_is_read_in_one_line_and_not_without_end():
    def hosted(unable: str) -> Any:
        text = json.dumps({"protocol": wire.PROTOCOL, "clients": ["a"], "methods": [], "unable": unable})
        return wire.hosted_of(RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})}), most_names=1)

    with pytest.raises(ValueError, match="characters"):
        hosted("x\n" * 5000)
    assert "\n" not in hosted("x\ny" * 300).unable
    assert len(hosted("x\ny" * 300).unable) < 600
    assert hosted("").unable == ""
