"""Models of which a part is trained: the rest stays on the device, and its hash tells whether it is that of the server."""

import copy
import json
import logging
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import flower_dp
from flower_dp import wire
from flower_dp.clients import DPClient, FlatModel, TensorRecords, Training, model_arrays
from flower_dp.clients.refusal_messages import Declined
from flower_dp.clients.training.attributes import base_hash
from flower_dp.core.metric_bounds import MetricBounds
from tests.asks import ask, config_of
from tests.grids import LocalGrid

CONFIG = {"method": "dp-fedavg", "num-clients": 4, "num-rounds": 2, "sampling": "full", "learning-rate": 0.1}
CONFIG |= {"dp-fedavg.delta": 1e-3, "private-evaluation.every": 2}


def adapted(seed: int = 1) -> nn.Module:
    """A frozen base with a buffer, and a trained layer of 10 parameters behind it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[0].register_buffer("mask", torch.ones(4))
    return model


def load(client: int, num_clients: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(client)
    return torch.randn(8, 3, generator=rng), torch.randint(0, 2, (8,), generator=rng)


def play(folder: Any, servers: nn.Module, devices: nn.Module) -> LocalGrid:
    """Run the server of one app with the clients of another."""
    server, client = (
        flower_dp.app(model_fn=lambda model=model: copy.deepcopy(model), data_fn=load) for model in (servers, devices)
    )
    config = CONFIG | {"output-dir": str(folder)}
    grid = LocalGrid(client.client, 2, **config)
    server.server(grid, Context(1, 1, {}, RecordDict(), config))
    return grid


def changed(model: nn.Module, change: Any) -> nn.Module:
    with torch.no_grad():
        change(model)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight[2, 1].add_(1e-6),
        lambda model: model[0].mask[3].zero_(),
        lambda model: setattr(model[0], "bias", None),
        lambda model: model[0].weight.copy_(model[0].weight.flip(0)),
        lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.reshape(3, 4), requires_grad=False)),
        lambda model: model[1].bias.requires_grad_(False),
        lambda model: setattr(model[0], "mask", model[0].mask.to(torch.int64)),
    ],
    ids=["value", "buffer", "one less", "order", "shape", "one more", "kind"],
)
def test_the_hash_of_a_base_changes_with_it(change: Any) -> None:
    assert base_hash(changed(adapted(), change)) != base_hash(adapted())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[1].weight.add_(1.0),
        lambda model: model.double(),
        FlatModel,
        lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.T.contiguous().T, requires_grad=False)),
    ],
    ids=["adapter", "precision", "in one vector", "memory layout"],
)
def test_and_with_nothing_else(change: Any) -> None:
    assert base_hash(changed(adapted(), change)) == base_hash(adapted())


def test_a_model_that_is_trained_as_a_whole_has_no_base() -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.ones(2))
    assert base_hash(model) == ""


def test_the_log_says_how_many_of_how_many_parameters_are_trained(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="flwr"):
        assert list(model_arrays(adapted())) == ["1.weight", "1.bias"]
        model_arrays(nn.Linear(3, 2))
    assert [entry.getMessage() for entry in caplog.records] == [
        "10 of 26 parameters are trained: only they are sent, clipped and noised"
    ]


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("named", ["its own", "another", "nonsense", "none"])
def test_a_device_with_another_base_refuses_and_tells_the_servers_hash_alone(named: str, evaluates: bool, caplog: Any) -> None:
    read = []

    class Looked(TensorRecords):
        def batch(self, *args: Any) -> Any:
            read.append(1)
            return super().batch(*args)

    inputs, targets = load(0)
    training = Training(learning_rate=0.1)
    client = DPClient(model=adapted(), clients={"a": Looked(inputs=inputs, targets=targets)}, training=training, device="cpu")
    hashes = {"its own": base_hash(adapted()), "another": base_hash(adapted(seed=2)), "nonsense": 7}
    metrics, method = (MetricBounds(bounds={"loss": 1.0}), wire.EVALUATION) if evaluates else (None, "dp-fedavg")
    asked = wire.Instruction(server_round=1, method=method, clients=("a",), ask=ask(metrics=metrics))
    config = config_of(asked) | ({wire.BASE: hashes[named]} if named in hashes else {})
    arrays = {name: array.numpy() for name, array in model_arrays(adapted()).items()}
    work = client.evaluation if evaluates else client.answer
    if named in ("its own", "none"):
        work(arrays, config)
        assert read
        return
    with pytest.raises(Declined, match="this client's model has another frozen base") as refused:
        work(arrays, config)
    assert f"base={str(hashes[named])[:16]}:" in str(refused.value)
    assert client.model.base[:8] not in str(refused.value)
    assert client.model.base in caplog.text
    assert not read


@pytest.mark.parametrize("model", [adapted(), nn.Linear(3, 2)], ids=["a base", "none"])
def test_messages_to_train_and_to_evaluate_name_the_base(model: nn.Module, tmp_path: Any) -> None:
    grid = play(tmp_path / "run", model, model)
    sent = [message for message in grid.sent if message.metadata.message_type in ("train", "evaluate")]
    assert {message.metadata.message_type for message in sent} == {"train", "evaluate"}
    assert {message.content.config_records["config"].get(wire.BASE, "") for message in sent} == {base_hash(model)}
    trained = tuple(name for name, value in model.named_parameters() if value.requires_grad)
    assert {tuple(message.content.array_records["arrays"]) for message in sent} == {trained}
    assert json.loads((tmp_path / "run" / "statement.json").read_text())["guarantee"]["private"]


def test_a_run_whose_devices_have_another_base_ends_and_says_why(tmp_path: Any) -> None:
    with pytest.raises(RuntimeError, match=rf"base={base_hash(adapted())[:16]}: this client's model has another frozen base"):
        play(tmp_path / "run", adapted(), adapted(seed=2))
