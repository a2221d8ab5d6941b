"""Options that several commands have, and which of a command's options were given."""

from typing import Annotated

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
