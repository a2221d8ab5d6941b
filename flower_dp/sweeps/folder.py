"""The folder of a sweep: its runs, the runs that remain, and the checks that refuse other runs."""

import csv
import os
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from flower_dp.core import checks
from flower_dp.running.launch_record import LaunchRecord
from flower_dp.running.run_folder import CHECKPOINT, CONFIG, METRICS, is_finished, write_whole
from flower_dp.sweeps.plan import SweepRun

FILE, RUNS, LOCK, RESULTS = "sweep.toml", "runs", "sweep.lock", "results.csv"
# Settings that do not change a run's results.
_FREE = ("output-dir", "resume")


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The folder of a sweep.

    Attributes:
        path: absolute path of the folder.
    """

    path: Path

    def of(self, run: SweepRun) -> Path:
        """Return the folder of a run."""
        return self.path / RUNS / run.name

    def runs(self) -> list[Path]:
        """Return the folders of all runs that have begun, planned or not."""
        return sorted(folder for folder in (self.path / RUNS).glob("*") if (folder / CONFIG).is_file())

    @contextmanager
    def locked(self) -> Iterator[Path]:
        """Lock the folder against other sweeps within this context; make it if it does not exist.

        A sweep that is refused (ValueError) before it began leaves no new folder.

        Yields:
            The lock's file. No other sweep begins here before every process with a shared lock on it has ended, too.

        Raises:
            ValueError: if another sweep holds the lock, or the folder holds something else.
        """
        import fcntl  # noqa: PLC0415 (Windows has none)

        new = not self.path.exists()
        self._make()
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                # First alone, then with the processes of its runs, which may outlive this one.
                for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path}: another sweep runs there, or is about to end; wait for it, or take another folder"
                ) from None
            try:
                yield self.path / LOCK
            except ValueError:
                if new and not (self.path / FILE).exists():
                    self._remove()
                raise
        finally:
            os.close(descriptor)

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = sorted(entry.name for entry in self.path.iterdir() if entry.name not in (LOCK, RUNS))
            if held and not (self.path / FILE).is_file():
                raise ValueError(
                    f"--output-dir={self.path}: already holds {held[0]}; must be new, empty, or the folder of a sweep"
                )
            (self.path / RUNS).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--output-dir={self.path}: can't be written: {error.strerror}; take another folder") from None

    def _remove(self) -> None:
        """Remove the folder, if it holds only what `_make` and the lock have put there."""
        with suppress(OSError):
            (self.path / RUNS).rmdir()
            (self.path / LOCK).unlink()
            self.path.rmdir()

    def check(self, runs: Sequence[SweepRun]) -> None:
        """Refuse runs that contradict the runs here, or whose checkpoints can't be read; new runs may be added.

        Raises:
            SettingsError: with one line for each contradiction.
        """
        errors = checks.ErrorCollector()
        planned = {run.name: run for run in runs}
        for folder in self.runs():
            if folder.name in planned:
                with errors.collect_errors():
                    self._check_same(folder, planned[folder.name])
                    if not is_finished(folder):
                        self._check_readable(folder)
            elif is_finished(folder):
                errors.errors.append(
                    ValueError(f"{folder}: was made with {_nearest(folder, runs)}; put that back, or take another folder")
                )
        errors.raise_if_any()

    def keep(self, file: Path) -> None:
        """Store a copy of the sweep's file here."""
        write_whole(self.path / FILE, file.read_bytes())

    def _check_same(self, folder: Path, run: SweepRun) -> None:
        """Refuse a run whose folder holds a run of other settings: the app has changed, or the number of nodes."""
        if differing := _differing(folder, run):
            key, before, now = differing[0]
            raise ValueError(f"{folder}: was made with {key}={before!r}, now {now!r}; take another folder")
        app = run.target.app
        if not (app.own or app.built) and (before := LaunchRecord.read(folder)).supernodes != run.launched.supernodes:
            raise ValueError(
                f"{folder}: was made with {before.supernodes} SuperNodes, now {run.launched.supernodes}; take another folder"
            )

    def _check_readable(self, folder: Path) -> None:
        """Refuse a run that only a damaged, newer or foreign checkpoint blocks: a new run would charge its clients again."""
        from flower_dp.strategies.checkpoint import CUSTOM_LOOP, CheckpointFolder  # noqa: PLC0415  (slow to import)

        if (blocker := CheckpointFolder(folder / CHECKPOINT).resume_blocker()) not in ("", CUSTOM_LOOP):
            anew = "then the run begins anew, and charges its clients again"
            raise ValueError(
                f"{folder}: can't be resumed: {blocker}; mend that, or rename the folder to {self._aside(folder).name}: {anew}"
            )

    def left(self, runs: Sequence[SweepRun]) -> list[tuple[SweepRun, Path, bool]]:
        """Return the unfinished runs, each with its folder, and whether it is resumed; new runs get a new folder."""
        from flower_dp.strategies.checkpoint import CheckpointFolder  # noqa: PLC0415  (slow to import)
        from flower_dp.sweeps.cost import has_charges  # noqa: PLC0415

        unfinished = []
        for run in runs:
            folder = self.of(run)
            if is_finished(folder):
                continue
            checkpoint = CheckpointFolder(folder / CHECKPOINT)
            resumed = not (checkpoint.is_empty or checkpoint.resume_blocker())
            if resumed:
                before = LaunchRecord.read(folder)
                run = replace(run, launched=replace(before, workers=run.launched.workers))  # noqa: PLW2901
            else:
                # A checkpoint of a custom loop may hold charges, and such a loop would begin anew.
                if has_charges(folder) or not checkpoint.is_empty:
                    folder.rename(self._aside(folder))
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700)
                run.launched.write(folder)
            unfinished.append((run, folder, resumed))
        return unfinished

    def _aside(self, folder: Path) -> Path:
        """Return a new folder for a run that can't be resumed: its charges stay in the sweep's statement."""
        names = (folder.with_name(f"{folder.name}-not-resumable-{number}") for number in count(1))
        return next(path for path in names if not path.exists())


def _differing(folder: Path, run: SweepRun) -> list[tuple[str, Any, Any]]:
    """Return the settings that have another value in a run's folder. A newer release may have more settings."""
    before, now = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")), run.config
    return [(key, value, now[key]) for key, value in before.items() if key in now and now[key] != value and key not in _FREE]


def _nearest(folder: Path, runs: Sequence[SweepRun]) -> str:
    """Return the settings in which a run differs from the planned run most like it."""
    differing = min((_differing(folder, run) for run in runs), key=len)
    return ", ".join(f"{key}={before!r} (now {now!r})" for key, before, now in differing) or "another app"


def _planned(path: Path) -> list[str]:
    """Return the names of a sweep's runs in the order of its file; none before the first run has begun."""
    try:
        with (path / RESULTS).open(encoding="utf-8", newline="") as file:
            return [Path(row["folder"]).name for row in csv.DictReader(file)]
    except (OSError, KeyError, UnicodeDecodeError):
        return []


def runs_in(folder: str) -> list[str]:
    """Return the run folders in a sweep's folder; return any other folder itself.

    Raises:
        ValueError: naming the folder, if no run in it has begun.
    """
    path = Path(folder).expanduser()
    if not ((path / FILE).is_file() and (path / RUNS).is_dir()):
        return [folder]
    begun = {run.name: str(run) for run in SweepFolder(path).runs() if (run / METRICS).is_file()}
    # Leave out runs of points that were taken out of the sweep's file.
    planned = [name for name in _planned(path) if name in begun]
    folders = [begun[name] for name in planned] or list(begun.values())
    if not folders:
        raise ValueError(f"{folder}: is the folder of a sweep without any run yet")
    return folders
