"""The processes that make a sweep's runs: as many at once as the machine has cores and memory for, each with warm workers."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from flower_dp.core.environment import RESUMED
from flower_dp.running.flower_log import why_of, without_colours
from flower_dp.running.processes import POLL_SECONDS, Programs
from flower_dp.running.run_folder import LOG
from flower_dp.running.superlink import programs
from flower_dp.simulation.lane import Order
from flower_dp.simulation.workers import short_folder
from flower_dp.sweeps.plan import PlannedRun

# What a process that imports torch takes, about, with small data.
_PROCESS_BYTES = 2**29
# How long interrupted processes may take for their statements and models.
_LEAVE_SECONDS = 60.0
# From one look at the processes of the lanes to the next.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run of a sweep that has ended.

    Attributes:
        run: the run.
        status: `completed`, `failed`, `refused` by its app, or `lost` with its process.
        details: why, where it did not complete.
        seconds: since it was begun or went on here.
    """

    run: PlannedRun
    status: str
    details: str
    seconds: float


def how_many(runs: Sequence[PlannedRun], at_once: int | None, cores: int, gpus: int | None) -> int:
    """Return how many runs are made at once.

    Args:
        runs: all with as many workers.
        at_once: what was asked for; None: as many as there are cores, memory and GPUs for.
        cores: CPU cores of this machine.
        gpus: its GPUs; None if that is not known.
    """
    one = runs[0].launched
    # Two runs can't write one ledger at the same time.
    if any(run.config.get("server-ledger") for run in runs):
        return 1
    if at_once is None:
        memory = psutil.virtual_memory().available // (_PROCESS_BYTES * (one.workers + 1))
        at_once = max(1, min(cores // one.workers, memory))
        if one.gpus_per_worker and gpus is not None:
            at_once = max(1, min(at_once, int(gpus / (one.gpus_per_worker * one.workers) + 1e-9)))
    return min(at_once, len(runs))


class Lanes:
    """Lanes that make runs, one each at a time; a lane that dies is replaced.

    They start with this context, and are ready for their first runs some seconds later. No process is left behind, whatever ends
    it. An interruption lets each run write its statement and a checkpoint; a second one ends them at once.

    Args:
        count: of lanes.
        workers: of each.
        gpus_per_worker: the fraction of a GPU of each worker.
        gpus: GPUs of this machine; None if that is not known.
        lock: a descriptor that a lane keeps open as long as it lives.
        check: called while waiting; it raises an error to end.
        again: whether to end at once.
    """

    def __init__(
        self,
        count: int,
        *,
        workers: int,
        gpus_per_worker: float,
        gpus: int | None,
        lock: int,
        check: Callable[[], None],
        again: Callable[[], bool],
    ) -> None:
        self._check, self._again = check, again
        self._folder = short_folder()
        self._workers, self._gpus_per_worker, self._gpus, self._lock = workers, gpus_per_worker, gpus, lock
        self._lanes: list[_Lane] = []
        self._count = count

    def __enter__(self) -> Self:
        self._lanes = [self._made(number) for number in range(self._count)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is not None:
                self._interrupt()
        finally:
            for lane in self._lanes:
                lane.stop()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _made(self, number: int) -> "_Lane":
        return _Lane(
            self._folder / str(number),
            workers=self._workers,
            gpus_per_worker=self._gpus_per_worker,
            visible=_visible(number, self._gpus_per_worker * self._workers, self._gpus),
            lock=self._lock,
            check=self._check,
        )

    def make(
        self,
        runs: Sequence[tuple[PlannedRun, Path, bool]],
        on_end: Callable[[Ended], None],
        meanwhile: Callable[[list[PlannedRun]], None] = lambda runs: None,
    ) -> None:
        """Make runs, and wait until all have ended.

        Args:
            runs: each with its folder, and whether it goes on there.
            on_end: called with each that has ended.
            meanwhile: called with those that are being made, from time to time.
        """
        waiting, looked = list(reversed(runs)), time.monotonic()
        while waiting or any(lane.busy for lane in self._lanes):
            self._check()
            if time.monotonic() - looked > _LOOK_SECONDS:
                for lane in self._lanes:
                    lane.remember()
                looked = time.monotonic()
                meanwhile([lane.run for lane in self._lanes if lane.run is not None])
            for number, lane in enumerate(self._lanes):
                if lane.busy and (ended := lane.ended()) is not None:
                    on_end(ended)
                    if ended.status == "lost":
                        lane.stop()
                        self._lanes[number] = self._made(number)
                if waiting and not self._lanes[number].busy:
                    self._lanes[number].begin(*waiting.pop())
            time.sleep(POLL_SECONDS / 2)

    def _interrupt(self) -> None:
        for lane in self._lanes:
            lane.interrupt()
        deadline = time.monotonic() + _LEAVE_SECONDS
        while any(lane.alive and lane.busy for lane in self._lanes) and time.monotonic() < deadline and not self._again():
            time.sleep(POLL_SECONDS)


class _Lane:
    """One process, and the run that it makes."""

    def __init__(
        self, folder: Path, *, workers: int, gpus_per_worker: float, visible: str | None, lock: int, check: Callable[[], None]
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._folder, self._number = folder, 0
        self._run: tuple[PlannedRun, Path, float] | None = None
        self._programs: Programs = programs(folder, check, run_folder=folder, config={})
        command = [sys.executable, "-P", "-m", "flower_dp.simulation.lane", str(workers), str(gpus_per_worker), str(folder)]
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
        more = {"PYTHONPATH": path} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        self._log = folder / "lane.log"
        with self._log.open("wb") as output:
            self._process = self._programs.start(command, output, more, stdin=subprocess.PIPE, pass_fds=(lock,))

    @property
    def run(self) -> PlannedRun | None:
        """The run that it makes."""
        return self._run[0] if self._run else None

    @property
    def busy(self) -> bool:
        """Whether it makes a run."""
        return self._run is not None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def begin(self, run: PlannedRun, folder: Path, goes_on: bool) -> None:
        """Begin a run, or let it go on."""
        self._number += 1
        order = Order(
            app=run.launched.app,
            overrides=dict(run.launched.overrides),
            num_nodes=run.launched.supernodes,
            folder=str(folder),
            resume=RESUMED if goes_on else "",
            outcome=str(self._outcome),
        )
        self._run = run, folder, time.monotonic()
        with suppress(BrokenPipeError):  # it has died: `ended` says so
            assert self._process.stdin is not None  # noqa: S101
            self._process.stdin.write(order.line.encode())
            self._process.stdin.flush()

    def ended(self) -> Ended | None:
        """Return how the run has ended; None while it lasts."""
        if self._run is None or not (self._outcome.exists() or not self.alive):
            return None
        (run, folder, began), self._run = self._run, None
        log = folder / LOG
        without_colours(log)
        if self._outcome.exists():
            found = json.loads(self._outcome.read_text(encoding="utf-8"))
            status, details = str(found["status"]), str(found["details"])
        else:
            status, details = "lost", "the process that ran the app ended before the run did"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if status in ("failed", "lost"):
            details = why_of(details, text or self._log.read_text(encoding="utf-8", errors="replace"))
        return Ended(run=run, status=status, details=details, seconds=time.monotonic() - began)

    def remember(self) -> None:
        """Remember what it has started: two processes of Ray hide their environment, and outlive it by a minute."""
        self._programs.remember()

    def interrupt(self) -> None:
        """Ask it to end, and to leave what its run has released."""
        self.remember()
        with suppress(ProcessLookupError):
            self._process.terminate()

    def stop(self) -> None:
        """End it, and all that it has started."""
        self.remember()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._programs.stop()
        if self._run is not None:
            without_colours(self._run[1] / LOG)

    @property
    def _outcome(self) -> Path:
        return self._folder / f"outcome-{self._number}.json"


def _visible(number: int, gpus_of_a_run: float, gpus: int | None) -> str | None:
    """Return which GPUs a lane sees: each begins with another one, where there are several. None: as this process."""
    if not gpus_of_a_run or gpus is None or gpus < 2:
        return None
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = mine.split(",") if mine else [str(one) for one in range(gpus)]
    first, count = int(number * gpus_of_a_run + 1e-9), max(1, math.ceil(gpus_of_a_run - 1e-9))
    return ",".join(names[(first + one) % len(names)] for one in range(count))
