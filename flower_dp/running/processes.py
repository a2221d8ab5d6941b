"""Finding and ending all processes that a program has started, also detached ones."""

import time
from collections.abc import Iterator
from contextlib import suppress

import psutil


class ProcessTree:
    """The processes that descend from a few roots.

    A child may leave its parent's process group and session, and outlive its parent: so descendants are remembered
    by every call of `remember_descendants`, and `end` also finds those that have the mark in their environment. A process is
    identified by its number and start time together; a new process with an old number is never ended.
    """

    def __init__(self, mark: tuple[str, str]) -> None:
        """Start without processes; `mark` is an environment variable with a value that only these processes have."""
        self._mark = mark
        self._known: set[psutil.Process] = set()

    def add(self, pid: int) -> None:
        """Remember a root, a child of this process."""
        with suppress(psutil.NoSuchProcess):
            self._known.add(psutil.Process(pid))

    def remember_descendants(self) -> None:
        """Remember the descendants that run now."""
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                children.setdefault(process.ppid(), []).append(process)
        parents = list(self.alive())
        while parents:
            parent = parents.pop()
            new = [child for child in children.get(parent.pid, []) if child not in self._known]
            self._known.update(new)
            parents += new

    def alive(self) -> Iterator[psutil.Process]:
        """Yield the known processes that still run (a zombie does not)."""
        for process in list(self._known):
            with suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def end(self, grace: float = 3.0) -> None:
        """End all processes, by force after `grace` seconds. When this returns, none of them runs.

        Raises:
            RuntimeError: a process could not be ended, even by force.
        """
        self._add_marked()
        self._signal_until_gone(force=False, seconds=grace)
        if self._add_marked():
            self._signal_until_gone(force=True, seconds=10.0)
        if left := sorted(process.pid for process in self.alive()):
            raise RuntimeError(f"processes {left} could not be ended")

    def _add_marked(self) -> bool:
        """Remember descendants and marked processes; return whether any known process runs."""
        name, value = self._mark
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process not in self._known and process.environ().get(name) == value:
                    self._known.add(process)
        self.remember_descendants()
        return any(True for _ in self.alive())

    def _signal_until_gone(self, *, force: bool, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        asked: set[psutil.Process] = set()
        while alive := list(self.alive()):
            for process in alive:
                if process not in asked:
                    asked.add(process)
                    with suppress(psutil.Error):
                        process.kill() if force else process.terminate()
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)
            self.remember_descendants()
