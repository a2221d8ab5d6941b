"""Running an app: flower-dp run | presets."""

from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flower_dp.cli.errors import fail, refuse

if TYPE_CHECKING:
    from flower_dp.running.progress import Display


# Lines of the log that are always shown: of a node whose clients can't train, and of noise that is longer than any mean.
_SHOWN = ("can't train: ", "one round teaches little")


class Engine(StrEnum):
    """What runs an app on this machine."""

    RAY = "ray"
    FLOWER = "flower"


def run(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[PRESET | TASK | APP_DIR]"),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The run folder, new or empty. Default: ~/.flower-dp/runs/TIME-NAME.",
            show_default=False,
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
) -> None:
    """Run a Flower app on this machine, and leave no process running.

    Give the name of one of flower-dp's presets or tasks, or the folder of a Flower app; else flower-dp's own app runs.

    Exit status: 0 the app ran to its end, 1 it failed, 2 bad options, 130 interrupted.
    """
    from flower_dp.running import apps, launch, plugins, preflight, progress, run_folder, superlink, workplace

    try:
        what = apps.resolve(target, setting or [])
        overrides = dict(what.overrides)
        from_settings = overrides.pop("output-dir", "") if what.app.own else ""  # in another app, output-dir is its own setting
        if output_dir is not None and from_settings:
            raise ValueError(f"--output-dir={output_dir}: output-dir is set as well ({from_settings}); give one of them")
        num_workers = preflight.workers_of(workers, gpus_per_worker)
        num_supernodes = preflight.nodes_of(what, supernodes, num_workers)
        preflight.check_settings(what)
        # Of the data, the other engine checks them while it starts. The defaults are valid.
        if what.app.check and overrides and engine is Engine.FLOWER:
            with plugins.loaded(what.app, what.app.check) as check:
                check({**what.app.defaults, **overrides})
        wanted = output_dir or str(from_settings)
        is_new = not (wanted and Path(wanted).expanduser().exists())
        folder = run_folder.new_folder(wanted or None, what.name)
    except (ValueError, OSError) as error:
        refuse(str(error))
    try:
        with ExitStack() as stack:
            if is_new:
                stack.callback(_remove_if_empty, folder)
            if not what.app.own:
                stack.enter_context(workplace.app_files_linked(folder, what.app.folder))
            if supernodes is None and num_supernodes > num_workers:
                typer.echo(f"{num_supernodes} SuperNodes, one per client; --supernodes changes that")
            screen = _Screen(stack.enter_context(progress.display()), quiet=what.app.own)
            outcome = launch.launch(
                what.app.folder if engine is Engine.RAY else stack.enter_context(apps.unpacked(what.app, overrides)),
                overrides=overrides,
                output_dir=folder,
                working_dir=None if what.app.own else folder,
                num_workers=num_workers,
                num_supernodes=num_supernodes,
                gpus_per_worker=gpus_per_worker,
                on_progress=screen.show,
                on_log=screen.tell,
                engine=engine.value,
            )
    except ValueError as error:
        refuse(str(error))
    except launch.Interrupted as signal:
        where = f"; its folder is {folder}" if folder.exists() else ""
        fail(f"{signal}; nothing is left running{where}", 128 + signal.signum)
    except (superlink.LaunchError, OSError) as error:
        fail(str(error), 1)
    statement = folder / run_folder.STATEMENT_TEXT
    if not outcome.completed:
        released = f"\nWhat it released before is in {statement}" if statement.is_file() else ""
        fail(f"the run failed: {outcome.details}\nFlower's log is {folder / run_folder.LOG}{released}", 1)
    if statement.is_file():
        typer.echo("\n" + statement.read_text(encoding="utf-8"))
    typer.echo(f"results: {folder}")


class _Screen:
    """Shows the metrics of a run, the app's log until the first metrics appear, and warnings that explain a useless result."""

    def __init__(self, display: "Display", *, quiet: bool) -> None:
        self._display = display
        self._quiet = quiet

    def show(self, metrics: Mapping[str, Any]) -> None:
        self._quiet = True
        self._display.show(metrics)

    def tell(self, line: str) -> None:
        if not self._quiet or any(text in line for text in _SHOWN):
            typer.echo(line)


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
