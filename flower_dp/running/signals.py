"""Signals that end a command. They are recorded, so that no step is interrupted."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(KeyboardInterrupt):
    """The interruption of a run by a signal; all processes that the run started have ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


def ending_signals() -> list[int]:
    """Return the signals of this system that end a command."""
    # Under `nohup` SIGHUP is ignored: the command must outlive its terminal.
    hup = getattr(signal, "SIGHUP", None)
    return [signal.SIGINT, signal.SIGTERM, *([] if hup is None or signal.getsignal(hup) is signal.SIG_IGN else [hup])]


class Signals:
    """A context that records SIGINT, SIGTERM and SIGHUP, so that no step is interrupted, or raises the first one.

    Args:
        raises: whether the first signal raises Interrupted, wherever the main thread is. Later signals don't interrupt the writes
            that follow.
    """

    def __init__(self, *, raises: bool = False) -> None:
        self._raises = raises
        self._came, self.count = 0, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {signum: signal.signal(signum, self._note) for signum in ending_signals()}
        return self

    def set_again(self) -> None:
        """Set the handlers again, after Ray has set its own below Python's."""
        for signum in self._before:
            signal.signal(signum, self._note)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if kind is None:
            self.check()  # a signal during the last steps must still end the caller

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._came = self._came or signum
        self.count += 1
        if self._raises and self.count == 1:
            raise Interrupted(self._came)

    def end(self, signum: int) -> None:
        """Interrupt the main thread from another thread, as if this signal had arrived."""
        self._came = self._came or signum
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def again(self) -> bool:
        """Return whether a second signal has arrived."""
        return self.count > 1

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self._came:
            raise Interrupted(self._came)
