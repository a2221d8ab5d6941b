"""How a failed command ends: a line for each error on standard error, and an exit status."""

from typing import NoReturn

import click
import typer


def refuse(message: str) -> NoReturn:
    """End with status 2, and an error of each line of the message."""
    raise click.UsageError(message)


def fail(message: str, status: int) -> NoReturn:
    """End with a status and a message."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)
