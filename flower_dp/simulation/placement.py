"""Which workers are there to be handed messages, while Ray looks for a machine for others."""

import logging
import time
from typing import Any

from flower_dp.simulation.workers import Workers

log = logging.getLogger("flwr")

# How long the nodes of a worker wait for it, where there is room for it, before the others serve them.
_START_SECONDS = 30.0
# How often in a row a worker is started that does not come: its process may have been killed.
_STARTS = 3
# How long messages wait for the first of several workers.
_NOBODY_SECONDS = 300.0
# From one look at the machines to the next.
_LOOK_SECONDS = 1.0


class Placement:
    """The workers of a run: idle, at work, or not placed on a machine yet.

    A worker's nodes are its own: it has their data. They go to the others where it can't be started, where the machines that are
    left have no room for it, or where it isn't there after 30 s. It gets them back when it comes.

    Args:
        workers: the actors.
        setup: what they need to begin the run; Ray's reference to it.

    Attributes:
        idle: those that may be handed a message, by their index in `workers.actors`.
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
        """A worker has died: let another one begin in its place."""
        self._workers.replace(index)
        self._begin(index)

    def awaited(self) -> list[Any]:
        """Return Ray's references to those that are being started."""
        return list(self._starting)

    def arrived(self, ref: Any) -> bool:
        """Note that one is there, or could not be started, which is tried twice more; False if it is none of these."""
        if ref not in self._starting:
            return False
        index, _ = self._starting.pop(ref)
        if why := self._workers.failure(ref):
            log.error("a worker could not be started: %s", why)
            self._failed[index] += 1
            if self._failed[index] < _STARTS:
                self.replace(index)
        else:
            self._failed[index] = 0
            self.idle.add(index)
        return True

    def awaited_by_their_nodes(self) -> set[int]:
        """Return those that are being started and whose nodes wait for them."""
        now = time.monotonic()
        if self._starting and now - self._looked > _LOOK_SECONDS:
            self._room, self._looked = self._workers.have_room(), now
        return {index for index, begun in self._starting.values() if self._room and now - begun < _START_SECONDS}

    def check(self, *, at_work: bool, waits: bool) -> None:
        """Refuse to wait any longer where nobody will ever take a message.

        Args:
            at_work: whether any worker is.
            waits: whether messages wait for one.

        Raises:
            RuntimeError: no worker is left.
        """
        if self.idle or at_work or not waits:
            self._served = time.monotonic()
        elif not self._starting:
            raise RuntimeError("no worker is left: all have died, and none could be started again")
        elif (waited := time.monotonic() - self._served) > _NOBODY_SECONDS:
            raise RuntimeError(
                f"no worker is left: for {waited:.0f} s no machine has had room for one, or it is too busy to start one"
            )

    def _begin(self, index: int) -> None:
        actor = self._workers.actors[index]
        self._starting[actor.__ray_ready__.remote()] = index, time.monotonic()
        actor.begin.remote(self._setup)
