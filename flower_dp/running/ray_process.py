"""The process that runs an app on Ray without Flower's runtime (`flower_dp.simulation.process`)."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flower_dp.running.processes import POLL_SECONDS, Programs

_PACKAGE = Path(__file__).resolve().parent.parent
# How long an interrupted process may take for its statement and its model.
_LEAVE_SECONDS = 60.0


class RayProcess:
    """An app in a process of its own, which starts at once; its ServerApp begins after `go`.

    Args:
        programs: what starts the process.
        app: the app's folder.
        private_folder: a folder for the request, the outcome and Ray's sockets.
        overrides: run-config values that differ from the app's.
        num_workers: Ray workers, one CPU core each.
        num_nodes: nodes that they simulate.
        gpus_per_worker: the fraction of a GPU of each.
        ray_address: HOST:PORT of the Ray cluster that the workers are on; "" for this machine.
        only_state: run the ServerApp alone, up to the statement of the run in the run folder.
        output: the file that the process writes to.
    """

    def __init__(
        self,
        programs: Programs,
        app: Path,
        *,
        private_folder: Path,
        overrides: Mapping[str, Any],
        num_workers: int,
        num_nodes: int,
        gpus_per_worker: float,
        ray_address: str,
        only_state: bool,
        output: Any,
    ) -> None:
        request, self._outcome = private_folder / "request.json", private_folder / "outcome.json"
        self._go = private_folder / "go"
        asked = {
            "folder": str(app),
            "overrides": dict(overrides),
            "num_workers": num_workers,
            "num_nodes": num_nodes,
            "gpus_per_worker": gpus_per_worker,
            "ray_folder": str(private_folder),
            "ray_address": ray_address,
            "only_state": only_state,
            "launcher": os.getpid(),
            "outcome": str(self._outcome),
            "go": str(self._go),
        }
        request.write_text(json.dumps(asked), encoding="utf-8")
        # -P: the working directory holds the app's files, and no module is to be found there.
        command = [sys.executable, "-P", "-m", "flower_dp.simulation.process", str(request)]
        self._programs = programs
        self._process = programs.start(command, output, {"PYTHONPATH": _python_path(app)})

    def go(self) -> None:
        """Let its ServerApp begin."""
        self._go.touch()

    def kill(self) -> None:
        """End it before its ServerApp has begun; `Programs.stop` ends what it has started."""
        self._programs.remember()
        self._process.kill()
        self._process.wait()

    def result(self, meanwhile: Callable[[], None]) -> tuple[str, str]:
        """Wait for its end; return the status and details.

        Args:
            meanwhile: called while waiting.
        """
        self._programs.wait(self._process, meanwhile)
        if not self._outcome.exists():
            return "lost", "the process that ran the app ended before the run did"
        found = json.loads(self._outcome.read_text(encoding="utf-8"))
        return str(found["status"]), str(found["details"])

    def interrupt(self, at_once: Callable[[], bool]) -> None:
        """End it, and let it write statement, model and checkpoint before, unless `at_once` says otherwise."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline and not at_once():
            time.sleep(POLL_SECONDS)


def _python_path(app: Path) -> str:
    """Return where modules are found: an app that brings this library along, as a checkout does, is run with its own."""
    own = [str(app)] if (app / _PACKAGE.name / "__init__.py").is_file() else []
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")]), str(_PACKAGE.parent)])
