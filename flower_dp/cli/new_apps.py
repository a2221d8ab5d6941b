"""A new app: flower-dp new."""

from pathlib import Path
from typing import Annotated

import typer

from flower_dp.cli.errors import refuse


def new(
    folder: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The folder of the app, new or empty. Its last part is the app's name.")
    ] = None,
) -> None:
    """Write a Flower app around a model and data of your own, which runs at once.

    It has a small model and scikit-learn's digits, to be replaced by yours.
    """
    from flower_dp.running.new_app import write_app

    if folder is None:
        refuse("NAME is missing")
    path = Path(folder).expanduser()
    try:
        package = write_app(path)
    except (ValueError, OSError) as error:
        refuse(str(error))
    typer.echo(f"{folder}: the model is in {package}/model.py, the data in {package}/data.py, the settings are in pyproject.toml")
    typer.echo(f"run it: flower-dp run {folder}")
