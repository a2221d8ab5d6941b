"""flower_dp.app: somebody's own model and data with every method, on a grid in this process."""

import functools
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import flower_dp
from flower_dp.apps import app_functions, user_app
from flower_dp.apps.user_app import client_of
from flower_dp.clients import model_arrays
from flower_dp.clients.training.engines import batched
from flower_dp.methods import METHODS
from flower_dp.reporting import compare
from flower_dp.running.apps import flatten
from tests.grids import LocalGrid

APP = Path(__file__).parents[1] / "foreign" / "five-lines"
CONFIG = flatten(tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
# What a method needs that is not every method's.
NEEDS = {
    "fedsgd-dpc": {"sampling": "round-robin", "cohort-size": 4},
    "dp-fedavg": {"dp-fedavg.delta": 1e-3, "dp-fedavg.target-epsilon": 0.0},
    "fed-smp": {"fed-smp.delta": 1e-3, "fed-smp.target-epsilon": 0.0},
    "dp-pasgd": {"batch-size": 4},
}


def make_model():
    return nn.Linear(3, 2)


def load_records(client, num_clients):
    rng = torch.Generator().manual_seed(client)
    size = 20 + client // 2
    return torch.randn(size, 3, generator=rng), torch.randint(0, 2, (size,), generator=rng)


def evaluate(model):
    assert not model.training
    size = sum(float(value.abs().sum()) for value in model.parameters())
    return {"size": size, "loss": size}


def test_evaluate_fn_leaves_every_layer_in_its_mode():
    def fails(model):
        assert not any(layer.training for layer in model.modules())
        raise OSError("no test data")

    module = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Dropout(0.5)))
    module[1].eval()
    settings = SimpleNamespace(num_rounds=1, test_every=1)
    evaluation = user_app._evaluation(fails, module, SimpleNamespace(line_of=lambda server_round: {"epsilon": 1.0}), settings)
    with pytest.raises(OSError, match="no test data"):
        evaluation(1, model_arrays(module))
    assert [layer.training for layer in module.modules()] == [True, True, False, False]


def play(app, folder, nodes=2, **changes):
    config = {"num-clients": 4, "num-rounds": 2, "sampling": "full", "learning-rate": 0.1, "output-dir": str(folder)} | changes
    grid = LocalGrid(app.client, nodes, **config)
    app.server(grid, Context(1, 1, {}, RecordDict(), config))
    return grid


class Own(nn.Module):
    """A layer that is not one of torch's: nothing is known of another model that has one."""

    def forward(self, inputs):
        return inputs.tanh()


# Two of noised sums, one of them with masks, and two of clients with noise of their own; the classes that all methods make of
# their settings are in test_methods.py.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp-fedavg", "fed-smp", "fedsgd-dpc", "dp-pasgd"])
def test_a_method_takes_a_model_and_data_of_ones_own_and_evaluates_on_its_clients(method, tmp_path):
    app = flower_dp.app(model_fn=make_model, data_fn=load_records, evaluate_fn=evaluate)
    # Little noise: with more of it the noised count of four clients may be too small for a value.
    own = {"private-evaluation.epsilon": 3.0} if METHODS[method].recipe else {"private-evaluation.noise-multiplier": 0.1}
    evaluation = {"private-evaluation.every": 2, "private-evaluation.metrics": "loss=4,accuracy=1"}
    play(app, tmp_path / "run", method=method, **NEEDS[method], **own, **evaluation)
    found = compare.read_run(tmp_path / "run", "size")
    assert list(found.values) == [0, 1, 2]
    assert found.finished
    assert 0 < found.epsilon < float("inf")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["private-accuracy" in line for line in lines] == [False, False, True]
    assert lines[2]["private-loss-standard-error"] > 0
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert statement["guarantee"]["private"]
    assert statement["guarantee"]["epsilon_by_release"]["training"] < statement["guarantee"]["epsilon"]
    if METHODS[method].recipe:
        assert statement["guarantee"]["epsilon_by_release"]["evaluation"] == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize("private", [True, False])
def test_evaluate_fn_is_told_round_and_epsilon_where_it_takes_them(tmp_path, private):
    told = []

    def evaluates(model, *, epsilon, round):  # noqa: A002
        told.append((round, epsilon))
        return {"rmse": 0.5} if round else None

    changes = PRIVATE if private else {"method": "dp-fedavg", "dp-fedavg.noise-multiplier": 0.0, "dp-fedavg.target-epsilon": 0.0}
    play(flower_dp.app(model_fn=make_model, data_fn=load_records, evaluate_fn=evaluates), tmp_path / "run", **changes)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert told == [(line["round"], float("inf") if line["epsilon"] is None else line["epsilon"]) for line in lines]
    assert [at for at, _ in told] == [0, 1, 2]
    assert told[0][1] == 0.0
    assert (told[1][1] < told[2][1] < float("inf")) if private else told[2][1] == float("inf")
    assert [line.get("rmse") for line in lines] == [None, 0.5, 0.5]


@pytest.mark.parametrize(
    ("evaluate_fn", "taken"),
    [
        (lambda round: {}, []),  # noqa: A006  (the model, by whatever name)
        (lambda model, round, /: {}, []),  # noqa: A006
        (lambda model, seed=0, **more: {}, ["round", "epsilon"]),
        (functools.partial(lambda batch, model, epsilon: {}, 8), ["epsilon"]),
        (dict, []),  # has no signature
    ],
)
def test_what_evaluate_fn_takes_is_read_from_its_signature(evaluate_fn, taken):
    assert user_app._keywords_of(evaluate_fn) == taken


PRIVATE = {"method": "dp-fedavg", "dp-fedavg.noise-multiplier": 2.0, "dp-fedavg.delta": 1e-3}


PYPROJECT = """
[project]
name = "named"
[tool.flwr.app.components]
serverapp = "flower_dp.from_config:app.server"
clientapp = "flower_dp.from_config:app.client"
[tool.flwr.app.config]
data-fn = "my_functions:load_records"
"""
FUNCTIONS = """
import torch
from os import kill
from torch import nn

def make_model():
    return nn.Linear(3, 2)

def load_records(client, num_clients):
    return torch.randn(20, 3), torch.randint(0, 2, (20,))

def load_others(client, num_clients):
    return load_records(client, num_clients)

def evaluate(model):
    return {"size": 1.0}
"""
NAMES = {
    "model-fn": "my_functions:make_model",
    "data-fn": "my_functions:load_records",
    "evaluate-fn": "my_functions:evaluate",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of an app that names its functions in the run-config, importable as Flower makes it."""
    made = tmp_path / "app"
    (made / "pack").mkdir(parents=True)
    (made / "pyproject.toml").write_text(PYPROJECT)
    (made / "my_functions.py").write_text(FUNCTIONS)
    (made / "pack" / "inner.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(made))
    yield made
    for name in ("my_functions", "pack", "pack.inner", "elsewhere", "trap"):
        sys.modules.pop(name, None)


def test_functions_may_stand_in_the_run_config(tmp_path, folder):
    from flower_dp.from_config import app

    play(app, tmp_path / "run", **PRIVATE, **NAMES)
    assert (tmp_path / "run" / "model.safetensors").is_file()
    with pytest.raises(ValueError, match=r"model-fn='my_functions:absent': .* must be 'module:function'"):
        play(app, tmp_path / "absent", **PRIVATE, **NAMES | {"model-fn": "my_functions:absent"})
    with pytest.raises(ValueError, match="data-fn: is missing; give data_fn, or set data-fn='module:function'"):
        play(app, tmp_path / "missing", **PRIVATE, **{"model-fn": "my_functions:make_model"})
    assert callable(app_functions.named("data-fn", "pack.inner:load_records", trusted=False))


@pytest.mark.parametrize(
    "reference",
    [
        "os:kill",
        "posix:_exit",
        "builtins:print",
        "flower_dp.simulation.attempt:attempt",
        "flower_dp.apps.commands:check",
        "tests.grids:LocalGrid",
        "pytest:main",
        "torch.nn:Linear",
        "my_functions:kill",
        "my_functions:nn",
        "my_functions:__builtins__",
        "my_functions.os:kill",
        "elsewhere:load_records",
        "pack.trap:load_records",
        "..my_functions:load_records",
        ":load_records",
        "trap",
    ],
)
def test_a_server_names_no_function_but_those_of_the_apps_own_modules(reference, folder, tmp_path, monkeypatch):
    """`data-fn = "os:kill"` once ended the process group of a device with a pinned app."""
    (tmp_path / "lib").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    marked = "import pathlib\npathlib.Path(r'{}').touch()\n{}".format(tmp_path / "executed", FUNCTIONS)
    (tmp_path / "lib" / "elsewhere.py").write_text(marked)
    (folder / "pack" / "trap.py").symlink_to(tmp_path / "lib" / "elsewhere.py")
    with pytest.raises(ValueError, match=re.escape(f"data-fn={reference!r}: ")):
        app_functions.named("data-fn", reference, trusted=False)
    assert not (tmp_path / "executed").exists()


def test_a_bundle_may_hold_flower_dp_and_its_functions_are_not_the_apps_own(folder, tmp_path, monkeypatch):
    (folder / "flower_dp").mkdir()
    (folder / "flower_dp" / "fake.py").write_text(FUNCTIONS)
    other = tmp_path / "other"
    other.mkdir()
    (other / "pyproject.toml").write_text(PYPROJECT)
    (other / "theirs.py").write_text(FUNCTIONS)
    (folder / "pack" / "theirs.py").symlink_to(other / "theirs.py")
    loaded = ModuleType("my_functions")
    vars(loaded).update(__file__=__file__, load_records=load_records)
    monkeypatch.setitem(sys.modules, "my_functions", loaded)
    monkeypatch.syspath_prepend(str(folder / "pack"))
    for name, why in (
        ("flower_dp.fake", "module 'flower_dp' is not the app's own"),
        ("inner", "is not directly in the app's folder"),
        ("pack.theirs", r"module 'pack\.theirs' is in .*, not in the app's folder"),
        ("my_functions", "module 'my_functions' is loaded already, from"),
    ):
        with pytest.raises(ValueError, match=rf"data-fn='{name}:load_records': .*{why}"):
            app_functions.named("data-fn", f"{name}:load_records", trusted=False)
    monkeypatch.setattr(app_functions, "_PREFIXES", (folder,))  # a package among the installed ones is no app
    with pytest.raises(ValueError, match="is not in the folder of a Flower app"):
        app_functions.named("data-fn", "my_functions:load_records", trusted=False)


def made(run, **node):
    """A device's client, by the names of a run-config and of the device's own."""
    node_config = {"partition-id": 0, "num-partitions": 4, **node}
    context = Context(1, 1, node_config, RecordDict(), {"num-clients": 4, **PRIVATE, **run})
    return client_of(None, None, nn.functional.cross_entropy, context)


def test_what_a_device_names_itself_wins(folder):
    mine = {"data-fn": f"{__name__}:load_records", "model-fn": f"{__name__}:make_model"}
    for run in (NAMES, {**NAMES, "data-fn": "os:getpid", "model-fn": "os:getpid", "evaluate-fn": "os:getpid"}):
        assert len(made(run, **mine).clients["client-0"]) == 20
    with pytest.raises(ValueError, match="data-fn='os:kill': module 'os' is not the app's own"):
        made({**NAMES, "data-fn": "os:kill"})


def test_a_device_with_settings_of_its_own_takes_the_functions_that_its_app_names(folder):
    own = {"dp-fedavg.noise-multiplier": 2.0, "dp-fedavg.delta": 1e-3, "model-fn": f"{__name__}:make_model"}
    assert len(made(NAMES, **own).clients["client-0"]) == 20
    assert len(made({**NAMES, "data-fn": "my_functions:load_others"}).clients["client-0"]) == 20
    with pytest.raises(ValueError, match=r"data-fn='my_functions:load_others': this device has settings of its own, and its app"):
        made({**NAMES, "data-fn": "my_functions:load_others"}, **own)


def test_a_process_makes_and_traces_a_model_once_however_many_nodes_it_serves(tmp_path, monkeypatch):
    made, traced, read = [], [], []

    def model():
        made.append(1)
        return nn.Sequential(nn.Linear(3, 4), Own(), nn.Linear(4, 2))

    def records(client, num_clients):
        read.append(client)
        return load_records(0, num_clients)

    proven = batched.Trainer._proven
    monkeypatch.setattr(batched.Trainer, "_proven", lambda self, kind: traced.append(kind) or proven(self, kind))
    app = flower_dp.app(model_fn=model, data_fn=records)
    grid = play(app, tmp_path / "run", nodes=20, **PRIVATE, **{"num-clients": 20, "training-engine": "batched"})
    assert len([message for message in grid.sent if message.metadata.message_type == "train"]) == 40
    assert (len(made), len(traced)) == (2, 1)  # one model is the server's
    assert max(map(read.count, range(20))) <= 3  # as its node's, for the sizes of all, and by the server


@pytest.mark.slow
def test_only_hosted_clients_data_is_read_and_the_loss_is_the_one_that_was_given(tmp_path):
    read, seen = [], []

    def loss(outputs, targets):
        seen.append(targets.shape)
        return (outputs - nn.functional.one_hot(targets, 2)).square().mean()

    def load(client, num_clients):
        read.append((client, num_clients))
        return load_records(client, num_clients)

    play(flower_dp.app(model_fn=make_model, data_fn=load, loss=loss), tmp_path / "run", nodes=4, **PRIVATE)
    assert seen
    assert sorted(read) == [(client, 4) for client in range(4)]  # each once, on its own node; none by the server


def test_clients_insist_on_the_settings_of_their_own_run_config(tmp_path):
    app = flower_dp.app(model_fn=make_model, data_fn=load_records)
    config = {"num-clients": 4, "num-rounds": 1, "sampling": "full", **PRIVATE}
    grid = LocalGrid(app.client, 2, **config)
    weaker = config | {"dp-fedavg.noise-multiplier": 1.0, "output-dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="no client has sent a usable update"):
        app.server(grid, Context(1, 1, {}, RecordDict(), weaker))


@pytest.mark.parametrize(
    ("functions", "named"),
    [
        ({"model_fn": make_model()}, r"model_fn: is a Linear: must be a function \(\) -> torch.nn.Module"),
        ({"data_fn": [1]}, r"data_fn: is a list: must be a function \(client, num_clients\)"),
        ({"model_fn": lambda: "model"}, "model_fn: returned a str"),
        ({"model_fn": lambda: nn.BatchNorm1d(3)}, "BatchNorm"),
        ({"evaluate_fn": lambda model: 0.5}, "ValueError: it returned a float: must be a dict of numbers by name, or None"),
        ({"evaluate_fn": lambda model: {3: 0.5}}, "ValueError: its metric 3: the name must be a string"),
        ({"evaluate_fn": lambda model: {"each": torch.zeros(2)}}, "its metric 'each' is a Tensor: must be one number"),
    ],
)
def test_functions_that_are_or_return_something_else_are_named(functions, named, tmp_path):
    """A model in place of a function was called without inputs, and the error was of its `forward`."""
    with pytest.raises((ValueError, RuntimeError), match=named):
        play(flower_dp.app(**{"model_fn": make_model, "data_fn": load_records} | functions), tmp_path / "run", **PRIVATE)


def test_the_model_follows_from_the_seed_and_leaves_torchs_own_state_alone(tmp_path):
    from safetensors.numpy import load_file

    app = flower_dp.app(model_fn=make_model, data_fn=load_records)
    before = torch.get_rng_state()
    made = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        play(app, tmp_path / name, **PRIVATE, **{"num-rounds": 0, "seed": seed})
        made.append(load_file(tmp_path / name / "model.safetensors")["weight"].tolist())
    assert made[0] == made[1] != made[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_that_was_loaded_from_elsewhere_is_not_the_apps(folder, monkeypatch):
    theirs = ModuleType("my_functions")
    vars(theirs).update(__file__=__file__, load_records=load_records)
    monkeypatch.setitem(sys.modules, "my_functions", theirs)
    with pytest.raises(ValueError, match=r"data-fn='my_functions:load_records': module 'my_functions' is loaded already, from"):
        app_functions.named("data-fn", "my_functions:load_records", trusted=False)
