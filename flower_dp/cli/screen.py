"""What a command shows while runs are made, on standard output that may be closed at any time."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from flower_dp.running.signals import Interrupted


@contextmanager
def shown() -> Iterator[None]:
    """Let output within this context end what the command does, as a signal would, if nobody reads it any longer.

    Standard output is discarded from then on, so that a run that ends can still tell where its statement is.

    Raises:
        Interrupted: by SIGPIPE, in place of BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # no descriptor
            discarded = os.open(os.devnull, os.O_WRONLY)
            os.dup2(discarded, sys.stdout.fileno())
            os.close(discarded)
        raise Interrupted(signal.SIGPIPE) from None


def echo(line: str) -> None:
    """Write a line to standard output; see `shown`."""
    with shown():
        typer.echo(line)
