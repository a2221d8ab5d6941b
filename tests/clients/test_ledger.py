"""Clients with ledger files: every run on a device spends of the same account."""

import shutil

import pytest
from flwr.app import RecordDict

from flower_dp import wire
from flower_dp.clients import DPClient, FedSGDDPCRecipe, LocalDPClient, Training, client_app, model_arrays
from flower_dp.clients.account import LEDGER_PATH, NodeStateAccounts
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.strategies import DPFedAvg, FedSGDDPC
from tests.asks import own_instruction, reasons
from tests.grids import LocalGrid
from tests.local_grids import context_of, linear, records, start

WORDS = {"mechanism": "laplace", "clip_norm": 0.5, "epsilon": 3.0}
NAMES = ("c0", "c1")


@pytest.fixture
def path(tmp_path):
    DeviceLedger.create(tmp_path / "ledger.sqlite", NAMES)
    return tmp_path / "ledger.sqlite"


def replies(path, name="c0"):
    return DeviceLedger(path).read()[name].replies


RECIPE = FedSGDDPCRecipe(**WORDS, num_replies=3)


def run_on(files, *, node_config):
    """One run of FedSGD-DPC on two devices with one client each, whose Flower states are empty, as those of every new run are."""

    def client_fn(context):
        name = NAMES[int(context.node_config["partition-id"])]
        ledger = None if node_config else files[name]
        return LocalDPClient(model=linear(), clients={name: records(name)}, recipe=RECIPE, ledger=ledger, device="cpu")

    grid = LocalGrid(client_app(client_fn), 2)
    for node, context in grid.contexts.items():
        if node_config:
            context.node_config[LEDGER_PATH] = str(files[NAMES[node - 1]])
    strategy = FedSGDDPC(num_clients=2, num_records=8, cohort_size=2, num_replies=3, learning_rate=0.1, **WORDS)
    start(strategy, grid, 2)
    return [report.replies for report in strategy.rounds]


@pytest.mark.parametrize("node_config", [False, True], ids=["one file each, in the app", "one file, in the node's config"])
def test_two_runs_spend_one_budget(path, tmp_path, node_config):
    files = {name: path if node_config else DeviceLedger.create(tmp_path / name, [name]).path for name in NAMES}
    assert run_on(files, node_config=node_config) == [2, 2]
    assert run_on(files, node_config=node_config) == [2, 0]
    with pytest.raises(RuntimeError, match="its budget is spent: num_replies=3, all of them sent"):
        run_on(files, node_config=node_config)
    assert [replies(files[name], name) for name in NAMES] == [3, 3]


def client(path, state=None, names=("c0",), read=records):
    data = {name: read(name) for name in names}
    return LocalDPClient(model=linear(), clients=data, recipe=RECIPE, context=context_of(state), ledger=path, device="cpu")


def ask(made, names=("c0",)):
    """Ask clients once; return why they refuse, and what has left."""
    asked = own_instruction("fedsgd-dpc", dict.fromkeys(names, RECIPE.terms("c0", records("c0"))))
    arrays, _, answer = made.fit([array.numpy() for array in model_arrays(linear()).values()], {wire.KEY: asked.to_json()})
    return reasons(wire.ReplyHeader.from_json(answer[wire.KEY], names)), arrays[-1]


def test_a_reply_is_on_the_disk_before_a_record_is_touched(path):
    counted = []

    class Watched:
        def __len__(self):
            return len(records("c0"))

        def batch(self, *arguments):
            counted.append(replies(path))
            return records("c0").batch(*arguments)

        def __getattr__(self, name):
            return getattr(records("c0"), name)

    for number in (1, 2):
        assert ask(client(path, read=lambda _: Watched()))[0] == {}
        assert set(counted) == {number}
        counted.clear()


def test_a_ledger_that_cannot_be_used_sends_nothing_and_tells_the_server_no_path(path, caplog):
    path.write_text("{")
    refused, row = ask(client(path))
    assert refused == {"c0": "its ledger can't be used; the node's own log says why"}
    assert not row.any()
    assert f"ledger {path}: is not a ledger: it is another program's database" in caplog.text


def test_a_ledger_of_another_client_sends_nothing(path, tmp_path, caplog):
    DeviceLedger.create(tmp_path / "foreign.json", ["somebody"])
    refused, row = ask(client({"c0": path, "c1": tmp_path / "foreign.json"}, names=NAMES), NAMES)
    assert set(refused) == {"c1"}
    assert row.any()
    assert "has no account of client 'c1'; it is the ledger of somebody" in caplog.text


def test_a_copy_put_back_during_a_run_sends_nothing(path, tmp_path, caplog):
    """The node's state, which lasts one run, remembers what the file said."""
    state = RecordDict()
    assert ask(client(path, state))[0] == {}
    shutil.copy(path, tmp_path / "copy")
    assert ask(client(path, state))[0] == {}
    assert NodeStateAccounts(state).replies("c0") == 2
    shutil.copy(tmp_path / "copy", path)
    refused, row = ask(client(path, state))
    assert set(refused) == {"c0"}
    assert not row.any()
    assert "it is an older copy" in caplog.text


def test_a_client_without_an_account_refuses_a_ledger():
    """It would send without counting."""

    def client_fn(context):
        training = Training(learning_rate=0.1)
        return DPClient(model=linear(), clients={"c0": records("c0")}, training=training, device="cpu")

    grid = LocalGrid(client_app(client_fn), 1)
    grid.contexts[1].node_config[LEDGER_PATH] = "ledger.sqlite"
    strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=1.0, sampling=FullSampling(), num_clients=1, delta=1e-5)
    with pytest.raises(RuntimeError, match="ledger-path: this client keeps no account, so its replies would not be counted"):
        start(strategy, grid, 1)


@pytest.mark.parametrize("ledger", [3, "", {"c1": "ledger.sqlite"}, {"c0": None}])
def test_a_ledger_is_a_path_or_one_for_every_client(ledger):
    with pytest.raises(ValueError, match=r"^ledger"):
        client(ledger)


def test_the_owners_ledger_and_the_apps_must_be_one(path, caplog):
    made = client(str(path))
    made.attach(context_of(**{LEDGER_PATH: str(path)}))
    with pytest.raises(ValueError, match="ledger-path: the app has its own ledger") as reported:
        made.attach(context_of(**{LEDGER_PATH: "other"}))
    assert str(path) not in str(reported.value)
    assert str(path) in caplog.text  # the device's own log says more
    for wrong in (3, ""):
        with pytest.raises(ValueError, match="must be the path of a file"):
            client(None).attach(context_of(**{LEDGER_PATH: wrong}))
