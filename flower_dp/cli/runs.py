"""Making and running an app: flower-dp new | run | statement | presets."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flower_dp.cli.options import Settings, given, refuse, refusing

# What a run that goes on may change.
_MAY_CHANGE = {"resume", "workers", "ray_address"}


def run(
    target: Annotated[str | None, typer.Argument(metavar="[PRESET | TASK | APP_DIR]")] = None,
    setting: Settings = None,
    output_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="The run folder, new or empty. Default: ~/.flower-dp/runs/TIME-NAME.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes. Default: one per CPU core.")] = None,
    supernodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="SuperNodes to simulate. Default: one per worker; one per client, where a stock app says how many there are.",
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
        Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder, as it was begun.")
    ] = None,
) -> None:
    """Run a Flower app on this machine or a Ray cluster, and leave no process running.

    Give the name of one of flower-dp's presets or tasks, or the folder of a Flower app; else flower-dp's own app runs. A run that
    was interrupted, or whose processes were killed, goes on with --resume RUN: a round that was charged and not finished stays
    charged.

    Exit status: 0 the app ran to its end, 1 it failed, 2 bad options, 130 interrupted.
    """
    if resume is not None:
        if fixed := [option for name, option in given().items() if name not in _MAY_CHANGE]:
            refuse(f"{fixed[0]}: a run that goes on keeps its app, settings, folder, SuperNodes and GPUs")
        _go_on(resume, workers, ray_address)
        return
    _start_ray(workers, ray_address)
    from flower_dp.running import apps, preflight, run_folder
    from flower_dp.running.launch_record import LaunchRecord

    with refusing(ImportError):
        what = apps.resolve(target, setting or [])
        overrides = dict(what.overrides)
        from_settings = overrides.pop("output-dir", "") if what.app.own else ""  # in another app, output-dir is its own setting
        if output_dir is not None and from_settings:
            raise ValueError(f"--output-dir={output_dir}: output-dir is set as well ({from_settings}); give one of them")
        if ray_address:
            num_workers = _on_cluster(ray_address, workers, gpus_per_worker)
        else:
            num_workers = preflight.workers_of(workers, gpus_per_worker)
        begun = LaunchRecord(
            app="" if what.app.own else str(what.app.folder),
            name=what.name,
            overrides=overrides,
            workers=num_workers,
            supernodes=preflight.nodes_of(what, supernodes, num_workers),
            gpus_per_worker=gpus_per_worker,
            ray_address=ray_address,
        )
        wanted = output_dir or str(from_settings)
        is_new = not (wanted and Path(wanted).expanduser().exists())
        folder = run_folder.new_folder(wanted or None, what.name)

    from flower_dp.cli.launch import launch

    try:
        try:
            begun.write(folder)
        except OSError as error:
            refuse(f"--output-dir={folder}: can't be written: {error.strerror}; take another folder")
        launch(begun, folder, check=lambda: preflight.check_settings(what))
    finally:  # of a run that did not begin nothing stays
        begun.forget(folder)
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _start_ray(workers: int | None, ray_address: str) -> None:
    """Let Ray start while this process finds out what it runs, and imports it; a guard ends it if that is refused."""
    from flower_dp.running.guard import ray_folder
    from flower_dp.running.preflight import default_workers

    if (folder := ray_folder()) is not None and not ray_address and importlib.util.find_spec("ray") is not None:
        from flower_dp.simulation.workers import start_meanwhile

        start_meanwhile(workers or default_workers(), folder)


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
    from flower_dp.cli.launch import launch, tell_end
    from flower_dp.core.environment import RESUMED
    from flower_dp.running import run_folder
    from flower_dp.running.launch_record import LaunchRecord

    folder = folder.expanduser().absolute()
    with refusing(ImportError):
        begun = LaunchRecord.read(folder)
        if run_folder.is_finished(folder) and (folder / run_folder.STATEMENT_TEXT).is_file():
            typer.echo("the run has ended, and is not run again")
            tell_end(folder)
            return
        begun = replace(begun, workers=workers or begun.workers, ray_address=ray_address or begun.ray_address)
        if begun.ray_address:
            begun = replace(begun, workers=_on_cluster(begun.ray_address, begun.workers, begun.gpus_per_worker))
    launch(begun, folder, resume=RESUMED)


def statement(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `flower-dp run`.")]) -> None:
    """Make a run's statement again, from its folder: of all that was charged, whatever has ended the run.

    The run's ServerApp starts, sends nothing, and ends when the statement and the model of the last checkpoint are written.

    Exit status: 0 the statement is in the folder, 1 it could not be made, 2 bad options.
    """
    from flower_dp.cli.launch import launch
    from flower_dp.core.environment import STATED
    from flower_dp.running.launch_record import LaunchRecord

    folder = run.expanduser().absolute()
    with refusing():
        begun = LaunchRecord.read(folder)
    launch(begun, folder, resume=STATED)


def presets() -> None:
    """List the presets of flower-dp's app."""
    from flower_dp.running import apps

    found = apps.presets()
    width = max(map(len, found), default=0)
    for name, path in found.items():
        typer.echo(f"{name:<{width}}  {apps.description(path)}".rstrip())


def new(
    folder: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The folder of the app, new or empty. Its last part is the app's name.")
    ] = None,
) -> None:
    """Write a Flower app around a model and data of your own, which runs at once.

    It has a small model and scikit-learn's digits, to be replaced by yours.
    """
    from flower_dp.running.new_app import write_app

    if folder is None:
        refuse("NAME is missing")
    path = Path(folder).expanduser()
    with refusing():
        package = write_app(path)
    typer.echo(f"{folder}: the model is in {package}/model.py, the data in {package}/data.py, the settings are in pyproject.toml")
    typer.echo(f"run it: flower-dp run {folder}")
