"""The screen of a command during its runs. Readers may close standard output at any time."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

import typer

from flower_dp.running.flower_log import is_shown, plain
from flower_dp.running.progress import Display
from flower_dp.running.signals import Interrupted

log = logging.getLogger("flwr")

_LOOK_SECONDS = 0.1


@contextmanager
def unbroken_output(stream: TextIO | None = None) -> Iterator[None]:
    """Turn a broken pipe within this context into an interruption of the command, as by a signal.

    From then on the output to the stream, by default standard output, is discarded, so that the end of a run meets no further
    broken pipe.

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
    """Write a line to a stream, by default standard output; see `unbroken_output`."""
    with unbroken_output(stream):
        typer.echo(line, file=stream)


@contextmanager
def own_stream() -> Iterator[TextIO]:
    """Yield a stream to the present standard output, which stays the same while this process writes to a log."""
    try:
        copy = os.dup(1) if sys.stdout.fileno() == 1 else None
    except (OSError, ValueError):  # standard output without a descriptor, as in a test
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


class Screen(logging.Handler):
    """The screen of one run: first the lines of its log, then its metrics and the log records for the screen.

    The screen follows the log until the first metrics, or until the first error for the screen: the traceback of that error, and
    later lines, are in the log alone.

    Args:
        display: display of the metrics.
        stream: stream for lines of the log.
        file: log of the run, followed within this context.
        goes_on: whether an earlier process has shown the log's present content.
        quiet: whether not to follow the log at all.
        interrupt: function called with SIGPIPE if the stream has no reader any longer.
    """

    def __init__(
        self, display: Display, stream: TextIO | None, file: Path, *, goes_on: bool, quiet: bool, interrupt: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._display, self._stream, self._quiet, self._interrupt = display, stream, quiet, interrupt
        self._file, self._offset = file, file.stat().st_size if goes_on and file.exists() else 0
        self._over, self._reading = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        log.addHandler(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        log.removeHandler(self)

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show the line of a round, and stop to follow the log."""
        self._read()
        self._quiet = True
        with unbroken_output(self._stream):
            self._display.show(metrics)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log record for the screen, unless the screen still follows the log, which has the record too."""
        if is_shown(record):
            self._quiet |= record.levelno >= logging.ERROR
            if self._quiet:
                self._write(f"{record.levelname}: {record.getMessage().partition(chr(10))[0]}")

    def _follow(self) -> None:
        try:
            while not self._over.wait(_LOOK_SECONDS):
                self._read()
            self._read()
        except Interrupted as error:
            self._interrupt(error.signum)

    def _read(self) -> None:
        """Show the new whole lines of the log."""
        with self._reading:
            if self._quiet or not self._file.exists():
                return
            with self._file.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.decode("utf-8", errors="replace").splitlines():
                self._write(plain(line))

    def _write(self, line: str) -> None:
        if (console := getattr(self._display, "console", None)) is not None:  # above the bar
            console.out(line, highlight=False)
        else:
            echo(line, self._stream)
