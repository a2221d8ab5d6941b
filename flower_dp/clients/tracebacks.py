"""Where an error came from, for a node's own log. None of it may leave the device: the text of an error may hold a record."""

import os
import sysconfig
import traceback
from pathlib import Path

# Begins each line of a traceback in a node's log; a screen leaves these lines out.
_TRACEBACK = "traceback | "
# Code that a user has not written.
_LIBRARIES = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen ",
    "<eval_with_key>",
)
# Where errors came from whose traceback this process has logged: no more than a few, whatever data do.
_traced: set[str] = set()
_MOST_TRACED = 64


def place_of(error: BaseException) -> str:
    """Return file and line of the user's own code that has raised an error, for the node's own log; empty if nobody knows.

    Where there is none, the place is in a library. It has parentheses, and a space before them.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback as lines of the node's own log, each behind a line break.

    It has the error's text, which may hold a record: it must not leave the device.
    """
    return "".join(f"\n{_TRACEBACK}{line}" for line in "".join(traceback.format_exception(error)).splitlines())


def new_traceback_of(error: BaseException) -> str:
    """Return `traceback_of` an error; empty if this process has logged that of another error on the same lines of code."""
    place = "".join(traceback.format_tb(error.__traceback__))
    if place in _traced or len(_traced) >= _MOST_TRACED:
        return ""
    _traced.add(place)
    return traceback_of(error)
