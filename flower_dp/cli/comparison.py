"""Comparison of runs: flower-dp compare."""

from typing import Annotated

import click
import typer

from flower_dp.cli.errors import refuse
from flower_dp.cli.options import FigureFile

_FORMATS = ("text", "json", "csv", "latex", "markdown")


def compare(
    folders: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders of sweeps.")],
    output: FigureFile = "comparison.png",
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="The metric to compare: any number in the runs' metrics.jsonl.")
    ] = "accuracy",
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A name of your own, in place of the settings: one with settings in braces, as '{method}, {epsilon}', or one "
            "for each run or each curve.",
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A setting: runs with one value of it have one colour, or one line; may be repeated."),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            click_type=click.Choice(("rounds", "epsilon")),
            help="rounds: over rounds and epsilon spent; epsilon: the last values over the runs' epsilon.",
        ),
    ] = "rounds",
    table_format: Annotated[
        str,
        typer.Option(
            "--format", click_type=click.Choice(_FORMATS), help="Of the table; but for text, all else goes to standard error."
        ),
    ] = "text",
    pivot: Annotated[
        bool, typer.Option("--pivot", help="A table of the metric with a column for each epsilon; not for json and csv.")
    ] = False,
    allow_unfinished: Annotated[
        bool, typer.Option("--allow-unfinished", help="Include unfinished runs, with the rounds that they have.")
    ] = False,
) -> None:
    """Draw the curves of runs in one figure, and print a table of their last values.

    Runs whose settings differ in nothing but the seed are one curve: their mean, with their standard deviation as error bars, and
    the largest of their epsilons.

    Exit status: 0, or 2 with a line that names the invalid folder or option.
    """
    from flower_dp.reporting import canvas, figures, tables
    from flower_dp.reporting import compare as comparing
    from flower_dp.sweeps.folder import runs_in

    form = (tables.PIVOTS if pivot else tables.FORMATS).get(table_format)
    if form is None:
        refuse(
            f"--pivot: --format {table_format} has a line a curve, with all numbers; must be one of {', '.join(tables.PIVOTS)}"
        )
    try:
        canvas.file(output)
        each = [one for folder in folders for one in runs_in(folder)]
        runs = [comparing.read_run(folder, metric, allow_unfinished=allow_unfinished) for folder in each]
        curves = comparing.curves_of(runs, metric, names=label or (), by=by or ())
        if against == "epsilon":
            drawn = figures.against_epsilon(curves, metric)
        else:
            drawn = figures.figure(curves, metric, grouped=bool(by or label))
        canvas.save(drawn, output)
    except (ValueError, OSError) as error:
        refuse(str(error))
    notes = comparing.notes(curves)
    typer.echo(form(curves, metric, notes))
    machine = table_format != "text"
    for note in notes:
        typer.echo(f"note: {note}", err=machine)
    typer.echo(f"figure: {output}", err=machine)
