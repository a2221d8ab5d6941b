"""Processes that live until a point, a time, or their end."""

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

LONGEST = 600.0


def live(body: Callable[[], None], output: Path, seconds: float | None) -> int:
    """Fork a process that runs a function; kill it after some seconds. Return its status: 0, or -9 if it was killed.

    Raises:
        TimeoutError: if it does not end.
    """
    child = os.fork()
    if child == 0:
        _become(body, output)
    descriptor = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([descriptor], [], [], LONGEST if seconds is None else seconds)
        if not ready:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(descriptor)
    if not ready and seconds is None:
        raise TimeoutError(f"a run did not end in {LONGEST:g} s: {output.read_text()[-3000:]}")
    return os.waitstatus_to_exitcode(status)


def _become(body: Callable[[], None], output: Path) -> NoReturn:
    status = 1
    try:
        log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(log, "a", buffering=1)  # a test's runner may have put its own there
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.monotonic()
    call()
    return time.monotonic() - started
