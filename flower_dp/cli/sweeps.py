"""Command flower-dp sweep: many runs from one file."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flower_dp.cli.options import fail, refuse

if TYPE_CHECKING:
    from flower_dp.sweeps.folder import SweepFolder


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file: settings, grid, points, seeds.")],
    output_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The sweep's folder: new, or that of the same sweep, to resume it. A dry run needs none."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of simultaneous runs. Default: as many as cores, memory and GPUs allow."),
    ] = None,
    private_selection: Annotated[
        bool,
        typer.Option(
            "--private-selection",
            help="Make a secret, random number of runs, and show only the best one, with the cost of the choice.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Start nothing: report every setting that a run would refuse, or show the command of each run."
        ),
    ] = False,
) -> None:
    """Run settings x seeds, on warm workers, into one folder with a table, a figure and a statement.

    Repeat the command to resume: finished runs are kept, the others continue from their checkpoints. You may add points and seeds
    to FILE; the settings of finished runs can't change.

    Exit status: 0 all runs ended, 1 a run failed, 2 invalid options or settings, 130 interrupted.
    """
    from flower_dp.running.screen import echo
    from flower_dp.running.signals import Interrupted
    from flower_dp.sweeps.pool import LaunchError
    from flower_dp.sweeps.results import TABLE
    from flower_dp.sweeps.sweep import Sweep

    if dry_run:
        _show_commands(file, _folder(output_dir) if output_dir else None, private_selection=private_selection)
        return
    folder = _folder(output_dir)
    again = f"Resume it with: flower-dp sweep {shlex.quote(str(file))} --output-dir {shlex.quote(str(output_dir))}"
    left = f"the runs so far are in {folder.path}"
    if jobs is not None:
        again = f"{again} --jobs {jobs}"
    if private_selection:
        again, left = f"{again} --private-selection", "don't look into the folder before the choice is made"
    try:
        if private_selection:
            _choose(file, folder, jobs)
            return
        plan = Sweep.read(file)
        failed = plan.make(folder, echo, jobs=jobs)
    except ValueError as error:
        refuse(str(error))
    except Interrupted as signal:
        fail(f"{signal}; nothing is left running; {left}\n{again}", 128 + signal.signum)
    except (LaunchError, OSError) as error:
        fail(f"{error}\n{again}", 1)
    typer.echo("\n" + (folder.path / TABLE).read_text(encoding="utf-8").partition("\n\nCommands, ")[0])
    for line in plan.warned(folder):
        typer.echo(line)
    statement = folder.path / "statement.txt"
    if statement.is_file():
        typer.echo("\n" + statement.read_text(encoding="utf-8"))
    typer.echo(f"results: {folder.path}")
    if failed:
        names = "\n".join(f"  {outcome.run.description}: {outcome.details}" for outcome in failed)
        again = "Repeat the command to try them again."
        if any(outcome.status == "refused" for outcome in failed):
            again = f"{again} A refused run needs its app as it was when the run began, or another --output-dir."
        fail(f"{len(failed)} of {len(plan.runs)} runs failed:\n{names}\n{again}", 1)
    if unknown := plan.unknown(folder):
        fail("\n".join([*unknown, f"Correct it in {file} and repeat the command: it makes the tables anew, and no run."]), 2)


def _folder(path: Path | None) -> "SweepFolder":
    from flower_dp.sweeps.folder import SweepFolder

    if path is None:
        refuse("--output-dir: is missing; name the sweep's folder, or add --dry-run")
    return SweepFolder(path.expanduser().absolute())


def _show_commands(file: Path, folder: "SweepFolder | None", *, private_selection: bool) -> None:
    """Show the command of each run, or refuse what a run would refuse."""
    from flower_dp.sweeps import plan
    from flower_dp.sweeps.pool import LaunchError
    from flower_dp.sweeps.private_selection import PrivateSelection
    from flower_dp.sweeps.sweep import Sweep

    try:
        if private_selection:
            choice = PrivateSelection.read(file)
            plan.check([candidate.run for candidate in choice.candidates], forecast=True)
            lines = [choice.description, *(candidate.run.command for candidate in choice.candidates)]
        else:
            sweep = Sweep.read(file)
            sweep.check(folder)
            lines = [run.command for run in sweep.runs]
    except ValueError as error:
        refuse(str(error))
    except (LaunchError, OSError) as error:
        fail(str(error), 1)
    for line in lines:
        typer.echo(line)


def _choose(file: Path, folder: "SweepFolder", jobs: int | None) -> None:
    """Make a random number of runs, and show the best one."""
    from flower_dp.running.run_folder import STATEMENT_TEXT
    from flower_dp.running.screen import echo
    from flower_dp.sweeps.folder import RUNS
    from flower_dp.sweeps.private_selection import CHOSEN, PrivateSelection

    plan = PrivateSelection.read(file)
    plan.make(folder, echo, jobs=jobs)
    typer.echo("\n" + (folder.path / STATEMENT_TEXT).read_text(encoding="utf-8"))
    chosen = folder.path / RUNS / CHOSEN
    typer.echo(f"chosen run: {chosen}" if chosen.is_dir() else "Nothing was chosen: no run was drawn, or no run may be shown.")
