"""The log of a run: the output of its process, without colors, and the warnings and the error of its last attempt."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flower_dp.running.run_folder import LOG, RESUMED_LINE, new_log, write_whole

log = logging.getLogger("flwr")

# Ray's addition to a line that several workers have written.
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")


@contextmanager
def logged(folder: Path, *, append: bool, resumed: bool = False) -> Iterator[None]:
    """Redirect all output of this process and its workers to the log of a run in this folder, without terminal colors.

    Args:
        folder: folder of the run.
        append: whether to append to the log of an earlier process.
        resumed: whether the run is resumed, so that its last attempt begins here.
    """
    _flush()
    before = [(stream, os.dup(stream)) for stream in (1, 2)]
    new_log(folder, append=append, resumed=resumed).close()
    write_to(folder / LOG)
    try:
        yield
    finally:
        _flush()
        for stream, copy in before:
            os.dup2(copy, stream)
            os.close(copy)
        _remove_colors(folder / LOG)


def is_shown(record: logging.LogRecord) -> bool:
    """Return whether a log record is for the screen."""
    return hasattr(record, "shown")


@contextmanager
def kept_to_be_shown() -> Iterator[list[tuple[int, str]]]:
    """Collect this process's log records for the screen within this context, as level and text; its own log does not get them."""
    kept: list[tuple[int, str]] = []

    def passes(record: logging.LogRecord) -> bool:
        if is_shown(record):
            kept.append((record.levelno, record.getMessage()))
            return False
        return True

    log.addFilter(passes)
    try:
        yield kept
    finally:
        log.removeFilter(passes)


def write_to(path: str | os.PathLike[str]) -> None:
    """Append all further output of this process to a file, and turn off the colors of Flower's logger."""
    import flwr.serverapp  # noqa: F401, PLC0415 - it makes the handlers

    with open(path, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    for handler in log.handlers:
        if hasattr(handler, "colored"):
            handler.colored = False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # so that the output of a process that dies is in the log
        stream.flush()


def _remove_colors(log: Path) -> None:
    if log.exists() and b"\x1b" in (content := log.read_bytes()):
        write_whole(log, plain(content.decode("utf-8", errors="replace")).encode())


def plain(text: str) -> str:
    """Return a text without terminal colors."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def warnings_of(log: Path) -> list[str]:
    """Return the warnings of a run's last attempt; of those that differ in numbers alone the first. Without a log: none."""
    text = _last_attempt(plain(log.read_text(encoding="utf-8", errors="replace"))) if log.is_file() else ""
    kinds: dict[str, str] = {}
    for written in re.findall(r"^(?:\([^()]*\) )?WARNING\s*:\s*(.+)$", text, re.MULTILINE):
        line = _REPEATED.sub("", written)
        kinds.setdefault(re.sub(r"\d+", "0", line), line)
    return list(kinds.values())


def num_warnings(warnings: Sequence[str]) -> str:
    """Return `1 warning` or `3 warnings`."""
    return f"{len(warnings)} warning{'s' * (len(warnings) != 1)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception, as in a traceback."""
    return traceback.format_exception_only(error)[0].strip().partition("\n")[0]


def of_a_dead_process(log: Path) -> str:
    """Return the reason why the process of a run's last attempt died, with the exception at the end of its log, if any."""
    text = _last_attempt(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else ""
    *_, trace = text.rpartition("Traceback (most recent call last)")
    error = re.search(r"^[A-Za-z_][\w.]*(?:: .*)?$", plain(trace), re.MULTILINE) if trace != text else None
    return "the process that ran the app ended before the run did" + (f"\n{error.group()}" if error else "")


def _last_attempt(log_text: str) -> str:
    return log_text.rpartition(f"\n{RESUMED_LINE}\n")[2]
