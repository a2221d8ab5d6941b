"""Comparison of runs: flower-dp compare."""

from typing import Annotated

import typer

from flower_dp.cli.errors import refuse


def compare(
    folders: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
    output: Annotated[
        str, typer.Option(metavar="FILE.png", help="The figure; an existing file is overwritten.")
    ] = "comparison.png",
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="The metric to compare: any number in the runs' metrics.jsonl.")
    ] = "accuracy",
    allow_unfinished: Annotated[
        bool, typer.Option("--allow-unfinished", help="Include unfinished runs, with the rounds that they have.")
    ] = False,
) -> None:
    """Draw the curves of runs in one figure, and print a table of their last values.

    Runs whose settings differ in nothing but the seed are one curve: their mean, with their standard deviation as error bars.

    Exit status: 0, or 2 with a line that names the invalid folder.
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
    typer.echo(f"figure: {output}")
