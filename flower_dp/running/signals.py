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


class Signals:
    """Within this context SIGINT, SIGTERM and SIGHUP are recorded, not raised, so that no step is interrupted."""

    def __init__(self) -> None:
        self._came: int | None = None
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                signum = getattr(signal, name, None)
                if signum is None or (name == "SIGHUP" and signal.getsignal(signum) is signal.SIG_IGN):
                    continue  # not on this system; or nohup asked to go on after the terminal is gone
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if kind is None:
            self.check()  # it came during the last steps: the caller still wants to end

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._came = signum
        self.count += 1

    def again(self) -> bool:
        """Return whether a second signal came."""
        return self.count > 1

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self._came is not None:
            raise Interrupted(self._came)
