"""Commands flower-dp new, run, statement and presets: make an app, run it, and rebuild its statement."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flower_dp.cli.options import Settings, given_options, refuse, refusing

# Parameters that a resumed run may change.
_MAY_CHANGE = {"resume", "workers", "ray_address"}


def run(
    target: Annotated[str | None, typer.Argument(metavar="[PRESET | TASK | APP_DIR]")] = None,
    setting: Settings = None,
    output_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write the run to this folder, new or empty. Default: ~/.flower-dp/runs/TIME-NAME."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of worker processes. Default: one per CPU core.")] = None,
    supernodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of SuperNodes to simulate. Default: one per worker; one per client if a stock app gives their number.",
        ),
    ] = None,
    gpus_per_worker: Annotated[float, typer.Option(min=0.0, help="Fraction of a GPU per worker.")] = 0.0,
    ray_address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|auto",
            help="Run the workers on this Ray cluster, of which this machine is a part. Default: Ray on this machine alone.",
            show_default=False,
        ),
    ] = "",
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Resume the run in this folder, with its own settings.")
    ] = None,
) -> None:
    """Run a Flower app on this machine or a Ray cluster, and leave no process running.

    Name one of flower-dp's presets or tasks, or the folder of a Flower app; without a name flower-dp's own app runs. --resume RUN
    continues a run that was interrupted, or whose processes were killed: a round that was charged and not finished stays charged.

    Exit status: 0 the app ran to its end, 1 it failed, 2 invalid options, 130 interrupted.
    """
    if resume is not None:
        if fixed := [option for name, option in given_options().items() if name not in _MAY_CHANGE]:
            refuse(f"{fixed[0]}: can't be used with --resume; a resumed run keeps its app, settings, folder, SuperNodes and GPUs")
        _resume(resume, workers, ray_address)
        return
    _start_ray(workers, ray_address)
    from flower_dp.running import apps, preflight, run_folder
    from flower_dp.running.launch_record import LaunchRecord

    with refusing(ImportError):
        app_run = apps.resolve(target, setting or [])
        overrides = dict(app_run.overrides)
        from_settings = overrides.pop("output-dir", "") if app_run.app.own else ""  # another app may have its own output-dir
        if output_dir is not None and from_settings:
            raise ValueError(f"--output-dir={output_dir}: the settings have output-dir={from_settings} too; give one of them")
        if ray_address:
            num_workers = _on_cluster(ray_address, workers, gpus_per_worker)
        else:
            num_workers = preflight.workers_of(workers, gpus_per_worker)
        begun = LaunchRecord(
            app="" if app_run.app.own else str(app_run.app.folder),
            name=app_run.name,
            overrides=overrides,
            workers=num_workers,
            supernodes=preflight.nodes_of(app_run, supernodes, num_workers),
            gpus_per_worker=gpus_per_worker,
            ray_address=ray_address,
        )
        wanted = output_dir or str(from_settings)
        is_new = not (wanted and Path(wanted).expanduser().exists())
        folder = run_folder.new_folder(wanted or None, app_run.name)

    from flower_dp.cli.launch import launch

    try:
        try:
            begun.write(folder)
        except OSError as error:
            refuse(f"--output-dir={folder}: can't be written: {error.strerror}; take another folder")
        launch(begun, folder, check=lambda: preflight.check_settings(app_run))
    finally:  # a run that did not begin leaves nothing behind
        begun.forget(folder)
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _start_ray(workers: int | None, ray_address: str) -> None:
    """Start Ray while this process resolves and imports the app. If the app is refused, a guard ends Ray."""
    from flower_dp.running.guard import ray_folder
    from flower_dp.running.preflight import default_workers

    if (folder := ray_folder()) is not None and not ray_address and importlib.util.find_spec("ray") is not None:
        from flower_dp.simulation.workers import start_meanwhile

        start_meanwhile(workers or default_workers(), folder)


def _on_cluster(ray_address: str, workers: int | None, gpus: float) -> int:
    """Return the number of workers on a cluster: `workers`, or by default all that fit."""
    from flower_dp.simulation.workers import room

    fit = room(ray_address, gpus)
    if fit < (workers or 1):
        option = f"--gpus-per-worker={gpus:g}" if gpus and not fit else f"--workers={workers or 1}"
        raise ValueError(f"{option}: {fit} workers fit on the cluster, with one CPU core and {gpus:g} GPUs each")
    return workers or fit


def _resume(folder: Path, workers: int | None, ray_address: str) -> None:
    """Resume the run in a folder."""
    from flower_dp.cli.launch import launch, tell_end
    from flower_dp.core.environment import RESUMED
    from flower_dp.running import run_folder
    from flower_dp.running.launch_record import LaunchRecord

    folder = folder.expanduser().absolute()
    with refusing(ImportError):
        begun = LaunchRecord.read(folder)
        if run_folder.is_finished(folder) and (folder / run_folder.STATEMENT_TEXT).is_file():
            typer.echo("The run has ended; there is nothing to resume.")
            tell_end(folder)
            return
        begun = replace(begun, workers=workers or begun.workers, ray_address=ray_address or begun.ray_address)
        if begun.ray_address:
            begun = replace(begun, workers=_on_cluster(begun.ray_address, begun.workers, begun.gpus_per_worker))
    launch(begun, folder, resume=RESUMED)


def statement(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `flower-dp run`.")]) -> None:
    """Rebuild a run's statement from its folder. It covers everything that was charged, however the run ended.

    The run's ServerApp starts, sends nothing, and ends when the statement and the model of the last checkpoint are written.

    Exit status: 0 the statement is in the folder, 1 it could not be rebuilt, 2 invalid options.
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

    paths = apps.presets()
    width = max(map(len, paths), default=0)
    for name, path in paths.items():
        typer.echo(f"{name:<{width}}  {apps.description(path)}".rstrip())


def new(
    folder: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The app's folder, new or empty. Its last part is the app's name.")
    ] = None,
) -> None:
    """Write a Flower app that runs as it is, for you to put your model and data into.

    It has a small model and scikit-learn's digits; replace them by yours.
    """
    from flower_dp.running.new_app import write_app

    if folder is None:
        refuse("NAME: is missing; name the app's folder")
    path = Path(folder).expanduser()
    with refusing():
        package = write_app(path)
    typer.echo(f"{folder}: the model is in {package}/model.py, the data in {package}/data.py, the settings are in pyproject.toml")
    typer.echo(f"Run it with: flower-dp run {folder}")
