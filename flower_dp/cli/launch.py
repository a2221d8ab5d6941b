"""One run of an app in its folder: the terminal's display, and the exit of the command."""

import importlib.util
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import typer

from flower_dp.cli.options import fail, refuse
from flower_dp.core.environment import STATED
from flower_dp.running import flower_log, guard, progress
from flower_dp.running.launch_record import LaunchRecord
from flower_dp.running.run_folder import CHECKPOINT, LOG, STATEMENT_TEXT
from flower_dp.running.screen import Screen, own_stream
from flower_dp.running.signals import Interrupted, Signals
from flower_dp.simulation import attempt
from flower_dp.strategies.checkpoint import CheckpointFolder


def launch(begun: LaunchRecord, folder: Path, *, resume: str = "", check: Callable[[], None] = lambda: None) -> None:
    """Run an app in a folder, unless `check` refuses its settings, and report how the run ended."""
    states, log = resume == STATED, folder / LOG
    if not states and importlib.util.find_spec("ray") is None:
        fail("Ray is not installed: pip install 'flower-dp[simulation]'", 1)
    guard.tell(str(folder))
    try:
        own = begun.target.app.own
        with own_stream() as stream, Signals(raises=True) as signals:
            if states:
                ended = attempt.state(begun, folder)
            else:
                with (
                    progress.display(stream) as display,
                    Screen(display, stream, log, goes_on=bool(resume), quiet=own, interrupt=signals.end) as screen,
                ):
                    ended = attempt.on_ray(
                        begun, folder, resume=resume, check=check, started=signals.set_again, on_line=screen.show
                    )
            if ended.signum:
                raise Interrupted(ended.signum)
    except (ValueError, OSError) as error:
        refuse(str(error))
    except Interrupted as error:
        where = f"; its folder is {folder}" if folder.exists() else ""
        fail(f"{error}; nothing is left running{where}\n{_left(folder)}".rstrip(), 128 + error.signum)
    if ended.status == "refused":
        if not resume:
            log.unlink(missing_ok=True)
        refuse(ended.details)
    if ended.status != "completed":
        what = "no statement was made" if states else "the run failed"
        left = _left(folder, failed=True, only_stated=states)
        fail(f"{what}: {ended.details}\n{_first_warning(folder)}Flower's log is {log}\n{left}".rstrip(), 1)
    tell_end(folder)


def tell_end(folder: Path) -> None:
    """Show the statement, the warnings and the folder of a run that has ended."""
    if (statement := folder / STATEMENT_TEXT).is_file():
        typer.echo("\n" + statement.read_text(encoding="utf-8"))
    typer.echo(f"{_first_warning(folder)}results: {folder}")


def tell_died(folder: str, signum: int) -> int:
    """Report that a run's process has died, and what the run has left; return the exit status."""
    path, log = Path(folder), Path(folder, LOG)
    left = _left(path, failed=not signum) if folder else ""
    if signum:
        what = f"interrupted by {signal.Signals(signum).name}; nothing is left running; its folder is {folder}"
    elif folder and log.exists():
        what = f"the run failed: {flower_log.of_a_dead_process(log)}\n{_first_warning(path)}Flower's log is {log}"
    else:
        what = "the process of the command has died; repeat the command to begin anew or to resume"
    typer.echo(f"error: {what}\n{left}".rstrip(), err=True)
    return 128 + signum if signum else 1


def _first_warning(folder: Path) -> str:
    """Return a line with the number of warnings in a run's log, and the first of them; empty if there are none."""
    warnings = flower_log.warnings_of(folder / LOG)
    return f"{flower_log.num_warnings(warnings)}, in {folder / LOG}; the first: {warnings[0]}\n" if warnings else ""


def _left(folder: Path, *, failed: bool = False, only_stated: bool = False) -> str:
    """Return the place of an unfinished run's statement, and the command that resumes the run; empty without a statement."""
    if not (statement := folder / STATEMENT_TEXT).is_file():
        return ""
    stated = f"The statement of everything released so far is {statement}\n"
    if only_stated:
        return stated
    if blocker := CheckpointFolder(folder / CHECKPOINT).resume_blocker():
        return f"{stated}The run can't be resumed: {blocker}"
    how = "If its settings did not cause the failure, resume it with" if failed else "Resume it with"
    return f"{stated}{how}: flower-dp run --resume {shlex.quote(str(folder))}"
