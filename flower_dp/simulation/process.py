"""The process in which `flower-dp run --engine ray` runs an app: python -m flower_dp.simulation.process ORDER.json.

The workers start and import the ClientApp while this process checks the settings and begins the ServerApp.
"""

import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flower_dp.core.checks import SettingsError
from flower_dp.running import preflight
from flower_dp.running.apps import App, Target, read_app

log = logging.getLogger("flwr")


def main(request_file: str) -> None:
    """Run what a request says, and write to its `outcome` how that ended: a status and details, as Flower has them.

    The request has `folder`, `overrides`, `given`, `num_workers`, `num_nodes`, `gpus_per_worker`, `ray_folder`, `only_state`
    and `outcome`. The status is `completed`, `failed`, `refused` where the app's check has refused the settings, or `interrupted`
    after a SIGTERM: the run has then written its statement and a checkpoint.
    """
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
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
    part.replace(outcome)


def _run(app: App, request: dict[str, Any]) -> tuple[str, str]:
    from flower_dp.simulation.grid import RayGrid  # noqa: PLC0415  (after the settings of Python above)
    from flower_dp.simulation.modules import components  # noqa: PLC0415
    from flower_dp.simulation.silent_grid import SilentGrid  # noqa: PLC0415
    from flower_dp.simulation.workers import Workers, start_ray  # noqa: PLC0415

    config = {**app.defaults, **request["overrides"]}
    client, server = components(app)
    if request["only_state"]:
        silent = SilentGrid()
        server()(silent, silent.server_context(config))
        return "failed", "the app has started no strategy of flower-dp"
    start_ray(request["num_workers"], Path(request["ray_folder"]))
    workers = Workers(num_workers=request["num_workers"], gpus=request["gpus_per_worker"])
    grid = RayGrid(client, workers, num_nodes=request["num_nodes"], run_config=config)
    target = Target(app=app, name=app.name, overrides=request["overrides"], given=tuple(request["given"]))
    try:
        preflight.check_settings(target)
    except ValueError as error:
        return "refused", str(error)
    signal.signal(signal.SIGTERM, _interrupt)  # Ray has set its own
    try:
        server()(grid, grid.server_context())
    except SettingsError as error:  # before anything was spent
        return "refused", str(error)
    return "completed", ""


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
    os._exit(0)  # Ray's processes end with this one; to wait for each takes a second
