"""A Ray cluster: what is refused before it is joined, what its machines must have, and a run that loses a machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest
from flwr.clientapp import ClientApp

import flower_dp
from flower_dp.clients.account import LEDGER_PATH
from flower_dp.running.apps import own_app, read_app
from flower_dp.simulation import RayGrid, cluster
from tests.flower.processes import ProcessTree
from tests.own_apps import write_app
from tests.ports import free_ports
from tests.torch_free import module

ROOT = Path(flower_dp.__file__).parents[1]

# Addresses


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch):
    """Ray takes a local address as it stands."""
    from ray._private import ray_constants

    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)


@pytest.fixture
def listening():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def nobody():
    """An address that is taken, and at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_auto_is_the_environments_or_what_ray_start_has_begun(tmp_path, monkeypatch, listening, nobody):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConnectionError, match="RAY_ADDRESS is not set, and `ray start` has begun no cluster"):
        cluster.address_of("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"{listening}\n")
    assert cluster.address_of("auto") == listening
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    with pytest.raises(ConnectionError, match=os.environ["RAY_ADDRESS"]):
        cluster.address_of("auto")
    assert cluster.address_of(listening) == listening


@pytest.mark.parametrize("address", ["", "head", "head:", ":6379", "ray://head:10001", "head:6379/x", "a b:1"])
def test_what_is_no_address_is_refused(address, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ValueError, match="must be HOST:PORT or auto"):
        cluster.address_of(address)


def test_an_address_that_nobody_answers_is_refused_before_anything_starts(nobody):
    with pytest.raises(ConnectionError, match=f"Ray cluster '{nobody}': none answers at {nobody}"):
        flower_dp.simulate("mnist", ray_address=nobody, progress=False)


# Machines


def test_what_is_installed(monkeypatch, tmp_path):
    found = cluster.installed()
    assert list(found) == ["Python", "ray", "flwr", "flower-dp", "torch", "numpy"]
    assert "+" not in found["torch"]  # a machine with GPUs has another build
    # The code counts, not its version alone.
    (tmp_path / "flower_dp").mkdir()
    (tmp_path / "flower_dp" / "__init__.py").write_text("")
    monkeypatch.setattr(cluster, "__file__", str(tmp_path / "flower_dp" / "simulation" / "cluster.py"))
    other = cluster.installed()
    assert cluster.differences(found, other).startswith("flower-dp 0.")
    assert cluster.differences(other, other) == ""
    assert cluster.differences({"torch": "2.13.0"}, {"torch": "2.12.0"}) == "torch 2.12.0 in place of 2.13.0"


# With 0.4 GPUs each two workers on a GPU: the fifths that are left on both make none.
@pytest.mark.parametrize(
    ("cpus", "gpus", "there", "fit"), [(3.0, 0.0, 0.0, 2), (1.0, 0.5, 0.0, 0), (1.0, 0.4, 2.0, 4), (1.0, 2.0, 3.0, 1)]
)
def test_how_many_workers_fit_on_a_machine(cpus, gpus, there, fit):
    node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": there}}
    assert cluster.fitting(node, cpus, gpus) == fit
    assert cluster.fitting(node | {"Alive": False}, cpus, gpus) == 0


def test_a_ledger_file_is_refused_where_nodes_move_between_machines():
    """Each machine would have a file of its own, with a part of what the node has spent."""
    away = SimpleNamespace(away=True, actors=[])
    with pytest.raises(ValueError, match="ledger-path is a file of one machine"):
        RayGrid(ClientApp(), away, num_nodes=2, node_config=lambda part: {LEDGER_PATH: "ledger"} if part else {})


def test_the_files_of_an_app_that_travel(tmp_path):
    app = app_in(tmp_path / "app")
    (app / ".venv").mkdir()
    (app / ".venv" / "secret.py").write_text("")
    (app / "records.npy").write_bytes(bytes(100))
    bundle = cluster.bundled(read_app(app))
    assert {"pyproject.toml", "my_app.py", "my_help.py"} <= set(zipfile.ZipFile(BytesIO(bundle)).namelist())
    assert not {".venv/secret.py", "records.npy"} & set(zipfile.ZipFile(BytesIO(bundle)).namelist())
    os.utime(app / "my_help.py", (1, 1))
    assert cluster.bundled(read_app(app)) == bundle
    assert cluster.bundled(own_app()) == b""


# A cluster of two raylets, which share no folder

APP = module("""
import time
from pathlib import Path

import my_help


def first(context):
    with (Path.home() / "served").open("a") as file:
        file.write(f"{context.node_config['partition-id']} {my_help.__file__}\\n")


def evaluate(server_round, arrays):
    time.sleep(0.1)  # so that a test can come in between two rounds
    return MetricRecord({"accuracy": 0.5})
""")


def app_in(folder):
    return write_app(folder, "num-rounds = 12\noutput-dir = ''", my_app=APP, my_help="")


def environment(home, **more):
    """Return that of a machine of its own."""
    (home / "work").mkdir(parents=True)
    kept = {name: os.environ[name] for name in ("PATH", "FLOWER_DP_TEST_DATA") if name in os.environ}
    own = {"HOME": str(home), "FLWR_HOME": str(home / "flwr"), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    return kept | own | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} | more


@contextmanager
def machines(mark):
    """Start two, and yield the cluster's port and the folder of each; in the end nothing of them is left."""
    (port,), tree = free_ports(1), ProcessTree(("FLOWER_DP_MARK", mark))
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="m", dir="/tmp"))) for _ in range(2)]
        stack.callback(tree.end, grace=1.0)
        for folder, role in zip(folders, ("head", "more"), strict=True):
            out = stack.enter_context((folder / "out").open("wb"))
            started = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("raylet.py")), str(port), str(folder), role],
                cwd=folder,
                env=environment(folder / "home", FLOWER_DP_MARK=mark),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            stack.callback(started.wait)
            stack.callback(started.stdin.close)
            tree.add(started.pid)
            wait_until(lambda: role == "more" or answers(port), started, folder / "out")  # noqa: B023
        wait_until((folder / "pid").exists, started, folder / "out")
        tree.remember_descendants()
        yield port, folders


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(found, process, output, seconds=600):
    deadline = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def listens_to_others(process):
    return [at.laddr for at in process.net_connections("tcp") if at.status == "LISTEN" and "127.0.0.1" not in at.laddr.ip]


@pytest.mark.slow
@pytest.mark.flwr_run
@pytest.mark.timeout(2400)
def test_a_run_on_two_machines_goes_on_when_one_is_lost(tmp_path):
    app, run = app_in(tmp_path / "app"), tmp_path / "run"
    with machines(str(tmp_path)) as (port, (first, second)):
        raylet = psutil.Process(int((second / "pid").read_text()))
        assert listens_to_others(raylet) == []
        command = [
            sys.executable,
            "-c",
            "from flower_dp.cli.entry import main; main()",
            "run",
            str(app),
            "--output-dir",
            str(run),
        ]
        with (tmp_path / "out").open("wb") as out:
            process = subprocess.Popen(
                [*command, "--ray-address", f"127.0.0.1:{port}", "--supernodes", "20"],
                cwd=tmp_path,
                env=environment(tmp_path / "home"),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        wait_until(lambda: rounds(run) > 3, process, tmp_path / "out")
        served = [(folder / "home" / "served").read_text().split() for folder in (first, second)]
        for one in [raylet, *raylet.children(recursive=True)]:  # a machine loses its workers with its raylet
            one.send_signal(signal.SIGKILL)
        lost_in = rounds(run)
        assert process.wait(600) == 0, (tmp_path / "out").read_text()
        out = (tmp_path / "out").read_text()
        after = (first / "home" / "served").read_text().split()
        raylet = psutil.Process(int((first / "pid").read_text()))
        assert psutil.wait_procs([one for one in raylet.children() if "ray::Worker" in one.name()], timeout=100)[1] == []
    # Both had clients before, each from its own copy of the app's files; the one that is left has all of them after.
    assert set(map(int, served[0][::2] + served[1][::2])) == set(range(20))
    assert served[0]
    assert served[1]
    assert set(map(int, after[::2])) == set(range(20))
    for folder, lines in ((first, served[0]), (second, served[1])):
        assert {Path(file).is_relative_to(folder) for file in lines[1::2]} == {True}
    # Nothing that was on its way is counted, and the run has all its rounds.
    statement = json.loads((run / "statement.json").read_text())
    assert statement["guarantee"]["num_charged_rounds"] == 12
    assert any("did not reply" in line for line in statement["incidents"]), statement["incidents"]
    replies = [json.loads(line).get("replies") for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    assert 10 < min(replies) < 20
    assert replies[-1] == 20
    assert "round 12/12" in out
    assert rounds(run) == 13 > lost_in


def rounds(run):
    """Return how many lines a run's metrics have."""
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0
