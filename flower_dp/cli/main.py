"""The command line flower-dp, with all its commands."""

import re
import sys
from typing import Annotated, NoReturn

import click
import typer

from flower_dp.cli import accounting, audits, figures, ledgers, plans, runs, sweeps
from flower_dp.cli.options import refuse

app = typer.Typer(
    help="Differentially private federated learning with Flower.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    runs.new,
    runs.run,
    sweeps.sweep,
    runs.statement,
    runs.presets,
    figures.compare,
    accounting.epsilon,
    accounting.calibrate,
    plans.plan,
    audits.audit,
):
    app.command()(_command)
app.add_typer(figures.app, name="figure")
app.add_typer(ledgers.app, name="ledger")


@app.callback(invoke_without_command=True)
def _top(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        from flower_dp import __version__

        typer.echo(f"flower-dp {__version__}")
    elif context.invoked_subcommand is None:
        refuse("a command is missing; see flower-dp --help")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. Invalid options exit with status 2, with one line each on standard error."""
    try:
        status = app(arguments, prog_name="flower-dp", standalone_mode=False)
    except click.ClickException as error:
        for line in error.format_message().splitlines():
            if text := " ".join(line.split()):
                once = re.sub(r"(Did you mean [^?]*[?])( \1)+", r"\1", text)  # click and typer both add it
                typer.echo(f"error: {once}", err=True)
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = 130
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
