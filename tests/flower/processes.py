"""Programs of a run, and finding and ending all processes that they have started, also detached ones."""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

POLL_SECONDS = 0.1


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


class Programs:
    """Programs of this Python environment, away from the terminal's signals; `stop` ends them and all that they have started."""

    def __init__(
        self, mark: tuple[str, str], *, environment: Mapping[str, str], working_dir: Path, check: Callable[[], None]
    ) -> None:
        """Prepare for programs without starting one.

        Args:
            mark: as for `ProcessTree`; added to the environment.
            environment: of all programs.
            working_dir: of all programs.
            check: called while waiting; it raises an error to give up.
        """
        self._environment = dict(environment) | dict([mark])
        self._working_dir, self._check = working_dir, check
        self._tree = ProcessTree(mark)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str],
        output: Any,
        more: Mapping[str, str] | None = None,
        *,
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a program, with `more` in its environment; it inherits the files `pass_fds`, and reads `stdin` alone."""
        process = subprocess.Popen(
            list(command),
            cwd=self._working_dir,
            env=self._environment | dict(more or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            pass_fds=pass_fds,
        )
        self._started.append(process)
        self._tree.add(process.pid)
        return process

    def wait(
        self, process: subprocess.Popen[bytes], meanwhile: Callable[[], None], also: Callable[[], bool] = lambda: True
    ) -> None:
        """Wait until a process ends, or `also` is false."""
        steps = 0
        while process.poll() is None and also():
            self._check()
            meanwhile()
            if steps % 10 == 0:
                self.remember()
            steps += 1
            time.sleep(POLL_SECONDS)

    def remember(self) -> None:
        """Remember what the programs have started; `wait` does so too."""
        self._tree.remember_descendants()

    def stop(self) -> None:
        """End all programs and what they have started; what outlives all programs has nothing left to do, and ends at once."""
        self.remember()
        if any(process.poll() is None for process in self._started):
            self._tree.end()
        else:
            self._tree.end(grace=0.0)
        for process in self._started:
            process.wait()
