"""Commands flower-dp compare and figure: tables and figures of recorded runs."""

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
        str, typer.Option(metavar="NAME", help="Metric to compare: any number in the runs' metrics.jsonl.")
    ] = "accuracy",
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Name curves by text, not by their settings: one text with settings in braces, as '{method}, {epsilon}', or "
            "one for each run or each curve.",
        ),
    ] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Give all runs with the same value of this setting one color, or one line; may be repeated."
        ),
    ] = None,
    x_axis: Annotated[
        str,
        typer.Option(
            click_type=click.Choice(("rounds", "epsilon")),
            help="rounds: draw the metric over rounds and epsilon spent; epsilon: draw its last values over the runs' epsilon.",
        ),
    ] = "rounds",
    table_format: Annotated[
        str,
        typer.Option(
            "--format",
            click_type=click.Choice(_FORMATS),
            help="Format of the table. With any but text, all other lines go to standard error.",
        ),
    ] = "text",
    pivot: Annotated[bool, typer.Option("--pivot", help="Print a column for each epsilon; not for json and csv.")] = False,
    include_unfinished: Annotated[
        bool, typer.Option("--include-unfinished", help="Include unfinished runs, with their rounds so far.")
    ] = False,
) -> None:
    """Draw the curves of runs in one figure, and print a table of their last values.

    Runs that differ only in the seed form one curve: their mean, their standard deviation as error bars, and the largest of their
    epsilons.

    Exit status: 0, or 2 with a line that names the invalid folder or option.
    """
    from flower_dp.reporting import canvas, figures, tables
    from flower_dp.reporting import compare as comparing
    from flower_dp.sweeps.folder import runs_in

    form = (tables.PIVOTS if pivot else tables.FORMATS).get(table_format)
    if form is None:
        refuse(f"--format={table_format}: must be one of {', '.join(tables.PIVOTS)} with --pivot")
    with refusing():
        canvas.file(output)
        paths = [path for folder in folders for path in runs_in(folder)]
        runs = [comparing.read_run(path, metric, include_unfinished=include_unfinished) for path in paths]
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
    resolution: Annotated[int, typer.Option(help="Points per direction, an odd number >= 3.")] = 15,
    distance: Annotated[
        float, typer.Option(help="How far to follow each direction; 1: until every filter has moved by its own norm.")
    ] = 1.0,
    records: Annotated[int, typer.Option(help="Number of test records, drawn at random; more take longer.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the directions and the records.")] = 0,
) -> None:
    """Draw the test loss around the final models of runs: of flower-dp's own tasks, or of an app that names a public-test.

    The directions are random and normalized filter by filter (Li et al. 2018). All runs share one draw and one scale.

    Exit status: 0, or 2 with a line that names the invalid folder or option.
    """
    from flower_dp.reporting import canvas, landscape_figure
    from flower_dp.reporting.landscape import landscapes
    from flower_dp.reporting.past_run import read_past_run

    with refusing():
        canvas.file(output)
        runs = [read_past_run(folder) for folder in folders]
        results = landscapes(runs, resolution=resolution, distance=distance, num_records=records, seed=seed)
        canvas.save(landscape_figure.figure(results), output)
    for result in results:
        typer.echo(f"{result.label}: loss {result.here:.4g}, at most {result.losses.max():.4g} within {distance:g}")
    typer.echo(f"figure: {output}")


@app.command()
def update_norms(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")], output: FigureFile = "update-norms.png"
) -> None:
    """Draw the norms of client updates before the clip, by round: NOT PRIVATE.

    Clients report these norms only in a run with report-client-metrics=true.

    Exit status: 0, or 2 with a line that names the invalid folder.
    """
    from flower_dp.reporting import canvas
    from flower_dp.reporting import update_norms as norms
    from flower_dp.reporting.labels import labels_of
    from flower_dp.reporting.past_run import read_past_run

    with refusing():
        run = read_past_run(folder)
        update_norms = norms.read_update_norms(run)
        (label,) = labels_of([run.config])
        canvas.save(norms.figure(update_norms, label), output)
    typer.echo(norms.in_words(update_norms))
    typer.echo(f"figure: {output}")
