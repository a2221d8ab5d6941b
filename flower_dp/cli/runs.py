"""Running an app: flower-dp run | presets."""

from typing import Annotated

import typer

from flower_dp.cli.errors import complain, refuse


def run(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[PRESET | APP_DIR]"),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The run's folder, new or empty. Default: ~/.flower-dp/runs/TIME-NAME.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes. Default: one a CPU core.", show_default=False)
    ] = None,
    supernodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="SuperNodes that the workers play: with stock clients one a client. Default: one a worker.",
            show_default=False,
        ),
    ] = None,
    gpus_per_worker: Annotated[float, typer.Option(min=0.0, help="The fraction of a GPU that each worker gets.")] = 0.0,
) -> None:
    """Run a Flower app with `flwr run`, on this machine, and leave nothing running.

    Give one of flower-dp's presets, or the folder of a Flower app; without either flower-dp's app runs as it is.

    Exit status: 0 the app ran to its end, 1 it failed, 2 bad options, 130 interrupted.
    """
    from flower_dp.running import apps, launch, progress, run_folder, superlink

    try:
        what = apps.resolve(target, setting or [])
        overrides = dict(what.overrides)
        from_settings = overrides.pop("output-dir", "")
        if output_dir is not None and from_settings:
            raise ValueError(f"--output-dir={output_dir}: output-dir is set as well ({from_settings}); give one of them")
        folder = run_folder.new_folder(output_dir or str(from_settings) or None, what.name)
    except (ValueError, OSError) as error:
        refuse(str(error))
    tells = "output-dir" in what.app.defaults  # an app that writes metrics.jsonl; of any other we show the log
    if tells:
        overrides["output-dir"] = str(folder)
    try:
        with apps.unpacked(what.app) as app_dir, progress.display() as display:
            outcome = launch.launch(
                app_dir,
                overrides=overrides,
                output_dir=folder,
                num_workers=workers or launch.default_workers(),
                num_supernodes=supernodes,
                gpus_per_worker=gpus_per_worker,
                on_progress=display.show,
                on_log=None if tells else typer.echo,
            )
    except launch.Interrupted as signal:
        complain(f"{signal}; nothing is left running; its folder is {folder}", 128 + signal.signum)
    except superlink.LaunchError as error:
        complain(str(error), 1)
    statement = folder / run_folder.STATEMENT_TEXT
    if not outcome.completed:
        released = f"\nWhat it released before is in {statement}" if statement.is_file() else ""
        complain(f"the run failed: {outcome.details}\nFlower's log is {folder / run_folder.LOG}{released}", 1)
    if statement.is_file():
        typer.echo("\n" + statement.read_text(encoding="utf-8"))
    typer.echo(f"results: {folder}")


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
