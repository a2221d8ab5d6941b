"""The guard: a small parent process that ends the processes that a command leaves, and reports the death of the command.

An app may end, crash or hang the process of its command. So the command runs in a child, which is forked before any import.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from flower_dp.running.signals import ending_signals

# Time for an interrupted command to write its runs' statements and models, and for a statement after the command's death.
LEAVE_SECONDS, STATE_SECONDS = 90, 120
_DONE = b"\0"
_BECOMES_PARENT_OF_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER, of Linux


class Guard:
    """The guard of functions that run in child processes, one at a time.

    The guard passes SIGINT, SIGTERM and SIGHUP on to the child once. At the second signal, or if the child does not end in time,
    the guard kills it. If the guard dies, the child is interrupted.

    Attributes:
        folder: folder of Ray's sockets and logs; removed by `close`.
        came: signal that ended the function; 0 for none.
        said: text that the function passed to `tell`.
    """

    def __init__(self) -> None:
        self.folder = short_folder()
        self.came, self.said = 0, ""
        self._child = 0
        with suppress(OSError, AttributeError):
            import ctypes  # noqa: PLC0415  (an import at the top would delay the command)

            ctypes.CDLL(None).prctl(_BECOMES_PARENT_OF_ORPHANS, 1, 0, 0, 0)
        for signum in ending_signals():
            signal.signal(signum, self._pass_on)

    def run(self, work: Callable[[], int], seconds: int = 0) -> int | None:
        """Return the result of a function that runs in a child; None if the child died, or took longer than `seconds`."""
        # The guard alone holds `life`: if it dies, the child's read of `alive` returns, and interrupts the child.
        alive, life = os.pipe()
        told, tells = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
        if not (child := os.fork()):
            os.close(life)
            os.close(told)
            _work(work, self.folder, alive, tells)
        self._child = child
        os.close(alive)
        os.close(tells)
        signal.signal(signal.SIGALRM, lambda *_: self._kill())
        signal.alarm(seconds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
        status = os.waitpid(child, 0)[1]
        signal.alarm(0)
        self._child = 0
        os.close(life)
        with open(told, "rb") as pipe:
            os.set_blocking(told, False)  # the child's own children may hold the other end
            content = pipe.read() or b""
        self.said = content.partition(_DONE)[0].decode()
        self._end_left()  # they may still hold resources that the next function needs
        return os.waitstatus_to_exitcode(status) if content.endswith(_DONE) else None

    def close(self) -> None:
        """Remove the folder, and end all processes that the functions left."""
        self._end_left()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_left(self) -> None:
        with suppress(ChildProcessError, ImportError):  # without children psutil, slow to import, is not needed
            os.waitpid(-1, os.WNOHANG)
            import psutil  # noqa: PLC0415

            left = psutil.Process().children(recursive=True)
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=10)

    def _pass_on(self, signum: int, frame: object) -> None:
        if self.came:
            self._kill()
            return
        self.came = signum
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signum)
            signal.alarm(LEAVE_SECONDS)

    def _kill(self) -> None:
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)


class _Guarded:
    """The connection of a guarded process to its guard; empty without a guard."""

    folder: Path | None = None
    tells: int | None = None


def _work(work: Callable[[], int], folder: Path, alive: int, tells: int) -> NoReturn:
    """Run the function in the child: away from the terminal's signals, and no longer than the guard lives."""
    status = 1
    try:
        os.setsid()
        for signum in ending_signals():
            signal.signal(signum, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
        _Guarded.folder, _Guarded.tells = folder, tells
        threading.Thread(target=_end_with_guard, args=(alive,), daemon=True).start()
        status = work()
    except BaseException:  # for example a signal outside of any command
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(tells, _DONE)
        os._exit(status)  # don't wait for an app's threads or for Ray's exit handlers: the guard ends what is left


def _end_with_guard(alive: int) -> None:
    os.read(alive, 1)
    end = getattr(sys.modules.get("flower_dp.simulation.workers"), "end_this_process", None)
    if end is not None:  # it also ends a Ray that is starting, which ignores signals
        end()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def tell(text: str) -> None:
    """Send the guard, if any, the place of the run whose statement the guard writes if this process dies."""
    if _Guarded.tells is not None:
        os.write(_Guarded.tells, text.encode())


def ray_folder() -> Path | None:
    """Return the guard's folder, which it removes; None without a guard."""
    return _Guarded.folder


def short_folder() -> Path:
    """Return a new temporary folder with a short name: a socket's path has at most 103 characters on macOS, 107 on Linux."""
    parent = tempfile.gettempdir()
    if len(parent) > 12 and os.access("/tmp", os.W_OK):  # noqa: S108
        parent = "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="flower-dp-", dir=parent))
