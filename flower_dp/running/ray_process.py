"""The process that runs an app on Ray without Flower's runtime (`flower_dp.simulation.process`)."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flower_dp.running.processes import Programs

_PACKAGE = Path(__file__).resolve().parent.parent


def run_on_ray(
    programs: Programs,
    app: Path,
    *,
    private_folder: Path,
    overrides: Mapping[str, Any],
    num_workers: int,
    num_nodes: int,
    gpus_per_worker: float,
    output: Any,
    meanwhile: Callable[[], None],
) -> tuple[str, str]:
    """Run an app in a process of its own to its end; return the status and details.

    Args:
        programs: what starts the process.
        app: the app's folder.
        private_folder: a folder for the request, the outcome and Ray's sockets.
        overrides: run-config values that differ from the app's.
        num_workers: Ray workers, one CPU core each.
        num_nodes: nodes that they simulate.
        gpus_per_worker: the fraction of a GPU of each.
        output: the file that the process writes to.
        meanwhile: called while waiting.
    """
    request, outcome = private_folder / "request.json", private_folder / "outcome.json"
    asked = {
        "folder": str(app),
        "overrides": dict(overrides),
        "num_workers": num_workers,
        "num_nodes": num_nodes,
        "gpus_per_worker": gpus_per_worker,
        "ray_folder": str(private_folder),
        "outcome": str(outcome),
    }
    request.write_text(json.dumps(asked), encoding="utf-8")
    # -P: the working directory holds the app's files, and no module is to be found there.
    command = [sys.executable, "-P", "-m", "flower_dp.simulation.process", str(request)]
    programs.wait(programs.start(command, output, {"PYTHONPATH": _python_path(app)}), meanwhile)
    if not outcome.exists():
        return "lost", "the process that ran the app ended before the run did"
    found = json.loads(outcome.read_text(encoding="utf-8"))
    return str(found["status"]), str(found["details"])


def _python_path(app: Path) -> str:
    """Return where modules are found: an app that brings this library along, as a checkout does, is run with its own."""
    own = [str(app)] if (app / _PACKAGE.name / "__init__.py").is_file() else []
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")]), str(_PACKAGE.parent)])
