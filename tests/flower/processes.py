"""Finding and ending all processes that a test has started, also detached ones."""

from contextlib import suppress

import psutil


class ProcessTree:
    """The processes that descend from a few roots.

    A child may leave its parent's session, outlive its parent, and write over its environment: so known are the descendants of those
    that are known, and those with the mark in their environment. A new process with an old number is none of them.
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
        name, value = self._mark
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(name) == value:
                    self._known.add(process)
        for process in list(self._known):
            with suppress(psutil.Error):
                self._known.update(process.children(recursive=True))

    def alive(self) -> list[psutil.Process]:
        """Return the known processes that still run (a zombie does not)."""
        running = []
        for process in self._known:
            with suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
        return running

    def end(self, grace: float = 3.0) -> None:
        """End all processes, by force after `grace` seconds; raise a RuntimeError if one of them still runs."""
        for force, seconds in ((False, grace), (True, 10.0)):
            self.remember_descendants()
            for process in self.alive():
                with suppress(psutil.Error):
                    process.kill() if force else process.terminate()
            psutil.wait_procs(self.alive(), timeout=seconds)
        if left := sorted(process.pid for process in self.alive()):
            raise RuntimeError(f"processes {left} could not be ended")
