"""`flower_dp.simulate`: what may be run, what comes back, what is warm, and what an interruption leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import flower_dp
from flower_dp.core.checks import SettingsError
from flower_dp.simulation import run as simulation
from flower_dp.simulation import workers
from tests.own_apps import write_app
from tests.simulation.obedient import pair
from tests.torch_free import module

ROOT = Path(flower_dp.__file__).parents[1]
SETTINGS = {"method": "dp-fedavg", "num-clients": 20, "num-rounds": 2, "sampling": "full", "batch-size": 4}
SETTINGS |= {"dp-fedavg.delta": 1e-3, "dp-fedavg.target-epsilon": 0.0, "training-engine": "one-by-one"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def own_app(evaluate=lambda model: {"accuracy": 0.5}):
    def records(client, num_clients):
        rng = torch.Generator().manual_seed(client)
        return torch.randn(8, 3, generator=rng), torch.randint(2, (8,), generator=rng)

    return flower_dp.app(model_fn=lambda: torch.nn.Linear(3, 2), data_fn=records, evaluate_fn=evaluate)


@pytest.mark.flwr_run
@pytest.mark.usefixtures("ray_here")
def test_an_app_of_ones_own(home, capsys):
    run = flower_dp.simulate(own_app(), num_nodes=1, run_config=SETTINGS, seed=3)
    assert [row["round"] for row in run.rounds] == [0, 1, 2]
    assert (run.rounds[2]["epsilon"], run.statement.num_charged_rounds) == (run.statement.epsilon, 2)
    assert {name: array.numpy().shape for name, array in run.result.arrays.items()} == {"weight": (2, 3), "bias": (2,)}
    assert run.folder.parent == home / ".flower-dp" / "runs"
    assert (run.folder / "statement.txt").read_text() == f"{run.statement}\n"
    assert json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[2]) == run.rounds[2]
    assert "seed = 3" in (run.folder / "run-config.toml").read_text()
    assert re.fullmatch(f"<run: round 2/2.*{run.folder}>", repr(run))
    assert "round 2/2  accuracy 50.0 %" in capsys.readouterr().out


@pytest.mark.flwr_run
@pytest.mark.usefixtures("ray_here", "home")
def test_how_a_run_goes_on_is_said_only_if_it_can(monkeypatch):
    left = [0, 1]
    app = own_app(evaluate=lambda model: {"accuracy": 0.5 / left.pop() if left else 0.5})  # the second call fails
    with pytest.raises(RuntimeError, match="ZeroDivisionError") as failed:
        flower_dp.simulate(app, num_nodes=1, run_config=SETTINGS, progress=False)
    released, goes_on = failed.value.__notes__
    assert "What the run released before is in" in released
    folder = re.fullmatch(r"Unless its settings caused the failure, resume it with simulate\(\.\.\., resume='(.*)'\)", goes_on)[1]
    with pytest.raises(SettingsError, match="batch-size=2: was 4 in") as refused:
        flower_dp.simulate(app, num_nodes=1, run_config=SETTINGS | {"batch-size": 2}, resume=folder, progress=False)
    assert not hasattr(refused.value, "__notes__")
    run = flower_dp.simulate(app, num_nodes=1, run_config=SETTINGS, resume=folder, progress=False)
    assert run.statement.num_charged_rounds == 2

    # Now it has ended: neither Ray nor a round is started, what is there is returned.
    monkeypatch.setattr(simulation, "warm_workers", lambda **_: pytest.fail("Ray is started"))
    again = flower_dp.simulate(app, num_nodes=1, run_config=SETTINGS, resume=folder, progress=False)
    assert (again.folder, again.rounds, again.statement.num_charged_rounds) == (run.folder, run.rounds, 2)
    assert all((again.result.arrays[name].numpy() == array.numpy()).all() for name, array in run.result.arrays.items())


APPS = """
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import my_word

server, client = ServerApp(), ClientApp()

@server.main()
def main(grid, context):
    (reply,) = grid.send_and_receive([Message(RecordDict(), 2, 'query')])
    Path('told').write_text(f"{context.run_config['rounds']} {reply.content['told']['word']}")

@client.query()
def query(message, context):
    return Message(RecordDict({'told': ConfigRecord({'word': my_word.WORD})}), reply_to=message)
"""


@pytest.mark.flwr_run
@pytest.mark.usefixtures("ray_here")
def test_a_folder_that_changes_between_two_calls(tmp_path, monkeypatch):
    app = write_app(tmp_path / "app", "rounds = 3", my_app=APPS)
    monkeypatch.chdir(tmp_path)
    for word, rounds in (("first", 3), ("second", 4)):
        (app / "my_word.py").write_text(f"WORD = {word!r}\n")
        flower_dp.simulate(app, num_nodes=1, run_config={"rounds": rounds} if rounds != 3 else None)
        assert Path("told").read_text() == f"{rounds} {word}"
    assert not [name for name in sys.modules if name.startswith("my_")]
    with pytest.raises(ValueError, match=r"seed: unknown setting of mine; they are in .*pyproject\.toml\. Flower passes"):
        flower_dp.simulate(app, seed=1)
    with pytest.raises(ValueError, match="client_app: the app's folder names its own"):
        flower_dp.simulate(app, ClientApp())


@pytest.mark.flwr_run
@pytest.mark.usefixtures("ray_here")
def test_two_apps_on_warm_workers(capsys):
    found = []
    server, client = pair(found)
    flower_dp.simulate(server, client, num_nodes=1)
    for _ in range(2):
        run = flower_dp.simulate(server, client, num_nodes=10, node_config=lambda part: {"own": part} if part else {})
    assert (run.folder, run.rounds, run.statement, run.result) == (None, (), None, None)
    assert [(answer["partition-id"], answer["num-partitions"], answer.get("own")) for answer in found[1]] == [
        (0, 10, None),
        *((part, 10, part) for part in range(1, 10)),
    ]
    first, *others = ({answer["process"] for answer in answers} for answers in found)
    assert others[0] == others[1]
    # For another number of nodes there are new workers.
    assert not first & others[0]
    # An error of the app is the caller's, and the workers stay.
    with pytest.raises(RuntimeError, match="told to fail"):
        flower_dp.simulate(server, client, num_nodes=10, run_config={"fail": True})
    assert {answer["process"] for answer in found[3]} == others[0]
    with pytest.raises(ValueError, match=r"gpus=1e\+06: only 0 workers"):
        workers.Workers(num_workers=1, gpus=1e6)
    # Workers of one's own need their cores, and the next call has new ones.
    workers.Workers(num_workers=workers.default_workers()).close()
    flower_dp.simulate(server, client, num_nodes=10)
    assert not {answer["process"] for answer in found[4]} & others[0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"seed": -1}, "seed=-1"),
        ({"run_config": ["num-rounds"]}, "run_config: is a list; must be a dict"),
        ({"node_config": {0: {"ledger-path": "x"}}}, "node_config: is a dict; must be a function partition -> settings"),
        ({"client_app": None}, "client_app: is a NoneType"),
        ({"app": 3}, "app: is a int; must be flower_dp.app"),
        ({"app": "mnist-nbafl", "num_nodes": 5, "run_config": {"num-clients": 4}}, "num_nodes=5: must be at most num-clients=4"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(arguments, named, monkeypatch):
    monkeypatch.setattr(simulation, "warm_workers", lambda **_: pytest.fail("started"))
    arguments = {"app": ServerApp()} | arguments
    with pytest.raises(ValueError, match=named):
        flower_dp.simulate(arguments.pop("app"), **arguments)


# What a client calls and reads is defined in the script itself.
SCRIPT = (
    module(num_clients=1)
    + """
import signal

import flower_dp

signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests in the background may have it ignored

try:
    flower_dp.simulate(server, client, num_nodes=1, run_config={"num-rounds": 2_000}, output_dir="run")
except KeyboardInterrupt:
    import psutil
    print("left:", [" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True) if one.status() != "zombie"])
    flower_dp.simulate(server, client, num_nodes=1, run_config={"num-rounds": 3_000}, output_dir="next")
"""
)


def script(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    with (tmp_path / "out").open("wb") as out:
        return psutil.Popen(
            [sys.executable, "mine.py"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def watched(process, tmp_path, until):
    """Wait for a word in a script's output; return the processes that it has started."""
    deadline = time.monotonic() + 600
    while until not in (tmp_path / "out").read_text() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process.children(recursive=True) if process.is_running() else []


def gone(processes, seconds=100):
    return not psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("own", [lambda *_: None, signal.SIG_IGN, signal.SIG_DFL])
def test_sigterm_does_what_it_did_before_ray(own, fails):
    def of_ray(*_):
        raise SystemExit(15)

    def start():
        with workers._sigterm_stays():
            signal.signal(signal.SIGTERM, of_ray)
            if fails:
                raise OSError("no port")

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(OSError, match="no port") if fails else nullcontext():
            start()
        # Without a handler a process would end before its run has written what was released.
        assert signal.getsignal(signal.SIGTERM) is (of_ray if own is signal.SIG_DFL else own)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.flwr_run
def test_an_interrupted_script_leaves_no_process(tmp_path):
    """A script that goes on after Ctrl-C, as a notebook does, runs again; when SIGTERM ends it, it leaves no process either."""
    process = script(tmp_path)
    started = watched(process, tmp_path, "round 3/2000")
    names = " ".join(" ".join(one.cmdline()) for one in started)
    assert "raylet" in names
    assert not re.search(r"dashboard/dashboard\.py|autoscaler", names)
    rooms = set(re.findall(r"/[^ =]*/flower-dp-[^/ ]+", names))
    assert len(rooms) == 1
    process.send_signal(signal.SIGINT)
    started += watched(process, tmp_path, "round 3/3000")
    process.send_signal(signal.SIGTERM)
    status = process.wait(300)
    out = (tmp_path / "out").read_text()
    assert "left: []" in out
    assert status > 0, out  # not aborted before Ray was ended, and its folder removed
    assert "SIGTERM received" not in out  # a trace of addresses, by Ray's own handler
    assert gone(started), out
    assert not any(Path(room).exists() for room in rooms)
    for run in ("run", "next"):
        assert (tmp_path / run / "statement.txt").exists()  # what was released before stays released
