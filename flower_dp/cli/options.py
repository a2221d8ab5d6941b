"""Options that commands share, and the exit of a command that fails: one line per error, and a status."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import click
import typer
from click.core import ParameterSource

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; KEY= unsets it. May be repeated.")
]
FigureFile = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="The figure's file, of any type that matplotlib writes (.pdf, .svg, ...). An existing file is overwritten.",
    ),
]


def given_options() -> dict[str, str]:
    """Return the parameters that were given on the command line, each with its option."""
    context = click.get_current_context()
    return {
        str(param.name): param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        for param in context.command.params
        if context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    }


def refuse(message: str) -> NoReturn:
    """Exit with status 2 and one error per line of the message."""
    raise click.UsageError(message)


@contextmanager
def refusing(*more: type[Exception]) -> Iterator[None]:
    """Turn a ValueError or an OSError of this context, or an error of more kinds, into a refusal with its message."""
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, *more)
    try:
        yield
    except kinds as error:
        refuse(str(error))


def fail(message: str, status: int) -> NoReturn:
    """Exit with a status and a message."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)
