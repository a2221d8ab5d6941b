"""A second, small process that stays behind a command: it ends what the command leaves, and says how it died, if it could not.

The command runs in a child that is forked before anything is imported. An app may end its process, crash it, or hang in it.
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

# How long an interrupted command may take for its runs' statements and models, and a statement that is made after its death.
LEAVE_SECONDS, STATE_SECONDS = 90, 120
_DONE = b"\0"
_BECOMES_PARENT_OF_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER, of Linux


class Guard:
    """Runs functions in processes of their own, one at a time.

    SIGINT, SIGTERM and SIGHUP are passed on to that process once; at the second one, or if it is not gone in time, it is killed.
    It is interrupted, too, if this process is gone.

    Attributes:
        folder: for Ray's sockets and logs; removed by `close`.
        came: the signal that ended the function; 0 without one.
        said: what it has told this process (`tell`).
    """

    def __init__(self) -> None:
        self.folder = short_folder()
        self.came, self.said = 0, ""
        self._child = 0
        with suppress(OSError, AttributeError):
            import ctypes  # noqa: PLC0415  (what this process imports comes before the command)

            ctypes.CDLL(None).prctl(_BECOMES_PARENT_OF_ORPHANS, 1, 0, 0, 0)
        for signum in ending_signals():
            signal.signal(signum, self._pass_on)

    def run(self, work: Callable[[], int], seconds: int = 0) -> int | None:
        """Return what a function returns in a process of its own; None if that died, or took longer than so many seconds."""
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
        self._end_left()  # which may still hold what a next function needs
        return os.waitstatus_to_exitcode(status) if content.endswith(_DONE) else None

    def close(self) -> None:
        """Remove the folder. All processes that the functions have left have ended with them."""
        self._end_left()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_left(self) -> None:
        with suppress(ChildProcessError, ImportError):  # none, of which psutil needs not be asked
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
    """What a guarded process knows of its guard."""

    folder: Path | None = None
    tells: int | None = None


def _work(work: Callable[[], int], folder: Path, alive: int, tells: int) -> NoReturn:
    """Be the child: away from the terminal's signals, and no longer than the guard."""
    status = 1
    try:
        os.setsid()
        for signum in ending_signals():
            signal.signal(signum, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
        _Guarded.folder, _Guarded.tells = folder, tells
        threading.Thread(target=_end_with_guard, args=(alive,), daemon=True).start()
        status = work()
    except BaseException:  # such as a signal that came outside of any command
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(tells, _DONE)
        os._exit(status)  # threads of an app, and Ray's own ends, aren't waited for: the guard ends what is left


def _end_with_guard(alive: int) -> None:
    os.read(alive, 1)
    end = getattr(sys.modules.get("flower_dp.simulation.workers"), "end_this_process", None)
    if end is not None:  # which ends a Ray that is starting, and hears no signal
        end()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def tell(text: str) -> None:
    """Tell the guard, if there is one, where the run is that it makes the statement of, should this process die."""
    if _Guarded.tells is not None:
        os.write(_Guarded.tells, text.encode())


def ray_folder() -> Path | None:
    """Return the folder that the guard removes; None without a guard."""
    return _Guarded.folder


def short_folder() -> Path:
    """Return a new temporary folder with a short name: a socket's path has at most 103 characters on macOS, 107 on Linux."""
    parent = tempfile.gettempdir()
    if len(parent) > 12 and os.access("/tmp", os.W_OK):  # noqa: S108
        parent = "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="flower-dp-", dir=parent))
