"""The folder of a sweep: its runs, what is left to do there, and what it must not be used for."""

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
# Settings that are not those of the runs' results.
_FREE = ("output-dir", "resume")


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The folder of a sweep.

    Attributes:
        path: of it; absolute.
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
        """Let no other process use the folder, within this context; the folder is made if it is not there.

        A sweep that is refused (ValueError) before it began leaves no new folder.

        Yields:
            The file of the lock: no other sweep begins here before all who have a shared lock on it have ended, too.

        Raises:
            ValueError: another one does, or the folder holds something else.
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
                raise ValueError(f"{self.path}: another sweep runs there, or is about to end") from None
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
                why = f"already holds {held[0]}; must be new, empty, or the folder of a sweep"
                raise ValueError(f"--output-dir={self.path}: {why}")
            (self.path / RUNS).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--output-dir={self.path}: can't be written: {error.strerror}; take another folder") from None

    def _remove(self) -> None:
        """Remove the folder, if nothing is in it but what `_make` and the lock have put there."""
        with suppress(OSError):
            (self.path / RUNS).rmdir()
            (self.path / LOCK).unlink()
            self.path.rmdir()

    def check(self, runs: Sequence[SweepRun]) -> None:
        """Refuse runs that contradict what was run here, or whose checkpoints can't be read; there may be more than before.

        Raises:
            SettingsError: with all that contradicts them, a line each.
        """
        findings = checks.ErrorCollector()
        planned = {run.name: run for run in runs}
        for folder in self.runs():
            if folder.name in planned:
                with findings.collect_errors():
                    self._check_same(folder, planned[folder.name])
                    if not is_finished(folder):
                        self._check_readable(folder)
            elif is_finished(folder):
                findings.errors.append(
                    ValueError(f"{folder}: was made with {_nearest(folder, runs)}: put that back, or take another folder")
                )
        findings.raise_if_any()

    def keep(self, file: Path) -> None:
        """Keep the sweep's file here."""
        write_whole(self.path / FILE, file.read_bytes())

    def _check_same(self, folder: Path, run: SweepRun) -> None:
        """Refuse a run whose folder has one with other settings: of an app that has changed, or with other nodes."""
        if differing := _differing(folder, run):
            key, before, now = differing[0]
            raise ValueError(f"{folder}: was made with {key}={before!r}, now {now!r}: take another folder")
        app = run.target.app
        if not (app.own or app.built) and (before := LaunchRecord.read(folder)).supernodes != run.launched.supernodes:
            raise ValueError(f"{folder}: was made with {before.supernodes} SuperNodes, now {run.launched.supernodes}")

    def _check_readable(self, folder: Path) -> None:
        """Refuse a run that only a damaged, newer or foreign checkpoint stops: made anew, it would charge its clients again."""
        from flower_dp.strategies.checkpoint import CUSTOM_LOOP, CheckpointFolder  # noqa: PLC0415  (slow to import)

        if (why := CheckpointFolder(folder / CHECKPOINT).resume_blocker()) not in ("", CUSTOM_LOOP):
            anew = "then the run begins anew, and charges its clients again"
            raise ValueError(
                f"{folder}: can't go on: {why}; mend that, or rename the folder to {self._aside(folder).name}: {anew}"
            )

    def left(self, runs: Sequence[SweepRun]) -> list[tuple[SweepRun, Path, bool]]:
        """Return the runs that have not finished, each with its folder, and whether it goes on; new ones get a new folder."""
        from flower_dp.strategies.checkpoint import CheckpointFolder  # noqa: PLC0415  (slow to import)
        from flower_dp.sweeps.cost import has_charges  # noqa: PLC0415

        found = []
        for run in runs:
            folder = self.of(run)
            if is_finished(folder):
                continue
            kept = CheckpointFolder(folder / CHECKPOINT)
            goes_on = not (kept.is_empty or kept.resume_blocker())
            if goes_on:
                before = LaunchRecord.read(folder)
                run = replace(run, launched=replace(before, workers=run.launched.workers))  # noqa: PLW2901
            else:
                if has_charges(folder) or not kept.is_empty:  # of a loop of its own, which would begin anew
                    folder.rename(self._aside(folder))
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700)
                run.launched.write(folder)
            found.append((run, folder, goes_on))
        return found

    def _aside(self, folder: Path) -> Path:
        """Return a new place for a run that can't go on: its charges stay in the sweep's statement."""
        places = (folder.with_name(f"{folder.name}-can-not-go-on-{number}") for number in count(1))
        return next(place for place in places if not place.exists())


def _differing(folder: Path, run: SweepRun) -> list[tuple[str, Any, Any]]:
    """Return what has another value now than in a run's folder; a newer release may have more settings."""
    before, now = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")), run.config
    return [(key, value, now[key]) for key, value in before.items() if key in now and now[key] != value and key not in _FREE]


def _nearest(folder: Path, runs: Sequence[SweepRun]) -> str:
    """Return in what a run differs from that of the plan that is most like it."""
    differing = min((_differing(folder, run) for run in runs), key=len)
    return ", ".join(f"{key}={before!r} (now {now!r})" for key, before, now in differing) or "another app"


def _planned(path: Path) -> list[str]:
    """Return the names of a sweep's runs in the order of its file; none before the first of them has begun."""
    try:
        with (path / RESULTS).open(encoding="utf-8", newline="") as file:
            return [Path(row["folder"]).name for row in csv.DictReader(file)]
    except (OSError, KeyError, UnicodeDecodeError):
        return []


def runs_in(folder: str) -> list[str]:
    """Return the run folders in the folder of a sweep, in place of any other folder the folder itself.

    Raises:
        ValueError: naming the folder, if no run in it has begun.
    """
    path = Path(folder).expanduser()
    if not ((path / FILE).is_file() and (path / RUNS).is_dir()):
        return [folder]
    begun = {one.name: str(one) for one in SweepFolder(path).runs() if (one / METRICS).is_file()}
    # As the sweep's file has them now: not those of points that were taken out of it.
    planned = [name for name in _planned(path) if name in begun]
    found = [begun[name] for name in planned] or list(begun.values())
    if not found:
        raise ValueError(f"{folder}: is the folder of a sweep without any run yet")
    return found
