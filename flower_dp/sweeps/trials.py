"""The runs that were drawn for a choice by private results, the mark of the choice, and what is shown of the chosen run.

No interruption changes what was drawn, nor the mark.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_dp.core import checks
from flower_dp.core.noise import noise_generator
from flower_dp.privacy.private_file import sync_folder
from flower_dp.privacy.selection import RunCountLaw
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.reporting.past_run import RunContents
from flower_dp.running.run_folder import CONFIG, METRICS, MODEL, MODEL_JSON, RunFolder, is_finished, write_whole
from flower_dp.sweeps.cost import has_charges
from flower_dp.sweeps.folder import RUNS, SweepFolder
from flower_dp.sweeps.plan import SweepRun
from flower_dp.sweeps.pool import LaunchError, RunOutcome

_FILE = "drawn.json"
MARK = "choice.json"
# A run's own epsilons, which don't count the choice, and its times.
_HIDDEN = ("epsilon", "seconds", "elapsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run that was drawn: a candidate and a seed, and a name that says neither."""

    name: str
    point: int
    seed: int


@dataclass(frozen=True, slots=True)
class SelectionMark:
    """The mark of a choice, one file: the choice is open, then made, and in the end shown.

    From the moment it is made nothing is drawn, run or compared again. Only this file says so: a statement, a folder that is
    there, or one that was deleted says nothing.

    Attributes:
        path: of the file.
    """

    path: Path

    @property
    def is_open(self) -> bool:
        """Whether no choice was made."""
        return not os.path.lexists(self.path)

    @property
    def is_shown(self) -> bool:
        """Whether the choice was shown as a whole."""
        return not self.is_open and self._content.get("shown") is True

    def among(self, trials: Sequence[Trial]) -> Trial | None:
        """Return the run that was chosen and is not yet shown; None: no run may be shown.

        Raises:
            ValueError: if the file is damaged.
        """
        best = self._content.get("best", "")
        found = [trial for trial in trials if trial.name == best]
        if best is not None and not found:
            raise ValueError(f"{self.path}: is damaged; the choice was made, and is not made again: take another folder")
        return found[0] if found else None

    def make(self, best: str | None) -> None:
        """Write that the choice was made; it is on the disk when this returns."""
        self._write({"best": best})

    def show(self) -> None:
        """Write that the choice was shown; nothing in the file depends on the runs."""
        self._write({"shown": True})

    @property
    def _content(self) -> dict[str, Any]:
        return checks.json_object(str(self.path), self.path.read_bytes())

    def _write(self, content: dict[str, Any]) -> None:
        write_whole(self.path, (json.dumps(content) + "\n").encode())
        sync_folder(self.path.parent)


@dataclass(frozen=True, slots=True)
class SelectionTrials:
    """The folder of a choice that is not made yet: the runs that were drawn, and which of them have failed.

    Attributes:
        path: of the folder.
    """

    path: Path

    @property
    def exists(self) -> bool:
        """Whether the runs were drawn."""
        return (self.path / _FILE).is_file()

    def draw(self, number: RunCountLaw, num_points: int) -> list[Trial]:
        """Draw the number of runs, and a point and a seed of each, with fresh entropy, and keep them before a run is made."""
        rng = noise_generator()
        trials = [
            Trial(name=secrets.token_hex(8), point=int(rng.integers(num_points)), seed=int(rng.integers(2**31)))
            for _ in range(number.sample(rng))
        ]
        (self.path / RUNS).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        drawn = [{"name": one.name, "point": one.point, "seed": one.seed} for one in trials]
        write_whole(self.path / _FILE, json.dumps(drawn).encode())
        return trials

    def trials(self) -> list[Trial]:
        """Return what was drawn."""
        return [Trial(**one) for one in json.loads((self.path / _FILE).read_text(encoding="utf-8"))]

    def left(self, runs: Sequence[SweepRun]) -> list[tuple[SweepRun, Path, bool]]:
        """Return the runs that have neither finished nor failed, as `SweepFolder.left` does; all of them begin anew.

        A run that went on would show that it was interrupted, and so which one of them it was. Nobody sees what it has released.
        """
        left = [run for run in runs if not (self.failed(run.name) or is_finished(self.path / RUNS / run.name))]
        for run in left:
            shutil.rmtree(self.path / RUNS / run.name, ignore_errors=True)
        return SweepFolder(self.path).left(left)

    def ended(self, ended: RunOutcome) -> None:
        """Keep it if a run has failed: it is not tried again. Nobody is told.

        Raises:
            LaunchError: it has failed before any client was asked to train: all runs end, and the same ones are made later.
        """
        folder = self.path / RUNS / ended.run.name
        if ended.status != "completed" and not has_charges(folder):
            raise LaunchError(f"a run failed before any client was asked to train: {ended.details}")
        if ended.status != "completed" or not is_finished(folder):
            write_whole(self.path / f"{ended.run.name}.failed", b"")

    def failed(self, name: str) -> bool:
        """Return whether a run has failed."""
        return (self.path / f"{name}.failed").exists()


def publish(run: RunContents, statement: PrivacyStatement, folder: Path) -> None:
    """Copy what a run may show: neither its log nor its ledger, which have times; nor its own epsilons, which are too small."""
    folder.mkdir(mode=0o700, parents=True)
    for name in (MODEL, MODEL_JSON):
        if (run.folder / name).is_file():
            shutil.copyfile(run.folder / name, folder / name)
    rows = [{key: value for key, value in row.items() if key not in _HIDDEN} for row in run.rows]
    write_whole(folder / METRICS, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
    lines = (run.folder / CONFIG).read_text(encoding="utf-8").splitlines(keepends=True)
    write_whole(folder / CONFIG, "".join(line for line in lines if str(run.folder) not in line).encode())
    RunFolder(folder).state(statement.to_dict(), str(statement))


def equalize_mtimes(folder: Path, but: str) -> None:
    """Give all in a folder one time, except what is in `but`: when a run was made tells how many came before and after it."""
    now = time.time()
    for place in [*folder.rglob("*"), folder]:
        if but not in place.relative_to(folder).parts[:1]:
            os.utime(place, (now, now))
