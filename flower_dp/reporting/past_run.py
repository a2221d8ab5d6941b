"""A run of the past, read back from its folder."""

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_dp.running import run_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """The contents of a run folder.

    Attributes:
        folder: where it is.
        config: its settings, by run-config key.
        rows: the lines of its metrics, oldest first.
        statement: its privacy statement as JSON has it; empty while there is none.
        finished: whether it has a final model.
    """

    folder: Path
    config: Mapping[str, Any]
    rows: list[dict[str, Any]]
    statement: Mapping[str, Any]
    finished: bool

    @property
    def epsilon(self) -> float:
        """The statement's tight epsilon; infinite: not private."""
        return _number(self.statement.get("epsilon"), math.inf) if self.statement.get("private") else math.inf

    def series(self, metric: str, *, otherwise: float = math.nan) -> dict[int, float]:
        """Return a metric by round, where it was recorded; `otherwise` where it was not finite."""
        return {int(row["round"]): _number(row[metric], otherwise) for row in self.rows if "round" in row and metric in row}

    def model(self) -> dict[str, NDArray[np.generic]]:
        """Return the named arrays of the final model.

        Raises:
            ValueError: naming the folder, if there is none.
        """
        from safetensors.numpy import load  # noqa: PLC0415  (the package needs it only here and when it writes a run folder)

        if not self.finished:
            raise ValueError(f"{self.folder}: the run was not finished: it has no {run_folder.MODEL}")
        try:
            return dict(load((self.folder / run_folder.MODEL).read_bytes()))
        except Exception as error:  # safetensors has its own class, in Rust
            raise ValueError(f"{self.folder}: {run_folder.MODEL} can't be read: {error}") from None


def read_past_run(folder: str | os.PathLike[str]) -> PastRun:
    """Read a run folder, as `flower-dp run` and `record_run` write it.

    Raises:
        ValueError: naming the folder, if it is not a run folder.
    """
    path = Path(folder).expanduser()
    if not (path / run_folder.CONFIG).is_file():
        raise ValueError(f"{folder}: is not a run folder: it has no {run_folder.CONFIG}")
    try:
        stated = path / run_folder.STATEMENT_JSON
        return PastRun(
            folder=path,
            config=tomllib.loads((path / run_folder.CONFIG).read_text(encoding="utf-8")),
            rows=run_folder.read_metrics(path),
            statement=json.loads(stated.read_text(encoding="utf-8")) if stated.is_file() else {},
            finished=(path / run_folder.MODEL).is_file(),
        )
    except ValueError as error:  # of TOML, JSON and UTF-8
        raise ValueError(f"{folder}: can't be read: {error}") from None


def _number(value: Any, otherwise: float) -> float:
    """Return a recorded number; null stands for what is not finite."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise
