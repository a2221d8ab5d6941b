"""How a failed command ends: a line for each error on standard error, and an exit status."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click
import typer


def refuse(message: str) -> NoReturn:
    """End with status 2, and an error of each line of the message."""
    raise click.UsageError(message)


@contextmanager
def refusing(*more: type[Exception]) -> Iterator[None]:
    """Refuse what was asked for, as a ValueError or an OSError within this context says it, or an error of more kinds."""
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, *more)
    try:
        yield
    except kinds as error:
        refuse(str(error))


def fail(message: str, status: int) -> NoReturn:
    """End with a status and a message."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)
