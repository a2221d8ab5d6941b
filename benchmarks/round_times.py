"""Measure when the rounds of a run end. A run with secret cohorts stores no times, which would reveal the number of clients."""

import threading
import time
from pathlib import Path
from types import TracebackType

from flower_dp.running.run_folder import METRICS

_LOOK_SECONDS = 0.005


class RoundTimes:
    """A context that polls the number of lines of a run's metrics: one line per round, from round 0 on.

    Attributes:
        ends: times (`time.monotonic`) at which each line was seen first.
    """

    def __init__(self, folder: Path) -> None:
        self.ends: list[float] = []
        self._file = folder / METRICS
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "RoundTimes":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        if self._file.exists():
            number = self._file.read_bytes().count(b"\n")
            self.ends += [time.monotonic()] * (number - len(self.ends))
