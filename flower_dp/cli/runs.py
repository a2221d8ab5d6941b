"""Running an app: flower-dp run | presets."""

import importlib.util
import shlex
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from click.core import ParameterSource

from flower_dp.cli.errors import fail, refuse

if TYPE_CHECKING:
    from flower_dp.running.launched import Launched


def run(
    target: Annotated[str | None, typer.Argument(metavar="[PRESET | TASK | APP_DIR]")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, or unset it by KEY=; may be repeated."),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The run folder, new or empty. Default: ~/.flower-dp/runs/TIME-NAME.", show_default=False
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes. Default: one per CPU core.", show_default=False)
    ] = None,
    supernodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="SuperNodes to simulate. Default: one per worker; one per client, where a stock app says how many there are.",
            show_default=False,
        ),
    ] = None,
    gpus_per_worker: Annotated[float, typer.Option(min=0.0, help="The fraction of a GPU that each worker gets.")] = 0.0,
    ray_address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|auto",
            help="Run the workers on this Ray cluster, to which this machine belongs. Default: Ray on this machine alone.",
            show_default=False,
        ),
    ] = "",
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder, as it was begun.", show_default=False)
    ] = None,
) -> None:
    """Run a Flower app on this machine or a Ray cluster, and leave no process running.

    Give the name of one of flower-dp's presets or tasks, or the folder of a Flower app; else flower-dp's own app runs. A run that
    was interrupted, or whose processes were killed, goes on with --resume RUN: a round that was charged and not finished stays
    charged.

    Exit status: 0 the app ran to its end, 1 it failed, 2 bad options, 130 interrupted.
    """
    if resume is not None:
        if given := _given(target="PRESET") - {"--resume", "--workers", "--ray-address"}:
            refuse(f"{min(given)}: a run that goes on keeps its app, settings, folder, SuperNodes and GPUs")
        _go_on(resume, workers, ray_address)
        return
    _start_ray(workers, ray_address)
    from flower_dp.running import apps, launched, preflight, run_folder

    try:
        what = apps.resolve(target, setting or [])
        overrides = dict(what.overrides)
        from_settings = overrides.pop("output-dir", "") if what.app.own else ""  # in another app, output-dir is its own setting
        if output_dir is not None and from_settings:
            raise ValueError(f"--output-dir={output_dir}: output-dir is set as well ({from_settings}); give one of them")
        if ray_address:
            num_workers = _on_cluster(ray_address, workers, gpus_per_worker)
        else:
            num_workers = preflight.workers_of(workers, gpus_per_worker)
        num_supernodes = preflight.nodes_of(what, supernodes, num_workers)
        wanted = output_dir or str(from_settings)
        is_new = not (wanted and Path(wanted).expanduser().exists())
        folder = run_folder.new_folder(wanted or None, what.name)
    except (ValueError, OSError, ImportError) as error:
        refuse(str(error))

    begun = launched.Launched(
        app="" if what.app.own else str(what.app.folder),
        name=what.name,
        overrides=overrides,
        workers=num_workers,
        supernodes=num_supernodes,
        gpus_per_worker=gpus_per_worker,
        ray_address=ray_address,
    )
    with ExitStack() as stack:
        if is_new:
            stack.callback(_remove_if_empty, folder)
        stack.callback(begun.forget, folder)
        try:
            begun.write(folder)
        except OSError as error:
            refuse(f"--output-dir={folder}: can't be written: {error.strerror}; take another folder")
        _launch(begun, folder, check=lambda: preflight.check_settings(what))


def _start_ray(workers: int | None, ray_address: str) -> None:
    """Let Ray start while this process finds out what it runs, and imports it; a guard ends it if that is refused."""
    from flower_dp.running.guard import ray_folder
    from flower_dp.running.preflight import default_workers

    if (folder := ray_folder()) is not None and not ray_address and importlib.util.find_spec("ray") is not None:
        from flower_dp.simulation.workers import start_meanwhile

        start_meanwhile(workers or default_workers(), folder)


def _given(**arguments: str) -> set[str]:
    """Return the options on the command line; arguments by what they are called here."""
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    options = {param.name: param.opts[0] for param in context.command.params}
    return {arguments.get(name, options[name]) for name in given}


def _on_cluster(ray_address: str, workers: int | None, gpus: float) -> int:
    """Return how many workers run on a cluster: as many as asked for, else all that fit."""
    from flower_dp.simulation.workers import room

    fit = room(ray_address, gpus)
    if fit < (workers or 1):
        named = f"--gpus-per-worker={gpus:g}" if gpus and not fit else f"--workers={workers or 1}"
        raise ValueError(f"{named}: {fit} workers fit on the cluster, with one CPU core and {gpus:g} GPUs each")
    return workers or fit


def _go_on(folder: Path, workers: int | None, ray_address: str) -> None:
    """Go on with a run."""
    from flower_dp.core.environment import RESUMED
    from flower_dp.running import launched, run_folder

    folder = folder.expanduser().absolute()
    try:
        begun = launched.Launched.read(folder)
        if run_folder.is_finished(folder) and (folder / run_folder.STATEMENT_TEXT).is_file():
            typer.echo("the run has ended, and is not run again")
            _tell_end(folder)
            return
        begun = replace(begun, workers=workers or begun.workers, ray_address=ray_address or begun.ray_address)
        if begun.ray_address:
            begun = replace(begun, workers=_on_cluster(begun.ray_address, begun.workers, begun.gpus_per_worker))
    except (ValueError, OSError, ImportError) as error:
        refuse(str(error))
    _launch(begun, folder, resume=RESUMED)


def statement(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `flower-dp run`.", show_default=False)],
) -> None:
    """Make a run's statement again, from its folder: of all that was charged, whatever has ended the run.

    The run's ServerApp starts, sends nothing, and ends when the statement and the model of the last checkpoint are written.

    Exit status: 0 the statement is in the folder, 1 it could not be made, 2 bad options.
    """
    from flower_dp.core.environment import STATED
    from flower_dp.running import launched

    folder = run.expanduser().absolute()
    try:
        begun = launched.Launched.read(folder)
    except ValueError as error:
        refuse(str(error))
    _launch(begun, folder, resume=STATED)


def _launch(begun: "Launched", folder: Path, *, resume: str = "", check: Callable[[], None] = lambda: None) -> None:
    """Run an app in a folder, unless `check` refuses its settings, and tell how that ended."""
    from flower_dp.core.environment import STATED
    from flower_dp.running import guard, progress, run_folder
    from flower_dp.running.screen import Screen, own_stream
    from flower_dp.running.signals import Interrupted, Signals
    from flower_dp.simulation import attempt

    states = resume == STATED  # its rounds, and what they logged, have been shown
    log = folder / run_folder.LOG
    if not states and importlib.util.find_spec("ray") is None:
        fail("Ray is not installed: pip install 'flower-dp[simulation]'", 1)
    guard.tell(str(folder))
    try:
        own = begun.target.app.own
        with (
            own_stream() as stream,
            Signals(raises=True) as signals,
            progress.display(stream) as display,
            Screen(display, stream, folder, goes_on=bool(resume), rows=not states, quiet=own or states, interrupt=signals.end),
        ):
            if states:
                ended = attempt.state(begun, folder)
            else:
                ended = attempt.on_ray(begun, folder, resume=resume, check=check, started=signals.set_again)
            if ended.signum:
                raise Interrupted(ended.signum)
    except (ValueError, OSError) as error:
        refuse(str(error))
    except Interrupted as error:
        where = f"; its folder is {folder}" if folder.exists() else ""
        fail(f"{error}; nothing is left running{where}\n{_left(folder)}".rstrip(), 128 + error.signum)
    if ended.status == "refused":
        if not resume:
            log.unlink(missing_ok=True)
        refuse(ended.details)
    if ended.status != "completed":
        what = "no statement was made" if states else "the run failed"
        left = _left(folder, failed=True, only_stated=states)
        fail(f"{what}: {ended.details}\n{_first_warning(folder)}Flower's log is {log}\n{left}".rstrip(), 1)
    _tell_end(folder)


def tell_died(folder: str, signum: int) -> int:
    """Tell that the process of a run has died, with what it has left; return the exit status."""
    from flower_dp.running import flower_log, run_folder

    path = Path(folder)
    if not folder or not (path / run_folder.LOG).exists():
        what, left = "the process of the command has died; the same command begins anew, or goes on", ""
    else:
        log = path / run_folder.LOG
        what = f"the run failed: {flower_log.of_a_dead_process(log)}\n{_first_warning(path)}Flower's log is {log}"
        left = _left(path, failed=True)
    if signum:
        name = signal.Signals(signum).name
        what, left = f"interrupted by {name}; nothing is left running; its folder is {folder}", _left(path) if folder else ""
    typer.echo(f"error: {what}\n{left}".rstrip(), err=True)
    return 128 + signum if signum else 1


def _first_warning(folder: Path) -> str:
    """Return a line with the number of warnings in a run's log, and the first of them; empty if there are none."""
    from flower_dp.running import flower_log, run_folder

    warnings = flower_log.warnings_of(folder / run_folder.LOG)
    return f"{flower_log.num_warnings(warnings)}, in {folder / run_folder.LOG}; the first: {warnings[0]}\n" if warnings else ""


def _tell_end(folder: Path) -> None:
    """Show what a run that has ended has left."""
    from flower_dp.running import run_folder

    statement = folder / run_folder.STATEMENT_TEXT
    if statement.is_file():
        typer.echo("\n" + statement.read_text(encoding="utf-8"))
    typer.echo(f"{_first_warning(folder)}results: {folder}")


def _left(folder: Path, *, failed: bool = False, only_stated: bool = False) -> str:
    """Return where the statement of a run that did not end is, and how the run goes on; empty if it has none."""
    from flower_dp.running import run_folder
    from flower_dp.strategies.checkpoint import CheckpointFolder

    statement = folder / run_folder.STATEMENT_TEXT
    if not statement.is_file():
        return ""
    told = f"What it released before is in {statement}\n"
    if only_stated:
        return told
    if why := CheckpointFolder(folder / run_folder.CHECKPOINT).why_stuck():
        return f"{told}It can't go on: {why}"
    goes_on = "Unless its settings are why it failed, it goes on with" if failed else "It goes on with"
    return f"{told}{goes_on}: flower-dp run --resume {shlex.quote(str(folder))}"


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that did not start."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def presets() -> None:
    """List the presets of flower-dp's app."""
    from flower_dp.running import apps

    found = apps.presets()
    width = max(map(len, found), default=0)
    for name, path in found.items():
        typer.echo(f"{name:<{width}}  {apps.description(path)}".rstrip())
