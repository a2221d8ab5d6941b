"""Figures of recorded runs: flower-dp figure landscape | update-norms."""

from typing import Annotated

import typer

from flower_dp.cli.errors import refuse
from flower_dp.cli.options import FigureFile

app = typer.Typer(help="Draw a figure of recorded runs.")


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

    The directions are random and normalised filter by filter (Li et al. 2018), the same draw for all runs, on one scale.

    Exit status: 0, or 2 with a line that names the invalid folder or option.
    """
    from flower_dp.reporting import canvas, landscape_figure
    from flower_dp.reporting.landscape import landscapes
    from flower_dp.reporting.past_run import read_past_run

    try:
        canvas.file(output)
        runs = [read_past_run(folder) for folder in folders]
        found = landscapes(runs, resolution=resolution, distance=distance, num_records=records, seed=seed)
        canvas.save(landscape_figure.figure(found), output)
    except (ValueError, OSError) as error:
        refuse(str(error))
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

    try:
        run = read_past_run(folder)
        found = norms.read_update_norms(run)
        (label,) = labels_of([run.config])
        canvas.save(norms.figure(found, label), output)
    except (ValueError, OSError) as error:
        refuse(str(error))
    typer.echo(norms.in_words(found))
    typer.echo(f"figure: {output}")
