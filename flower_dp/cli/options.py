"""What commands share: options, which of them were given, and how a command that fails ends: a line an error, and a status."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import click
import typer
from click.core import ParameterSource

AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, or unset it by KEY=; may be repeated.")
]
FigureFile = Annotated[
    str,
    typer.Option(
        metavar="FILE", help="The figure, of any type that matplotlib writes (.pdf, .svg ...); an existing file is overwritten."
    ),
]


def given() -> dict[str, str]:
    """Return the parameters of this command that are on the command line, each with its option."""
    context = click.get_current_context()
    return {
        str(param.name): param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        for param in context.command.params
        if context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    }


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
