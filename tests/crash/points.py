"""Points at which a process is killed or interrupted: around everything that it does to files and messages."""

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

# By the name of the file, or by its descriptor.
_OF_PATHS = ("open", "mkdir", "replace", "rename", "unlink")
_OF_DESCRIPTORS = ("fsync", "write", "pwrite", "ftruncate")


class Points:
    """Counts what a process does, and kills it (SIGKILL) when it gets to a number; or raises what Ctrl-C and Flower raise there.

    Each call of `os` that changes a file of the folder is two points, before and after; so is each statement of SQLite.

    Args:
        folder: whose files count.
        at: the number; None: it is never killed.
        interrupts: whether a KeyboardInterrupt is raised instead.
        last_words: is told the kind of the point, right before.
    """

    def __init__(self, folder: Path, at: int | None, last_words: Callable[[str], None], *, interrupts: bool = False) -> None:
        self._folder, self._at, self._last_words, self._interrupts = str(folder.resolve()) + os.sep, at, last_words, interrupts
        self.passed: Counter[str] = Counter()

    def here(self, kind: str) -> None:
        self.passed[kind] += 1
        if self.passed.total() == self._at:
            self._last_words(kind)
            if self._interrupts:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, name: str, call: Callable[..., Any], counts: Callable[[Any], bool]) -> Callable[..., Any]:
        @wraps(call)
        def counted(*arguments: Any, **named: Any) -> Any:
            if not arguments or not counts(arguments[0]):
                return call(*arguments, **named)
            self.here(f"before {name}")
            value = call(*arguments, **named)
            self.here(f"after {name}")
            return value

        return counted

    def install(self) -> None:
        """From now on calls of `os` and `sqlite3` are points, for as long as this process lives."""
        for names, counts in ((_OF_PATHS, self._is_here), (_OF_DESCRIPTORS, self._is_open_here)):
            for name in names:
                setattr(os, name, self.around(name, getattr(os, name), counts))
        connect, points = sqlite3.connect, self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *rest: Any) -> Any:
                return points.around(f"SQL {statement.split(maxsplit=1)[0]}", super().execute, lambda _: True)(statement, *rest)

            def executemany(self, statement: str, *rest: Any) -> Any:
                return points.around(f"SQL {statement.split(maxsplit=1)[0]}", super().executemany, lambda _: True)(
                    statement, *rest
                )

            def close(self) -> None:
                points.here("before SQL close")
                super().close()
                points.here("after SQL close")

        setattr(sqlite3, "connect", lambda *arguments, **named: connect(*arguments, factory=Connection, **named))  # noqa: B010

    def _is_here(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self._folder)

    def _is_open_here(self, descriptor: Any) -> bool:
        try:
            return isinstance(descriptor, int) and os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._folder)
        except OSError:
            return False
