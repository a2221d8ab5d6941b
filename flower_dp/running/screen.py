"""What a command shows while runs are made, on standard output that may be closed at any time."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

import typer

from flower_dp.running.flower_log import plain
from flower_dp.running.progress import Display
from flower_dp.running.run_folder import LOG, METRICS
from flower_dp.running.signals import Interrupted

# In lines that are in the log alone: the traceback of an error on a client.
_TRACEBACK = "traceback | "
# After the first cause of a failing dry run the server's traceback, which follows from it, is in the log alone as well.
_FIRST_CAUSE = "dry run, first cause: "
_SERVERS_TRACEBACK = "Traceback (most recent call last)"
_LOGGED = re.compile(r"(\([^()]*\) )?[A-Z]+\s*:\s")
# Lines of the log that are always shown: of a node whose clients can't train, and why; of noise that is longer than any mean; of
# GPUs that the run leaves alone.
_SHOWN = (
    "can't train: ",
    _FIRST_CAUSE,
    "dry run: a row of the data set is ",
    "dry run: the first record can't be read: ",
    "one round teaches little",
    "the model has learnt nothing",
    "not used by this run: ",
)
_LOOK_SECONDS = 0.1


@contextmanager
def shown(stream: TextIO | None = None) -> Iterator[None]:
    """Let output within this context end what the command does, as a signal would, if nobody reads it any longer.

    The stream, standard output by default, is discarded from then on, so that a run that ends can still tell where its statement
    is.

    Raises:
        Interrupted: by SIGPIPE, in place of BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # no descriptor
            discarded = os.open(os.devnull, os.O_WRONLY)
            os.dup2(discarded, (stream or sys.stdout).fileno())
            os.close(discarded)
        raise Interrupted(signal.SIGPIPE) from None


def echo(line: str, stream: TextIO | None = None) -> None:
    """Write a line to a stream, standard output by default; see `shown`."""
    with shown(stream):
        typer.echo(line, file=stream)


@contextmanager
def own_stream() -> Iterator[TextIO]:
    """Yield a stream to what is standard output now, which stays that while this process writes to a log."""
    try:
        copy = os.dup(1) if sys.stdout.fileno() == 1 else None
    except (OSError, ValueError):  # not of the system: in a test, say
        copy = None
    if copy is None:
        yield sys.stdout
        return
    with open(copy, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1) as stream:
        try:
            yield stream
        finally:
            with suppress(BrokenPipeError):
                stream.flush()


class Screen:
    """Shows the metrics of a run, its log until the first metrics appear, and warnings that explain a useless result.

    The run folder is followed within this context.

    Args:
        display: for the metrics.
        stream: for lines of the log.
        folder: the run folder.
        goes_on: whether what is in it already was shown by an earlier process; its file of metrics is then replaced.
        rows: whether rounds are shown.
        quiet: whether the log is not shown before the metrics either.
        interrupt: called with SIGPIPE if nobody reads the stream any longer.
    """

    def __init__(
        self,
        display: Display,
        stream: TextIO | None,
        folder: Path,
        *,
        goes_on: bool,
        rows: bool = True,
        quiet: bool,
        interrupt: Callable[[int], None],
    ) -> None:
        self._display, self._stream, self._quiet, self._interrupt = display, stream, quiet, interrupt
        metrics, log = folder / METRICS, folder / LOG
        self._rows = rows
        self._told_cause = self._in_traceback = False
        self._metrics = _Tail(metrics, self._row, old=metrics.stat().st_ino if goes_on and metrics.exists() else None)
        self._log = _Tail(log, self.tell, begin=log.stat().st_size if goes_on and log.exists() else 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show the line of a round."""
        self._quiet = True
        with shown(self._stream):
            self._display.show(metrics)

    def tell(self, line: str) -> None:
        """Show a line of the log, if it is one to be shown."""
        self._told_cause |= _FIRST_CAUSE in line
        if line.startswith(_SERVERS_TRACEBACK):
            self._in_traceback = self._told_cause
        elif _LOGGED.match(line):
            self._in_traceback = False
        left_out = self._in_traceback or _TRACEBACK in line
        if left_out or (self._quiet and not any(text in line for text in _SHOWN)):
            return
        if (console := getattr(self._display, "console", None)) is not None:  # above the bar
            console.out(line, highlight=False)
        else:
            echo(line, self._stream)

    def _row(self, line: str) -> None:
        with suppress(ValueError):  # what is shown while a run lasts must not end it
            if self._rows and isinstance(row := json.loads(line), dict):
                self.show(row)

    def _follow(self) -> None:
        try:
            over = False
            while not over:
                over = self._over.wait(_LOOK_SECONDS)
                self._metrics.read()
                self._log.read()
        except Interrupted as error:
            self._interrupt(error.signum)


class _Tail:
    """Passes on the whole lines of a file from byte `begin` on; not those of the file with inode `old`, that another replaces."""

    def __init__(self, path: Path, take: Callable[[str], None], *, begin: int = 0, old: int | None = None) -> None:
        self._path, self._take, self._offset, self._old = path, take, begin, old

    def read(self) -> None:
        if not self._path.exists() or self._path.stat().st_ino == self._old:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode("utf-8", errors="replace").splitlines():
            self._take(plain(line))
