"""The signals that end what a command does: they are recorded, so that no step is interrupted."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; all processes that it had started have ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


def ending_signals() -> list[int]:
    """Return the signals that end a command, of those that this system has; `nohup` asks to go on after the terminal is gone."""
    hup = getattr(signal, "SIGHUP", None)
    return [signal.SIGINT, signal.SIGTERM, *([] if hup is None or signal.getsignal(hup) is signal.SIG_IGN else [hup])]


class Signals:
    """Within this context SIGINT, SIGTERM and SIGHUP are recorded, so that no step is interrupted; or the first one is raised.

    Args:
        raises: whether the first one raises Interrupted wherever the main thread is. What is written then is not interrupted.
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
            self.check()  # it came during the last steps: the caller still wants to end

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._came = self._came or signum
        self.count += 1
        if self._raises and self.count == 1:
            raise Interrupted(self._came)

    def end(self, signum: int) -> None:
        """Interrupt the main thread, from another one, as if this signal had come."""
        self._came = self._came or signum
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def again(self) -> bool:
        """Return whether a second signal came."""
        return self.count > 1

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self._came:
            raise Interrupted(self._came)
