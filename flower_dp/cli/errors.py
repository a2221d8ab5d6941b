"""How a failed command ends: one line on standard error, and an exit status."""

from typing import NoReturn

import click
import typer


def refuse(message: str) -> NoReturn:
    """End with status 2 and one line."""
    raise click.UsageError(message)


def fail(message: str, status: int) -> NoReturn:
    """End with a status and a message."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)
