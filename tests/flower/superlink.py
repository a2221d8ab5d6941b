"""Plain `flwr run` of an app on a SuperLink of its own, which listens on a free port of the loopback interface."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from flower_dp.running.flower_log import plain
from flower_dp.simulation.workers import STARTED
from tests.flower.processes import ProcessTree
from tests.ports import free_ports, listens

CONNECTION = "flower-dp"
_START_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has ended: Flower's status and details, and what `flwr run` has shown."""

    status: str
    details: str
    log: str


def flwr_run(app: Path, place: Path, overrides: dict[str, Any], *, num_supernodes: int, environment: dict[str, str]) -> Ended:
    """Run an app with `flwr run --stream` on a SuperLink of its own, and leave no process.

    Args:
        app: the app's folder.
        place: an empty folder that nothing else uses, with a short name: Ray puts sockets there.
        overrides: run-config values.
        num_supernodes: to simulate.
        environment: further variables of all programs.
    """
    home, empty, config = place / "home", place / "empty", place / "overrides.toml"
    home.mkdir()
    empty.mkdir()
    (port,) = free_ports(1)
    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}}))
    config.write_text(tomli_w.dumps(overrides), encoding="utf-8")
    variables, tree = _environment(place, home) | environment, ProcessTree(("FLWR_HOME", str(home)))
    started: list[subprocess.Popen[bytes]] = []

    def start(log: str, *command: str) -> subprocess.Popen[bytes]:
        with (place / log).open("wb") as output:
            process = subprocess.Popen(
                command, cwd=empty, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        tree.add(process.pid)
        started.append(process)
        return process

    def said(log: str) -> str:
        return plain((place / log).read_text(encoding="utf-8", errors="replace"))

    try:
        link = ["--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1", "--port", str(port)]
        server, deadline = start("superlink.log", "flower-superlink", *link), time.monotonic() + _START_SECONDS
        while not listens(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Flower's SuperLink did not start: {said('superlink.log')[-3000:]}")
            time.sleep(0.1)
        nodes = f"num-supernodes={num_supernodes} client-resources-num-cpus=1"
        words = [str(app), CONNECTION, "--stream", "-c", str(config), "--federation-config", nodes]
        client = start("flwr.log", "flwr", "run", *words)
        # The log stream may break before the run ends: the status is that of the SuperLink.
        status, details = "", ""
        while server.poll() is None and not status.startswith("finished:"):
            if client.poll() is not None:
                start("list.json", "flwr", "list", CONNECTION, "--format", "json").wait()
                answer = said("list.json")
                (run, *_) = json.loads(answer[answer.index("{") :])["runs"] or [
                    {"status": "finished:failed", "status-details": ""}
                ]
                status, details = run["status"], run["status-details"]
            tree.remember_descendants()
            time.sleep(0.5)
    finally:
        tree.end()
        for process in started:
            process.wait()
    return Ended(status=status.removeprefix("finished:") or "lost", details=details, log=said("flwr.log"))


def _environment(private_folder: Path, home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: that of this process, with settings that isolate Flower and Ray."""
    environment = dict(os.environ)
    for name in ("RAY_ADDRESS", "FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API", "FLWR_DATABASE"):
        environment.pop(name, None)
    environment |= {
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        **STARTED,
        "RAY_TMPDIR": str(private_folder),
        "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]),
    }
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [environment.get(name), "127.0.0.1", "localhost"]))
    return environment
