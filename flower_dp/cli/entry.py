"""The console script: runs the command line, or names the extra that is not installed."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

_EXTRAS = {
    **dict.fromkeys(("click", "psutil", "rich", "safetensors", "tomli_w", "typer"), "cli"),
    "matplotlib": "plot",
    **dict.fromkeys(("opacus", "torch"), "torch"),
    "ray": "simulation",
    **dict.fromkeys(("datasets", "flwr_datasets", "mlxtend"), "app"),
    "torchvision": "vision",
}
# Commands that start Ray, and run an app in a process that the app may end or crash.
_GUARDED = ("run", "statement", "sweep")


def main() -> NoReturn:
    """Run the command line and exit. If a package is not installed, exit with status 1 and one line."""
    if sys.argv[1:2] and sys.argv[1] in _GUARDED and hasattr(os, "fork"):
        sys.exit(_guarded())
    sys.exit(_status(None))


def _status(arguments: list[str] | None) -> int:
    try:
        from flower_dp.cli.main import main as run

        run(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        sys.stderr.write(f"error: {package} is not installed: pip install 'flower-dp[{_EXTRAS[package]}]'\n")
        return 1
    except SystemExit as ended:
        return int(ended.code or 0)


def _guarded() -> int:
    """Run the command in a separate process. If it dies, write its run's statement, then report the death."""
    from flower_dp.running.guard import STATE_SECONDS, Guard

    guard = Guard()
    try:
        status, folder = guard.run(partial(_status, None)), guard.said
        if status is None and folder:
            guard.run(partial(_made_statement, folder), STATE_SECONDS)
    finally:
        guard.close()
    if status is not None:
        return status
    from flower_dp.cli.launch import tell_died

    return tell_died(folder, guard.came)


def _made_statement(folder: str) -> int:
    """Write the statement of a run whose process has died, if the run has none; print nothing."""
    from flower_dp.running.run_folder import lacks_statement

    if not lacks_statement(Path(folder)):
        return 0
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    return _status(["statement", folder])


if __name__ == "__main__":
    main()
