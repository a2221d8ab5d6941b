"""What runs in a worker, called in this process: states, errors, modules that change."""

import pickle
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import cloudpickle
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_dp.running import modules
from flower_dp.simulation import worker as worker_module
from flower_dp.simulation.flwr_internals import SERVER_NODE, identify, numbered
from flower_dp.simulation.worker import Worker, WorkerSetup
from tests.grids import LocalGrid  # noqa: F401  (it makes messages possible)

ROOT = Path(__file__).parents[2]
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    ask = dict(message.content["ask"])
    if ask.get("count"):
        context.state["count"] = ConfigRecord({"n": count_of(context.state) + 1})
    if ask.get("fail"):
        raise ValueError("no")
    return Message(RecordDict({"told": ConfigRecord({"n": count_of(context.state)})}), reply_to=message)


def count_of(state):
    return state["count"]["n"] if "count" in state else 0


def to(node, **what):
    message = Message(RecordDict({"ask": ConfigRecord(what)}), node, "train")
    numbered(message)
    return message


@pytest.fixture(autouse=True)
def as_before():
    """Messages of later tests in this process are the server's again, and their modules are those of earlier tests.

    A run lets all modules be imported again where one has changed, and a module that another test has left may have changed.
    """
    saved = dict(sys.modules)
    yield
    identify(1, SERVER_NODE)
    sys.modules.update(saved)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A run whose working directory is a temporary one; the process has its own again afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_a_machine_with_another_code_takes_no_part(here, monkeypatch):
    """An older flower-dp may clip or draw noise in another way."""
    there = {"torch": "2.13.0", "flower-dp": "0.1.0 with files 01234567"}
    monkeypatch.setattr(worker_module, "installed", lambda: there | {"flower-dp": "0.1.0 with files 89abcdef"})
    worker = Worker()
    worker.begin(setup_of(here, lambda: app, versions=there))
    reply = worker.run(to(2), None, 3).reply
    assert reply.error.code == 1
    assert f"machine {socket.gethostname()}: flower-dp 0.1.0 with files 89abcdef in place of" in reply.error.reason
    monkeypatch.setattr(worker_module, "installed", lambda: there)
    worker.begin(setup_of(here, lambda: app, versions=there))
    assert not worker.run(to(2), None, 3).reply.has_error()


def setup_of(folder, load, path=(), versions=None):
    arguments = {"run_id": 1, "run_config": {}, "node_config": {}, "folder": str(folder), "path": path}
    return cloudpickle.dumps(WorkerSetup(**arguments, app=cloudpickle.dumps(load), bytecode=False, versions=versions or {}))


@pytest.fixture
def worker(here):
    made = Worker()
    made.begin(setup_of(here, lambda: app))
    return made


def test_a_state_is_sent_back_where_it_has_changed(worker):
    first = worker.run(to(2, count=True), None, 3)
    assert count_of(pickle.loads(first.state)) == 1  # noqa: S301
    assert worker.run(to(2), None, 3).state is None
    assert count_of(pickle.loads(worker.run(to(2, count=True), None, 3).state)) == 2  # noqa: S301
    assert worker.run(to(3), None, 3).state is None  # another node's is its own


def test_a_state_that_comes_along_wins(worker):
    """Another worker has served the node meanwhile."""
    old = worker.run(to(2, count=True), None, 3).state
    worker.run(to(2, count=True), None, 3)
    answer = worker.run(to(2, count=True), old, 3)
    assert count_of(pickle.loads(answer.state)) == 2  # noqa: S301
    empty = pickle.dumps(RecordDict())
    assert count_of(pickle.loads(worker.run(to(2, count=True), empty, 3).state)) == 1  # noqa: S301


def test_an_error_takes_the_state_back(worker):
    worker.run(to(2, count=True), None, 3)
    failed = worker.run(to(2, count=True, fail=True), None, 3)
    assert (failed.reply.error.code, failed.reply.error.reason, failed.state) == (2, "no", None)
    assert "ValueError: no" in failed.trace
    assert worker.run(to(2), None, 3).reply.content["told"]["n"] == 1


def test_an_app_that_can_not_be_unpickled_is_told_in_every_reply(here):
    worker = Worker()
    worker.begin(setup_of(here, lambda: 3))
    assert worker.run(to(2), None, 3).reply.error.reason == "TypeError: the app is a int: must be a ClientApp"
    worker.begin(b"nonsense")
    assert worker.run(to(2), None, 3).reply.error.code == 1


APP = """
from flwr.clientapp import ClientApp
app = ClientApp()
number = 3
class both:
    client = app
"""


@pytest.mark.parametrize(
    ("reference", "named"),
    [
        ("my_components:app", None),
        ("my_components:both.client", None),
        ("my_lacking:app", "No module named 'a_package_that_is_missing'$"),
        ("my_components:other", "clientapp='my_components:other': my_components has no 'other'"),
        ("my_components:number", "is a int: must be a ClientApp"),
        ("my_nothing:app", "No module named 'my_nothing'; must be 'module:name' in"),
    ],
)
def test_an_app_of_a_folder(here, reference, named):
    (here / "my_components.py").write_text(APP)
    (here / "my_lacking.py").write_text("import a_package_that_is_missing\n")
    load = modules.InFolder(folder=str(here), key="clientapp", reference=reference, type_name="ClientApp")
    with nullcontext() if named is None else pytest.raises((ValueError, ModuleNotFoundError), match=named):
        assert isinstance(load(), ClientApp)
    modules.forget(str(here))
    assert not [name for name in sys.modules if name.startswith("my_")]
    assert str(here) not in sys.path


def test_packages_of_an_environment_in_the_apps_folder_are_not_imported_again(here, monkeypatch):
    """NumPy, torch and Ray do not survive that."""
    package = here / ".venv" / "lib" / "my_package.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    (here / "my_components.py").write_text("import my_package\n")
    monkeypatch.setattr(sys, "prefix", str(here / ".venv"))
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.syspath_prepend(str(package.parent))
    import my_components

    kept = my_components.my_package
    modules.forget(str(here))
    assert "my_components" not in sys.modules
    assert sys.modules.pop("my_package") is kept


@pytest.mark.slow
def test_a_worker_imports_no_more_than_the_app_uses():
    """Nothing before its app; then the ClientApp and its records: neither what draws pictures and runs commands, nor libraries of other tasks' data.

    torchvision neither where the names of all tasks and a model of another library are read.
    """
    code = (
        "import sys, flower_dp.simulation.worker\nprint(*sys.modules)\n"
        "from flower_dp.apps.client_app import app\nfrom flower_dp.apps.records import config_of, deal\n"
        "from flower_dp.running.apps import own_app\n"
        "deal(config_of(own_app().defaults))\nprint(*sys.modules)\n"
        "from flower_dp.apps.tasks import TASKS, models, module_of\n"
        "for task in TASKS: module_of(task)\nmodels.make('cnn', seed=0)\nprint('torchvision' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    before, found, (loaded,) = map(set, map(str.split, done.stdout.splitlines()))
    assert loaded == "False"
    assert not {"torch", "ray", "scipy", "dp_accounting", "flower_dp.strategies", "flower_dp.clients"} & before
    assert "flower_dp.apps.records" in found
    heavy = {"datasets", "flwr_datasets", "pandas", "pyarrow", "sklearn", "matplotlib", "seaborn", "opacus", "ray", "psutil"}
    own = {"flower_dp.audit", "flower_dp.cli", "flower_dp.reporting", "flower_dp.simulation.attempt", "flower_dp.running.plot"}
    assert not (heavy | own | {"flwr.cli", "torch._dynamo", "torch._inductor"}) & found
