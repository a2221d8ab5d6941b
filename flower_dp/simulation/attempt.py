"""One attempt at an app's run in its run folder: in this process, whose output goes to the run's log meanwhile."""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, chdir, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flwr.clientapp import ClientApp

from flower_dp.core.checks import SettingsError
from flower_dp.core.environment import RESUME, RESUMED, RUN_FOLDER, STATED
from flower_dp.running import apps, flower_log, guard, launch_record, modules, plugins, run_recorder, run_workdir, values
from flower_dp.simulation import grid, local_grid, workers
from flower_dp.simulation.cluster import Cluster, address_of, bundled
from flower_dp.strategies.run_lifecycle import StatementOnlyExit

log = logging.getLogger("flwr")

Config = Mapping[str, values.Value]
# Starts to make the grid of an app and its run-config, and returns a function that waits for the grid.
Grids = Callable[[apps.App, Config], Callable[[], local_grid.SimulatedGrid]]
OnLine = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """The outcome of an attempt.

    Attributes:
        status: end of the attempt; `refused`: its settings are invalid, and nothing was charged; `lost`: its process died.
        details: first line of the error, empty if the attempt completed.
        signum: signal that interrupted the attempt; 0 for none.
    """

    status: Literal["completed", "failed", "refused", "interrupted", "lost"]
    details: str = ""
    signum: int = 0


def attempt(
    begun: launch_record.LaunchRecord,
    folder: Path,
    grids: Grids,
    *,
    resume: str = "",
    check: Callable[[], None] = lambda: None,
    on_line: OnLine = lambda line: None,
) -> LaunchOutcome:
    """Run an app's ServerApp in a run folder, and return the outcome, whatever the app does.

    A user's app works in the run folder, with links to its own files. An error or an interruption leaves the statement of what
    was charged, and a checkpoint.

    Args:
        begun: app, settings and resources of the run.
        folder: run folder.
        grids: function that makes the grid.
        resume: `environment.RESUMED` to resume the run in the folder, `STATED` to write its statement alone, "" for a new run.
        check: function called while the grid is made; its ValueError, OSError or ImportError refuses the settings.
        on_line: function called with every line of the run's metrics.
    """
    with flower_log.logged(folder, append=bool(resume), resumed=resume == RESUMED):
        try:
            _run(begun, folder, grids, resume, check, on_line)
        except SettingsError as error:  # before anything was charged
            return LaunchOutcome(status="refused", details=str(error))
        except KeyboardInterrupt as error:
            return LaunchOutcome(status="interrupted", details=flower_log.first_line(error), signum=getattr(error, "signum", 0))
        except StatementOnlyExit:
            return LaunchOutcome(status="completed")
        except BaseException as error:  # an app may end the process
            log.error("Simulation raised an exception", exc_info=error)
            return LaunchOutcome(status="failed", details=flower_log.first_line(error))
    if resume == STATED:
        return LaunchOutcome(status="failed", details="the app started no strategy of flower-dp, so there is no statement")
    return LaunchOutcome(status="completed")


def _run(
    begun: launch_record.LaunchRecord, folder: Path, grids: Grids, resume: str, check: Callable[[], None], on_line: OnLine
) -> None:
    app, config = begun.target.app, begun.target.config
    with ExitStack() as stack:
        if not app.own:
            stack.callback(setattr, sys, "dont_write_bytecode", sys.dont_write_bytecode)
            sys.dont_write_bytecode = True  # no __pycache__ in a user's folder
            stack.callback(modules.forget, str(app.folder))  # another app may have modules of the same names
            stack.enter_context(run_workdir.app_files_linked(folder, app.folder))
            stack.enter_context(chdir(folder))
        wait_for_grid = grids(app, config)
        try:
            check()
        except (ValueError, OSError, ImportError) as error:
            raise SettingsError(str(error)) from error
        server = app.server_app()
        stack.enter_context(run_workdir.environment({RUN_FOLDER: str(folder), RESUME: resume}))
        stack.enter_context(run_recorder.watched(config, begun.name, on_line))
        made = stack.enter_context(closing(wait_for_grid()))
        server(made, made.server_context())


def on_ray(
    begun: launch_record.LaunchRecord,
    folder: Path,
    *,
    resume: str,
    check: Callable[[], None],
    started: Callable[[], None],
    on_line: OnLine,
) -> LaunchOutcome:
    """Make an attempt on a Ray that ends with it. Ray starts while settings are checked and modules are imported.

    Args:
        begun: app, settings and resources of the run.
        folder: run folder.
        resume: see `attempt`.
        check: see `attempt`; the app's own check follows it.
        started: function called when Ray has started, before the ServerApp begins.
        on_line: see `attempt`.
    """
    threads = ThreadPoolExecutor(1)
    making: list[Future[local_grid.SimulatedGrid]] = []

    def made(app: apps.App, config: Config) -> local_grid.SimulatedGrid:
        cluster = Cluster(address=address_of(begun.ray_address), bundle=bundled(app)) if begun.ray_address else None
        ray = workers.start_ray(begun.workers, guard.ray_folder(), cluster)
        actors = workers.Workers(num_workers=begun.workers, gpus=begun.gpus_per_worker, cluster=cluster)
        if not begun.gpus_per_worker and not resume:  # a resumed run keeps its GPUs
            workers.log_unused_gpus(ray, "--gpus-per-worker 1")
        return grid.RayGrid(app.client_app(away=cluster is not None), actors, num_nodes=begun.supernodes, run_config=config)

    def begin(app: apps.App, config: Config) -> Callable[[], local_grid.SimulatedGrid]:
        importlib.import_module("ray")  # in this thread alone: two threads that import Ray would wait for each other
        making.append(threads.submit(made, app, config))

        def wait() -> local_grid.SimulatedGrid:
            ray_grid = making[0].result()
            started()
            return ray_grid

        return wait

    def checked() -> None:
        check()
        if (app := begun.target.app).check and begun.overrides:  # the defaults are valid
            with plugins.load_plugin(app, app.check) as app_check:
                app_check(begun.target.config)

    try:
        return attempt(begun, folder, begin, resume=resume, check=checked, on_line=on_line)
    finally:
        threads.shutdown(wait=False)
        # If a thread uses Ray after its end, Ray ends this process without an error. Then leave Ray to the end of the process.
        if all(future.done() for future in making):
            workers.stop_ray()


def state(begun: launch_record.LaunchRecord, folder: Path) -> LaunchOutcome:
    """Write the statement of everything that the run in a folder was charged. Nothing is sent."""
    return attempt(begun, folder, lambda app, config: lambda: local_grid.LocalGrid(ClientApp(), 0, config), resume=STATED)
