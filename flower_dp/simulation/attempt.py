"""An attempt at a run of an app in its run folder: in this process, whose output is the run's log meanwhile."""

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
# Begins to make the grid of an app and its run-config, and returns what waits for it.
Grids = Callable[[apps.App, Config], Callable[[], local_grid.SimulatedGrid]]
OnLine = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """How an attempt has ended.

    Attributes:
        status: `refused` is said of settings before anything was spent; `lost` of a process that has died.
        details: the first line of why it did not complete.
        signum: the signal that has interrupted it.
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
    """Run an app's ServerApp in a run folder, and say how that ended, whatever the app does.

    An app of somebody else works in the run folder, with links to its own files. What ends the run, an interruption too, leaves
    the statement of what was charged, and a checkpoint.

    Args:
        begun: what is run.
        folder: the run folder.
        grids: makes the grid.
        resume: whether the run in the folder goes on (`environment.RESUMED`), or its statement alone is made (`STATED`).
        check: called meanwhile; ValueError, OSError and ImportError refuse the settings.
        on_line: called with every line of the run's metrics.
    """
    with flower_log.logged(folder, go_on=bool(resume), resumed=resume == RESUMED):
        try:
            _run(begun, folder, grids, resume, check, on_line)
        except SettingsError as error:  # before anything was spent
            return LaunchOutcome(status="refused", details=str(error))
        except KeyboardInterrupt as error:
            return LaunchOutcome(status="interrupted", details=flower_log.first_line(error), signum=getattr(error, "signum", 0))
        except StatementOnlyExit:
            return LaunchOutcome(status="completed")
        except BaseException as error:  # an app may end the process
            log.error("Simulation raised an exception", exc_info=error)
            return LaunchOutcome(status="failed", details=flower_log.first_line(error))
    if resume == STATED:
        return LaunchOutcome(status="failed", details="the app has started no strategy of flower-dp")
    return LaunchOutcome(status="completed")


def _run(
    begun: launch_record.LaunchRecord, folder: Path, grids: Grids, resume: str, check: Callable[[], None], on_line: OnLine
) -> None:
    app, config = begun.target.app, begun.target.config
    with ExitStack() as stack:
        if not app.own:
            stack.callback(setattr, sys, "dont_write_bytecode", sys.dont_write_bytecode)
            sys.dont_write_bytecode = True  # somebody else's folder stays as it is
            stack.callback(modules.forget, str(app.folder))  # another app may have modules of the same names
            stack.enter_context(run_workdir.app_files_linked(folder, app.folder))
            stack.enter_context(chdir(folder))
        made = grids(app, config)
        try:
            check()
        except (ValueError, OSError, ImportError) as error:
            raise SettingsError(str(error)) from error
        server = app.server_app()
        stack.enter_context(run_workdir.environment({RUN_FOLDER: str(folder), RESUME: resume}))
        stack.enter_context(run_recorder.watched(config, begun.name, on_line))
        there = stack.enter_context(closing(made()))
        server(there, there.server_context())


def on_ray(
    begun: launch_record.LaunchRecord,
    folder: Path,
    *,
    resume: str,
    check: Callable[[], None],
    started: Callable[[], None],
    on_line: OnLine,
) -> LaunchOutcome:
    """Make an attempt on a Ray of its own, which starts while settings are checked and modules are imported, and ends with it.

    Args:
        begun: what is run, with how many workers, and where they are.
        folder: the run folder.
        resume: see `attempt`.
        check: see `attempt`; the app's own check follows it.
        started: called when Ray is there, before the ServerApp begins.
        on_line: see `attempt`.
    """
    threads = ThreadPoolExecutor(1)
    making: list[Future[local_grid.SimulatedGrid]] = []

    def made(app: apps.App, config: Config) -> local_grid.SimulatedGrid:
        cluster = Cluster(address=address_of(begun.ray_address), bundle=bundled(app)) if begun.ray_address else None
        ray = workers.start_ray(begun.workers, guard.ray_folder(), cluster)
        actors = workers.Workers(num_workers=begun.workers, gpus=begun.gpus_per_worker, cluster=cluster)
        if not begun.gpus_per_worker and not resume:  # a run that goes on can't change it
            workers.log_unused_gpus(ray, "--gpus-per-worker 1")
        return grid.RayGrid(app.client_app(away=cluster is not None), actors, num_nodes=begun.supernodes, run_config=config)

    def begin(app: apps.App, config: Config) -> Callable[[], local_grid.SimulatedGrid]:
        importlib.import_module("ray")  # in one thread: two would wait for each other
        making.append(threads.submit(made, app, config))

        def there() -> local_grid.SimulatedGrid:
            found = making[0].result()
            started()
            return found

        return there

    def checked() -> None:
        check()
        if (app := begun.target.app).check and begun.overrides:  # the defaults are valid
            with plugins.load_plugin(app, app.check) as own:
                own(begun.target.config)

    try:
        return attempt(begun, folder, begin, resume=resume, check=checked, on_line=on_line)
    finally:
        threads.shutdown(wait=False)
        # A thread that uses Ray after its end makes Ray end this process, without a word: such a Ray ends with the process.
        if all(found.done() for found in making):
            workers.stop_ray()


def state(begun: launch_record.LaunchRecord, folder: Path) -> LaunchOutcome:
    """Make the statement of what the run in a folder was charged; nothing is sent."""
    return attempt(begun, folder, lambda app, config: lambda: local_grid.LocalGrid(ClientApp(), 0, config), resume=STATED)
