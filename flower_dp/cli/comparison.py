"""Runs side by side: flower-dp compare."""

from typing import Annotated

import typer

from flower_dp.cli.errors import refuse


def compare(
    folders: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)],
    output: Annotated[str, typer.Option(metavar="FILE.png", help="The picture; written over.")] = "comparison.png",
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="What to compare: any number that the runs' metrics.jsonl have.")
    ] = "accuracy",
    allow_unfinished: Annotated[
        bool, typer.Option("--allow-unfinished", help="Use what there is of runs without an end.")
    ] = False,
) -> None:
    """Draw the curves of runs into one picture, and tell where they ended.

    Runs whose settings differ in nothing but the seed are one curve: their mean, with their standard deviation as error bars.

    Exit status: 0, or 2 with a line that names the folder at fault.
    """
    from flower_dp.reporting import compare as comparing
    from flower_dp.reporting.figures import draw

    try:
        runs = [comparing.read_run(folder, metric, allow_unfinished=allow_unfinished) for folder in folders]
        curves = comparing.curves_of(runs, metric)
        draw(curves, metric, output)
    except (ValueError, OSError) as error:
        refuse(str(error))
    typer.echo(comparing.table(curves, metric))
    for note in comparing.notes(curves):
        typer.echo(f"note: {note}")
    typer.echo(f"picture: {output}")
