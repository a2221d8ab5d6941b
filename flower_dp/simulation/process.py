"""The process in which `flower-dp run --engine ray` runs an app: python -m flower_dp.simulation.process ORDER.json.

The workers start and import the ClientApp while this process checks the settings and begins the ServerApp.
"""

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flower_dp.core.checks import SettingsError
from flower_dp.core.environment import RESUME
from flower_dp.running import plugins
from flower_dp.running.apps import App, read_app
from flower_dp.running.flower_log import log_without_colours

log = logging.getLogger("flwr")

_LOOK_SECONDS = 0.5
_GO_SECONDS = 0.01


def main(request_file: str) -> None:
    """Run what a request says, and write to its `outcome` how that ended: a status and details, as Flower has them.

    The request has `folder`, `overrides`, `num_workers`, `num_nodes`, `gpus_per_worker`, `ray_folder`, `ray_address`,
    `only_state`, `launcher`, `outcome` and `go`, the file without which no ServerApp begins. The status is `completed`, `failed`,
    `refused` where the app's check has refused the settings, or `interrupted` after a SIGTERM, which comes too when the launcher
    has died: the run has then written its statement and a checkpoint.
    """
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    threading.Thread(target=_end_with, args=(request["launcher"],), daemon=True).start()
    app = read_app(Path(request["folder"]))
    if app is None:
        raise SystemExit(f"{request['folder']}: is no folder of a Flower app")
    sys.dont_write_bytecode = not app.own  # somebody else's folder stays as it is
    try:
        status, details = _run(app, request)
    except KeyboardInterrupt:
        status, details = "interrupted", ""
    except BaseException as error:
        if request["only_state"] and isinstance(error, SystemExit):  # the statement was made
            status, details = "completed", ""
        else:
            log.error("Simulation raised an exception", exc_info=error)
            status, details = "failed", f"Simulation failed with exception: {error}"
    outcome = Path(request["outcome"])
    part = outcome.with_suffix(".part")
    part.write_text(json.dumps({"status": status, "details": details}), encoding="utf-8")
    if os.getppid() != request["launcher"]:  # nobody waits for the outcome, nor ends Ray's processes
        import ray  # noqa: PLC0415

        ray.shutdown()
        return
    part.replace(outcome)


def _run(app: App, request: dict[str, Any]) -> tuple[str, str]:
    from flower_dp.simulation.cluster import Cluster, bundled  # noqa: PLC0415  (after the settings of Python above)
    from flower_dp.simulation.modules import client_of, components  # noqa: PLC0415
    from flower_dp.simulation.workers import Workers, log_unused_gpus, start_ray  # noqa: PLC0415

    config = {**app.defaults, **request["overrides"]}
    away = request["ray_address"]
    server = components(app)[1]
    log_without_colours()
    if request["only_state"]:
        from flower_dp.simulation.silent_grid import SilentGrid  # noqa: PLC0415

        silent = SilentGrid(config)
        server()(silent, silent.server_context())
        return "failed", "the app has started no strategy of flower-dp"
    cluster = Cluster(address=away, bundle=bundled(app)) if away else None
    _import_meanwhile(app)
    ray = start_ray(request["num_workers"], Path(request["ray_folder"]), cluster)
    workers = Workers(num_workers=request["num_workers"], gpus=request["gpus_per_worker"], cluster=cluster)
    from flower_dp.simulation.grid import RayGrid  # noqa: PLC0415

    grid = RayGrid(client_of(app, away=bool(away)), workers, num_nodes=request["num_nodes"], run_config=config)
    try:
        if app.check and request["overrides"]:  # the defaults are valid
            with plugins.loaded(app, app.check) as check:
                check(config)
    except ValueError as error:
        return "refused", str(error)
    signal.signal(signal.SIGTERM, _interrupt)  # Ray has set its own
    while not Path(request["go"]).exists():
        time.sleep(_GO_SECONDS)
    if not request["gpus_per_worker"] and not os.environ.get(RESUME):  # a run that goes on can't change it
        log_unused_gpus(ray, "--gpus-per-worker 1")
    try:
        server()(grid, grid.server_context())
    except SettingsError as error:  # before anything was spent
        return "refused", str(error)
    return "completed", ""


def _import_meanwhile(app: App) -> None:
    """Begin to import, in a thread, what the ServerApp takes most of its time to import; Ray's processes start meanwhile."""

    def load() -> None:
        with suppress(Exception):  # raised again where the app imports it
            for package in ("dp_accounting", *(["torch"] if app.own or app.built else [])):
                importlib.import_module(package)

    threading.Thread(target=load, daemon=True).start()


def _end_with(launcher: int) -> None:
    """End this process when the one that has started it is gone, killed perhaps."""
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    from flower_dp.simulation.workers import end_this_process  # noqa: PLC0415  (imported by the main thread meanwhile)

    end_this_process()


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)  # what is written now is not interrupted
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException:  # such as a disk without space
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the launcher ends Ray's processes; to wait for each takes a second
