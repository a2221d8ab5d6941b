"""The drawn runs of a private selection, the mark of the choice, and the files of the chosen run that are shown.

No interruption changes the draw or the mark.
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
# Columns that are not shown: a run's own epsilons, which do not cover the choice, and its times.
_HIDDEN = ("epsilon", "seconds", "elapsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A drawn run: a candidate and a seed, under a random name that reveals neither."""

    name: str
    point: int
    seed: int


@dataclass(frozen=True, slots=True)
class SelectionMark:
    """The mark of a choice, one file: the choice is open, then made, and finally shown.

    Once the choice is made, nothing is drawn, run or compared again. Only this file decides that, not a statement, nor a folder
    that exists or was deleted.

    Attributes:
        path: path of the file.
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
        """Return the chosen run that is not yet shown; None if no run may be shown.

        Raises:
            ValueError: if the file is damaged.
        """
        best = self._content.get("best", "")
        chosen = [trial for trial in trials if trial.name == best]
        if best is not None and not chosen:
            raise ValueError(f"{self.path}: is damaged; the choice was made, and is not made again; take another folder")
        return chosen[0] if chosen else None

    def make(self, best: str | None) -> None:
        """Write that the choice was made; the mark is on disk when this returns."""
        self._write({"best": best})

    def show(self) -> None:
        """Write that the choice was shown; the file's content does not depend on the runs."""
        self._write({"shown": True})

    @property
    def _content(self) -> dict[str, Any]:
        return checks.json_object(str(self.path), self.path.read_bytes())

    def _write(self, content: dict[str, Any]) -> None:
        write_whole(self.path, (json.dumps(content) + "\n").encode())
        sync_folder(self.path.parent)


@dataclass(frozen=True, slots=True)
class SelectionTrials:
    """The folder of a choice that is not made yet: the drawn runs, and the marks of those that failed.

    Attributes:
        path: path of the folder.
    """

    path: Path

    @property
    def exists(self) -> bool:
        """Whether the runs were drawn."""
        return (self.path / _FILE).is_file()

    def draw(self, number: RunCountLaw, num_points: int) -> list[Trial]:
        """Draw the number of runs, and a point and a seed for each, with fresh entropy; store the draw before any run is made."""
        rng = noise_generator()
        trials = [
            Trial(name=secrets.token_hex(8), point=int(rng.integers(num_points)), seed=int(rng.integers(2**31)))
            for _ in range(number.sample(rng))
        ]
        (self.path / RUNS).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        drawn = [{"name": trial.name, "point": trial.point, "seed": trial.seed} for trial in trials]
        write_whole(self.path / _FILE, json.dumps(drawn).encode())
        return trials

    def trials(self) -> list[Trial]:
        """Return the drawn runs."""
        return [Trial(**fields) for fields in json.loads((self.path / _FILE).read_text(encoding="utf-8"))]

    def left(self, runs: Sequence[SweepRun]) -> list[tuple[SweepRun, Path, bool]]:
        """Return the runs that have neither finished nor failed, as `SweepFolder.left` does; all of them begin anew.

        A resumed run would show that it was interrupted, and so which one of the runs it is. Nobody sees what the deleted run has
        released.
        """
        left = [run for run in runs if not (self.failed(run.name) or is_finished(self.path / RUNS / run.name))]
        for run in left:
            shutil.rmtree(self.path / RUNS / run.name, ignore_errors=True)
        return SweepFolder(self.path).left(left)

    def ended(self, outcome: RunOutcome) -> None:
        """Mark a failed run, without a report: it is not tried again.

        Raises:
            LaunchError: if it failed before any client was asked to train: all runs end, and the same runs are made later.
        """
        folder = self.path / RUNS / outcome.run.name
        if outcome.status != "completed" and not has_charges(folder):
            raise LaunchError(f"a run failed before any client was asked to train: {outcome.details}")
        if outcome.status != "completed" or not is_finished(folder):
            write_whole(self.path / f"{outcome.run.name}.failed", b"")

    def failed(self, name: str) -> bool:
        """Return whether a run has failed."""
        return (self.path / f"{name}.failed").exists()


def publish(run: RunContents, statement: PrivacyStatement, folder: Path) -> None:
    """Copy what a run may show: not its log and its ledger, which have times, nor its own epsilons, which are too small."""
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
    """Give everything in a folder, except `but`, one time: the time of a run reveals how many runs came before and after it."""
    now = time.time()
    for path in [*folder.rglob("*"), folder]:
        if but not in path.relative_to(folder).parts[:1]:
            os.utime(path, (now, now))
