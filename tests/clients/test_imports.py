"""What a process of clients imports and prints. All of it is asked in one process: torch takes two seconds to import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CLIENTS = """
import json, sys
def imported(*names):
    return [name for name in names if name in sys.modules]

# A client of the app that keeps no account.
from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.records import config_of, deal
from flower_dp.running.apps import own_app
config = dict(own_app().defaults)
run = ParsedRunConfig.of(config)
client = run.client(run.model(), deal(config_of(config)).clients.part(0, 2), dict)
found = {"client": type(client).__name__, "accountants": imported("dp_accounting", "scipy.stats", "matplotlib", "sklearn")}

# A device with a ledger.
import tempfile
import torch
from flwr.app import Context, RecordDict
from flower_dp import wire
from flower_dp.clients import FedSGDDPCRecipe, LocalDPClient, TensorRecords, model_arrays
from flower_dp.privacy.device_store import DeviceLedger
from tests.asks import own_ask
recipe = FedSGDDPCRecipe(mechanism="laplace", clip_norm=1.0, epsilon=1.0, num_replies=5)
own = TensorRecords(inputs=torch.rand(6, 3), targets=torch.tensor([0, 1, 0, 1, 0, 1]))
terms = recipe.terms("device-1", own)
with tempfile.TemporaryDirectory() as folder:
    ledger = DeviceLedger.create(f"{folder}/ledger.sqlite", ["device-1"])
    module = torch.nn.Linear(3, 2)
    context = Context(run_id=1, node_id=1, node_config={"ledger-path": str(ledger.path)}, state=RecordDict(), run_config={})
    device = LocalDPClient(model=module, clients={"device-1": own}, recipe=recipe, context=context, device="cpu")
    asked_of = own_ask({"device-1": (1.0, terms.fingerprint, terms.release.mechanism.noise_multiplier)})
    asked = wire.Instruction(server_round=1, method="fedsgd-dpc", clients=("device-1",), ask=asked_of)
    device.fit([array.numpy() for array in model_arrays(module).values()], {wire.KEY: asked.to_json()})
    found["charged"] = ledger.read()["device-1"].replies
    spent = ledger.read()["device-1"].spent
found["of device"] = imported("dp_accounting", "scipy.signal", "scipy.stats", "sympy", "torch._dynamo", "opacus")

# Whoever imports dp-accounting afterwards has the events of the ledger.
import dp_accounting
found["events"] = spent.counts == {dp_accounting.LaplaceDpEvent(terms.release.mechanism.noise_multiplier): 1}

# A group that trains.
from flower_dp.clients.training.engines import local_updates
from flower_dp.clients.training.recipe import FlatModel, Training
from flower_dp.clients.training.records import TensorRecords
model = FlatModel(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)))
records = [TensorRecords(inputs=torch.rand(6, 4), targets=torch.zeros(6, dtype=torch.int64))] * 2
training = Training(learning_rate=0.1, batch_size=4, sam_radius=0.05)
rows = local_updates(model.vector.clone(), records, training, model=model, server_round=1, seeds=[0, 1], engine="batched")
found["trained"] = all(bool(row.abs().max() > 0) for row in rows)
found["compiler"] = imported("torch._dynamo", "torch._inductor", "sympy")

# Gradients of records: what torch checks of their losses imports sympy.
from torch import nn
from flower_dp.clients.training.per_record import record_gradients
record_gradients(model, torch.rand(6, 4), torch.zeros(6, 3), loss=nn.functional.mse_loss, engine="torch.func")
found["compiler"] += imported("torch._dynamo", "torch._inductor")
found["there"] = torch._dynamo.is_compiling() is False and torch._dynamo is sys.modules["torch._dynamo"]

print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def clients():
    """What the process says of itself, and all that it printed."""
    done = subprocess.run([sys.executable, "-c", CLIENTS], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.slow
def test_a_client_that_keeps_no_account_imports_no_accountant(clients):
    found, _ = clients
    assert (found["client"], found["accountants"]) == ("DPClient", [])


@pytest.mark.slow
def test_a_device_charges_its_ledger_without_an_accountant(clients):
    """And what it charges is an event of dp-accounting."""
    found, _ = clients
    assert (found["charged"], found["of device"], found["events"]) == (1, [], True)


@pytest.mark.slow
def test_a_group_is_trained_without_torchs_compiler(clients):
    """And records are differentiated; whoever asks for the compiler afterwards gets it."""
    found, _ = clients
    assert (found["trained"], found["compiler"], found["there"]) == (True, [], True)
