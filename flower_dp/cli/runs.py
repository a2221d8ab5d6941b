"""Running an app: flower-dp run | presets."""

import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from click.core import ParameterSource

from flower_dp.cli.errors import fail, refuse
from flower_dp.cli.screen import echo, shown

if TYPE_CHECKING:
    from flower_dp.running.launched import Launched
    from flower_dp.running.progress import Display

# In lines that are in the log alone: the traceback of an error on a client.
_TRACEBACK = "traceback | "
# After the first cause of a failing dry run the server's traceback, which follows from it, is in the log alone as well.
_FIRST_CAUSE = "dry run, first cause: "
_SERVERS_TRACEBACK = "Traceback (most recent call last)"
_LOGGED = re.compile(r"(\([^()]*\) )?[A-Z]+\s*:\s")

# Lines of the log that are always shown: of a node whose clients can't train, and why; of noise that is longer than any mean; of
# GPUs that the run leaves alone.
_SHOWN = (
    "can't train: ",
    _FIRST_CAUSE,
    "dry run: a row of the data set is ",
    "dry run: the first record can't be read: ",
    "one round teaches little",
    "the model has learnt nothing",
    "not used by this run: ",
)


class Engine(StrEnum):
    """What runs an app on this machine."""

    RAY = "ray"
    FLOWER = "flower"


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
    engine: Annotated[
        Engine, typer.Option(help="ray: flower-dp's own, with short rounds; flower: Flower's, by `flwr run`.")
    ] = Engine.RAY,
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
            refuse(f"{min(given)}: a run that goes on keeps its app, settings, folder, engine, SuperNodes and GPUs")
        _go_on(resume, workers, ray_address)
        return
    from flower_dp.running import apps, launched, plugins, preflight, run_folder

    try:
        what = apps.resolve(target, setting or [])
        overrides = dict(what.overrides)
        from_settings = overrides.pop("output-dir", "") if what.app.own else ""  # in another app, output-dir is its own setting
        if output_dir is not None and from_settings:
            raise ValueError(f"--output-dir={output_dir}: output-dir is set as well ({from_settings}); give one of them")
        if ray_address:
            num_workers = _on_cluster(ray_address, workers, gpus_per_worker, engine)
        else:
            num_workers = preflight.workers_of(workers, gpus_per_worker)
        num_supernodes = preflight.nodes_of(what, supernodes, num_workers)
        wanted = output_dir or str(from_settings)
        is_new = not (wanted and Path(wanted).expanduser().exists())
        folder = run_folder.new_folder(wanted or None, what.name)
    except (ValueError, OSError, ImportError) as error:
        refuse(str(error))

    def check() -> None:
        preflight.check_settings(what)
        # Of the data, the other engine checks them while it starts. The defaults are valid.
        if what.app.check and overrides and engine is Engine.FLOWER:
            with plugins.loaded(what.app, what.app.check) as own_check:
                own_check({**what.app.defaults, **overrides})

    begun = launched.Launched(
        app="" if what.app.own else str(what.app.folder),
        name=what.name,
        overrides=overrides,
        engine=engine.value,
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
        if supernodes is None and num_supernodes > num_workers:
            typer.echo(f"{num_supernodes} SuperNodes, one per client; --supernodes changes that")
        if engine is Engine.FLOWER and not ray_address and not gpus_per_worker:
            _tell_unused_gpus()
        _launch(begun, folder, check=check)


def _tell_unused_gpus() -> None:
    """Say that a run by Flower's engine leaves this machine's GPUs alone; with the other engine the run's log says it."""
    from flower_dp.running.preflight import num_gpus
    from flower_dp.simulation.workers import unused_gpus

    if line := unused_gpus(num_gpus() or 0, "--gpus-per-worker 1"):
        typer.echo(line)


def _given(**arguments: str) -> set[str]:
    """Return the options on the command line; arguments by what they are called here."""
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    options = {param.name: param.opts[0] for param in context.command.params}
    return {arguments.get(name, options[name]) for name in given}


def _on_cluster(ray_address: str, workers: int | None, gpus: float, engine: str) -> int:
    """Return how many workers run on a cluster: as many as asked for, else all that fit."""
    from flower_dp.simulation import cluster

    if engine == Engine.FLOWER and workers is not None:
        raise ValueError(f"--workers={workers}: with --engine flower there are as many as fit on the cluster; leave it out")
    fit = cluster.room(ray_address, gpus)
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
            ray_only = begun.workers if begun.engine == Engine.RAY else None
            begun = replace(begun, workers=_on_cluster(begun.ray_address, ray_only, begun.gpus_per_worker, begun.engine))
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


def _launch(begun: "Launched", folder: Path, *, resume: str = "", check: Callable[[], None] | None = None) -> None:
    """Run an app in a folder, unless `check` refuses its settings, and tell how that ended."""
    from flower_dp.core.environment import STATED
    from flower_dp.running import apps, launch, progress, run_folder, superlink, workplace
    from flower_dp.running.signals import Interrupted

    try:
        app, address = begun.target.app, ""
        if begun.ray_address and resume != STATED:
            from flower_dp.simulation import cluster

            address = cluster.address_of(begun.ray_address)
        with ExitStack() as stack:
            if not app.own:
                stack.enter_context(workplace.app_files_linked(folder, app.folder))
            states = resume == STATED  # its rounds, and what they logged, have been shown
            screen = _Screen(stack.enter_context(progress.display()), quiet=app.own or states)
            outcome = launch.launch(
                app.folder if begun.engine == Engine.RAY else stack.enter_context(apps.unpacked(app, begun.overrides)),
                overrides=begun.overrides,
                output_dir=folder,
                working_dir=None if app.own else folder,
                num_workers=begun.workers,
                num_supernodes=begun.supernodes,
                gpus_per_worker=begun.gpus_per_worker,
                on_progress=(lambda _: None) if states else screen.show,
                on_log=screen.tell,
                engine="flower" if begun.engine == Engine.FLOWER else "ray",
                ray_address=address,
                resume=resume,
                check=check,
            )
    except ValueError as error:
        refuse(str(error))
    except Interrupted as signal:
        where = f"; its folder is {folder}" if folder.exists() else ""
        fail(f"{signal}; nothing is left running{where}\n{_left(folder)}".rstrip(), 128 + signal.signum)
    except (superlink.LaunchError, OSError) as error:
        fail(str(error), 1)
    if not outcome.completed:
        what = "no statement was made" if resume == STATED else "the run failed"
        left = _left(folder, failed=True, only_stated=resume == STATED)
        fail(f"{what}: {outcome.details}\n{_first_warning(folder)}Flower's log is {folder / run_folder.LOG}\n{left}".rstrip(), 1)
    _tell_end(folder)


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


class _Screen:
    """Shows the metrics of a run, the app's log until the first metrics appear, and warnings that explain a useless result."""

    def __init__(self, display: "Display", *, quiet: bool) -> None:
        self._display = display
        self._quiet = quiet
        self._told_cause = self._in_traceback = False

    def show(self, metrics: Mapping[str, Any]) -> None:
        self._quiet = True
        with shown():
            self._display.show(metrics)

    def tell(self, line: str) -> None:
        self._told_cause |= _FIRST_CAUSE in line
        if line.startswith(_SERVERS_TRACEBACK):
            self._in_traceback = self._told_cause
        elif _LOGGED.match(line):
            self._in_traceback = False
        left_out = self._in_traceback or _TRACEBACK in line
        if not left_out and (not self._quiet or any(text in line for text in _SHOWN)):
            echo(line)


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that did not start."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def presets() -> None:
    """List the presets of flower-dp's app."""
    from flower_dp.running import apps

    try:
        found = apps.own_app().presets()
    except ValueError as error:
        refuse(str(error))
    width = max(map(len, found), default=0)
    for name, path in found.items():
        typer.echo(f"{name:<{width}}  {apps.description(path)}".rstrip())
