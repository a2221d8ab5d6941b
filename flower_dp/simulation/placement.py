"""The placement of workers: those that can take messages, and those for which Ray still looks for a machine."""

import logging
import time
from typing import Any

from flower_dp.simulation.workers import Workers

log = logging.getLogger("flwr")

# How long a worker's nodes wait for it, if a machine has room for it, before other workers serve them.
_START_SECONDS = 30.0
# Starts in a row before a worker is given up: its process may have been killed.
_STARTS = 3
# How long messages wait while no worker runs.
_NOBODY_SECONDS = 300.0
# Time between two looks at the machines.
_LOOK_SECONDS = 1.0


class Placement:
    """The workers of a run: idle, busy, or not placed on a machine yet.

    Each worker has nodes of its own, whose data it holds. Other workers serve them if it can't start, if no machine has room for
    it, or if it has not started after 30 s. It gets its nodes back when it starts.

    Args:
        workers: actors of the run.
        setup: Ray's reference to the pickled `WorkerSetup`.

    Attributes:
        idle: workers that can take a message, by their index in `workers.actors`.
    """

    def __init__(self, workers: Workers, setup: Any) -> None:
        self.idle: set[int] = set()
        self._workers, self._setup = workers, setup
        self._starting: dict[Any, tuple[int, float]] = {}
        self._failed = [0] * len(workers.actors)
        self._room, self._looked = True, 0.0
        self._served = time.monotonic()
        for index in range(len(workers.actors)):
            self._begin(index)

    def replace(self, index: int) -> None:
        """Start another worker in the place of a dead one."""
        self._workers.replace(index)
        self._begin(index)

    def awaited(self) -> list[Any]:
        """Return Ray's references to the workers that are starting."""
        return list(self._starting)

    def arrived(self, ref: Any) -> bool:
        """Record that a worker has started, or restart it at most twice if it failed; return False for any other reference."""
        if ref not in self._starting:
            return False
        index, _ = self._starting.pop(ref)
        if reason := self._workers.failure(ref):
            log.error("A worker could not start: %s", reason)
            self._failed[index] += 1
            if self._failed[index] < _STARTS:
                self.replace(index)
        else:
            self._failed[index] = 0
            self.idle.add(index)
        return True

    def awaited_by_their_nodes(self) -> set[int]:
        """Return the starting workers whose nodes still wait for them."""
        now = time.monotonic()
        if self._starting and now - self._looked > _LOOK_SECONDS:
            self._room, self._looked = self._workers.have_room(), now
        return {index for index, begun in self._starting.values() if self._room and now - begun < _START_SECONDS}

    def check(self, *, at_work: bool, waits: bool) -> None:
        """End the wait for workers if no worker will take the messages.

        Args:
            at_work: whether any worker is busy.
            waits: whether messages wait for a worker.

        Raises:
            RuntimeError: if no worker is left.
        """
        if self.idle or at_work or not waits:
            self._served = time.monotonic()
        elif not self._starting:
            raise RuntimeError("no worker is left: all have died, and none could be started again; the log has the reasons")
        elif (waited := time.monotonic() - self._served) > _NOBODY_SECONDS:
            raise RuntimeError(
                f"no worker is left: for {waited:.0f} s no machine has had room for one, or was too busy to start one; "
                "end other programs on the machines"
            )

    def _begin(self, index: int) -> None:
        actor = self._workers.actors[index]
        self._starting[actor.__ray_ready__.remote()] = index, time.monotonic()
        actor.begin.remote(self._setup)
