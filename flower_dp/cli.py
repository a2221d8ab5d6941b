"""The command line: flower-dp run | presets | epsilon | calibrate.

Libraries heavier than typer are imported inside the commands, so that `--help` is fast.
"""

import json
import sys
from typing import Annotated, Any, NoReturn

import click
import typer

app = typer.Typer(
    help="Differentially private federated learning with Flower.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

MECHANISMS = ("gaussian", "laplace")
SAMPLINGS = ("none", "poisson", "fixed-size")
RELATIONS = ("add-or-remove-one", "replace-one")

Mechanism = Annotated[str, typer.Option(click_type=click.Choice(MECHANISMS), help="What noise a release gets.")]
Sampling = Annotated[
    str,
    typer.Option(click_type=click.Choice(SAMPLINGS), help="How the clients of a round are drawn; none: all take part."),
]
SamplingRate = Annotated[float | None, typer.Option(help="poisson: each client's chance to be in a round.", show_default=False)]
CohortSize = Annotated[int | None, typer.Option(help="fixed-size: clients in a round.", show_default=False)]
NumClients = Annotated[int | None, typer.Option(help="fixed-size: clients in all.", show_default=False)]
NumRounds = Annotated[int, typer.Option(help="Releases in all, one a round.")]
Delta = Annotated[
    float | None, typer.Option(help="Delta of the guarantee; 0 (laplace only) for pure epsilon.", show_default=False)
]
RelationOption = Annotated[
    str | None,
    typer.Option(
        click_type=click.Choice(RELATIONS),
        help="Which data sets are neighbours. Default: add-or-remove-one; with fixed-size replace-one.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer with a JSON object.")]


@app.callback(invoke_without_command=True)
def _top(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        from flower_dp import __version__  # noqa: PLC0415

        typer.echo(f"flower-dp {__version__}")
    elif context.invoked_subcommand is None:
        _refuse("a command is missing; see flower-dp --help")


@app.command()
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
    gpus_per_worker: Annotated[float, typer.Option(min=0.0, help="The fraction of a GPU that each worker gets.")] = 0.0,
) -> None:
    """Run a Flower app with `flwr run`, on this machine, and leave nothing running.

    Give one of flower-dp's presets, or the folder of a Flower app; without either flower-dp's app runs as it is.

    Exit status: 0 the app ran to its end, 1 it failed, 2 bad options, 130 interrupted.
    """
    from flower_dp import launch, progress, runs, superlink, targets  # noqa: PLC0415

    try:
        what = targets.resolve(target, setting or [])
        overrides = dict(what.overrides)
        from_settings = overrides.pop("output-dir", "")
        if output_dir is not None and from_settings:
            raise ValueError(f"--output-dir={output_dir}: output-dir is set as well ({from_settings}); give one of them")
        folder = runs.new_folder(output_dir or str(from_settings) or None, what.name)
    except (ValueError, OSError) as error:
        _refuse(str(error))
    tells = "output-dir" in what.app.defaults  # an app that writes metrics.jsonl; of any other we show the log
    if tells:
        overrides["output-dir"] = str(folder)
    try:
        with progress.display() as display:
            outcome = launch.launch(
                what.app.folder,
                overrides=overrides,
                output_dir=folder,
                num_workers=workers or launch.default_workers(),
                gpus_per_worker=gpus_per_worker,
                on_progress=display.show,
                on_log=None if tells else typer.echo,
            )
    except launch.Interrupted as signal:
        _complain(f"{signal}; nothing is left running; its folder is {folder}", 128 + signal.signum)
    except superlink.LaunchError as error:
        _complain(str(error), 1)
    if not outcome.completed:
        _complain(f"the run failed: {outcome.details}\nFlower's log is {folder / runs.LOG}", 1)
    statement = folder / runs.STATEMENT_TEXT
    if statement.is_file():
        typer.echo("\n" + statement.read_text(encoding="utf-8"))
    typer.echo(f"results: {folder}")


@app.command()
def presets() -> None:
    """List the presets of flower-dp's app."""
    from flower_dp import targets  # noqa: PLC0415

    own = targets.find_checkout()
    if own is None:
        _refuse("no checkout of flower-dp was found here; presets come with one")
    found = own.presets()
    width = max(map(len, found), default=0)
    for name, path in found.items():
        typer.echo(f"{name:<{width}}  {targets.description(path)}".rstrip())


@app.command()
def epsilon(
    *,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Noise std / clip norm; laplace: scale / L1 clip norm.", show_default=False),
    ] = None,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "none",
    sampling_rate: SamplingRate = None,
    cohort_size: CohortSize = None,
    num_clients: NumClients = None,
    num_rounds: NumRounds = 1,
    delta: Delta = None,
    relation: RelationOption = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a noise multiplier costs: the tight epsilon of a whole run."""
    from flower_dp import checks, quote  # noqa: PLC0415

    try:
        if noise_multiplier is None:
            raise ValueError("--noise-multiplier is missing")
        noise = checks.number("--noise-multiplier", noise_multiplier, at_least=0)
        plan = quote.from_options(
            mechanism=mechanism,
            sampling=sampling,
            sampling_rate=sampling_rate,
            cohort_size=cohort_size,
            num_clients=num_clients,
            num_rounds=num_rounds,
            delta=delta,
            relation=relation,
        )
        _answer(plan.cost(noise), as_json)
    except ValueError as error:
        _refuse(str(error))


@app.command()
def calibrate(
    *,
    epsilon: Annotated[float | None, typer.Option(help="The largest epsilon allowed.", show_default=False)] = None,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "none",
    sampling_rate: SamplingRate = None,
    cohort_size: CohortSize = None,
    num_clients: NumClients = None,
    num_rounds: NumRounds = 1,
    delta: Delta = None,
    relation: RelationOption = None,
    as_json: AsJson = False,
) -> None:
    """Tell the least noise multiplier that keeps a whole run within an epsilon."""
    from flower_dp import checks, quote  # noqa: PLC0415

    try:
        if epsilon is None:
            raise ValueError("--epsilon is missing")
        target = checks.number("--epsilon", epsilon, above=0)
        plan = quote.from_options(
            mechanism=mechanism,
            sampling=sampling,
            sampling_rate=sampling_rate,
            cohort_size=cohort_size,
            num_clients=num_clients,
            num_rounds=num_rounds,
            delta=delta,
            relation=relation,
        )
        _answer(plan.cost(plan.calibrate(target)) | {"target_epsilon": target}, as_json)
    except ValueError as error:
        _refuse(str(error))


def _answer(cost: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(cost, allow_nan=False))
        return
    for key, label in (
        ("noise_multiplier", "noise multiplier"),
        ("epsilon", "epsilon"),
        ("epsilon_rdp", "epsilon by RDP"),
        ("delta", "delta"),
        ("relation", "relation"),
        ("accountant", "accountant"),
    ):
        if key in cost:
            value = "infinite: not private" if cost[key] is None else cost[key]
            typer.echo(f"{label:<16}  {value:.6g}" if isinstance(value, float) else f"{label:<16}  {value}")


def _refuse(message: str) -> NoReturn:
    """End with status 2 and one line."""
    raise click.UsageError(message)


def _complain(message: str, status: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; a bad option ends with status 2 and one line on standard error."""
    try:
        status = app(arguments, prog_name="flower-dp", standalone_mode=False)
    except click.ClickException as error:
        typer.echo("error: " + " ".join(error.format_message().split()), err=True)
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = 130
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
