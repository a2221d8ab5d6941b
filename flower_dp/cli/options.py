"""Options that several commands have."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Answer with a JSON object.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")]
FigureFile = Annotated[
    str,
    typer.Option(
        metavar="FILE", help="The figure, of any type that matplotlib writes (.pdf, .svg ...); an existing file is overwritten."
    ),
]
