"""What a process has released, written where its death does not reach it."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Witness:
    """Appends lines to a file, each by one call of the system.

    SIGKILL ends a process between two calls, and what was written stays written: fsync would matter for a power failure alone.
    """

    def __init__(self, path: Path, life: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._life, self._write = life, os.write

    def say(self, what: str, **fields: Any) -> None:
        self._write(self._descriptor, json.dumps({"life": self._life, "what": what, **fields}).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Heard:
    """What a witness has heard, of all lives of a run."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> "Heard":
        return cls([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])

    def all(self, what: str) -> Iterable[dict[str, Any]]:
        return (line for line in self.lines if line["what"] == what)
