"""Comparisons and figures of recorded runs: flower-dp compare | figure landscape | update-norms."""

from typing import Annotated

import click
import typer

from flower_dp.cli.options import FigureFile, refuse, refusing

app = typer.Typer(help="Draw a figure of recorded runs.")
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
    group_by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A setting: runs with one value of it have one color, or one line; may be repeated."),
    ] = None,
    x_axis: Annotated[
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
    include_unfinished: Annotated[
        bool, typer.Option("--include-unfinished", help="Include unfinished runs, with the rounds that they have.")
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
    with refusing():
        canvas.file(output)
        each = [one for folder in folders for one in runs_in(folder)]
        runs = [comparing.read_run(folder, metric, include_unfinished=include_unfinished) for folder in each]
        curves = comparing.curves_of(runs, metric, names=label or (), group_by=group_by or ())
        if x_axis == "epsilon":
            drawn = figures.against_epsilon(curves, metric)
        else:
            drawn = figures.figure(curves, metric, grouped=bool(group_by or label))
        canvas.save(drawn, output)
    notes = comparing.notes(curves)
    typer.echo(form(curves, metric, notes))
    machine = table_format != "text"
    for note in notes:
        typer.echo(f"note: {note}", err=machine)
    typer.echo(f"figure: {output}", err=machine)


@app.command()
def landscape(
    folders: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders.")],
    output: FigureFile = "landscape.png",
    resolution: Annotated[int, typer.Option(help="Points a direction, an odd number.")] = 15,
    distance: Annotated[float, typer.Option(help="How far to go; 1: until every filter has moved by its own norm.")] = 1.0,
    records: Annotated[int, typer.Option(help="Test records, drawn at random; more take longer.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the directions and the records.")] = 0,
) -> None:
    """Draw the test loss around the final models of runs of flower-dp's own tasks, or of an app that names a public-test.

    The directions are random and normalized filter by filter (Li et al. 2018), the same draw for all runs, on one scale.

    Exit status: 0, or 2 with a line that names the invalid folder or option.
    """
    from flower_dp.reporting import canvas, landscape_figure
    from flower_dp.reporting.landscape import landscapes
    from flower_dp.reporting.past_run import read_past_run

    with refusing():
        canvas.file(output)
        runs = [read_past_run(folder) for folder in folders]
        found = landscapes(runs, resolution=resolution, distance=distance, num_records=records, seed=seed)
        canvas.save(landscape_figure.figure(found), output)
    for one in found:
        typer.echo(f"{one.label}: loss {one.here:.4g}, at most {one.losses.max():.4g} within {distance:g}")
    typer.echo(f"figure: {output}")


@app.command()
def update_norms(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")], output: FigureFile = "update-norms.png"
) -> None:
    """Draw the norms of client updates before the clip, by round: NOT PRIVATE.

    Clients tell them only in a run with report-client-metrics=true.

    Exit status: 0, or 2 with a line that names the invalid folder.
    """
    from flower_dp.reporting import canvas
    from flower_dp.reporting import update_norms as norms
    from flower_dp.reporting.labels import labels_of
    from flower_dp.reporting.past_run import read_past_run

    with refusing():
        run = read_past_run(folder)
        found = norms.read_update_norms(run)
        (label,) = labels_of([run.config])
        canvas.save(norms.figure(found, label), output)
    typer.echo(norms.in_words(found))
    typer.echo(f"figure: {output}")
