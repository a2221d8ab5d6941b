"""The contents of a recorded run's folder, which may be somebody else's: its texts go to terminals and figures."""

import math
import os
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_dp.core import checks, metric_columns
from flower_dp.privacy.statement import FORMAT
from flower_dp.running import run_folder
from flower_dp.running.trained_model import load_arrays

# Unicode's categories of controls, separators and halves of characters, which JSON can hold but no terminal can show.
# `checks.one_line` would also change non-ASCII spaces, which paths among the settings may have.
_CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """The contents of a run folder.

    Attributes:
        folder: path of the folder.
        config: settings by run-config key; values that no run-config can hold are texts.
        rows: lines of `metrics.jsonl`, oldest first.
        statement: privacy statement as in its JSON file; empty if there is none. In the texts of all three, a space replaces
            every character that controls a terminal or the direction of text.
        finished: whether the run has ended with a final model.
    """

    folder: Path
    config: Mapping[str, Any]
    rows: list[dict[str, Any]]
    statement: Mapping[str, Any]
    finished: bool

    @property
    def guarantee(self) -> Mapping[str, Any]:
        """The statement's group of this name; empty if there is no statement."""
        guarantee: Mapping[str, Any] = self.statement.get("guarantee", {})
        return guarantee

    @property
    def epsilon(self) -> float:
        """The statement's epsilon; infinite if not private."""
        return _number(self.guarantee.get("epsilon"), math.inf) if self.guarantee.get("private") is True else math.inf

    @property
    def delta(self) -> float | None:
        """The delta of epsilon, from the statement or else the last line; None if neither has one."""
        delta = self.guarantee.get("delta", self.rows[-1].get("delta") if self.rows else None)
        return delta if metric_columns.number(delta) and math.isfinite(delta) else None

    def series(self, metric: str, *, otherwise: float = math.nan) -> dict[int, float]:
        """Return a metric by round, if recorded; `otherwise` stands for a value that was not finite."""
        return {int(row["round"]): _number(row[metric], otherwise) for row in self.rows if "round" in row and metric in row}

    def model(self) -> dict[str, NDArray[np.generic]]:
        """Return the named arrays of the final model.

        Raises:
            ValueError: naming the folder, if there is no final model.
        """
        if not self.finished:
            raise ValueError(f"{self.folder}: the run was not finished; it has no final {run_folder.MODEL}")
        file = self.folder / run_folder.MODEL
        return load_arrays(file, file.read_bytes())


def check_each_once(folders: Iterable[Path]) -> None:
    """Refuse a run folder that is given twice.

    Raises:
        ValueError: naming the folder.
    """
    seen: set[Path] = set()
    for folder in folders:
        if (path := folder.resolve()) in seen:
            raise ValueError(f"{folder}: is given twice")
        seen.add(path)


def read_past_run(folder: str | os.PathLike[str]) -> RunContents:
    """Read a run folder of `flower-dp run` or `record_run`.

    Raises:
        ValueError: naming the folder, if it is not a run folder.
    """
    path = Path(folder).expanduser()
    if not (path / run_folder.CONFIG).is_file():
        raise ValueError(f"{folder}: must be a run folder; it has no {run_folder.CONFIG}")
    try:
        stated, config = path / run_folder.STATEMENT_JSON, tomllib.loads((path / run_folder.CONFIG).read_text(encoding="utf-8"))
        flat = {key: value if isinstance(value, str | int | float) else str(value) for key, value in config.items()}
        return RunContents(
            folder=path,
            config=_harmless(flat),
            rows=_harmless(run_folder.read_metrics(path)),
            statement=_harmless(_statement(stated)) if stated.is_file() else {},
            finished=run_folder.is_finished(path),
        )
    except (ValueError, RecursionError) as error:  # of TOML, JSON and UTF-8
        raise ValueError(f"{folder}: can't be read: {error}") from None


def _statement(file: Path) -> dict[str, Any]:
    statement = checks.json_object(file.name, file.read_bytes())
    if statement.get("format") != FORMAT:
        raise ValueError(f"{file.name}: must have format {FORMAT}: another version of flower-dp wrote it; run it again")
    for name in ("guarantee", "mechanism"):
        if not isinstance(statement.setdefault(name, {}), dict):
            raise ValueError(f"{file.name}: {name} must be a JSON object")
    if not isinstance(statement["mechanism"].get("noise", {}), dict):
        raise ValueError(f"{file.name}: noise must be a JSON object")
    return statement


def _harmless(value: Any) -> Any:
    """Return a JSON value; spaces replace characters that control terminals, the direction of text or the end of a line."""
    if isinstance(value, str):
        return "".join(" " if unicodedata.category(letter) in _CONTROLS else letter for letter in value)
    if isinstance(value, list):
        return [_harmless(item) for item in value]
    if isinstance(value, dict):
        return {_harmless(key): _harmless(item) for key, item in value.items()}
    return value


def _number(value: Any, otherwise: float) -> float:
    """Return a recorded number; `otherwise` replaces null, which stands for a number that is not finite."""
    return float(value) if metric_columns.number(value) and math.isfinite(value) else otherwise
