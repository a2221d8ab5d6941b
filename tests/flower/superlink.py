"""Plain `flwr run` of an app: a private SuperLink, the programs that connect to it, and their environment."""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tomli_w

from flower_dp.running.flower_log import plain
from flower_dp.simulation.workers import STARTED
from tests.flower.processes import POLL_SECONDS, Programs

CONNECTION = "flower-dp"
_START_SECONDS = 120.0


class LaunchError(RuntimeError):
    """Flower could not be started."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has ended: Flower's status and details, and what `flwr run` has shown."""

    status: str
    details: str
    log: str


class SuperLink:
    """A SuperLink for simulations, and the `flwr` commands that connect to it; leaving the context ends all of them.

    It listens on a free port of the loopback interface, keeps its state in memory, and has its own FLWR_HOME.

    Raises:
        LaunchError: on entering, if it is not installed or does not start.
    """

    def __init__(self, private_folder: Path, check: Callable[[], None], *, programs: Programs) -> None:
        """Prepare the SuperLink without starting it.

        Args:
            private_folder: of the programs; nothing else uses it.
            check: called while waiting; it raises an error to give up.
            programs: what starts programs (`programs`).
        """
        self._check = check
        self._home = private_folder / "home"
        self._log = private_folder / "superlink.log"
        self._programs = programs

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        for _ in range(3):  # another program may take the free port before the SuperLink does
            port = _free_port()
            arguments = ["--insecure", "--simulation", "--isolation", "subprocess"]
            with self._log.open("wb") as output:
                self._server = self.start("flower-superlink", [*arguments, "--host", "127.0.0.1", "--port", str(port)], output)
            deadline = time.monotonic() + _START_SECONDS
            while self._server.poll() is None and time.monotonic() < deadline:
                if _healthy(port):
                    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
                    (self._home / "config.toml").write_text(
                        tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}}),
                        encoding="utf-8",
                    )
                    return
                self._check()
                time.sleep(POLL_SECONDS)
            if self._server.poll() is None:
                raise LaunchError(f"Flower's SuperLink was not ready after {_START_SECONDS:.0f} s")
        raise LaunchError(f"Flower's SuperLink did not start: {' '.join(self.log_text().split()[-60:])}")

    def start(self, program: str, arguments: list[str], output: Any) -> subprocess.Popen[bytes]:
        """Start a program of this Python environment, away from the terminal's signals."""
        return self._programs.start([_program(program), *arguments], output)

    def wait(self, process: subprocess.Popen[bytes], meanwhile: Callable[[], None]) -> None:
        """Wait until a process ends, or the SuperLink does."""
        self._programs.wait(process, meanwhile, lambda: self._server.poll() is None)

    def status(self, client_status: int | None, meanwhile: Callable[[], None]) -> tuple[str, str]:
        """Return the run's final status and Flower's details, once it has one.

        The log stream may break before the run ends, so the status is that of the SuperLink.
        """
        unanswered = 0
        while self._server.poll() is None and unanswered < 5:
            answer = self._log.with_name("list.json")
            with answer.open("wb") as output:
                self.wait(self.start("flwr", ["list", CONNECTION, "--format", "json"], output), meanwhile)
            runs = _runs(answer.read_text(encoding="utf-8", errors="replace"))
            if not runs and client_status != 0:
                return "failed", ""  # flwr refused the app; the reason is in its output
            if runs and runs[0]["status"].startswith("finished:"):
                return runs[0]["status"].partition(":")[2], runs[0]["status-details"]
            unanswered = 0 if runs else unanswered + 1
            self._check()
            time.sleep(1.0)
        return "lost", "Flower's SuperLink ended, or stopped answering, before the run ended"

    def stop(self) -> None:
        """End the SuperLink and all that it started."""
        self._programs.stop()

    def log_text(self) -> str:
        """Return the SuperLink's own log."""
        return plain(self._log.read_text(encoding="utf-8", errors="replace"))


def flwr_run(app: Path, place: Path, overrides: dict[str, Any], *, num_supernodes: int, environment: dict[str, str]) -> Ended:
    """Run an app with `flwr run --stream` on a SuperLink of its own, and leave no process.

    Args:
        app: the app's folder.
        place: an empty folder that nothing else uses, with a short name: Ray puts sockets there.
        overrides: run-config values.
        num_supernodes: to simulate.
        environment: further variables of all programs.
    """
    home, empty = place / "home", place / "empty"
    home.mkdir()
    empty.mkdir()
    log = place / "flwr.log"
    variables = _environment(place, home) | environment
    programs = Programs(("FLWR_HOME", str(home)), environment=variables, working_dir=empty, check=lambda: None)
    with SuperLink(place, lambda: None, programs=programs) as superlink:
        config = place / "overrides.toml"
        config.write_text(tomli_w.dumps(overrides), encoding="utf-8")
        nodes = f"num-supernodes={num_supernodes} client-resources-num-cpus=1"
        with log.open("wb") as output:
            words = ["run", str(app), CONNECTION, "--stream", "-c", str(config), "--federation-config", nodes]
            client = superlink.start("flwr", words, output)
            superlink.wait(client, lambda: None)
        status, details = superlink.status(client.returncode, lambda: None)
    return Ended(status=status, details=details, log=plain(log.read_text(encoding="utf-8", errors="replace")))


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
    }
    environment["PATH"] = os.pathsep.join([*_program_folders(), environment.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [environment.get(name), "127.0.0.1", "localhost"]))
    return environment


def _program_folders() -> list[str]:
    return list(dict.fromkeys([str(Path(sys.executable).parent), sysconfig.get_path("scripts")]))


def _program(name: str) -> str:
    for folder in _program_folders():
        if found := shutil.which(name, path=folder):
            return found
    raise LaunchError(f"{name} is not installed beside {sys.executable}: pip install 'flower-dp[simulation]'")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://127.0.0.1:{port}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _runs(text: str) -> list[dict[str, str]]:
    """Return the runs in the answer of `flwr list --format json`; none if it is no such answer."""
    try:
        answer = json.loads(text[text.index("{") :])
    except ValueError:
        return []
    return list(answer.get("runs") or [])
