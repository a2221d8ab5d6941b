"""The runs of a sweep as Ray tasks: as many at once as cores and memory allow, each on workers that stay warm."""

import fcntl
import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from flower_dp.core.environment import RESUMED
from flower_dp.running import preflight
from flower_dp.running.flower_log import of_a_dead_process
from flower_dp.running.launch_record import LaunchRecord
from flower_dp.running.preflight import default_workers
from flower_dp.running.run_folder import LOG
from flower_dp.running.signals import Signals
from flower_dp.simulation.attempt import LaunchOutcome, attempt
from flower_dp.simulation.grid import RayGrid
from flower_dp.simulation.workers import RayStartError, Workers, start_ray, stop_ray
from flower_dp.sweeps.plan import SweepRun

# Approximate memory of a process that imports torch, with small data.
_PROCESS_BYTES = 2**29
# Time in which interrupted runs may write their statements and models.
_LEAVE_SECONDS = 60.0
_LOOK_SECONDS = 0.1


class LaunchError(RuntimeError):
    """Runs could not begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a sweep's run.

    Attributes:
        run: the run.
        status: `completed`, `failed`, `refused` by its app, or `lost` with its process.
        details: reason, if the run did not complete.
        seconds: duration since the run began or was resumed here.
    """

    run: SweepRun
    status: str
    details: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A current run and its workers."""

    run: SweepRun
    folder: Path
    workers: Workers
    began: float


def num_jobs(runs: Sequence[SweepRun], jobs: int | None, cores: int, gpus: int | None) -> int:
    """Return the number of simultaneous runs.

    Args:
        runs: runs that all have the same number of workers.
        jobs: the user's limit; None: as many as cores, memory and GPUs allow.
        cores: CPU cores of this machine.
        gpus: GPUs of this machine; None if unknown.
    """
    launched = runs[0].launched
    # Two runs can't write one ledger at the same time.
    if any(run.config.get("server-ledger") for run in runs):
        return 1
    if jobs is None:
        memory = psutil.virtual_memory().available // (_PROCESS_BYTES * (launched.workers + 1))
        jobs = max(1, min(cores // launched.workers, memory))
        if launched.gpus_per_worker and gpus is not None:
            jobs = max(1, min(jobs, int(gpus / (launched.gpus_per_worker * launched.workers) + 1e-9)))
    return min(jobs, len(runs))


class Pool:
    """A pool that makes runs on this machine's Ray, which starts with this context and ends with it.

    A run that dies does not affect the others. A first interruption lets each run write its statement and a checkpoint; a second
    one ends the runs immediately.

    Args:
        runs: runs that all have the same number of workers.
        jobs: maximum number of simultaneous runs; None: as many as cores, memory and GPUs allow.
        lock: file on which each run holds a shared lock while its process lives.
        signals: signals that end the runs.

    Attributes:
        count: number of simultaneous runs.
    """

    def __init__(self, runs: Sequence[SweepRun], jobs: int | None, lock: Path, signals: Signals) -> None:
        self._launched, self._lock, self._signals = runs[0].launched, lock, signals
        gpus = preflight.num_gpus() if self._launched.gpus_per_worker else None
        self.count = num_jobs(runs, jobs, default_workers(), gpus)
        self._running: dict[Any, _Made] = {}
        self._threads = ThreadPoolExecutor(1)
        self._ray: Any = None

    def __enter__(self) -> Self:
        importlib.import_module("ray")  # in this thread first: two threads that import it would wait for each other
        num_cpus = max(default_workers(), self.count * self._launched.workers)
        # Output of workers before and between runs belongs to no run, and may reveal how many runs a private selection makes.
        self._starts = self._threads.submit(start_ray, num_cpus, to_screen=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is not None and self._running:
                self._interrupt()
        finally:
            self._threads.shutdown(wait=False)
            stop_ray()

    def make(
        self,
        runs: Sequence[tuple[SweepRun, Path, bool]],
        on_end: Callable[[RunOutcome], None],
        meanwhile: Callable[[list[SweepRun]], None] = lambda runs: None,
    ) -> None:
        """Make runs, and wait until all have ended.

        Args:
            runs: runs, each with its folder, and whether it is resumed there.
            on_end: called with each outcome.
            meanwhile: called with the current runs, from time to time.

        Raises:
            LaunchError: if Ray does not start.
            Interrupted: if a signal came.
        """
        while not self._starts.done():
            self._signals.check()
            time.sleep(_LOOK_SECONDS)
        try:
            self._ray = self._starts.result()
        except (RayStartError, ImportError) as error:
            raise LaunchError(str(error)) from error
        self._signals.set_again()  # Ray has replaced the handlers
        waiting, free = list(reversed(runs)), [self._workers() for _ in range(self.count)]
        while waiting or self._running:
            while waiting and free:
                self._begin(*waiting.pop(), free.pop())
            self._signals.check()
            for ref in self._ray.wait(list(self._running), num_returns=1, timeout=_LOOK_SECONDS)[0]:
                made = self._running.pop(ref)
                outcome, intact = self._ended(ref, made)
                if not intact:  # workers that a run has replaced end with the run's process
                    made.workers.close()
                free.append(made.workers if intact else self._workers())
                on_end(outcome)
            meanwhile([made.run for made in self._running.values()])

    def _workers(self) -> Workers:
        return Workers(num_workers=self._launched.workers, gpus=self._launched.gpus_per_worker)

    def _begin(self, run: SweepRun, folder: Path, resumed: bool, workers: Workers) -> None:
        task = self._ray.remote(_make).options(num_cpus=0, max_retries=0)
        ref = task.remote(run.launched, folder, RESUMED if resumed else "", workers, self._lock)
        self._running[ref] = _Made(run=run, folder=folder, workers=workers, began=time.monotonic())

    def _ended(self, ref: Any, made: _Made) -> tuple[RunOutcome, bool]:
        """Return the outcome of a run, and whether all its workers are still alive."""
        intact, log = False, made.folder / LOG
        try:
            outcome, intact = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:  # not an error of the app: `attempt` reports those
            outcome = LaunchOutcome(status="failed", details=str(error).strip().splitlines()[-1])
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            crashed = isinstance(error, self._ray.exceptions.WorkerCrashedError)
            outcome = LaunchOutcome(status="lost", details=of_a_dead_process(log) if crashed else " ".join(lines[:2]))
        seconds = time.monotonic() - made.began
        return RunOutcome(run=made.run, status=outcome.status, details=outcome.details, seconds=seconds), intact

    def _interrupt(self) -> None:
        for ref in self._running:
            self._ray.cancel(ref, force=False, recursive=False)  # a KeyboardInterrupt in the run
        left, deadline = list(self._running), time.monotonic() + _LEAVE_SECONDS
        while left and time.monotonic() < deadline and not self._signals.again():
            left = self._ray.wait(left, num_returns=len(left), timeout=_LOOK_SECONDS)[1]


def _make(begun: LaunchRecord, folder: Path, resume: str, workers: Workers, lock: Path) -> tuple[LaunchOutcome, bool]:
    """Make a run in a process of Ray; return its outcome, and whether all its workers have stayed."""
    os.environ["OMP_NUM_THREADS"] = str(begun.workers)  # for this process only: its workers have already started
    before = list(workers.actors)

    def grid(app: Any, config: Any) -> Callable[[], RayGrid]:
        return lambda: RayGrid(
            app.client_app(), workers, num_nodes=begun.supernodes, run_config=config, log_file=str(folder / LOG)
        )

    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        outcome = attempt(begun, folder, grid, resume=resume)
    return outcome, workers.actors == before
