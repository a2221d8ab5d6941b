"""docs/deployment.md on loopback: its commands as they stand, but for ports and host name; and its compose file."""

import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPSConnection
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import psutil
import pytest
import yaml
from flwr.app import Context, RecordDict

from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.privacy.store import Store
from flower_dp.running.run_folder import read_metrics
from tests.grids import LocalGrid, asks_to_train
from tests.ports import free_ports, listens

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "examples" / "deployment"
BIN = Path(sys.executable).parent
DEVICES = ("device-1", "device-2", "device-3")
GENERATED = ("certs", "devices", "operator", "proxy", "state", "*.fab", "*.csv")
# Where the tests' user is root, no mode bits hold it back: these capabilities are what lets it pass.
ACTIVE = "SuperNode ID: "
UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"] if os.geteuid() == 0 else []


def steps():
    """The guide's commands by the label in their first line."""
    blocks = re.findall(r"^```sh\n# (\w+): [^\n]*\n(.*?)^```", (REPOSITORY / "docs" / "deployment.md").read_text(), re.M | re.S)
    return dict(blocks)


class Deployment:
    """A copy of the example, in which the guide's commands run with free ports."""

    def __init__(self, folder):
        self.folder = folder / "deployment"
        shutil.copytree(EXAMPLE, self.folder, ignore=shutil.ignore_patterns(*GENERATED, "__pycache__"))
        self.link, self.proxy, *self.runtime = free_ports(5)
        self.has_proxy = shutil.which("nginx") is not None
        self.started = []
        config = self.folder / "nginx.conf"
        text = config.read_text()
        assert "listen 8443 ssl;" in text
        assert "proxy_pass https://127.0.0.1:8000/v1/fleet/;" in text
        config.write_text(text.replace("listen 8443", f"listen 127.0.0.1:{self.proxy}").replace(":8000/", f":{self.link}/"))
        python = f'exec "{sys.executable}"'
        (folder / "bin").mkdir()
        for name, command in (("python", python), ("flower-dp", f"{python} -m flower_dp.cli.main")):
            (folder / "bin" / name).write_text(f'#!/bin/sh\n{command} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        self.environment = os.environ | {
            "PATH": os.pathsep.join([str(folder / "bin"), str(BIN), os.environ["PATH"]]),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }

    def command(self, label, device="", **variables):
        """A step's commands, with free ports and this machine's name; they may read these variables."""
        text = steps()[label].replace("127.0.0.1:8000", f"127.0.0.1:{self.link}").replace("--port 8000", f"--port {self.link}")
        text = text.replace("fleet.example.org:8443", f"localhost:{self.proxy if self.has_proxy else self.link}")
        port = self.runtime[DEVICES.index(device)] if device else ""
        named = {"DEVICE": device, "RUNTIME_PORT": port, "FLWR_HOME": "$PWD/operator"} | variables
        exported = "".join(f'export {name}="{value}"\n' for name, value in named.items())
        return f"set -eu\n{steps()['0']}{exported}" + text.replace("fleet.example.org", "localhost")

    def bash(self, text, *before, **variables):
        """Run commands to their end."""
        where = {"cwd": self.folder, "env": self.environment | variables}
        command = [*before, "bash", "-c", text]
        return subprocess.run(command, **where, capture_output=True, text=True, timeout=600, check=False)

    def run(self, label, device="", **variables):
        """Run a step to its end; return what it said."""
        done = self.bash(self.command(label, device, **variables))
        assert done.returncode == 0, f"step {label}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def spawn(self, label, device="", change=lambda command: command):
        """Start a step that runs until it is stopped, in a process group of its own."""
        with (self.folder / f"{label}{device}.log").open("a") as log:
            process = subprocess.Popen(
                [*UNPRIVILEGED, "bash", "-c", change(self.command(label, device))],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def start_again(self, device):
        """Start a SuperNode again, wait until the SuperLink has it, and return its process."""
        before = len(self.node_ids(device))
        node = self.spawn("5d", device)
        wait_until(lambda: len(self.node_ids(device)) > before, f"{device} does not come back: {self.log('5d', device)[-2000:]}")
        return node

    def node_ids(self, device):
        """The ids under which a device's SuperNodes were there, one for each start."""
        return re.findall(rf"{ACTIVE}(\d+)", self.log("5d", device))

    def log(self, label, device=""):
        return (self.folder / f"{label}{device}.log").read_text()

    def replies(self, device):
        return DeviceLedger(self.folder / "devices" / device / "ledger.sqlite").read()[device].replies

    def post(self, port, path, context):
        connection = HTTPSConnection("localhost", port, timeout=30, context=context)
        try:
            connection.request("POST", path)
            return connection.getresponse().status
        finally:
            connection.close()


def end_group(process, kind):
    """Signal the processes of a group that this test has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, kind)


def end_all(processes):
    """End groups, the last first, and kill those that are still there after a minute."""
    for process in reversed(processes):
        end_group(process, signal.SIGTERM)
    for process in processes:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            end_group(process, signal.SIGKILL)


def wait_until(true, what, seconds=400):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)


class HeldRecords:
    """The records of a device, as a pipe that gives them at once, but in round 1 only when they are released.

    Attributes:
        asked: set when the app of round 1 opens them.
        released: to be set.
    """

    def __init__(self, made, device):
        self.asked, self.released = Event(), Event()
        self._made, self._device = made, device
        self._path = made.folder / "devices" / device / "records.csv"
        self._text = self._path.read_text()
        self._path.unlink()
        os.mkfifo(self._path)
        Thread(target=self._give, daemon=True).start()

    def _give(self):
        while True:
            with self._path.open("w") as pipe:  # returns when the app opens them
                if "ROUND 1]" in self._made.log("5d", self._device):
                    self.asked.set()
                    self.released.wait()
                with suppress(BrokenPipeError):
                    pipe.write(self._text)
            time.sleep(0.5)  # until the app has closed them


def kill_in_mid_round(made, device, group, records):
    """Kill a node and its app when the app has charged its reply, and before any of the reply is sent."""
    wait_until(records.asked.is_set, f"round 1 doesn't begin: {made.log('6a')[-3000:]}")
    for process in (first := psutil.Process(group.pid), *first.children(recursive=True)):
        with suppress(psutil.Error):  # an app that has just ended
            if any(word.endswith("flower-supernode") for word in process.cmdline()[:2]):
                process.suspend()  # it can take no reply from the app
    records.released.set()
    wait_until(lambda: made.replies(device) == 1, f"{device} charges nothing: {made.log('5d', device)[-3000:]}")
    end_group(group, signal.SIGKILL)


def refuse_another_bundle(made, device):
    """A bundle that is not the pinned one can't come in."""
    changed = made.folder / "app" / "three_devices" / "task.py"
    changed.write_text(changed.read_text() + "\n")
    commands = "mkdir changed && cd changed && flwr build --app ../app && flwr install *.fab"
    installed = made.bash(commands, *UNPRIVILEGED, FLWR_HOME=str(made.folder / "devices" / device / "flower"))
    assert installed.returncode != 0
    assert "PermissionError" in installed.stderr


def come_back_with_a_new_key(made, device):
    """A device comes back under a new id, with its name and its ledger; return the old id."""
    old = made.node_ids(device)[-1]
    made.run("8a", device, NODE_ID=old)
    made.run("8b", device)
    made.run("5c", device)
    made.start_again(device)
    assert made.node_ids(device)[-1] != old
    return old


@pytest.fixture
def deployment(tmp_path):
    made = Deployment(tmp_path)
    try:
        yield made
    finally:
        end_all(made.started)


@pytest.mark.flwr_run
@pytest.mark.deployment
@pytest.mark.timeout(2400)
@pytest.mark.skipif(shutil.which("ssh-keygen") is None or shutil.which("openssl") is None, reason="needs openssl and ssh-keygen")
@pytest.mark.skipif(bool(UNPRIVILEGED) and shutil.which("setpriv") is None, reason="root can write everything: needs setpriv")
def test_the_guide_with_a_node_that_is_killed_in_mid_round(deployment):
    """TLS, keys, a proxy, pinned bundles, ledgers: a node is killed -9 in round 1, is back under a new id, and replies in round 2.

    Two of the guide's three devices take part.
    """
    made = deployment
    made.run("1")
    made.spawn("2")
    if made.has_proxy:
        made.spawn("3")
    made.run("4")
    devices = first, second = DEVICES[:2]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda device: made.run("5a", device) + made.run("5b", device), devices))
    wait_until(lambda: listens(made.link), f"the SuperLink doesn't listen: {made.log('2')[-2000:]}")
    made.run("5c", second)
    unknown, node = (made.spawn("5d", device) for device in devices)

    # A key keeps its id. A node that is stopped signs off, so that it need not wait for its heartbeat to run out.
    wait_until(lambda: made.node_ids(second), f"{second} doesn't start: {made.log('5d', second)[-2000:]}")
    end_group(node, signal.SIGTERM)
    node.wait(200)
    node = made.start_again(second)
    assert len(set(made.node_ids(second))) == 1

    # TLS is on, and only /v1/fleet is behind the proxy.
    trusting = ssl.create_default_context(cafile=made.folder / "certs" / "ca.crt")
    assert made.post(made.link, "/v1/control/list-runs", trusting) != 404
    with pytest.raises(ssl.SSLCertVerificationError):
        made.post(made.link, "/v1/fleet/register-node", ssl.create_default_context())
    if made.has_proxy:
        assert made.post(made.proxy, "/v1/fleet/register-node", trusting) not in (404, 502)
        for path in ("control/list-runs", "runtime/get-nodes", "fleet/../control/list-runs", "fleet/%2e%2e/control/list-runs"):
            assert made.post(made.proxy, f"/v1/{path}", trusting) == 404

    # A key that is not registered is refused.
    assert unknown.wait(300) != 0
    assert "Failed to activate SuperNode" in made.log("5d", first)
    made.run("5c", first)
    made.spawn("5d", first)

    # Round 1 lasts until the second device is back.
    held, killed = (HeldRecords(made, device) for device in devices)
    run = made.spawn("6a", change=lambda text: text.replace("num-rounds=3", "num-rounds=2 num-devices=2 round-timeout=900.0"))
    kill_in_mid_round(made, second, node, killed)

    refuse_another_bundle(made, first)
    old = come_back_with_a_new_key(made, second)
    held.released.set()
    assert run.wait(900) == 0
    assert "finished:completed" in made.run("6b")
    statement = json.loads((made.folder / "state" / "run" / "statement.json").read_text())
    # Two of six replies of a pure budget of 3; the one that was lost is charged like the others, by the device too.
    assert statement["guarantee"]["private"]
    assert (statement["guarantee"]["num_charged_rounds"], statement["guarantee"]["delta"]) == (2, 0.0)
    assert statement["guarantee"]["epsilon"] == pytest.approx(1.0)
    assert [line for line in statement["incidents"] if line.startswith("1 requested replies did not count")]
    assert [made.replies(device) for device in devices] == [2, 2], made.log("6a")
    assert f"{second}: 2 of 6 replies, epsilon 1.0000 at delta 0 (replace-one)" in made.run("7", second)
    # Round 1 misses the node that died, and round 2 nobody: the run knows the client by its name.
    assert made.log("6a").count("no reply: ") == 1
    assert f"Node {old}: no reply: " in made.log("6a")


# The compose file


def compose():
    return yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]


def arguments(command, device="", port=""):
    """A command's words, without the settings of the environment before it."""
    text = command if isinstance(command, str) else shlex.join(command)
    for name, value in (("$PWD", "/deployment"), ("$DEVICE", device), ("$RUNTIME_PORT", port)):
        text = text.replace(name, value)
    listed = shlex.split(text.replace("\\\n", " "))
    return [" ".join(word.split()) for word in listed if not word.startswith("FLWR_HOME=")]


def test_the_commands_of_the_compose_file_are_the_guides():
    services = compose()
    assert arguments(services["superlink"]["command"]) == arguments(steps()["2"])
    assert arguments(steps()["3"]) == ["nginx", "-p", "proxy", "-c", "/deployment/nginx.conf"]
    assert "exec nginx -p /tmp -c /deployment/nginx.conf" in services["proxy"]["command"]
    for index, device in enumerate(DEVICES, 1):
        assert arguments(services[device]["command"]) == arguments(steps()["5d"], device, f"910{index}")


def test_the_containers_can_do_no_more_than_they_must():
    services = compose()
    assert set(services) == {"superlink", "proxy", "operator", *DEVICES}
    made = " ".join(steps().values()) + (EXAMPLE / "keys.sh").read_text()
    for name, service in services.items():
        held = [service.get(key) for key in ("read_only", "privileged", "cap_drop", "security_opt")]
        assert held == [True, None, ["ALL"], ["no-new-privileges:true"]], name
        assert re.fullmatch(r"\$\{DEPLOYMENT_UID:\?.*not 0\}:65534", service["user"]), name
        for source in (volume.split(":")[0].removeprefix("./") for volume in service["volumes"]):
            assert not source.endswith(("ca.key", "docker.sock", "ledger.sqlite")), name
            top, file = source.split("/")[0], EXAMPLE / source
            assert top in ("certs", "devices", "state", "operator", "app", "nginx.conf", "public.csv"), name
            # It is in the example, or the guide makes it.
            assert file.exists() or file.name in DEVICES or file.name in made or file.name.rpartition(".")[0] in made, source
    # Port 8443 is the proxy's, which shares the SuperLink's network; no device shares it.
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {"superlink": ["8443:8443"]}
    shared = [name for name, service in services.items() if service.get("network_mode") == "service:superlink"]
    assert sorted(shared) == ["operator", "proxy"]
    for device in DEVICES:
        mounted = [volume for volume in services[device]["volumes"] if "devices/" in volume]
        assert mounted == [f"./devices/{device}:/deployment/devices/{device}"]


def test_keys_and_records_are_neither_in_the_image_nor_in_the_repository():
    ignored = (EXAMPLE / "Dockerfile.dockerignore").read_text().split()
    for name in (*GENERATED[:5], "public.csv"):
        assert f"examples/deployment/{name}" in ignored
    listed = (EXAMPLE / ".gitignore").read_text().split()
    assert {"certs/", "devices/", "operator/", "proxy/", "state/", "public.csv", "*.fab"} <= set(listed)


def test_the_proxy_passes_on_the_fleets_paths_and_no_others():
    text = (EXAMPLE / "nginx.conf").read_text()
    locations = dict(re.findall(r"location (\S+) \{\n(.*?)\n        \}", text, re.S))
    assert set(locations) == {"/", "/v1/fleet/"}
    assert locations["/"].split() == ["return", "404;"]
    assert "proxy_pass https://127.0.0.1:8000/v1/fleet/;" in locations["/v1/fleet/"]
    assert "proxy_ssl_verify on;" in locations["/v1/fleet/"]
    assert text.count("proxy_pass ") == len(re.findall(r"^ *listen ", text, re.M)) == 1


# The app


@pytest.fixture
def devices_app(tmp_path, monkeypatch):
    """The example's app with a grid in this process, on which three devices have the files that the guide makes."""
    monkeypatch.syspath_prepend(str(EXAMPLE / "app"))
    from three_devices import client_app, server_app

    grid = LocalGrid(client_app.app, len(DEVICES))
    for node, name in enumerate((*DEVICES, "public"), 1):
        (folder := tmp_path / name).mkdir(mode=0o700)
        subprocess.run([sys.executable, EXAMPLE / "make_data.py", name, folder / "records.csv"], check=True, timeout=100)
        if name != "public":
            DeviceLedger.create(folder / "ledger.sqlite", [name])
            own = {"name": name, "epsilon": 3.0, "num-replies": 6, "clip-norm": 1.0}
            paths = {"data-path": str(folder / "records.csv"), "ledger-path": str(folder / "ledger.sqlite")}
            grid.contexts[node].node_config = own | paths
    defaults = tomllib.loads((EXAMPLE / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    own = {"output-dir": str(tmp_path / "run"), "test-data": str(tmp_path / "public" / "records.csv")}

    def play(**settings):
        server_app.app(grid, Context(1, 1, {}, RecordDict(), {**defaults, **own, **settings}))

    return SimpleNamespace(play=play, grid=grid, folder=tmp_path / "run")


class Killed(BaseException):
    """In place of kill -9: nothing of the run's end is written."""


def test_the_guides_run_is_on_the_disk_when_it_dies_and_goes_on(devices_app, monkeypatch):
    made = devices_app
    with monkeypatch.context() as patch:
        receive = made.grid.send_and_receive

        def dying(messages, **words):
            if len([1 for message in made.grid.sent if asks_to_train(message)]) >= 6:
                raise Killed
            return receive(messages, **words)

        patch.setattr(made.grid, "send_and_receive", dying)
        patch.setattr("flower_dp.running.run_recorder.RunRecorder.end", lambda *arguments: None)
        with pytest.raises(Killed):
            made.play()
    # Rounds 1 and 2 were answered, and round 3 was charged: the server knows it, and no old statement is there.
    with Store(made.folder / "checkpoint" / "ledger.sqlite", read_only=True) as ledger:
        assert [charge.server_round for run in ledger.runs for charge in ledger.read(run)] == [1, 2, 3]
    assert not (made.folder / "statement.json").exists()
    with pytest.raises(ValueError, match="already holds"):  # a new run can't take the folder
        made.play()

    made.play(**{"resume": True, "num-rounds": 3})
    statement = json.loads((made.folder / "statement.json").read_text())
    assert statement["guarantee"]["num_charged_rounds"] == 3
    assert statement["guarantee"]["epsilon"] == pytest.approx(1.5)  # three of six replies, pure epsilon of 3
    assert [line for line in statement["incidents"] if "not finished" in line] == ["round 3 was charged and not finished"]
    assert read_metrics(made.folder)[-1]["accuracy"] > 0.6


def test_every_device_has_records_of_its_own_whatever_its_name(tmp_path):
    def records(name, path):
        subprocess.run([sys.executable, EXAMPLE / "make_data.py", name, path], check=True, timeout=100)
        return path.read_text()

    first, other, again = (records(name, tmp_path / f"{n}.csv") for n, name in enumerate(("clinic-7", "clinic-8", "clinic-7")))
    assert first == again
    assert first != other
    assert len(first.splitlines()) == 301
