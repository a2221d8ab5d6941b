"""When the rounds of a run ended: a run whose cohorts are secret stores no times, which would tell how many clients took part."""

import threading
import time
from pathlib import Path
from types import TracebackType

from flower_dp.running.run_folder import METRICS

_LOOK_SECONDS = 0.005


class RoundTimes:
    """Look within this context again and again how many lines a run's metrics have: one a round, from round 0 on.

    Attributes:
        ends: the clock (`time.monotonic`) when each line was seen first.
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
